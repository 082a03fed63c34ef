"""Accesses to shared memory in kernels are ordered, whoever comes first.

The emulator runs a thread until it has to wait, always in the same order, so that a
barrier may be missing and all results right. Its race checker (emulator/races.cc) asks
of every access what orders it after the accesses before.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import emulated_races
import pytest
from cpp_programs import built_once
from emulated_races import EMULATOR, ROOT
from mutant_list import GENERIC, HOPPER, Mutant

pytestmark = [
    pytest.mark.wide,
    pytest.mark.cpu,
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="the race checker needs g++"
    ),
]


# A library each; "cast" is in the name of another one.
OWN = ("norm_cast", "cast", "latent", "float32", "fp8", "sm90", "quantize", "select")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A library by its name, compiled once, whoever of the workers comes first."""

    def library(name: str) -> Path:
        def build(made: Path) -> None:
            # A folder of its own: an earlier attempt may have failed.
            root = mutated(tmp_path_factory.mktemp(name)) if "mutated" in name else ROOT
            named = (kind for kind in OWN if kind in name)
            kernels = next(named, "attention")
            emulated_races.build(root, made, kernels)

        return built_once(tmp_path_factory, f"libkvblock_{name}.so", build)

    return library


# Rows of dO that take no part are cleared for dV, which sums over them, while dP reads
# them, too: its columns of these rows are masked, whatever they are.
HARMLESS = ("ClearQueries", "KeysByQueries", "RunKeys")


@functools.cache
def races(library: Path, cases: str) -> list[str]:
    """What the checker says of some cases: in another process, which may die."""
    script = str(ROOT / "tests/support/emulated_races.py")
    command = [sys.executable, script, str(library), cases]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    *found, count = done.stdout.splitlines()
    assert int(count.split()[0]) > 0
    return [line for line in found if not all(part in line for part in HARMLESS)]


@pytest.mark.parametrize("cases", [*OWN, "dense", "paged", "Hopper"])
def test_every_access_is_ordered(cases, compiled):
    assert races(compiled(f"checked{library_of(cases)}"), cases) == []


def library_of(cases: str) -> str:
    """Which library: some cases have their own."""
    own = (f"_{kind}" for kind in OWN if cases.startswith(kind))
    return next(own, "")


FORWARD, LATENT = f"{HOPPER}/forward", f"{HOPPER}/latent"
BACKWARD = f"{HOPPER}/backward"
PAGE_LOADER = f"{FORWARD}/page_loader.cuh"
CAST, QUANTIZE = "cpp/ops/cast", "cpp/ops/quantize/quantize_kernel.cuh"
SELECT = "cpp/ops/select"


LEAVES_STEP = "BarrierArrive(SharedAddress(&shared_.step_empty[now.stage]));"


def step_is_read() -> str:
    """All that a lane that loads does with a step, until it leaves it."""
    code = (ROOT / PAGE_LOADER).read_text()
    begin = code.index("const Step& step = shared_.steps[now.stage];")
    return code[begin : code.index(LEAVES_STEP) + len(LEAVES_STEP)]


