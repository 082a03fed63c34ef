"""flash_attention under vmap: every subset of the arrays, each operand, at any axis."""

from __future__ import annotations

import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close
from attention_columns import BATCH, HEADS, Q_LEN, answer, ask, assert_all_close, inputs
from attention_model import (
    F32,
    Call,
    by_main_kernel,
    cast,
    draw,
    draw_segments,
    jit,
    truth,
)

from jax_kvblock import AttentionTiles, flash_attention

by_kernel_here = by_main_kernel()
NAMES = (
    "q", "k", "v", "bias", "sinks", "q_segments", "kv_segments", "q_lens", "kv_lens",
    "q_offset", "kv_offset", "indices", "counts",
)  # fmt: skip
ARRAYS = NAMES[:5]
LONG = 140  # two tiles of keys


def leaves(rng, i=0):
    """Every operand there is, by name; those of members `i` differ."""
    normal = lambda *shape: cast(rng.standard_normal(shape), F32)  # noqa: E731
    ints = lambda low, high, *shape: jnp.asarray(  # noqa: E731
        rng.integers(low, high, shape), jnp.int32
    )
    return {
        "q": normal(BATCH, Q_LEN, HEADS, 8),
        "k": normal(BATCH, LONG, 2, 8),
        "v": normal(BATCH, LONG, 2, 8),
        "bias": normal(1, HEADS, Q_LEN, LONG),
        "sinks": normal(HEADS),
        "q_segments": jnp.asarray(draw_segments(rng, BATCH, Q_LEN)),
        "kv_segments": jnp.asarray(draw_segments(rng, BATCH, LONG)),
        "q_lens": ints(2, Q_LEN + 1, BATCH),
        "kv_lens": ints(60, LONG + 1, BATCH),
        "q_offset": jnp.asarray(126 + 6 * i, jnp.int32),  # into the second tile
        "kv_offset": ints(0, 9, BATCH),
        "indices": jnp.asarray([[[[i % 2, 1 - i % 2]]]], jnp.int32),
        "counts": jnp.asarray([[[1 + i % 2]]], jnp.int32),
    }


def call_of(x, cotangents):
    """A call with these operands; the rest is absent."""
    operands = {
        n: x[n] for n in ("q_lens", "kv_lens", "q_offset", "kv_offset") if n in x
    }
    if "q_segments" in x:
        operands["segment_ids"] = (x["q_segments"], x["kv_segments"])
    if "indices" in x:
        operands["tiles"] = AttentionTiles(x["indices"], x["counts"])
    arrays = {n: x[n] for n in ARRAYS if n in x}
    return Call(arrays, operands, {"causal": True}, cotangents)


def check_vmap(rng, implementation, dtype, batched, names=NAMES, gradients=False):
    """vmap over `batched` of the operands `names`, each at some axis, out at any."""
    names = [n for n in NAMES if n in {*names, "q_offset"}]  # or all keys are ahead
    size, draws = 3, [leaves(rng, i) for i in range(3)]
    shared = {n: draws[0][n] for n in names}
    each = [{n: (x if n in batched else shared)[n] for n in names} for x in draws]
    halves = lambda n, x: x.astype(dtype) if n in "qkv" else x  # noqa: E731
    each = [{n: halves(n, x) for n, x in one.items()} for one in each]
    axes = {n: None for n in names}
    stacked = dict(each[0])
    for n in batched:
        axes[n] = int(rng.integers(-1, each[0][n].ndim + 1))
        stacked[n] = jnp.stack([x[n] for x in each], axes[n])
    shape = (BATCH, Q_LEN, HEADS)
    cotangents = (
        cast(rng.standard_normal((*shape, 8)), dtype),
        cast(rng.standard_normal(shape), F32),
    )

    def f(x):
        attend = lambda x: call_of(x, None).run(implementation, return_lse=True)  # noqa: E731
        if not gradients:
            out, lse = attend(x)
            return {"out": out, "lse": lse}
        ints = {n: y for n, y in x.items() if n not in ARRAYS}
        floats = {n: y for n, y in x.items() if n in ARRAYS}
        _, pull = jax.vjp(lambda floats: attend(floats | ints), floats)
        return {f"d_{n}": g for n, g in pull(cotangents)[0].items()}

    out_axis = int(rng.integers(0, 2))
    got = jit(jax.vmap(f, (axes,), out_axis, axis_size=size))(stacked)
    wants = [truth(call_of(one, cotangents)) for one in each]
    same = [np.array_equal(wants[0][n], wants[1][n]) for n in got]
    assert not all(same), "members do not differ: the axis could be lost"
    for i, want in enumerate(wants):
        got_i = {n: jnp.take(x, i, out_axis) for n, x in got.items()}
        assert_all_close(got_i, {n: want[n] for n in got}, dtype)


