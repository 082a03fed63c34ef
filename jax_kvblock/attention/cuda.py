"""The CUDA kernels: what they serve, and the call of their launchers.

`run` describes the call to the FFI handlers in `cpp/ops/attention/attention_ffi.cc`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention import joining, tile_lists
from jax_kvblock.attention.config import (
    AttentionConfig,
    Operands,
    Sizes,
    result_dtype,
    sizes_of,
)
from jax_kvblock.attention.dense import NOT_LISTED, tile_map
from jax_kvblock.attention.ops import (
    BACKWARD_ADDED,
    BACKWARD_BIAS,
    FORWARD,
    JOINED,
    Call,
    LogSumExp,
    Op,
)
from jax_kvblock.core import ffi

TARGET = "kvblock_attention"  # of the FFI handlers, each an operation's
CHUNK = 64  # positions that one segment range covers; attention.h has the same number
MAX_HEAD_DIM = 256
MOST_PARTIAL = 1024  # queries and keys of a tile that has bits
MOST_JOINED_DIM = 128  # for which there is room to bring o back
# The kernels of each implementation, as attention.h numbers them (kvblock_kernels).
KERNELS = {"cuda": 0, "cuda_sm90": 1}

# As attention.h numbers them (kvblock_dtype and kvblock_precision).
DTYPES = {jnp.dtype(jnp.bfloat16): 0, jnp.dtype(jnp.float16): 1}
DTYPES |= {jnp.dtype(jnp.float32): 2, jnp.dtype(jnp.float8_e4m3fn): 3}
DTYPES |= {jnp.dtype(jnp.int8): 5}  # of queries and keys, whose values are e4m3
PRECISIONS = {"highest": 0, "default": 1}
MOST_DIM_OF_8_BITS = 128
# Gradients of float32 are for head dims up to this one.
MOST_FLOAT32_BACKWARD_DIM = 128

# The tile (queries, keys) of the forward kernels by padded head dim, for a call of 16
# bits whose value dim is the head dim and that has no options. Mirrors ForwardShapeOf
# in cpp/ops/attention/generic/forward/shape.cuh, and ForwardTilesOf in
# cpp/ops/attention/hopper/forward/tiles.h.
FORWARD_TILES: dict[str, dict[int, tuple[int, int]]] = {
    "cuda_sm90": {
        64: (192, 128),
        96: (128, 128),
        128: (128, 176),
        192: (128, 112),
        256: (128, 80),
    },
    "cuda": {64: (128, 128), 128: (128, 64), 192: (128, 64), 256: (64, 32)},
}
FLOAT32_TILES = {64: (128, 64), 128: (128, 32), 256: (64, 16)}  # the same of float32


def tiles_of(kernels: str, dtype: Any) -> dict[int, tuple[int, int]]:
    """The forward kernels' tiles (queries, keys) in this dtype; none of others."""
    if jnp.dtype(dtype) == jnp.float32:
        return FLOAT32_TILES if kernels == "cuda" else {}
    return FORWARD_TILES[kernels] if jnp.dtype(dtype).itemsize == 2 else {}


def forward_tile(kernels: str, head_dim: int, dtype: Any) -> tuple[int, int] | None:
    """The tile (queries, keys) of a head dim; None where no kernel serves it."""
    if head_dim % 8 or head_dim < 8:
        return None
    tiles = tiles_of(kernels, dtype)
    return next((tile for dim, tile in tiles.items() if dim >= head_dim), None)


