"""What a `BlockManager` is given: the extents of its blocks, and pools.

Each is checked before the manager changes anything.
"""

from __future__ import annotations

from typing import Any

import jax

from jax_kvblock.blocks.pool import KVPool, check_pool, find_device
from jax_kvblock.core import checks

# ---- of the constructors ----


def check_device(where: str, device: Any) -> None:
    """Checks where a manager's pool shall lie."""
    if not isinstance(device, jax.sharding.Sharding):
        find_device(where, device)
    elif len(device.device_set) != 1:
        raise ValueError(
            f"{where}: device must be one device, got {device}; for a pool over "
            "several devices use KVPool.zeros with the sharding"
        )


def one_name(block_size: int | None, page_size: int | None) -> int:
    """The tokens to a block, by its name or by the old one."""
    if block_size is not None and page_size is not None:
        raise TypeError(
            f"BlockManager: block_size must be given once, got {block_size} and "
            f"page_size={page_size}, which is its old name; leave page_size out"
        )
    tokens = page_size if block_size is None else block_size
    if tokens is None:
        raise TypeError(
            "BlockManager: block_size must be given, the tokens to a block; for "
            "example BlockManager(32, 16, num_kv_heads=8, head_dim=128)"
        )
    return tokens


def head_extents(
    inner_dim: int | None, num_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """The KV heads and their size, by whichever of the extents are given."""
    where = "BlockManager"
    given = {"inner_dim": inner_dim, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    checks.check_positive(where, **{k: v for k, v in given.items() if v is not None})
    if num_kv_heads is None and head_dim is None:
        if inner_dim is None:
            raise ValueError(f"{where}: give inner_dim, or num_kv_heads and head_dim")
        return 1, inner_dim
    if inner_dim is not None:
        if num_kv_heads is None:
            num_kv_heads = _other_extent(inner_dim, head_dim=head_dim)
        elif head_dim is None:
            head_dim = _other_extent(inner_dim, num_kv_heads=num_kv_heads)
    if num_kv_heads is None or head_dim is None:
        raise ValueError(
            f"{where}: num_kv_heads and head_dim belong together, got "
            f"num_kv_heads={num_kv_heads}, head_dim={head_dim}"
        )
    if inner_dim is not None and inner_dim != num_kv_heads * head_dim:
        raise ValueError(
            f"{where}: inner_dim must be num_kv_heads * head_dim = "
            f"{num_kv_heads} * {head_dim}, got {inner_dim}"
        )
    return num_kv_heads, head_dim


def _other_extent(inner_dim: int, **given: Any) -> int:
    """What inner_dim leaves for the head extent that is not given."""
    ((name, extent),) = given.items()
    if inner_dim % extent:
        raise ValueError(
            f"BlockManager: inner_dim must be a multiple of {name}={extent}, got "
            f"{inner_dim}; leave inner_dim out and give num_kv_heads and head_dim, or "
            "give it alone"
        )
    return inner_dim // extent


def check_first_pool(where: str, pool: KVPool) -> None:
    """Checks the pool that a manager is made of."""
    check_pool(where, "pool", pool)
    for x in pool.arrays:
        if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
            raise TypeError(
                f"{where}: pool must be a pool of jax arrays, got "
                f"{checks.shown(x)}; call it outside of jit, with arrays that "
                "jax.device_put has placed"
            )
        if len(x.devices()) != 1:
            raise ValueError(
                f"{where}: pool must lie on one device, got one on "
                f"{len(x.devices())}; make a manager for each device's part"
            )


# ---- of updates ----


def check_next_pool(
    where: str, old: KVPool, new: KVPool, devices: set[jax.Device]
) -> None:
    """Checks the pool that is put in the place of the old one."""
    if not isinstance(new, KVPool):
        raise TypeError(
            f"{where}: must be a KVPool, got {type(new).__name__}; return "
            "the pool from your jitted step"
        )
    if any(isinstance(x, jax.core.Tracer) for x in new.arrays):
        raise TypeError(
            f"{where}: must be a pool of arrays, got one that is being traced; "
            "return the pool from the jitted function and set it outside"
        )
    if any(x.is_deleted() for x in new.arrays):
        raise RuntimeError(
            f"{where}: must be a living pool, got one that was donated or deleted; "
            "put back the pool that the donating call returned"
        )
    _check_like(where, old, new)
    if any(x.devices() != devices for x in new.arrays):
        raise ValueError(
            f"{where}: must stay on its device; move it back with jax.device_put"
        )


def check_step(old: KVPool, new: KVPool) -> None:
    """Checks the pool that a step has returned."""
    _check_like("update: the step's pool", old, new)


def _check_like(where: str, old: KVPool, new: KVPool) -> None:
    """Checks that one pool can be replaced by the other."""
    shapes = [[checks.show(x) for x in pool.arrays] for pool in (old, new)]
    if new.spec != old.spec or shapes[0] != shapes[1]:
        raise ValueError(
            f"{where}: must be like the pool it replaces, {old!r}, got {new!r}"
        )
    if new.memory_kind != old.memory_kind:
        raise ValueError(
            f"{where}: must stay in {old.memory_kind} memory, got a pool in "
            f"{new.memory_kind}"
        )
