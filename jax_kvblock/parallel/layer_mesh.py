"""The mesh that a layer lies on: found, and held against what is given to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_kvblock.attention import dropout
from jax_kvblock.core.checks import show
from jax_kvblock.parallel.layer_config import AXES, AttentionConfig, each_axis
from jax_kvblock.parallel.sequence import chunks_of

if TYPE_CHECKING:
    Devices: TypeAlias = Mesh | Sequence[jax.Device] | jax.Device


def size_of(mesh: Mesh, axis: Any) -> int:
    """How many devices an axis has, or several together."""
    return math.prod(mesh.shape[a] for a in each_axis(axis))


def mesh_of(where: str, name: str, config: AttentionConfig, given: Any) -> Mesh | None:
    """The mesh of a pattern that has one. name: what `where` calls it."""
    if not config.is_parallel:
        _check_no_mesh(where, name, config, given)
        return None
    mesh = given if isinstance(given, Mesh) else _line_of(where, name, config, given)
    for field in AXES:
        for axis in each_axis(getattr(config, field)):
            if axis not in mesh.shape:
                raise ValueError(
                    f"{where}: {name} must have the axis {axis!r}, got "
                    f"{tuple(mesh.shape)}; pass a jax.sharding.Mesh that has it, or "
                    f"name another in {field}=..."
                )
    named = each_axis(config.axis_name)
    in_order = tuple(axis for axis in mesh.axis_names if axis in named)
    if named != in_order:  # JAX counts devices in that order where it permutes
        raise ValueError(
            f"{where}: axis_name must name axes in the order of the mesh's, "
            f"{mesh.axis_names}, got {named}; pass axis_name={in_order}"
        )
    return mesh


def _line_of(where: str, name: str, config: AttentionConfig, given: Any) -> Mesh:
    """A mesh of devices along the one axis that sequences are cut over."""
    devices = devices_of(where, name, given)
    names = each_axis(config.axis_name)
    if len(names) > 1:
        raise ValueError(
            f"{where}: {name} must be a jax.sharding.Mesh where axis_name is several "
            f"axes, {names}, got {show(given)}; jax.make_mesh((2, 2), {names}), say, "
            "is one"
        )
    return Mesh(np.array(devices), names)


def devices_of(where: str, name: str, given: Any) -> list[jax.Device]:
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
    fields = ("strategy", "ulysses_degree", "layout", "compiler_options", *AXES)
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


def check_cuts(
    where: str, config: AttentionConfig, mesh: Mesh, x: jax.Array, drops: bool
) -> None:
    """Whether the mesh cuts the batch, the sequence and the heads evenly.

    drops: whether probabilities are dropped, by blocks of positions that stay whole.
    """
    by = size_of(mesh, config.batch_axis)
    if x.shape[0] % by:
        raise ValueError(
            f"{where}: hidden_states must have a batch that is a multiple of the {by} "
            f"devices of batch_axis {config.batch_axis!r}, got {show(x)}; pad the "
            "batch, or make the layer without batch_axis"
        )
    size = size_of(mesh, config.axis_name)
    by = chunks_of(config.layout, size)
    if x.shape[1] % by:
        raise ValueError(
            f"{where}: sequences must be a multiple of {by} long, to be cut "
            f"evenly, got {x.shape[1]}; pad hidden_states by "
            "jax_kvblock.parallel.pad_sequence, and attention_mask with zeros"
        )
    by *= dropout.BLOCK
    if drops and x.shape[1] % by:
        raise ValueError(
            f"{where}: sequences must be a multiple of {by} long with dropout, got "
            f"{x.shape[1]}; pad hidden_states with zeros behind the sequence by "
            "jnp.pad (in zigzag before to_zigzag), and pass an attention_mask of them"
        )
    by = size_of(mesh, config.head_axis)
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads}
    for name, count in heads.items():
        if count % by:
            raise ValueError(
                f"{where}: {name} must be a multiple of the {by} devices of head_axis "
                f"{config.head_axis!r}, got {count}; make the layer with as many, or "
                "without head_axis"
            )


def on_mesh(
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
