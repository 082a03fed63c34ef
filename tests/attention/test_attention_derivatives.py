"""flash_attention's first and second derivatives, in either mode, are float64's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close, plain_attention
from attention_columns import assert_all_close as all_close
from attention_columns import full
from attention_model import (
    BF16,
    F16,
    F32,
    Call,
    by_main_kernel,
    by_turns,
    cast,
    draw,
    draw_bias,
    draw_segments,
    draw_tiles,
    f64,
    jit,
    who_attends,
)
from judge import assert_rows_near, row_maximum

import jax_kvblock as kv
from jax_kvblock import AttentionTiles, flash_attention
from jax_kvblock.attention import RESIDUAL_NAMES, arguments, ops, primitive

# ---- what is asked for ---------------------------------------------------------------


def along(f, way):
    """The derivative of `f` in a direction, a function of the same arrays."""
    return lambda x: jax.jvp(f, (x,), (way,))[1]


def loss_of(attend):
    """Squares, so that the derivatives of out and lse matter as themselves do."""

    def loss(x):
        return sum(jnp.sum(jnp.square(y.astype(lse_of(y)))) for y in attend(x))

    return loss


def lse_of(y):
    return jnp.float64 if y.dtype == jnp.float64 else jnp.float32


def without_infinities(attend):
    """lse is 0 where a row sees nothing."""

    def finite(x):
        out, lse = attend(x)
        return out, jnp.where(jnp.isneginf(lse), 0, lse)

    return finite


def total(tree):
    return sum(jnp.sum(y.astype(F32)) for y in jax.tree.leaves(tree))


def attention_of(call, implementation=None):
    """(out, lse) as a function of the differentiable arrays."""

    def attend(x):
        arrays = dataclasses.replace(call, arrays=x)
        return arrays.run(implementation, return_lse=True)

    return attend


def tiny(rng, dtype=F32):
    """A call with every kind of operand."""
    return full(rng, dtype).replace(softcap=3.0)


def tiny_packed(rng, dtype=F32):
    call = draw(rng, dtype, packed=True, q_len=9, kv_len=11, dim=8, causal=True)
    ends = (i32(1, 4, 9), i32(0, 3, 11))
    return call.replace(cu_seqlens=ends, sinks=cast(SINKS, F32))


def named(what, y):
    if isinstance(y, tuple):
        y = dict(zip(("out", "lse"), y, strict=True))
    return {f"{what}, {name}": a for name, a in y.items()}


def first_and_second(attend, x, one, two):
    """Along `one`, along both, and the Hessian of a loss times `one`."""
    attend = without_infinities(attend)
    return {
        **named("jvp", along(attend, one)(x)),
        **named("jvp of jvp", along(along(attend, one), two)(x)),
        **named("hvp", along(jax.grad(loss_of(attend)), one)(x)),
    }


def every_order(attend, x, one, two):
    """The same, and the Hessian's product by every order of the modes."""
    loss = loss_of(without_infinities(attend))

    def weighed(x):
        slopes = jax.grad(loss)(x)
        return sum(
            jnp.sum(slopes[n].astype(lse_of(a)) * a.astype(lse_of(a)))
            for n, a in one.items()
        )

    return {
        **first_and_second(attend, x, one, two),
        **named("hvp by grad of jvp", jax.grad(along(loss, one))(x)),
        **named("hvp by grad of grad", jax.grad(weighed)(x)),
    }


# ---- the truth, and plain jnp beside it ----------------------------------------------


@functools.partial(jit, static_argnums=5)
def _of_plain(arrays, one, two, mask, alive, how):
    scale, cap, packed = how

    def attend(x):
        if packed:
            x = x | {n: x[n][None] for n in "qkv"}
        n = x["q"].shape[2]
        none = {"bias": jnp.zeros((1, 1, 1, 1), F32), "sinks": jnp.full(n, -jnp.inf)}
        out, lse = plain_attention(none | x, mask, alive, scale, cap)
        return (out[0], lse[0]) if packed else (out, lse)

    finite = without_infinities(attend)
    return {
        **named("value", finite(arrays)),
        **named("jvp of two", along(finite, two)(arrays)),
        **first_and_second(attend, arrays, one, two),
    }