SUBSETS = [subset for n in range(1, 6) for subset in itertools.combinations(ARRAYS, n)]


@by_kernel_here
@pytest.mark.parametrize("batched", SUBSETS, ids=",".join)
def test_vmap_over_subsets_of_the_arrays(rng, implementation, dtype, batched):
    names = ARRAYS if {"bias", "sinks"} & set(batched) else ARRAYS[:3]
    check_vmap(rng, implementation, dtype, batched, names)


@by_kernel_here
@pytest.mark.parametrize("batched", [(name,) for name in NAMES[5:]], ids=",".join)
def test_vmap_over_one_operand(rng, implementation, dtype, batched):
    """The others have no such axis."""
    partners = {"q_segments": "kv_segments", "indices": "counts"}
    partners |= {b: a for a, b in partners.items()}
    (name,) = batched
    names = [n for n in NAMES if n in {*ARRAYS[:3], name, partners.get(name)}]
    check_vmap(rng, implementation, dtype, batched, names)


def random_subset(seed):
    rng = np.random.default_rng(zlib.crc32(f"subset {seed}".encode()))
    return tuple(n for n in NAMES if rng.random() < 0.5)


@by_kernel_here
@pytest.mark.parametrize(
    "batched", [*map(random_subset, range(6)), NAMES], ids=",".join
)
def test_vmap_over_subsets_of_everything(rng, implementation, dtype, batched):
    check_vmap(rng, implementation, dtype, batched)


@by_kernel_here
@pytest.mark.parametrize(
    "batched",
    [("q",), ("k",), ("v",), ("bias",), ("sinks",), ("q", "bias"), ("k", "v", "sinks")],
    ids=",".join,
)
def test_vmap_of_grad_over_subsets(rng, implementation, dtype, batched):
    check_vmap(rng, implementation, dtype, batched, ARRAYS, gradients=True)


@by_kernel_here
@pytest.mark.parametrize("seed", [100, 101])
def test_vmap_of_grad_over_subsets_of_everything(rng, implementation, dtype, seed):
    check_vmap(rng, implementation, dtype, random_subset(seed), gradients=True)


@by_kernel_here
def test_nested_vmap(rng, implementation, dtype):
    """Some operands in the outer axis, some in the inner, some in both."""
    outer, inner = {"q", "bias", "q_lens", "v"}, {"q", "k", "sinks", "kv_lens"}
    names = ("q", "k", "v", "bias", "sinks", "q_lens", "kv_lens")
    grid = [[leaves(rng) for _ in range(2)] for _ in range(3)]
    halves = lambda n, x: x.astype(dtype) if n in "qkv" else x  # noqa: E731

    def pick(n, i, j):
        return halves(n, grid[i if n in outer else 0][j if n in inner else 0][n])

    stacked = {}
    for n in names:
        columns = range(2) if n in inner else range(1)
        rows = range(3) if n in outer else range(1)
        x = jnp.stack([jnp.stack([pick(n, i, j) for j in columns]) for i in rows])
        x = x if n in inner else x[:, 0]
        stacked[n] = x if n in outer else x[0]
    f = lambda x: call_of(x, None).run(implementation, return_lse=True)  # noqa: E731
    axes = lambda group: ({n: 0 if n in group else None for n in names},)  # noqa: E731
    got = jit(jax.vmap(jax.vmap(f, axes(inner)), axes(outer)))(stacked)
    cotangents = jnp.zeros((BATCH, Q_LEN, HEADS, 8)), jnp.zeros((BATCH, Q_LEN, HEADS))
    for i, j in np.ndindex(3, 2):
        one = call_of({n: pick(n, i, j) for n in names}, cotangents)
        want = truth(one)
        assert_close(got[0][i, j], want["out"], dtype)
        assert_close(got[1][i, j], want["lse"])


