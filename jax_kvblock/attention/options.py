"""The types of what the functions of attention take by name, and give."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypedDict

import jax

from jax_kvblock.attention.config import AttentionTiles
from jax_kvblock.attention.eight_bits import AttentionScales
from jax_kvblock.core.types import ArrayIn, IdRows, Integers

if TYPE_CHECKING:
    from jaxtyping import Float

# What comes back; packed calls and single sequences have no B.
Output: TypeAlias = 'Float[jax.Array, "*B T N Dv"]'
Rows: TypeAlias = 'Float[jax.Array, "*B T N"]'


# What jax takes as a precision: names, and one for each operand.
PrecisionLike: TypeAlias = (
    "str | jax.lax.Precision | jax.lax.DotAlgorithmPreset | "
    "tuple[str, str] | tuple[jax.lax.Precision, jax.lax.Precision] | None"
)


# Seeds of dropout: integers, or keys of jax.random.
SeedLike: TypeAlias = "Integers | int | jax.Array | None"


class FlashOptions(TypedDict, total=False):
    """What `flash_attention` takes by name, but for `return_lse`."""

    causal: bool
    window: tuple[int | None, int | None] | None
    segment_ids: IdRows | tuple[IdRows, IdRows] | None
    q_lens: Integers | None
    kv_lens: Integers | None
    cu_seqlens: tuple[Integers, Integers] | None
    bias: Float[ArrayIn, "B_or_1 N_or_1 T S"] | None
    softcap: float | None
    sinks: Float[ArrayIn, " N"] | None
    scale: float | None
    q_offset: Integers | int | None
    kv_offset: Integers | int | None
    tiles: AttentionTiles | None
    scales: AttentionScales | None
    dropout_rate: float
    dropout_seed: SeedLike
    deterministic: bool
    precision: PrecisionLike
    implementation: str | None


class DotProductOptions(TypedDict, total=False):
    """What `dot_product_attention` takes by name, but for `return_residual`."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: Integers | None
    key_value_seq_lengths: Integers | None
    local_window_size: int | tuple[int, int] | None
    implementation: str | None