def unserved(
    config: AttentionConfig, x: Operands, implementation: str, backward: bool
) -> list[str]:
    """What of a call these kernels do not serve; empty when they serve it."""
    size = sizes_of(config, x)
    if x.q_scales is not None:
        return _unserved_in_8_bits(config, x, size, implementation)
    missing = []
    if implementation == "cuda_sm90" and x.q.dtype not in (jnp.bfloat16, jnp.float16):
        missing.append(f"dtype {x.q.dtype} (bfloat16 and float16 are served)")
    elif x.q.dtype not in DTYPES:
        missing.append(f"dtype {x.q.dtype} (bfloat16, float16 and float32 are served)")
    wider = max(size.head_dim, size.value_dim)
    if backward and x.q.dtype == jnp.float32 and wider > MOST_FLOAT32_BACKWARD_DIM:
        missing.append(
            f"gradients of float32 at head dims up to {wider} (up to "
            f"{MOST_FLOAT32_BACKWARD_DIM} are served)"
        )
    for name, dim in (("head_dim", size.head_dim), ("value dim", size.value_dim)):
        if dim > MAX_HEAD_DIM or dim % 8 or not dim:
            missing.append(f"{name} {dim} (multiples of 8 up to 256 are served)")
    if config.block_q and (config.block_q % 128 or config.block_kv % 128):
        missing.append(
            f"tiles of {config.block_q} x {config.block_kv} (multiples of 128)"
        )
    if x.tile_masks is not None and max(config.block_q, config.block_kv) > MOST_PARTIAL:
        missing.append(
            f"partial tiles of {config.block_q} x {config.block_kv} (up to "
            f"{MOST_PARTIAL} on a side)"
        )
    # The forward kernels need powers of it (CheckSoftcap in attention_check.cc).
    with np.errstate(over="ignore"):
        scale, softcap = np.float32(config.scale), np.float32(config.softcap)
        factor = abs(scale) / softcap if 0 < softcap < 1024 else np.float32(0)
    if factor and not np.float32(1e-6) <= factor <= np.float32(1e5):
        missing.append(
            f"scale / softcap = {factor:.3g} (1e-6 to 1e5 is served, and any for a "
            "softcap from 1024 on)"
        )
    if x.bias is not None and x.bias.dtype not in (x.q.dtype, jnp.float32):
        missing.append(f"a bias of {x.bias.dtype} ({x.q.dtype} and float32 are served)")
    if config.dropout and implementation == "cuda_sm90":
        missing += _unserved_with_dropout(config, x)
    return missing


def _unserved_with_dropout(config: AttentionConfig, x: Operands) -> list[str]:
    """The same of Hopper's kernels with dropout; mirrors CheckDropout."""
    missing = []
    if config.scale <= 0:
        missing.append(
            f"scale={config.scale:.3g} with dropout_rate (above 0 is served)"
        )
    options = {
        "softcap": config.softcap,
        "bias": x.bias is not None,
        "tiles": x.tile_indices is not None,
    }
    return missing + [
        f"{name} with dropout_rate" for name, there in options.items() if there
    ]


def _unserved_in_8_bits(
    config: AttentionConfig, x: Operands, size: Sizes, implementation: str
) -> list[str]:
    """The same for 8 bits; mirrors CheckNarrowCall in attention_check.cc."""
    if implementation != "cuda_sm90":
        return [f"dtype {x.q.dtype} (Hopper's kernels alone multiply 8 bits)"]
    missing = []
    for name, dim in (("head_dim", size.head_dim), ("value dim", size.value_dim)):
        if dim > MOST_DIM_OF_8_BITS or dim % 16 or not dim:
            missing.append(
                f"{name} {dim} in 8 bits (multiples of 16 up to {MOST_DIM_OF_8_BITS} "
                "are served)"
            )
    if config.scale <= 0:
        missing.append(f"scale={config.scale:.3g} in 8 bits (above 0 is served)")
    options = {
        "cu_seqlens": config.packed,
        "softcap": config.softcap,
        "bias": x.bias is not None,
        "tiles": x.tile_indices is not None,
        "dropout_rate": config.dropout,
    }
    missing += [f"{name} in 8 bits" for name, there in options.items() if there]
    return missing