def of_plain(call: Call, one: Any, two: Any, dtype: Any) -> dict[str, np.ndarray]:
    """Plain jnp's in this dtype; in float64 it is the truth."""
    mask, alive = who_attends(call)
    scale = call.static.get("scale", call.arrays["q"].shape[-1] ** -0.5)
    how = (scale, call.static.get("softcap", 0.0), "cu_seqlens" in call.operands)

    def given(arrays):
        wide = dtype == jnp.float64
        return {n: jnp.asarray(f64(x), dtype if wide else x.dtype)
                for n, x in arrays.items()}  # fmt: skip

    with jax.enable_x64(True):
        arrays = [given(x) for x in (call.arrays, one, two)]
        got = _of_plain(*arrays, mask, alive, how)
    return {n: np.asarray(x) for n, x in got.items()}


def of_truth(name):
    """The name of what an order of modes has to give."""
    return name.replace(" by grad of jvp", "").replace(" by grad of grad", "")


def subtracted(want):
    """What out's tangents take away from a sum of rounded products, by name.

    Its largest number in each row. out' is a sum less lse' out; out'' is one less
    lse'' out and products of first tangents. Where a query sees one key all of it
    cancels, and plain jnp is exact there: it knows that p' is 0.
    """
    out, lse = (
        {n.removesuffix(f", {what}"): x for n, x in want.items() if n.endswith(what)}
        for what in ("out", "lse")
    )
    rows = {name: row_maximum(abs(x)) for name, x in out.items()}
    one, two, both = (abs(lse[n]) for n in ("jvp", "jvp of two", "jvp of jvp"))
    crossed = one * rows["jvp of two"] + two * rows["jvp"]
    return {
        "jvp, out": one * rows["value"],
        "jvp of jvp, out": (both + one * two) * rows["value"] + crossed,
    }


def assert_right(call, one, two, got):
    """As near to the truth as plain jnp is, row by row."""
    dtype = call.arrays["q"].dtype
    want, plain = (of_plain(call, one, two, dt) for dt in (jnp.float64, dtype))
    away = subtracted(want)
    for name, x in got.items():
        truth = of_truth(name)
        like = F32 if name.endswith("lse") else plain[truth].dtype
        assert x.dtype == like, name
        more = away.get(name, 0.0)
        assert_rows_near(name, x, want[truth], plain[truth], dtype, more)


def direction(rng, call):
    return {
        n: cast(rng.standard_normal(x.shape), x.dtype) for n, x in call.arrays.items()
    }


# ---- every mode and order ------------------------------------------------------------

SHAPE = {"batch": 2, "q_len": 140, "kv_len": 270, "heads": 4, "kv_heads": 2, "dim": 8}
SINKS = [2, -1, 0.5, 4]
i32 = lambda *x: jnp.asarray(x, jnp.int32)  # noqa: E731


def of_values(rng, dtype):
    return draw(rng, dtype, **SHAPE, value_dim=16)


def of_windows(rng, dtype):
    call = draw(rng, dtype, **SHAPE, causal=True, window=(60, None))
    return call.replace(softcap=1.5, q_offset=i32(99, 0))


def of_biases(rng, dtype):
    call = draw(rng, dtype, **SHAPE, sinks=cast(SINKS, F32), softcap=2.0)
    call = call.replace(bias=draw_bias(rng, call, (True, False), F32))
    return call.replace(q_lens=i32(140, 7), kv_lens=i32(30, 270))


def of_segments(rng, dtype):
    call = draw(rng, dtype, **SHAPE | {"kv_heads": 1}, scale=0.5)
    ids = (draw_segments(rng, 2, 140), draw_segments(rng, 2, 270))
    bias = draw_bias(rng, call, (False, True), dtype)
    return call.replace(segment_ids=ids, bias=bias)


