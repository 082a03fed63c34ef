"""What `reshard_blocks` runs and sends: routes between devices, compiled programs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib import xla_client
from meshes import by_axis_type, mesh_of, put
from model import PoolModel, assert_same_bits, lay, random_bits, read_pool
from paged_meshes import large
from reshard_processes import BLOCKS, DIMS, DST_IDS, HEADS, SRC_IDS, hold, make_pool, on

import jax_kvblock as kv
from jax_kvblock.parallel import (
    reshard,
    reshard_blocks,
    reshard_copies,
    reshard_moves,
    reshard_parts,
)
from jax_kvblock.parallel.reshard_routes import NOWHERE, Cut, find_routes, in_rounds

pytestmark = pytest.mark.usefixtures("four_cpus")

FOUR = range(4)
KINDS = r"(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)\("


# ---- programs ------------------------------------------------------------------------


@pytest.fixture
def programs(monkeypatch):
    """What runs from now on, by name, as compiled."""
    seen: list[tuple[str, Any]] = []

    def record(module: Any, name: str) -> None:
        step = getattr(module, name)

        def run(*args: Any, **static: Any) -> Any:
            seen.append((name, step.lower(*args, **static).compile()))
            return step(*args, **static)

        monkeypatch.setattr(module, name, run)

    for name in ("_step", "_gather", "_exchange", "_scatter"):
        record(reshard_moves, name)

    def recorded(name: str) -> None:
        make = getattr(reshard_copies, name)

        def made(*static: Any) -> Any:
            program = make(*static)

            def run(*args: Any) -> Any:
                seen.append((name, program.lower(*args).compile()))
                return program(*args)

            return run

        monkeypatch.setattr(reshard_copies, name, made)

    for name in ("_reader", "_writer", "_copier"):
        recorded(name)
    return seen


@pytest.fixture
def puts(monkeypatch):
    """Pieces that are sent from now on, and the device that each goes to."""
    real, seen = reshard_copies.brought, []

    def recorded(x: Any, to: Any) -> Any:
        if x.ndim > 2:  # ids have two dims
            (device,) = to.device_set
            seen.append((x, device))
        return real(x, to)

    monkeypatch.setattr(reshard_copies, "brought", recorded)
    return seen


def made(compiled: Any, least: float) -> list[str]:
    """Instructions that make so many elements, but for updates in place."""
    in_place = r"custom-call\(.*output_to_operand_aliasing"
    return [x for x in large(compiled.as_text(), least) if not re.search(in_place, x)]


MANY = 512  # blocks of a pool, beside the few that move

TRAVELS = {  # source, destination, rounds, the parts of a pool's heads that one takes
    "four to four, cut alike": ("ab", "ab", 0, 0),
    "whole to four": (None, "ab", 0, 0),
    "two to four": ("a", "ab", 0, 0),
    "four to two": ("ab", "a", 1, 4),
    "four to two, the later axis": ("ab", "b", 2, 4),
    "four to whole": ("ab", None, 3, 4),
    "two to two": ("a", "b", 1, 2),
    "four to four, turned": ("ab", "ba", 1, 4),
}


@pytest.mark.parametrize("name", TRAVELS)
def test_one_program_permutes_what_has_to_move(rng, name, programs):
    src_cut, dst_cut, rounds, parts = TRAVELS[name]
    places = [
        on(FOUR, mesh=(2, 2), cut=tuple(cut) if cut else None, layout=layout)
        for cut, layout in ((src_cut, "NHD"), (dst_cut, "HND"))
    ]
    src, dst = (
        make_pool(random_bits(rng, (MANY, *DIMS), "float32"), place) for place in places
    )
    reshard_blocks(src, SRC_IDS, dst, DST_IDS)
    ((step, compiled),) = programs
    text = compiled.as_text()
    assert step == "_step"
    assert Counter(re.findall(KINDS, text)) == Counter(
        {"collective-permute": rounds} if rounds else {}
    )
    shape = f"[{len(SRC_IDS)},{DIMS[3] // max(parts, 1)},"
    sent = [x for x in text.splitlines() if "collective-permute(" in x]
    assert all(f"= u32{shape}" in x for x in sent)
    assert made(compiled, src.data.size / 4) == []
    assert "input_output_alias" in text
    moved = src.spec.block_bytes * len(SRC_IDS)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * moved + 4096


def test_the_search_for_large_instructions_finds_a_copy(rng):
    pool = make_pool(random_bits(rng, (MANY, *DIMS), "float32"), on(FOUR))
    compiled = jax.jit(lambda x: x + 1).lower(pool.data).compile()
    assert made(compiled, pool.data.size / 4)


def test_between_devices_of_one_process_nothing_is_larger_than_the_blocks(
    rng, programs, puts
):
    """And each head travels once, from one device to another."""
    src = make_pool(random_bits(rng, (MANY, *DIMS), "float32"), on([0, 1]))
    dst = make_pool(random_bits(rng, (MANY, *DIMS), "float32"), on([3], "HND"))
    reshard_blocks(src, SRC_IDS, dst, DST_IDS)
    assert [name for name, _ in programs] == ["_reader", "_reader", "_writer"]
    devices = jax.devices("cpu")
    for (_, compiled), at in zip(programs, (0, 1, 3), strict=True):
        assert made(compiled, src.data.size / 4) == []
        assert re.findall(KINDS, compiled.as_text()) == []
        (runs_on,) = {s._device_assignment for s in leaf_shardings(compiled)}
        assert runs_on == (devices[at],)
    assert "input_output_alias" in programs[-1][1].as_text()
    assert [x.shape for x, _ in puts] == [(7, 4, 2, 2, 3, 5)] * 2
    assert [x.devices() for x, _ in puts] == [{devices[0]}, {devices[1]}]
    assert [to for _, to in puts] == [devices[3]] * 2


def leaf_shardings(compiled: Any) -> list[Any]:
    return jax.tree.leaves(compiled.output_shardings)


def test_what_is_there_goes_from_pool_to_pool(rng, programs, puts):
    """Of two devices to one of them: half of the heads do not travel."""
    hold(on([0, 1]), on([0], "HND"), rng, dtype="float32")
    assert [name for name, _ in programs] == ["_reader", "_copier", "_writer"]
    ((sent, to),) = puts
    assert sent.devices() == {jax.devices("cpu")[1]}
    assert to == jax.devices("cpu")[0]


def test_few_blocks_are_on_their_way_before_anything_is_written(
    rng, programs, monkeypatch
):
    """A piece is sent as soon as it is read; heads that stay go under its way."""
    brought = reshard_copies.brought

    def recorded(x: Any, to: Any) -> Any:
        programs.append(("ids" if x.ndim == 2 else "sent", None))
        return brought(x, to)

    monkeypatch.setattr(reshard_copies, "brought", recorded)
    hold(on(FOUR), on([0, 2], "HND"), rng, dtype="float32")
    assert [name for name, _ in programs] == [
        "ids",
        *["_reader", "sent"] * 2,
        *["_copier"] * 2,
        *["_writer"] * 2,
    ]


def test_heads_for_several_devices_are_read_once_and_sent_to_each(rng, programs, puts):
    hold(on([0], cut=None), on([1, 2], cut=None), rng, dtype="float32")
    assert [name for name, _ in programs] == ["_reader", "_writer", "_writer"]
    (first, _), (second, _) = puts
    assert first is second
    assert [to for _, to in puts] == jax.devices("cpu")[1:3]


def test_many_blocks_go_in_chunks(rng, programs, monkeypatch):
    """Seven of two heads in chunks of three: the last is of one."""
    head = 4 * math.prod(DIMS) // DIMS[3]
    monkeypatch.setattr(reshard_moves, "CHUNK_BYTES", 7 * 2 * head // 3)
    hold(on(FOUR), on(FOUR, "HND", mesh=(2, 2)), rng, dtype="float32")
    ((_, step),) = programs
    sent = re.findall(r"= u32\[(\d),2,.* collective-permute\(", step.as_text())
    assert sorted(sent) == ["1", "3", "3"]


def test_a_chunk_travels_while_another_is_read_and_another_written(
    rng, programs, puts, monkeypatch
):
    """Seven of four heads in chunks of three; the last ends with ids of no block."""
    head = 4 * math.prod(DIMS) // DIMS[3]
    monkeypatch.setattr(reshard_copies, "CHUNK_BYTES", 7 * 8 * head // 3 + 1)
    hold(on([1]), on([2, 3]), rng, dtype="float32")
    read, write = "_reader", "_writer"
    want = [read, read, write, write, read, write, write, write, write]
    assert [name for name, _ in programs] == want
    assert [x.shape[:2] for x, _ in puts] == [(3, 4)] * 6


@pytest.mark.parametrize(("ahead", "waits"), [(2, 5), (4, 3), (7, 0)])
def test_the_host_waits_before_too_much_is_under_way(rng, monkeypatch, ahead, waits):
    """Of seven chunks, for one to come before another goes."""
    monkeypatch.setattr(reshard_copies, "CHUNK_BYTES", 1)
    monkeypatch.setattr(reshard_copies, "AHEAD", ahead)
    real, seen = jax.block_until_ready, []

    def recorded(x: Any) -> Any:
        seen.append(x)
        return real(x)

    monkeypatch.setattr(jax, "block_until_ready", recorded)
    hold(on([0]), on([1], "HND"), rng, dtype="float32")
    assert len([x for x in seen if isinstance(x, list)]) == waits


def test_how_many_chunks():
    """Of what the busiest device sends and gets."""
    route = reshard_copies.Route
    a, b, c = jax.devices("cpu")[:3]
    one = [route(a, 0, b, 0)]

    def count(piece: int, travel: Sequence[Any], blocks: int = 1000) -> int:
        return reshard_copies._chunks(blocks, piece, reshard_copies._busiest(travel))

    assert count(2**20, one) == 1
    assert count(2**29, one) == 1
    assert count(2**29 + 1, one) == 2
    for two in (
        [route(a, 0, b, 0), route(a, 0, c, 0)],
        [route(b, 0, a, 0), route(c, 0, a, 1)],
        [route(a, 0, b, 0), route(b, 0, a, 1)],
    ):
        assert count(2**30, two) == 4
    assert count(2**30, []) == 1
    assert count(2**34, one, blocks=3) == 3


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("place", ["host", "device", "both"])
def test_ids_go_to_all_devices_at_once(rng, monkeypatch, place, chunks):
    """Wherever they are. No program is given any that are still on the host."""
    head = 4 * math.prod(DIMS) // DIMS[3]
    monkeypatch.setattr(reshard_copies, "CHUNK_BYTES", 7 * 8 * head // chunks + 1)
    brought, sent, puts = reshard_copies.brought, [], []

    def recorded(x: Any, to: Any) -> Any:
        if x.ndim == 2:
            puts.append({d.id for d in to.device_set})
        return brought(x, to)

    monkeypatch.setattr(reshard_copies, "brought", recorded)
    for name in ("_reader", "_writer", "_copier"):
        make = getattr(reshard_copies, name)

        def made(*static: Any, make: Any = make) -> Any:
            def run(*args: Any) -> Any:
                sent.extend(jax.tree.leaves(args))
                return make(*static)(*args)

            return run

        monkeypatch.setattr(reshard_copies, name, made)

    def run(src: Any, src_ids: Any, dst: Any, dst_ids: Any) -> Any:
        if place == "device":
            src_ids = jax.device_put(src_ids, jax.devices("cpu")[2])
        if place != "host":
            dst_ids = jax.device_put(dst_ids, jax.devices("cpu")[3])
        return reshard_blocks(src, src_ids, dst, dst_ids)

    hold(on([0, 1]), on([1, 2], "HND"), rng, dtype="float32", run=run)
    assert all(isinstance(x, jax.Array) for x in sent)
    assert puts == [{0, 1, 2}] * chunks


def test_all_ids_in_one_go_to_those_alone_that_keep_heads(rng, monkeypatch):
    """The others are given those of each chunk."""
    head = 4 * math.prod(DIMS) // DIMS[3]
    monkeypatch.setattr(reshard_copies, "CHUNK_BYTES", 7 * 4 * head // 3 + 1)
    brought, puts = reshard_copies.brought, []

    def recorded(x: Any, to: Any) -> Any:
        if x.ndim == 2:
            puts.append((x.shape, {d.id for d in to.device_set}))
        return brought(x, to)

    monkeypatch.setattr(reshard_copies, "brought", recorded)
    hold(on([0, 1]), on([0], "HND"), rng, dtype="float32")
    assert puts == [((2, 3), {0, 1})] * 3 + [((2, 7), {0})]


def test_between_two_clients_and_ids_in_pinned_memory(rng):
    """As from a CPU to GPUs; here two clients of CPUs."""
    other = xla_client.make_cpu_client().devices()[0]
    blocks, there = (random_bits(rng, (n, *DIMS), "float32") for n in BLOCKS)
    src, dst = make_pool(blocks, on([0, 1])), make_pool(there, on([2]))
    moved = kv.KVPool(jax.device_put(dst.data, other), dst.spec)
    pinned = jax.sharding.SingleDeviceSharding(
        jax.devices("cpu")[1], memory_kind="pinned_host"
    )
    ids = [jax.device_put(np.int32(x), pinned) for x in (SRC_IDS, DST_IDS)]
    truth = PoolModel(there)
    truth.scatter(DST_IDS, PoolModel(blocks).gather(SRC_IDS))
    for given in ([SRC_IDS, DST_IDS], [SRC_IDS, ids[1]], [ids[0], DST_IDS], ids):
        moved = reshard_blocks(src, given[0], moved, given[1])
        assert {d.client for d in moved.data.devices()} == {other.client}
        assert_same_bits(np.asarray(moved.data), lay(truth.blocks, "NHD"))


@pytest.mark.parametrize("name", ["_step", "_send", "_exchange"])
def test_copy_engines_send_where_they_can(monkeypatch, name):
    """What permutes is compiled so on meshes that allow it, and not on others."""
    program = getattr(reshard_moves, name)
    options = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
    devices = tuple(jax.devices("cpu"))
    meshes = {
        yes: reshard_parts.flat_mesh(devices[: 2 if yes else 4])
        for yes in (True, False)
    }
    jitted: list[Any] = []
    monkeypatch.setattr(program, "_jit", lambda **how: jitted.append(how) or how)
    monkeypatch.setattr(program, "_jitted", {})
    monkeypatch.setattr(
        reshard_moves, "engine_options", lambda at: options if len(at) == 2 else {}
    )
    for engines in (True, False, True):
        how = {"compiler_options": options if engines else None}
        assert program._of(meshes[engines]) == how
    assert len(jitted) == 2


@pytest.mark.parametrize(
    ("given", "stays"),
    [
        (np.int32([3, 1, 2]), True),
        (np.int64([3, 1, 2]), True),
        ([3, 1, 2], True),
        (range(3), True),
        (jnp.int32([3, 1, 2]), False),
        ([jnp.int32(3), 1, 2], False),
    ],
    ids=["int32", "int64", "list", "range", "of JAX", "list of JAX"],
)
def test_ids_stay_on_the_host_until_each_device_gets_them(
    rng, monkeypatch, given, stays
):
    """As a copy: who passed them may change them while devices still fetch theirs."""
    seen, move = [], reshard.move

    def recorded(*args: Any) -> Any:
        seen.append(args)
        return move(*args)

    monkeypatch.setattr(reshard, "move", recorded)
    src = make_pool(random_bits(rng, (8, *DIMS), "float32"), on([0, 1]))
    dst = make_pool(random_bits(rng, (8, *DIMS), "float32"), on([2]))
    reshard_blocks(src, given, dst, range(3))
    ((_, src_ids, _, dst_ids),) = seen
    assert isinstance(src_ids, np.ndarray) == stays
    assert isinstance(dst_ids, np.ndarray)
    np.testing.assert_array_equal(src_ids, [int(x) for x in given])
    if isinstance(given, np.ndarray):
        assert not np.shares_memory(src_ids, given)


# ---- routes --------------------------------------------------------------------------


def cut_of(first: int, count: int, heads: int, whole: bool = False) -> Cut:
    devices = tuple(jax.devices("cpu")[first : first + count])
    if whole:
        return Cut(devices, (0,) * count, heads)
    width = heads // count
    return Cut(devices, tuple(range(0, heads, width)), width)


def test_a_source_that_is_whole_on_each_device_sends_evenly():
    src, dst = cut_of(0, 2, 4, whole=True), cut_of(2, 2, 4)
    sends = Counter(route.sender for route in find_routes(src, dst))
    assert sorted(sends.values()) == [1, 1]
    assert len(in_rounds(src, dst, (*src.devices, *dst.devices)).rounds) == 1


def test_heads_for_several_devices_are_read_once():
    src, dst = cut_of(0, 1, 1), cut_of(1, 3, 1, whole=True)
    plan = in_rounds(src, dst, (*src.devices, *dst.devices))
    assert plan.pieces == ((0, NOWHERE, NOWHERE, NOWHERE),)
    assert [r.pairs for r in plan.rounds] == [((0, 1),), ((0, 2),), ((0, 3),)]


def test_rounds_are_permutations_and_as_few_as_there_can_be(rng):
    devices = tuple(jax.devices("cpu")[:4])
    for _ in range(200):
        cuts = []
        for _ in range(2):
            count = int(rng.choice([1, 2, 3, 4]))
            some = [devices[i] for i in rng.permutation(4)[:count]]
            width = int(rng.choice([1, 2, 3, 4, 6, 12]))
            if 12 // width > count:
                width = 12 if count == 1 else 12 // count
            parts = 12 // width
            firsts = [width * (i % parts) for i in range(count)]
            cuts.append(Cut(tuple(some), tuple(firsts), width))
        routes = [r for r in find_routes(*cuts) if r.sender != r.receiver]
        plan = in_rounds(*cuts, devices)
        moves = [r for r in plan.rounds if r.pairs]
        busiest = Counter()
        for r in routes:
            busiest.update([("sends", r.sender), ("gets", r.receiver)])
        assert len(moves) == max(busiest.values(), default=0)
        for r in moves:
            senders, receivers = zip(*r.pairs, strict=True)
            assert len({*senders}) == len(senders)
            assert len({*receivers}) == len(receivers)
        travelled = {
            (devices[s], plan.pieces[r.piece][s], devices[t], r.puts[t])
            for r in moves
            for s, t in r.pairs
        }
        assert travelled == {tuple(r) for r in routes}


# ---- inside of jit -------------------------------------------------------------------


def jit_pools(rng, axis_type, src_cut, dst_cut, blocks=BLOCKS, contiguous=True):
    """Two pools on one mesh, and their canonical blocks."""
    mesh, pools, held = mesh_of(axis_type), [], []
    for n, cut, layout in ((blocks[0], src_cut, "NHD"), (blocks[1], dst_cut, "HND")):
        x = random_bits(rng, (n, *DIMS), "bfloat16")
        laid = lay(x, layout)
        arrays = [laid] if contiguous else [laid[:, i] for i in range(DIMS[0])]
        before = [None] * (HEADS[layout] - (not contiguous))
        arrays = [jnp.copy(put(a, mesh, *before, cut)) for a in arrays]
        spec = kv.BlockSpec(*DIMS, x.dtype, layout)
        pools.append(kv.KVPool(arrays[0] if contiguous else arrays, spec))
        held.append(x)
    return mesh, pools, held


IN_JIT = {  # source, destination, the kinds of collectives
    "whole to four": (None, ("a", "b"), set()),
    "two to four": ("a", ("a", "b"), set()),
    "cut alike": ("b", "b", set()),
    "four to two": (("a", "b"), "a", {"all-gather"}),
    "four to whole": (("a", "b"), None, {"all-gather"}),
    "two to two": ("a", "b", {"collective-permute"}),
    "turned": (("a", "b"), ("b", "a"), {"collective-permute"}),
    # XLA turns and then gathers; outside of jit this is permutations alone.
    "four to two, the later axis": (
        ("a", "b"), "b", {"collective-permute", "all-gather"},
    ),
}  # fmt: skip


def named(cut: Any) -> Any:
    """As `mesh_of` calls its axes."""
    to = {"a": "b", "b": "h"}
    return tuple(to[x] for x in cut) if isinstance(cut, tuple) else to.get(cut)


@by_axis_type
@pytest.mark.parametrize("name", IN_JIT)
def test_inside_of_jit(rng, name, axis_type):
    *cuts, kinds = IN_JIT[name]
    mesh, (src, dst), (before, others) = jit_pools(
        rng, axis_type, *map(named, cuts), blocks=(MANY, MANY)
    )
    truth = PoolModel(others)
    truth.scatter(DST_IDS, PoolModel(before).gather(SRC_IDS))
    where = dst.sharding
    with jax.set_mesh(mesh):
        ids = put(SRC_IDS, mesh), put(DST_IDS, mesh)
        step = jax.jit(reshard_blocks, donate_argnums=2)
        compiled = step.lower(src, ids[0], dst, ids[1]).compile()
        got = compiled(src, ids[0], dst, ids[1])
    assert_same_bits(read_pool(got), truth.blocks)
    assert got.sharding.is_equivalent_to(where, 6)
    assert {*re.findall(KINDS, compiled.as_text())} == kinds
    assert made(compiled, src.data.size / 4) == []


@by_axis_type
def test_layers_inside_of_jit_without_a_mesh_around(rng, axis_type):
    _, (src, dst), (before, others) = jit_pools(
        rng, axis_type, ("b", "h"), "h", contiguous=False
    )
    truth = PoolModel(others)
    truth.scatter(DST_IDS, PoolModel(before).gather(SRC_IDS))
    got = jax.jit(reshard_blocks)(src, SRC_IDS, dst, DST_IDS)
    assert_same_bits(read_pool(got), truth.blocks)


def test_on_one_device_inside_of_jit(rng):
    before, others = (random_bits(rng, (n, *DIMS), "int8") for n in BLOCKS)
    src, dst = make_pool(before, on([0], "operational")), make_pool(others, on([0]))
    truth = PoolModel(others)
    truth.scatter(DST_IDS, PoolModel(before).gather(SRC_IDS))
    got = jax.jit(reshard_blocks)(src, SRC_IDS, dst, DST_IDS)
    assert_same_bits(read_pool(got), truth.blocks)


@by_axis_type
def test_its_derivative_is_a_gather_the_other_way(rng, axis_type):
    mesh, (src, dst), _ = jit_pools(rng, axis_type, ("b", "h"), "h")
    src, dst = (
        kv.KVPool(x.data.astype(jnp.float32), x.spec.replace(dtype=jnp.float32))
        for x in (src, dst)
    )
    weights = rng.integers(-8, 9, dst.shape).astype(np.float32)
    weight = put(weights, mesh, None, None, None, "h")

    def energy(src: Any, ids: Any, dst: Any, to: Any) -> Any:
        return jnp.sum(reshard_blocks(src, ids, dst, to).data * weight)

    with jax.set_mesh(mesh):
        ids = put(np.int32([4, 0]), mesh), put(np.int32([1, 6]), mesh)
        slope = jax.jit(jax.grad(energy, allow_int=True))
        got = slope(src, ids[0], dst, ids[1])
    want = np.zeros((6, *DIMS), np.float32)
    want[[4, 0]] = weights[[1, 6]].swapaxes(3, 4)
    assert_same_bits(read_pool(got), want)


@by_axis_type
def test_a_batch_of_ids(rng, axis_type):
    mesh, (src, dst), (before, others) = jit_pools(rng, axis_type, ("b", "h"), "b")
    sources, to = np.int32([[4, 0], [5, 1]]), np.int32([[1, 6], [2, -1]])
    one = jax.vmap(reshard_blocks, in_axes=(None, 0, None, 0))
    with jax.set_mesh(mesh):
        got = jax.jit(one)(src, put(sources, mesh), dst, put(to, mesh))
    for i in range(2):
        truth = PoolModel(others)
        truth.scatter(to[i], PoolModel(before).gather(sources[i]))
        assert_same_bits(np.asarray(got.data)[i], lay(truth.blocks, "HND"))
