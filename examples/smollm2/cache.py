"""Where what is downloaded, and what is compiled, stays."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/jax_kvblock`, or `~/.cache/jax_kvblock`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "jax_kvblock"