def of_tiles(rng, dtype):
    call = draw(rng, dtype, **SHAPE | {"kv_heads": 4}, sinks=cast(SINKS, F32))
    return call.replace(tiles=draw_tiles(rng, call))


def of_packed(rng, dtype):
    call = draw(rng, dtype, **SHAPE, packed=True, causal=True)
    ends = (i32(3, 60, 60, 135), i32(0, 100, 120, 270))
    return call.replace(cu_seqlens=ends, sinks=cast(SINKS, F32))


CASES = {
    "values": of_values,
    "windows": of_windows,
    "biases": of_biases,
    "segments": of_segments,
    "tiles": of_tiles,
    "packed": of_packed,
}


@by_turns("name", CASES, F32, BF16, F16)
def test_every_order_and_mode(rng, implementation, dtype, name):
    call = CASES[name](rng, dtype)
    one, two = direction(rng, call), direction(rng, call)
    attend = attention_of(call, implementation)
    got = jit(functools.partial(every_order, attend))(call.arrays, one, two)
    assert_right(call, one, two, got)


def test_float64(rng):
    """Beside the truth itself: the formulas are exact."""
    call = tiny(rng)
    one, two = direction(rng, call), direction(rng, call)
    want = of_plain(call, one, two, jnp.float64)
    with jax.enable_x64(True):
        wide = [{n: jnp.asarray(x, jnp.float64) for n, x in arrays.items()}
                for arrays in (call.arrays, one, two)]  # fmt: skip
        got = jit(functools.partial(every_order, attention_of(call)))(*wide)
    for name, x in got.items():
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, want[of_truth(name)], rtol=1e-11, atol=1e-11)


def test_a_third_derivative_is_an_error_that_says_why(rng):
    call = tiny(rng)
    f = loss_of(attention_of(call))
    way = direction(rng, call)
    for second in (along(jax.grad(f), way), along(along(f, way), way)):
        for third in (along(second, way), jax.grad(lambda x, g=second: total(g(x)))):
            with pytest.raises(NotImplementedError, match=r"flash_attention: .* third"):
                jax.eval_shape(third, call.arrays)


def test_second_derivatives_are_linear_in_their_directions(rng):
    """And differentiable in these, in either mode: a Hessian is symmetric."""
    call = tiny(rng)
    one, two = direction(rng, call), direction(rng, call)
    f = loss_of(without_infinities(attention_of(call)))
    of_grad = lambda way: along(jax.grad(f), way)(call.arrays)  # noqa: E731
    of_jvp = lambda way: jax.grad(along(f, way))(call.arrays)  # noqa: E731

    @jit
    def everything(one, two):
        found = [of_grad(one)]
        for product in (of_grad, of_jvp):
            found += [along(product, one)(two), jax.vjp(product, two)[1](one)[0]]
        return found

    want, *got = everything(one, two)
    for found in got:
        all_close(found, want, F32)


# ---- under other transforms ----------------------------------------------------------

MEMBERS = 3
NAMES = ("q", "k", "v", "bias", "sinks")


@by_main_kernel()
@pytest.mark.parametrize(
    "batched",
    [(NAMES, NAMES), (NAMES, ()), ((), NAMES), (("q", "bias"), ("v", "sinks"))],
    ids=["all", "arrays", "directions", "some"],
)
def test_vmap(rng, implementation, dtype, batched):
    """Of first and second derivatives; the members share some arrays or directions."""
    calls = [tiny(rng, dtype) for _ in range(MEMBERS)]
    calls = [dataclasses.replace(c, operands=calls[0].operands) for c in calls]
    ways = [direction(rng, c) for c in calls]
    mapped = []
    for parts, names in zip(([c.arrays for c in calls], ways), batched, strict=True):
        mapped.append({n: 0 if n in names else None for n in NAMES})
        for part in parts:
            part |= {n: parts[0][n] for n in NAMES if n not in names}
    arrays, way = (
        {n: jnp.stack([x[n] for x in parts]) if axes[n] == 0 else parts[0][n]
         for n in NAMES}
        for parts, axes in zip(([c.arrays for c in calls], ways), mapped, strict=True)
    )  # fmt: skip
    f = functools.partial(first_and_second, attention_of(calls[0], implementation))
    got = jit(jax.vmap(f, (*mapped, mapped[1])))(arrays, way, way)
    for i, call in enumerate(calls):
        member = {name: x[i] for name, x in got.items()}
        assert_right(call, ways[i], ways[i], member)


