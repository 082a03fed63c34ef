"""What a disk tier is given, checked: keys, and rows of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jax_kvblock.cache.disk.index import KEY_BYTES


def check_open(
    path: Any,
    namespace: Any,
    policy: Any,
    sizes: dict[str, Any],
    switches: dict[str, Any],
) -> Iterator[int]:
    """The arguments of the constructor, but for what the folder has to say.

    Returns:
      The sizes.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"DiskTier: path must be a str or os.PathLike, got {_shown(path)}; "
            "os.fsdecode makes a str of bytes"
        )
    if not isinstance(namespace, bytes) or len(namespace) != KEY_BYTES:
        raise ValueError(
            f"DiskTier: namespace must be {KEY_BYTES} bytes, got {_shown(namespace)}; "
            "`cache.namespace.digest` of a PrefixCache is one"
        )
    if policy != "lru":
        raise ValueError(
            f"DiskTier: policy must be 'lru', got {policy!r}; a disk tier evicts what "
            "was not used for the longest time"
        )
    for name, size in sizes.items():
        whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
        if not whole or not 0 < size < 2**63:
            raise ValueError(
                f"DiskTier: {name} must be a positive int of 64 bits, got {size!r}"
            )
    for name, switch in switches.items():
        if np.ndim(switch) or switch not in (True, False, None):
            raise ValueError(f"DiskTier: {name} must be a bool, got {switch!r}")
    return map(int, sizes.values())


def check_keys(where: str, keys: Any) -> list[bytes]:
    if isinstance(keys, (bytes, str)) or not isinstance(keys, Sequence):
        raise TypeError(
            f"{where}: keys must be a sequence of {KEY_BYTES} bytes each, got "
            f"{_shown(keys)}; pass [key] for one"
        )
    for i, key in enumerate(keys):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ValueError(
                f"{where}: keys[{i}] must be {KEY_BYTES} bytes, got {_shown(key)}; "
                "namespace.keys gives the keys of tokens"
            )
    return list(keys)


def check_rows(
    where: str, name: str, rows: Any, count: int, *, writable: bool
) -> list[np.ndarray]:
    """The rows of an array [count, bytes], or of as many arrays of one size."""
    if isinstance(rows, np.ndarray):
        wrong = rows.ndim != 2
    else:
        wrong = not isinstance(rows, Sequence) or any(
            not isinstance(row, np.ndarray) or row.ndim != 1 for row in rows
        )
    if wrong:
        raise TypeError(
            f"{where}: {name} must be uint8[{count}, bytes], or a list of uint8[bytes],"
            f" got {_shown(rows)}; view memory as bytes with x.view(numpy.uint8)"
        )
    found = list(rows)
    if len(found) != count:
        raise ValueError(
            f"{where}: {name} must have a row for each of {count} keys, got "
            f"{len(found)} rows"
        )
    for i, row in enumerate(found):
        if row.dtype != np.uint8 or row.shape != found[0].shape:
            raise ValueError(
                f"{where}: {name}[{i}] must be uint8 and as long as the others, got "
                f"{_shown(row)}; view memory as bytes with x.view(numpy.uint8)"
            )
        if not row.flags.c_contiguous:
            raise ValueError(
                f"{where}: {name}[{i}] must have its bytes side by side, got strides "
                f"{row.strides}; copy it with numpy.ascontiguousarray"
            )
        if writable and not row.flags.writeable:
            raise ValueError(
                f"{where}: {name}[{i}] must be writable, got a read-only array; "
                "aligned_empty gives memory to read into"
            )
    return found


def _shown(x: Any) -> str:
    if isinstance(x, bytes):
        return f"{len(x)} bytes"
    if isinstance(x, np.ndarray):
        return f"{x.dtype}{list(x.shape)}"
    return type(x).__name__
