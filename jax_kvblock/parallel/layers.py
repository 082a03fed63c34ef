"""Attention layers by patterns, on one device or over a mesh.

A layer is a pytree of weights that is called. Its attention runs inside a
`jax.shard_map` of its own, so that it takes whole arrays, cut or not, under plain jit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_kvblock.attention import dropout
from jax_kvblock.attention.flash import flash_attention
from jax_kvblock.attention.options import SeedLike
from jax_kvblock.core.checks import (
    as_array,
    check_positive,
    show,
)
from jax_kvblock.core.spmd import reshard
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.parallel.context import attend_as
from jax_kvblock.parallel.layer_config import AttentionConfig, AttentionPatterns
from jax_kvblock.parallel.layer_mesh import (
    check_cuts,
    devices_of,
    mesh_of,
    on_mesh,
    size_of,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

    Devices: TypeAlias = Mesh | Sequence[jax.Device] | jax.Device
    Axes: TypeAlias = str | tuple[str, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # `jax.jit(layer)` hashes it
class Attention:
    """Self-attention: a projection to queries, keys and values, attention, and back.

    A pytree of its two weights; `create_attention` makes one.

    Attributes:
      qkv: `[d_model, (N + 2 K) D]`: queries, keys and values side by side.
      out: `[N D, d_model]`.
      config: what it is.
      mesh: the devices, or None for patterns that need none.
    """

    qkv: jax.Array
    out: jax.Array
    config: AttentionConfig = dataclasses.field(metadata={"static": True})
    mesh: Mesh | None = dataclasses.field(default=None, metadata={"static": True})

    def __call__(
        self,
        hidden_states: Float[ArrayIn, "B S d_model"],
        attention_mask: Shaped[ArrayIn, "B S"] | None = None,
        dropout_seed: SeedLike = None,
    ) -> Float[jax.Array, "B S d_model"]:
        """Attends.

        Args:
          hidden_states: `[B, S, d_model]`, floats; whole, or cut over the mesh.
          attention_mask: bools or integers `[B, S]`; a key where it is False (0) is
            seen by nobody. A row that sees no key gives zeros.
          dropout_seed: which probabilities config.dropout makes 0, as in
            `flash_attention`, another one for each layer and step: a key of
            `jax.random`, say. None drops nothing, as where a model is evaluated.

        Returns:
          `[B, S, d_model]` in the dtype of hidden_states.

        Raises:
          TypeError, ValueError: shapes or dtypes do not fit; S is too long; S, the
            batch or the heads are no multiple of what the mesh cuts them into; an
            array lies on other devices than the mesh's.
        """
        config, where = self.config, type(self).__name__
        x = as_array(where, "hidden_states", hidden_states)
        if x.ndim != 3 or x.shape[-1] != config.d_model:
            raise ValueError(
                f"{where}: hidden_states must be [B, S, {config.d_model}], got "
                f"{show(x)}; add a batch axis with x[None], or make the layer with "
                "another d_model"
            )
        most = config.max_sequence_length
        if most is not None and x.shape[1] > most:
            raise ValueError(
                f"{where}: sequences must not be longer than max_sequence_length = "
                f"{most}, got {x.shape[1]}; make the layer with a larger one"
            )
        mask = _checked_mask(where, attention_mask, x)
        if self.mesh is not None:
            drops = dropout_seed is not None and config.dropout > 0
            check_cuts(where, config, self.mesh, x, drops)
            rows = NamedSharding(self.mesh, _rows(config))
            x = on_mesh(where, "hidden_states", hidden_states, x, rows)
            if mask is not None:
                mask = on_mesh(where, "attention_mask", attention_mask, mask, rows)
        if mask is not None:
            mask = (mask != 0).astype(jnp.int32)
        wide = jnp.matmul(x.astype(config.dtype), self.qkv)
        n, k, d = config.num_heads, config.kv_heads, config.head_dim
        wide = wide.reshape(*x.shape[:2], n + 2 * k, d)
        q, keys, values = jnp.split(wide, (n, n + k), axis=2)
        o = _attend(config, self.mesh, q, keys, values, mask, dropout_seed)
        o = o.reshape(*x.shape[:2], n * d)
        return jnp.matmul(o, self.out).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RingAttentionLayer(Attention):
    """`Attention` whose keys and values go round a ring of devices.

    Memory is O(S / n) on each of n devices.
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ContextParallelAttention(Attention):
    """`Attention` over a sequence that is cut over a mesh axis, by any strategy."""


_CLASSES: dict[AttentionPatterns, type[Attention]] = {
    AttentionPatterns.RING: RingAttentionLayer,
    AttentionPatterns.CONTEXT_PARALLEL: ContextParallelAttention,
}


