"""Who computes a call of `paged_attention`: the one place that decides."""

from __future__ import annotations

from jax_kvblock.core import ffi
from jax_kvblock.paged import cuda
from jax_kvblock.paged.call import Paged, PagedConfig
from jax_kvblock.paged.narrow import may_be_many

IMPLEMENTATIONS = ("cuda", "xla")


def choose(config: PagedConfig, x: Paged, platform: str | None) -> str:
    """One of IMPLEMENTATIONS, for a platform, None being any other than the known ones.

    Raises:
      ValueError: what was asked for does not serve the call; it says why, and who does.
      RuntimeError: there is a GPU, and the build has no kernels for it.
    """
    wanted = config.implementation
    if wanted == "xla":
        return wanted
    lacks = cuda.unserved(config, x)
    if wanted is None:
        chosen = "cuda" if platform == "cuda" and not lacks else "xla"
        if chosen == "xla" and config.quantize_queries and may_be_many(config, x):
            if platform != "cuda":
                lacks = [f"{platform or 'another platform'}, for which this is lowered"]
            raise ValueError(
                "paged_attention: quantize_queries is for Hopper's kernels, which do "
                f"not serve {'; '.join(lacks)}. Leave it out to compute in more bits; "
                "implementation='xla' computes the same in float32"
            )
    else:
        if lacks:
            raise ValueError(
                f"paged_attention: implementation={wanted!r} does not serve "
                f"{'; '.join(lacks)}. implementation='xla' does"
            )
        if platform != "cuda":
            raise ValueError(
                f"paged_attention: implementation={wanted!r} needs an NVIDIA GPU, and "
                f"this is lowered for {platform or 'another platform'}; use "
                "implementation='xla' or None"
            )
        chosen = wanted
    if chosen == "cuda":
        ffi.require_cuda_build()
    return chosen
