"""Many backward passes of the Hopper kernels under load: is every dq finite and right?

    python tests/support/attention_stress.py LIBRARY [--seconds 1] [--out FILE]

CTAs add to one dq in an order that differs from run to run, and the first of them
stores what the others add to. So each shape, of every head dim that has a kernel of its
own, is computed again and again: on fresh numbers, with more CTAs than fit at once that
all add to the same tiles, in memory full of NaN, while another stream multiplies
matrices or copies. Each result is held to float64 row by row, and dk and dv, which have
one owner, to the same bits. Needs torch on a GPU. `make stress` runs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import judge
from attention_problems import Case, Gpu, Problem, truth
from attention_sweep import Launcher, where_it_ran
from sweep_cases import CAUSAL

# Head dims, and rows enough for many CTAs; with head dim 128 from 2048 on tall tiles.
SHAPES = (
    *((64, 64, 2048), (96, 96, 2048), (128, 128, 1900), (128, 128, 2048)),
    *((192, 128, 1536), (192, 192, 1536), (256, 256, 1536)),
)
HEADS = 16
REPEATS = 25  # launches on the same numbers
LOADS = ("nothing", "products", "copies")


@dataclasses.dataclass
class Found:
    """Of one shape."""

    name: str
    launches: int
    worst: float  # error of dq, in parts of its bar
    wrong: list[str]


class Load:
    """What else the GPU does meanwhile, on a stream of its own."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.stream = torch, torch.cuda.Stream()
        self.matrix = torch.randn(3072, 3072, dtype=torch.float16, device="cuda")
        self.bytes = torch.zeros(1 << 27, dtype=torch.uint8, device="cuda")
        self.copy = torch.empty_like(self.bytes)

    def add(self, kind: str) -> None:
        with self.torch.cuda.stream(self.stream):
            if kind == "products":
                self.matrix @ self.matrix
            elif kind == "copies":
                self.copy.copy_(self.bytes)


def passes(
    launcher: Any, case: Case, load: Callable[[], None], repeats: int = REPEATS
) -> tuple[float, list[str]]:
    """`repeats` backward passes of one problem: the worst dq, and what is wrong."""
    torch = launcher.torch
    x = Problem(case, launcher.place)
    known = truth(x)
    a = launcher.describe(x)
    given = launcher.give(a, case, known)
    want, bar = known.want["dq"], known.bars["dq"]
    worst, other_bits, first = [], [], None
    for _ in range(repeats):
        launcher.arena.clear()
        load()
        with launcher.kept(a):
            keys = launcher.keys(x, a)
            dq = launcher.hopper_sums(x, a, "dq")["dq"]
        worst.append((abs(dq.double() - want) / bar).max())  # NaN if there is any
        first = first or {name: y.clone() for name, y in keys.items()}
        other_bits += [(keys[name] != y).any() for name, y in first.items()]
    del given
    wrong = [
        verdict.wrong
        for name, y in first.items()
        if (verdict := judge.judge(name, y, known.want[name], known.bars[name])).wrong
    ]
    found = torch.stack(worst)
    if bool((bad := ~(found <= 1)).any()):
        count, which = int(bad.sum()), int(bad.to(torch.int32).argmax())
        wrong.append(
            f"dq of {count} of {repeats} launches, the first {which}: "
            f"{float(found[which]):.4g} of the bar"
        )
    if bool(torch.stack(other_bits).any()):
        wrong.append("dk or dv has other bits at another time")
    return float(found.max()), wrong


def shapes(dtypes: list[str]) -> Iterator[Case]:
    kinds = {"full": {}, "causal": {"window": CAUSAL}}
    for dtype, dims, (name, options) in itertools.product(
        dtypes, SHAPES, kinds.items()
    ):
        head_dim, value_dim, length = dims
        sizes = 1, HEADS, HEADS, length, length
        yield Case(dtype, head_dim, value_dim, *sizes, seed=0, name=name, **options)


def stress(launcher: Launcher, case: Case, seconds: float, load: Load) -> Found:
    found = Found(str(case).split(" seed")[0], 0, 0.0, [])
    start = time.perf_counter()
    for seed in itertools.count(1):
        kind = LOADS[seed % len(LOADS)]
        fresh = dataclasses.replace(case, seed=seed)
        worst, wrong = passes(launcher, fresh, lambda kind=kind: load.add(kind))
        found.launches += REPEATS
        found.worst = max(found.worst, worst)
        found.wrong += [f"seed {seed}, beside {kind}: {line}" for line in wrong]
        if time.perf_counter() - start > seconds or len(found.wrong) > 4:
            return found
    raise AssertionError("never")


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library", help="libkvblock.so")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape")
    parser.add_argument("--dtype", action="append", choices=("float16", "bfloat16"))
    parser.add_argument("--out", type=Path, help="where the record goes")
    chosen = parser.parse_args()
    launcher, load = Launcher(chosen.library, "sm90", Gpu()), Load(torch)
    every = []
    with torch.no_grad():
        for case in shapes(chosen.dtype or ["float16", "bfloat16"]):
            found = stress(launcher, case, chosen.seconds, load)
            every.append(found)
            said = f"{found.launches:6} launches, dq {found.worst:.2f} of the bar"
            print(f"{found.name:50} {said}", flush=True)
            for line in found.wrong:
                print(f"  FAILED {line}", flush=True)
    wrong = [line for found in every for line in found.wrong]
    total = sum(found.launches for found in every)
    print(f"{total} launches, {len(wrong)} of the problems wrong")
    if chosen.out:
        record = where_it_ran(torch, True) | {"launches": total}
        record["shapes"] = [dataclasses.asdict(found) for found in every]
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
