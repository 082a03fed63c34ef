"""Paged attention's kernels on a GPU by the C interface, against float64.

    python paged_launches.py LIBRARY [--only RE] [--dtype NAME] [--most-dim N] [--exact]

All cases of paged_cases.py. Each runs twice and must give the same bits. Arrays have
NaN around them, which must stay; with --exact they have nothing there, so that memcheck
of compute-sanitizer knows where each one ends. --only chooses by name, --dtype and
--most-dim what a library with some of the kernels serves.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
import time

import numpy as np
from attention_launches import connect, driver
from latent_cases import LATENT, LATENT_MANY, LATENT_PAIRS, LATENT_TYPES
from paged_cases import (
    BAD,
    BAD_DECODE_ROWS,
    CASES,
    DECODE_ROWS,
    LEAVING,
    LONG,
    NARROW_LONG,
    NARROW_SPLIT,
    SHARED_OUT,
    SPLIT,
)
from paged_problems import GAP, Case, Problem


class GpuMemory:
    """Arrays on a GPU, freed together."""

    def __init__(self, gap: int) -> None:
        self.gap = gap
        self.held: list[tuple[int, int]] = []  # where one begins, with its gaps; size

    def empty(self, size: int) -> int:
        """So many bytes, all of them 0xFF."""
        pointer = ctypes.c_uint64()
        whole = ctypes.c_size_t(max(size, 1) + 2 * self.gap)
        driver("cuMemAlloc_v2", ctypes.byref(pointer), whole)
        driver("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0xFF), whole)
        self.held.append((pointer.value, size))
        return pointer.value + self.gap

    def give(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        place = self.empty(array.nbytes)
        if array.nbytes:
            source = ctypes.c_void_p(array.ctypes.data)
            size = ctypes.c_size_t(array.nbytes)
            driver("cuMemcpyHtoD_v2", ctypes.c_uint64(place), source, size)
        return place

    def read(self, place: int, size: int) -> np.ndarray:
        to = np.empty(size, np.uint8)
        if size:
            target, source = ctypes.c_void_p(to.ctypes.data), ctypes.c_uint64(place)
            driver("cuMemcpyDtoH_v2", target, source, ctypes.c_size_t(size))
        return to

    def untouched(self) -> bool:
        return all(
            (self.read(at, self.gap) == 0xFF).all()
            and (self.read(at + self.gap + size, self.gap) == 0xFF).all()
            for at, size in self.held
        )

    def free(self) -> None:
        for at, _ in self.held:
            driver("cuMemFree_v2", ctypes.c_uint64(at))


def run(library: ctypes.CDLL, case: Case, gap: int, times: int = 2) -> float:
    """The call, held to the truth; the largest error in parts of its bar."""
    x = Problem(case)
    worst = judge(library, x, gap, times)
    return max(worst, hold_alone(library, x, gap)) if case.split_size else worst


def hold_alone(library: ctypes.CDLL, whole: Problem, gap: int) -> float:
    """Each sequence of a call in one of its own: rows have the same bits."""
    worst = 0.0
    for b in range(len(whole.tables)):
        call, first, end = whole.sequence_rows(b)
        if first == end:
            continue
        alone = whole.alone(b)
        worst = max(worst, judge(library, alone, gap, 1))
        assert whole.got and alone.got
        for a, part in zip(whole.got, alone.got, strict=True):
            same = a[call, first:end].tobytes() == part[0].tobytes()
            assert same, f"other bits of sequence {b} alone"
    return worst


def judge(library: ctypes.CDLL, x: Problem, gap: int, times: int = 2) -> float:
    case, memory = x.case, GpuMemory(gap)
    a = x.describe(memory.give)
    sized = library.kvblock_paged_attention_workspace
    sized.restype = ctypes.c_int64
    launch = library.kvblock_paged_attention_forward
    launch.restype = ctypes.c_char_p
    out_bytes = case.calls * x.rows * case.heads * case.value_dim * 2
    lse_bytes = case.calls * x.rows * case.heads * 4
    results = []
    for _ in range(times):
        a.o, a.lse = memory.empty(out_bytes), memory.empty(lse_bytes)
        a.workspace = memory.empty(sized(ctypes.byref(a)))
        error = launch(ctypes.byref(a), None)
        assert error is None, error
        driver("cuCtxSynchronize")
        results.append((memory.read(a.o, out_bytes), memory.read(a.lse, lse_bytes)))
    assert memory.untouched(), "a write beside an array"
    memory.free()
    for again in results[1:]:
        same = zip(again, results[0], strict=True)
        assert all((a == b).all() for a, b in same), "other bits"
    shape = (case.calls, x.rows, case.heads)
    out, lse = results[0]
    x.got = (
        out.view(x.dtype).reshape(*shape, case.value_dim),
        lse.view(np.float32).reshape(shape),
    )
    return x.hold(*x.got)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--only", default="")
    parser.add_argument("--dtype")
    parser.add_argument("--most-dim", type=int, default=576)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument(
        "--part", default="0/1", help="I/N: of N parts the one of number I"
    )
    given = parser.parse_args()
    device = connect()
    library = ctypes.CDLL(given.library)
    count, wrong = 0, []
    part, parts = map(int, given.part.split("/"))
    cases = {
        **CASES,
        **DECODE_ROWS,
        **BAD,
        **BAD_DECODE_ROWS,
        **LEAVING,
        **LONG,
        **SPLIT,
    }
    cases |= {name: case for name, (case, _) in SHARED_OUT.items()}
    cases |= {**LATENT, **LATENT_MANY, **LATENT_PAIRS, **LATENT_TYPES}
    major = ctypes.c_int()
    driver("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
    if major.value == 9:
        cases |= {**NARROW_LONG, "8 bits: split": NARROW_SPLIT}
    for name, case in list(cases.items())[part::parts]:
        served = given.dtype in (None, case.dtype)
        served &= max(case.head_dim, case.value_dim) <= given.most_dim
        if not served or not re.search(given.only, name):
            continue
        count += 1
        start = time.monotonic()
        try:
            worst = run(library, case, 0 if given.exact else GAP)
            print(f"{name}: {worst:.2f} of the bar, {time.monotonic() - start:.1f} s")
        except AssertionError as error:
            wrong.append(name)
            print(f"{name}: WRONG: {error}")
        sys.stdout.flush()
    print(f"{count} cases, {len(wrong)} wrong: {wrong}")
    return bool(wrong) or not count


if __name__ == "__main__":
    sys.exit(main())
