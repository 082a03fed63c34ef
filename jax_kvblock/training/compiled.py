"""Which products a compiled program really has.

XLA takes tensor cores of 8 bits where it recognizes what it is given. Where it does
not, it multiplies in 16 bits and says nothing; so look.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?[\w.\-]+ \([^\n]*\{\n(.*?)^\}", re.M | re.S)
_DEFINED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\w+)\[", re.M)
_DOT = re.compile(r" dot\((?:\S+ )?%?([\w.\-]+), (?:\S+ )?%?([\w.\-]+)\)")
_LIBRARY = re.compile(r'custom_call_target="(__cublas\$[\w$]*)"')


class Products(NamedTuple):
    """How many matrix products a program has: in 8 bits, and in more."""

    narrow: int
    wide: int


def count_products(compiled: Any) -> Products:
    """The products of a compiled program.

    Those of cuBLAS and of kernels that XLA makes count, by what they read; those inside
    a loop count once, kernels of custom calls not at all. On a CPU all are wide.

    Args:
      compiled: `jax.jit(f).lower(...).compile()`, or its text.

    Raises:
      TypeError: it is not compiled: a function, or one that is only lowered.

    Example:
      >>> step = training.train_step.lower(state, batch).compile()
      >>> assert count_products(step).narrow == 3 * number_of_layers
    """
    text = _text(compiled)
    narrow = wide = 0
    for target in _LIBRARY.findall(text):
        if target.endswith("$f8"):
            narrow += 1
        elif "matmul" in target or "gemm" in target:
            wide += 1
    for body in _COMPUTATION.findall(text):
        dtypes = dict(_DEFINED.findall(body))
        for operands in _DOT.findall(body):
            if all(dtypes.get(name, "").startswith("f8") for name in operands):
                narrow += 1
            else:
                wide += 1
    return Products(narrow, wide)


def _text(compiled: Any) -> str:
    """The HLO text of a compiled program; any other has no products to count."""
    as_text = getattr(compiled, "as_text", None)
    text = as_text() if callable(as_text) else compiled
    if not isinstance(text, str) or "HloModule" not in text:
        raise TypeError(
            "count_products: compiled must be a compiled program or its HLO text, got "
            f"{type(compiled).__name__}; pass jax.jit(f).lower(*arguments).compile()"
        )
    return text
