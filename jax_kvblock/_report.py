"""The capability report: versions, build, devices, and who serves each op here."""

from __future__ import annotations

import dataclasses
import platform
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvblock.append import cuda as append_cuda
from jax_kvblock.attention import cuda, dispatch, tile_sizes
from jax_kvblock.attention.config import AttentionConfig, Operands
from jax_kvblock.blocks import implementations
from jax_kvblock.core import ffi
from jax_kvblock.fp8 import cuda as fp8_cuda


@dataclasses.dataclass(frozen=True)
class Served:
    """Which implementation serves an op on this process's default device, and why."""

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
TILES = "flash_attention_forward, tiles (Bc, Br)"
PAGED = "paged_attention"
APPEND = "rope_append; append_kv that quantizes or clears"
QUANTIZE = "quantize_qkv"
ATTENTION_CUDNN = "the same with implementation='cudnn'"


def capabilities() -> list[Served]:
    """For each op: the implementation that None means here, and the reason."""
    implementation, why = _copies()
    rows = [Served(op, implementation, why) for op in COPY_OPS]
    rows.insert(1, Served(OPERATIONAL_OPS, implementation, why))
    for name in implementations.CUDA_CALLS:
        implementation, why = _copies(name)
        op = f"the operational pair with implementation={name!r}"
        rows.append(Served(op, implementation, why))
    return [*rows, _append(), *_attention(), _quantizes(), _paged()]


def _append() -> Served:
    """Who computes the append where it does more than copy."""
    platform = ffi.default_platform()
    k = jax.ShapeDtypeStruct((1, 1, 128), jnp.bfloat16)
    try:
        chosen = append_cuda.choose(
            None, "rope_append", {"k": k, "pool": [k]}, platform
        )
    except RuntimeError as error:
        return Served(APPEND, "error", _reason(error))
    if chosen == "cuda":
        return Served(APPEND, "cuda (kernel)", _copies()[1])
    why = f"the kernel is for NVIDIA GPUs; this is a {platform}"
    if platform == "cuda":
        why = "no kernel for this GPU (8.0 and newer are served)"
    return Served(APPEND, "xla (plain jax, then block copies)", why)


def _quantizes() -> Served:
    """Who quantizes queries, keys and values."""
    platform = ffi.default_platform()
    x = jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.bfloat16)
    try:
        chosen = fp8_cuda.choose(None, "quantize_qkv", [x], platform)
    except RuntimeError as error:
        return Served(QUANTIZE, "error", _reason(error))
    if chosen == "cuda":
        why = f"{_copies()[1]}; float32 and other head dims by xla"
        return Served(QUANTIZE, "cuda (kernels)", why)
    why = f"the kernels are for NVIDIA GPUs; this is a {platform}"
    if platform == "cuda":
        why = "no kernels for this GPU (8.0 and newer are served)"
    return Served(QUANTIZE, "xla (plain jax)", why)


def _paged() -> Served:
    """Who computes paged_attention."""
    why = "no kernels read block tables yet; it runs everywhere"
    if ffi.default_platform() == "cuda":
        why += ", here far from the speed of memory"
    return Served(PAGED, "xla (blocks of plain jax)", why)


def _attention() -> list[Served]:
    """Who computes flash_attention; the tiles."""
    return [
        Served(ATTENTION_16_BITS, *_attends(jnp.bfloat16)),
        Served(ATTENTION_32_BITS, *_attends(jnp.float32)),
        Served(ATTENTION_64_BITS, *_attends(jnp.float64)),
        Served(ATTENTION_CUDNN, *_attends(jnp.bfloat16, "cudnn")),
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


def _attends(dtype: Any, implementation: str | None = None) -> tuple[str, str]:
    """Who computes attention in this dtype on the default device, and why."""
    a = jax.ShapeDtypeStruct((1, 128, 1, 64), dtype)
    config, x = AttentionConfig(1.0, implementation=implementation), Operands(a, a, a)
    platform = ffi.default_platform()
    try:
        chosen, in_gradients = (
            dispatch.choose(config, x, platform, backward=backward)
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
    elif platform != "cuda":
        why = f"the kernels are for NVIDIA GPUs; this is a {platform}"
    elif in_gradients == "xla":
        why = f"no kernels for {cuda.unserved_by_gpu('cuda', True)[0]}"
    else:
        _, why = _copies()
    if chosen == "xla":
        return "xla (blocks of plain jax)", why
    others = "" if in_gradients == chosen else f", gradients by {in_gradients}"
    if dtype == jnp.float32:
        why += "; near float32 by TF32 three times, precision='default' by TF32"
        if not others:
            most = cuda.MOST_FLOAT32_BACKWARD_DIM
            others = f", gradients of head dims above {most} by xla"
    return f"{chosen} (kernels){others}", why


def _cudnn() -> tuple[str, str]:
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            return "cudnn", f"{name} {metadata.version(name)}, through jax.nn"
        except metadata.PackageNotFoundError:
            continue
    return "unknown", "no cuDNN package is installed; the system may have one"


def _copies(implementation: str | None = None) -> tuple[str, str]:
    """Who computes block copies on the default device, and why."""
    platform = ffi.default_platform()
    try:
        chosen = implementations.choose(implementation, platform)
    except ValueError as error:
        return "none", _reason(error)
    except RuntimeError as error:
        return "error", _reason(error)
    if chosen == "xla":
        return "xla", f"there is no kernel for {platform}: plain jax.numpy serves"
    if platform == "cpu":
        return "kernel (CPU, threaded)", "the default device is the CPU"
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    where = f"the default device is a GPU of sm {capability}"
    return implementations.CUDA_CALLS.get(chosen, "kernel (CUDA)"), where


def _reason(error: Exception) -> str:
    """What a call would say, without the name of the function."""
    return str(error).partition(": ")[2].rstrip(".")


def report() -> str:
    """The whole report as text."""
    build = ffi.BUILD
    cuda = (
        f"CUDA {build['cuda_version']} for {build['cuda_architectures']}"
        if build["cuda"]
        else "without CUDA"
    )
    lines = [
        f"jax_kvblock {build['version']}",
        f"  python {platform.python_version()}, jax {jax.__version__}, "
        f"jaxlib {metadata.version('jaxlib')}, numpy {metadata.version('numpy')}",
        f"  built with {build['compiler']}, {cuda}",
        "devices",
        *(f"  {d} ({d.device_kind}), memories: {_memories(d)}" for d in jax.devices()),
        "ops on the default device",
    ]
    rows = capabilities()
    width = max(len(row.op) for row in rows)
    middle = max(len(row.implementation) for row in rows)
    lines += [
        f"  {row.op:<{width}}  {row.implementation:<{middle}}  {row.why}"
        for row in rows
    ]
    return "\n".join(lines)


def _memories(device: jax.Device) -> str:
    return ", ".join(memory.kind for memory in device.addressable_memories())
