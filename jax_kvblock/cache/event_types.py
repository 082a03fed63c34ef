"""What events of a cache say, in the words and fields of vLLM's KV events."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

# Places of blocks, by the names that routers know.
GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"


@dataclasses.dataclass(frozen=True, eq=False)
class BlockStored:
    """Blocks that can be found from now on; each is the next one's parent.

    Attributes:
      block_hashes: the keys of the blocks, 32 bytes each.
      parent_block_hash: the key of the block before the first; None at the beginning
        of a sequence.
      token_ids: int32, the tokens of all these blocks in order; empty where the place
        knows keys alone, as tiers below the device do.
      block_size: tokens to a block.
      medium: where the blocks lie: "GPU", "CPU" or "STORAGE".
      lora_name: the adapter that the keys and values were computed with; None without
        one, or where it is not known.
      group_idx: which group of layers, where a cache has several.
      kv_cache_spec_sliding_window: the group's window in tokens; None without one.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: npt.NDArray[np.int32]
    block_size: int
    medium: str = GPU
    lora_name: str | None = None
    group_idx: int | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclasses.dataclass(frozen=True)
class BlockRemoved:
    """Blocks that are found no longer at this place."""

    block_hashes: tuple[bytes, ...]
    medium: str = GPU
    group_idx: int | None = None


@dataclasses.dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing that was stored before is found any longer, at any place."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclasses.dataclass(frozen=True)
class EventBatch:
    """What happened between two calls of `EventStream.flush`.

    Attributes:
      sequence: 0, 1, 2, …: who sees a gap has missed a batch.
      timestamp: seconds since 1970.
      events: in their order.
      rank: which of several engines tells this; None for the only one.
    """

    sequence: int
    timestamp: float
    events: tuple[Event, ...]
    rank: int | None = None
