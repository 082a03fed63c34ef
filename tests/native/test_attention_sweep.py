"""The sweep of the kernels sees what is wrong, and passes what is right."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_model
import attention_stress as stress
import jax.numpy as jnp
import judge
import numpy as np
import pytest
from attention_launches import Attention
from attention_model import Call
from attention_problems import Case, Gpu, Host, Problem, Truth, rounded, truth
from attention_sweep import Arena, Launcher, sweep
from served_kernels import skip_unless_served
from sweep_cases import DIMS, OPTIONS, PAIRS, draw_cases

import jax_kvblock
from jax_kvblock import AttentionTiles

CASE = Case("float16", 32, 32, 2, 4, 2, 150, 130, 7, name="plain")
CASES = {
    "plain": CASE,
    "bfloat16": dataclasses.replace(CASE, dtype="bfloat16", value_dim=24, heads=6),
    "causal": dataclasses.replace(CASE, window=(-1, 0), sinks=2),
    "lengths": dataclasses.replace(
        CASE, window=(40, 9), shift=True, lengths=True, sinks=1
    ),
    "packed": dataclasses.replace(CASE, batch=3, packed=True, window=(-1, 0)),
    "segments": dataclasses.replace(CASE, segments="sorted", softcap=5.0),
    "tiles": dataclasses.replace(
        CASE, q_len=300, tiles=(1, True), bias=("float32", 1, False), scale=-0.3
    ),
    "bias": dataclasses.replace(CASE, bias=("float16", 2, True), segments="scattered"),
}


OTHER_NAMES = {"out": "out", "lse": "lse", "dq": "d_q", "dk": "d_k", "dv": "d_v"}
OTHER_NAMES |= {"dbias": "d_bias"}


def by_kernels(x: Problem, known: Truth) -> dict[str, np.ndarray]:
    """What kernels do: float32, and weights rounded before each product."""
    c = x.case
    f32 = lambda a: np.asarray(a, np.float32)  # noqa: E731
    near = lambda a: f32(rounded(a, c.dtype))  # noqa: E731
    q, k, v, d_o = (f32(x.exact[name]) for name in ("q", "k", "v", "d_o"))
    group = c.heads // c.kv_heads
    k, v = k.repeat(group, 2), v.repeat(group, 2)
    score = np.einsum("btnd,bsnd->bnts", q, k) * np.float32(x.scale)
    bent = np.tanh(score / c.softcap) if c.softcap else score * 0
    score = np.float32(c.softcap) * bent if c.softcap else score
    if c.bias:
        bias = f32(x.exact["bias"])
        score = score + bias.repeat(c.members // len(bias), 0)
    score = np.where(x.mask(), score, -np.inf)
    sinks = np.full((1, c.heads), -np.inf)
    sinks = x.exact["sinks"] if c.sinks else sinks
    sinks = sinks.repeat(c.members // len(sinks), 0)[:, :, None, None]
    top = np.maximum(score.max(-1, keepdims=True), sinks)
    top = np.where(np.isneginf(top), 0, top)
    weight = np.exp(score - top)
    total = weight.sum(-1, keepdims=True) + np.exp(sinks - top)
    empty = ~x.alive[:, None, :, None] | (total == 0)
    total = np.where(empty, 1, total)
    lse = f32(np.where(empty, -np.inf, np.log(total) + top))
    out = np.einsum("bnts,bsne->btne", near(weight), v)
    out = out / np.where(empty, np.inf, total).swapaxes(1, 2)
    p = np.where(empty, 0, np.exp(score - np.where(empty, 0, lse)))
    dp = np.einsum("btne,bsne->bnts", d_o, v)
    d_score = p * (dp - f32(known.delta)[..., None])
    ds = near(d_score * (1 - bent * bent))
    results = {"out": out, "lse": lse}
    results["dq"] = x.scale * np.einsum("bnts,bsnd->btnd", ds, k)
    dk = x.scale * np.einsum("bnts,btnd->bsnd", ds, q)
    dv = np.einsum("bnts,btne->bsne", near(p), d_o)
    for name, a in ("dk", dk), ("dv", dv):
        results[name] = a.reshape(*a.shape[:2], c.kv_heads, group, -1).sum(3)
    results = {n: a if n == "lse" else near(a) for n, a in results.items()}
    if c.bias:
        dtype, members, own_heads = c.bias
        d_bias = d_score.reshape(members, -1, *d_score.shape[1:]).sum(1)
        d_bias = d_bias if own_heads else d_bias.sum(1)[:, None]
        results["dbias"] = rounded(d_bias, dtype)
    return results


def verdicts(got: dict[str, np.ndarray], known: Truth) -> dict[str, judge.Verdict]:
    return {n: judge.judge(n, got[n], w, known.bars[n]) for n, w in known.want.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_model_of_the_kernels_passes(case):
    x = Problem(case, Host())
    known = truth(x)
    found = verdicts(by_kernels(x, known), known)
    assert len(found) == (6 if case.bias else 5)
    assert {n: v.wrong for n, v in found.items() if v.wrong} == {}
    # And not by a bar that anything passes.
    assert all(v.worst > 0.05 for n, v in found.items() if n not in ("lse", "dbias"))


class Replayed(Gpu):
    """Torch tensors on the CPU of the numbers that Host draws."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.host = Host()

    def seed(self, seed: int) -> None:
        self.host.seed(seed)

    def normal(self, dtype: str, *shape: int) -> Any:
        x = self.xp.from_numpy(self.host.normal(dtype, *shape))
        return x.to(getattr(self.xp, dtype))


