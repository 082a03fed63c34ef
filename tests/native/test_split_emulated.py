"""The attention kernels for few queries, on a CPU: thread by thread, by the emulator.

It runs the very source that a GPU runs, with each instruction's meaning in place of the
instruction: who computes which part of which row, the barriers, the asynchronous copies
(NaN until they are waited for), shared memory and the pieces that are combined. What it
cannot say is anything about time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import judge
import ml_dtypes
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from attention_launches import BF16, F16, Attention  # noqa: E402

POINTERS = ("q", "k", "v", "o", "lse", "q_lens", "kv_lens", "shift", "sinks",
            "q_segments", "kv_segments")  # fmt: skip
DTYPES = {BF16: ml_dtypes.bfloat16, F16: np.float16}


@pytest.fixture(scope="session")
def emulate(tmp_path_factory: pytest.TempPathFactory):
    """emulate(attention, ctas)."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "the emulator needs a C++ compiler"
    library = tmp_path_factory.mktemp("emulator") / "split.so"
    folders = ("tests/emulator", "cpp", "cpp/include")
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
        + [f"-I{ROOT / folder}" for folder in folders]
        + [str(ROOT / "tests/emulator/split.cc"), "-o", str(library)],
        check=True,
    )
    return ctypes.CDLL(str(library)).emulate_split


@dataclasses.dataclass
class Problem:
    """A call, and what is special about it."""

    batch: int = 1
    q_len: int = 1
    kv_len: int = 300
    heads: tuple[int, int] = (4, 1)
    dims: tuple[int, int] = (64, 64)
    dtype: int = BF16
    window: tuple[int, int] = (-1, -1)
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    shift: tuple[int, ...] | None = None
    segments: bool = False
    sinks: bool = False
    softcap: float = 0.0
    scale: float | None = None
    ctas: int = 3


PROBLEMS = {
    "one_query": Problem(),
    "as_many_ctas_as_tiles": Problem(kv_len=1000, ctas=8),
    "more_ctas_than_tiles": Problem(kv_len=300, ctas=11),
    "one_cta": Problem(batch=2, heads=(4, 2), ctas=1),
    "units_whole_and_cut": Problem(batch=3, kv_len=520, heads=(6, 2), ctas=7),
    "d128": Problem(batch=2, heads=(8, 2), dims=(128, 128), kv_len=200, ctas=3),
    "d96_value_40": Problem(heads=(7, 1), dims=(96, 40), dtype=F16, kv_len=150),
    "d192": Problem(dims=(192, 128), kv_len=150, ctas=2),
    "d256": Problem(dims=(256, 256), kv_len=150, ctas=2),
    "two_blocks_of_rows": Problem(q_len=5, heads=(10, 2), window=(-1, 0), kv_len=200),
    "four_blocks_of_rows": Problem(q_len=13, heads=(8, 2), window=(-1, 0), kv_len=300,
                                   shift=(287,), ctas=4),
    "many_tiles_of_rows": Problem(batch=2, q_len=50, heads=(4, 2), window=(-1, 0),
                                  kv_len=300, shift=(250, 100), ctas=5),
    "lengths": Problem(batch=4, q_len=2, kv_len=500, kv_lens=(500, 0, 130, 7),
                       q_lens=(2, 2, 1, 0), ctas=6),
    "many_lengths": Problem(batch=200, kv_len=150, heads=(2, 1),
                            kv_lens=tuple(range(0, 150))[:150] + (150,) * 50, ctas=9),
    "window": Problem(batch=2, q_len=3, kv_len=900, window=(200, 0), shift=(700, 150)),
    "segments": Problem(batch=2, q_len=4, kv_len=300, segments=True, ctas=4),
    "sinks": Problem(batch=2, q_len=2, heads=(4, 2), kv_lens=(300, 0), sinks=True,
                     q_lens=(2, 1), ctas=3),
    "softcap": Problem(softcap=2.5, dtype=F16),
    "large_softcap": Problem(softcap=2000.0, q_len=3),
    "negative_scale": Problem(scale=-0.3),
}  # fmt: skip


