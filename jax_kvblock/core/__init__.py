"""What every room stands on: checks and their messages, the native module, types of
arguments, and how primitives are made, batched and lowered.

It imports no other room.
"""

from jax_kvblock.core.debug import debug_checks

__all__ = ["debug_checks"]
