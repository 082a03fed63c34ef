"""Who computes a block copy: the names, and the one place that decides.

What is asked for and not served is an error that says who serves it.
"""

from __future__ import annotations

from typing import Any

from jax_kvblock.core import checks, ffi

# CUDA's own copy calls, which serve copies of long runs without ids.
CUDA_CALLS = {"batch": "cudaMemcpyBatchAsync", "async": "cudaMemcpyAsync"}
# What a function takes as `implementation=`; None is the kernel where there is one.
EVERY_COPY = (None, "kernel", "xla")
OPERATIONAL = (None, "kernel", *CUDA_CALLS, "xla")
# The same for the operational pair by its first name, `backend=`.
BACKENDS = ("auto", "kernel", *CUDA_CALLS)


def check_implementation(where: str, implementation: Any) -> str | None:
    """What a function of any copy was given."""
    checks.check_choice(where, "implementation", implementation, EVERY_COPY)
    return implementation


def check_operational(where: str, implementation: Any, backend: Any) -> str | None:
    """What one of the operational pair was given, by either name."""
    if backend is None:
        checks.check_choice(where, "implementation", implementation, OPERATIONAL)
        return implementation
    checks.check_choice(where, "backend", backend, BACKENDS)
    if implementation is not None:
        raise TypeError(
            f"{where}: implementation must be given once, got {implementation!r} and "
            f"backend={backend!r}, which is its first name; leave backend out"
        )
    return None if backend == "auto" else backend


def choose(implementation: str | None, platform: str | None) -> str:
    """Who computes a copy that is lowered for a platform, None being any other."""
    if implementation == "xla":
        return implementation
    if platform not in ("cpu", "cuda"):
        if implementation is None:
            return "xla"
        raise ValueError(
            f"block copy: implementation={implementation!r} needs a CPU or an NVIDIA "
            f"GPU, and this is lowered for {platform or 'another platform'}; use "
            "implementation='xla' or None"
        )
    if implementation in CUDA_CALLS and platform != "cuda":
        raise ValueError(
            f"block copy: implementation={implementation!r} is "
            f"{CUDA_CALLS[implementation]}, a copy call of CUDA, and this is lowered "
            f"for {platform}; use implementation='kernel' or None"
        )
    if platform == "cuda":
        ffi.require_cuda_build()
    return implementation or "kernel"
