"""Kernels as values: where they come from, and what is known of their parameters."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_kvblock.core.checks import as_int, check_count, plural, shown
from jax_kvblock.kernels import nvrtc, ptx
from jax_kvblock.kernels.ptx import Loaded, Parameter

PathOrText = str | Path | bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """A CUDA kernel, as text or machine code. Nothing is loaded before it runs.

    Kernels of the same code are equal, wherever they come from.

    Attributes:
        name: the entry, as the module has it.
        image: PTX text, or a cubin or fatbin.
        parameters: of the kernel, in order; `None` where nothing tells them.
        block: threads of a block that the kernel is meant for, as its sidecar or its
            PTX (`.reqntid`) says.
        block_is_fixed: no launch may have another; compilers that know the block when
            they compile, as Triton does, say so.
        shared_memory: bytes of dynamic shared memory, as its sidecar says.
        max_threads: the most threads of a block, where the PTX says that.
        shown: what messages call it.
    """

    name: str
    image: bytes
    parameters: tuple[Parameter, ...] | None = None
    block: tuple[int, int, int] | None = None
    shared_memory: int = 0
    max_threads: int | None = None
    shown: str = ""
    block_is_fixed: bool = False

    @property
    def is_ptx(self) -> bool:
        return not self.image.startswith((b"\x7fELF", b"\x50\xed\x55\xba"))

    @functools.cached_property
    def digest(self) -> str:
        """Of the code and the entry."""
        return hashlib.sha256(self.name.encode() + b"\0" + self.image).hexdigest()

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self.digest, self.parameters, self.block, self.shared_memory)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Kernel({self.shown or self.name!r})"

    def say(self, number: int) -> str:
        """What messages call a parameter: "parameter 3, 'n' (u32)"."""
        if self.parameters is None:
            return f"parameter {number}"
        parameter = self.parameters[number]
        name = f", {parameter.name!r}" if parameter.name else ""
        kind = f"{parameter.size} bytes" if parameter.is_bytes else parameter.type
        return f"parameter {number}{name} ({kind})"

    def number_of(self, where: str, name: int | str) -> int:
        """The number of a parameter, given by it or by its name."""
        known = self.parameters
        if isinstance(name, int):
            if known is None or 0 <= name < len(known):
                return name
            raise ValueError(
                f"{where}: kernel {self.name!r} has {plural(len(known), 'parameter')}, "
                f"none with the number {name}"
            )
        names = [p.name for p in known or ()]
        if name not in names:
            has = ", ".join(repr(n) for n in names if n) or "none that are known"
            raise ValueError(
                f"{where}: kernel {self.name!r} has no parameter {name!r}; its names "
                f"are {has}; a number says which, too"
            )
        return names.index(name)

    def image_with(self, loaded: Mapping[int, Loaded]) -> bytes:
        """The code, with the scalars of these parameters loaded from memory."""
        if not loaded:
            return self.image
        text = self.image.decode()
        return ptx.load_scalars(text, self.name, loaded, self.parameters).encode()


def from_ptx(
    source: PathOrText,
    entry: str | None = None,
    *,
    sidecar: PathOrText | Mapping[str, Any] | None = None,
    parameters: Sequence[str] | None = None,
) -> Kernel:
    """A kernel from PTX, that of any compiler.

    Args:
        source: PTX text, or the path of a file with it.
        entry: the kernel's name in it. It may be left out where there is one alone, or
            where the sidecar names it.
        sidecar: what is known of the kernel: a mapping, JSON text or the path of a file
            with it. `None` takes a file of the source's name that ends in `.json`, if
            there is one. Its words: `entryPoint`, `blockSize` (one number, or three),
            `sharedMemory` (bytes), `parameters` (names, or objects with a `name`).
        parameters: names of the parameters, for messages and for `scalars=`.

    Raises:
        ValueError: the text is no PTX, the entry is not there or not the only one, or
            the sidecar does not fit the PTX.
    """
    text, path = _read("from_ptx", "source", source, ".version")
    text = text.rstrip("\0")
    if ptx.version(text) is None:
        raise ValueError(
            "from_ptx: source must be PTX text or the path of a file with it, got "
            f"{_begin(source)}"
        )
    notes = _sidecar("from_ptx", sidecar, path)
    found = ptx.entries(text)
    name = entry or notes.entry
    if name is None and len(found) == 1:
        (name,) = found
    if name is None or name not in found:
        if not found:
            raise ValueError(f"from_ptx: {path or 'the PTX'} has no kernel (.entry)")
        has = ", ".join(map(repr, found))
        asked = f"has no kernel {name!r}" if name else "has several kernels"
        raise ValueError(
            f"from_ptx: {path or 'the PTX'} {asked}: it has {has}; pass one as entry="
        )
    signature, block = found[name].parameters, found[name].block
    names = _names("from_ptx", parameters or notes.names, len(signature))
    if None not in (block, notes.block) and block != notes.block:
        raise ValueError(
            f"from_ptx: the sidecar says that a block has {notes.block} threads, and "
            f"the PTX demands {block} (.reqntid)"
        )
    return Kernel(
        name,
        text.encode(),
        _with_names(signature, names),
        block or notes.block,
        notes.shared_memory,
        found[name].max_threads,
        f"{name} of {path.name}" if path else name,
        block_is_fixed=block is not None,
    )


def from_cubin(
    source: bytes | str | Path,
    entry: str | None = None,
    *,
    sidecar: PathOrText | Mapping[str, Any] | None = None,
) -> Kernel:
    """A kernel from machine code: a cubin or a fatbin, as bytes or as a file's path.

    Its parameters are not known, so scalars need NumPy's types (`np.float32(2)`), and
    values that change between calls have to be arrays, which the kernel reads through
    pointers. entry, sidecar: as for `from_ptx`; one of them names the kernel.

    Raises:
        ValueError: it is neither a cubin nor a fatbin, or nothing names the kernel.
    """
    if isinstance(source, bytes):
        path, image = None, source
    else:
        path = _path("from_cubin", "source", source)
        image = path.read_bytes()
    if not image.startswith((b"\x7fELF", b"\x50\xed\x55\xba")):
        raise ValueError(
            f"from_cubin: source must be a cubin or a fatbin, got {_begin(image)}; "
            "from_ptx takes PTX"
        )
    notes = _sidecar("from_cubin", sidecar, path)
    name = entry or notes.entry
    if name is None:
        raise ValueError(
            "from_cubin: nothing names the kernel; pass entry=, or a sidecar with an "
            "entryPoint"
        )
    return Kernel(
        name,
        image,
        None,
        notes.block,
        notes.shared_memory,
        None,
        f"{name} of {path.name}" if path else name,
    )


def from_cuda(
    source: PathOrText,
    name: str,
    *,
    options: Sequence[str] = (),
    include_paths: Sequence[str | Path] = (),
    arch: str | None = None,
    parameters: Sequence[str] | None = None,
    cache: bool = True,
) -> Kernel:
    """A kernel from CUDA C++, compiled by NVRTC, with a GPU or without.

    Args:
        source: the code, or the path of a `.cu` file.
        name: the kernel: `"axpy"`, or `"scale<float, 4>"` for a template.
        options: of NVRTC, for example `["--use_fast_math", "-DWIDTH=4"]`.
        include_paths: where `#include` looks, before the source's own folder and the
            CUDA headers, as far as these are installed.
        arch: "80", "90a", …: what the code is for. `None` takes that of the GPUs here,
            the oldest where they differ, and "80" where there is none.
        parameters: names of the parameters. `None` reads them off the source, where the
            kernel is declared plainly.
        cache: keep what was compiled on disk ($JAX_KVBLOCK_CACHE_DIR, or
            ~/.cache/jax_kvblock); its key are the source with all that it includes,
            the options, arch and NVRTC's version.

    Raises:
        RuntimeError: NVRTC is not here: `pip install jax_kvblock[kernels]`.
        ValueError: the code does not compile; the message is the compiler's, with the
            source's lines.
    """
    text, path = _read("from_cuda", "source", source, "__global__")
    folders = [*map(str, include_paths), *([str(path.parent)] if path else [])]
    compiled = nvrtc.compile_to_ptx(
        nvrtc.Source(
            text,
            name,
            path.name if path else f"{_plain_name(name)}.cu",
            tuple(folders),
            tuple(options),
            arch or nvrtc.default_arch(),
        ),
        cache=cache,
    )
    found = ptx.entries(compiled.text)[compiled.entry]
    signature = found.parameters
    names: Sequence[str] | None = parameters
    if names is None:
        read = declared_names(text, name)
        names = read if read is not None and len(read) == len(signature) else None
    names = _names("from_cuda", names, len(signature))
    shown = f"{name} of {path.name}" if path else name
    return Kernel(
        compiled.entry,
        compiled.text.encode(),
        _with_names(signature, names),
        block=found.block,
        max_threads=found.max_threads,
        shown=shown,
        block_is_fixed=found.block is not None,
    )


def declared_names(source: str, name: str) -> list[str] | None:
    """The parameters' names, as a plain declaration of the kernel in the source has."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)
    plain = re.escape(_plain_name(name))
    match = re.search(rf"__global__\b[^;{{}}]*?\b{plain}\s*\(([^(){{}};]*)\)", code)
    if match is None:
        return None
    if not match[1].strip():
        return []
    names, depth, part = [], 0, ""
    for letter in match[1] + ",":
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            found = re.search(r"([A-Za-z_]\w*)\s*(\[[^\]]*\]\s*)*(=.*)?$", part)
            if found is None or " " not in part.strip().replace("*", " * "):
                return None
            names.append(found[1])
            part = ""
        else:
            part += letter
    return names


