"""Dropout over a sequence that is cut: the pairs that the whole sequence drops.

The truth is float64 with the numbers of positions in the whole sequence, as on one
device. Chunks are of 16 positions here, the fewest that dropout serves.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_near
from attention_model import BF16, F32, Call, cast, draw, jit, kept
from context_calls import (
    CUTS,
    HEADS,
    Cut,
    assert_right,
    attend_over,
    compute,
    covering,
    expected,
    inputs,
    laid_out,
    mesh_of,
    put_back,
    segments,
    table,
    with_gradients,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import check

from jax_kvblock import flash_attention
from jax_kvblock.parallel import (
    Attention,
    AttentionConfig,
    AttentionPatterns,
    context_parallel_attention,
    create_attention,
    sums,
)

pytestmark = pytest.mark.usefixtures("four_cpus")

RATE = 0.3
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "20 back": {"causal": True, "window": (20, None)},
    "any back, 40 ahead": {"window": (None, 40)},
    "33 back, 10 ahead": {"window": (33, 10)},
}
SEEDS: dict[str, Any] = {
    "a seed": jnp.int32(7),
    "of members": jnp.int32([3, -1]),
    "of heads": jnp.arange(8, dtype=jnp.int32).reshape(2, 4),
    "a key": jax.random.key_data(jax.random.key(2)),
}
LENS = {"q_lens": np.int32([70, 999]), "kv_lens": np.int32([128, 41])}
SIZES = {"128 rows": (128, 128), "256 keys": (128, 256)}
ROWS = covering(
    {
        "cut": CUTS,
        "mask": tuple(MASKS),
        "lens": ("", "q_lens", "kv_lens", "q_lens kv_lens"),
        "ids": ("", "ids"),
        "sinks": ("", "sinks"),
        "heads": tuple(HEADS),
        "seed": tuple(SEEDS),
        "size": tuple(SIZES),
    },
    lambda row: not row.get("ids") or row.get("size", "128 rows") == "128 rows",
)


def dropped(rng: np.random.Generator, row: dict[str, Any], dtype: Any = F32) -> Call:
    rows, keys = SIZES[row["size"]]
    options = dict(MASKS[row["mask"]], dropout_rate=RATE)
    options |= {name: LENS[name] for name in row["lens"].split()}
    if row["ids"]:
        options["segment_ids"] = segments(rng, 2, rows)
    if row["sinks"]:
        options["sinks"] = cast(rng.standard_normal(4), F32)
    call = draw(
        rng, dtype, batch=2, q_len=rows, kv_len=keys, heads=4,
        kv_heads=HEADS[row["heads"]], dim=8, **options,
    )  # fmt: skip
    return call.replace(dropout_seed=SEEDS[row["seed"]])


SIMPLE = {
    **{"mask": "causal", "lens": "", "ids": "", "sinks": "", "heads": "GQA"},
    **{"seed": "a seed", "size": "128 rows"},
}


@pytest.mark.wide
@table(ROWS)
def test_any_two_options(rng, row):
    call = dropped(rng, row)
    assert 0 < (kept(call) == 0).mean() < 1
    assert_right(call, compute(call, row["cut"]))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_fewer_devices(rng, cut, size):
    for mask in ("full", "causal"):
        call = dropped(rng, {**SIMPLE, "mask": mask})
        assert_right(call, compute(call, Cut(cut.strategy, cut.layout, size)))


@pytest.mark.parametrize("most", [0, 8], ids=["float32 between parts", "joined"])
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_in_bfloat16(rng, monkeypatch, strategy, most):
    monkeypatch.setattr(sums, "MOST_ROUNDED", most)
    call = dropped(rng, SIMPLE, BF16)
    got = compute(call, Cut(strategy))
    assert_near(call, got, expected(call), [*got])


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_rate_of_0_is_none(rng, cut):
    """The program is the same to the letter, whatever the seed."""
    call = dropped(rng, SIMPLE)
    none = call.replace(dropout_rate=0.0)
    operands = {n: x for n, x in call.operands.items() if n != "dropout_seed"}
    static = {n: x for n, x in call.static.items() if n != "dropout_rate"}
    plain = Call(call.arrays, operands, static, call.cotangents)
    texts = []
    for each in (call, none, plain):
        there = laid_out(each, cut)
        program = with_gradients(attend_over(there, cut))
        texts.append(jax.jit(program).lower(*inputs(there)).as_text())
    dropping, at_0, without = texts
    assert at_0 == without != dropping


def test_remat_and_vmap_over_seeds(rng):
    cut = Cut("ring", size=2)
    call = dropped(rng, SIMPLE)
    there = laid_out(call, cut)
    attend = attend_over(there, cut)
    arrays, operands, cotangents = inputs(there)
    again = jit(with_gradients(jax.checkpoint(attend)))(arrays, operands, cotangents)
    assert_right(call, put_back(again, call, cut))
    seeds = jnp.int32([7, 8])
    others = {n: x for n, x in operands.items() if n != "dropout_seed"}

    def member(seed: Any) -> Any:
        given = {**others, "dropout_seed": seed}
        return with_gradients(attend)(arrays, given, cotangents)

    got = jit(jax.vmap(member))(seeds)
    for i, seed in enumerate(seeds):
        one = jax.tree.map(lambda x, i=i: x[i], got)
        assert_right(call.replace(dropout_seed=seed), put_back(one, call, cut))


# ---- layers --------------------------------------------------------------------------

WIDTH, N = 32, 4
LAYERS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[str, ...]]] = {
    "ring": ({"pattern": AttentionPatterns.RING}, (2,), ("context",)),
    "zigzag": (
        {"pattern": AttentionPatterns.RING, "layout": "zigzag", "causal": True},
        (2,),
        ("context",),
    ),
    "ulysses": (
        {"pattern": AttentionPatterns.CONTEXT_PARALLEL, "strategy": "ulysses"},
        (4,),
        ("context",),
    ),
    "a batch that is cut": (
        {"pattern": AttentionPatterns.RING, "causal": True, "batch_axis": "data"},
        (2, 2),
        ("data", "context"),
    ),
    "heads that are cut": (
        {"pattern": AttentionPatterns.RING, "causal": True, "head_axis": "heads"},
        (2, 2),
        ("heads", "context"),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_drop_what_a_layer_on_one_device_does(rng, name):
    options, shape, names = LAYERS[name]
    size = int(np.prod(shape))
    mesh = Mesh(np.array(jax.devices("cpu")[:size]).reshape(shape), names)
    layer = create_attention(AttentionConfig(WIDTH, N, dropout=RATE, **options), mesh)
    kind = "CAUSAL" if options.get("causal") else "FULL"
    config = AttentionConfig(WIDTH, N, pattern=AttentionPatterns[kind], dropout=RATE)
    alone = jax.device_put((layer.qkv, layer.out), jax.devices("cpu")[0])
    one = Attention(*alone, config)
    x, mask = cast(rng.standard_normal((2, 64, WIDTH)), F32), np.ones((2, 64), np.int32)
    mask[0, 50:] = 0
    order = np.arange(64)
    if options.get("layout") == "zigzag":
        order = np.concatenate([order[:16], order[48:], order[16:48]])
    seed = jax.random.key(1)
    along = cast(rng.standard_normal(x.shape), F32)

    def ours(layer: Any, x: Any) -> Any:
        out = layer(x, mask[:, order], seed)
        return jnp.sum(out * along[:, order]), out

    def theirs(layer: Any, x: Any) -> Any:
        out = layer(x, mask, seed)
        return jnp.sum(out * along), out

    slope = functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    (d_layer, d_x), got = jit(slope(ours))(layer, x[:, order])
    (d_one, d_whole), want = jit(slope(theirs))(one, x)
    np.testing.assert_allclose(got, want[:, order], atol=3e-6)
    np.testing.assert_allclose(d_x, d_whole[:, order], atol=1e-5)
    for name in ("qkv", "out"):
        a, b = getattr(d_layer, name), getattr(d_one, name)
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), err_msg=name)
    without = layer(x[:, order], mask[:, order])
    np.testing.assert_allclose(without, one(x, mask)[:, order], atol=3e-6)
    assert np.abs(np.asarray(got - without)).max() > 0.01


@pytest.mark.parametrize("batch", ["data", ("data",)], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_arrays_on_a_mesh_of_either_kind(rng, kind, batch):
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("data", "context"), axis_types=(kind,) * 2)
    config = AttentionConfig(
        WIDTH, N, pattern=AttentionPatterns.RING, batch_axis=batch, dropout=RATE
    )
    layer = create_attention(config, mesh)
    alone = (jnp.asarray(np.asarray(a)) for a in (layer.qkv, layer.out))
    config = AttentionConfig(WIDTH, N, pattern=AttentionPatterns.FULL, dropout=RATE)
    x, seed = cast(rng.standard_normal((2, 64, WIDTH)), F32), jax.random.key(1)
    put = jax.device_put(x, NamedSharding(mesh, P("data", "context")))
    want = jit(lambda layer, x: layer(x, None, seed))(Attention(*alone, config), x)
    with jax.set_mesh(mesh):
        got = jit(lambda layer, x: layer(x, None, seed))(layer, put)
    np.testing.assert_allclose(got, want, atol=3e-6)


@pytest.mark.parametrize("rate", [0.0, RATE])
def test_a_layer_checks_its_seed_at_any_rate(rate):
    """Also where nothing is dropped, as on one device."""
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("context",))
    ring = AttentionConfig(WIDTH, N, pattern=AttentionPatterns.RING, dropout=rate)
    full = AttentionConfig(WIDTH, N, pattern=AttentionPatterns.FULL, dropout=rate)
    x = jnp.zeros((2, 64, WIDTH))
    words = "dropout_seed must be an integer|[2] or [2, 4]|one for each batch member"
    for where, layer in (
        (WHERE, create_attention(ring, mesh)),
        ("flash_attention", create_attention(full)),
    ):
        for error, seed, got in (
            (TypeError, "x", "got 'x'"),
            (ValueError, jnp.zeros(3, jnp.int32), "got int32[3]"),
        ):
            refused = functools.partial(layer, x, None, seed)
            check(where, error, f"{words}|{got}", refused)


# ---- what does not fit ---------------------------------------------------------------

WHERE = "context_parallel_attention"
BAD: dict[str, tuple[Any, int, dict[str, Any], str]] = {
    "rows in zigzag": (
        ValueError, 48, {},
        "T, a device's rows, must be a multiple of 32 with dropout_rate, got 48|pad",
    ),
    "rows": (ValueError, 24, {"layout": "contiguous"}, "multiple of 16|got 24"),
    "documents": (
        ValueError, 32, {"cu_seqlens": jnp.int32([0, 64, 128])},
        "dropout_rate cannot be combined with cu_seqlens|segment_ids",
    ),
    "no seed": (ValueError, 32, {"dropout_seed": None}, "dropout_seed must be given"),
    "a rate": (ValueError, 32, {"dropout_rate": 1.0}, "dropout_rate must be at least"),
    "seeds": (
        ValueError, 32, {"dropout_seed": jnp.zeros(3, jnp.int32)}, "dropout_seed|[2, 4]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_messages(name):
    error, rows, options, words = BAD[name]
    shape = (rows, 4, 8) if "cu_seqlens" in options else (2, rows, 4, 8)
    x = jnp.zeros(shape)
    options = {"dropout_rate": RATE, "dropout_seed": 1} | options

    def attend(x: Any) -> Any:
        return context_parallel_attention(x, x, x, axis_name="c", **options)

    whole = jax.shard_map(
        attend, mesh=mesh_of(), in_specs=P(), out_specs=P("c"), check_vma=False
    )
    check(WHERE, error, words, lambda: jax.eval_shape(whole, x))


def test_documents_by_segments(rng):
    """In place of cu_seqlens: positions count in the sequence, as they do there."""
    ids = np.repeat(np.int32([0, 1, 2]), [50, 30, 48])[None]
    call = dropped(rng, SIMPLE).replace(segment_ids=np.repeat(ids, 2, 0))
    whole = flash_attention(**call.arrays, **call.operands, **call.static)
    got = compute(call, Cut("all_gather"))
    np.testing.assert_allclose(got["out"], whole, atol=3e-6)