@by_main_kernel()
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_derivatives_of_vmap(rng, implementation, dtype, packed):
    """k and the sinks are one for all: their parts of a product are sums."""
    draw_one = functools.partial(tiny_packed if packed else tiny, rng, dtype)
    first, *others = [draw_one() for _ in range(MEMBERS)]
    shared = ("k", "sinks")
    calls = [first]
    for call in others:
        same = {n: first.arrays[n] for n in shared}
        calls.append(dataclasses.replace(first, arrays=call.arrays | same))
    ways = [direction(rng, c) for c in calls]
    for way in ways:
        way |= {n: ways[0][n] for n in shared}
    axes = {n: None if n in shared else 0 for n in first.arrays}

    def stacked(parts):
        return {n: parts[0][n] if n in shared else jnp.stack([x[n] for x in parts])
                for n in axes}  # fmt: skip

    f = jax.vmap(attention_of(first, implementation), (axes,))
    arrays, way = stacked([c.arrays for c in calls]), stacked(ways)
    got = jit(functools.partial(every_order, f))(arrays, way, way)
    truths = [of_plain(c, w, w, jnp.float64) for c, w in zip(calls, ways, strict=True)]
    for name, x in got.items():
        each = np.stack([truth[of_truth(name)] for truth in truths])
        summed = name.startswith("hvp") and name.split(", ")[1] in shared
        assert_close(x, each.sum(0) if summed else each, dtype)


def test_jacfwd_and_hessian(rng):
    """Beside float64: each a vmap, of tangents or of products."""
    sizes = {"batch": 1, "q_len": 2, "kv_len": 3, "heads": 2, "kv_heads": 1, "dim": 8}
    call = draw(rng, **sizes, causal=True, q_offset=i32(1), softcap=3.0)

    @functools.partial(jit, static_argnums=0)
    def everything(attend, arrays):
        hessian = jax.hessian(loss_of(attend))(arrays)
        return jax.jacfwd(attend)(arrays), jax.jacrev(attend)(arrays), hessian

    got = everything(attention_of(call), call.arrays)
    mask, alive = who_attends(call)
    none = {"bias": jnp.zeros((1, 1, 1, 1)), "sinks": jnp.full(2, -jnp.inf)}
    with jax.enable_x64(True):
        plain = lambda x: plain_attention(none | x, mask, alive, 8**-0.5, 3.0)  # noqa: E731
        wide = {n: jnp.asarray(x, jnp.float64) for n, x in call.arrays.items()}
        want = everything(plain, wide)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(x, y, F32)


def test_layers_under_checkpoint_in_a_scan(rng):
    """Hessian-vector products through both; what is kept has its names."""
    call = draw(rng, q_len=5, kv_len=5, heads=2, kv_heads=2, dim=8)
    x, w = call.arrays["q"], cast(rng.standard_normal((3, 8, 8)) / 8, F32)
    policy = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
    mask, alive = jnp.tril(jnp.ones((5, 5), bool)), jnp.ones((2, 5), bool)
    none = {"bias": jnp.zeros((1, 1, 1, 1)), "sinks": jnp.full(2, -jnp.inf)}

    def theirs(q, k):
        arrays = none | {"q": q, "k": k, "v": k}
        return plain_attention(arrays, mask, alive, 8**-0.5, 0.0)[0]

    def product(attend, wrap, x, w):
        def loss(both):
            layer = wrap(lambda x, w: (x + attend(x, x @ w), None))
            return jnp.sum(jnp.square(jax.lax.scan(layer, *both)[0]))

        return along(jax.grad(loss), (x, w))((x, w))

    checkpoint = functools.partial(jax.checkpoint, policy=policy)
    ours = lambda q, k: flash_attention(q, k, k, causal=True)  # noqa: E731
    with jax.default_matmul_precision("highest"):  # a GPU's default is TF32
        got = jit(functools.partial(product, ours, checkpoint))(x, w)
    with jax.enable_x64(True):
        wide = (jnp.asarray(a, jnp.float64) for a in (x, w))
        want = jit(functools.partial(product, theirs, lambda f: f))(*wide)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


