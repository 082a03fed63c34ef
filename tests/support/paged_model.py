"""Ragged calls of `paged_attention`, and their truth in float64, row by row.

`draw` draws a case for plain JAX, or for the kernels: on the emulator, and on a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvblock import (
    BlockSpec,
    KVPool,
    paged_attention,
)

BARS = {"float64": 1e-13, "float32": 4e-6, "float16": 4e-3, "bfloat16": 3e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged call: for each sequence (queries, keys)."""

    sequences: tuple[tuple[int, int], ...] = ((1, 37), (6, 20), (3, 3), (1, 64))
    block_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    dtype: str = "float32"
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    ranges: bool = False
    tree: int = 0  # words of bits


class Drawn:
    """Its arrays. Slots and blocks that nobody may read are NaN."""

    def __init__(
        self, case: Case, rng: np.random.Generator, implementation: str = "xla"
    ) -> None:
        self.case = c = case
        self.implementation = implementation
        dtype = jnp.dtype(c.dtype)
        self.kv_lens = np.array([n for _, n in c.sequences], np.int32)
        lens = [n for n, _ in c.sequences]
        self.starts = np.cumsum([0, *lens]).astype(np.int32)
        pages = -(-self.kv_lens // c.block_size)
        blocks = int(pages.sum()) + 3
        order = iter(rng.permutation(blocks))
        self.tables = np.full((len(lens), max(int(pages.max()), 1)), -1, np.int32)
        self.k = np.full((blocks, c.block_size, c.kv_heads, c.dim), np.nan, dtype)
        self.v = np.full((*self.k.shape[:3], c.value_dim), np.nan, dtype)
        self.keys, self.values = [], []
        for b, length in enumerate(self.kv_lens):
            k, v = (
                rng.standard_normal((length, c.kv_heads, d)).astype(dtype)
                for d in (c.dim, c.value_dim)
            )
            self.keys.append(k)
            self.values.append(v)
            for p in range(int(pages[b])):
                self.tables[b, p] = block = next(order)
                part = slice(p * c.block_size, (p + 1) * c.block_size)
                self.k[block, : len(k[part])] = k[part]
                self.v[block, : len(v[part])] = v[part]
        shape = (int(self.starts[-1]), c.heads, c.dim)
        self.q = rng.standard_normal(shape).astype(dtype)
        self.sinks = rng.standard_normal(c.heads).astype(np.float32)
        rows = shape[0]
        ends = self.kv_lens.max() * rng.uniform(-0.2, 1.2, (rows, 2))
        self.ranges = np.sort(ends.astype(np.int32), 1)
        for i, wild in enumerate(
            [(9, 5), (-(2**31), 2**31 - 1), (2**31 - 1, -(2**31))]
        ):
            self.ranges[3 + i :: 9] = wild
        self.seen = rng.random((rows, 32 * c.tree)) < 0.7  # of the sequence's queries

    @property
    def options(self) -> dict[str, Any]:
        c = self.case
        given = {"causal": c.causal, "window": c.window, "softcap": c.softcap}
        sinks = jnp.asarray(self.sinks) if c.sinks else None
        if c.ranges:
            given["ranges"] = self.ranges
        if c.tree:
            given["tree_mask"] = packed(self.seen)
        return given | {"scale": c.scale, "sinks": sinks}

    def run(self, **changes: Any) -> tuple[jax.Array, jax.Array]:
        given = {
            "q": self.q,
            "pages": (self.k, self.v),
            "layer": None,
            "block_tables": self.tables,
            "kv_lens": self.kv_lens,
            "query_start": self.starts,
            "implementation": self.implementation,
            **self.options,
        }
        return paged_attention(**given | changes, return_lse=True)

    def rows_of(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a sequence, `[length, K, D]`."""
        return self.keys[b], self.values[b]

    def truth(self) -> tuple[np.ndarray, np.ndarray]:
        """out and lse in float64, a row at a time."""
        c = self.case
        out = np.zeros((*self.q.shape[:2], c.value_dim))
        lse = np.full(self.q.shape[:2], -np.inf)
        scale = c.scale if c.scale is not None else c.dim**-0.5
        left, right = c.window or (None, None)
        for b, (first, end) in enumerate(
            zip(self.starts, self.starts[1:], strict=False)
        ):
            k, v = (
                np.repeat(a.astype(np.float64), c.heads // c.kv_heads, 1)
                for a in self.rows_of(b)
            )
            at = np.arange(len(k))
            for row in range(first, end):
                position = int(len(k) - end + row)
                seen = np.ones(len(k), bool)
                if c.causal:
                    seen &= at <= position
                if left is not None:
                    seen &= at >= position - left
                if right is not None:
                    seen &= at <= position + right
                if c.ranges:
                    seen &= (at >= self.ranges[row, 0]) & (at < self.ranges[row, 1])
                new = at - (len(k) - end + first)
                tree = (new >= 0) & (new < 32 * c.tree)
                seen[tree] &= self.seen[row, new[tree]]
                scores = np.einsum("nd,snd->ns", self.q[row].astype(np.float64), k)
                scores = scores[:, seen] * scale
                if c.softcap:
                    scores = c.softcap * np.tanh(scores / c.softcap)
                if c.sinks:
                    scores = np.c_[scores, self.sinks]
                if not scores.shape[1]:
                    continue
                top = scores.max(1, keepdims=True)
                lse[row] = top[:, 0] + np.log(np.exp(scores - top).sum(1))
                weights = np.exp(scores - lse[row][:, None])[:, : seen.sum()]
                out[row] = np.einsum("ns,snd->nd", weights, v[seen])
        return out, lse

    def hold(self, out: Any, lse: Any) -> None:
        want, want_lse = self.truth()
        bar = BARS[self.case.dtype]
        assert out.dtype == self.case.dtype and out.shape == want.shape
        np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=0, atol=bar)
        bar = 1e-13 if self.case.dtype == "float64" else 1e-5
        np.testing.assert_allclose(lse, want_lse, rtol=0, atol=bar)


def packed(mask: np.ndarray) -> np.ndarray:
    return np.packbits(mask, axis=-1, bitorder="little").view(np.uint32)


def pool_of(
    drawn: Drawn, contiguous: bool = True, layout: str = "NHD", layers: int = 3
) -> KVPool:
    """Its keys and values in layer 1; the others hold NaN."""
    dtype = drawn.k.dtype
    spec = BlockSpec(layers, 2, 16, 2, 16, dtype, layout=layout)
    blocks = np.full((len(drawn.k), layers, 2, *drawn.k.shape[1:]), np.nan, dtype)
    blocks[:, 1, 0], blocks[:, 1, 1] = drawn.k, drawn.v
    order = "".join(axis for group in spec.block_layout.groups for axis in group)
    axes = [0, *(1 + "LOTHD".index(axis) for axis in order)]
    data = jnp.asarray(blocks.transpose(axes))
    if contiguous:
        return KVPool(data, spec)
    return KVPool(tuple(data[:, i] for i in range(layers)), spec)


WHO = [
    "xla",
    pytest.param("emulator", marks=[pytest.mark.wide, pytest.mark.cpu]),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=WHO)
def draw(request: Any, rng: np.random.Generator) -> Any:
    """Draws a case for plain JAX, or for the kernels, which have 16-bit floats.

    A CPU has the kernels, too: from the FFI handler on, thread by thread.
    """
    who = "xla" if request.param == "xla" else "cuda"
    if request.param == "emulator":
        request.getfixturevalue("paged_as_cuda")

    def drawn(case: Case) -> Drawn:
        if who == "cuda" and case.dtype == "float32":
            case = dataclasses.replace(case, dtype="bfloat16")
        return Drawn(case, rng, who)

    return drawn
