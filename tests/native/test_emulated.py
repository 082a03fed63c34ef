"""The generic attention kernels on a CPU, thread by thread, against float64.

The emulator (tests/support/emulator/) runs the very sources that a GPU runs,
launchers too, with an instruction's meaning in its place: who computes which part of
which row, barriers, asynchronous copies (NaN until they are waited for), fragments,
shared memory. It cannot say how long anything takes, and knows no races between CTAs.
The cases are drawn and judged as in the sweep on a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attention_sweep
import pytest
from attention_problems import Case, Gpu
from attention_sweep import Launcher, judged
from sweep_cases import CAUSAL, OPTIONS, small

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.wide


@pytest.fixture
def launcher(
    attention_library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Launcher]:
    """Everything once: nothing here differs from time to time."""
    monkeypatch.setattr(attention_sweep, "TIMES", 1)
    yield Launcher(str(attention_library), "generic", Gpu("cpu"))
    ctypes.CDLL(str(attention_library)).emulator_set_multiprocessors(3)
    ctypes.CDLL(str(attention_library)).emulator_set_multiprocessor_bytes(228 << 10)


def hold(launcher: Launcher, case: Case, backward: bool = True) -> None:
    found = judged(launcher, case, backward)
    apart = case.bias or case.tiles or case.packed or case.dropout
    assert apart or "out, workspace" in found
    assert [v.wrong for v in found.values() if v.wrong] == [], str(case)


def option(name: str) -> Case:
    """A call with this option, a tile or two along each side."""
    number = list(OPTIONS).index(name)
    dims = {"head_dim": (64, 40, 56)[number % 3], "value_dim": (64, 56, 24)[number % 3]}
    return small(name, ("bfloat16", "float16")[number % 2], (70, 140), **dims)


@pytest.mark.torch
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_right(name, launcher):
    hold(launcher, option(name))


LONGER = {
    "d128": Case("bfloat16", 128, 128, 1, 2, 1, 150, 200, 1, window=CAUSAL),
    "d104, lengths": Case("bfloat16", 104, 72, 2, 2, 1, 90, 150, 2, lengths=True),
    "d256": Case("float16", 256, 256, 1, 1, 1, 70, 90, 3, window=(30, 10)),
    "d128, partial tiles": Case(
        "bfloat16", 128, 128, 2, 2, 1, 150, 300, 5, tiles=(2, True), masks=4
    ),
    "d256, partial tiles": Case(
        "float16", 256, 200, 1, 1, 1, 150, 200, 6, tiles=(1, False), masks=2
    ),
    "packed": Case("bfloat16", 128, 128, 4, 2, 2, 200, 210, 4, packed=True),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", LONGER)
def test_other_head_dims_are_right(name, launcher):
    hold(launcher, LONGER[name])


# Few queries, whose keys are shared out.
FEW = Case("bfloat16", 64, 64, 1, 4, 1, 1, 300, 0, name="few queries")
SHARED = {
    "one query": FEW,
    "no keys": dataclasses.replace(FEW, kv_len=1, lengths=True, batch=3),
    "no keys at all": dataclasses.replace(FEW, kv_len=0, sinks=1),
    "units whole and cut": dataclasses.replace(
        FEW, batch=3, heads=6, kv_heads=2, kv_len=520
    ),
    "d128": dataclasses.replace(
        FEW, head_dim=128, value_dim=96, heads=8, kv_heads=2, batch=2
    ),
    "d256": dataclasses.replace(FEW, dtype="float16", head_dim=200, value_dim=256),
    "groups of 7": dataclasses.replace(FEW, heads=7, dtype="float16", sinks=1),
    "two blocks of rows": dataclasses.replace(
        FEW, q_len=5, heads=10, kv_heads=2, window=CAUSAL, shift=True
    ),
    "four blocks of rows": dataclasses.replace(
        FEW, q_len=13, window=CAUSAL, shift=True, batch=2, segments="scattered"
    ),
    "many tiles of rows": dataclasses.replace(
        FEW, q_len=50, heads=4, kv_heads=2, window=(100, 0), shift=True, batch=2
    ),
    "lengths": dataclasses.replace(
        FEW, q_len=2, batch=6, lengths=True, sinks=6, kv_len=500
    ),
    "many members": dataclasses.replace(
        FEW, batch=150, heads=2, kv_len=150, lengths=True
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", SHARED)
def test_few_queries_are_right(name, launcher):
    hold(launcher, SHARED[name], backward=False)


@pytest.mark.torch
@pytest.mark.parametrize("multiprocessors", [1, 2, 5, 11, 60])
@pytest.mark.parametrize("name", ["units whole and cut", "lengths"])
def test_keys_are_shared_out_over_any_number(name, multiprocessors, launcher):
    launcher.library.emulator_set_multiprocessors(multiprocessors)
    hold(launcher, SHARED[name], backward=False)


# By multiprocessors. Each has two CTAs, of 256 columns one. Where there are more
# CTAs than units, those who combine have a unit each, else a border.
MANY_PIECES = {
    "two threads share a row's pieces": (4, dataclasses.replace(FEW, kv_len=1100)),
    "four": (7, dataclasses.replace(FEW, kv_len=1700, value_dim=56)),
    "eight": (20, dataclasses.replace(FEW, kv_len=5200, head_dim=40)),
    "eight, of 256 columns": (
        24,
        dataclasses.replace(
            FEW, dtype="float16", head_dim=256, value_dim=200, kv_len=1700
        ),
    ),
    "many rounds of a thread": (
        63,
        dataclasses.replace(
            FEW, batch=40, heads=1, q_len=2, kv_len=16000, lengths="one long"
        ),
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", MANY_PIECES)
def test_many_pieces_of_few_queries_are_right(name, launcher):
    multiprocessors, case = MANY_PIECES[name]
    launcher.library.emulator_set_multiprocessors(multiprocessors)
    hold(launcher, case, backward=False)


@pytest.mark.torch
@pytest.mark.parametrize(("kib", "ctas"), [(228, 2), (164, 1), (100, 1)])
def test_no_cta_waits_for_another_to_end(kib, ctas, launcher):
    """As many as fit a multiprocessor, of 96 KiB and 2 beside them."""
    launcher.library.emulator_set_multiprocessors(2)
    launcher.library.emulator_set_multiprocessor_bytes(kib << 10)
    launcher.library.emulator_grids()
    hold(launcher, SHARED["lengths"], backward=False)
    # That of the pieces, and of those who put them together, one for each border.
    few = launcher.library.emulator_grids() & 0b11111
    assert few == 1 << 2 * ctas | 1 << (2 * ctas - 1)


# Multiprocessors, as many as a batch of 3 has units, or a third: a wide CTA each.
WIDE = {
    "16 rows": (3, FEW),
    "32 rows": (6, dataclasses.replace(FEW, q_len=6, heads=8, kv_heads=2)),
    "64 rows": (3, dataclasses.replace(FEW, q_len=15, dtype="float16")),
    "several units each": (3, dataclasses.replace(FEW, heads=6, kv_heads=3)),
    "d128": (3, dataclasses.replace(FEW, head_dim=128, value_dim=96, kv_len=400)),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", WIDE)
def test_wide_ctas_have_whole_units(name, launcher):
    """Where narrow ones would cut some: there is nothing to put together."""
    multiprocessors, case = WIDE[name]
    launcher.library.emulator_set_multiprocessors(multiprocessors)
    launcher.library.emulator_grids()
    hold(launcher, dataclasses.replace(case, batch=3), backward=False)
    grids = launcher.library.emulator_grids()
    assert grids >> multiprocessors & 1
    # Neither narrow ones nor those who put pieces together.
    assert not grids >> (2 * multiprocessors - 1) & 0b11


@pytest.mark.torch
def test_lengths_are_shared_out_over_all_ctas(launcher):
    """17 of 18 would be as good if the 17 members had as many keys."""
    launcher.library.emulator_set_multiprocessors(9)
    for lengths, ctas in ((False, 17), (True, 18)):
        launcher.library.emulator_grids()
        case = dataclasses.replace(FEW, batch=17, lengths=lengths)
        hold(launcher, case, backward=False)
        assert launcher.library.emulator_grids() >> ctas & 1


STRICT = """
#include "cuda_runtime.h"
#include "device/cp_async.cuh"
#include "device/mbarrier.cuh"
#include "device/mma.cuh"
#include "device/wgmma.cuh"