class Arrays:
    """A problem's arrays; what must not be read is NaN, what is not written too."""

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        p, dtype = problem, DTYPES[problem.dtype]
        (n, k), (d, e) = p.heads, p.dims
        self.problem = p
        self.q = rng.standard_normal((p.batch, p.q_len, n, d)).astype(dtype)
        self.k = rng.standard_normal((p.batch, p.kv_len, k, d)).astype(dtype)
        self.v = rng.standard_normal((p.batch, p.kv_len, k, e)).astype(dtype)
        for b, length in enumerate(p.kv_lens or ()):
            self.k[b, length:] = self.v[b, length:] = np.nan
        self.q_lens, self.kv_lens, self.shift = (
            None if x is None else np.array(x, np.int32)
            for x in (p.q_lens, p.kv_lens, p.shift)
        )
        self.sinks = rng.standard_normal((1, n)).astype(np.float32) if p.sinks else None
        self.q_segments = self.kv_segments = None
        if p.segments:
            sides = ((p.batch, p.q_len), (p.batch, p.kv_len))
            self.q_segments, self.kv_segments = (
                rng.integers(0, 3, side, np.int32) for side in sides
            )
        self.o = np.full((p.batch, p.q_len, n, e), np.nan, dtype)
        self.lse = np.full((p.batch, n, p.q_len), np.nan, np.float32)
        self.scale = d**-0.5 if p.scale is None else p.scale

    def attention(self) -> Attention:
        p = self.problem
        a = Attention(dtype=p.dtype, batch=p.batch, q_len=p.q_len, kv_len=p.kv_len)
        (a.num_heads, a.num_kv_heads), (a.head_dim, a.value_dim) = p.heads, p.dims
        a.scale, a.softcap = self.scale, p.softcap
        a.window_left, a.window_right = p.window
        a.sink_batch = 1
        for name in POINTERS:
            if (array := getattr(self, name)) is not None:
                setattr(a, name, array.ctypes.data)
        return a

    def truth(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """o, lse, and the root of the sum of the squares of what o sums up."""
        p = self.problem
        group = p.heads[0] // p.heads[1]
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        k, v = (np.repeat(np.nan_to_num(x), group, 2) for x in (k, v))
        score = self.scale * np.einsum("btnd,bsnd->bnts", q, k)
        if p.softcap:
            score = p.softcap * np.tanh(score / p.softcap)
        i = np.arange(p.q_len)[None, :, None]
        j = np.arange(p.kv_len)[None, None]
        at = i + (0 if self.shift is None else self.shift[:, None, None])
        seen = np.ones((p.batch, p.q_len, p.kv_len), bool)
        left, right = p.window
        if left >= 0:
            seen &= j >= at - left
        if right >= 0:
            seen &= j <= at + right
        for lengths, index in ((self.q_lens, i), (self.kv_lens, j)):
            if lengths is not None:
                seen &= index < lengths[:, None, None]
        if p.segments:
            seen &= self.q_segments[:, :, None] == self.kv_segments[:, None]
        score = np.where(seen[:, None], score, -np.inf)
        all_scores = score
        if p.sinks:
            there = np.ones((p.batch, p.q_len), bool)
            if self.q_lens is not None:
                there = np.arange(p.q_len) < self.q_lens[:, None]
            sink = np.where(
                there[:, None, :, None], self.sinks[0][:, None, None], -np.inf
            )
            all_scores = np.concatenate([score, sink], -1)
        with np.errstate(divide="ignore"):
            top = np.maximum(all_scores.max(-1, initial=-np.inf), -1e30)[..., None]
            lse = np.log(np.exp(all_scores - top).sum(-1)) + top[..., 0]
        weight = np.exp(score - np.where(np.isneginf(lse), 0, lse)[..., None])
        o = np.einsum("bnts,bsne->btne", weight, v)
        terms = np.sqrt(np.einsum("bnts,bsne->btne", weight**2, v**2))
        return o, lse, terms


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_row_is_right(name, emulate, rng):
    arrays = Arrays(PROBLEMS[name], rng)
    a = arrays.attention()
    emulate(ctypes.byref(a), arrays.problem.ctas)
    o, lse, terms = arrays.truth()
    dtype = "bfloat16" if arrays.problem.dtype == BF16 else "float16"
    judge.assert_rows("o", arrays.o, o, judge.bar_of_terms(o, terms, 1e-5, dtype))
    judge.assert_lse_near(arrays.lse, lse, 30.0)


@pytest.mark.parametrize("ctas", [1, 2, 5, 9, 40])
def test_any_number_of_ctas_gives_the_same(ctas, emulate, rng):
    problem = dataclasses.replace(PROBLEMS["units_whole_and_cut"], ctas=ctas)
    arrays = Arrays(problem, rng)
    emulate(ctypes.byref(arrays.attention()), ctas)
    o, lse, terms = arrays.truth()
    judge.assert_rows("o", arrays.o, o, judge.bar_of_terms(o, terms, 1e-5, "bfloat16"))
    judge.assert_lse_near(arrays.lse, lse, 30.0)
