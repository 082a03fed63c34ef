"""flash_attention under every transform: each cell of docs/attention.md's table.

The two sharded rows of that table are in test_attention_sharding.py, more of vmap in
test_attention_vmap.py.
"""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close
from attention_columns import (
    SIZES,
    answer,
    answers,
    ask,
    assert_all_close,
    by_what,
    full,
    inputs,
)
from attention_model import (
    F32,
    by_main_kernel,
    cast,
    draw,
    jit,
    truth,
)

from jax_kvblock import AttentionTiles, flash_attention

by_kernel_here = by_main_kernel()
TARGETS = ("forward", "backward_kv", "backward_q", "backward_bias")


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
    names = [f"kvblock_attention_{target}" for target in TARGETS]
    names.append("kvblock_list_tiles")  # of gradients over lists
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


def symbolic(*shape):
    """A float32 array with these dims, some of them names of symbols."""
    dims = jax.export.symbolic_shape(", ".join(map(str, shape)))
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def test_an_exported_batch_may_be_a_symbol(rng):
    def loss(q):
        out = flash_attention(q, q, q, causal=True, implementation="xla")
        return jnp.sum(out**2)

    f = jax.value_and_grad(loss)

    of_any = exported(f, symbolic("b", 5, 2, 8))
    for batch in (1, 3):
        q = jnp.asarray(rng.standard_normal((batch, 5, 2, 8)), jnp.float32)
        for got, want in zip(of_any.call(q), f(q), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["tiles", "bias"])
def test_arrays_of_each_member_of_such_a_batch(name, rng):
    def attend(q, x):
        of_each = AttentionTiles(x, jnp.ones(x.shape[:-1], jnp.int32), 16, 16)
        option = {name: of_each if name == "tiles" else x}
        return flash_attention(q, q, q, implementation="xla", **option)

    shape = (3, 1, 2, 1) if name == "tiles" else (3, 2, 32, 32)
    dtype = jnp.int32 if name == "tiles" else jnp.float32
    x = jnp.asarray(rng.integers(0, 2, shape), dtype)
    some = jax.ShapeDtypeStruct((*symbolic("b").shape, *shape[1:]), x.dtype)
    b, *_ = some.shape
    of_any = exported(
        jax.jit(attend), jax.ShapeDtypeStruct((b, 32, 2, 8), jnp.float32), some
    )
    q = jnp.asarray(rng.standard_normal((3, 32, 2, 8)), jnp.float32)
    np.testing.assert_allclose(of_any.call(q, x), attend(q, x), rtol=1e-5, atol=1e-5)


def test_other_symbols_are_errors_that_name_the_array():
    """Lengths, what is packed, and anything for a kernel."""
    checks = [jax.export.DisabledSafetyCheck.custom_call("kvblock_attention_forward")]

    def refused(name, *args, platform="cpu", **options):
        def f(q, *boundaries):
            packed = {"cu_seqlens": boundaries * 2} if boundaries else {}
            return flash_attention(q, q, q, **packed, **options)

        export = jax.export.export(
            jax.jit(f), platforms=[platform], disabled_checks=checks
        )
        must = f"flash_attention: {name} must have a shape of numbers.*export a program"
        with pytest.raises(NotImplementedError, match=must):
            export(*args)

    refused("q", symbolic(2, "t", 4, 16))
    refused("q", symbolic("t", 4, 16), jnp.zeros(3, jnp.int32))
    some = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.int32)
    refused(r"cu_seqlens\[0\]", jnp.zeros((9, 4, 16)), some)
    whole = symbolic("b", 128, 4, 64)
    refused("q", whole, platform="cuda", implementation="cuda")


def test_an_exported_function_takes_and_returns_tile_lists(rng):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    call = draw(rng, **SIZES)
    tiles = AttentionTiles(
        jnp.int32([[[[0, -1]]]]), jnp.int32([[[1]]]), 128, np.int64(256)
    )

    def attend(arrays, tiles):
        return call.replace(**arrays, tiles=tiles).run(), {"again": [tiles]}

    data = exported(attend, call.arrays, tiles).serialize()
    out, returned = jax.export.deserialize(data).call(call.arrays, tiles)
    assert_close(out, truth(call)["out"], F32)
    assert jax.tree.structure(returned) == jax.tree.structure({"again": [tiles]})
