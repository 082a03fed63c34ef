"""The types of public arguments and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

import jax
import numpy as np

if TYPE_CHECKING:
    from jax_kvblock.attention.config import AttentionTiles


class SupportsDLPack(Protocol):
    """A tensor of another library."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


class HasIds(Protocol):
    """Blocks that know their ids."""

    @property
    def ids(self) -> np.ndarray: ...


# Quoted: a protocol and a class cannot be joined by | at run time.
ArrayIn: TypeAlias = "jax.Array | np.ndarray | SupportsDLPack"
Integers: TypeAlias = "ArrayIn | Sequence[int] | HasIds"
Blocks: TypeAlias = Sequence[ArrayIn]
Pieces: TypeAlias = Sequence[Sequence[ArrayIn]]
IdRows: TypeAlias = "ArrayIn | list[list[int]]"
LayerIndex: TypeAlias = "int | np.integer | jax.Array | np.ndarray"
Heads: TypeAlias = "tuple[int, int] | range | slice | None"
Place: TypeAlias = "jax.Device | jax.sharding.Sharding | str | None"


class FlashOptions(TypedDict, total=False):
    """What `flash_attention` takes by name, but for `return_lse`."""

    causal: bool
    window: tuple[int | None, int | None] | None
    segment_ids: IdRows | tuple[IdRows, IdRows] | None
    q_lens: Integers | None
    kv_lens: Integers | None
    cu_seqlens: tuple[Integers, Integers] | None
    bias: ArrayIn | None
    softcap: float | None
    sinks: ArrayIn | None
    scale: float | None
    q_offset: Integers | int | None
    kv_offset: Integers | int | None
    tiles: AttentionTiles | None
    deterministic: bool
    implementation: str | None


class DotProductOptions(TypedDict, total=False):
    """What `dot_product_attention` takes by name, but for `return_residual`."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: Integers | None
    key_value_seq_lengths: Integers | None
    local_window_size: int | tuple[int, int] | None
    implementation: str | None