def unserved_by_gpu(implementation: str, backward: bool) -> list[str]:
    """What of a call these kernels do not serve on the GPUs of this process.

    Empty where there is no GPU: a program for another machine may be exported.
    """
    capabilities = sorted(ffi.gpu_capabilities())
    for capability in capabilities:
        name = f"compute capability {'.'.join(map(str, capability))}"
        if implementation == "cuda_sm90" and capability != (9, 0):
            return [f"{name} (9.0 alone is served)"]
        if capability < (8, 0):
            return [f"{name} (8.0 and newer are served)"]
        # These have 99 KiB of shared memory for a thread block; 8.0 has 163.
        small = capability in ((8, 6), (8, 9)) or capability[0] == 12
        if backward and small:
            return [f"gradients on {name} (they need 163 KiB of shared memory, as 8.0, "
                    "9.0 and 10.0 have)"]  # fmt: skip
    if implementation == "cuda_sm90" and capabilities and not _built_for_hopper():
        return ["this build (rebuild it with 90a among CUDA_ARCHS)"]
    return []


def _built_for_hopper() -> bool:
    return "90a" in ffi.BUILD["cuda_architectures"]


def best_kernels() -> tuple[str, ...]:
    """The kernels that None tries on the GPUs of this process, best first.

    What is exported where there is no GPU should run on any: the generic ones.
    """
    if ffi.gpu_capabilities() and not unserved_by_gpu("cuda_sm90", False):
        return ("cuda_sm90", "cuda")
    return ("cuda",)


def joins_forward(kernels: str, config: AttentionConfig, x: Operands) -> bool:
    """Whether a forward kernel joins its own o and lse with those of other keys."""
    absent = all(a is None for a in (x.bias, x.sinks, x.tile_indices, x.q_scales))
    plain = config.softcap == 0 and config.scale > 0 and not config.dropout
    room = max(x.q.shape[-1], x.v.shape[-1]) <= MOST_JOINED_DIM
    return kernels == "cuda_sm90" and absent and plain and room


def _in_turns(kernels: str, x: Operands) -> bool:
    """Whether thread blocks can add to dq in a fixed order."""
    plain = x.q_segments is None and x.tile_indices is None
    return kernels == "cuda_sm90" and plain


# ---- the call ------------------------------------------------------------------------

# The optional operands of the handlers, in order; bit i of `present` says whether
# operand i is there. Mirrored in attention_ffi.cc.
OPTIONAL = (
    "bias",
    "sinks",
    "q_segments",
    "kv_segments",
    "q_segment_ranges",
    "kv_segment_ranges",
    "q_lens",
    "kv_lens",
    "shift",
    "cu_q",
    "cu_kv",
    "tile_indices",
    "tile_counts",
    "tile_indices_t",
    "tile_counts_t",
    "tile_map",
    "tile_masks",
    "q_scales",
    "k_scales",
    "v_scales",
    "dropout_keys",
)


def run(op: Op, call: Call, kernels: str, *arrays: Any) -> tuple[Any, ...]:
    """The results of one operation by the CUDA launchers."""
    config: AttentionConfig = call.config
    x: Operands = call.unpack(arrays[: len(call.present)])
    extra = [*arrays[len(call.present) :]]
    size = sizes_of(config, x)
    if op.is_forward and config.shares_gpu and kernels == "cuda_sm90":
        x = _as_uneven(x, size)
    if op is JOINED and not joins_forward(kernels, config, x):
        before_o, before_lse = extra
        o, *lse = run(FORWARD, call, kernels, *arrays[: len(call.present)])
        return joining.join(before_o, before_lse, o, LogSumExp(*lse).value)
    if op.is_forward:
        made = _forward_results(config, size, x)
        results = [made[name] for name in op.result_names(call)]
        scratch = []
        present = _present(x._asdict())
        if room := workspace_bytes(kernels, x.q.dtype, size, present, False):
            scratch.append(jax.ShapeDtypeStruct((room,), jnp.uint8))
        launch = functools.partial(_call, kernels, config, x, size, ())
        in_place = dict(enumerate(extra))  # o and lse, of a joined one
        found = launch("forward", results + scratch, in_place=in_place)
        return tuple(found[: len(results)])
    dq = extra.pop() if op is BACKWARD_ADDED else None
    launch = functools.partial(_call, kernels, config, x, size, extra)
    if op is BACKWARD_BIAS:
        return tuple(launch("backward_bias", [_like(x.bias)]))
    return _backward(launch, kernels, config, x, size, dq)


