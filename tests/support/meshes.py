"""Meshes of the four CPU devices that conftest.py makes."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

by_axis_type = pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name
)


def mesh_of(
    axis_type: AxisType = AxisType.Auto, shape: tuple[int, int] = (2, 2)
) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[:4]
    return jax.make_mesh(shape, ("b", "h"), (axis_type,) * 2, devices=devices)


def put(x: Any, mesh: jax.sharding.Mesh, *spec: Any) -> Any:
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def placed(x: Any, sharding: NamedSharding) -> jax.Array:
    """A global array of what every process has."""
    return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])