def create_attention(
    config: AttentionConfig,
    mesh: Devices | None = None,
    *,
    key: jax.Array | None = None,
) -> Attention:
    """An attention layer with fresh weights.

    Args:
      config: what it is.
      mesh: of RING and CONTEXT_PARALLEL, a `jax.sharding.Mesh` with config.axis_name,
        or devices; all there are unless given. The other patterns have none.
      key: for the weights, `jax.random.key(0)` unless given.

    Returns:
      A `RingAttentionLayer`, a `ContextParallelAttention` or an `Attention`.

    Raises:
      TypeError, ValueError: the mesh has not the config's axes, or is no mesh; a mesh
        or an option of one is given for a pattern that has none.

    Example:
      >>> config = AttentionConfig(512, 8, pattern=AttentionPatterns.CAUSAL)
      >>> create_attention(config)(jnp.ones((2, 128, 512))).shape
      (2, 128, 512)
    """
    return _create("create_attention", "mesh", config, mesh, key)


def _create(
    where: str, name: str, config: Any, mesh: Any, key: jax.Array | None
) -> Attention:
    """name: what `where` calls its mesh."""
    if not isinstance(config, AttentionConfig):
        raise TypeError(
            f"{where}: config must be an AttentionConfig, got {type(config).__name__}; "
            "create_attention(AttentionConfig(d_model, num_heads)), say"
        )
    found = mesh_of(where, name, config, mesh)
    n, k, d = config.num_heads, config.kv_heads, config.head_dim
    keys = jax.random.split(jax.random.key(0) if key is None else key)
    init = jax.nn.initializers.lecun_normal()
    weights = [
        init(keys[0], (config.d_model, (n + 2 * k) * d), config.dtype),
        init(keys[1], (n * d, config.d_model), config.dtype),
    ]
    if found is not None:
        whole = NamedSharding(found, PartitionSpec())
        weights = [_everywhere(w, whole) for w in weights]
    layer = _CLASSES.get(config.pattern, Attention)
    return layer(weights[0], weights[1], config, found)


def _everywhere(w: jax.Array, whole: NamedSharding) -> jax.Array:
    """On every device of the mesh, which may be other processes', too.

    These have drawn the same: no collective compares them, as `device_put` would by the
    devices of the default platform, whatever those of the mesh are.
    """
    if whole.is_fully_addressable:
        return jax.device_put(w, whole)
    host = np.asarray(w)
    return jax.make_array_from_callback(host.shape, whole, lambda at: host[at])


def create_ring_attention(
    d_model: int,
    num_heads: int,
    max_sequence_length: int = 1_000_000,
    device: Devices | None = None,
    *,
    key: jax.Array | None = None,
    **options: Any,
) -> RingAttentionLayer:
    """A layer whose sequences are cut over devices, for a million tokens and more.

    Args:
      d_model, num_heads: the width, and the heads, which divide it.
      max_sequence_length: longer sequences are an error.
      device: a mesh, devices or one device; all there are unless given.
      key: for the weights.
      **options: the other fields of `AttentionConfig`.

    Example:
      >>> attention = create_ring_attention(d_model=512, num_heads=8)
      >>> attention(jnp.ones((1, 1024, 512))).shape
      (1, 1024, 512)
    """
    config = AttentionConfig(
        d_model,
        num_heads,
        pattern=AttentionPatterns.RING,
        max_sequence_length=max_sequence_length,
        **options,
    )
    layer = _create("create_ring_attention", "device", config, device, key)
    assert isinstance(layer, RingAttentionLayer)
    return layer


