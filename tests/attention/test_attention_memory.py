"""Memory is O((T + S) N D): a compiled program holds no scores, in any mode."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import AS_USERS_DO, BF16, F32, by_kernel, jit
from served_kernels import skip_unless_served

from jax_kvblock import AttentionTiles, flash_attention

HEADS, DIM = 2, 64
LONG = 4096

i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731


def tiles_of(length):
    rows = -(-length // 128)
    return AttentionTiles(i32(1, 1, rows, 8), i32(1, 1, rows))


OPTIONS = {
    "full": lambda n: ({}, {}),
    "causal": lambda n: ({"causal": True}, {}),
    "window": lambda n: ({"window": (256, 0), "softcap": 20.0}, {}),
    "segments": lambda n: ({}, {"segment_ids": i32(1, n), "kv_lens": i32(1)}),
    "sinks": lambda n: ({}, {"sinks": jax.ShapeDtypeStruct((HEADS,), F32)}),
    "tiles": lambda n: ({}, {"tiles": tiles_of(n)}),
    "packed": lambda n: ({"causal": True}, {"cu_seqlens": (i32(9), i32(9))}),
    "deterministic": lambda n: ({"deterministic": True}, {}),
    # An input of S times S, without a gradient: nothing of its size beside it.
    "bias": lambda n: ({}, {"bias": jax.ShapeDtypeStruct((1, 1, n, n), F32)}),
}


MODES = ("forward", "gradients", "forward mode", "Hessian's products")


def temporaries(name, length, mode, implementation, dtype):
    """Bytes beside inputs and results, by XLA's own account."""
    static, operands = OPTIONS[name](length)
    rows = (length,) if name == "packed" else (1, length)
    x = jax.ShapeDtypeStruct((*rows, HEADS, DIM), dtype)

    def forward(q, k, v, operands):
        return flash_attention(
            q, k, v, **static, **operands, implementation=implementation
        )

    def both(q, k, v, operands, cotangent):
        out, pull = jax.vjp(lambda *x: forward(*x, operands), q, k, v)
        return out, pull(cotangent)

    def pushed(q, k, v, operands, *along):
        return jax.jvp(lambda *x: forward(*x, operands), (q, k, v), along)

    def product(q, k, v, operands, *along):
        loss = lambda *x: jnp.sum(jnp.square(forward(*x, operands)))  # noqa: E731
        return jax.jvp(jax.grad(loss, (0, 1, 2)), (q, k, v), along)[1]

    functions = {"forward": forward, "gradients": both}
    functions |= {"forward mode": pushed, "Hessian's products": product}
    more = {"forward": (), "gradients": (x,)}.get(mode, (x, x, x))
    lowered = jit(functions[mode]).lower(x, x, x, operands, *more)
    return lowered.compile(AS_USERS_DO).memory_analysis().temp_size_in_bytes


def array_bytes(length):
    """q, k, v or out, in float32."""
    return 4 * length * HEADS * DIM


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, mode) for name in OPTIONS for mode in MODES[:2]),
        *((name, mode) for name in ("packed", "bias") for mode in MODES[2:]),
    ],
)
@by_kernel(BF16)
def test_no_scores_in_memory(implementation, dtype, name, mode):
    """A few arrays like q in float32; one head's scores alone would be 32 of them."""
    found = temporaries(name, LONG, mode, implementation, dtype)
    scores = LONG * LONG * 4  # of one head, in float32
    few = {"forward": 5, "gradients": 10, "forward mode": 10, "Hessian's products": 18}
    bound = few[mode] * array_bytes(LONG)
    assert bound < 0.6 * scores
    assert found <= bound, f"{found / array_bytes(LONG):.1f} arrays of q's size"


@pytest.mark.parametrize("mode", MODES)
@by_kernel(F32)
def test_memory_grows_as_the_length(implementation, dtype, mode):
    how = (mode, implementation, dtype)
    short, long = (temporaries("causal", n, *how) for n in (LONG // 2, LONG))
    assert long <= 2.2 * short + 2**16, (short, long)


def test_the_measure_sees_scores():
    """Plain attention does hold them."""
    x = jax.ShapeDtypeStruct((1, LONG, HEADS, DIM), F32)

    def plain(q, k, v):
        p = jax.nn.softmax(jnp.einsum("btnd,bsnd->bnts", q, k))
        return jnp.einsum("bnts,bsnd->btnd", p, v)

    compiled = jax.jit(plain).lower(x, x, x).compile()
    found = compiled.memory_analysis().temp_size_in_bytes
    assert found >= LONG * LONG * 4


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_call_without_lse_and_gradients_computes_none(causal):
    """No lse among the results: not one that is dropped, none at all."""
    x = jax.ShapeDtypeStruct((1, 256, HEADS, DIM), BF16)

    def results(function):
        found = []
        traced = jax.make_jaxpr(function)(x, x, x)
        for eqn in subjaxprs(traced.jaxpr):
            if eqn.primitive.name.startswith("kvblock_attention"):
                found.append((eqn.primitive.name, len(eqn.outvars)))
        return found

    attend = functools.partial(flash_attention, causal=causal)
    assert results(attend) == [("kvblock_attention_output", 1)]
    assert results(functools.partial(attend, return_lse=True)) == [
        ("kvblock_attention_forward", 2)
    ]
    slopes = jax.grad(lambda q, k, v: attend(q, k, v).sum(dtype=F32))
    assert results(slopes)[0] == ("kvblock_attention_forward", 2)


def subjaxprs(jaxpr):
    """All equations, also those of inner jaxprs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from subjaxprs(inner)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["cuda", "cuda_sm90"])
def test_the_forward_kernels_take_no_temporaries(implementation):
    skip_unless_served(implementation, backward=False)
    x = jax.ShapeDtypeStruct((2, 1024, 4, 128), BF16)
    attend = functools.partial(
        flash_attention, causal=True, implementation=implementation
    )
    compiled = jax.jit(attend).lower(x, x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes == 0


@pytest.mark.gpu
def test_a_long_context_fits():
    """A million keys: the scores of one head would take 4 TiB."""
    shape = (1, 2**20, 1, 64)
    x = jax.random.normal(jax.random.key(0), shape, BF16)
    slopes = jax.jit(
        jax.grad(
            lambda q, k, v: flash_attention(q, k, v, causal=True, window=(1023, 0)).sum(
                dtype=F32
            ),
            (0, 1, 2),
        )
    )
    for grad in slopes(x, x, x):
        assert np.isfinite(np.asarray(grad[:, ::4096], np.float32)).all()
