"""Attention layers by patterns, on one device or over a mesh.

A layer is a pytree of weights that is called. Its attention runs inside a
`jax.shard_map` of its own, so that it takes whole arrays, cut or not, under plain jit.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_kvblock.attention.arguments import check_flags, check_scale, check_softcap
from jax_kvblock.attention.dispatch import IMPLEMENTATIONS
from jax_kvblock.attention.flash import flash_attention
from jax_kvblock.core.checks import (
    as_array,
    check_choice,
    check_dtype,
    check_positive,
    show,
)
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.parallel import axes
from jax_kvblock.parallel.context import context_parallel_attention
from jax_kvblock.parallel.sequence import LAYOUTS, SequenceLayout, chunks_of
from jax_kvblock.parallel.strategy import STRATEGIES, Strategy

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

    Devices: TypeAlias = Mesh | Sequence[jax.Device] | jax.Device
    Axes: TypeAlias = str | tuple[str, ...]

# What an attention layer computes in.
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# Fields of `AttentionConfig` that name mesh axes.
AXES = ("axis_name", "batch_axis", "head_axis")


class AttentionPatterns(enum.Enum):
    """Who attends to whom, and where the sequence lies."""

    FULL = "full"
    CAUSAL = "causal"
    SLIDING_WINDOW = "sliding_window"
    RING = "ring"
    CONTEXT_PARALLEL = "context_parallel"


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """What an attention layer is.

    Attributes:
      d_model: the width of what goes in and comes out.
      num_heads: query heads, which divide d_model.
      num_kv_heads: key heads, which divide num_heads; as many unless given.
      pattern: FULL, CAUSAL and SLIDING_WINDOW run on one device, or cut by batch and
        heads as jit's shardings say. RING and CONTEXT_PARALLEL have the sequence cut
        over a mesh axis.
      causal: of RING and CONTEXT_PARALLEL. CAUSAL and SLIDING_WINDOW are.
      window: how many keys before its own position a query sees; None for all.
      softcap, scale, implementation: as in `flash_attention`.
      strategy, layout: as in `context_parallel_attention`. In layout "zigzag" what goes
        in is laid out by `to_zigzag`, and so is what comes out. RING has no strategy
        but "ring".
      axis_name: the mesh axis that sequences are cut over, or axes, in the mesh's
        order.
      batch_axis, head_axis: mesh axes that the batch and the heads are cut over, or
        None.
      compiler_options: as in `context_parallel_attention`.
      max_sequence_length: longer sequences are an error.
      dtype: of the weights and of the attention: bfloat16, float16 or float32.

    Raises:
      TypeError, ValueError: sizes that do not fit, like heads that do not divide
        d_model; a dtype or an option that no layer has.
    """

    d_model: int
    num_heads: int
    num_kv_heads: int | None = None
    pattern: AttentionPatterns = AttentionPatterns.FULL
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    implementation: str | None = None
    strategy: Strategy = "auto"
    layout: SequenceLayout = "contiguous"
    axis_name: Axes = "context"
    batch_axis: Axes | None = None
    head_axis: Axes | None = None
    compiler_options: bool = False
    max_sequence_length: int | None = None
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        where = "AttentionConfig"
        check_positive(where, d_model=self.d_model, num_heads=self.num_heads)
        if self.d_model % self.num_heads:
            raise ValueError(
                f"{where}: d_model must be a multiple of num_heads, got {self.d_model} "
                f"and {self.num_heads}; each head has d_model / num_heads of the width"
            )
        kv_heads = self.num_kv_heads
        if kv_heads is not None:
            check_positive(where, num_kv_heads=kv_heads)
            if self.num_heads % kv_heads:
                raise ValueError(
                    f"{where}: num_kv_heads must divide num_heads, {self.num_heads}, "
                    f"got {kv_heads}; every key head serves as many query heads"
                )
        if not isinstance(self.pattern, AttentionPatterns):
            names = ", ".join(f"AttentionPatterns.{p.name}" for p in AttentionPatterns)
            raise TypeError(
                f"{where}: pattern must be one of {names}, got {self.pattern!r}"
            )
        check_choice(where, "strategy", self.strategy, STRATEGIES)
        if self.pattern is AttentionPatterns.RING:
            self._check_ring(where)
        check_choice(where, "layout", self.layout, LAYOUTS)
        self._check_options(where)
        for name in ("window", "max_sequence_length"):
            if getattr(self, name) is not None:
                check_positive(where, **{name: getattr(self, name)})
        if self.pattern is AttentionPatterns.SLIDING_WINDOW and self.window is None:
            raise ValueError(
                f"{where}: pattern SLIDING_WINDOW needs a window, got None; say how "
                "many keys before its own a query sees"
            )
        for name in AXES:
            object.__setattr__(self, name, _checked_axes(where, name, self))
        self._check_distinct(where)

    def _check_ring(self, where: str) -> None:
        if self.strategy not in ("auto", "ring"):
            raise ValueError(
                f"{where}: strategy must be 'ring' or 'auto' with pattern RING, got "
                f"{self.strategy!r}; create_context_parallel_attention, or pattern "
                "CONTEXT_PARALLEL, serves it"
            )

    def _check_options(self, where: str) -> None:
        """Those of the attention; numbers become Python floats, which can be hashed."""
        check_flags(where, causal=self.causal, compiler_options=self.compiler_options)
        check_choice(
            where, "implementation", self.implementation, (None, *IMPLEMENTATIONS)
        )
        if self.scale is not None:
            scale = check_scale(where, self.scale, self.head_dim)
            object.__setattr__(self, "scale", scale)
        if self.softcap is not None:
            object.__setattr__(self, "softcap", check_softcap(where, self.softcap))
        dtype = check_dtype(where, "dtype", self.dtype)
        if dtype not in DTYPES:
            raise TypeError(
                f"{where}: dtype must be bfloat16, float16 or float32, got {dtype}; "
                "what goes in may have another, and what comes out has that one"
            )

    def _check_distinct(self, where: str) -> None:
        """An axis cuts one dim."""
        seen: dict[Hashable, str] = {}
        for name in AXES:
            for axis in _each(getattr(self, name)):
                if axis in seen:
                    raise ValueError(
                        f"{where}: {name} must be another mesh axis than "
                        f"{seen[axis]}, got {axis!r} for both; an axis cuts one dim "
                        "once"
                    )
                seen[axis] = name

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def is_parallel(self) -> bool:
        """Whether the sequence is cut over a mesh axis."""
        p = AttentionPatterns
        return self.pattern in (p.RING, p.CONTEXT_PARALLEL)

    @property
    def is_causal(self) -> bool:
        p = AttentionPatterns
        return self.causal or self.pattern in (p.CAUSAL, p.SLIDING_WINDOW)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
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
    ) -> Float[jax.Array, "B S d_model"]:
        """Attends.

        Args:
          hidden_states: `[B, S, d_model]`, floats; whole, or cut over the mesh.
          attention_mask: bools or integers `[B, S]`; a key where it is False (0) is
            seen by nobody. A row that sees no key gives zeros.

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
            _check_cuts(where, config, self.mesh, x)
            rows = NamedSharding(self.mesh, _rows(config))
            x = _on_mesh(where, "hidden_states", hidden_states, x, rows)
            if mask is not None:
                mask = _on_mesh(where, "attention_mask", attention_mask, mask, rows)
        if mask is not None:
            mask = (mask != 0).astype(jnp.int32)
        wide = jnp.matmul(x.astype(config.dtype), self.qkv)
        n, k, d = config.num_heads, config.kv_heads, config.head_dim
        wide = wide.reshape(*x.shape[:2], n + 2 * k, d)
        q, keys, values = jnp.split(wide, (n, n + k), axis=2)
        o = _attend(config, self.mesh, q, keys, values, mask)
        o = o.reshape(*x.shape[:2], n * d)
        return jnp.matmul(o, self.out).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingAttentionLayer(Attention):
    """`Attention` whose keys and values go round a ring of devices.

    Memory is O(S / n) on each of n devices.
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
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
    found = _mesh_of(where, name, config, mesh)
    n, k, d = config.num_heads, config.kv_heads, config.head_dim
    keys = jax.random.split(jax.random.key(0) if key is None else key)
    init = jax.nn.initializers.lecun_normal()
    weights = [
        init(keys[0], (config.d_model, (n + 2 * k) * d), config.dtype),
        init(keys[1], (n * d, config.d_model), config.dtype),
    ]
    if found is not None:
        whole = NamedSharding(found, PartitionSpec())
        weights = [jax.device_put(w, whole) for w in weights]
    layer = _CLASSES.get(config.pattern, Attention)
    return layer(weights[0], weights[1], config, found)


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
    num_heads: int,
    context_parallel_size: Any = None,
    device_mesh: Any = None,
    *,
    key: jax.Array | None = None,
    **options: Any,
) -> ContextParallelAttention:
    """A layer whose sequences are cut over `context_parallel_size` devices.

    Called with `(d_model, num_heads, context_parallel_size, device_mesh)`, or with
    `(config, context_parallel_size, device_mesh)`.

    Args:
      d_model, num_heads: the width, and the heads, which divide it; or one
        `AttentionConfig` in place of both, which is causal if its pattern is.
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
        config = dataclasses.replace(d_model, pattern=pattern, **causal | options)
        size, mesh = num_heads, context_parallel_size
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
        devices = _devices_of(where, "device_mesh", mesh)
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
    there = _size_of(layer.mesh, config.axis_name)
    if there != size:
        raise ValueError(
            f"{where}: context_parallel_size must be the size of the mesh axis "
            f"{config.axis_name!r}, {there}, got {size}; pass that, or another mesh"
        )
    return layer


