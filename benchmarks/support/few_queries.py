"""Calls of few queries over many keys, as in a step of decoding."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class FewQueries:
    """The last queries of each batch member, causal over its own keys, or full."""

    batch: int
    queries: int
    num_heads: int
    num_kv_heads: int
    keys: int
    head_dim: int
    mask: str = "full"  # or "causal", with offsets and lengths; "ragged", of own length

    @property
    def name(self) -> str:
        heads = f"H{self.num_heads}/{self.num_kv_heads}"
        sizes = f"T{self.queries} S{self.keys} D{self.head_dim}"
        return f"B{self.batch} {heads} {sizes} {self.mask}"

    @property
    def lengths(self) -> np.ndarray:
        """How many keys each member has."""
        if self.mask != "ragged":
            return np.full(self.batch, self.keys, np.int32)
        return np.linspace(self.keys // 8, self.keys, self.batch).astype(np.int32)