def _as_uneven(x: Operands, size: Sizes) -> Operands:
    """With lengths, though they are all there is.

    Then the kernel hands out tiles as thread blocks end. Else each has a fixed
    share, and those that find no multiprocessor begin when all others have ended.
    """
    uneven = (x.cu_q, x.q_lens, x.kv_lens, x.q_segments, x.tile_indices)
    if any(a is not None for a in uneven):
        return x
    return x._replace(q_lens=jnp.full((size.batch,), size.q_len, jnp.int32))


def workspace_bytes(
    kernels: str, dtype: Any, size: Sizes, present: int, backward: bool
) -> int:
    """Bytes that a call works in, by the function that the handler asks too.

    Bit i of `present` tells whether the i-th of OPTIONAL is there.
    """
    return ffi.attention_workspace(
        KERNELS[kernels],
        DTYPES[jnp.dtype(dtype)],
        size.batch,
        size.q_len,
        size.kv_len,
        size.num_heads,
        size.num_kv_heads,
        size.head_dim,
        size.value_dim,
        present,
        backward,
    )


def _present(optional: dict[str, Any]) -> int:
    """A bit for each of OPTIONAL that is there."""
    return sum(
        1 << i for i, name in enumerate(OPTIONAL) if optional.get(name) is not None
    )