float from[4] = {1.0f, 2.0f, 3.0f, 4.0f}, seen[3];

[[gnu::noinline]] void Multiply() {
  float d[32] = {};
  const uint64_t a = kvblock::SharedOperand(0), b = a;
  kvblock::WgmmaFence();
  kvblock::Wgmma<64>::Shared<__nv_bfloat16>(d, a, b, false);
  kvblock::WgmmaCommit();
  kvblock::WgmmaWait<0>();
}

void Kernel(int what) {
  float* const shared = reinterpret_cast<float*>(emulator::shared);
  if (what == 0) {
    seen[0] = shared[1];  // nobody wrote it
    kvblock::CopyAsync<16>(shared, from);
    kvblock::CopyAsyncCommit();
    seen[1] = shared[1];  // it has not arrived
    kvblock::CopyAsyncWait<0>();
    seen[2] = shared[1];
  } else if (what == 1) {
    if (threadIdx.x < 32) __syncthreads();  // the others never come
  } else if (what == 2) {
    kvblock::CopyAsync<16>(shared, from + 1);  // not aligned
  } else if (threadIdx.x < 96 || what == 3) {
    Multiply();
  } else {
    Multiply();  // a warp at another place
  }
}

int main(int count, char**) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(count > 3 ? 128 : count == 2 ? 64 : 1);
  config.dynamicSmemBytes = count > 3 ? 32768 : 0;
  cudaLaunchKernelEx(&config, Kernel, count - 1);
  if (count > 3) return 0;
  const bool nan = seen[0] != seen[0] && seen[1] != seen[1];
  return nan && seen[2] == 2.0f ? 0 : 1;
}
"""


def test_the_emulator_is_strict(tmp_path):
    """It tells what a GPU would hide, or hang at."""
    source, program = tmp_path / "strict.cc", tmp_path / "strict"
    source.write_text(STRICT)
    compiler = os.environ.get("CXX") or shutil.which("g++") or "clang++"
    folders = ROOT / "tests/support/emulator", ROOT / "cpp"
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            *(f"-I{f}" for f in folders),
            str(source),
            "-o",
            str(program),
        ],
        check=True,
    )

    def outcome(*arguments: str) -> tuple[int, str]:
        done = subprocess.run([program, *arguments], capture_output=True, text=True)
        return done.returncode, done.stderr

    assert outcome() == (0, "")
    status, said = outcome("x")
    assert status == 70 and "a barrier that some threads never reach" in said
    status, said = outcome("x", "x")
    assert status == 70 and "a copy is not aligned" in said
    assert outcome("x", "x", "x") == (0, "")
    status, said = outcome("x", "x", "x", "x")
    assert status == 70 and "issue products of other places" in said


@pytest.mark.torch
def test_the_sweep_runs_on_the_emulator(attention_library):
    script = str(ROOT / "tests/support/attention_sweep.py")
    options = ["--emulated", "--only", "float16 D8 B", "--limit", "1", "--seed", "1"]
    command = [sys.executable, script, str(attention_library), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generic: 1 of 1 cases" in done.stdout
