"""The columns of docs/attention.md's table of transforms, asked of one full call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close
from attention_model import (
    F32,
    Call,
    cast,
    draw,
    truth,
)

from jax_kvblock import flash_attention

BATCH, Q_LEN, KV_LEN, HEADS = 2, 5, 7, 4
SIZES = {"batch": BATCH, "q_len": Q_LEN, "kv_len": KV_LEN, "heads": HEADS, "dim": 8}

WHAT = {  # the columns of the table: the names of results, and which cotangents count
    "forward": (("out", "lse"), (1, 1)),
    "gradients of q, k, v": (("d_q", "d_k", "d_v"), (1, 0)),
    "gradients of bias, sinks": (("d_bias", "d_sinks"), (1, 0)),
    "gradients of lse": (("d_q", "d_k", "d_v", "d_bias", "d_sinks"), (0, 1)),
}
by_what = pytest.mark.parametrize("what", WHAT)


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
            assert_close(x, want[name], None if name == "lse" else dtype)
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from None
