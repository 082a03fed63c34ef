"""Which implementation serves each op on a device: what the dispatch of each says."""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.append import cuda as append_cuda
from jax_kvblock.attention import cuda, dispatch, tile_sizes
from jax_kvblock.attention.config import AttentionConfig, Operands
from jax_kvblock.blocks import implementations
from jax_kvblock.blocks.layout import BlockSpec
from jax_kvblock.blocks.pool import KVPool
from jax_kvblock.core import ffi
from jax_kvblock.fp8 import cuda as fp8_cuda
from jax_kvblock.paged import dispatch as paged_dispatch
from jax_kvblock.paged.call import Paged, PagedConfig
from jax_kvblock.training import units


@dataclasses.dataclass(frozen=True)
class Served:
    """Which implementation serves an op on a device, and why.

    Attributes:
      op: what is called, and with what.
      implementation: what computes it, as `python -m jax_kvblock` tells it: "xla …" for
        plain JAX, "cuda …" or "kernel …" for ours, "none" where what was asked for is
        refused, "error" where a call would fail.
      why: the reason, in the words of the message that a call would have.
    """

    op: str
    implementation: str
    why: str


COPY_OPS = (
    "block_to_universal / universal_to_block",
    "convert_blocks",
    "gather_blocks / scatter_blocks",
    "copy_blocks / transfer_blocks",
    "append_kv / gather_kv",
)
OPERATIONAL_OPS = "block_to_operational / operational_to_block"
ATTENTION_16_BITS = "flash_attention, bfloat16 and float16"
ATTENTION_32_BITS = "flash_attention, float32"
ATTENTION_64_BITS = "flash_attention, float64"
ATTENTION_8_BITS = "fp8_attention"
TILES = "flash_attention_forward, tiles (Bc, Br)"
PAGED = "paged_attention, bfloat16"
PAGED_8_BITS = "the same with a cache of float8_e4m3fn"
APPEND = "rope_append; append_kv that quantizes or clears"
QUANTIZE = "quantize_qkv"
PRODUCTS_8_BITS = "training.fp8_dot"
ATTENTION_CUDNN = "the same with implementation='cudnn'"


def capabilities(device: jax.Device | None = None) -> list[Served]:
    """For each op: the implementation that None means on a device, and the reason.

    It asks the functions that decide when a call is lowered. These look at all GPUs of
    the process: a program may run on any of them.

    Args:
      device: the default device unless given.

    Returns:
      A row for each op: block copies, appends, attention by dtype and its tiles,
      quantization, paged attention, products of 8 bits.

    Raises:
      TypeError: it is no device.
    """
    if device is not None and not hasattr(device, "platform"):
        raise TypeError(
            f"capabilities: device must be a device of JAX, got "
            f"{type(device).__name__}; pass jax.devices()[0]"
        )
    where = _Where(device)
    implementation, why = _copies(where)
    rows = [Served(op, implementation, why) for op in COPY_OPS]
    rows.insert(1, Served(OPERATIONAL_OPS, implementation, why))
    for name in implementations.CUDA_CALLS:
        implementation, why = _copies(where, name)
        op = f"the operational pair with implementation={name!r}"
        rows.append(Served(op, implementation, why))
    rows += [_append(where), *_attention(where), _quantizes(where)]
    rows += [_paged(where, PAGED), _paged(where, PAGED_8_BITS)]
    return [*rows, _multiplies(where)]


class _Where:
    """A device, and what programs for it are lowered for."""

    def __init__(self, device: jax.Device | None) -> None:
        default = device is None
        self.device = jax.devices()[0] if device is None else device
        self.platform = (
            ffi.default_platform() if default else ffi.platform_of(self.device)
        )
        self.name = "the default device" if default else str(self.device)


