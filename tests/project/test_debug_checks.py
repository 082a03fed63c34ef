"""`debug_checks`: data that is wrong is an error that says which and where."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import by_axis_type, mesh_of

import jax_kvblock as kv
from jax_kvblock.core import debug
from jax_kvblock.parallel import (
    context_parallel_attention,
    from_zigzag,
    shard_positions,
    to_zigzag,
)
from jax_kvblock.parallel.strategy import STRATEGIES

pytestmark = pytest.mark.usefixtures("forgotten")
SPEC = kv.BlockSpec(3, 2, 4, 2, 16, "float32")
BLOCKS = 5
Q = np.ones((3, 4, 16), np.float32)
KEYS = np.ones((3, 2, 16), np.float32)
BLOCK = np.ones((2, *SPEC.block_shape), np.float32)
GOOD = {
    "tables": [[1, 4], [2, -1]],
    "lens": [8, 3],
    "starts": [0, 1, 3],
    "layer": 2,
    "slots": [5, -1, 19],
    "ids": [4, 0],
    "others": [1, -1],
}
Arrays = dict[str, Any]


def pool() -> kv.KVPool:
    return kv.KVPool.zeros(SPEC, BLOCKS)


def attend(x: Arrays) -> Any:
    return kv.paged_attention(
        Q, pool(), x["layer"], x["tables"], x["lens"], query_start=x["starts"]
    )


def attend_padded(x: Arrays) -> Any:
    q = np.ones((2, 2, 4, 16), np.float32)
    given = (q, pool(), x["layer"], x["tables"], x["lens"])
    return kv.paged_attention(*given, q_lens=x["ids"])


def attend_a_part(x: Arrays) -> Any:
    given = (Q[:, :2], pool(), 1, x["tables"], x["lens"])
    heads = (x["layer"], 4)
    return kv.paged_attention(*given, query_start=x["starts"], q_heads=heads)


def append(x: Arrays) -> Any:
    return kv.append_kv(pool(), x["layer"], KEYS, KEYS, x["slots"])


def append_quantized(x: Arrays) -> Any:
    small = kv.KVPool.zeros(SPEC.replace(dtype="int8"), BLOCKS)
    return kv.append_kv(small, x["layer"], KEYS, KEYS, x["slots"], k_scale=1, v_scale=1)


def rope(x: Arrays) -> Any:
    at = np.arange(3)
    return kv.rope_append(Q, KEYS, KEYS, pool(), x["layer"], x["slots"], at, theta=1e4)


def gather(x: Arrays) -> Any:
    return kv.gather_blocks(pool(), x["ids"])


def gather_layer(x: Arrays) -> Any:
    return kv.gather_kv(pool(), x["layer"], x["ids"])


def scatter(x: Arrays) -> Any:
    return kv.scatter_blocks(pool(), x["ids"], BLOCK, "NHD")


def copy(x: Arrays) -> Any:
    return kv.copy_blocks(pool(), x["ids"], x["others"])


def transfer(x: Arrays) -> Any:
    larger = kv.KVPool.zeros(SPEC, BLOCKS + 1)
    return kv.transfer_blocks(larger, x["ids"], pool(), x["others"])


# A function, what is wrong in its arguments, the error outside of jit, its text.
Wrong = tuple[Callable[[Arrays], Any], Arrays, type[Exception], str]
WRONG: dict[str, Wrong] = {
    "an id of a table": (
        attend,
        {"tables": [[1, 5], [2, -1]]},
        IndexError,
        r"paged_attention: block_tables\[0, 1\] is 5, and the pool's blocks are 0 to 4",
    ),
    "an id below -1": (attend, {"tables": [[1, 2], [-2, 9]]}, IndexError,
        r"block_tables\[1, 0\] is -2"),
    "a length beyond the table": (attend, {"lens": [3, 9]}, IndexError,
        r"kv_lens\[1\] is 9, outside of what block_tables has room for, 0 to 8"),
    "a length below 0": (attend, {"lens": [-1, 3]}, IndexError, r"kv_lens\[0\] is -1"),
    "a start that falls": (attend, {"starts": [0, 3, 2]}, ValueError,
        r"query_start\[2\] is 2, less than query_start\[1\], which is 3"),
    "a start beyond the tokens": (attend, {"starts": [0, 1, 4]}, IndexError,
        r"query_start\[2\] is 4, outside of q's tokens and their end, 0 to 3"),
    "a layer of attention": (attend, {"layer": 3}, IndexError,
        "layer is 3, outside of the pool's layers, 0 to 2"),
    "queries of a sequence": (attend_padded, {"ids": [1, 3]}, IndexError,
        r"q_lens\[1\] is 3, outside of the queries of a sequence, 0 to 2"),
    "a part of the heads": (attend_a_part, {"layer": 1}, IndexError,
        r"q_heads\[0\] is 1, and must be a multiple of 2 below 4"),
    "a slot": (append, {"slots": [5, 20, 1]}, IndexError,
        r"append_kv: slots\[1\] is 20, and the pool's slots are 0 to 19"),
    "slots that repeat": (append, {"slots": [7, -1, 7]}, ValueError,
        r"append_kv: slots\[0\] and slots\[2\] are both 7"),
    "a layer of an append": (append, {"layer": -1}, IndexError,
        "append_kv: layer is -1, outside of the pool's layers"),
    "a slot of 8 bits": (append_quantized, {"slots": [5, 20, 1]}, IndexError,
        r"append_kv: slots\[1\] is 20"),
    "a slot of a rotation": (rope, {"slots": [5, -3, 1]}, IndexError,
        r"rope_append: slots\[1\] is -3"),
    "a layer of a rotation": (rope, {"layer": 7}, IndexError,
        "rope_append: layer is 7"),
    "gathered": (gather, {"ids": [0, 6]}, IndexError,
        r"gather_blocks: ids\[1\] is 6, and the pool's blocks are 0 to 4"),
    "gathered of a layer": (gather_layer, {"ids": [5, 6]}, IndexError,
        r"gather_kv: ids\[0\] is 5"),
    "scattered": (scatter, {"ids": [5, 0]}, IndexError, r"scatter_blocks: ids\[0\]"),
    "scattered twice": (scatter, {"ids": [2, 2]}, ValueError,
        r"scatter_blocks: ids\[0\] and ids\[1\] are both 2"),
    "copied from": (copy, {"ids": [0, 5]}, IndexError,
        r"copy_blocks: src_ids\[1\] is 5"),
    "copied to": (copy, {"others": [9, 0]}, IndexError,
        r"copy_blocks: dst_ids\[0\] is 9"),
    "copied to twice": (copy, {"others": [3, 3]}, ValueError,
        r"copy_blocks: dst_ids\[0\] and dst_ids\[1\] are both 3"),
    "transferred": (transfer, {"ids": [5, 6]}, IndexError,
        r"transfer_blocks: src_ids\[1\] is 6"),
    "transferred to": (transfer, {"others": [5, 1]}, IndexError,
        r"transfer_blocks: dst_ids\[0\] is 5"),
}  # fmt: skip


def arrays(function: Callable[[Arrays], Any], changes: Arrays = {}) -> Arrays:  # noqa: B006
    good = GOOD | {"layer": 0} if function is attend_a_part else GOOD
    good = good | {"ids": [1, 2]} if function is attend_padded else good
    return {name: jnp.asarray(x, jnp.int32) for name, x in (good | changes).items()}


@pytest.mark.cases(99)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_where_it_is_called(name):
    function, changes, error, message = WRONG[name]
    with kv.debug_checks(), pytest.raises(error, match=message):
        function(arrays(function, changes))


# What goes its own way.
IN_JIT = ["an id of a table", "a start that falls", "a slot", "a slot of 8 bits"]
IN_JIT += ["a layer of a rotation", "gathered of a layer", "copied to twice"]


@pytest.mark.parametrize("name", IN_JIT)
def test_inside_of_jit_the_program_fails(name):
    function, changes, _, message = WRONG[name]
    run = jax.jit(function)
    with kv.debug_checks():
        jax.block_until_ready(run(arrays(function)))
        fails(message, run, arrays(function, changes))
        jax.block_until_ready(run(arrays(function)))


def fails(message: str, function: Any, *args: Any) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(function(*args))


FUNCTIONS = dict.fromkeys(function for function, *_ in WRONG.values())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_what_is_right_goes_through(function):
    want = function(arrays(function))
    with kv.debug_checks():
        for run in (function, jax.jit(function)):
            got = run(arrays(function))
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_array_equal(x, y)


def test_ids_behind_the_end_of_a_sequence_are_not_looked_at():
    with kv.debug_checks():
        attend(arrays(attend, {"tables": [[1, 4], [2, 99]]}))


# ---- inside of JAX -------------------------------------------------------------------

ID = "an id of a table"
MESSAGE = r"block_tables\[0, 1\] is 5"


def wrong_tables() -> Arrays:
    return arrays(attend, WRONG[ID][1])


def test_vmap():
    """Of one member, the place in it."""
    both = jax.tree.map(lambda *x: jnp.stack(x), arrays(attend), wrong_tables())
    with kv.debug_checks():
        fails(MESSAGE, jax.jit(jax.vmap(attend)), both)


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_loops(loop):
    """A layer that one step alone gets wrong."""

    def layers(x: Arrays, count: Any) -> Any:
        def one(state: Any, layer: Any) -> Any:
            return state + attend(x | {"layer": layer}), None

        if loop == "scan":
            return jax.lax.scan(one, jnp.zeros(Q.shape), jnp.arange(4))[0]
        body = lambda i, state: one(state, i)[0]  # noqa: E731
        return jax.lax.fori_loop(0, count, body, jnp.zeros(Q.shape))

    with kv.debug_checks():
        run = jax.jit(layers)
        fails("layer is 3, outside of", run, arrays(attend), jnp.int32(4))
        if loop == "while":
            jax.block_until_ready(run(arrays(attend), jnp.int32(3)))


@by_axis_type
def test_meshes(axis_type, four_cpus):
    mesh = mesh_of(axis_type)
    whole = NamedSharding(mesh, P())
    run = jax.jit(attend)
    with jax.set_mesh(mesh), kv.debug_checks():
        fails(MESSAGE, run, jax.device_put(wrong_tables(), whole))
        jax.block_until_ready(run(jax.device_put(arrays(attend), whole)))


def test_shard_map(four_cpus):
    """Each device has tables of its own; those of one are wrong."""
    mesh = mesh_of(shape=(2, 2))
    both = jax.tree.map(lambda *x: jnp.stack(x), arrays(attend), wrong_tables())

    def local(x: Arrays) -> Any:
        return attend(jax.tree.map(lambda a: a[0], x))[None]

    run = jax.shard_map(
        local, mesh=mesh, in_specs=P("b"), out_specs=P("b"), check_vma=False
    )
    with kv.debug_checks():
        fails(MESSAGE, jax.jit(run), both)


def over_devices(cu: jax.Array, strategy: str = "ring") -> Any:
    """Attention over four devices, each of which has 8 rows."""
    x = jnp.ones((32, 4, 8))
    attend = lambda x, cu: context_parallel_attention(  # noqa: E731
        x, x, x, axis_name="b", strategy=strategy, causal=True, cu_seqlens=cu
    )
    mesh = mesh_of(shape=(4, 1))
    return jax.shard_map(attend, mesh=mesh, in_specs=(P("b"), P()), out_specs=P("b"))(
        x, cu
    )


def positions(cu: jax.Array) -> Any:
    local = lambda cu: shard_positions(8, axis_name="b", cu_seqlens=cu)  # noqa: E731
    mesh = mesh_of(shape=(4, 1))
    return jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("b"))(cu)


def test_how_long_documents_are(four_cpus):
    """Longer ones than `max_seqlen` says; without checks nobody knows."""
    x = jnp.ones((32, 2, 8))
    attend = lambda x, cu: context_parallel_attention(  # noqa: E731
        x, x, x, axis_name="b", layout="contiguous", cu_seqlens=cu, max_seqlen=20
    )
    mesh = mesh_of(shape=(4, 1))
    over = jax.shard_map(attend, mesh=mesh, in_specs=(P("b"), P()), out_specs=P("b"))
    run = jax.jit(over)
    good, longer = (jnp.asarray(cu, jnp.int32) for cu in ([0, 12, 32], [0, 11, 32]))
    jax.block_until_ready(run(x, longer))
    with kv.debug_checks():
        jax.block_until_ready(run(x, good))
        words = "max_seqlen must be at least the rows of the longest .* 21, got 20"
        fails(f"context_parallel_attention: {words}", run, x, longer)


BY_BOUNDARIES = {
    **{
        f"context_parallel_attention by {strategy}": functools.partial(
            over_devices, strategy=strategy
        )
        for strategy in STRATEGIES
    },
    "shard_positions": positions,
    "to_zigzag": lambda cu: to_zigzag(jnp.ones(32), 4, axis=0, cu_seqlens=cu),
    "from_zigzag": lambda cu: from_zigzag(jnp.ones(32), 4, axis=0, cu_seqlens=cu),
}


@pytest.mark.parametrize("where", BY_BOUNDARIES)
def test_boundaries_of_documents_in_zigzag(where, four_cpus):
    """Without checks nobody knows traced ones.

    With them no device waits in a collective for those that have failed.
    """
    run = jax.jit(BY_BOUNDARIES[where])
    where = where.split()[0]
    cu = [jnp.asarray(x, jnp.int32) for x in ([0, 16, 32], [0, 24, 16], [0, 12, 32])]
    good, falling, odd = cu
    jax.block_until_ready(run(odd))
    with kv.debug_checks():
        jax.block_until_ready(run(good))
        fails(rf"{where}: cu_seqlens must rise .* got \[0, 24, 16\]", run, falling)
        fails(f"{where}: cu_seqlens must be multiples of 8, .* 12 at 1", run, odd)


def test_boundaries_where_the_compiler_cuts(four_cpus):
    """One program over four devices; and an automatic axis beside the shard_map.

    Good ones alone: of bad ones some devices may wait for one that has failed.
    """
    mesh = mesh_of(shape=(4, 1))
    x = jax.device_put(np.ones((32, 4, 8), np.float32), NamedSharding(mesh, P("b")))
    lay = jax.jit(lambda x, cu: to_zigzag(x, 4, axis=0, cu_seqlens=cu))
    mesh = mesh_of(shape=(2, 2))
    attend = jax.jit(jax.shard_map(
        lambda x, cu: context_parallel_attention(
            x, x, x, axis_name="b", strategy="ring", causal=True, cu_seqlens=cu
        ),
        mesh=mesh, in_specs=(P("b"), P()), out_specs=P("b"), axis_names={"b"},
    ))  # fmt: skip
    good = jnp.int32([0, 16, 32])
    with kv.debug_checks():
        jax.block_until_ready(attend(np.asarray(x), good))
        jax.block_until_ready(lay(x, good))


def test_what_comes_of_a_program_that_failed_fails_too():
    with kv.debug_checks():
        run = jax.jit(append)

        def two_steps() -> Any:
            made = run(arrays(append, {"slots": [5, 20, 1]}))
            return jax.jit(kv.gather_blocks)(made, jnp.arange(2))

        fails("append_kv: slots", two_steps)


# ---- on and off ----------------------------------------------------------------------


def test_on_and_off_are_programs_of_their_own():
    traced = []

    @jax.jit
    def run(x: Arrays) -> Any:
        traced.append(debug.enabled())
        return attend(x)

    wrong = wrong_tables()
    jax.block_until_ready(run(wrong))
    with kv.debug_checks():
        fails(MESSAGE, run, wrong)
        with kv.debug_checks(False):
            jax.block_until_ready(run(wrong))
    jax.block_until_ready(run(wrong))
    with kv.debug_checks():
        fails(MESSAGE, run, wrong)
    assert traced == [False, True]


@pytest.mark.parametrize("function", [attend, append, rope, gather, copy])
def test_off_the_program_is_what_it_was(function, monkeypatch):
    """The same text as without any check in the sources."""
    x = arrays(function)
    off = jax.jit(function).lower(x).as_text()
    with kv.debug_checks():
        on = jax.jit(function).lower(x).as_text()
    assert "callback" in on and "callback" not in off
    monkeypatch.setattr("jax_kvblock.paged.attention.check_data", lambda *_: None)
    monkeypatch.setattr(debug, "check", lambda *_, **__: None)
    without = jax.jit(lambda x: function(x)).lower(x).as_text()
    assert off.partition("func.func")[2] == without.partition("func.func")[2]


def test_off_nothing_goes_to_the_host():
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        jax.block_until_ready(attend(arrays(attend)))


def test_a_process_with_checks():
    script = (
        "import numpy as np, jax_kvblock as kv\n"
        "pool = kv.KVPool.zeros(kv.BlockSpec(1, 2, 4, 1, 8, 'float32'), 2)\n"
        "kv.gather_blocks(pool, np.array([2]))\n"
    )
    path = [str(Path(kv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    made = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=os.environ | {debug.ENVIRONMENT: "1", "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    assert "IndexError: gather_blocks: ids[0] is 2, and the pool's" in made.stderr
