"""Which implementations of attention a program calls, read from its text."""

from __future__ import annotations

import re
from typing import Any

from jax_kvblock.attention.cuda import KERNELS

_NAMES = {number: name for name, number in KERNELS.items()}


def attention_in(program: Any) -> tuple[str, ...]:
    """The kernels of attention that a program calls; `("xla",)` if none.

    Args:
      program: `jax.jit(f).lower(...)`, that compiled, or the text of one of them.

    Returns:
      Of "cuda_sm90", "cuda" and "cudnn" those that are called, for paged attention
      "cuda". Plain JAX has no calls: a program without attention gives "xla", too.

    Raises:
      TypeError: it is no program: a function, for example.
    """
    as_text = getattr(program, "as_text", None)
    text = as_text() if callable(as_text) else program
    if not isinstance(text, str):
        raise TypeError(
            "attention_in: program must be a lowered or compiled program or its text, "
            f"got {type(program).__name__}; pass jax.jit(f).lower(*arguments).compile()"
        )
    found = {
        _NAMES[int(number)]
        for line in text.splitlines()
        if "kvblock_attention_" in line
        for number in re.findall(r"\bkernels = (\d+)", line)
    }
    if "kvblock_paged_attention" in text:
        found.add("cuda")
    if "__cudnn$fmha" in text:
        found.add("cudnn")
    order = ("cuda_sm90", "cuda", "cudnn")
    return tuple(name for name in order if name in found) or ("xla",)
