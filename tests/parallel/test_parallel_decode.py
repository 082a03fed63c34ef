"""Sequences whose blocks are dealt out to devices: appended to and attended to there.

Against float64 over whole sequences, row by row. What nobody may read is NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from paged_meshes import large
from paged_model import Case
from parallel_decode import Dealt, mesh_of, pool_of_blocks, reductions

import jax_kvblock as kv
from jax_kvblock.attention import joining
from jax_kvblock.parallel import (
    interleaved_paged_attention,
    interleaved_slots,
    interleaved_tables,
)

pytestmark = pytest.mark.usefixtures("four_cpus")

WHO = ["xla", pytest.param("emulator", marks=[pytest.mark.wide, pytest.mark.cpu])]


@pytest.fixture(params=WHO)
def deal(request: Any, rng: np.random.Generator) -> Any:
    """Deals out a case over devices, for plain JAX or for the emulated kernels."""
    emulated = request.param == "emulator"
    if emulated:
        request.getfixturevalue("paged_as_cuda")

    def dealt(size: int = 4, **case: Any) -> Dealt:
        if emulated and "dtype" not in case:
            case["dtype"] = "bfloat16"
        who = "cuda" if emulated else "xla"
        return Dealt(Case(**case), rng, size, who)

    return dealt


CASES: dict[str, dict[str, Any]] = {
    "mixed": {"sequences": ((1, 37), (6, 20), (3, 3), (1, 164))},
    "two devices": {"size": 2},
    "blocks of 5": {"block_size": 5, "sequences": ((1, 37), (9, 41), (4, 4))},
    "blocks of 1": {"block_size": 1, "sequences": ((1, 7), (9, 41), (1, 2))},
    "no keys, no queries": {"sequences": ((1, 0), (0, 40), (2, 2), (0, 0))},
    "fewer keys than queries": {"sequences": ((9, 4), (40, 20), (1, 5))},
    "a prefill": {"sequences": ((70, 150), (1, 70), (65, 65))},
    "not causal": {"causal": False, "sequences": ((6, 200), (1, 70))},
    "a window": {"window": (20, 0), "sequences": ((1, 170), (7, 90), (5, 9))},
    "an open window": {"window": (None, 0), "sequences": ((1, 170), (7, 90))},
    "both sides": {
        "causal": False,
        "window": (23, 4),
        "block_size": 5,
        "sequences": ((9, 140), (20, 20)),
    },
    "a right side": {
        "causal": False,
        "window": (None, 3),
        "sequences": ((9, 140), (20, 20)),
    },
    "a window of its own key": {"window": (0, 0), "sequences": ((1, 70), (9, 40))},
    "sinks": {"sinks": True, "sequences": ((1, 37), (6, 20), (1, 0), (1, 164))},
    "softcap, scale": {"softcap": 2.0, "scale": 0.4, "sinks": True},
    "one key head": {"heads": 8, "kv_heads": 1, "value_dim": 8},
    "float64": {"dtype": "float64", "sinks": True, "window": (40, None)},
    "ranges": {"ranges": True, "sequences": ((6, 300), (1, 37), (9, 20), (1, 64))},
    "ranges, not causal": {
        "ranges": True,
        "causal": False,
        "sinks": True,
        "sequences": ((20, 200), (9, 20)),
    },
    "8 drafts": {"tree": 1, "sequences": ((8, 300), (8, 8), (1, 64), (8, 41))},
    "30 drafts, blocks of 5": {
        "tree": 1,
        "block_size": 5,
        "sequences": ((30, 90), (32, 32), (1, 9)),
    },
    "70 drafts, three words": {"tree": 3, "sequences": ((70, 200), (33, 40), (1, 9))},
    "drafts, not causal, a window": {
        "tree": 1,
        "causal": False,
        "window": (50, None),
        "sequences": ((8, 300), (20, 41)),
    },
    "drafts longer than keys": {"tree": 1, "sequences": ((9, 4), (20, 12), (3, 0))},
    "ranges, drafts": {
        "ranges": True,
        "tree": 1,
        "block_size": 5,
        "sequences": ((8, 300), (20, 70)),
    },
}


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_every_row_is_right(name, deal):
    wide = CASES[name].get("dtype") == "float64"
    with jax.enable_x64(wide):
        drawn = deal(**CASES[name])
        if wide:
            drawn.implementation = None
        drawn.hold(*drawn.own_run())


# ---- calls of other forms ------------------------------------------------------------


def padded(drawn: Dealt, **more: Any) -> Any:
    """The rows of a ragged call as `[B, T]`, NaN beside them; and theirs of it."""
    lens = np.diff(drawn.starts)
    batch, length = len(lens), int(lens.max())
    given = {"q": drawn.q, "ranges": drawn.ranges, **more}
    rows = {
        name: np.full((batch, length, *a.shape[1:]), 7, a.dtype)
        for name, a in given.items()
    }
    rows["q"][:] = np.nan
    at = np.arange(length) < lens[:, None]
    for name, a in given.items():
        rows[name][at] = a
    return rows, lens.astype(np.int32), at


def test_a_batch_with_padding(deal):
    drawn = deal(
        ranges=True, tree=1, sinks=True, window=(90, 0),
        sequences=((8, 300), (1, 37), (0, 9), (9, 9)),
    )  # fmt: skip
    bits = drawn.options["tree_mask"]
    rows, lens, at = padded(drawn, tree_mask=bits)
    out, lse = drawn.own_run(**rows, q_lens=lens, query_start=None)
    assert np.isneginf(lse[~at]).all() and not np.asarray(out[~at]).any()
    drawn.hold(out[at], lse[at])


ONE = ((1, 37), (1, 164), (1, 1), (1, 0), (1, 64))


@pytest.mark.parametrize("size", [2, 4])
def test_a_decode_step_needs_no_ranges(size, deal, monkeypatch):
    """One query is the last position, so it sees what a device has of its sequence."""
    drawn = deal(size, sequences=ONE, sinks=True, softcap=3.0)
    seen = spied(monkeypatch)
    out, lse = drawn.own_run(q=drawn.q[:, None], query_start=None)
    drawn.hold(out[:, 0], lse[:, 0])
    (x,) = seen
    assert x.ranges is None
    drawn.hold(*drawn.own_run())  # ragged, it may be other than one each
    assert seen[1].ranges is not None
    out, lse = drawn.own_run(q=drawn.q[:, None], query_start=None, window=(None, 2))
    drawn.hold(out[:, 0], lse[:, 0])
    assert seen[2].ranges is None
    drawn.own_run(q=drawn.q[:, None], query_start=None, window=(9, 0))
    assert seen[3].ranges is not None


def spied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that devices make, as they are traced."""
    from jax_kvblock.parallel import decode

    seen: list[Any] = []
    attend = decode.attend

    def spy(config: Any, x: Any) -> Any:
        seen.append(x)
        return attend(config, x)

    monkeypatch.setattr(decode, "attend", spy)
    return seen


