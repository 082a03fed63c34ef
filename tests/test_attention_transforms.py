"""flash_attention under every transform: each cell of docs/attention.md's table.

The two sharded rows of that table are in test_attention_sharding.py.
"""

from __future__ import annotations

import collections
import itertools
import zlib

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import (
    BF16,
    F32,
    Call,
    assert_close,
    by_main_kernel,
    cast,
    draw,
    draw_segments,
    jit,
    plain_attention,
    truth,
)

from jax_kvblock import AttentionTiles, flash_attention
from jax_kvblock.attention import RESIDUAL_NAMES

FORWARD, BACKWARD = "kvblock_attention_forward", "kvblock_attention_backward"
BATCH, Q_LEN, KV_LEN, HEADS = 2, 5, 7, 4
SIZES = {"batch": BATCH, "q_len": Q_LEN, "kv_len": KV_LEN, "heads": HEADS, "dim": 8}

# ---- one call with everything, and what is asked of it -------------------------------

WHAT = {  # the columns of the table: the names of results, and which cotangents count
    "forward": (("out", "lse"), (1, 1)),
    "gradients of q, k, v": (("d_q", "d_k", "d_v"), (1, 0)),
    "gradients of bias, sinks": (("d_bias", "d_sinks"), (1, 0)),
    "gradients of lse": (("d_q", "d_k", "d_v", "d_bias", "d_sinks"), (0, 1)),
}
by_what = pytest.mark.parametrize("what", WHAT)
by_kernel_here = by_main_kernel()


def full(rng, dtype=F32, members=()):
    """A call with every kind of operand; `members` of it, stacked."""

    def one():
        call = draw(rng, dtype, **SIZES, causal=True)
        return call.replace(
            bias=cast(rng.standard_normal((1, HEADS, Q_LEN, KV_LEN)), F32),
            sinks=cast(rng.standard_normal(HEADS), F32),
            q_offset=jnp.asarray(rng.integers(0, 4, BATCH), jnp.int32),
            kv_lens=jnp.asarray(rng.integers(2, KV_LEN + 1, BATCH), jnp.int32),
        )

    if not members:
        return one()
    calls = [one() for _ in range(members)]
    parts = [(c.arrays, c.operands, c.cotangents) for c in calls]
    arrays, operands, cotangents = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    return Call(arrays, operands, calls[0].static, cotangents)


def member(call, i):
    take = lambda x: x[i]  # noqa: E731
    groups = (call.arrays, call.operands, call.cotangents)
    arrays, operands, cotangents = jax.tree.map(take, groups)
    return Call(arrays, operands, call.static, cotangents)


def ask(what, implementation, static=(("causal", True),), wrap=lambda f: f):
    """A function of (arrays, operands, cotangents) that gives this column's results.

    `wrap` transforms the call before it is differentiated.
    """
    names, _ = WHAT[what]

    def attend(arrays, operands):
        return flash_attention(
            **arrays,
            **operands,
            **dict(static),
            return_lse=True,
            implementation=implementation,
        )

    def f(arrays, operands, cotangents):
        if what == "forward":
            out, lse = wrap(attend)(arrays, operands)
            return {"out": out, "lse": lse}
        # Only what is asked for is differentiated.
        asked = {n: x for n, x in arrays.items() if f"d_{n}" in names}
        rest = {n: x for n, x in arrays.items() if n not in asked}
        call = lambda asked: wrap(attend)(rest | asked, operands)  # noqa: E731
        _, pull = jax.vjp(call, asked)
        (grads,) = pull(weigh(what, cotangents))
        return {f"d_{n}": g for n, g in grads.items()}

    return f


def weigh(what, cotangents):
    return tuple(x * w for x, w in zip(cotangents, WHAT[what][1], strict=True))


def answer(call, what):
    names, _ = WHAT[what]
    want = truth(call, weigh(what, call.cotangents))
    return {n: want[n] for n in names}