def _each(axis: Any) -> tuple[Hashable, ...]:
    """The mesh axes of a field, which may be one, several or None."""
    if axis is None:
        return ()
    return axis if isinstance(axis, tuple) else (axis,)


def _checked_axes(where: str, name: str, config: AttentionConfig) -> Any:
    """A field that names mesh axes; a list becomes a tuple, which can be hashed."""
    axis = axes.hashable(getattr(config, name))
    if axis is None and name != "axis_name":
        return None
    names = _each(axis)
    wrong = (int, tuple, type(None))  # JAX takes an int for a dim
    if not names or any(
        isinstance(a, wrong) or not isinstance(a, Hashable) for a in names
    ):
        raise TypeError(
            f"{where}: {name} must be a mesh axis or a tuple of them, got {axis!r}; "
            "pass a name of the mesh, like 'context'"
        )
    return axis


def _size_of(mesh: Mesh, axis: Any) -> int:
    """How many devices an axis has, or several together."""
    return math.prod(mesh.shape[a] for a in _each(axis))


def _mesh_of(where: str, name: str, config: AttentionConfig, given: Any) -> Mesh | None:
    """The mesh of a pattern that has one. name: what `where` calls it."""
    if not config.is_parallel:
        _check_no_mesh(where, name, config, given)
        return None
    mesh = given if isinstance(given, Mesh) else _line_of(where, name, config, given)
    for field in AXES:
        for axis in _each(getattr(config, field)):
            if axis not in mesh.shape:
                raise ValueError(
                    f"{where}: {name} must have the axis {axis!r}, got "
                    f"{tuple(mesh.shape)}; pass a jax.sharding.Mesh that has it, or "
                    f"name another in {field}=..."
                )
    named = _each(config.axis_name)
    in_order = tuple(axis for axis in mesh.axis_names if axis in named)
    if named != in_order:  # JAX counts devices in that order where it permutes
        raise ValueError(
            f"{where}: axis_name must name axes in the order of the mesh's, "
            f"{mesh.axis_names}, got {named}; pass axis_name={in_order}"
        )
    return mesh