@pytest.mark.parametrize("layout", ["NHD", "HND", "universal", "operational"])
def test_pools(layout, deal):
    """In every layout, with a traced layer; blocks are the axis that is cut."""
    drawn = deal(sequences=((3, 90), (1, 37)), window=(40, 0))
    pool = pool_of_blocks(drawn, layout)
    drawn.hold(*drawn.own_run(pages=pool, layer=np.int32(1)))
    if layout == "NHD":
        drawn.hold(*drawn.own_run(pages=pool, layer=1, check_vma=False))


def test_a_latent_cache(rng):
    case = Case(((5, 90), (1, 37), (1, 130)), heads=8, kv_heads=1, dim=24, value_dim=16)
    drawn = Dealt(case, rng, 4, "xla")
    drawn.values = [k[..., :16] for k in drawn.keys]
    drawn.hold(*drawn.own_run(pages=drawn.own_k[:, :, 0], value_dim=16))


@pytest.mark.parametrize("of", ["all", "heads", "tokens"])
def test_caches_of_8_bits(of, rng):
    """Scales of tokens lie beside their blocks, cut as they are."""
    drawn = Dealt(Case(((5, 90), (1, 37), (1, 130))), rng, 4, "xla")
    shape = {"all": (), "heads": (2,), "tokens": drawn.own_k.shape[:3]}[of]
    scales = {n: rng.uniform(0.02, 0.05, shape).astype(np.float32) for n in "kv"}
    for name, whole, own in (("k", drawn.k, drawn.own_k), ("v", drawn.v, drawn.own_v)):
        scale = scales[name][..., None]
        stored = np.where(np.isnan(own), 99, np.round(own / scale)).astype(np.int8)
        made = stored * scale
        read = drawn.keys if name == "k" else drawn.values
        for b, length in enumerate(drawn.kv_lens):
            at = np.arange(length)
            block = at // 16
            first = block % 4 * len(whole)  # of the device's blocks
            ids = first + drawn.own_tables[b, block]
            read[b] = made[ids, at % 16]
        setattr(drawn, f"own_{name}", stored)
    cut = ("k_scale", "v_scale") if of == "tokens" else ()
    drawn.hold(*drawn.own_run(k_scale=scales["k"], v_scale=scales["v"], cut=cut))


