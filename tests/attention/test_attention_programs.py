"""What becomes of flash_attention in a program: calls counted, residuals kept."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import pytest
from attention_bar import assert_close, plain_attention
from attention_columns import BATCH, HEADS, KV_LEN, Q_LEN, SIZES, ask, full
from attention_model import (
    BF16,
    F32,
    cast,
    draw,
    jit,
    truth,
)

from jax_kvblock import flash_attention
from jax_kvblock.attention import RESIDUAL_NAMES

FORWARD, BACKWARD = "kvblock_attention_forward", "kvblock_attention_backward"


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


@pytest.mark.wide
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
    with jax.default_matmul_precision("highest"):  # a GPU's default is TF32
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


@pytest.mark.gpu
def test_command_buffers_of_few_queries(rng):
    """Two launches, of which the second begins while the first one runs."""
    call = draw(rng, BF16, q_len=1, kv_len=4096, dim=128)
    options = {"xla_gpu_graph_min_graph_size": 1}
    options["xla_gpu_enable_command_buffer"] = "FUSION,CUBLAS,CUSTOM_CALL"
    q, k, v = (call.arrays[name] for name in "qkv")
    captured = jax.jit(flash_attention).lower(q, k, v).compile(options)
    want = truth(call)["out"]
    for _ in range(3):
        assert_close(captured(q, k, v), want, BF16)