def _line_of(where: str, name: str, config: AttentionConfig, given: Any) -> Mesh:
    """A mesh of devices along the one axis that sequences are cut over."""
    devices = _devices_of(where, name, given)
    names = _each(config.axis_name)
    if len(names) > 1:
        raise ValueError(
            f"{where}: {name} must be a jax.sharding.Mesh where axis_name is several "
            f"axes, {names}, got {show(given)}; jax.make_mesh((2, 2), {names}), say, "
            "is one"
        )
    return Mesh(np.array(devices), names)


def _devices_of(where: str, name: str, given: Any) -> list[jax.Device]:
    """All there are for None."""
    if given is None:
        return jax.devices()
    try:
        devices = [given] if isinstance(given, jax.Device) else list(given)
    except TypeError:
        devices = [given]
    if not all(isinstance(device, jax.Device) for device in devices):
        raise TypeError(
            f"{where}: {name} must be a jax.sharding.Mesh, a jax.Device or a sequence "
            f"of devices, got {given!r}; pass jax.devices()[:4], say"
        )
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(
            f"{where}: {name} must be at least one device, and none twice, got "
            f"{given!r}; pass jax.devices()[:4], say"
        )
    return devices


def _check_no_mesh(where: str, name: str, config: AttentionConfig, mesh: Any) -> None:
    """Nothing is given that a pattern of one device would ignore."""
    fields = ("strategy", "layout", "compiler_options", *AXES)
    given = {field: getattr(config, field) for field in fields}
    ignored = {
        field: repr(value)
        for field, value in given.items()
        if value != getattr(AttentionConfig, field)
    }
    if mesh is not None:
        ignored = {name: f"a {show(mesh)}"} | ignored
    if not ignored:
        return
    field, value = next(iter(ignored.items()))
    needs_flag = config.is_causal and not config.causal
    raise ValueError(
        f"{where}: {field} must be left out with pattern {config.pattern.name}, which "
        f"cuts no sequence, got {value}; pattern CONTEXT_PARALLEL"
        f"{', with causal=True,' if needs_flag else ''} serves it, and jit's shardings "
        "alone cut batch and heads"
    )


