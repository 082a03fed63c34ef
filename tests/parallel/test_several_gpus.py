"""Several GPUs: attention, decoding and blocks over them, by the kernels.

The tests beside this one run on CPU devices everywhere. Here NCCL carries what travels
and the kernels compute: the same calls and truths, at sizes that the kernels take.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import context_processes
import decode_processes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import BF16, F16, F32, cast, draw
from context_calls import (
    CUTS,
    Cut,
    assert_right,
    compute,
    segments,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from paged_model import Case
from parallel_decode import Dealt, reductions
from processes import run_processes
from reshard_processes import Place, hold, on

import jax_kvblock as kv
from jax_kvblock.parallel import kv_heads_partition, repeat_kv_heads, repeat_spec

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


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", [*BATCHES, *DOCUMENTS])
def test_attention(rng, gpus, name, cut):
    """out, lse and all gradients, beside float64."""
    options = SIZES | (BATCHES | DOCUMENTS)[name]
    dtype = options.pop("dtype", BF16)
    if options.pop("ids", False):
        options["segment_ids"] = np.sort(segments(rng, 2, 512), axis=1)
    if options.pop("sinks", False):
        options["sinks"] = cast(rng.standard_normal(8), F32)
    if name in DOCUMENTS:
        options |= {"causal": True, "packed": True}
    call = draw(rng, dtype, **options)
    cut = dataclasses.replace(cut, size=len(gpus))
    assert_right(call, compute(call, cut, mesh=mesh_of(gpus)))


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_the_same_bits_every_time(rng, gpus, strategy):
    call = draw(rng, BF16, **SIZES, causal=True, deterministic=True)
    cut = Cut(strategy, size=len(gpus))
    runs = [compute(call, cut, mesh=mesh_of(gpus)) for _ in range(3)]
    for name, first in runs[0].items():
        for again in runs[1:]:
            np.testing.assert_array_equal(again[name], first, err_msg=name)


@pytest.mark.parametrize("case", ["ring,all_gather", "ulysses,ring of documents"])
def test_a_process_for_each_gpu(gpus, case):
    count = len(gpus)
    script = Path(context_processes.__file__)
    ran = run_processes(script, count, case, "gpu", seconds=200)
    for rank, (code, said) in enumerate(ran):
        assert code == 0, said
        assert re.search(rf"^{rank} of {count}: 3 are right$", said, re.M), said


def test_decoding_in_a_process_for_each_gpu(gpus):
    count = len(gpus)
    script = Path(decode_processes.__file__)
    for rank, (code, said) in enumerate(
        run_processes(script, count, "gpu", seconds=200)
    ):
        assert code == 0, said
        assert re.search(rf"^{rank} of {count}: 4 are right$", said, re.M), said


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
    spec = kv.BlockSpec(2, 2, 16, kv_heads, 64, jnp.bfloat16)
    tables, prompt = np.int32([[3, 1, 7], [2, 6, -1]]), 20

    def draw_heads(tokens: int, heads: int) -> jax.Array:
        return cast(rng.standard_normal((2, tokens, heads, 64)), BF16)

    def part(spec: Any, own: Any, data: Any, qkv: Any, first: int) -> Any:
        q, k, v = qkv
        rows = jnp.arange(q.shape[1], dtype=jnp.int32) + first
        slots = jnp.asarray(tables)[:, rows // 16] * 16 + rows % 16
        k, v = (own(a).reshape(-1, spec.num_kv_heads, 64) for a in (k, v))
        pool = kv.append_kv(kv.KVPool(data, spec), 1, k, v, slots.reshape(-1))
        lens = jnp.full(2, first + q.shape[1], jnp.int32)
        out = kv.paged_attention(q, pool, 1, tables, lens)
        return pool.data, out

    def serve(spec: Any, own: Any, data: Any, put: Any) -> list[Any]:
        made = []
        for qkv, first in ((inputs[0], 0), (inputs[1], prompt)):
            run = jax.jit(
                lambda data, qkv, first=first: part(spec, own, data, qkv, first),
                donate_argnums=0,
            )
            qkv = tuple(map(put, qkv, ("c", None, None)))
            compiled = run.lower(data, qkv).compile()
            assert reductions(compiled.as_text()) == []
            data, out = compiled(data, qkv)
            made.append(np.asarray(out, np.float32))
        return made

    inputs = [
        tuple(
            cast(rng.standard_normal((2, t, n, 64)), BF16) for n in (8, *[kv_heads] * 2)
        )
        for t in (prompt, 1)
    ]
    empty = lambda spec: jnp.zeros((9, *spec.block_shape), spec.dtype)  # noqa: E731
    want = serve(spec, lambda a: a, empty(spec), lambda a, _: a)
    mesh, n = mesh_of(gpus, kind), len(gpus)
    wide = repeat_spec(spec, n)
    place = lambda *spec: NamedSharding(mesh, P(*spec))  # noqa: E731
    data = jax.device_put(
        empty(wide), NamedSharding(mesh, kv_heads_partition(wide, "c"))
    )
    with jax.set_mesh(mesh):
        got = serve(
            wide,
            lambda a: repeat_kv_heads(a, n),
            data,
            lambda a, cut: jax.device_put(a, place(None, None, cut)),
        )
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-2)


# ---- blocks from one set of devices to another ---------------------------------------

MOVES = {
    2: {
        "two to one": (on([0, 1]), on([0], "HND")),
        "two to the other one": (on([0, 1]), on([1], "universal")),
        "one to two": (on([1], "HND"), on([0, 1])),
        "one to another": (on([0]), on([1])),
        "the other way round": (on([0, 1]), on([1, 0], "HND")),
        "layers": (on([0, 1], contiguous=False), on([0], contiguous=False)),
        "operational": (on([0], "operational"), on([1], "operational")),
    },
    4: {
        "four to two": (on(range(4)), on([0, 2], "HND")),
        "two to other two": (on([0, 1]), on([2, 3], "HND")),
        "two to four": (on([0, 1], "HND"), on(range(4), "universal")),
        "a mesh to four": (on(range(4), mesh=(2, 2), cut="b"), on(range(4))),
    },
}


def on_gpus(place: Place) -> Place:
    return dataclasses.replace(place, platform="gpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_blocks_move(rng, gpus, dtype):
    """Every bit of both pools."""
    for src, dst in MOVES[len(gpus)].values():
        hold(on_gpus(src), on_gpus(dst), rng, dtype, dims=(2, 2, 16, 8, 128))