def answers(call, what, members=3):
    """One under the other."""
    each = [answer(member(call, i), what) for i in range(members)]
    return {n: np.stack([x[n] for x in each]) for n in each[0]}


def inputs(call):
    return call.arrays, call.operands, call.cotangents


def assert_all_close(got, want, dtype):
    assert set(got) == set(want)
    for name, x in got.items():
        try:
            assert_close(x, want[name], dtype)
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from None


# ---- the table -----------------------------------------------------------------------


@by_what
@by_kernel_here
def test_eager_and_jit(rng, implementation, dtype, what):
    call, f = full(rng, dtype), ask(what, implementation)
    want = answer(call, what)
    assert_all_close(f(*inputs(call)), want, dtype)
    assert_all_close(jit(f)(*inputs(call)), want, dtype)


@by_what
@by_kernel_here
def test_scan(rng, implementation, dtype, what):
    call, f = full(rng, dtype, members=3), ask(what, implementation)
    step = lambda count, xs: (count + 1, f(*xs))  # noqa: E731
    count, got = jit(lambda xs: jax.lax.scan(step, 0, xs))(inputs(call))
    assert count == 3
    assert_all_close(got, answers(call, what), dtype)


@by_what
@by_kernel_here
def test_vmap(rng, implementation, dtype, what):
    """Of the call and of its gradient; every operand has the axis."""
    call, f = full(rng, dtype, members=3), ask(what, implementation)
    assert_all_close(jit(jax.vmap(f))(*inputs(call)), answers(call, what), dtype)


@by_what
@by_kernel_here
def test_grad_of_vmap(rng, implementation, dtype, what):
    call = full(rng, dtype, members=3)
    f = ask(what, implementation, wrap=jax.vmap)
    assert_all_close(jit(f)(*inputs(call)), answers(call, what), dtype)


@by_what
@by_kernel_here
def test_grad_of_vmap_sums_what_is_shared(rng, implementation, dtype, what):
    """k, bias and sinks are one for all members: their gradients are sums."""
    call = full(rng, dtype, members=3)
    shared = ("k", "bias", "sinks")
    first = {n: call.arrays[n][0] for n in shared}
    axes = {n: None if n in shared else 0 for n in call.arrays}
    f = ask(what, implementation, wrap=lambda f: jax.vmap(f, (axes, 0)))
    arrays = call.arrays | first
    got = jit(f)(arrays, call.operands, call.cotangents)
    spread = {n: jnp.stack([x] * 3) for n, x in first.items()}
    want = answers(call.replace(**spread), what)
    for name in shared:
        if f"d_{name}" in want:
            want[f"d_{name}"] = want[f"d_{name}"].sum(0)
    assert_all_close(got, want, dtype)


@by_what
@by_kernel_here
def test_checkpoint(rng, implementation, dtype, what):
    call = full(rng, dtype)
    f = ask(what, implementation, wrap=jax.checkpoint)
    assert_all_close(jit(f)(*inputs(call)), answer(call, what), dtype)


@pytest.mark.parametrize("which", ["out", "lse"])
@by_kernel_here
def test_jacrev(rng, implementation, dtype, which):
    """Row by row of the Jacobian, which is a vmap of the backward pass."""
    call = draw(rng, dtype, batch=1, q_len=2, kv_len=3, heads=2, kv_heads=1, dim=8)
    call = call.replace(
        causal=True,
        q_offset=jnp.int32(1),
        bias=cast(rng.standard_normal((1, 1, 2, 3)), F32),
        sinks=cast([0.5, -1], F32),
    )

    def f(arrays):
        out, lse = call.replace(**arrays).run(implementation, return_lse=True)
        return out if which == "out" else lse

    got = jit(jax.jacrev(f))(call.arrays)
    shapes = [x.shape for x in call.cotangents]
    at = 0 if which == "out" else 1
    for place in np.ndindex(shapes[at]):
        cotangents = [np.zeros(shape) for shape in shapes]
        cotangents[at][place] = 1
        want = truth(call, tuple(cotangents))
        for name, jacobian in got.items():
            assert_close(jacobian[place], want[f"d_{name}"], dtype)