def test_under_vmap(rng):
    """An axis of vmap is one of devices."""
    drawn = Dealt(Case(((5, 90), (1, 37)), sinks=True, window=(60, 0)), rng, 4, "xla")
    pages = [a.reshape(4, -1, *a.shape[1:]) for a in drawn.pages]

    def own(pages: Any, tables: Any) -> Any:
        return interleaved_paged_attention(
            drawn.q, pages, None, tables, drawn.kv_lens, query_start=drawn.starts,
            sinks=drawn.sinks, window=(60, 0), axis_name="cp", return_lse=True,
        )  # fmt: skip

    out, lse = jax.vmap(own, axis_name="cp")(tuple(pages), drawn.tables_of_devices())
    for i in range(4):
        drawn.hold(out[i], lse[i])


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_heads_over_another_axis(axis_type, rng):
    """Heads over "tp", blocks over "cp"; and over both axes, one after the other."""
    drawn = Dealt(Case(((5, 90), (1, 37)), sinks=True), rng, 2, "xla")
    kind = (getattr(jax.sharding.AxisType, axis_type),) * 2
    mesh = jax.make_mesh((2, 2), ("tp", "cp"), kind, devices=jax.devices("cpu")[:4])

    def own(pages: Any, tables: Any, q: Any, sinks: Any) -> Any:
        return interleaved_paged_attention(
            q, pages, None, tables[0], drawn.kv_lens, query_start=drawn.starts,
            sinks=sinks, axis_name="cp", return_lse=True,
        )  # fmt: skip

    heads = P(None, "tp")
    specs = (P("cp", None, "tp"), P("cp"), heads, P("tp"))
    mapped = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=(heads, heads))
    args = (drawn.pages, drawn.tables_of_devices(), drawn.q, drawn.sinks)
    drawn.hold(*jax.jit(mapped)(*cut(args, mesh, specs)))
    whole = P(("tp", "cp"))
    four = Dealt(drawn.case, rng, 4, "xla")

    def over_both(pages: Any, tables: Any) -> Any:
        return interleaved_paged_attention(
            four.q, pages, None, tables[0], four.kv_lens, query_start=four.starts,
            sinks=four.sinks, axis_name=["tp", "cp"], return_lse=True,
        )  # fmt: skip

    mapped = jax.shard_map(
        over_both, mesh=mesh, in_specs=(whole, whole), out_specs=(P(), P())
    )
    args = (four.pages, four.tables_of_devices())
    four.hold(*jax.jit(mapped)(*cut(args, mesh, (whole, whole))))


def cut(args: Any, mesh: Any, specs: Any) -> Any:
    """The arguments as a mesh has them; an explicit one wants to be told."""
    return [
        jax.tree.map(lambda a, s=spec: jax.device_put(a, NamedSharding(mesh, s)), arg)
        for arg, spec in zip(args, specs, strict=True)
    ]