def _plain_name(name: str) -> str:
    """Without namespaces and template arguments."""
    return name.split("<")[0].split("::")[-1]


# ---- what lies beside a kernel -------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Notes:
    """What a sidecar says."""

    entry: str | None = None
    block: tuple[int, int, int] | None = None
    shared_memory: int = 0
    names: tuple[str, ...] | None = None


def _sidecar(
    where: str, given: PathOrText | Mapping[str, Any] | None, path: Path | None
) -> Notes:
    if given is None:
        beside = path.with_suffix(".json") if path else None
        if beside is None or not beside.exists():
            return Notes()
        given = beside
    if not isinstance(given, Mapping):
        text, _ = _read(where, "sidecar", given, "{")
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: the sidecar is no JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: the sidecar must be an object, got {given!r}")
    known = {
        "entrypoint": "entry",
        "blocksize": "block",
        "sharedmemory": "shared_memory",
        "sharedmemorybytes": "shared_memory",
        "parameters": "names",
    }
    notes: dict[str, Any] = {}
    for key, value in given.items():
        word = known.get(re.sub(r"[_\- ]", "", key).lower())
        if word:  # other words describe it to people
            notes[word] = value
    if "block" in notes:
        notes["block"] = _noted_block(where, notes["block"])
    if "shared_memory" in notes:
        size = notes["shared_memory"]
        notes["shared_memory"] = check_count(where, "the sidecar's sharedMemory", size)
    if "names" in notes:
        notes["names"] = _noted_names(where, notes["names"])
    return Notes(**notes)


