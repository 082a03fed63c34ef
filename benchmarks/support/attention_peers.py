"""Attention as others have it: what `bench_attention.py` times beside ours.

Whoever is not installed is left out; whoever is, but refuses a shape, is reported.
Packages: dew-flash-attn-cu13 and flash-attn3-jax (FlashAttention-3's kernels under two
bindings), tokamax, torch. cuDNN and Pallas' example kernel come with jax.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from support import common
from support.common import cases


def in_jax(case: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Names, and functions of q, k and v, of whoever is here for this case."""
    if case.packed:
        return
    if not common.on_gpu():
        yield "xla", _of_jax(case, "xla")
        return
    # Some are timed on the best-known shapes alone; the rest would take device time and
    # compare nothing new.
    best_known = case in cases.ATTENTION_BEST_KNOWN
    yield "cudnn in jax", _of_jax(case, "cudnn")
    if _installed("dew_flash_attn"):
        yield "flash attention 3", _flash_mha(case, "dew_flash_attn")
    if best_known and _installed("flash_attn3_jax"):
        yield "flash-attn3-jax", _flash_mha(case, "flash_attn3_jax")
    if best_known and _installed("tokamax"):
        yield "tokamax", _tokamax(case)
    if case.dtype == "float16":  # the only one that it takes
        yield "pallas mosaic gpu", _pallas(case)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _of_jax(case: Any, implementation: str) -> Callable[..., Any]:
    return lambda q, k, v: jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=case.causal,
        local_window_size=_window(case),
        implementation=implementation,
    )


def _window(case: Any, none: Any = None) -> Any:
    return none if case.window is None else (case.window, 0)


def _flash_mha(case: Any, package: str) -> Callable[..., Any]:
    def function(q: Any, k: Any, v: Any) -> Any:
        module = importlib.import_module(package)
        window = _window(case, (-1, -1))
        return module.flash_mha(q, k, v, is_causal=case.causal, window_size=window)

    return function


def _tokamax(case: Any) -> Callable[..., Any]:
    def function(q: Any, k: Any, v: Any) -> Any:
        import tokamax

        return tokamax.dot_product_attention(
            q, k, v, is_causal=case.causal, implementation="mosaic"
        )

    return function


def _pallas(case: Any) -> Callable[..., Any]:
    """The example kernel, with the largest tiles that fit; causal has no backward."""

    def function(q: Any, k: Any, v: Any) -> Any:
        from jax.experimental.pallas.ops.gpu import attention_mgpu

        keys = 128 if case.head_dim <= 128 else 64
        blocks = dict.fromkeys(
            ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64
        )
        config = attention_mgpu.TuningConfig(
            block_q=64,
            block_kv=keys,
            max_concurrent_steps=2,
            causal=case.causal,
            **({} if case.causal else blocks),
        )
        return attention_mgpu.attention(q, k, v, config)

    return function


# ---- PyTorch -------------------------------------------------------------------------


def in_torch(
    case: Any, inputs: list[jax.Array]
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Names, and what makes calls (as `bench_attention.jax_calls`) on these arrays."""
    if case.packed or not common.on_gpu() or not _installed("torch"):
        return
    import torch
    from torch.nn.attention import SDPBackend

    if not torch.cuda.is_available():
        return
    if case in cases.ATTENTION_BEST_KNOWN:
        backend = SDPBackend.FLASH_ATTENTION
        yield (
            "torch flash attention 2",
            functools.partial(_torch_calls, case, inputs, backend),
        )
    if case.value_dim is not None:  # jax.nn's cuDNN refuses it, PyTorch's does not
        backend = SDPBackend.CUDNN_ATTENTION
        yield "cudnn in torch", functools.partial(_torch_calls, case, inputs, backend)


def _torch_calls(case: Any, inputs: list[jax.Array], backend: Any) -> dict[str, Any]:
    import torch
    from torch.nn.attention import sdpa_kernel

    jax.block_until_ready(inputs)
    q, k, v, d_o = (torch.from_dlpack(x).transpose(1, 2) for x in inputs)
    for x in (q, k, v):
        x.requires_grad_(True)

    def forward() -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=case.causal,
                enable_gqa=case.num_heads != case.num_kv_heads,
            )

    def forward_alone() -> Any:
        with torch.no_grad():
            return forward()

    def both() -> Any:
        out = forward()
        return out, torch.autograd.grad(out, (q, k, v), d_o)

    return {
        "forward": forward_alone,
        "both": both,
        "wait": lambda _: torch.cuda.synchronize(),
        "numpy": lambda x: rows(x.detach().transpose(1, 2).cpu().float().numpy()),
    }


def sample(length: int) -> int:
    """Of so many rows each such one is compared: about 512."""
    return max(1, length // 512)


def rows(x: Any) -> np.ndarray:
    """About 512 positions of `[B, S, N, D]`, on the host."""
    return np.asarray(x[:, :: sample(x.shape[1])], np.float32)