@pytest.mark.torch
@pytest.mark.parametrize("name", ["lengths", "packed", "tiles"])
def test_the_truth_is_the_same_by_torch(name):
    case = CASES[name]
    want, got = truth(Problem(case, Host())), truth(Problem(case, Replayed()))
    for name, x in want.want.items():
        np.testing.assert_allclose(got.want[name], x, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(got.bars[name], want.bars[name], rtol=1e-6)
    np.testing.assert_allclose(got.delta, want.delta, rtol=1e-9, atol=1e-12)


# The other tests' truth has one row of sinks for all members.
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.sinks < 2])
def test_the_truth_is_that_of_the_other_tests(name):
    """Two programs for one definition."""
    case = CASES[name]
    x = Problem(case, Host())
    one = 0 if case.packed else slice(None)  # packed arrays have no members there
    arrays = {n: jnp.asarray(x.exact[n][one], jnp.float32) for n in "qkv"}
    operands = {n: x.integers[n] for n in ("q_lens", "kv_lens") if case.lengths}
    if case.shift:
        operands["q_offset"] = x.integers["shift"]
    if case.packed:
        operands["cu_seqlens"] = x.integers["cu_q"], x.integers["cu_kv"]
    if case.segments:
        operands["segment_ids"] = x.integers["q_segments"], x.integers["kv_segments"]
    if x.tiles is not None:
        operands["tiles"] = AttentionTiles(x.tiles.indices, x.tiles.counts)
    if case.bias:
        arrays["bias"] = jnp.asarray(x.exact["bias"], jnp.float32)
    if case.sinks:
        arrays["sinks"] = jnp.asarray(x.exact["sinks"][0], jnp.float32)
    left, right = (None if side < 0 else side for side in case.window)
    static = {"window": (left, right), "scale": x.scale, "softcap": case.softcap}
    cotangents = x.exact["d_o"][one], x.d_lse.swapaxes(1, 2)[one]
    want = attention_model.truth(Call(arrays, operands, static, cotangents))
    got = truth(x).want
    for name, other in OTHER_NAMES.items():
        if name in got:
            y = got[name][..., 0].swapaxes(1, 2) if name == "lse" else got[name]
            y = y if name == "dbias" else y[one]
            np.testing.assert_allclose(y, want[other], rtol=1e-6, atol=1e-9)


class Fake:
    """A launcher that is a model, with something wrong in it."""

    kernels = "model"

    def __init__(self, wrong: Callable[..., Any] = lambda case, got: got) -> None:
        self.place, self.arena, self.wrong = Host(), self, wrong

    def clear(self) -> None:
        pass

    def touched(self) -> bool:
        return False

    def describe(self, x: Problem) -> None:
        return None

    def forward(self, x: Problem, a: None) -> dict[str, Any]:
        return self.wrong(x.case, by_kernels(x, truth(x)))

    def joined(self, x: Problem, a: None, known: Truth) -> dict[str, Any]:
        return {}

    def backward(self, x: Problem, a: None, known: Truth) -> dict[str, Any]:
        return {}


def last_rows_of_a_tile(name: str) -> Callable[..., Any]:
    """Zeros in the last four rows of the first tile of 64, of one head."""

    def wrong(case: Case, got: dict[str, Any]) -> dict[str, Any]:
        got[name][0, 60:64, -1] = 0
        return got

    return wrong