def exported(f, *args):
    names = (FORWARD, f"{BACKWARD}_kv", f"{BACKWARD}_q", f"{BACKWARD}_bias")
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    return jax.export.export(jax.jit(f), disabled_checks=checks)(*args)


@by_what
@by_kernel_here
def test_export(rng, implementation, dtype, what):
    call, f = full(rng, dtype), ask(what, implementation)
    got = jit(exported(f, *inputs(call)).call)(*inputs(call))
    assert_all_close(got, answer(call, what), dtype)


@by_what
@by_kernel_here
def test_export_survives_serialization(rng, implementation, dtype, what):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    call, f = full(rng, dtype), ask(what, implementation)
    data = exported(f, *inputs(call)).serialize()
    got = jit(jax.export.deserialize(data).call)(*inputs(call))
    assert_all_close(got, answer(call, what), dtype)


def test_forward_mode_raises(rng):
    """As docs/attention.md says: reverse mode only."""
    call = draw(rng, **SIZES)
    with pytest.raises(TypeError, match="custom_vjp"):
        q = call.arrays["q"]
        jax.jvp(lambda q: call.replace(q=q).run(), (q,), (q,))


# ---- vmap over subsets ---------------------------------------------------------------

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
        assert_close(got[1][i, j], want["lse"], dtype)


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


def test_vmap_of_an_empty_axis():
    q, k = jnp.zeros((0, 2, 5, 4, 8)), jnp.zeros((0, 2, 7, 2, 8))
    assert jax.vmap(flash_attention)(q, k, k).shape == (0, 2, 5, 4, 8)
    one = jnp.zeros((2, 7, 2, 8))
    attend = jax.vmap(flash_attention, (0, None, None))
    assert attend(q, one, one).shape == (0, 2, 5, 4, 8)
    slopes = jax.grad(lambda k: attend(q, k, k).sum())(one)
    np.testing.assert_array_equal(slopes, np.zeros(one.shape))


# ---- what a program looks like -------------------------------------------------------


def equations(jaxpr):
    """All of them, those inside others too."""
    for eqn in jaxpr.eqns:
        yield eqn
        is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")  # noqa: E731
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def count_of(f, *args):
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return collections.Counter(eqn.primitive.name for eqn in equations(jaxpr))


def test_vmap_folds_into_one_call(rng):
    """And a bias that members share is handed on as it is."""
    call = full(rng, members=3)
    arrays = call.arrays | {"bias": call.arrays["bias"][0]}
    axes = {n: None if n == "bias" else 0 for n in arrays}
    f = ask("forward", None)
    jaxpr = jax.make_jaxpr(jax.vmap(f, (axes, 0, 0)))(
        arrays, call.operands, call.cotangents
    ).jaxpr
    (eqn,) = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == FORWARD)
    shapes = [x.aval.shape for x in eqn.invars]
    assert (3 * BATCH, Q_LEN, HEADS, 8) in shapes
    assert (1, HEADS, Q_LEN, KV_LEN) in shapes


POLICIES = jax.checkpoint_policies


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [
        (POLICIES.save_only_these_names(*RESIDUAL_NAMES), 1),
        (POLICIES.everything_saveable, 1),
        (POLICIES.nothing_saveable, 2),
        (None, 2),
        (POLICIES.save_only_these_names(*RESIDUAL_NAMES[:3]), 2),
        (POLICIES.save_only_these_names(*RESIDUAL_NAMES[3:]), 1),
    ],
    ids=["all names", "everything", "nothing", "default", "q k v", "out and lse"],
)
def test_checkpoint_policies(rng, policy, forwards):
    """The forward pass is in the backward only where its results were not kept."""
    call = full(rng)

    def layer(arrays, w):
        arrays = arrays | {"q": arrays["q"] @ w}
        return call.replace(**arrays).run()

    kept = jax.checkpoint(layer, policy=policy)
    slopes = lambda f: jax.grad(lambda x, w: f(x, w).sum(), (0, 1))  # noqa: E731
    w = cast(rng.standard_normal((8, 8)), F32)
    found = count_of(slopes(kept), call.arrays, w)
    assert (found[FORWARD], found[BACKWARD]) == (forwards, 1)
    if "all" in str(policy) or forwards == 2:
        return
    got, want = (jit(slopes(f))(call.arrays, w) for f in (kept, layer))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b)