def _backward(
    launch: Callable[..., Sequence[Any]],
    kernels: str,
    config: AttentionConfig,
    x: Operands,
    size: Sizes,
    before: Any,
) -> tuple[Any, Any, Any]:
    """dq, dk, dv; dq is added to `before`, where that is not None."""
    dk_dv = [_like(x.k), _like(x.v)]
    if config.deterministic and not _in_turns(kernels, x):
        dk, dv = launch("backward_kv", dk_dv)
        (dq,) = launch("backward_q", [_like(x.q)])
        return dq if before is None else joining.added(before, dq), dk, dv
    if kernels == "cuda_sm90":
        results = [*dk_dv, _like(x.q)]
        present = _present(x._asdict())
        if room := workspace_bytes(kernels, x.q.dtype, size, present, True):
            results.append(jax.ShapeDtypeStruct((room,), jnp.uint8))
        made = launch(
            "backward_kv",
            results,
            deterministic=config.deterministic,
            in_place={} if before is None else {2: before},
        )
        dk, dv, dq = made[:3]
        return dq, dk, dv
    # The sums lie in blocks of 8 rows by 8 columns: an addition of a warp falls on few
    # lines of memory. XLA puts them in order while it casts.
    rows = size.q_len if config.packed else size.batch * size.q_len
    blocks = (size.num_heads, -(-rows // 8), size.head_dim // 8, 8, 8)
    sums = jax.ShapeDtypeStruct(blocks, jnp.float32)
    dk, dv, added = launch("backward_kv", [*dk_dv, sums])
    added = added.transpose(1, 3, 0, 2, 4)
    dq = added.reshape(blocks[1] * 8, *x.q.shape[-2:])[:rows].reshape(x.q.shape)
    dq = dq * np.float32(config.scale)
    if before is not None:
        dq = joining.added(before, dq)
    return dq.astype(x.q.dtype), dk, dv


def _like(a: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def _forward_results(
    config: AttentionConfig, size: Sizes, x: Operands
) -> dict[str, Any]:
    heads = (size.num_heads, size.q_len)
    shape = heads if config.packed else (size.batch, *heads)
    rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    o = jax.ShapeDtypeStruct((*x.q.shape[:-1], size.value_dim), result_dtype(x))
    return {"o": o, "lse": rows, "base": rows}


def _call(
    kernels: str,
    config: AttentionConfig,
    x: Operands,
    size: Sizes,
    extra: Sequence[Any],
    op: str,
    results: list[Any],
    deterministic: bool = False,
    in_place: Mapping[int, Any] = MappingProxyType({}),
) -> Sequence[Any]:
    """in_place: by the numbers of results, what these are joined with, or added to.

    They are the last operands, and the results take their memory.
    """
    optional = _optional(op, config, x, size)
    present = _present(optional)
    given = [optional[name] for name in OPTIONAL if optional.get(name) is not None]
    operands = [x.q, x.k, x.v, *given, *extra]
    aliases = {len(operands) + i: result for i, result in enumerate(in_place)}
    target = f"{TARGET}_{op}"
    call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    return call(
        *operands,
        *in_place.values(),
        kernels=np.int64(KERNELS[kernels]),
        precision=np.int64(PRECISIONS[config.precision]),
        present=np.int64(present),
        packed=np.int64(config.packed),
        deterministic=np.int64(deterministic),
        joins=np.int64(bool(in_place)),
        window_left=np.int64(min(config.window_left, 2**31 - 1)),
        window_right=np.int64(min(config.window_right, 2**31 - 1)),
        scale=np.float32(config.scale),
        softcap=np.float32(config.softcap),
        tile_q=np.int64(config.block_q),
        tile_kv=np.int64(config.block_kv),
        dropout=np.int64(config.dropout),
    )


def _optional(
    op: str, config: AttentionConfig, x: Operands, size: Sizes
) -> dict[str, Any]:
    found = {name: a for name, a in x._asdict().items() if name in OPTIONAL}
    if x.q_segments is not None:
        found["q_segment_ranges"] = _ranges(x.q_segments)
        found["kv_segment_ranges"] = _ranges(x.kv_segments)
    if x.tile_indices is not None and op == "backward_kv":
        lists = _transposed(config, x, size)
        found["tile_indices_t"], found["tile_counts_t"] = lists
    if x.tile_masks is not None:
        found["tile_map"] = tile_map(config, x, size.kv_len)
        found["tile_indices"] = _flagged(x)
    if op.startswith("backward"):
        found["sinks"] = None  # lse holds them
    return found


def _ranges(segments: jax.Array) -> jax.Array:
    """The smallest and largest segment of each chunk, int32 `[B, chunks, 2]`."""
    batch, length = segments.shape
    chunks = -(-length // CHUNK)
    missing = ((0, 0), (0, chunks * CHUNK - length))
    padded = jnp.pad(segments, missing, mode="edge") if length else segments
    padded = padded.reshape(batch, chunks, CHUNK)
    return jnp.stack([padded.min(-1), padded.max(-1)], -1)


PARTIAL = 1 << 30  # in an entry of a list, of a tile that has bits; as in attention.h


def _flagged(x: Operands) -> jax.Array:
    """The lists as the kernels get them: entries say whether their tile is partial."""
    entries, partial = x.tile_indices, x.tile_partial
    there = (entries >= 0) & (entries < PARTIAL) & (partial < x.tile_masks.shape[0])
    flag = jnp.where(partial >= 0, PARTIAL, 0).astype(jnp.int32)
    return jnp.where(there, entries + flag, -1)


def _transposed(
    config: AttentionConfig, x: Operands, size: Sizes
) -> tuple[jax.Array, jax.Array]:
    """For each KV tile the query tiles that list it, in order, and how many do.

    The kernels use no entry behind these: there it is -1 or any other.
    """
    tiles = jnp.swapaxes(tile_map(config, x, size.kv_len), 2, 3)
    listed = tiles != NOT_LISTED
    if tile_lists.serves(listed):
        order, counts = tile_lists.list_tiles(listed, width=listed.shape[-1])
    else:
        order = jnp.argsort(~listed, axis=-1, stable=True).astype(jnp.int32)
        counts = listed.sum(-1, dtype=jnp.int32)
    if x.tile_masks is not None:
        kinds = jnp.take_along_axis(tiles, jnp.maximum(order, 0), axis=-1)
        partial = (order >= 0) & (kinds >= 0)
        order += jnp.where(partial, PARTIAL, 0).astype(jnp.int32)
    return order, counts
