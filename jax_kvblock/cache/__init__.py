"""Caches of blocks: prefixes that are shared, tiers, events and numbers.

See docs/cache.md.
"""

from jax_kvblock.cache.groups import GroupedCache, GroupedTable
from jax_kvblock.cache.namespace import Namespace
from jax_kvblock.cache.parking import Parked, Resuming, park, resume
from jax_kvblock.cache.prefix import PrefixCache
from jax_kvblock.cache.steps import (
    StepArrays,
    append_tokens,
    commit_tokens,
    prepare_step,
)
from jax_kvblock.cache.table import BlockTable
from jax_kvblock.cache.tickets import Offload, Onboard
from jax_kvblock.cache.tiers import TieredCache

__all__ = [
    "BlockTable",
    "GroupedCache",
    "GroupedTable",
    "Namespace",
    "Offload",
    "Onboard",
    "Parked",
    "PrefixCache",
    "Resuming",
    "StepArrays",
    "TieredCache",
    "append_tokens",
    "commit_tokens",
    "park",
    "prepare_step",
    "resume",
]