# What has to be reported: a case, and what stands in one line.
MISSING = (
    Mutant(
        "float32: nobody waits until all are done with K where there is one stage",
        f"{GENERIC}/forward/kernel.cuh",
        "__syncthreads();  // V has arrived for all, and all are done with K",
        "",
        ("float32, lengths, 128", "a copy of thread", "LoadShared"),
    ),
    Mutant(
        "few queries: a tile is waited for too late",
        f"{GENERIC}/split/kernel.cuh",
        "CopyAsyncWait<kStages - 2>();",
        "CopyAsyncWait<kStages - 1>();",
        ("dense, few", "a copy of thread", "LoadMatrices"),
    ),
    Mutant(
        "few queries: warps that load get a stage back that others still read",
        f"{GENERIC}/split/kernel.cuh",
        "EndTile(share, tile, at, Stage(walk_.stage()));\n        walk_.Leave();",
        "const uint32_t stage = Stage(walk_.stage()); walk_.Leave(); "
        "EndTile(share, tile, at, stage);",
        ("paged, few", "a copy of thread", "LoadMatrices"),
    ),
    Mutant(
        "few queries: sums of a piece over those of the one before",
        f"{GENERIC}/split/kernel.cuh",
        "if (kLoaders == 0 && !published) return;",
        "if (!published) return;",
        ("paged, few", "SplitForward::End", "SplitForward::End"),
    ),
    Mutant(
        "decode rows of few keys: a stage is loaded anew that other lanes still read",
        f"{GENERIC}/paged/short.cuh",
        "__syncwarp();  // all lanes are done with them",
        "",
        ("paged, short", "a copy of thread", "LoadMatrices"),
    ),
    Mutant(
        "decode rows of few keys: nobody waits for the other warps' sums",
        f"{GENERIC}/paged/short.cuh",
        "    __syncthreads();\n    // Four columns",
        "    // Four columns",
        ("paged, short", "ShortForward::Write", "ShortForward::Write"),
    ),
    Mutant(
        "decode rows of few keys: nobody waits for the blocks that others asked for",
        f"{GENERIC}/paged/short.cuh",
        "      CopyAsyncWait<0>();\n      __syncthreads();",
        "      CopyAsyncWait<0>();",
        ("paged, short, another", "at [ShortForward::Load", "which a copy of"),
    ),
    Mutant(
        "dK and dV: nobody waits for the others' dS",
        f"{GENERIC}/backward/kv.cuh",
        "BarrierWait(ds_ready, step % 2);",
        "",
        ("dense, lengths", "LoadMatrices", "AttentionBackwardKv kv.cuh"),
    ),
    Mutant(
        "latent: nobody waits for the others' probabilities",
        f"{GENERIC}/latent/kernel.cuh",
        "__syncthreads();  // P is there",
        "",
        ("latent, 16 rows, 227", "LoadMatrices", "LatentForward::AddValues"),
    ),
    Mutant(
        "latent, Hopper: values are left while products read them",
        f"{LATENT}/consumer.cuh",
        "WgmmaWait<kBehind + 1>();",
        "",
        ("latent, Hopper, even", "a load of", "a product of warp"),
    ),
    Mutant(
        "latent, Hopper: sums of a piece over those of the one before",
        f"{LATENT}/result.cuh",
        "shared.sums[number % 2]",
        "shared.sums[0]",
        ("latent, Hopper, many pieces", "WriteResult", "WriteResult"),
    ),
    Mutant(
        "latent, Hopper: a place is loaded anew that the cluster's other CTA reads",
        f"{LATENT}/consumer.cuh",
        "ClusterBarrierArrive(empty, peer_);",
        "ClusterBarrierArrive(empty, peer_ ^ 1);",
        ("latent, Hopper, pairs", "a load of", "a product of warp"),
    ),
    Mutant(
        "cast: nobody waits for the other warps' sizes",
        f"{CAST}/patches.cuh",
        "of_warps[threadIdx.x / 32] = largest;\n  __syncthreads();",
        "of_warps[threadIdx.x / 32] = largest;",
        ("cast, two tiles", "LargestOfCta", "LargestOfCta"),
    ),
    Mutant(
        "norm: nobody waits for the other warps' sums",
        f"{CAST}/norm_cast_kernel.cuh",
        "  __syncthreads();\n  ClusterWait();\n",
        "  ClusterWait();\n",
        ("norm_cast, a CTA alone", "thread 16 reads", "thread 128 wrote"),
    ),
    Mutant(
        "norm: nobody waits for the lanes that still read numbers",
        f"{CAST}/norm_cast_kernel.cuh",
        "    __syncwarp();",
        "",
        ("norm_cast, a CTA alone", "StoreTransposed", "read at [kvblock::NormCast"),
    ),
    Mutant(
        "norm: one thread does not wait for what other CTAs send",
        f"{CAST}/norm_cast_kernel.cuh",
        "ClusterBarrierWait(",
        "if (threadIdx.x != 255) ClusterBarrierWait(",
        ("norm_cast, three CTAs", "NormCast", "SendFloat"),
    ),
    Mutant(
        "quantize: nobody waits for the other warps' sizes",
        QUANTIZE,
        "of_warps[threadIdx.x / 32] = x;\n  __syncthreads();",
        "of_warps[threadIdx.x / 32] = x;",
        ("quantize, default", "MaxOfCta", "MaxOfCta"),
    ),
    Mutant(
        "quantize: nobody waits for the other rows' sums",
        QUANTIZE,
        "  __syncthreads();\n  float sum = 0.0f;",
        "  float sum = 0.0f;",
        ("quantize, default", "QuantizeParts", "QuantizeParts"),
    ),
    Mutant(
        "quantize: sums are turned in one place, over what others still read",
        QUANTIZE,
        "bit *= 2, place ^= 1)",
        "bit *= 2)",
        ("quantize, default", "TurnOverThreads", "TurnOverThreads"),
    ),
    Mutant(
        "quantize: nobody waits for the mean",
        QUANTIZE,
        "    }\n    __syncthreads();\n  }\n  const float factor",
        "    }\n  }\n  const float factor",
        ("quantize, default", "QuantizeTile", "Centre"),
    ),
    Mutant(
        "select: counts take the place of those that others still read",
        f"{SELECT}/select_kernel.cuh",
        "    turn_ ^= 1;\n",
        "",
        ("select, keep", "CtaSum::Across", "CtaSum::Across"),
    ),
    Mutant(
        "select: nobody waits for the others' part of a tile of keys",
        f"{SELECT}/weigh_kernel.cuh",
        "      CopyAsyncWait<0>();\n      __syncthreads();",
        "      CopyAsyncWait<0>();",
        ("select, weigh", "a copy of thread", "LoadMatrices"),
    ),
    Mutant(
        "select: the next tile of keys over the one that is multiplied",
        f"{SELECT}/weigh_kernel.cuh",
        "load(last ? first_tile : tile + 1, stage ^ 1);",
        "load(last ? first_tile : tile + 1, stage);",
        ("select, weigh", "a copy of thread", "LoadMatrices"),
    ),
    Mutant(
        "select: nobody waits for what others have looked up",
        f"{SELECT}/weigh_kernel.cuh",
        "shared);\n  __syncthreads();\n  const int2 span",
        "shared);\n  const int2 span",
        ("select, weigh", "SpanOfCta", "LookUp"),
    ),
    Mutant(
        "dropout: the keys of a step that is being planned",
        f"{FORWARD}/consumer.cuh",
        "dropout_.TakeKeys(shared_.steps[step].first",
        "dropout_.TakeKeys(shared_.steps[(step + 1) % kSteps].first",
        ("sm90, dropped_lengths, 64", "Planner", "TakeDropout"),
    ),
    Mutant(
        "Hopper backward: dS over that of which dQ is still computed",
        f"{BACKWARD}/split_keys_sequential.cuh",
        "if (step > 0) BarrierWait(cta.DsFull(0), (step - 1) % 2);",
        "",
        ("sm90, causal, 192x128", "StoreTranspose", "a product of warp"),
    ),
    Mutant(
        "Hopper backward: P over that which the others still read",
        f"{BACKWARD}/split_products.cuh",
        "if (step > 0) BarrierWait(w.cta.PFree(), (step - 1) % 2);",
        "",
        ("sm90, causal, 192x192", "Worker::RunValues", "Worker::RunKeys"),
    ),
    Mutant(
        "Hopper backward: P over dS that products still read",
        f"{BACKWARD}/split_products_cluster.cuh",
        "        BarrierWait(w.cta.PFree(), (step - 1) % 2);\n",
        "",
        ("sm90, causal, 256x256", "StoreMatrices", "a product of warp"),
    ),
    Mutant(
        "Hopper backward: dS that nobody has fenced for the products of dQ",
        f"{BACKWARD}/split_products.cuh",
        "      FenceAsync();\n",
        "",
        ("sm90, causal, 192x192", "a product of warp", "StoreMatrices", "fenced it"),
    ),
    Mutant(
        "Hopper backward: dS over that which the copy engine still sends",
        f"{BACKWARD}/split_products_cluster.cuh",
        "if (w.thread == 0) BarrierWait(w.cta.PeerDsSent(), (step - 1) % 2);",
        "",
        ("sm90, causal, 256x256", "StoreMatrices", "SendBytes"),
    ),
    Mutant(
        "Hopper backward: dQ over what is still added",
        f"{BACKWARD}/adder.cuh",
        "        WaitStoresRead<0>();\n      };",
        "      };",
        ("sm90, long_q, 64x64", "writes", "a bulk store of"),
    ),
    Mutant(
        "8 bits: V is transposed before it is there",
        f"{FORWARD}/transpose_values.cuh",
        "  __syncthreads();\n",
        "",
        ("fp8, plain", "TransposeValues", "TransposeValues"),
    ),
    Mutant(
        "8 bits: the scale of a step that is being planned",
        f"{FORWARD}/consumer_narrow.cuh",
        "shared_.narrow.to_log2[steps_.stage];",
        "shared_.narrow.to_log2[(steps_.stage + 1) % kSteps];",
        ("fp8, long_kv", "PrepareScale", "Consumer::TakeStep"),
    ),
    Mutant(
        "8 bits: V's place is left while products read it",
        f"{FORWARD}/consumer_narrow.cuh",
        "WgmmaWait<1>();\n    Pin(rows);",
        "Pin(rows);",
        ("Hopper, 8 bits, boxes", "a load of", "a product of warp"),
    ),
    Mutant(
        "8 bits, pages: V is transposed before it is there",
        f"{FORWARD}/narrow_pages.cuh",
        "__syncthreads();\n    const int64_t pair",
        "const int64_t pair",
        ("Hopper, 8 bits, boxes", "TransposedTile::Take", "TransposedTile::Write"),
    ),
    Mutant(
        "8 bits, pages: nobody waits for the others' largest query",
        f"{FORWARD}/narrow_pages.cuh",
        "largest_of[threadIdx.x / 32] = largest;\n  __syncthreads();",
        "largest_of[threadIdx.x / 32] = largest;",
        ("Hopper, 8 bits, boxes", "NarrowQueries", "NarrowQueries"),
    ),
    Mutant(
        "Hopper: barriers are used before they are made",
        f"{FORWARD}/kernel.cuh",
        "    __syncthreads();\n",
        "",
        ("Hopper, a window, boxes", "comes to", "BarrierInit"),
    ),
    Mutant(
        "Hopper: K's place is left while products read it",
        f"{FORWARD}/consumer.cuh",
        "WgmmaWait<1>();\n      KeepAfter(rows.s());",
        "KeepAfter(rows.s());",
        ("Hopper, many steps, holes, boxes", "a load of", "a product of warp"),
    ),
    Mutant(
        "Hopper: O's place is left while it is stored",
        f"{FORWARD}/writer.cuh",
        "WaitStoresRead<0>();",
        "",
        ("Hopper, many items, boxes", "StoreMatrices", "a bulk store of"),
    ),
    Mutant(
        "Hopper: holes of a step are read that is being loaded",
        f"{FORWARD}/consumer.cuh",
        "paged.holes[number]",
        "paged.holes[(number + 1) % kSteps]",
        ("Hopper, many steps, holes, boxes", "WriteHoles", "MaskHoles"),
    ),
    Mutant(
        "Hopper: a lane leaves a step before it reads it",
        PAGE_LOADER,
        step_is_read(),
        LEAVES_STEP + step_is_read().replace(LEAVES_STEP, ""),
        ("Hopper, many items, boxes", "Prepare", "PageLoader"),
    ),
    Mutant(
        "Hopper: flags are read while another warp changes them",
        f"{FORWARD}/page_loader.cuh",
        "starts = place != item_before;",
        "starts = !tiles || step.flags & Step::kStarts;",
        ("Hopper, many steps, holes, rows", "atomicOr", "PageLoader"),
    ),
    Mutant(
        "Hopper: one of the warps that copy rows does not wait for V's place",
        f"{FORWARD}/row_loader.cuh",
        "BarrierWait(SharedAddress(&shared_.v_empty[",
        "if (warp_ != 3) BarrierWait(SharedAddress(&shared_.v_empty[",
        ("Hopper, many steps, holes, rows", "a copy of thread", "a product of warp"),
    ),
)


