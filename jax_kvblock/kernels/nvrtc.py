"""CUDA C++ to PTX by NVRTC, kept on disk.

NVRTC is called by cuda-bindings, NVIDIA's own Python package, an optional extra. It
runs without a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jax_kvblock.core import ffi

MISSING = (
    "from_cuda: NVRTC is not here. `pip install 'jax_kvblock[kernels]'` brings it; it "
    "needs no GPU"
)
OLDEST = "80"  # what is compiled for where there is no GPU

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^">\n]+)[">]', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Compiled:
    text: str
    entry: str  # the kernel's name in it


@dataclasses.dataclass(frozen=True)
class Source:
    """What a compilation depends on, but for the version of the compiler."""

    text: str
    name: str  # of the kernel, as C++ has it
    shown: str  # the file's name in the compiler's messages
    folders: tuple[str, ...]
    options: tuple[str, ...]
    arch: str

    def key(self, version: str) -> str:
        parts = [version, self.text, self.name, self.shown, self.arch, *self.options]
        parts += [*self.folders, *_included(self.text, self.folders)]
        lengths = json.dumps(parts).encode()
        return hashlib.sha256(lengths).hexdigest()


def compile_to_ptx(source: Source, *, cache: bool) -> Compiled:
    """The PTX of a module, and the name that a kernel has in it."""
    kept = cache_folder() / f"{source.key(_version())}.json"
    if cache and (found := _load(kept)) is not None:
        return found
    made = _compile(source)
    if cache:
        _save(kept, made)
    return made


def default_arch() -> str:
    """Of the oldest GPU here, with what it alone has; "80" without a GPU."""
    capabilities = ffi.gpu_capabilities()
    if not capabilities:
        return OLDEST
    major, minor = min(capabilities)
    alike = len(capabilities) == 1 and major >= 9
    return f"{major}{minor}{'a' if alike else ''}"


def cache_folder() -> Path:
    given = os.environ.get("JAX_KVBLOCK_CACHE_DIR")
    return Path(given) if given else Path.home() / ".cache" / "jax_kvblock" / "kernels"


# ---- the compiler --------------------------------------------------------------------


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise RuntimeError(MISSING) from error
    return nvrtc


@functools.cache
def _version() -> str:
    """Of NVRTC. Asking the package's metadata is a thousandth of loading it."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("nvidia-cuda-nvrtc")
    nvrtc = _nvrtc()
    _, major, minor = _call(nvrtc, nvrtc.nvrtcVersion)
    return f"{major}.{minor}"


def _call(nvrtc: Any, function: Any, *args: Any) -> Any:
    """The result of one of NVRTC's functions."""
    try:
        status, *results = function(*args)
    except RuntimeError as error:  # the library is not there
        raise RuntimeError(MISSING) from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, said = nvrtc.nvrtcGetErrorString(status)
        raise NvrtcError(said.decode())
    return results[0] if len(results) == 1 else (status, *results)


class NvrtcError(Exception):
    """What NVRTC says of a call that failed."""


def _compile(source: Source) -> Compiled:
    nvrtc = _nvrtc()
    call = functools.partial(_call, nvrtc)
    program = call(
        nvrtc.nvrtcCreateProgram,
        source.text.encode(),
        source.shown.encode(),
        0,
        [],
        [],
    )
    try:
        name = source.name.encode()
        call(nvrtc.nvrtcAddNameExpression, program, name)
        includes = [f"-I{folder}" for folder in (*source.folders, *_headers())]
        options = [f"--gpu-architecture=compute_{source.arch}", *includes]
        options += ["--std=c++17", *source.options]
        try:
            call(
                nvrtc.nvrtcCompileProgram,
                program,
                len(options),
                [o.encode() for o in options],
            )
        except NvrtcError as error:
            log = _text(nvrtc, program, "ProgramLog").strip()
            raise ValueError(
                f"from_cuda: {source.shown} does not compile for sm_{source.arch} "
                f"({error}):\n{log}"
            ) from None
        entry = call(nvrtc.nvrtcGetLoweredName, program, name).decode()
        return Compiled(_text(nvrtc, program, "PTX"), entry)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(nvrtc: Any, program: Any, what: str) -> str:
    size = _call(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size"), program)
    text = b" " * size
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.rstrip(b"\0").decode()


def _headers() -> list[str]:
    """Where our own headers lie, and cuda_fp16.h and the others, if installed."""
    own = str(Path(__file__).parents[1] / "include")
    try:
        from cuda.pathfinder import (  # type: ignore[import-untyped, unused-ignore]
            find_nvidia_header_directory,
        )
    except ImportError:
        return [own]
    found = (find_nvidia_header_directory(name) for name in ("cudart", "cccl"))
    return [own, *(folder for folder in found if folder)]


# ---- what is kept --------------------------------------------------------------------


def _included(
    text: str, folders: Sequence[str], seen: set[Path] | None = None
) -> Iterable[str]:
    """The texts of all files that a source includes from these folders."""
    seen = set() if seen is None else seen
    for name in _INCLUDE.findall(text):
        path = next((p for f in folders if (p := Path(f) / name).is_file()), None)
        if path is None or path in seen:
            continue
        seen.add(path)
        part = path.read_text()
        yield part
        yield from _included(part, [str(path.parent), *folders], seen)


def _load(path: Path) -> Compiled | None:
    try:
        return Compiled(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # not there, or half of it
        return None


def _save(path: Path, made: Compiled) -> None:
    """Whole or not at all, whoever else writes it. A disk that is full is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".part", delete=False
        ) as part:
            json.dump(dataclasses.asdict(made), part)
        os.replace(part.name, path)