# ---- what is promised ----------------------------------------------------------------


def test_what_is_not_read_may_be_anything(rng):
    """Also in directions: NaN beyond the lengths and in tiles that are not listed."""
    call = of_tiles(rng, F32).replace(q_lens=i32(130, 5), kv_lens=i32(260, 150))
    listed = AttentionTiles(i32(1, 0).reshape(1, 1, 2, 1), i32(1, 1).reshape(1, 1, 2))
    call = call.replace(tiles=listed)  # nobody reads keys from 256 on
    ends = {"q": [130, 5], "k": [256, 150], "v": [256, 150]}

    def with_nan(arrays):
        hurt = dict(arrays)
        for name, lengths in ends.items():
            for b, end in enumerate(lengths):
                hurt[name] = hurt[name].at[b, end:].set(jnp.nan)
        return hurt

    one = direction(rng, call)
    f = jit(functools.partial(first_and_second, attention_of(call)))
    want = f(call.arrays, one, one)
    hurt = with_nan(one)
    got = f(with_nan(call.arrays), hurt, hurt)
    for name, x in got.items():
        np.testing.assert_array_equal(x, want[name], err_msg=name)


def test_rows_of_a_large_bias(rng):
    """Equal probabilities, whose derivatives are those of equal scores."""
    call = draw(rng, q_len=4, kv_len=6, heads=2, kv_heads=2, dim=8)
    bias = draw_bias(rng, call, (False, False), F32)
    call = call.replace(bias=bias.at[:, :, ::2].set(-1e9))
    call = call.replace(q=call.arrays["q"].at[:, ::2].set(0))
    one = direction(rng, call)
    attend = attention_of(call)
    alone = lambda x: (attend(x)[0],) * 2  # noqa: E731
    got = jit(functools.partial(first_and_second, alone))(call.arrays, one, one)
    # Of out alone a bias of 0 all over a row is the same.
    flat = call.replace(bias=bias.at[:, :, ::2].set(0))
    want = jit(functools.partial(first_and_second, alone))(flat.arrays, one, one)
    for name, x in got.items():
        assert_close(x, f64(want[name]))


def test_the_largest_score_moves_wherever_the_base_is(rng):
    """A kernel's base may lie MOST_ABOVE_BASE below it, and rounding adds to that."""
    call = draw(rng, q_len=4, kv_len=6, heads=2, kv_heads=2, dim=8)
    call = call.replace(bias=draw_bias(rng, call, (False, False), F32))
    one = direction(rng, call)
    config, x = arguments.normalize("a test", **call.arrays)
    o, lse = primitive.forward(config, x)
    excess = ops.MOST_ABOVE_BASE + 1e-4
    below = ops.LogSumExp(lse.rest + excess, lse.base - excess)
    (o_moves, lse_moves), (o_near, lse_near) = (
        primitive.tangent(config, x, o, parts, one) for parts in (lse, below)
    )
    np.testing.assert_allclose(o_near, o_moves, atol=1e-3)
    np.testing.assert_allclose(lse_near, lse_moves, atol=1e-3)


