"""The CUDA kernels of quantization: what they serve, and the call of their launcher.

`quantize` describes the call to the FFI handler in `cpp/ops/quantize/quantize_ffi.cc`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core import ffi
from jax_kvblock.fp8.call import Quantize, Way, blocks_of, shapes_of

TARGET = "kvblock_quantize"
DTYPES = ("bfloat16", "float16")
MAX_DIM = 128  # KVBLOCK_QUANTIZE_MAX_DIM
MOST_PARTS = 32  # host/quantize_parts.h
SHARED = ("block", "head", "tensor")  # in the order of kvblock_quantize_shared


def unserved(arrays: Sequence[Any]) -> list[str]:
    """What of a call with these arrays the kernels do not serve; empty for all."""
    missing = []
    dtypes = sorted({str(x.dtype) for x in arrays} - set(DTYPES))
    if dtypes:
        missing.append(f"dtype {dtypes[0]} ({' and '.join(DTYPES)} are served)")
    for dim in dict.fromkeys(x.shape[-1] for x in arrays):
        if dim % 16 or not 0 < dim <= MAX_DIM:
            missing.append(f"head dim {dim} (multiples of 16 up to {MAX_DIM} are)")
    capabilities = sorted(ffi.gpu_capabilities())
    if capabilities and capabilities[0] < (8, 0):
        name = ".".join(map(str, capabilities[0]))
        missing.append(f"compute capability {name} (8.0 and newer are served)")
    return missing


def choose(
    implementation: str | None,
    where: str,
    arrays: Sequence[Any],
    platform: str | None,
) -> str:
    """Who computes a call that is lowered for a platform, None being any other."""
    if implementation == "xla" or (implementation is None and platform != "cuda"):
        return "xla"
    if platform != "cuda":
        raise ValueError(
            f"{where}: implementation='cuda' needs an NVIDIA GPU, and this is lowered "
            f"for {platform or 'another platform'}; use implementation='xla' or None"
        )
    missing = unserved(arrays)
    if missing and implementation is None:
        return "xla"
    if missing:
        raise ValueError(
            f"{where}: implementation='cuda' does not serve {', '.join(missing)}; "
            "use implementation='xla' or None"
        )
    ffi.require_cuda_build()
    return "cuda"


def quantize(call: Quantize, *operands: jax.Array) -> list[jax.Array]:
    """The results of a call by the CUDA launcher."""
    results = []
    for way, x in zip(call.ways, call.arrays(operands), strict=True):
        for i, shape in enumerate(shapes_of(way, x.shape)):
            results.append(jax.ShapeDtypeStruct(shape, jnp.float32 if i else way.dtype))
    numbers = sum(
        _workspace(way, x.shape)
        for way, x in zip(call.ways, call.arrays(operands), strict=True)
    )
    workspace = jax.ShapeDtypeStruct((numbers,), jnp.float32)
    launch = jax.ffi.ffi_call(TARGET, [*results, workspace])
    # Mirrored in quantize_ffi.cc (ArrayNumber).
    ways = [
        (
            SHARED.index(way.shared),
            way.centred,
            way.turned,
            -1 if way.lengths is None else way.lengths,
            way.integers,
        )
        for way in call.ways
    ]
    return list(launch(*operands, arrays=np.array(ways, np.int64).reshape(-1)))[:-1]


def _workspace(way: Way, shape: Sequence[int]) -> int:
    """The float32 numbers that an array needs (host/quantize_parts.h)."""
    batch, rows, heads, dim = shape
    blocks = blocks_of(rows)
    parts = -(-blocks // -(-blocks // MOST_PARTS))
    sums = dim * (1 + way.turned) if way.centred else 0
    return batch * heads * parts * (sums + (way.shared != "block"))
