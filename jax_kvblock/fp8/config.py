"""How queries, keys and values become 8 bits."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

from jax_kvblock.core.checks import check_choice, shown

Shared: TypeAlias = Literal["tensor", "head", "block"]


@dataclasses.dataclass(frozen=True)
class FP8AttentionConfig:
    """Which numbers share a scale, and whether keys are centred.

    A scale is the largest size among those that share it, over 448, the largest
    number of e4m3, or 127, that of int8: of a batch member's whole array ("tensor"), of
    each of its heads ("head"), or of each 128 rows of a head ("block"). e4m3 has 16
    binary orders of magnitude, so finer scales matter where few rows are far larger
    than the others.

    Attributes:
      queries, keys: "tensor", "head" or "block".
      values: "tensor" or "head".
      qk_dtype: "float8_e4m3fn"; or "int8", whose products tensor cores add up exactly:
        queries and keys are off by at most half a 127th of the largest that shares
        their scale, where e4m3 keeps four binary digits of each. Turn them with it, as
        large numbers leave few steps for the others (SageAttention2, arXiv:2411.10958).
        Values are in e4m3 always.
      smooth_keys: the mean of a head's keys is taken from them before. It adds the same
        to all scores of a row, which softmax does not see, and real models' keys have
        large ones (SageAttention, arXiv:2410.02367).
      rotate: queries and keys are turned by one orthogonal matrix before, which
        changes no product. A large number's rounding is shared out over its row then,
        instead of being one large error (FlashAttention-3's incoherent processing,
        arXiv:2407.08608).
    """

    queries: Shared = "block"
    keys: Shared = "block"
    values: Literal["tensor", "head"] = "head"
    smooth_keys: bool = True
    rotate: bool = True
    qk_dtype: Literal["float8_e4m3fn", "int8"] = "float8_e4m3fn"

    def __post_init__(self) -> None:
        where = "FP8AttentionConfig"
        for name in ("queries", "keys"):
            check_choice(where, name, getattr(self, name), ("tensor", "head", "block"))
        check_choice(where, "values", self.values, ("tensor", "head"))
        check_choice(where, "qk_dtype", self.qk_dtype, ("float8_e4m3fn", "int8"))
        _check_bool(where, "smooth_keys", self.smooth_keys)
        _check_bool(where, "rotate", self.rotate)


def _check_bool(where: str, name: str, flag: Any) -> None:
    if not isinstance(flag, bool):
        raise TypeError(f"{where}: {name} must be True or False, got {shown(flag)}")
