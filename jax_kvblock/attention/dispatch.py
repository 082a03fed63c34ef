"""Who computes a call: the names, and the one place that decides.

What an implementation does not serve is listed where it lives: `cuda.unserved`,
`cuda.unserved_by_gpu` and `cudnn.unserved`. "xla" serves everything.
"""

from __future__ import annotations

from jax_kvblock.attention import cuda, cudnn
from jax_kvblock.attention.config import AttentionConfig, Operands
from jax_kvblock.core import ffi

IMPLEMENTATIONS = ("cuda_sm90", "cuda", "xla", "cudnn")


def choose(
    config: AttentionConfig,
    x: Operands,
    platform: str | None,
    *,
    backward: bool = False,
    return_lse: bool = False,
    where: str = "flash_attention",
) -> str:
    """Who computes a call on a platform, None being any other than the known ones.

    Args:
      config, x: the checked call; of the operands shapes and dtypes are enough.
      platform: what it is lowered for.
      backward: whether it is one of the gradients' operations.
      return_lse: whether the caller gets the log-sum-exp of `flash_attention`.
      where: the function that was called.

    Returns:
      One of IMPLEMENTATIONS.

    Raises:
      ValueError: what was asked for does not serve the call; it says why, and who does.
      RuntimeError: there is a GPU, and the build has no kernels for it.
    """

    def missing(implementation: str) -> list[str]:
        if implementation == "xla":
            return []
        if implementation == "cudnn":
            return cudnn.unserved(config, x, return_lse)
        on_gpu = cuda.unserved_by_gpu(implementation, backward)
        return cuda.unserved(config, x, implementation, backward) + on_gpu

    wanted = config.implementation
    if wanted is None:
        best: tuple[str, ...] = ()
        if platform == "cuda":
            best = (config.kernels,) if config.kernels else cuda.best_kernels()
        chosen = next((name for name in best if not missing(name)), "xla")
        if chosen == "xla" and x.q_scales is not None:
            lacks = missing("cuda_sm90")
            if platform != "cuda":
                lacks = [f"{platform or 'another platform'}, for which this is lowered"]
            elif not lacks:  # the call is lowered for a GPU that is not here
                raise ValueError(
                    f"{where}: {x.q.dtype} is multiplied by Hopper's kernels, and no "
                    "Hopper GPU is here; implementation='cuda_sm90' compiles for one, "
                    "'xla' computes the same in float32"
                )
            raise ValueError(
                f"{where}: {x.q.dtype} is multiplied by Hopper's kernels, which do "
                f"not serve {'; '.join(lacks)}. Cast q, k and v times their scales to "
                "bfloat16; implementation='xla' computes the same in float32"
            )
    else:
        if lacks := missing(wanted):
            others = [name for name in ("cuda", "xla") if not missing(name)]
            does = "do" if others[1:] else "does"
            raise ValueError(
                f"{where}: implementation={wanted!r} does not serve "
                f"{'; '.join(lacks)}. implementation={' and '.join(map(repr, others))} "
                f"{does}"
            )
        if wanted != "xla" and platform != "cuda":
            raise ValueError(
                f"{where}: implementation={wanted!r} needs an NVIDIA GPU, and this is "
                f"lowered for {platform or 'another platform'}; use "
                "implementation='xla' or None"
            )
        chosen = wanted
    if chosen in cuda.KERNELS:
        ffi.require_cuda_build()
    return chosen


def goes_to_cudnn(
    where: str, config: AttentionConfig, x: Operands, return_lse: bool = False
) -> bool:
    """Whether the call is cuDNN's, which jax.nn traces and lowers itself.

    The others are chosen among where a call is lowered, since the platform is known
    there.
    """
    if config.implementation != "cudnn":
        return False
    choose(config, x, ffi.default_platform(), return_lse=return_lse, where=where)
    return True
