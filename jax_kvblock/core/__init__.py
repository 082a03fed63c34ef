"""What every room stands on: checks and their messages, the native module, types of
arguments, and how primitives are made, batched and lowered.

It imports no other room.
"""

# First of all: says what to do where the native module is missing.
import jax_kvblock.core.ffi  # noqa: F401

# isort: split
from jax_kvblock.core.debug import debug_checks

__all__ = ["debug_checks"]
