"""Work whose strategies are compared."""

from __future__ import annotations

from jax_kvblock.parallel.strategy import Work


def causal(size: int, rows: int, heads: int = 32, kv_heads: int = 8) -> Work:
    """One causal sequence in bfloat16, D 128, of so many rows a device."""
    seen = size * rows / 2
    return Work(size, rows, rows, heads, kv_heads, 128, 128, 2, seen, size)
