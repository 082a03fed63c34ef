"""Holds the attention kernels of this GPU to float64, thousands of calls in a row.

    python tests/support/attention_sweep.py LIBRARY [--kernels sm90] [--only D128]
                                                    [--out FILE]

It calls the C interface of libkvblock.so, without jax and so without compiling
anything: every launcher, on fresh random numbers, over the calls of sweep_cases.py.
Outputs lie in memory full of NaN, with gaps that must stay as they are, and so do
inputs that nobody may read. Each row is held to a bar of its own (judge.py). Needs
torch, which draws the numbers and computes the truth on the GPU. `make sweep` runs it.

Writes a record: how many cases, how long, the largest error of each group in parts of
its bar, and what was wrong. Exits with 1 if something was.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import judge
import numpy as np
from attention_launches import (
    BF16,
    F16,
    F32,
    GENERIC,
    MOST_JOINED_DIM,
    SM90,
    Attention,
    workspace_bytes,
)
from attention_problems import TILE_KV, TILE_Q, Case, Gpu, Problem, Truth, truth
from sweep_cases import PRECISIONS, draw_cases

KERNELS = {"generic": GENERIC, "sm90": SM90}
DTYPES = {"bfloat16": BF16, "float16": F16, "float32": F32}
TIMES = 3  # a result that is the same every time is computed so often


# ---- launching -----------------------------------------------------------------------


class Arena:
    """Results in memory full of NaN, with gaps between them; allocated once."""

    GAP = 256

    def __init__(self, torch: Any, device: str, size: int) -> None:
        self.torch = torch
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.end = size
        self.clear()

    def clear(self) -> None:
        """Everything that was in use is NaN again."""
        self.bytes[: self.end + self.GAP].fill_(0xFF)
        self.end, self.gaps = self.GAP, [0]

    def empty(self, dtype: Any, *shape: int) -> Any:
        size = int(np.prod(shape)) * dtype.itemsize
        start, stop = self.end, self.end + size
        assert stop + 2 * self.GAP <= self.bytes.numel(), "the arena is too small"
        self.gaps.append(stop)
        self.end = -(-stop // self.GAP) * self.GAP + self.GAP
        return self.bytes[start:stop].view(dtype).reshape(shape)

    def touched(self) -> bool:
        """Whether somebody wrote where nothing is."""
        gaps = [self.bytes[gap : gap + self.GAP // 2] for gap in self.gaps]
        return bool((self.torch.cat(gaps) != 0xFF).any())


class Launcher:
    """The launchers of one library, for one kind of kernels."""

    def __init__(self, path: str, kernels: str, place: Any) -> None:
        self.library = ctypes.CDLL(path)
        self.kernels, self.place, self.torch = kernels, place, place.xp
        on_gpu = place.device == "cuda"
        self.arena = Arena(self.torch, place.device, 1 << (31 if on_gpu else 27))
        # The emulator has no streams.
        self.stream = self.torch.cuda.current_stream().cuda_stream if on_gpu else 0

    def run(self, name: str, a: Attention) -> None:
        launch = self.library[f"kvblock_attention_{name}"]
        launch.restype = ctypes.c_char_p
        error = launch(ctypes.byref(a.of(name)), ctypes.c_void_p(self.stream))
        assert error is None, f"{name}: {error}"

    def describe(self, x: Problem) -> Attention:
        """The call without its results. x has to outlive it."""
        c = x.case
        a = Attention(kernels=KERNELS[self.kernels], dtype=DTYPES[c.dtype])
        a.batch, a.num_heads, a.num_kv_heads = c.batch, c.heads, c.kv_heads
        a.precision = PRECISIONS[c.precision]
        a.q_len, a.kv_len = c.q_len, c.kv_len
        a.head_dim, a.value_dim = c.head_dim, c.value_dim
        a.scale, a.softcap = x.scale, c.softcap
        a.window_left, a.window_right = c.window
        for name, array in x.given.items():
            x.given[name] = array = array.contiguous()
            setattr(a, name, array.data_ptr())
        if c.bias is not None:
            dtype, a.bias_batch, own_heads = c.bias
            a.bias_dtype, a.bias_heads = DTYPES[dtype], c.heads if own_heads else 1
        a.sink_batch, a.dropout = c.sinks, c.dropout
        if x.tiles is not None:
            a.tile_batch, a.tile_heads = x.tiles.counts.shape[:2]
            a.tile_q, a.tile_kv = TILE_Q, TILE_KV
            a.max_tiles = x.tiles.indices.shape[-1]
            a.max_tiles_t = x.tiles.indices_t.shape[-1]
            a.num_tile_masks = c.masks
        return a

    def forward(self, x: Problem, a: Attention) -> dict[str, Any]:
        """Without a workspace, and with one; the bits are the same every time."""
        got: dict[str, Any] = {}
        size = self.workspace(a, "forward")
        for name, times in ("", 1), (", workspace", TIMES if size else 0):
            for _ in range(times):
                if name:
                    a.workspace = self.arena.empty(self.torch.uint8, size).data_ptr()
                for key, y in self.once(x, a).items():
                    before = got.setdefault(f"{key}{name}", y)
                    same = before.view(self.torch.uint8), y.view(self.torch.uint8)
                    assert self.torch.equal(*same), f"{key}: other bits at another time"
        a.workspace = None
        return got

    def joined(self, x: Problem, a: Attention, known: Truth) -> dict[str, Any]:
        """The call joined with attention to other keys, which is drawn.

        Rows that attend to nothing here keep it. What should come out goes to `known`.
        """
        c, torch = x.case, self.torch
        options = c.bias or c.sinks or c.softcap or x.tiles or c.dropout
        served = not options and x.scale > 0
        narrow = max(c.head_dim, c.value_dim) <= MOST_JOINED_DIM
        if self.kernels != "sm90" or not (served and narrow):
            return {}
        drawn = torch.Generator(self.place.device).manual_seed(c.seed)
        normal = functools.partial(
            torch.randn, generator=drawn, device=self.place.device
        )
        out, lse = known.want["out"], known.want["lse"][..., 0]
        alone = torch.isneginf(lse)
        held_lse = torch.where(alone, 0.0, lse).float() + 3 * normal(lse.shape)
        held_lse = torch.where(normal(lse.shape) > 1.3, -torch.inf, held_lse)
        there = torch.isfinite(held_lse).mT[..., None]
        held = (normal(out.shape) * there).to(getattr(torch, c.dtype))
        o = self.arena.empty(held.dtype, *held.shape).copy_(held)
        joint = self.arena.empty(torch.float32, *lse.shape).copy_(held_lse)
        a.o, a.lse, a.joins = o.data_ptr(), joint.data_ptr(), 1
        if size := self.workspace(a, "forward"):
            a.workspace = self.arena.empty(torch.uint8, size).data_ptr()
        self.run("forward", a)
        a.workspace, a.joins = None, 0

        want = torch.logaddexp(lse, held_lse.double())
        own, other = (
            torch.nan_to_num(torch.exp(part - want)).mT[..., None]
            for part in (lse, held_lse.double())
        )
        known.want["joined"] = own * out + other * held.double()
        known.want["joined_lse"] = want[..., None]
        rounding = 0.75 * judge.EPS[c.dtype] * known.want["joined"].abs()
        off = known.bars["lse"] + judge.bar_of_lse(want[..., None])
        known.bars["joined_lse"] = torch.where(alone[..., None], 1e-30, off)
        sizes = out.abs() + held.double().abs()
        bar = known.bars["out"] * own + rounding + 2 * off.transpose(1, 2) * sizes
        known.bars["joined"] = torch.where(alone.mT[..., None], 1e-30, bar)
        return {"joined": o, "joined_lse": joint[..., None]}

    def workspace(self, a: Attention, name: str) -> int:
        """Bytes of it."""
        return workspace_bytes(self.library, a, name)

    def once(self, x: Problem, a: Attention) -> dict[str, Any]:
        c = x.case
        dtype = getattr(self.torch, c.dtype)
        out = self.arena.empty(dtype, c.members, c.q_len, c.heads, c.value_dim)
        lse = self.arena.empty(self.torch.float32, c.members, c.heads, c.q_len)
        a.o, a.lse = out.data_ptr(), lse.data_ptr()
        got = {"out": out, "lse": lse[..., None]}
        if c.has_base:
            base = self.arena.empty(self.torch.float32, *lse.shape)
            a.base = base.data_ptr()
        self.run("forward", a)
        if c.has_base:
            assert bool(self.torch.isfinite(base).all()), "a base is not finite"
            got["lse"] = (lse.double() + base)[..., None]
        return got

    def give(self, a: Attention, c: Case, known: Truth) -> tuple[Any, ...]:
        """lse, its base and delta of the truth, which have to outlive the launches."""
        torch, f32 = self.torch, self.torch.float32
        whole = known.lse
        # Anything finite near the largest score.
        base = torch.where(torch.isneginf(whole), 0.0, whole.round()).to(f32)
        base = base.contiguous()
        a.base = base.data_ptr() if c.has_base else None
        lse = (whole - base if c.has_base else whole).to(f32).contiguous()
        # A row that attends to nothing has no delta, whatever its gradients hold.
        delta = torch.where(torch.isneginf(lse), float("nan"), known.delta.to(f32))
        delta = delta.contiguous()
        a.lse, a.delta = lse.data_ptr(), delta.data_ptr()
        return lse, base, delta

    def backward(self, x: Problem, a: Attention, known: Truth) -> dict[str, Any]:
        """Every way to the gradients; what is to be the same every time, TIMES."""
        c, torch = x.case, self.torch
        given = self.give(a, c, known)
        sums = self.generic_sums if self.kernels == "generic" else self.hopper_sums
        with self.kept(a):
            keys = self.keys(x, a)
            got = sums(x, a, "dq") | keys
        if self.kernels == "sm90":
            with self.kept(a):
                self.keys(x, a)
                got |= self.added(x, a, known)
        in_turns = self.kernels == "sm90" and not c.segments and x.tiles is None
        first: dict[str, Any] = {}
        for _ in range(TIMES):
            with self.kept(a):
                again = {f"{n}, same": y for n, y in self.keys(x, a).items()}
                if in_turns:
                    again |= self.hopper_sums(x, a, "dq, same", turns=True)
                else:
                    self.run("backward_kv", a)
                    dq = again["dq, same"] = self._like_q(x)
                    a.dq = dq.data_ptr()
                    self.run("backward_q", a)
                if c.bias is not None:
                    bias = x.given["bias"]
                    dbias = again["dbias"] = self.arena.empty(bias.dtype, *bias.shape)
                    a.dbias = dbias.data_ptr()
                    self.run("backward_bias", a)
            for name, y in again.items():
                before = first.setdefault(name, y)
                same = torch.equal(before.view(torch.uint8), y.view(torch.uint8))
                assert same, f"{name}: other bits at another time"
        del given
        return got | first

    @contextlib.contextmanager
    def kept(self, a: Attention) -> Iterator[None]:
        """Results of one launch, which the next one does not have."""
        yield
        for name in ("dk", "dv", "dq", "dq_accum", "dbias", "workspace"):
            setattr(a, name, None)
        a.deterministic = a.joins = 0

    def keys(self, x: Problem, a: Attention) -> dict[str, Any]:
        c, dtype = x.case, getattr(self.torch, x.case.dtype)
        dk = self.arena.empty(dtype, c.members, c.kv_len, c.kv_heads, c.head_dim)
        dv = self.arena.empty(dtype, c.members, c.kv_len, c.kv_heads, c.value_dim)
        a.dk, a.dv = dk.data_ptr(), dv.data_ptr()
        return {"dk": dk, "dv": dv}

    def _like_q(self, x: Problem) -> Any:
        c, dtype = x.case, getattr(self.torch, x.case.dtype)
        return self.arena.empty(dtype, c.members, c.q_len, c.heads, c.head_dim)

    def generic_sums(self, x: Problem, a: Attention, name: str) -> dict[str, Any]:
        """dq by additions in blocks of 8 x 8, scaled here."""
        c = x.case
        rows = c.members * c.q_len
        blocks = c.heads, -(-rows // 8), c.head_dim // 8, 8, 8
        added = self.arena.empty(self.torch.float32, *blocks)
        a.dq_accum = added.data_ptr()
        self.run("backward_kv", a)
        dq = added.permute(1, 3, 0, 2, 4).reshape(-1, c.heads, c.head_dim)[:rows]
        dq = dq.reshape(c.members, c.q_len, c.heads, c.head_dim).double() * x.scale
        return {name: dq}

    def added(self, x: Problem, a: Attention, known: Truth) -> dict[str, Any]:
        """dq added to one that is drawn; rows that get nothing keep it."""
        want = known.want["dq"]
        drawn = self.torch.Generator(self.place.device).manual_seed(x.case.seed)
        held = self.torch.randn(want.shape, generator=drawn, device=self.place.device)
        held = (held * want.abs().mean()).to(getattr(self.torch, x.case.dtype))
        got = self.hopper_sums(x, a, "added", held=held)
        known.want["added"] = want + held.double()
        rounding = 0.75 * judge.EPS[x.case.dtype] * known.want["added"].abs()
        nothing = (want == 0).all(-1, keepdim=True)
        bar = self.torch.where(nothing, 1e-30, known.bars["dq"] + rounding)
        known.bars["added"] = bar
        return got

    def hopper_sums(
        self, x: Problem, a: Attention, name: str, turns: bool = False, held: Any = None
    ) -> dict[str, Any]:
        """dq by additions in a workspace, which the launcher finishes."""
        dq, size = self._like_q(x), self.workspace(a, "backward_kv")
        if held is not None:
            dq.copy_(held)
            a.joins = 1
        a.dq, a.deterministic = dq.data_ptr(), turns
        a.workspace = self.arena.empty(self.torch.uint8, size).data_ptr()
        self.run("backward_kv", a)
        return {name: dq}


# ---- sweeping ------------------------------------------------------------------------


def judged(
    launcher: Launcher, case: Case, backward: bool = True
) -> dict[str, judge.Verdict]:
    """What each result of a case is like; under "launch", what went wrong else."""
    x = Problem(case, launcher.place)
    known = truth(x, backward)
    launcher.arena.clear()
    try:
        a = launcher.describe(x)
        got = launcher.forward(x, a) | launcher.joined(x, a, known)
        if backward:
            got |= launcher.backward(x, a, known)
        assert not launcher.arena.touched(), "something was written beside the results"
    except AssertionError as e:
        return {"launch": judge.Verdict(np.inf, str(e))}
    of = {name: name.split(",")[0] for name in got}
    return {
        name: judge.judge(name, y, known.want[of[name]], known.bars[of[name]])
        for name, y in got.items()
    }


@dataclasses.dataclass
class Record:
    """What a sweep found."""

    seed: int
    cases: dict[str, int]
    results: int
    worst: dict[str, float]  # of a group, in parts of the bar
    failed: list[str]


def sweep(launcher: Launcher, cases: list[Case], seed: int, most: int) -> Record:
    """Judges all of it, or until so many cases have failed."""
    counts: collections.Counter[str] = collections.Counter()
    worst: dict[str, float] = collections.defaultdict(float)
    failed, results = [], 0
    for case in cases:
        try:
            found = judged(launcher, case, case.has_gradients)
        except RuntimeError as e:  # nothing works any more
            failed.append(f"{launcher.kernels} {case}: {e}")
            break
        for name, verdict in found.items():
            group = f"{launcher.kernels} {case.kind} {name}"
            worst[group] = max(worst[group], verdict.worst)
        results += len(found)
        counts[case.name.removesuffix(", many")] += 1
        if wrong := [v.wrong for v in found.values() if v.wrong]:
            failed.append(f"{launcher.kernels} {case}: {'; '.join(wrong)}")
            if len(failed) >= most:
                break
    return Record(seed, dict(counts), results, dict(worst), failed)


def where_it_ran(torch: Any, on_gpu: bool) -> dict[str, Any]:
    def output(*command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return ""
        return done.stdout.strip()

    folder = str(Path(__file__).parent)
    return {
        "commit": output("git", "-C", folder, "rev-parse", "HEAD"),
        "changed": bool(output("git", "-C", folder, "status", "--porcelain", "-uno")),
        "device": torch.cuda.get_device_name() if on_gpu else "emulator",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library", help="libkvblock.so")
    parser.add_argument(
        "--emulated", action="store_true", help="LIBRARY is the emulator's, on the CPU"
    )
    parser.add_argument("--kernels", choices=KERNELS, action="append")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--seed", type=int, default=0, help="0 draws one")
    parser.add_argument("--rounds", type=int, default=4, help="sizes for each option")
    parser.add_argument("--limit", type=int, default=0, help="of each kind so many")
    parser.add_argument("--most", type=int, default=20, help="failures to stop at")
    parser.add_argument("--out", type=Path, help="where the record goes")
    return parser.parse_args()


def main() -> int:
    import torch

    chosen = options()
    seed = chosen.seed or int(np.random.SeedSequence().generate_state(1)[0])
    on_gpu = not chosen.emulated
    hopper = on_gpu and torch.cuda.get_device_capability() == (9, 0)
    kinds = chosen.kernels or [k for k in KERNELS if k != "sm90" or hopper]
    record: dict[str, Any] = {"seed": seed, **where_it_ran(torch, on_gpu), "sweeps": {}}
    place, failed, start = Gpu("cuda" if on_gpu else "cpu"), [], time.perf_counter()
    with torch.no_grad():
        for kernels in kinds:
            cases = [
                c for c in draw_cases(seed, chosen.rounds) if chosen.only in str(c)
            ]
            if kernels == "sm90":
                cases = [c for c in cases if c.hopper_serves]
            if chosen.limit:
                order = np.random.default_rng(seed).permutation(len(cases))
                cases = [cases[i] for i in order[: chosen.limit]]
            began = time.perf_counter()
            launcher = Launcher(chosen.library, kernels, place)
            found = sweep(launcher, cases, seed, chosen.most)
            del launcher
            seconds = time.perf_counter() - began
            count = sum(found.cases.values())
            print(
                f"{kernels}: {count} of {len(cases)} cases, {found.results} results, "
                f"{len(found.failed)} cases failed, {seconds:.1f} s, seed {seed}"
            )
            record["sweeps"][kernels] = dataclasses.asdict(found) | {"seconds": seconds}
            failed += found.failed
            for group, worst in sorted(found.worst.items()):
                print(f"  {group:40} {worst:6.2f} of the bar")
    for line in failed:
        print(f"FAILED {line}")
    record["seconds"] = time.perf_counter() - start
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