def mutated(root: Path) -> Path:
    """The kernels with all of the mistakes that fit: they do not meet."""
    shutil.rmtree(root, ignore_errors=True)  # of a build that failed
    shutil.copytree(ROOT / "cpp", root / "cpp")
    for mutant in MISSING:
        if mutant.fits(ROOT):  # its test says where not
            mutant.apply(root)
    return root


def test_each_missing_barrier_is_there():
    """Of one that has no place in the sources any more nobody would know otherwise."""
    assert [mutant.name for mutant in MISSING if not mutant.fits(ROOT)] == []


@pytest.mark.wide
@pytest.mark.parametrize("mutant", MISSING, ids=lambda mutant: mutant.name)
def test_a_missing_barrier_is_reported(mutant, compiled):
    assert mutant.fits(ROOT), f"{mutant.file} has changed"
    cases, *parts = mutant.killer
    found = races(compiled(f"mutated{library_of(cases)}"), cases)
    assert any(all(part in line for part in parts) for line in found), "\n".join(found)


# ---- the checker itself, in kernels of two warps -------------------------------------

# Ordered, and not.
PAIRS = {
    "all meet": (
        "if (t == 0) x = 1; __syncthreads(); Use(x);",
        "if (t == 0) x = 1; Use(x);",
    ),
    "a write after reads": (
        "Use(x); __syncthreads(); if (t == 40) x = 1;",
        "Use(x); if (t == 40) x = 1;",
    ),
    "a shuffle orders nothing": (
        "if (t == 3) x = 1; __syncwarp(); if (t < 32) Use(x);",
        "if (t == 3) x = 1; __shfl_sync(~0u, t, 3); if (t < 32) Use(x);",
    ),
    "a warp is not the other": (
        "if (t == 0) x = 1; BarrierMeet(1, 64); if (t > 31) Use(x);",
        "if (t == 0) x = 1; __syncwarp(); if (t > 31) Use(x);",
    ),
    "who passes a barrier learns nothing": (
        "if (t == 0) x = 1; t < 32 ? BarrierPass(1, 64) : BarrierMeet(1, 64);"
        "if (t > 31) Use(x);",
        "if (t == 40) x = 1; t < 32 ? BarrierPass(1, 64) : BarrierMeet(1, 64);"
        "if (t < 32) Use(x);",
    ),
    "atomics": (
        "atomicOr(&n, 1 << t % 32); __syncthreads(); Use(n);",
        "Use(n); atomicOr(&n, 1 << t % 32);",
    ),
    "copies are waited for": (
        "Copy(t, y); CopyAsyncWait<0>(); __syncthreads(); Use(y[0]);",
        "Copy(t, y); CopyAsyncWait<1>(); __syncthreads(); Use(y[0]);"
        "CopyAsyncWait<0>();",
    ),
    "copies are their thread's": (
        "Copy(t, y); CopyAsyncWait<0>(); if (t == 0) Use(y[0]);",
        "Copy(t, y); CopyAsyncWait<0>(); if (t == 1) Use(y[0]);",
    ),
    "an arrival is that of one thread": (
        "if (t < 2) y[t] = 1; __syncwarp(); Arrive(t, bar);"
        "if (t > 31) { BarrierWait(bar, 0); Use(y[1]); }",
        "if (t < 2) y[t] = 1; Arrive(t, bar);"
        "if (t > 31) { BarrierWait(bar, 0); Use(y[1]); }",
    ),
    "an arrival after copies is one of these alone": (
        "if (t == 0) { CopyAsync<16>(y, from); BarrierArriveAfterCopies(bar); }"
        "if (t > 31) { BarrierWait(bar, 0); Use(y[0]); }",
        "if (t == 0) { x = 1; BarrierArriveAfterCopies(bar); }"
        "if (t > 31) { BarrierWait(bar, 0); Use(x); }",
    ),
    "a bulk store of what was fenced before": (
        "if (t == 0) y[0] = 1; FenceAsync(); __syncthreads(); Store(t);",
        "FenceAsync(); if (t == 0) y[0] = 1; __syncthreads(); Store(t);",
    ),
    "who has waited may fence": (
        "if (t == 0) y[0] = 1; __syncthreads(); FenceAsync(); Store(t);",
        "if (t == 0) y[0] = 1; __syncthreads(); if (t == 0) FenceAsync(); Store(t);",
    ),
    "copies are fenced, too": (
        "Copy(t, y); CopyAsyncWait<0>(); FenceAsync(); __syncthreads(); Store(t);",
        "Copy(t, y); CopyAsyncWait<0>(); __syncthreads(); Store(t);",
    ),
    "zeros over zeros": (
        "*wide = uint4{}; Use(wide->x);",
        "*wide = uint4{1}; Use(wide->x);",
    ),
}
PROGRAM = """
#include "cuda_runtime.h"
#include "device/cp_async.cuh"
#include "device/mbarrier.cuh"
#include "device/tensor_copy.cuh"
#include "device/warpgroup.cuh"

using namespace kvblock;
extern "C" const char* emulator_races();
alignas(16) float from[4], to[4];

void Use(double x) { static volatile double used = x; }
void Copy(int t, float* to) {
  if (t == 0) CopyAsync<16>(to, from);
  CopyAsyncCommit();
}
void Store(int t) {  // the first 16 bytes
  if (t != 40) return;
  StoreBytes(to, 0, 16);
  CommitStores();
  WaitStores<0>();
}
void Arrive(int t, uint32_t barrier) {
  if (t == 0) BarrierArrive(barrier);
}

void Kernel(int what) {
  __shared__ float x;
  __shared__ int n;
  float* const y = reinterpret_cast<float*>(emulator::shared);
  uint4* const wide = reinterpret_cast<uint4*>(emulator::shared + 1024);
  constexpr uint32_t bar = 2048;
  const int t = threadIdx.x;
  if (t == 0) BarrierInit(bar, 1);
  __syncthreads();
  switch (what) {
CASES
  }
}

int main() {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(64);
  config.dynamicSmemBytes = 4096;
  for (int what = 0; what < COUNT; ++what) {
    cudaLaunchKernelEx(&config, Kernel, what);
    std::printf("%d %d\\n", what, *emulator_races() != 0);
  }
}
"""


def test_the_checker_knows_what_orders(tmp_path):
    parts = [part for pair in PAIRS.values() for part in pair]
    cases = "\n".join(f"case {i}: {{ {x} }} break;" for i, x in enumerate(parts))
    program = PROGRAM.replace("CASES", cases).replace("COUNT", str(len(parts)))
    (tmp_path / "program.cc").write_text(program)
    emulated_races.compile_checked(
        [tmp_path / "program.cc"],
        tmp_path / "program",
        [EMULATOR, ROOT / "cpp"],
        [],
    )
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    raced = [line.split()[1] == "1" for line in done.stdout.splitlines()]
    found = dict(zip(PAIRS, zip(raced[::2], raced[1::2], strict=True), strict=True))
    assert found == dict.fromkeys(PAIRS, (False, True))