def test_saved_names_spare_the_projections_too(rng):
    """q, k and v have names: with all of them kept no product before them is redone."""
    call = draw(rng, **SIZES)
    w = cast(rng.standard_normal((8, 8)), F32)

    def layer(arrays, w):
        projected = {n: arrays[n] @ w for n in "qkv"}
        return flash_attention(**projected)

    def products(policy):
        f = jax.checkpoint(layer, policy=policy)
        slopes = jax.grad(lambda x, w: f(x, w).sum(), (0, 1))
        return count_of(slopes, call.arrays, w)["dot_general"]

    saved = products(POLICIES.save_only_these_names(*RESIDUAL_NAMES))
    assert products(POLICIES.nothing_saveable) == saved + 3
    assert products(POLICIES.everything_saveable) == saved


def test_layers_in_a_scan_with_checkpoint(rng):
    """A small transformer: gradients as those of plain jnp, layer by layer."""
    call = draw(rng, q_len=6, kv_len=6, heads=4, kv_heads=4, dim=8)
    w = cast(rng.standard_normal((3, 8, 8)) / 3, F32)
    mask = jnp.tril(jnp.ones((6, 6), bool))

    def ours(x, y):
        return flash_attention(x, y, y, causal=True)

    def theirs(x, y):
        none = {"bias": jnp.zeros((1, 1, 1, 1)), "sinks": jnp.full(4, -jnp.inf)}
        arrays = {"q": x, "k": y, "v": y} | none
        alive = jnp.ones((2, 6), bool)
        return plain_attention(arrays, mask, alive, 8**-0.5, 0.0)[0]

    def loss(attend, policy, x, w):
        def layer(x, w):
            return x + attend(x, x @ w), None

        layer = jax.checkpoint(layer, policy=policy)
        return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

    policy = POLICIES.save_only_these_names(*RESIDUAL_NAMES)
    x = call.arrays["q"]
    slopes = lambda attend: jit(  # noqa: E731
        jax.grad(lambda x, w: loss(attend, policy, x, w), (0, 1))
    )(x, w)
    for got, want in zip(slopes(ours), slopes(theirs), strict=True):
        assert_close(got, want)


def test_inside_while_and_cond(rng):
    call = full(rng)
    want = truth(call)["out"]

    def twice(i, y):
        return jax.lax.cond(i == 0, lambda: call.run(), lambda: y)

    got = jit(lambda y: jax.lax.fori_loop(0, 2, twice, y))(jnp.zeros(want.shape))
    assert_close(got, want)


@pytest.mark.gpu
def test_command_buffers(rng):
    """Captured into CUDA graphs, run after run gives the same."""
    call = draw(rng, BF16, q_len=256, kv_len=256, dim=64, causal=True)
    options = {"xla_gpu_graph_min_graph_size": 1}
    options["xla_gpu_enable_command_buffer"] = "FUSION,CUBLAS,CUSTOM_CALL"

    @jax.jit
    def plainly(arrays):
        return ask("gradients of q, k, v", None)(arrays, {}, call.cotangents)

    want = plainly(call.arrays)
    captured = jax.jit(plainly.__wrapped__).lower(call.arrays).compile(options)
    for _ in range(3):
        got = captured(call.arrays)
        for name, x in got.items():
            assert_close(x, want[name], BF16)