def test_parts_merge_under_derivatives(rng):
    """Two halves of the keys by their log-sum-exps, as docs/attention.md has it."""
    call = draw(rng, q_len=4, kv_len=6, heads=2, kv_heads=1, dim=8)
    one = direction(rng, call)

    def merged(x):
        halves = [{"q": x["q"], "k": x["k"][:, at], "v": x["v"][:, at]}
                  for at in (slice(0, 2), slice(2, None))]  # fmt: skip
        (o_a, a), (o_b, b) = (flash_attention(**h, return_lse=True) for h in halves)
        lse = jnp.logaddexp(a, b)
        shares = [jnp.exp(y - lse)[..., None] for y in (a, b)]
        return shares[0] * o_a + shares[1] * o_b, lse

    got = jit(functools.partial(first_and_second, merged))(call.arrays, one, one)
    assert_right(call, one, one, got)


def equations(jaxpr):
    """All of them, those inside others too."""
    for eqn in jaxpr.eqns:
        yield eqn
        is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")  # noqa: E731
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def heads_first(x):
    return [jnp.swapaxes(x[n], 1, 2) for n in "qkv"]


def forward_heads_first(x):
    return kv.flash_attention_forward(*heads_first(x)).swapaxes(1, 2)


def slopes_heads_first(x):
    """The gradient of half of out's squares, by the calls for each pass."""
    rows = heads_first(x)
    out, *lm = kv.flash_attention_forward(*rows, return_residuals=True)
    grads = kv.flash_attention_backward(*rows, out, out, *lm)
    return {n: g.swapaxes(1, 2) for n, g in zip("qkv", grads, strict=True)}


def as_jax_nn(x):
    return kv.dot_product_attention(x["q"], x["k"], x["v"])


def as_flax(x):
    return kv.attention_fn(x["q"], x["k"], x["v"], deterministic=True)


def test_the_drop_ins_have_them_too(rng):
    """dot_product_attention, flax's, and the calls on [B, H, N, D]."""
    call = draw(rng, q_len=4, kv_len=6, heads=2, kv_heads=2, dim=8)
    one = direction(rng, call)
    attend = lambda x: call.replace(**x).run()  # noqa: E731

    def derivatives(f, x):
        loss = lambda x: jnp.sum(jnp.square(f(x))) / 2  # noqa: E731
        return along(f, one)(x), along(jax.grad(loss), one)(x)

    @jit
    def everything(x):
        same = [derivatives(f, x) for f in (as_jax_nn, as_flax, forward_heads_first)]
        moved, product = derivatives(attend, x)
        return (moved, product), same, along(slopes_heads_first, one)(x)

    want, same, slopes = everything(call.arrays)
    for got in (*same, (want[0], slopes)):
        assert_close(got[0], f64(want[0]), F32)
        all_close(got[1], want[1], F32)


PRIMITIVE = "kvblock_attention_"


def primitives(f, *args):
    """Of attention, in order, as XLA gets them."""
    text = jax.jit(f).trace(*args).jaxpr
    names = [eqn.primitive.name for eqn in equations(text.jaxpr)]
    return [n.removeprefix(PRIMITIVE) for n in names if n.startswith(PRIMITIVE)]


def test_each_mode_runs_what_it_needs(rng):
    """Reverse mode by the backward kernels alone, as if there were no other."""
    call = tiny(rng)
    out = lambda x: call.replace(**x).run()  # noqa: E731
    loss = lambda x: jnp.sum(out(x))  # noqa: E731
    arrays, few = call.arrays, {n: call.arrays[n] for n in "qkv"}
    forward = ["forward", "tangent"]
    assert primitives(out, arrays) == ["output"]
    assert primitives(along(out, few), few) == forward
    assert primitives(jax.grad(loss), few) == ["forward", "backward"]
    both = ["backward", "backward_bias"]
    assert sorted(primitives(jax.grad(loss), arrays)) == sorted(["forward", *both])
    only = lambda bias: loss(arrays | {"bias": bias})  # noqa: E731
    assert primitives(jax.grad(only), arrays["bias"]) == ["forward", "backward_bias"]
    product = primitives(along(jax.grad(loss), few), few)
    assert sorted(product) == sorted([*forward, "backward", "hessian"])
