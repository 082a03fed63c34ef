"""Several GPUs: attention, decoding and blocks over them, by the kernels.

The tests beside this one run on CPU devices everywhere. Here NCCL carries what travels
and the kernels compute: the same calls and truths, at sizes that the kernels take.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import context_processes
import decode_processes
import jax
import numpy as np
import pytest
import reshard_processes
from attention_model import BF16, F16, F32, Call, cast, draw
from context_calls import (
    CUTS,
    STRATEGIES,
    Cut,
    assert_right,
    attend_over,
    compute,
    inputs,
    jitted,
    laid_out,
    segments,
)
from jax.sharding import AxisType, Mesh
from paged_model import Case
from parallel_decode import Dealt, heads_over
from processes import hold_processes
from reshard_processes import MOVES, hold_moves
from test_strategy import collectives

pytestmark = [pytest.mark.gpu, pytest.mark.early]


@pytest.fixture(params=[2, 4], ids=lambda n: f"{n} GPUs")
def gpus(request: pytest.FixtureRequest) -> list[jax.Device]:
    devices = jax.devices("gpu")
    if len(devices) < request.param:
        pytest.skip(f"GPUs here: {len(devices)}, and this needs {request.param}")
    return devices[: request.param]


# ---- attention over a sequence -------------------------------------------------------

SIZES = {"q_len": 512, "kv_len": 512, "heads": 8, "kv_heads": 2, "dim": 128}
BATCHES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal, lengths": {
        "causal": True,
        "q_lens": np.int32([512, 333]),
        "kv_lens": np.int32([100, 512]),
    },
    "a window": {"causal": True, "window": (150, 0), "dim": 64},
    "both sides": {"window": (70, 200), "softcap": 2.0},
    "segments": {"causal": True, "ids": True},
    "sinks": {"causal": True, "sinks": True, "kv_heads": 1},
    "other keys": {"causal": True, "q_len": 256, "dtype": F16},
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "documents": {"cu_seqlens": np.int32([0, 64, 80, 80, 400, 512])},
    "documents, a window": {"cu_seqlens": np.int32([64, 448]), "window": (90, 0)},
    "documents, lengths": {
        "cu_seqlens": np.int32([0, 64, 512]),
        "kv_lens": np.int32([50, 399]),
        "dim": 64,
    },
}


def mesh_of(gpus: list[jax.Device], kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((len(gpus),), ("c",), (kind,), devices=gpus)


def sent(call: Call, cut: Cut, mesh: Mesh) -> set[str]:
    """Which collectives the call has."""
    there = laid_out(call, cut)
    made = jax.make_jaxpr(attend_over(there, cut, mesh))(*inputs(there)[:2])
    return {name for name, *_ in collectives(made.jaxpr)}


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", [*BATCHES, *DOCUMENTS])
def test_attention(rng, gpus, name, cut):
    """out, lse and all gradients, beside float64."""
    options = SIZES | (BATCHES | DOCUMENTS)[name]
    if cut.strategy == "ulysses_ring":
        options["kv_heads"] = 4  # of one, nothing would be exchanged
    dtype = options.pop("dtype", BF16)
    if options.pop("ids", False):
        options["segment_ids"] = np.sort(segments(rng, 2, 512), axis=1)
    if options.pop("sinks", False):
        options["sinks"] = cast(rng.standard_normal(8), F32)
    if name in DOCUMENTS:
        options |= {"causal": True, "packed": True}
    call = draw(rng, dtype, **options)
    cut, mesh = dataclasses.replace(cut, size=len(gpus)), mesh_of(gpus)
    if cut.strategy == "ulysses_ring":
        # Two GPUs are one ring: to exchange heads between them is "ulysses".
        assert ("all_to_all" in sent(call, cut, mesh)) == (len(gpus) > 2)
    assert_right(call, compute(call, cut, mesh=mesh))


SAME = [*(Cut(s) for s in STRATEGIES), Cut("all_gather", tuned=True)]


@pytest.mark.parametrize("cut", SAME, ids=str)
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_the_same_bits_every_time(rng, gpus, name, cut):
    options = SIZES | {"kv_heads": 4} | (BATCHES | DOCUMENTS)[name]
    packed = name in DOCUMENTS
    options |= {"causal": True, "packed": packed, "deterministic": True}
    cut = dataclasses.replace(cut, size=len(gpus))
    there = laid_out(draw(rng, BF16, **options), cut)
    run = jitted(there, cut, mesh=mesh_of(gpus))
    runs = [run(*inputs(there)) for _ in range(3)]
    for name, first in runs[0].items():
        for again in runs[1:]:
            np.testing.assert_array_equal(again[name], first, err_msg=name)


OVER_PROCESSES = "ring,all_gather", "ulysses,ring of documents", "ring in runs,auto"


@pytest.mark.parametrize("case", OVER_PROCESSES)
def test_a_process_for_each_gpu(gpus, case):
    script = Path(context_processes.__file__)
    hold_processes(script, len(gpus), "3", case, "gpu", seconds=200)


def test_decoding_in_a_process_for_each_gpu(gpus):
    script = Path(decode_processes.__file__)
    hold_processes(script, len(gpus), "4", "gpu", seconds=200)


# ---- a cache over devices ------------------------------------------------------------

DEALT: dict[str, dict[str, Any]] = {
    "a decode step": {"sequences": ((1, 37), (1, 900), (1, 4))},
    "mixed": {"sequences": ((1, 37), (60, 300), (3, 3), (1, 640))},
    "a window": {"sequences": ((1, 400), (7, 90)), "window": (100, 0)},
    "drafts": {"sequences": ((8, 300), (8, 8), (1, 64)), "tree": 1},
    "sinks": {"sequences": ((1, 37), (6, 200), (1, 0)), "sinks": True},
}


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("name", DEALT)
def test_blocks_dealt_out(rng, gpus, name, block):
    """Row by row beside float64; what nobody may read is NaN."""
    shape = {"heads": 8, "kv_heads": 2, "dim": 128, "value_dim": 128}
    case = Case(**DEALT[name], **shape, block_size=block, dtype="bfloat16")
    drawn = Dealt(case, rng, len(gpus), None, platform="gpu")
    drawn.hold(*drawn.own_run())


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_heads_over_devices(rng, gpus, kind, kv_heads):
    """A prompt, then a step: append and attend as on one GPU, and nothing travels."""
    for got, want in heads_over(mesh_of(gpus, kind), kv_heads, BF16, rng):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-2)


# ---- blocks from one set of devices to another ---------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_blocks_move(rng, gpus, dtype):
    """Every bit of both pools."""
    hold_moves(len(gpus), rng, dtype)


def test_blocks_move_between_processes(gpus):
    """The same moves, in a process for each GPU."""
    count = len(gpus)
    script, right = Path(reshard_processes.__file__), str(len(MOVES[count]))
    hold_processes(script, count, right, "gpu", seconds=200)
