"""`append_kv` and `rope_append`: the contracts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack, overload

import jax

from jax_kvblock.append import arguments, primitive
from jax_kvblock.append.scales import KVScales
from jax_kvblock.blocks.implementations import check_implementation
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.blocks.transfer import (
    LayerPart,
    append_copies,
    layer_part,
    look_at_slots,
)
from jax_kvblock.core import checks
from jax_kvblock.core.types import ArrayIn, Integers, LayerIndex

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

    Scale: TypeAlias = float | Float[ArrayIn, ""] | Float[ArrayIn, " nh"] | None
    Weight: TypeAlias = Float[ArrayIn, " D"] | None


class AppendOptions(TypedDict, total=False):
    """What `append_kv` takes by name, but for `scales`."""

    k_scale: Scale
    v_scale: Scale
    zero_tail: bool
    implementation: str | None


@overload
def append_kv(
    pool: KVPool,
    layer: LayerIndex | None,
    k: Shaped[ArrayIn, "*nl tokens nh hd"],
    v: Shaped[ArrayIn, "*nl tokens nh hd"] | None,
    slots: Integers,
    *,
    scales: None = ...,
    **options: Unpack[AppendOptions],
) -> KVPool: ...
@overload
def append_kv(
    pool: KVPool,
    layer: LayerIndex | None,
    k: Shaped[ArrayIn, "*nl tokens nh hd"],
    v: Shaped[ArrayIn, "*nl tokens nh hd"] | None,
    slots: Integers,
    *,
    scales: KVScales,
    **options: Unpack[AppendOptions],
) -> tuple[KVPool, KVScales]: ...
def append_kv(
    pool: KVPool,
    layer: LayerIndex | None,
    k: Shaped[ArrayIn, "*nl tokens nh hd"],
    v: Shaped[ArrayIn, "*nl tokens nh hd"] | None,
    slots: Integers,
    *,
    scales: KVScales | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    zero_tail: bool = False,
    implementation: str | None = None,
) -> KVPool | tuple[KVPool, KVScales]:
    """Writes the keys and values of new tokens into their slots; in place when donated.

    Into a pool of float8_e4m3fn, float8_e5m2 or int8 it quantizes on the way: stored =
    x / scale in float32, rounded to nearest even, and at most the dtype's largest
    number. The scales are given, or computed for each token and head and kept in
    `scales`; attention multiplies by them again.

    Args:
      pool: on the device or, for copies alone, in pinned host memory.
      layer: an integer, or a traced integer scalar (as inside `lax.scan` over layers);
        None for all layers in one call, as after a prefill.
      k, v: `[tokens, nh, hd]`, `[nl, tokens, nh, hd]` for all layers; of the pool's
        dtype, or with scales bfloat16, float16 or float32. v is None when num_outer
        is 1.
      slots: integers `[tokens]`, block · block_size + offset; −1 is dropped. Slots must
        not repeat.
      scales: where the scale of each token and head is stored, updated in place when
        donated: the largest |x| of the head's row by 448, 57344 or 127.
      k_scale, v_scale: scales that are given, a number, float32 `[]` or `[nh]`.
      zero_tail: in a block whose first slot is written, slots that this call does not
        write become zeros, and their scales.
      implementation: "kernel", "xla" or None, which takes the kernel; what quantizes or
        clears has one on NVIDIA GPUs alone.

    Returns:
      The new pool; with `scales` the pair of it and the new scales. A traced layer
      outside the pool writes nothing.

    Raises:
      IndexError: for a layer outside the pool that is not traced.
      TypeError, ValueError: for a wrong pool, layer, k, v, slots or scale.

    Copies have derivatives; what quantizes or clears has none.

    Example:
      >>> pool = append_kv(pool, None, k, v, range(48, 48 + k.shape[1]))  # from block 3
      >>> pool, scales = append_kv(pool, layer, k, v, slots, scales=scales)  # fp8
    """
    where = "append_kv"
    zero_tail = arguments.check_flag(where, "zero_tail", zero_tail)
    if scales is None and k_scale is None and v_scale is None and not zero_tail:
        return append_copies(
            where, pool, layer, k, v, slots, implementation=implementation
        )
    check_implementation(where, implementation)
    pool = arguments.check_append_pool(where, pool)
    computed = not (scales is None and k_scale is None and v_scale is None)
    operands = arguments.check_tokens(
        where, pool, k, v, slots, all_layers=layer is None, computed=computed
    )
    operands |= arguments.check_storing(
        where, pool, operands["k"], k_scale, v_scale, scales
    )
    _, pool, scales = _append(
        where,
        pool,
        layer,
        operands,
        zero_tail=zero_tail,
        implementation="cuda" if implementation == "kernel" else implementation,
    )
    return pool if scales is None else (pool, scales)


class RopeOptions(TypedDict, total=False):
    """What `rope_append` takes by name, but for `scales`."""

    theta: float | None
    inv_freq: Float[ArrayIn, " half"] | None
    cos_sin: Float[ArrayIn, "rows rotary_dim"] | None
    interleaved: bool
    rotary_dim: int | None
    q_norm: Weight
    k_norm: Weight
    norm_eps: float
    k_scale: Scale
    v_scale: Scale
    zero_tail: bool
    implementation: str | None


@overload
def rope_append(
    q: Float[ArrayIn, "tokens N D"],
    k: Float[ArrayIn, "tokens K D"],
    v: Float[ArrayIn, "tokens K D"],
    pool: KVPool,
    layer: LayerIndex,
    slots: Integers,
    positions: Integers | None,
    *,
    scales: None = ...,
    **options: Unpack[RopeOptions],
) -> tuple[jax.Array, KVPool]: ...
@overload
def rope_append(
    q: Float[ArrayIn, "tokens N D"],
    k: Float[ArrayIn, "tokens K D"],
    v: Float[ArrayIn, "tokens K D"],
    pool: KVPool,
    layer: LayerIndex,
    slots: Integers,
    positions: Integers | None,
    *,
    scales: KVScales,
    **options: Unpack[RopeOptions],
) -> tuple[jax.Array, KVPool, KVScales]: ...
@overload
def rope_append(
    q: Float[ArrayIn, "tokens heads D"],
    k: None,
    v: None,
    pool: KVPool,
    layer: LayerIndex,
    slots: Integers,
    positions: Integers | None,
    *,
    scales: None = ...,
    **options: Unpack[RopeOptions],
) -> tuple[jax.Array, KVPool]: ...
@overload
def rope_append(
    q: Float[ArrayIn, "tokens heads D"],
    k: None,
    v: None,
    pool: KVPool,
    layer: LayerIndex,
    slots: Integers,
    positions: Integers | None,
    *,
    scales: KVScales,
    **options: Unpack[RopeOptions],
) -> tuple[jax.Array, KVPool, KVScales]: ...
def rope_append(
    q: Float[ArrayIn, "tokens heads D"],
    k: Float[ArrayIn, "tokens K D"] | None,
    v: Float[ArrayIn, "tokens K D"] | None,
    pool: KVPool,
    layer: LayerIndex,
    slots: Integers,
    positions: Integers | None,
    *,
    scales: KVScales | None = None,
    theta: float | None = None,
    inv_freq: Float[ArrayIn, " half"] | None = None,
    cos_sin: Float[ArrayIn, "rows rotary_dim"] | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    q_norm: Weight = None,
    k_norm: Weight = None,
    norm_eps: float = 1e-6,
    k_scale: Scale = None,
    v_scale: Scale = None,
    zero_tail: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, KVPool] | tuple[jax.Array, KVPool, KVScales]:
    """Norms, rotates, quantizes and appends in one pass, between projection and
    attention; the pool is updated in place when donated.

    For each token and head, in float32: y = x / sqrt(mean(x²) + norm_eps) · weight (the
    QK norms, where given); then the pairs of the first `rotary_dim` elements turn by
    position · frequency: (a, b) to (a cos − b sin, b cos + a sin) (rotary embeddings,
    Su et al., 2021). q comes back; k, and v as it is, go into the pool as `append_kv`
    writes them. k is rounded once, when it is stored.

    Args:
      q: `[tokens, N, D]`, N a multiple of K; bfloat16, float16 or float32.
      k, v: `[tokens, K, D]` in q's dtype; K and D are the pool's. Or both are None, and
        q is `[tokens, N + 2 K, D]`: queries, then keys, then values, as one projection
        makes them. The kernel reads them where they lie; slices of that projection
        are copied ahead of it, as they are where XLA cuts the program over devices. In
        a `shard_map` they are the device's own queries, keys and values.
      pool: a `KVPool` of keys and values on the device, in any layout; of q's dtype, or
        of 8 bits, with scales.
      layer: an integer, or a traced integer scalar.
      slots: integers `[tokens]`, block · block_size + offset; −1 writes nothing, its q
        is rotated all the same. Slots must not repeat.
      positions: integers `[tokens]`, each token's place in its sequence. None with
        `cos_sin` means that its row i is token i's.
      scales, k_scale, v_scale, zero_tail: as in `append_kv`.
      theta: the frequencies are theta ** (−2 i / rotary_dim).
      inv_freq: or these, float32 `[rotary_dim / 2]`. Angles are those of float64 up to
        1e-6, at positions up to 2**20 and far beyond.
      cos_sin: or cosines and sines, float32 `[rows, rotary_dim]`: row p has those of
        position p, first all cosines. Positions beyond the rows take the nearest.
      interleaved: pairs are neighbours, elements 2 i and 2 i + 1 (as GPT-J has them);
        else elements i and i + rotary_dim / 2 (as GPT-NeoX and Llama have them).
      rotary_dim: how many elements turn, the first of each head; D unless `inv_freq` or
        `cos_sin` tell. 0, without any of these, turns nothing.
      q_norm, k_norm: weights `[D]` of RMS norms over each head, in any float dtype.
      norm_eps: their epsilon.
      implementation: "cuda", "xla" (plain JAX, everywhere), or None: the kernel on
        NVIDIA GPUs.

    Returns:
      q `[tokens, N, D]`, rotated, in its dtype, and the new pool; with `scales` these,
      too. A traced layer outside the pool writes nothing.

    Raises:
      IndexError: for a layer outside the pool that is not traced.
      TypeError, ValueError: an argument's dtype, shape or value does not fit.

    It has no derivative.

    Example:
      >>> q, pool = rope_append(q, k, v, pool, layer, slots, positions, theta=1e4)
      >>> q, pool = rope_append(qkv, None, None, pool, layer, slots, at, theta=1e4)
      >>> out = paged_attention(q, pool, layer, tables, lens, query_start=starts)
    """
    where = "rope_append"
    implementation = arguments.check_implementation(where, implementation)
    pool = arguments.check_append_pool(where, pool)
    if pool.spec.num_outer != 2:
        raise ValueError(
            f"{where}: the pool must hold keys and values, num_outer=2, got num_outer="
            f"{pool.spec.num_outer}; append_kv takes what is combined"
        )
    if layer is None:
        raise TypeError(
            f"{where}: layer must be an integer or an int32 scalar, got None; "
            "append_kv writes all layers"
        )
    if k is None:
        operands = arguments.check_joined(where, pool, q, v, slots)
        stored = operands["qkv"]
    else:
        operands = arguments.check_tokens(where, pool, k, v, slots)
        stored = operands["k"]
        operands["q"] = arguments.check_queries(where, q, stored)
    tokens, _, head_dim = stored.shape
    operands |= arguments.check_storing(
        where, pool, stored, k_scale, v_scale, scales, "q" if k is None else "k"
    )
    angles, rotary_dim = arguments.check_rotation(
        where, tokens, head_dim, positions, theta, inv_freq, cos_sin, rotary_dim
    )
    norms, norm_eps = arguments.check_norms(
        where, head_dim, norm_eps, q_norm=q_norm, k_norm=k_norm
    )
    rotated, pool, scales = _append(
        where,
        pool,
        layer,
        operands | angles | norms,
        rotary_dim=rotary_dim,
        interleaved=arguments.check_flag(where, "interleaved", interleaved),
        norm_eps=norm_eps,
        zero_tail=arguments.check_flag(where, "zero_tail", zero_tail),
        implementation=implementation,
    )
    return (rotated, pool) if scales is None else (rotated, pool, scales)


def _append(
    where: str, pool: KVPool, layer: Any, operands: dict[str, Any], **static: Any
) -> tuple[Any, KVPool, KVScales | None]:
    """q or None, the pool, and scales where they are computed."""
    part: LayerPart = layer_part(where, pool, layer, ("B", "T"))
    scales = operands.get("k_scales")
    if scales is not None and scales.ndim == 3 and layer is None:
        raise ValueError(
            f"{where}: scales must be those of all layers where all are written, got "
            f"{checks.show(scales)}"
        )
    look_at_slots(where, pool, operands["slots"], part.start)
    made = primitive.append(
        operands | {"pool": list(part.arrays), "layer": part.start},
        name=where,
        pool=part.side,
        num_layers=pool.spec.num_layers,
        layer=part.number or 0,
        all_layers=layer is None,
        **static,
    )
    kept = None
    if scales is not None:
        kept = KVScales.tree_unflatten(None, (made["k_scales"], made.get("v_scales")))
    return made.get("q"), part.updated(pool, made["pool"]), kept
