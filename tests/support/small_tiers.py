"""A small cache in tiers, whose blocks hold what their keys say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock import BlockManager, BlockTable, KVPool, PrefixCache, _native
from jax_kvblock.cache import TieredCache

SIZE = 4  # tokens to a block


class Setup:
    """A small pool, whose tokens' keys and values are functions of the token's key."""

    def __init__(self, num_blocks: int = 16, host_blocks: int = 32, **options) -> None:
        of_cache = "policy", "events"
        cache_options = {k: options.pop(k) for k in of_cache if k in options}
        pool_options = {
            k: options.pop(k) for k in ("num_outer", "layout", "dtype") if k in options
        }
        self.manager = BlockManager(
            3,
            SIZE,
            num_kv_heads=2,
            head_dim=8,
            num_blocks=num_blocks,
            **{"dtype": jnp.float32, **pool_options},
        )
        self.cache = PrefixCache(self.manager, model="small", **cache_options)
        self.size = self.manager.spec.block_bytes
        options.setdefault("staging_bytes", 4 * self.size)
        self.tiers = TieredCache(
            self.cache, host_bytes=host_blocks * self.size, **options
        )

    def content(self, key: bytes) -> np.ndarray:
        """What a block of this key holds."""
        spec = self.manager.spec
        random = np.random.default_rng(int.from_bytes(key[:8], "little"))
        return random.normal(size=spec.block_shape).astype(spec.dtype)

    def universal(self, key: bytes) -> np.ndarray:
        """The same, as it lies below the device: [nh, nl, no, nt, hd]."""
        spec = self.manager.spec
        assert spec.layout == "NHD"  # [nl, no, nt, nh, hd]
        return np.moveaxis(self.content(key), 3, 0)

    def write(self, table: BlockTable) -> None:
        """Computes what a table has blocks for and is not published."""
        start = table.num_committed_tokens // SIZE
        keys, ids = table.keys, table.ids
        for place in range(start, len(keys)):
            self.put(int(ids[place]), self.content(keys[place]))
        table.commit(table.num_tokens)

    def put(self, block: int, values: np.ndarray) -> None:
        self.manager.update(_set, block, values)

    def computed(self, tokens) -> BlockTable:
        table = self.cache.open(tokens)
        self.tiers.make_room(-(-table.num_tokens // SIZE) - len(table))
        table.reserve(table.num_tokens)
        self.write(table)
        return table

    def only_below(self, tokens) -> None:
        """Computes a sequence, whose blocks are then in the tiers below alone."""
        with self.computed(tokens) as table:
            self.tiers.offload(table).wait()
        self.tiers.drain()
        self.cache.clear()

    def holds(self, table: BlockTable) -> None:
        """Every block that is published holds what its key says."""
        pool = np.asarray(self.manager.pool.data)
        for place in range(table.num_committed_tokens // SIZE):
            wanted = self.content(table.keys[place])
            np.testing.assert_array_equal(pool[table.ids[place]], wanted)
        self.tiers.check()


def states(one: Setup) -> tuple[int, int]:
    """Blocks on the device that are idle or held; slots of the host that are idle."""
    stats = one.cache.stats()
    return stats["idle"] + stats["held"], one.tiers.stats()["host"]["idle"]


def victims(one: Setup) -> list[tuple[int, bytes]]:
    """Idle blocks of the device with their keys, those that go first in front."""
    return _native.victims(one.cache._free_list, 99)


def _set(pool: KVPool, block: jax.Array, values: jax.Array) -> KVPool:
    return KVPool(pool.data.at[block].set(values), pool.spec)
