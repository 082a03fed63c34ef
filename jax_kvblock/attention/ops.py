"""The operations of attention and the static parameter of their primitives.

forward         operands                                -> o, lse, base
output          operands                                -> o
joined          operands, o, lse                        -> o, lse
backward        operands, lse, base, delta, d_o         -> dq, dk, dv
backward_added  operands, lse, base, delta, d_o, dq     -> dq, dk, dv
backward_bias   operands, lse, base, delta, d_o         -> dbias
tangent         operands, lse, base, o, along           -> o', lse'
second_tangent  operands, lse, base, along              -> o'', lse''
hessian         operands, lse, base, delta, d_o, along  -> what is asked for

`base` is there with a bias alone; see `LogSumExp`. `along` are the directions of
derivatives, as many as there are: `q'` is how q moves, `q''` how it moves the second
time. What these compute is in `tangent.py`, how they follow from one another in
`derivatives.py`.

Where keys come in parts, `joined` is `forward` of one part, and o and lse of the parts
before come along: it gives those of all of them. Rows that see no key of this part keep
what they had, bit for bit. `backward_added` adds its dq to that of the parts before.
Kernels do both in their last step, in place; else it is a pass over memory of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_kvblock.attention.config import AXES, AttentionConfig, Operands


@dataclasses.dataclass(frozen=True)
class Call:
    """The static parameter of the primitives: config, and which operands are there."""

    config: AttentionConfig
    present: tuple[str, ...]  # names of Operands, in order
    along: tuple[str, ...] = ()  # names of directions, in order
    wanted: tuple[str, ...] = ()  # the results of a hessian

    def unpack(self, arrays: Sequence[Any]) -> Operands:
        return Operands(**dict(zip(self.present, arrays, strict=True)))

    @staticmethod
    def pack(config: AttentionConfig, x: Operands) -> tuple[Call, list[Any]]:
        given = {name: a for name, a in x._asdict().items() if a is not None}
        return Call(config, tuple(given)), list(given.values())


MOST_ABOVE_BASE = 8.0  # kMostAboveBase of the kernels


class LogSumExp(NamedTuple):
    """The log-sum-exp of rows in two parts: their sum, and each float32.

    A bias may be so large that float32 has no digit left for anything beside it: −1e9
    over a whole row of padding, or the lowest float. Then the sum of the exponentials
    is lost in `value`, but not in `rest`: a probability is exp((score - base) - rest).

    Attributes:
      rest: the log-sum-exp of the scores less `base`; −inf where a row sees nothing.
      base: finite, near the row's largest score: none is more than MOST_ABOVE_BASE
        above it. None, which is 0, without a bias.
    """

    rest: Any
    base: Any = None

    @property
    def value(self) -> Any:
        """The log-sum-exp itself."""
        return self.rest if self.base is None else self.base + self.rest

    @property
    def parts(self) -> list[Any]:
        return [part for part in self if part is not None]


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation: its further operands and its results, by their letters."""

    name: str
    extra: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def is_forward(self) -> bool:
        return self in (FORWARD, OUTPUT, JOINED)

    def operand_names(self, call: Call) -> tuple[str, ...]:
        return (*call.present, *_there(self.extra, call), *call.along)

    def result_names(self, call: Call) -> tuple[str, ...]:
        return _there(self.results, call) or call.wanted


def _there(names: tuple[str, ...], call: Call) -> tuple[str, ...]:
    return tuple(n for n in names if n != "base" or "bias" in call.present)


FORWARD = Op("forward", (), ("o", "lse", "base"))
OUTPUT = Op("output", (), ("o",))
JOINED = Op("joined", ("o", "lse"), ("o", "lse"))
BACKWARD = Op("backward", ("lse", "base", "delta", "o"), ("q", "k", "v"))
BACKWARD_ADDED = Op(
    "backward_added", ("lse", "base", "delta", "o", "dq"), ("q", "k", "v")
)
BACKWARD_BIAS = Op("backward_bias", ("lse", "base", "delta", "o"), ("bias",))
TANGENT = Op("tangent", ("lse", "base", "o"), ("o", "lse"))
SECOND_TANGENT = Op("second_tangent", ("lse", "base"), ("o", "lse"))
HESSIAN = Op("hessian", ("lse", "base", "delta", "o"), ())
# What the implementations compute; the others are blocks of plain JAX everywhere.
BY_KERNELS = (FORWARD, OUTPUT, JOINED, BACKWARD, BACKWARD_ADDED, BACKWARD_BIAS)

_LETTERS = {
    **AXES,
    "base": "BNT",
    "delta": "BNT",
    "dq": AXES["q"],
    "cu_q": "c",
    "cu_kv": "c",
}
_ROWS = ("q", "k", "v", "o", "lse", "base", "delta", "dq")  # what packed has no batch


def letters(name: str, packed: bool = False) -> str:
    """The axes of an operand or result; packed arrays have no batch."""
    name = name.rstrip("'")  # a direction is like what it moves
    found = _LETTERS[name]
    if packed and name in _ROWS:
        return found[1:]
    return found
