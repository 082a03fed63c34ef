"""How a primitive is made: one that transforms, and one that each device runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# custom_partitioning reads the devices while lowering; jit passes them only for
# primitives in this set, which has no public name.
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.extend import core
from jax.interpreters import xla


def make_primitives(
    name: str, abstract_eval: Callable[..., Any]
) -> tuple[core.Primitive, core.Primitive]:
    """The outer primitive and the local one, `<name>_local`.

    The outer one carries the transformation rules and lowers to a partitioned call. The
    local one is what that call runs on each device. Both have several results and the
    same `abstract_eval`.

    Called outside of jit, the outer one runs as JAX's own primitives do. A jit of our
    own would call back into itself where jit is off (`jax.disable_jit`), and where a
    function is run again without it to find a NaN (`jax_debug_nans`).
    """
    outer, local = core.Primitive(name), core.Primitive(f"{name}_local")
    for primitive in (outer, local):
        primitive.multiple_results = True
        primitive.def_abstract_eval(abstract_eval)
    outer.def_impl(functools.partial(xla.apply_primitive, outer))
    prim_requires_devices_during_lowering.add(outer)
    return outer, local