def _append(where: _Where) -> Served:
    """Who computes the append where it does more than copy."""
    k = jax.ShapeDtypeStruct((1, 1, 128), jnp.bfloat16)
    try:
        chosen = append_cuda.choose(
            None, "rope_append", {"k": k, "pool": [k]}, where.platform
        )
    except RuntimeError as error:
        return Served(APPEND, "error", _reason(error))
    if chosen == "cuda":
        return Served(APPEND, "cuda (kernel)", _copies(where)[1])
    why = f"the kernel is for NVIDIA GPUs; this is a {where.platform}"
    if where.platform == "cuda":
        why = "no kernel for this GPU (8.0 and newer are served)"
    return Served(APPEND, "xla (plain jax, then block copies)", why)


def _quantizes(where: _Where) -> Served:
    """Who quantizes queries, keys and values."""
    x = jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.bfloat16)
    try:
        chosen = fp8_cuda.choose(None, "quantize_qkv", [x], where.platform)
    except RuntimeError as error:
        return Served(QUANTIZE, "error", _reason(error))
    if chosen == "cuda":
        why = f"{_copies(where)[1]}; float32 and other head dims by xla"
        return Served(QUANTIZE, "cuda (kernels)", why)
    why = f"the kernels are for NVIDIA GPUs; this is a {where.platform}"
    if where.platform == "cuda":
        why = "no kernels for this GPU (8.0 and newer are served)"
    return Served(QUANTIZE, "xla (plain jax)", why)


def _multiplies(where: _Where) -> Served:
    """Who multiplies in 8 bits."""
    try:
        found = units.served_by("fp8_dot", where.device)
    except RuntimeError as error:
        return Served(PRODUCTS_8_BITS, "none", _reason(error))
    if found == "tensor cores":
        return Served(PRODUCTS_8_BITS, "xla (cuBLASLt in 8 bits)", _copies(where)[1])
    why = f"the {where.platform} rounds to the same 8 bits and adds in float32"
    return Served(PRODUCTS_8_BITS, "xla (emulated)", why)


def _paged(where: _Where, op: str) -> Served:
    """Who computes paged_attention: of one query of head dim 128, in 16 bits."""
    dtype = jnp.float8_e4m3fn if op == PAGED_8_BITS else jnp.bfloat16
    spec = BlockSpec(1, 2, 16, 1, 128, dtype)
    blocks = jax.ShapeDtypeStruct((2, *spec.block_shape), dtype)
    pool = KVPool.tree_unflatten(spec, [blocks])
    q = jax.ShapeDtypeStruct((1, 1, 1, 128), jnp.bfloat16)
    tables, lens = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, 2), (1,)))
    call: Any = Paged(q, pool, None, tables, lens, None, None, None)  # type: ignore[arg-type]
    config = PagedConfig(AttentionConfig(1.0), 0)
    try:
        chosen = paged_dispatch.choose(config, call, where.platform)
    except RuntimeError as error:
        return Served(op, "error", _reason(error))
    if chosen == "cuda":
        return Served(op, "cuda (kernels)", _copies(where)[1])
    why = f"the kernels are for NVIDIA GPUs; this is a {where.platform}"
    if where.platform == "cuda":
        why = "no kernels for this GPU (8.0 and newer are served)"
    return Served(op, "xla (blocks of plain jax)", why)


def _attention(where: _Where) -> list[Served]:
    """Who computes flash_attention; the tiles."""
    return [
        Served(ATTENTION_16_BITS, *_attends(where, jnp.bfloat16)),
        Served(ATTENTION_32_BITS, *_attends(where, jnp.float32)),
        Served(ATTENTION_64_BITS, *_attends(where, jnp.float64)),
        Served(ATTENTION_CUDNN, *_attends(where, jnp.bfloat16, "cudnn")),
        Served(ATTENTION_8_BITS, *_attends_in_8_bits(where)),
        *(
            Served(f"{TILES}, 16 bits", kernels, _tiles(kernels, jnp.bfloat16))
            for kernels in dict.fromkeys((*cuda.best_kernels(), "cuda"))
        ),
        Served(f"{TILES}, float32", "cuda", _tiles("cuda", jnp.float32)),
        Served(
            TILES,
            "xla",
            f"each one of {', '.join(map(str, tile_sizes.XLA_BLOCKS))}",
        ),
    ]