def other(**changes: Any) -> Callable[..., Any]:
    """The results of a call with these options instead."""

    def wrong(case: Case, got: dict[str, Any]) -> dict[str, Any]:
        x = Problem(dataclasses.replace(case, **changes), Host())
        return by_kernels(x, truth(x))

    return wrong


def turned_heads(case: Case, got: dict[str, Any]) -> dict[str, Any]:
    return got | {n: np.roll(got[n], 1, 2) for n in ("out", "dq", "dk", "dv")}


def shorter_sum(case: Case, got: dict[str, Any]) -> dict[str, Any]:
    """A log-sum-exp without one of 130 terms."""
    return got | {"lse": got["lse"] + np.log1p(-1 / 130).astype(np.float32)}


WRONG = {
    "rows of out": last_rows_of_a_tile("out"),
    "rows of dq": last_rows_of_a_tile("dq"),
    "rows of dk": last_rows_of_a_tile("dk"),
    "rows of dv": last_rows_of_a_tile("dv"),
    "edge of a window": other(window=(-1, 101)),
    "a window of all but one": other(window=(-1, 99)),
    "scale": other(scale=0.99 * 32**-0.5),
    "heads": turned_heads,
    "lse": shorter_sum,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_the_sweep_fails_where_something_is_wrong(wrong):
    case = dataclasses.replace(CASE, window=(-1, 100))
    assert sweep(Fake(), [case], 1, 9).failed == []
    found = sweep(Fake(wrong), [case], 1, 9)
    assert len(found.failed) == 1, found


def test_the_sweep_draws_what_its_names_say():
    cases = [*draw_cases(3, 1)]
    assert {c.name.removesuffix(", many") for c in cases} == {*OPTIONS}
    assert {(c.head_dim, c.value_dim) for c in cases} == {*DIMS}
    assert {c.kind for c in cases} == {"bfloat16", "float16", "float32", "tf32"}
    assert any(c.name.endswith("many") for c in cases)
    assert {-(-c.q_len // 2048) for c in cases} >= {1, 2, 3, 5}
    assert cases == [*draw_cases(3, 1)] != [*draw_cases(4, 1)]
    for case in cases:
        assert case.heads * case.q_len * case.kv_len * case.batch <= 1.2 * PAIRS


@pytest.mark.torch
def test_the_arena_sees_who_writes_beside_a_result():
    import torch

    arena = Arena(torch, "cpu", 1 << 16)
    first, second = arena.empty(torch.float16, 3, 5), arena.empty(torch.float32, 7)
    assert torch.isnan(first).all() and torch.isnan(second).all()
    first.zero_(), second.zero_()
    assert not arena.touched()
    beside = first.data_ptr() - arena.bytes.data_ptr() + 30
    arena.bytes[beside] = 0
    assert arena.touched()
    arena.clear()
    assert not arena.touched()
    assert torch.isnan(arena.empty(torch.float16, 3, 5)).all()


class Memory(Launcher):
    """The C interface as a model in NumPy, which writes where it is told to."""

    def __init__(self, kernels: str, place: Any) -> None:
        self.kernels, self.place, self.torch = kernels, place, place.xp
        self.arena = Arena(self.torch, "cpu", 1 << 24)

    def describe(self, x: Problem) -> Attention:
        self.now = x
        host = Problem(x.case, Host())
        self.results = by_kernels(host, truth(host))
        return super().describe(x)

    def write(self, to: int, x: np.ndarray, dtype: Any) -> None:
        y = self.torch.from_numpy(np.ascontiguousarray(x)).to(dtype).contiguous()
        ctypes.memmove(to, y.data_ptr(), y.numel() * y.element_size())

    def read(self, at: int, like: np.ndarray, dtype: Any) -> np.ndarray:
        size = like.size * dtype.itemsize
        held = bytearray(ctypes.string_at(at, size))
        x = self.torch.frombuffer(held, dtype=dtype).double().numpy()
        return x.reshape(like.shape)

    def workspace(self, a: Attention, name: str) -> int:
        return 8

    def join(self, a: Attention, dtype: Any) -> None:
        """o and lse of the call and of those that are there."""
        own, lse = self.results["out"], self.results["lse"].astype(np.float64)
        held = self.read(a.o, own, dtype)
        held_lse = self.read(a.lse, lse, self.torch.float32)
        both = np.logaddexp(lse, held_lse)
        with np.errstate(invalid="ignore"):
            parts = [np.exp(part - both).swapaxes(1, 2) for part in (lse, held_lse)]
        of_own, of_held = (np.nan_to_num(part) for part in parts)
        nothing = np.isneginf(lse).swapaxes(1, 2)
        out = np.where(nothing, held, of_own * own + of_held * held)
        self.write(a.o, out, dtype)
        self.write(
            a.lse, np.where(np.isneginf(lse), held_lse, both), self.torch.float32
        )

    def run(self, name: str, a: Attention) -> None:
        c, got, f32 = self.now.case, self.results, self.torch.float32
        dtype = getattr(self.torch, c.dtype)
        if name == "forward" and a.joins:
            self.join(a, dtype)
        elif name == "forward":
            self.write(a.o, got["out"], dtype)
            base = np.where(np.isneginf(got["lse"]), 0, got["lse"] + 3) * c.has_base
            self.write(a.lse, got["lse"] - base, f32)
            if a.base:
                self.write(a.base, base, f32)
        elif name == "backward_bias":
            self.write(a.dbias, got["dbias"], getattr(self.torch, c.bias[0]))
        elif name == "backward_q":
            self.write(a.dq, got["dq"], dtype)
        else:
            self.write(a.dk, got["dk"], dtype)
            self.write(a.dv, got["dv"], dtype)
            if a.dq:
                assert a.workspace and not a.dq_accum
                held = self.read(a.dq, got["dq"], dtype) if a.joins else 0
                self.write(a.dq, got["dq"] + held, dtype)
            elif a.dq_accum:
                rows = got["dq"].reshape(-1, c.heads, c.head_dim) / self.now.scale
                rows = np.pad(rows, ((0, -len(rows) % 8), (0, 0), (0, 0)))
                blocks = rows.reshape(-1, 8, c.heads, c.head_dim // 8, 8)
                self.write(a.dq_accum, blocks.transpose(2, 0, 3, 1, 4), f32)


@pytest.mark.torch
@pytest.mark.parametrize("kernels", ["generic", "sm90"])
def test_results_are_read_as_the_header_says(kernels):
    place = Replayed()
    cases = [CASES[name] for name in ("packed", "bias")]
    found = sweep(Memory(kernels, place), cases, 1, 9)
    assert found.failed == []
    dq = {"dq", "dq, same"}
    want = {
        "out",
        "lse",
        "out, workspace",
        "lse, workspace",
        "dk",
        "dv",
        "dk, same",
        "dv, same",
        "dbias",
        *dq,
        *(["joined", "joined_lse", "added"] if kernels == "sm90" else []),
    }
    assert {group.split(" ", 2)[2] for group in found.worst} == want
    assert all(0 < worst < 1 for worst in found.worst.values())


@pytest.mark.torch
def test_the_stress_sees_one_launch_that_is_wrong():
    """A value of dq that is not finite, or that is another one; another bit of dk."""
    clean = Memory("sm90", Replayed())
    assert stress.passes(clean, CASE, lambda: None, 3)[1] == []
    for name, value in ("dq", np.nan), ("dq", 0.5), ("dk", 0.5):
        launcher = Memory("sm90", Replayed())
        launches = []

        def strike(launcher=launcher, launches=launches, name=name, value=value):
            launches.append(0)
            if len(launches) == 3:
                launcher.results[name][1, 7, 1, 3] = value

        wrong = stress.passes(launcher, CASE, strike, 3)[1]
        assert len(wrong) == 1 and name in wrong[0]


# ---- on a GPU ------------------------------------------------------------------------

LIBRARY = Path(jax_kvblock.__file__).parent / "lib" / "libkvblock.so"
SCRIPTS = Path(__file__).parents[1] / "support"


def run_on_gpu(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), str(LIBRARY)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True)


@pytest.mark.gpu
@pytest.mark.torch
def test_a_sweep_of_the_kernels_finds_nothing(tmp_path):
    """A few hundred cases; `make sweep` has thousands."""
    skip_unless_served("cuda", backward=True)
    out = tmp_path / "sweep.json"
    done = run_on_gpu("attention_sweep.py", "--limit", "250", "--out", str(out))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "generic" in json.loads(out.read_text())["sweeps"]


@pytest.mark.gpu
@pytest.mark.torch
def test_dq_is_right_under_load(tmp_path):
    """A few hundred launches of each shape; `make stress` has thousands."""
    skip_unless_served("cuda_sm90", backward=True)
    out = tmp_path / "stress.json"
    how = ("--seconds", "0.2", "--dtype", "float16", "--out", str(out))
    done = run_on_gpu("attention_stress.py", *how)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert json.loads(out.read_text())["launches"] > 0
