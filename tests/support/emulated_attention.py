"""The libraries of the attention kernels for a CPU, which several tests run.

`paged_as_cuda` lowers calls of `paged_attention` for a CPU as they are lowered for a
GPU: the FFI handler decodes them, and what it launches runs on the emulator;
`latent_as_cuda` those over latent caches.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from cpp_programs import build_emulated, built_once

from jax_kvblock.attention import cuda as dense_cuda
from jax_kvblock.attention import dispatch as dense_dispatch
from jax_kvblock.core import ffi
from jax_kvblock.paged import cuda, dispatch

ROOT = Path(__file__).parents[2]
EMULATOR = ROOT / "tests/support/emulator"
SOURCES = tuple(  # beside the kernels
    f"cpp/host/{name}.cc"
    for name in (
        "attention_check",
        "attention_workspace",
        "message",
        "paged_check",
    )
)


# What a library of kernels has beside the source of its name: XLA handlers, for one.
PARTS = {
    "attention": ("paged_ffi",),
    "latent": ("paged_ffi",),
    "float32": ("attention_ffi",),
    "sm90": ("sm90_forward", "sm90_backward"),
}


def limits(kernels: str) -> tuple[str, ...]:
    """Flags: what is few and what is large, for the kernels' sake."""
    if kernels == "sm90":  # no queries are few; sums of dq are soon of some heads
        return ("-DKVBLOCK_MOST_FEW_QUERIES=0", "-DKVBLOCK_DQ_FRACTION=16384")
    return ("-DKVBLOCK_MOST_FEW_QUERIES=1000",)


def build(kernels: str, library: Path) -> None:
    """kernels: a source file of the emulator."""
    names = (kernels, *PARTS.get(kernels, ()))
    files = [f"tests/support/emulator/{name}.cc" for name in names]
    build_emulated(library, *limits(kernels), *files, *SOURCES)


def built(kernels: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = f"libkvblock_emulated_{kernels}.so"
    return built_once(tmp_path_factory, name, functools.partial(build, kernels))


@pytest.fixture(scope="session")
def attention_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generic kernels, and Hopper's of paged attention."""
    return built("attention", tmp_path_factory)


@pytest.fixture(params=["boxes", "rows"])
def hopper(
    request: pytest.FixtureRequest, attention_library: Path
) -> Iterator[ctypes.CDLL]:
    """The same, where Hopper's kernel takes the sequences with many queries.

    It loads boxes of blocks, if these are multiples of 8, or always row by row.
    """
    loaded = ctypes.CDLL(str(attention_library))
    loaded.emulator_set_hopper(1)
    loaded.emulator_set_block_maps(request.param == "boxes")
    yield loaded
    loaded.emulator_set_hopper(0)


@pytest.fixture(scope="session")
def float32_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generic kernels of float32."""
    return built("float32", tmp_path_factory)


@pytest.fixture(scope="session")
def fp8_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hopper's forward kernel in 8 bits."""
    return built("fp8", tmp_path_factory)


@pytest.fixture(scope="session")
def sm90_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hopper's kernels of 16 bits, forward and backward."""
    return built("sm90", tmp_path_factory)


@pytest.fixture(scope="session")
def latent_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of paged attention over latent caches."""
    return built("latent", tmp_path_factory)


@pytest.fixture
def paged_as_cuda(
    attention_library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Calls that are lowered from now on take the kernels, on CPUs too."""
    yield from _as_cuda(attention_library, monkeypatch)


@pytest.fixture
def float32_as_cuda(
    float32_library: Path,
    emulated_select: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """The same of calls of `flash_attention` and its like in float32.

    Gradients over lists call the kernel that makes lists, too.
    """
    library = ctypes.CDLL(str(float32_library))
    for op in ("forward", "backward_kv", "backward_q", "backward_bias"):
        handler = jax.ffi.pycapsule(library[f"Emulated_{op}"])
        target = f"{float32_library.stem}_{op}"
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    choose = dense_dispatch.choose

    def choose_for_cuda(config: Any, x: Any, platform: Any, **how: Any) -> str:
        return choose(config, x, "cuda", **how)

    monkeypatch.setattr(dense_cuda, "TARGET", float32_library.stem)
    monkeypatch.setattr(dense_dispatch, "choose", choose_for_cuda)
    monkeypatch.setattr(ffi, "require_cuda_build", lambda: None)
    jax.clear_caches()
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    jax.clear_caches()


@pytest.fixture
def latent_as_cuda(
    latent_library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The same of calls over latent caches."""
    yield from _as_cuda(latent_library, monkeypatch)


def _as_cuda(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    handler = jax.ffi.pycapsule(ctypes.CDLL(str(library)).EmulatedPagedAttention)
    target = library.stem  # each library has one of its own
    jax.ffi.register_ffi_target(target, handler, platform="cpu")
    monkeypatch.setattr(cuda, "TARGET", target)
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *call: choose(*call[:2], "cuda"))
    monkeypatch.setattr(cuda, "unserved_by_gpu", lambda *_: [])
    monkeypatch.setattr(ffi, "require_cuda_build", lambda: None)
    jax.clear_caches()
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    jax.clear_caches()