def _check_cuts(where: str, config: AttentionConfig, mesh: Mesh, x: jax.Array) -> None:
    """Whether the mesh cuts the batch, the sequence and the heads evenly."""
    by = _size_of(mesh, config.batch_axis)
    if x.shape[0] % by:
        raise ValueError(
            f"{where}: hidden_states must have a batch that is a multiple of the {by} "
            f"devices of batch_axis {config.batch_axis!r}, got {show(x)}; pad the "
            "batch, or make the layer without batch_axis"
        )
    size = _size_of(mesh, config.axis_name)
    by = 1 if size == 1 else chunks_of(config.layout, size)
    if x.shape[1] % by:
        raise ValueError(
            f"{where}: sequences must be a multiple of {by} long, to be cut "
            f"evenly, got {x.shape[1]}; pad hidden_states by "
            "jax_kvblock.parallel.pad_sequence, and attention_mask with zeros"
        )
    by = _size_of(mesh, config.head_axis)
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads}
    for name, count in heads.items():
        if count % by:
            raise ValueError(
                f"{where}: {name} must be a multiple of the {by} devices of head_axis "
                f"{config.head_axis!r}, got {count}; make the layer with as many, or "
                "without head_axis"
            )


def _on_mesh(
    where: str, name: str, given: Any, x: jax.Array, place: NamedSharding
) -> jax.Array:
    """x, which lies on the mesh's devices or wherever it is needed.

    given: what x was made of. A tensor of another library cannot lie on a mesh, so what
    it holds goes there.
    """
    if isinstance(x, jax.core.Tracer) or not x.committed:
        return x
    there, here = list(place.mesh.devices.flat), _devices(x)
    # Arrays in one order of devices meet no arrays in another.
    ordered = isinstance(x.sharding, NamedSharding)
    if here == there if ordered else set(here) == set(there):
        return x
    if not isinstance(given, jax.Array):
        return jax.device_put(x, place)
    if isinstance(x[:0], jax.core.Tracer):  # a constant of a program is copied there
        return x
    spec = tuple(place.spec)
    raise ValueError(
        f"{where}: {name} must lie on the devices of the layer's mesh, in its order, "
        f"{_listed(there)}, got {show(x)} on {_listed(here)}; "
        f"jax.device_put({name}, NamedSharding(layer.mesh, PartitionSpec{spec})) "
        "moves it"
    )


def _devices(x: jax.Array) -> list[Any]:
    if isinstance(x.sharding, NamedSharding):
        return list(x.sharding.mesh.devices.flat)
    return sorted(x.sharding.device_set, key=lambda device: device.id)


def _listed(devices: list[Any]) -> str:
    """The first eight by name."""
    more = f" and {len(devices) - 8} more" if len(devices) > 8 else ""
    return ", ".join(map(str, devices[:8])) + more


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
    config: AttentionConfig, mesh: Mesh | None, q: Any, k: Any, v: Any, mask: Any
) -> jax.Array:
    window = None if config.window is None else (config.window, None)
    options: dict[str, Any] = {
        "causal": config.is_causal,
        "window": window,
        "softcap": config.softcap,
        "scale": config.scale,
        "implementation": config.implementation,
    }

    def segments(mask: Any) -> Any:
        return None if mask is None else (jnp.ones_like(mask), mask)

    if mesh is None:
        return flash_attention(q, k, v, segment_ids=segments(mask), **options)
    ring = config.pattern is AttentionPatterns.RING

    def local(q: Any, k: Any, v: Any, mask: Any) -> jax.Array:
        return context_parallel_attention(
            q,
            k,
            v,
            axis_name=config.axis_name,
            strategy="ring" if ring else config.strategy,
            layout=config.layout,
            compiler_options=config.compiler_options,
            segment_ids=segments(mask),
            **options,
        )

    rows = _rows(config)
    heads = PartitionSpec(*rows, config.head_axis)
    return jax.shard_map(
        local, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=heads
    )(q, k, v, mask)