@overload
def create_context_parallel_attention(
    d_model: AttentionConfig,
    num_heads: int,
    context_parallel_size: Devices | None = None,
    device_mesh: Devices | None = None,
    *,
    key: jax.Array | None = None,
) -> ContextParallelAttention: ...
@overload
def create_context_parallel_attention(
    d_model: AttentionConfig,
    *,
    context_parallel_size: int,
    device_mesh: Devices | None = None,
    key: jax.Array | None = None,
) -> ContextParallelAttention: ...
@overload
def create_context_parallel_attention(
    d_model: int,
    num_heads: int,
    context_parallel_size: int,
    device_mesh: Devices | None = None,
    *,
    key: jax.Array | None = None,
    **options: Any,
) -> ContextParallelAttention: ...
def create_context_parallel_attention(
    d_model: Any,
    num_heads: Any = None,
    context_parallel_size: Any = None,
    device_mesh: Any = None,
    *,
    key: jax.Array | None = None,
    **options: Any,
) -> ContextParallelAttention:
    """A layer whose sequences are cut over `context_parallel_size` devices.

    Called with `(d_model, num_heads, context_parallel_size, device_mesh)`, or with
    `(config, context_parallel_size, device_mesh)`, in this order or by these names.

    Args:
      d_model, num_heads: the width, and the heads, which divide it; or one
        `AttentionConfig` in place of both, which is causal if its pattern is, and a
        ring if that is RING.
      context_parallel_size: how many devices.
      device_mesh: a mesh whose axis has that size, or at least as many devices; the
        first of all devices unless given.
      key: for the weights.
      **options: the other fields of `AttentionConfig`.

    Example:
      >>> attention = create_context_parallel_attention(512, 8, 4, causal=True)
      >>> attention(jnp.ones((1, 1024, 512))).shape
      (1, 1024, 512)
    """
    where = "create_context_parallel_attention"
    pattern = AttentionPatterns.CONTEXT_PARALLEL
    if isinstance(d_model, AttentionConfig):
        causal = {"causal": d_model.is_causal}
        ring = d_model.pattern is AttentionPatterns.RING  # has no other strategy
        asked = {"strategy": "ring"} if ring else {}
        changed = causal | asked | options
        config = dataclasses.replace(d_model, pattern=pattern, **changed)
        size, mesh = num_heads, context_parallel_size
        if size is None:  # named, and not behind the config
            size, mesh = context_parallel_size, None
        if mesh is not None and device_mesh is not None:
            raise ValueError(
                f"{where}: device_mesh must be given once, got two; behind a config "
                "come context_parallel_size and device_mesh"
            )
        mesh = device_mesh if mesh is None else mesh
    else:
        config = AttentionConfig(d_model, num_heads, pattern=pattern, **options)
        size, mesh = context_parallel_size, device_mesh
    (size,) = check_positive(where, context_parallel_size=size)
    if not isinstance(mesh, Mesh):
        devices = devices_of(where, "device_mesh", mesh)
        if len(devices) < size:
            raise ValueError(
                f"{where}: context_parallel_size must be at most the devices that are "
                f"there, {len(devices)}, got {size}; pass device_mesh, or start JAX "
                "with more devices"
            )
        mesh = devices[:size]
    layer = _create(where, "device_mesh", config, mesh, key)
    assert isinstance(layer, ContextParallelAttention)
    assert layer.mesh is not None
    there = size_of(layer.mesh, config.axis_name)
    if there != size:
        raise ValueError(
            f"{where}: context_parallel_size must be the size of the mesh axis "
            f"{config.axis_name!r}, {there}, got {size}; pass that, or another mesh"
        )
    return layer


def _rows(config: AttentionConfig) -> PartitionSpec:
    """How what goes in is cut."""
    return PartitionSpec(config.batch_axis, config.axis_name)


def _checked_mask(where: str, mask: Any, x: jax.Array) -> jax.Array | None:
    if mask is None:
        return None
    mask = as_array(where, "attention_mask", mask)
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"{where}: attention_mask must be {list(x.shape[:2])}, one value for each "
            f"key, got {show(mask)}; causal and window say what depends on the query"
        )
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.integer):
        raise TypeError(
            f"{where}: attention_mask must be bools or integers, got {show(mask)}; "
            "pass mask > 0.5, say"
        )
    return mask


def _attend(
    config: AttentionConfig,
    mesh: Mesh | None,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    seed: SeedLike,
) -> jax.Array:
    rate = 0.0 if seed is None else config.dropout
    if mesh is None:
        options = _options(config, rate)
        ids = _segments(mask)
        return flash_attention(q, k, v, segment_ids=ids, dropout_seed=seed, **options)
    dropout_keys = None
    if seed is not None:
        size = (q.shape[0], q.shape[2])  # of all devices
        words = dropout.check_seed(_OVER_MESH, seed, *size)
        if rate:
            dropout_keys = dropout.keys_of(words, *size)
    rows = _rows(config)
    heads = PartitionSpec(*rows, config.head_axis)
    keys = PartitionSpec(config.batch_axis, config.head_axis)
    specs = (heads, heads, heads, rows, keys)
    given = (q, k, v, mask, dropout_keys)
    cut = (reshard(x, spec, mesh) for spec, x in zip(specs, given, strict=True))
    out = _attend_over(config, mesh, rate, specs, *cut)
    return reshard(out, rows, mesh)  # heads are whole again, for what is made of them


_OVER_MESH = "context_parallel_attention"


# One program, also outside of jit: each call would compile a `shard_map` again.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _attend_over(
    config: AttentionConfig,
    mesh: Mesh,
    rate: float,
    specs: tuple[PartitionSpec, ...],
    *arrays: Any,
) -> jax.Array:
    ring = config.pattern is AttentionPatterns.RING

    def local(q: Any, k: Any, v: Any, mask: Any, dropout_keys: Any) -> Any:
        return attend_as(
            _OVER_MESH,
            q,
            k,
            v,
            axis_name=config.axis_name,
            strategy="ring" if ring else config.strategy,
            ulysses_degree=config.ulysses_degree,
            layout=config.layout,
            compiler_options=config.compiler_options,
            segment_ids=_segments(mask),
            dropout_keys=dropout_keys,
            **_options(config, rate),
        )

    over = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0])
    return over(*arrays)


def _options(config: AttentionConfig, rate: float) -> dict[str, Any]:
    window = None if config.window is None else (config.window, None)
    return {
        "causal": config.is_causal,
        "window": window,
        "softcap": config.softcap,
        "scale": config.scale,
        "deterministic": config.deterministic,
        "implementation": config.implementation,
        "dropout_rate": rate,
    }


def _segments(mask: Any) -> Any:
    return None if mask is None else (jnp.ones_like(mask), mask)
