"""A call of the quantization primitive: what is compiled in, operands and results.

Operands are the arrays, `[B, rows, heads, D]`, and then lengths, int32 `[B]`. Results
are of each array its codes, its scales and, where it is centred, its mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jax_kvblock.attention.eight_bits import DTYPE, INTEGERS, SCALE_ROWS
from jax_kvblock.fp8.config import Shared


@dataclasses.dataclass(frozen=True)
class Way:
    """How an array is quantized.

    Attributes:
      shared: what shares a scale.
      centred: the mean of each head's rows is taken from them.
      turned: rows are turned by the orthogonal matrix of their dim.
      lengths: which operand of lengths says how many rows count; None: all.
      integers: codes are int8, not e4m3.
    """

    shared: Shared
    centred: bool = False
    turned: bool = False
    lengths: int | None = None
    integers: bool = False

    @property
    def dtype(self) -> np.dtype:
        """Of the codes."""
        return INTEGERS if self.integers else DTYPE

    @property
    def num_results(self) -> int:
        return 3 if self.centred else 2


@dataclasses.dataclass(frozen=True)
class Quantize:
    """What is compiled in.

    Attributes:
      name: the function that was called, for messages.
      ways: of each array.
      implementation: "cuda" or None.
    """

    name: str
    ways: tuple[Way, ...]
    implementation: str | None = None

    def arrays(self, operands: Sequence[Any]) -> list[Any]:
        return list(operands[: len(self.ways)])

    def lengths(self, operands: Sequence[Any]) -> list[Any]:
        """Of each array, its lengths or None."""
        rest = operands[len(self.ways) :]
        return [None if w.lengths is None else rest[w.lengths] for w in self.ways]

    def split(self, results: Sequence[Any]) -> Iterator[list[Any]]:
        """The results of each array."""
        at = 0
        for way in self.ways:
            yield list(results[at : at + way.num_results])
            at += way.num_results


def blocks_of(rows: int) -> int:
    """Of rows that share a scale; an array without rows has one."""
    return max(-(-rows // SCALE_ROWS), 1)


def shapes_of(way: Way, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Of the codes, the scales and, where it is centred, the mean of an array."""
    batch, rows, heads, dim = shape
    blocks = blocks_of(rows) if way.shared == "block" else 1
    mean = [(batch, heads, dim)] if way.centred else []
    return [(batch, rows, heads, dim), (batch, heads, blocks), *mean]