@by_kernel_here
@pytest.mark.parametrize("batched", ["all", "boundaries", "arrays"])
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
def test_vmap_of_packed_calls(rng, implementation, dtype, batched, gradients):
    cu = [
        (jnp.asarray([i, 4, 9 - i], jnp.int32), jnp.asarray([0, 3 + i, 11], jnp.int32))
        for i in range(3)
    ]
    calls = [
        draw(rng, dtype, packed=True, q_len=9, kv_len=11, dim=8, causal=True)
        for _ in range(3)
    ]
    if batched == "arrays":
        cu = cu[:1] * 3
    if batched == "boundaries":
        calls = calls[:1] * 3
    calls = [c.replace(cu_seqlens=x) for c, x in zip(calls, cu, strict=True)]
    what = "gradients of q, k, v" if gradients else "forward"
    f = ask(what, implementation)
    axes = [0, 0, 0]
    parts = [inputs(c) for c in calls]
    stacked = list(jax.tree.map(lambda *x: jnp.stack(x), *parts))
    shared = {"all": (), "arrays": (1,), "boundaries": (0, 2)}[batched]
    for i in shared:
        axes[i], stacked[i] = None, parts[0][i]
    got = jit(jax.vmap(f, tuple(axes)))(*stacked)
    for i, call in enumerate(calls):
        want = answer(call, what)
        assert_all_close({n: x[i] for n, x in got.items()}, want, dtype)


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_vmap_of_packed_calls_is_one_call(rng, sinks):
    """Members' offsets are their own, and boundaries that lie outside stay at home."""
    cu = jnp.asarray([[2, 5, 9], [0, 0, 40], [4, 4, 6]], jnp.int32)
    offsets = jnp.asarray([[0, 1], [3, -2], [5, 0]], jnp.int32)
    calls = [
        draw(rng, F32, packed=True, q_len=9, kv_len=9, dim=8, causal=True)
        for _ in range(3)
    ]
    x = jax.tree.map(lambda *a: jnp.stack(a), *[c.arrays for c in calls])
    if sinks:
        x["sinks"] = cast(rng.standard_normal((3, 4)), F32)

    def attend(x, cu, offset):
        pair = {"cu_seqlens": (cu, cu), "q_offset": offset}
        return flash_attention(**x, **pair, causal=True, return_lse=True)

    loops = {"scan", "while"}
    made = jax.make_jaxpr(jax.vmap(attend))(x, cu, offsets)
    assert bool(loops & {e.primitive.name for e in made.eqns}) == sinks
    got = jit(jax.vmap(attend))(x, cu, offsets)
    for i, call in enumerate(calls):
        pair = (jnp.minimum(cu[i], 9),) * 2
        call = call.replace(cu_seqlens=pair, q_offset=offsets[i])
        want = truth(call.replace(sinks=x["sinks"][i]) if sinks else call)
        assert_close(got[0][i], want["out"])
        assert_close(got[1][i], want["lse"])


