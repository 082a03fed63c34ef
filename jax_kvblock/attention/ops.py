"""The operations of attention and the static parameter of their primitives.

forward        operands                     -> o, lse
output         operands                     -> o
backward       operands, lse, delta, d_o    -> dq, dk, dv
backward_bias  operands, lse, delta, d_o    -> dbias
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_kvblock.attention.config import AXES, AttentionConfig, Operands


@dataclasses.dataclass(frozen=True)
class Call:
    """The static parameter of the primitives: config, and which operands are there."""

    config: AttentionConfig
    present: tuple[str, ...]  # names of Operands, in order

    def unpack(self, arrays: Sequence[Any]) -> Operands:
        return Operands(**dict(zip(self.present, arrays, strict=True)))

    @staticmethod
    def pack(config: AttentionConfig, x: Operands) -> tuple[Call, list[Any]]:
        given = {name: a for name, a in x._asdict().items() if a is not None}
        return Call(config, tuple(given)), list(given.values())


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation: its further operands and its results, by their letters."""

    name: str
    extra: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def is_forward(self) -> bool:
        return not self.extra

    def operand_names(self, call: Call) -> tuple[str, ...]:
        return (*call.present, *self.extra)


FORWARD = Op("forward", (), ("o", "lse"))
OUTPUT = Op("output", (), ("o",))
BACKWARD = Op("backward", ("lse", "delta", "o"), ("q", "k", "v"))
BACKWARD_BIAS = Op("backward_bias", ("lse", "delta", "o"), ("bias",))

_LETTERS = {**AXES, "delta": "BNT", "cu_q": "c", "cu_kv": "c"}


def letters(name: str, packed: bool = False) -> str:
    """The axes of an operand or result; packed arrays have no batch."""
    found = _LETTERS[name]
    if packed and name in ("q", "k", "v", "o", "lse", "delta"):
        return found[1:]
    return found
