"""Queries, keys and values in 8 bits, with their scales."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_kvblock.attention import AttentionScales
from jax_kvblock.attention.arguments import check_lengths
from jax_kvblock.attention.qkv import BATCHED, check_qkv
from jax_kvblock.core.checks import check_choice
from jax_kvblock.core.spmd import reshard
from jax_kvblock.core.types import ArrayIn, Integers
from jax_kvblock.fp8 import plain, primitive
from jax_kvblock.fp8.call import Quantize, Way
from jax_kvblock.fp8.config import FP8AttentionConfig
from jax_kvblock.fp8.partition import array_spec, operand_factors, shards_of

if TYPE_CHECKING:
    from jaxtyping import Float, Int8

IMPLEMENTATIONS = ("cuda", "xla", None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedQKV:
    """What `flash_attention(q, k, v, scales=scales)` takes, for these arrays.

    Attributes:
      q, k, v: `float8_e4m3fn`, or q and k int8, in the shapes of the arrays.
      scales: float32, `AttentionScales`.
      shift: float32 `[B, T, N]`: scale-free products of the queries with the mean that
        was taken from the keys, or None. `scale * shift` is what the log-sum-exp of
        `q`, `k` lacks. Computed where it is used, under jit.
    """

    q: Float[jax.Array, "B T N D"] | Int8[jax.Array, "B T N D"]
    k: Float[jax.Array, "B S K D"] | Int8[jax.Array, "B S K D"]
    v: Float[jax.Array, "B S K Dv"]
    scales: AttentionScales
    shift: Float[jax.Array, "B T N"] | None


def quantize_qkv(
    q: Float[ArrayIn, "B T N D"],
    k: Float[ArrayIn, "B S K D"],
    v: Float[ArrayIn, "B S K Dv"],
    config: FP8AttentionConfig | None = None,
    *,
    q_lens: Integers | None = None,
    kv_lens: Integers | None = None,
    implementation: str | None = None,
) -> QuantizedQKV:
    """q, k and v in 8 bits, and their scales; works under jit, vmap and sharding.

    Numbers are divided by their scale (for int8, multiplied by its reciprocal) and
    rounded to nearest, ties to even.

    Args:
      q, k, v: `[B, T, N, D]`, `[B, S, K, D]`, `[B, S, K, Dv]`, one of bfloat16, float16
        and float32.
      config: which numbers share a scale, and what queries and keys become;
        `FP8AttentionConfig()` unless given.
      q_lens, kv_lens: int32 `[B]`. Rows beyond may hold anything: they count for no
        scale and no mean, and become zeros.
      implementation: "cuda" (NVIDIA GPUs of 8.0 and newer; bfloat16 and float16, head
        dims that are multiples of 16 up to 128), "xla", or None: the kernels where they
        serve the call, else plain JAX.

    Returns:
      A `QuantizedQKV`.

    Raises:
      TypeError, ValueError: a shape, a dtype or the config does not fit.

    Example:
      >>> x = quantize_qkv(q, k, v)
      >>> out = flash_attention(x.q, x.k, x.v, scales=x.scales, causal=True)
    """
    where = "quantize_qkv"
    checked = check_qkv(where, BATCHED, q, k, v)
    if config is None:
        config = FP8AttentionConfig()
    if not isinstance(config, FP8AttentionConfig):
        raise TypeError(
            f"{where}: config must be an FP8AttentionConfig, got "
            f"{type(config).__name__}; lengths go by name"
        )
    arrays = [jnp.asarray(x) for x in checked]
    batch = arrays[0].shape[0]
    lens = (
        check_lengths(where, "q_lens", q_lens, batch),
        check_lengths(where, "kv_lens", kv_lens, batch),
    )
    check_choice(where, "implementation", implementation, IMPLEMENTATIONS)
    return _quantize(config, implementation, *arrays, *lens)


# One program, also outside of jit.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _quantize(
    config: FP8AttentionConfig,
    implementation: str | None,
    q: Any,
    k: Any,
    v: Any,
    q_lens: Any,
    kv_lens: Any,
) -> QuantizedQKV:
    lens = [x for x in (q_lens, kv_lens) if x is not None]
    of_q = None if q_lens is None else 0
    of_kv = None if kv_lens is None else len(lens) - 1
    smooth = config.smooth_keys
    both: dict[str, Any] = {
        "turned": config.rotate,
        "integers": config.qk_dtype == "int8",
    }
    ways = (
        Way(config.queries, lengths=of_q, **both),
        Way(config.keys, centred=smooth, lengths=of_kv, **both),
        Way(config.values, lengths=of_kv),
    )
    call = Quantize("quantize_qkv", ways, implementation)
    operands = [q, k, v, *lens]
    cuts = _cuts(call, operands)
    # By name plain JAX comes without a primitive: its own derivatives and partitions.
    run = functools.partial(_plain, cuts=cuts)
    made = (run if implementation == "xla" else primitive.quantize)(call, operands)
    q8, k8, v8 = (reshard(x, cut) for (x, *_), cut in zip(made, cuts, strict=False))
    (_, q_scales), (_, k_scales, *mean), (_, v_scales) = made
    shift = None
    if mean:
        shift = _shift(plain.real_rows(reshard(q, cuts[0]), q_lens), mean[0])
    scales = AttentionScales(q_scales, k_scales, v_scales)
    return QuantizedQKV(q8, k8, v8, scales, shift)


def _cuts(call: Quantize, operands: Sequence[Any]) -> list[PartitionSpec]:
    """How operands are cut on an explicit mesh, and their codes: rows are whole.

    Heads stay cut, those that share a scale as well: attention asks for a part of them
    on each device, whatever their scale is.
    """
    ways = tuple(dataclasses.replace(way, shared="head") for way in call.ways)
    each = dataclasses.replace(call, ways=ways)
    shards = shards_of(each, [jax.typeof(x) for x in operands])
    return [array_spec(factors, shards) for factors in operand_factors(each, operands)]


def _plain(
    call: Quantize, operands: Sequence[Any], cuts: Sequence[PartitionSpec]
) -> list[list[Any]]:
    cut = [reshard(x, spec) for x, spec in zip(operands, cuts, strict=True)]
    return list(call.split(plain.quantize(call, *cut)))


def _cut_as(mean: jax.Array, split: jax.Array) -> jax.Array:
    """On an explicit mesh the mean is cut as the queries are, by members and heads.

    Where all heads share a scale it comes whole out of the primitive.
    """
    batch, _, heads, *_ = jax.typeof(split).sharding.spec
    return reshard(mean, PartitionSpec(batch, heads, None))


def _shift(q: jax.Array, mean: jax.Array) -> jax.Array:
    """The products of queries with what was taken from their keys."""
    group = q.shape[2] // mean.shape[1]
    split = q.reshape(*q.shape[:2], mean.shape[1], group, q.shape[3])
    mean = _cut_as(mean, split)
    made = jnp.einsum(
        "btkgd,bkd->btkg",
        split.astype(jnp.float32),
        mean,
        precision=jax.lax.Precision.HIGHEST,
    )
    return made.reshape(q.shape[:3])