def test_some_of_the_query_heads(rng):
    """`q_heads`: query heads are cut over "tp", the cache is whole along it."""
    drawn = Dealt(Case(((5, 90), (1, 37)), heads=4, kv_heads=2), rng, 2, "xla")
    mesh = jax.make_mesh((2, 2), ("tp", "cp"), devices=jax.devices("cpu")[:4])

    def own(pages: Any, tables: Any, q: Any) -> Any:
        first = jax.lax.axis_index("tp") * 2
        return interleaved_paged_attention(
            q, pages, None, tables[0], drawn.kv_lens, query_start=drawn.starts,
            q_heads=(first, 4), axis_name="cp", return_lse=True,
        )  # fmt: skip

    heads = P(None, "tp")
    specs = (P("cp"), P("cp"), heads)
    mapped = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=(heads, heads))
    args = (drawn.pages, drawn.tables_of_devices(), drawn.q)
    drawn.hold(*jax.jit(mapped)(*cut(args, mesh, specs)))


def test_drafts_beyond_the_bits_see_as_without(deal):
    """Of ragged calls; the others' bits count."""
    drawn = deal(tree=1, sequences=((40, 90), (8, 50)))
    bits = drawn.options["tree_mask"]
    drawn.seen[:40] = True
    drawn.hold(*drawn.own_run(tree_mask=bits))


# ---- data that is wrong --------------------------------------------------------------


def one_device(drawn: Dealt, **changes: Any) -> Any:
    """The same by `paged_attention` over a table as wide as the devices' together."""
    more = -drawn.tables.shape[1] % drawn.size
    tables = np.pad(drawn.tables, ((0, 0), (0, more)), constant_values=-1)
    return drawn.run(block_tables=tables, **changes)


WRONG = {
    "lengths": {"kv_lens": np.array([-4, 2**31 - 1, 1, 7], np.int32)},
    "longest": {"kv_lens": np.full(4, 2**31 - 1, np.int32)},
    "starts that fall": {"query_start": np.array([0, 6, 2, 9, 11], np.int32)},
    "starts beyond": {
        "query_start": np.array([-3, 1, 7, 2**31 - 1, 2**31 - 1], np.int32)
    },
    "rows of nobody": {"query_start": np.array([2, 3, 3, 8, 9], np.int32)},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_data_is_as_safe_as_on_one_device(name, rng):
    case = Case(((1, 37), (6, 20), (3, 3), (1, 164)), window=(50, None), tree=1)
    drawn = Dealt(case, rng, 4, "xla")
    for pages in (drawn.k, drawn.v, drawn.own_k, drawn.own_v):
        pages[np.isnan(pages)] = 0  # lengths reach beyond what there is
    got, want = drawn.own_run(**WRONG[name]), one_device(drawn, **WRONG[name])
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=4e-6)


def test_ids_that_are_none_are_not_seen(rng):
    drawn = Dealt(Case(((2, 100), (1, 64))), rng, 4, "xla")
    for b, g, wrong in ((0, 2, -1), (1, 1, 10**6)):
        drawn.tables[b, g], drawn.own_tables[b, g] = wrong, wrong
    for x, y in zip(drawn.own_run(), one_device(drawn), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=4e-6)


@pytest.mark.usefixtures("forgotten")
def test_debug_checks_look_at_a_device_s_part(rng):
    drawn = Dealt(Case(((2, 100), (1, 64))), rng, 2, "xla")
    with kv.debug_checks():
        drawn.hold(*drawn.own_run())
        for bad in (-1, 500):
            lens = np.array([bad, 64], np.int32)
            message = "interleaved_paged_attention: kv_lens"
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                jax.block_until_ready(drawn.own_run(kv_lens=lens))


# ---- a loop of decode steps ----------------------------------------------------------

BLOCK, STEPS, HEADS, KV_HEADS, DIM = 4, 9, 4, 2, 16


