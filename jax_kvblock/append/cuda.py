"""The CUDA kernel: what it serves, and the call of its launcher.

`append` describes the call to the FFI handler in `cpp/ops/append/append_ffi.cc`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.append.call import NAMES, NORMS, Append
from jax_kvblock.core import checks, ffi

DTYPES = ("bfloat16", "float16", "float32")
MAX_ARRAYS = 256  # of a pool: their addresses travel as parameters (append.h)
MAX_BYTES = 2048  # of a head's row; append.h has the same number


def tokens_of(x: dict[str, Any]) -> Any:
    """The operand whose dtype and head dim are those of all new tokens."""
    return x["qkv"] if "qkv" in x else x["k"]


def unserved(x: dict[str, Any]) -> list[str]:
    """What of a call with these operands the kernel does not serve; empty for all."""
    missing = []
    tokens = tokens_of(x)
    if tokens.dtype.name not in DTYPES:
        missing.append(f"dtype {tokens.dtype} ({', '.join(DTYPES)} are served)")
    if len(x["pool"]) > MAX_ARRAYS:
        missing.append(
            f"a pool of {len(x['pool'])} arrays (up to {MAX_ARRAYS} are served)"
        )
    row = tokens.shape[-1] * tokens.dtype.itemsize
    if row > MAX_BYTES:
        missing.append(f"heads of {row} bytes (up to {MAX_BYTES} are served)")
    capabilities = sorted(ffi.gpu_capabilities())
    if capabilities and capabilities[0] < (8, 0):
        name = ".".join(map(str, capabilities[0]))
        missing.append(f"compute capability {name} (8.0 and newer are served)")
    return missing


def choose(
    implementation: str | None, where: str, x: dict[str, Any], platform: str | None
) -> str:
    """Who computes a call that is lowered for a platform, None being any other."""
    if implementation == "xla" or (implementation is None and platform != "cuda"):
        return "xla"
    asked = "kernel" if where == "append_kv" else "cuda"
    if platform != "cuda":
        raise ValueError(
            f"{where}: implementation={asked!r} needs an NVIDIA GPU where it rotates, "
            f"quantizes or clears, and this is lowered for "
            f"{platform or 'another platform'}; use implementation='xla' or None"
        )
    missing = unserved(x)
    if missing and implementation is None:
        return "xla"
    if missing:
        raise ValueError(
            f"{where}: implementation={asked!r} does not serve {', '.join(missing)}; "
            "use implementation='xla' or None"
        )
    checks.check_compiled(where, (n for a in jax.tree.leaves(x) for n in a.shape))
    ffi.require_cuda_build()
    return "cuda"


# ---- the call ------------------------------------------------------------------------


def append(call: Append, *operands: jax.Array) -> list[Any]:
    """The results of a call by the CUDA launcher, which updates in place."""
    x = call.unpack(operands)
    dtype = tokens_of(x).dtype
    ready = [
        _ready(name, a, dtype)
        for name, a in zip(call.operand_names, operands, strict=True)
    ]
    aliases: dict[int, int] = {}
    results: list[jax.ShapeDtypeStruct] = []
    for name, i in call.results:
        shape = ready[i].shape
        if name == "q":
            shape = call.queries(shape)
        else:
            aliases[i] = len(results)
        results.append(jax.ShapeDtypeStruct(shape, ready[i].dtype))
    launch = jax.ffi.ffi_call("kvblock_append", results, input_output_aliases=aliases)
    return list(launch(*ready, **attributes(call, x)))


def _ready(name: str, a: jax.Array, dtype: Any) -> jax.Array:
    """An operand as the kernel reads it: weights in q's dtype or float32."""
    if name in NORMS and a.dtype != dtype:
        return a.astype(jnp.float32)
    return a


def attributes(call: Append, x: dict[str, Any]) -> dict[str, Any]:
    """What the handler is told. The dtypes are settled here and nowhere else."""
    side, sizes = call.pool, call.extents
    itemsize = x["pool"][0].dtype.itemsize
    strides = {axis: n * itemsize for axis, n in side.strides().items()}
    # Mirrored in append_ffi.cc (PoolNumbers).
    pool = (
        call.num_layers,
        sizes["B"],
        sizes["T"],
        sizes["H"],
        call.layer,
        call.num_layers if call.all_layers else 1,
        side.table_strides().get("L", 0),
        *(strides.get(axis, 0) for axis in "LBOTHD"),
    )
    return {
        "present": np.int64(sum(1 << NAMES.index(n) for n in call.present)),
        "num_pool": np.int64(side.num_arrays),
        "pool": np.array(pool, np.int64),
        "rotary_dim": np.int64(call.rotary_dim),
        "interleaved": np.int64(call.interleaved),
        "zero_tail": np.int64(call.zero_tail),
        "norm_eps": np.float32(call.norm_eps),
    }