def _noted_block(where: str, given: Any) -> tuple[int, int, int]:
    sizes = [
        as_int(n) for n in (given if isinstance(given, (list, tuple)) else [given])
    ]
    found = [n for n in sizes if n is not None and n > 0]
    if len(found) != len(sizes) or not 1 <= len(found) <= 3:
        raise ValueError(
            f"{where}: the sidecar's blockSize must be one to three integers of at "
            f"least 1, got {given!r}"
        )
    x, y, z = (*found, 1, 1)[:3]
    return x, y, z


def _noted_names(where: str, given: Any) -> tuple[str, ...]:
    parts = given if isinstance(given, (list, tuple)) else [None]
    found = [p.get("name") if isinstance(p, Mapping) else p for p in parts]
    names = tuple(name for name in found if isinstance(name, str))
    if len(names) != len(found):
        raise ValueError(
            f"{where}: the sidecar's parameters must be names, or objects with a name, "
            f"got {given!r}"
        )
    return names


def _names(where: str, names: Sequence[str] | None, count: int) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str):
        raise TypeError(f"{where}: parameters must be names, got one, {names!r}")
    if len(names) != count:
        raise ValueError(
            f"{where}: the kernel has {plural(count, 'parameter')}, and "
            f"{plural(len(names), 'name')} came: {', '.join(names)}"
        )
    return list(names)


def _with_names(
    parameters: tuple[Parameter, ...], names: Sequence[str] | None
) -> tuple[Parameter, ...]:
    if names is None:
        return parameters
    pairs = zip(parameters, names, strict=True)
    return tuple(dataclasses.replace(p, name=n) for p, n in pairs)


def _read(
    where: str, name: str, source: PathOrText, sign: str
) -> tuple[str, Path | None]:
    """Text, and the path that it comes from. `sign`: what text has, and no path."""
    if isinstance(source, bytes):
        return source.decode(), None
    if isinstance(source, str) and (sign in source or "\n" in source):
        return source, None
    path = _path(where, name, source)
    return path.read_text(), path


def _path(where: str, name: str, given: Any) -> Path:
    if not isinstance(given, (str, os.PathLike)) or not str(given):
        raise TypeError(
            f"{where}: {name} must be text, bytes or a file's path, got {shown(given)}"
        )
    return Path(given)


def _begin(source: Any) -> str:
    begin = source[:40] if isinstance(source, (str, bytes)) else source
    return repr(begin)