@pytest.mark.parametrize("packed", [False, True])
def test_vmap_of_nobody(packed):
    shape = (0, 5, 4, 8) if packed else (0, 2, 5, 4, 8)
    cu = jnp.asarray([0, 5], jnp.int32)
    options = {"cu_seqlens": (cu, cu)} if packed else {}
    attend = jax.vmap(lambda q: flash_attention(q, q, q, **options))
    assert attend(jnp.zeros(shape)).shape == shape


def test_vmap_of_an_empty_axis():
    q, k = jnp.zeros((0, 2, 5, 4, 8)), jnp.zeros((0, 2, 7, 2, 8))
    assert jax.vmap(flash_attention)(q, k, k).shape == (0, 2, 5, 4, 8)
    one = jnp.zeros((2, 7, 2, 8))
    attend = jax.vmap(flash_attention, (0, None, None))
    assert attend(q, one, one).shape == (0, 2, 5, 4, 8)
    slopes = jax.grad(lambda k: attend(q, k, k).sum())(one)
    np.testing.assert_array_equal(slopes, np.zeros(one.shape))


@pytest.mark.parametrize(
    "batched", [("bias",), ("q", "sinks"), NAMES], ids=["bias", "q,sinks", "all"]
)
def test_vmap_of_an_empty_axis_over_what_members_share(rng, batched):
    """out, lse and the gradients of arrays that no member reads: empty, or zeros."""
    x = {n: leaf for n, leaf in leaves(rng).items() if n in {*ARRAYS, *batched}}
    axes = {n: 0 if n in batched else None for n in x}
    empty = {n: leaf[None][:0] if n in batched else leaf for n, leaf in x.items()}
    arrays = {n: empty.pop(n) for n in ARRAYS}

    @functools.partial(jax.vmap, in_axes=(axes,))
    def attend(x):
        return call_of(x, None).run(return_lse=True)

    (out, lse), pull = jax.vjp(lambda arrays: attend(arrays | empty), arrays)
    assert out.shape == (0, BATCH, Q_LEN, HEADS, 8)
    assert lse.shape == (0, BATCH, Q_LEN, HEADS)
    (slopes,) = pull((out, lse))
    for name, slope in slopes.items():
        np.testing.assert_array_equal(slope, np.zeros(arrays[name].shape))


@pytest.mark.parametrize("batched", ["moves", "operand", "both"])
@pytest.mark.parametrize("name", ["bias", "sinks"])
@pytest.mark.parametrize("wanted", ["jvp", "hvp"])
def test_grad_of_vmap_over_an_operand_or_its_direction(rng, name, batched, wanted):
    """An operand that members share has as many rows as the way it moves."""
    x = {n: leaves(rng)[n] for n in (*ARRAYS[:3], name)}
    draw_one = lambda *lead: jnp.asarray(  # noqa: E731
        rng.standard_normal((*lead, *x[name].shape)), x[name].dtype
    )
    one = x[name] if batched == "moves" else draw_one(3)
    move = draw_one() if batched == "operand" else draw_one(3)
    axes = (None if batched == "moves" else 0, None if batched == "operand" else 0)

    def loss(one):
        arrays = {n: x[n] for n in "qkv"} | {name: one}
        return jnp.square(call_of(arrays, None).run()).sum()

    def turn(one, move):
        f = loss if wanted == "jvp" else jax.grad(loss)
        return jnp.sin(jax.jvp(f, (one,), (move,))[1]).sum()

    def by_vmap(one, move):
        return jax.vmap(turn, axes)(one, move).sum()

    def by_loop(one, move):
        pick = lambda a, axis, i: a if axis is None else a[i]  # noqa: E731
        return sum(
            turn(pick(one, axes[0], i), pick(move, axes[1], i)) for i in range(3)
        )

    by = (0, 1) if wanted == "jvp" else (1,)  # by both it is a third derivative
    found = jit(jax.value_and_grad(by_vmap, by))(one, move)
    asked = jit(jax.value_and_grad(by_loop, by))(one, move)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(asked), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
