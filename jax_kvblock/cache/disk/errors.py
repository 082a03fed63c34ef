"""What goes wrong with a folder of blocks, in words that name the path and the fix."""

from __future__ import annotations

import errno
import importlib
from pathlib import Path
from types import ModuleType

_FIXES = {
    errno.ENOSPC: "free space on its filesystem, or lower max_bytes",
    errno.EDQUOT: "raise the quota, or lower max_bytes",
    errno.EROFS: "use a folder that can be written, or pass read_only=True",
    errno.EACCES: "let this user read its files; who does not pass read_only=True has "
    "to write them, too",
    errno.EPERM: "let this user read its files; who does not pass read_only=True has "
    "to write them, too",
    errno.EFBIG: "use a filesystem with larger files, or lower max_bytes",
    errno.ENOENT: "pass a folder, or a path where one can be made",
    errno.ENOTDIR: "pass a folder, or a path where one can be made",
    errno.EEXIST: "pass a folder, or a path where one can be made",
    errno.EIO: "its device fails: look at the system's log and use another disk",
}


class DiskTierError(OSError):
    """A folder of blocks is in use, damaged or of another kind, or its disk failed."""


def failed(what: str, path: Path, error: OSError) -> DiskTierError:
    """`what` could not be done with `path`, by an error of the system."""
    number = error.errno or errno.EIO
    fix = _FIXES.get(number, "look at the system's log")
    reason = error.strerror or str(error)
    return DiskTierError(number, f"DiskTier: could not {what} {path}: {reason}; {fix}")


def damaged(path: Path, why: str) -> DiskTierError:
    """A file does not hold what was written; blocks are a cache, so it may go."""
    return DiskTierError(
        errno.EUCLEAN,
        f"DiskTier: {path} is damaged: {why}; remove the folder {path.parent}, "
        "which only holds a cache",
    )


def needed(name: str, packages: str = "'jax-kvblock[cache]'") -> ModuleType:
    """An optional library, which comes with `packages`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"DiskTier: needs {name}; pip install {packages}") from error
