"""Which derivatives `fp8_attention` has: those of reverse mode, once.

JAX's own words for the others name neither the function nor what to do. So arrays go
through two marks, which change nothing but for these words: `in_reverse` in front of
the function, whose tangents can be turned around and not be computed, and `once` in
front of its forward pass for gradients, which has no derivative.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

WHERE = "fp8_attention"
_INSTEAD = (
    "flash_attention of the arrays in bfloat16 has derivatives of forward mode and "
    "higher ones"
)


def in_reverse(x: jax.Array) -> jax.Array:
    """x; derivatives of forward mode are an error."""
    marked: jax.Array = _in_reverse_p.bind(x)
    return marked


def once(x: jax.Array) -> jax.Array:
    """x; derivatives are an error."""
    marked: jax.Array = _once_p.bind(x)
    return marked


def _mark(name: str) -> core.Primitive:
    """A primitive that gives its operand."""
    made = core.Primitive(name)
    made.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[made] = lambda xs, dims: (made.bind(*xs), dims[0])
    return made


def _no_forward(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        f"{WHERE}: derivatives must be of reverse mode (jax.grad, jax.vjp), got one of "
        f"forward mode (jax.jvp, jax.jacfwd); {_INSTEAD}"
    )


def _no_second(primals: Any, tangents: Any) -> NoReturn:
    raise NotImplementedError(
        f"{WHERE}: derivatives must be first ones, got a derivative of its gradient "
        f"(jax.grad of jax.grad, say); {_INSTEAD}"
    )


_in_reverse_p = _mark("kvblock_fp8_in_reverse")
_once_p = _mark("kvblock_fp8_once")
_tangent_p = _mark("kvblock_fp8_tangent")

for _primitive in (_in_reverse_p, _once_p):
    _primitive.def_impl(lambda x: x)
    mlir.register_lowering(_primitive, lambda ctx, x: [x])
# What is computed of tangents in the end is only what was turned around before.
_tangent_p.def_impl(_no_forward)
mlir.register_lowering(_tangent_p, _no_forward)
ad.deflinear2(_tangent_p, lambda cotangent, _: [cotangent])


def _in_reverse_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (move,) = primals, tangents
    if type(move) is not ad.Zero:
        move = _tangent_p.bind(move)
    return _in_reverse_p.bind(x), move


ad.primitive_jvps[_in_reverse_p] = _in_reverse_jvp
ad.primitive_jvps[_once_p] = _no_second