class Loop:
    """A prefill, then a token of each sequence a step, over a pool that is donated."""

    def __init__(self, rng: np.random.Generator, size: int) -> None:
        self.size = size
        self.lens = np.array([5, 18, 0], np.int32)
        longest = int(self.lens.max()) + STEPS
        batch, self.blocks = len(self.lens), 64
        shape = (batch, longest)
        self.q = rng.standard_normal((*shape, HEADS, DIM)).astype(np.float32)
        self.k, self.v = (
            rng.standard_normal((*shape, KV_HEADS, DIM)).astype(np.float32)
            for _ in "kv"
        )
        width = -(-longest // BLOCK)
        self.tables = np.full((batch, width), -1, np.int32)
        for i in range(size):
            own = self.tables[:, i::size]
            ids = rng.permutation(self.blocks)[: own.size]
            self.tables[:, i::size] = ids.reshape(own.shape)
        spec = kv.BlockSpec(2, 2, BLOCK, KV_HEADS, DIM, "float32")
        at = NamedSharding(mesh_of(size), P("cp"))
        shape = (size * self.blocks, *spec.block_shape)
        # Not of NumPy's memory, which nobody may take.
        self.pool = kv.KVPool(jnp.full(shape, jnp.nan, device=at), spec)

    def prefill(self, pool: kv.KVPool, tables: Any) -> tuple[kv.KVPool, Any]:
        """All prompts at once, ragged."""
        starts = np.cumsum([0, *self.lens]).astype(np.int32)
        q, k, v = (
            np.concatenate([a[b, :n] for b, n in enumerate(self.lens)])
            for a in (self.q, self.k, self.v)
        )
        positions = np.concatenate([np.arange(n) for n in self.lens])
        slots = interleaved_slots(positions, tables, BLOCK, "cp", query_start=starts)
        pool = kv.append_kv(pool, 1, k, v, slots)
        return pool, interleaved_paged_attention(
            q, pool, 1, tables, self.lens, query_start=starts, axis_name="cp"
        )

    def steps(self, pool: kv.KVPool, tables: Any) -> tuple[kv.KVPool, Any]:
        def one(carry: Any, _: Any) -> Any:
            pool, lens = carry
            row = jnp.arange(len(self.lens))
            q, k, v = (jnp.asarray(a)[row, lens] for a in (self.q, self.k, self.v))
            slots = interleaved_slots(lens, tables, BLOCK, "cp")
            pool = kv.append_kv(pool, jnp.int32(1), k, v, slots)
            out = interleaved_paged_attention(
                q[:, None], pool, jnp.int32(1), tables, lens + 1, axis_name="cp"
            )
            return (pool, lens + 1), out[:, 0]

        carry = (pool, jnp.asarray(self.lens))
        (pool, _), outs = jax.lax.scan(one, carry, length=STEPS)
        return pool, outs

    def program(self, part: Any) -> Any:
        """`prefill` or `steps` over the devices, a function of pool and tables."""
        mapped = jax.shard_map(
            lambda pool, tables: part(pool, interleaved_tables(tables, "cp")),
            mesh=mesh_of(self.size),
            in_specs=(P("cp"), P()),
            out_specs=(P("cp"), P()),
        )
        return jax.jit(mapped, donate_argnums=0)

    def truth(self, b: int, position: int) -> np.ndarray:
        """What the query at a position of a sequence sees, in float64."""
        k, v = (
            np.repeat(a[b, : position + 1].astype(np.float64), HEADS // KV_HEADS, 1)
            for a in (self.k, self.v)
        )
        scores = np.einsum("nd,snd->ns", self.q[b, position], k) / DIM**0.5
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        return np.einsum("ns,snd->nd", weights, v)


@pytest.mark.parametrize("size", [2, 4])
def test_a_loop_over_devices_with_a_donated_pool(size, rng):
    loop = Loop(rng, size)
    pool, results = loop.pool, []
    own = pool.arrays[0].size // size
    before = pointers(pool)
    for part in (loop.prefill, loop.steps):
        program = loop.program(part)
        compiled = program.lower(pool, loop.tables).compile()
        assert pool_copies(compiled.as_text(), own) == []
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == 4 * own
        assert memory.temp_size_in_bytes < 2 * own  # half of the pool's bytes
        pool, result = program(pool, loop.tables)
        results.append(result)
    first, outs = results
    assert pointers(pool) == before
    row = 0
    for b, length in enumerate(loop.lens.tolist()):
        for p in range(length):
            np.testing.assert_allclose(first[row], loop.truth(b, p), rtol=0, atol=4e-6)
            row += 1
        for s in range(STEPS):
            want = loop.truth(b, length + s)
            np.testing.assert_allclose(outs[s, b], want, rtol=0, atol=4e-6)
    written = ~np.isnan(np.asarray(pool.arrays[0])[:, 1, 0, :, 0, 0])
    kept = loop.lens + STEPS
    by_device = written.reshape(size, -1).sum(1)
    assert written.sum() == kept.sum()  # each key on one device
    for i in range(size):
        columns = [g for g in range(i, loop.tables.shape[1], size)]
        held = [np.clip(kept - g * BLOCK, 0, BLOCK).sum() for g in columns]
        assert by_device[i] == sum(held)


def pointers(pool: kv.KVPool) -> list[int]:
    (a,) = pool.arrays
    return [shard.data.unsafe_buffer_pointer() for shard in a.addressable_shards]


def pool_copies(text: str, size: int) -> list[str]:
    """What makes as much as a device's pool, but for what updates it in place."""
    return [line for line in large(text, size) if "kvblock_copy" not in line]


# ---- what travels --------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("one", [True, False], ids=["a query each", "several"])
def test_out_and_lse_are_all_that_travels(one, size, rng):
    case = Case(ONE if one else ((9, 37), (3, 164)), sinks=True)
    drawn = Dealt(case, rng, size, "xla")
    form = {"q": drawn.q[:, None], "query_start": None} if one else {"window": (30, 0)}
    function, args = drawn.function(**form)
    text = jax.jit(function).lower(*args).compile().as_text()
    rows = len(drawn.q) * 4
    assert reductions(text) == [("all-reduce", size * rows * (16 + 1))]


def test_more_than_a_step_s_travels_once(rng, monkeypatch):
    """Not n times, and so in several sums."""
    monkeypatch.setattr(joining, "_AT_ONCE_BYTES", 4 * 9 * 4 * (16 + 1) * 4 - 1)
    joining.merge_arrays.clear_cache()  # it is jitted
    drawn = Dealt(Case(((9, 37),), sinks=True), rng, 4, "xla")
    function, args = drawn.function()
    compiled = jax.jit(function).lower(*args).compile()
    found = reductions(compiled.as_text())
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert sum(n for _, n in found) == 9 * 4 * (16 + 2)
    drawn.hold(*compiled(*args))
    joining.merge_arrays.clear_cache()


def test_what_travels_would_be_seen(rng):
    drawn = Dealt(Case(), rng, 2, "xla")
    gather = jax.shard_map(
        lambda a: jax.lax.all_gather(a, "cp", tiled=True),
        mesh=mesh_of(2), in_specs=P("cp"), out_specs=P(), check_vma=False,
    )  # fmt: skip
    text = jax.jit(gather).lower(drawn.own_k).compile().as_text()
    assert reductions(text) == [("all-gather", drawn.own_k.size)]


def test_the_result_is_the_same_on_all_devices(rng):
    """Its type says so, and each device's own copy."""
    drawn = Dealt(Case(sinks=True), rng, 4, "xla")
    out, lse = drawn.own_run()
    for a in (out, lse):
        first, *others = (np.asarray(shard.data) for shard in a.addressable_shards)
        assert a.sharding.is_fully_replicated and len(others) == 3
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_new_lengths_do_not_compile_again(rng, compiles):
    drawn = Dealt(Case(window=(20, 0), tree=1), rng, 4, "xla")
    function, (given,) = drawn.function()
    run = jax.jit(function)
    drawn.hold(*run(given))
    before = len(compiles)
    lens = drawn.kv_lens - np.array([3, 0, 0, 5], np.int32)
    run(given | {"kv_lens": lens})
    assert len(compiles) == before