def _tiles(kernels: str, dtype: Any) -> str:
    """The tiles of these kernels, and the head dims they are for."""
    tiles = cuda.tiles_of(kernels, dtype)
    largest = {tile: dim for dim, tile in tiles.items()}
    return "; ".join(
        f"({keys}, {queries}) for head dims up to {dim}"
        for (queries, keys), dim in largest.items()
    )


def _attends(
    where: _Where, dtype: Any, implementation: str | None = None
) -> tuple[str, str]:
    """Who computes attention in this dtype on a device, and why."""
    a = jax.ShapeDtypeStruct((1, 128, 1, 64), dtype)
    config, x = AttentionConfig(1.0, implementation=implementation), Operands(a, a, a)
    try:
        chosen, in_gradients = (
            dispatch.choose(config, x, where.platform, backward=backward)
            for backward in (False, True)
        )
    except ValueError as error:
        return "none", _reason(error)
    except RuntimeError as error:
        return "error", _reason(error)
    if chosen == "cudnn":
        return _cudnn()
    if dtype == jnp.float64:
        why = "the kernels are for float32 and 16 bits"
    elif where.platform != "cuda":
        why = f"the kernels are for NVIDIA GPUs; this is a {where.platform}"
    elif in_gradients == "xla":
        why = f"no kernels for {cuda.unserved_by_gpu('cuda', True)[0]}"
    else:
        _, why = _copies(where)
    if chosen == "xla":
        return "xla (blocks of plain jax)", why
    others = "" if in_gradients == chosen else f", gradients by {in_gradients}"
    if dtype == jnp.float32:
        why += "; near float32 by TF32 three times, precision='default' by TF32"
        if not others:
            most = cuda.MOST_FLOAT32_BACKWARD_DIM
            others = f", gradients of head dims above {most} by xla"
    return f"{chosen} (kernels){others}", why


def _attends_in_8_bits(where: _Where) -> tuple[str, str]:
    """Who multiplies e4m3: of head dim 128."""
    a = jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
    x = Operands(a, a, a, q_scales=scales, k_scales=scales, v_scales=scales)
    try:
        chosen = dispatch.choose(AttentionConfig(1.0), x, where.platform)
    except ValueError as error:
        return "none", _reason(error)
    except RuntimeError as error:
        return "error", _reason(error)
    return f"{chosen} (kernels), gradients in 16 bits", _copies(where)[1]


def _cudnn() -> tuple[str, str]:
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            return "cudnn", f"{name} {metadata.version(name)}, through jax.nn"
        except metadata.PackageNotFoundError:
            continue
    return "unknown", "no cuDNN package is installed; the system may have one"


def _copies(where: _Where, implementation: str | None = None) -> tuple[str, str]:
    """Who computes block copies on a device, and why."""
    platform = where.platform
    try:
        chosen = implementations.choose(implementation, platform)
    except ValueError as error:
        return "none", _reason(error)
    except RuntimeError as error:
        return "error", _reason(error)
    if chosen == "xla":
        return "xla", f"there is no kernel for {platform}: plain jax.numpy serves"
    if platform == "cpu":
        return "kernel (CPU, threaded)", f"{where.name} is the CPU"
    capability = getattr(where.device, "compute_capability", "unknown")
    why = f"{where.name} is a GPU of sm {capability}"
    return implementations.CUDA_CALLS.get(chosen, "kernel (CUDA)"), why


def _reason(error: Exception) -> str:
    """What a call would say, without the name of the function."""
    return str(error).partition(": ")[2].rstrip(".")
