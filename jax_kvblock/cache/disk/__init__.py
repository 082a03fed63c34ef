"""Blocks on disk: the tier below host memory. See docs/disk_tier.md."""

from jax_kvblock.cache.disk.aligned import aligned_empty
from jax_kvblock.cache.disk.errors import DiskTierError
from jax_kvblock.cache.disk.stats import DiskStats
from jax_kvblock.cache.disk.tier import DiskTier

__all__ = ["DiskStats", "DiskTier", "DiskTierError", "aligned_empty"]
