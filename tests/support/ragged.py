"""A ragged step over a paged cache: its arrays in any owner's form, and the truth."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

NAN = float("nan")


class Ragged:
    """Sequences (new, keys); what nobody may read or write is NaN, or wild.

    Two more rows of tables, lengths and starts belong to no sequence, and so do the
    last five tokens.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        sequences: tuple[tuple[int, int], ...] = ((1, 37), (6, 20), (3, 3), (1, 64)),
        *,
        dtype: str = "float32",
        q_dtype: str = "float32",
        heads: int = 6,
        kv_heads: int = 3,
        dim: int = 16,
        page: int = 16,
    ) -> None:
        stored = jnp.dtype(dtype)
        self.sequences, self.kv_heads, self.dim = sequences, kv_heads, dim
        self.count, self.page = len(sequences), page
        new = [n for n, _ in sequences]
        self.tokens = sum(new)
        self.kv_lens = np.array([*(n for _, n in sequences), 99, 7], np.int32)
        self.starts = np.array([*np.cumsum([0, *new]), -7, 10**6], np.int32)
        pages = [-(-n // page) for _, n in sequences]
        self.num_pages = sum(pages) + 2
        order = iter(rng.permutation(self.num_pages))
        self.tables = np.full((self.count + 2, max(pages) + 1), -1, np.int32)
        shape = (self.num_pages, page, kv_heads, dim)
        wild = 77 if dtype == "int8" else NAN
        self.full = np.full((2, *shape), wild).astype(stored)
        self.ahead = self.full.copy()  # without the new keys
        self.kv: list[np.ndarray] = []  # [2, keys, K, D] of each sequence
        self.new = np.full((2, self.tokens + 5, kv_heads, dim), wild).astype(stored)
        for b, (count, length) in enumerate(sequences):
            drawn = rng.standard_normal((2, length, kv_heads, dim))
            drawn = (drawn * (20 if dtype == "int8" else 1)).astype(stored)
            self.kv.append(drawn)
            first = length - count
            rows = slice(self.starts[b], self.starts[b + 1])
            self.new[:, rows] = drawn[:, first:]
            for p in range(pages[b]):
                self.tables[b, p] = block = next(order)
                part = drawn[:, p * page : (p + 1) * page]
                self.full[:, block, : part.shape[1]] = part
                part = drawn[:, p * page : min((p + 1) * page, max(first, p * page))]
                self.ahead[:, block, : part.shape[1]] = part
        self.tables[self.count :] = 0  # a page of another's
        q = rng.standard_normal((self.tokens, heads, dim))
        q = np.concatenate([q, np.full((5, heads, dim), NAN)])
        self.q = jnp.asarray(q, q_dtype)
        self.sinks = rng.standard_normal(heads).astype(np.float32)

    # ---- caches: of `full` or `ahead`, and what comes back ---------------------------

    def pair(self, kv: np.ndarray) -> tuple[Any, Any]:
        return jnp.asarray(kv[0]), jnp.asarray(kv[1])

    def by_turns(self, kv: np.ndarray, pack: int | None, padded: int = 32) -> Any:
        """Heads K0, V0, K1, …; without a pack, 4 dims and no padding."""
        rows = np.stack([kv[0], kv[1]], 3).reshape(*kv.shape[1:3], -1, self.dim)
        if pack is None:
            return jnp.asarray(rows)
        return self._packed(rows, pack, padded)

    def in_rows(self, kv: np.ndarray, pack: int) -> Any:
        rows = np.concatenate([kv[0], kv[1]], -1)
        return self._packed(rows, pack, rows.shape[-1])

    def _packed(self, rows: np.ndarray, pack: int, padded: int) -> Any:
        more = -rows.shape[2] % pack
        rows = np.pad(
            rows, ((0, 0), (0, 0), (0, more), (0, padded - rows.shape[3]))
        ).reshape(*rows.shape[:2], -1, pack, padded)
        return jnp.asarray(rows)

    def unpacked(self, cache: Any, by_turns: bool) -> np.ndarray:
        """`[2, P, page, K, D]` of a cache."""
        rows = np.asarray(cache)
        rows = rows.reshape(*rows.shape[:2], -1, rows.shape[-1])
        if by_turns:
            rows = rows[:, :, : 2 * self.kv_heads, : self.dim]
            return np.stack([rows[:, :, 0::2], rows[:, :, 1::2]])
        rows = rows[:, :, : self.kv_heads]
        return np.stack([rows[..., : self.dim], rows[..., self.dim :]])

    # ---- the truth -------------------------------------------------------------------

    def truth(
        self,
        *,
        scale: float = 1.0,
        window: int | None = None,
        soft_cap: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        sinks: bool = False,
        causal: bool = True,
        cached: bool = False,
        temperature: float | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """out and lse in float64, a token at a time; zeros, −inf of no sequence."""
        out = np.zeros(self.q.shape)
        lse = np.full(self.q.shape[:2], -np.inf)
        q = np.asarray(self.q).astype(np.float64)
        groups = q.shape[1] // self.kv_heads
        for b, (count, length) in enumerate(self.sequences):
            k, v = (np.repeat(a.astype(np.float64), groups, 1) for a in self.kv[b])
            k, v = k * (k_scale or 1.0), v * (v_scale or 1.0)
            at = np.arange(length)
            for i in range(count):
                row, position = self.starts[b] + i, length - count + i
                seen = at <= position if causal else at >= 0
                if window is not None:
                    seen &= at > position - window
                if cached:
                    seen = at < length - count
                scores = scale * np.einsum("nd,snd->ns", q[row], k[seen])
                if temperature is not None and position > temperature:
                    scores = scores * np.log2(position) / np.log2(temperature)
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                if sinks:
                    scores = np.c_[scores, self.sinks]
                if not scores.shape[1]:
                    continue
                top = scores.max(1, keepdims=True)
                lse[row] = top[:, 0] + np.log(np.exp(scores - top).sum(1))
                weights = np.exp(scores - lse[row][:, None])[:, : int(seen.sum())]
                out[row] = np.einsum("ns,snd->nd", weights, v[seen])
        return out, lse
