"""Keys in parts: `joined` takes in what other keys gave, `backward_added` their dq.

What other keys gave is drawn: any o, lse and dq serve. The call's own part is held to
the truth in float64, and then to its sum with what was drawn.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import judge
import numpy as np
import pytest
from attention_bar import assert_close, plain, products
from attention_model import (
    BF16,
    F16,
    F32,
    HALVES,
    Call,
    by_kernel,
    by_turns,
    cast,
    draw,
    draw_bias,
    draw_segments,
    draw_tiles,
    f64,
    jit,
    truth,
)

from jax_kvblock.attention import arguments, joining, primitive
from jax_kvblock.attention.config import AttentionConfig, Operands
from jax_kvblock.attention.ops import LogSumExp

joined = jit(primitive.joined, static_argnums=0)
backward = jit(primitive.backward, static_argnums=0)

# ---- calls, and what other keys gave -------------------------------------------------


def checked(
    call: Call, implementation: str | None = None
) -> tuple[AttentionConfig, Operands]:
    given = {**call.arrays, **call.operands, **call.static}
    return arguments.normalize("a test", **given, implementation=implementation)


@dataclasses.dataclass(frozen=True)
class Others:
    """o `[.., T, N, E]`, lse `[.., N, T]` and dq of other keys."""

    o: jax.Array
    lse: jax.Array
    dq: jax.Array


def others_of(rng: np.random.Generator, call: Call) -> Others:
    """One row of nine has seen nothing: its o is anything finite, and does not count.

    Among the others are zeros with a sign, which no sum keeps.
    """
    q, (out, d_lse) = call.arrays["q"], call.cotangents
    normal = lambda x: cast(rng.standard_normal(x.shape), x.dtype)  # noqa: E731
    lse = np.float32(3 + 2 * rng.standard_normal(d_lse.shape))
    nothing = rng.random(lse.shape) < 1 / 9
    lse[rng.random(lse.shape) < 1 / 9] = -0.0
    lse = jnp.asarray(np.where(nothing, -np.inf, lse))
    signed = rng.random(out.shape) < 1 / 9
    o = jnp.where(signed, jnp.asarray(-0.0, out.dtype), normal(out))
    return Others(o, jnp.swapaxes(lse, -1, -2), normal(q))


@np.errstate(invalid="ignore")
def both(o: Any, lse: Any, own_o: Any, own_lse: Any) -> tuple[np.ndarray, np.ndarray]:
    """In float64, with lse as `[.., T, N]`."""
    o, lse, own_o, own_lse = map(f64, (o, lse, own_o, own_lse))
    total = np.logaddexp(lse, own_lse)
    parts = ((o, lse), (own_o, own_lse))
    shares = [np.where(np.isneginf(x), 0, np.exp(x - total)) for _, x in parts]
    sums = [x * share[..., None] for (x, _), share in zip(parts, shares, strict=True)]
    return np.where(np.isneginf(own_lse)[..., None], o, sums[0] + sums[1]), total


def check_joined(
    rng: np.random.Generator, call: Call, implementation: str | None
) -> int:
    """How many rows see none of the call's keys. They keep what they had."""
    config, x = checked(call, implementation)
    before, dtype = others_of(rng, call), call.arrays["q"].dtype
    o, lse = joined(config, x, before.o, before.lse)
    assert (o.dtype, lse.dtype) == (dtype, F32)
    own, bar = truth(call), plain(call)
    rows = jnp.swapaxes(before.lse, -1, -2)
    want, want_lse = both(before.o, rows, own["out"], own["lse"])
    near, _ = both(before.o, rows, bar["out"], own["lse"])
    judge.assert_rows_near("out", o, want, cast(near, dtype), dtype)
    lse = np.swapaxes(lse, -1, -2)
    judge.assert_lse_near(lse, want_lse, products(call))
    kept = np.isneginf(own["lse"])
    np.testing.assert_array_equal(bits(o)[kept], bits(before.o)[kept])
    np.testing.assert_array_equal(bits(lse)[kept], bits(rows)[kept])
    return int(kept.sum())


def check_added(
    rng: np.random.Generator, call: Call, implementation: str | None
) -> None:
    """dq is a sum with that of others; dk and dv are the call's own."""
    config, x = checked(call, implementation)
    before, dtype = others_of(rng, call), call.arrays["q"].dtype
    own, bar, d_o = truth(call), plain(call), call.cotangents[0]
    delta = (f64(d_o) * own["out"]).sum(-1) - f64(call.cotangents[1])
    lse, delta = (jnp.asarray(np.swapaxes(a, -1, -2), F32) for a in (own["lse"], delta))
    got = backward(config, x, LogSumExp(lse), delta, d_o, before.dq)
    others = f64(before.dq)
    near = cast(others + f64(bar["d_q"]), dtype)
    judge.assert_rows_near("d_q", got[0], others + own["d_q"], near, dtype)
    for name, g in zip(("d_k", "d_v"), got[1:], strict=True):
        judge.assert_rows_near(name, g, own[name], bar[name], dtype)
    kept = np.isneginf(own["lse"])
    np.testing.assert_array_equal(f64(got[0])[kept], others[kept])
    assert got[0].dtype == dtype


def bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


# ---- every kind of call --------------------------------------------------------------

BOUNDS = np.int32([5, 30, 30, 61]), np.int32([0, 40, 77, 130])  # rows of nobody


def options(rng: np.random.Generator, call: Call) -> dict[str, dict[str, Any]]:
    ids = draw_segments(rng, 2, 70), draw_segments(rng, 2, 130) + 1
    return {
        "full": {},
        "causal": {"causal": True, "q_offset": jnp.int32(-20)},
        "window": {"window": (5, 9), "q_offset": jnp.int32([70, 110])},
        "lengths": {"q_lens": np.int32([70, 33]), "kv_lens": np.int32([0, 101])},
        "segments": {"segment_ids": ids},
        "softcap": {"softcap": 2.0},
        "a negative scale": {"scale": -0.3},
        "sinks": {"sinks": cast([1, -2, 0, 3], F32)},
        "bias": {"bias": draw_bias(rng, call, (True, False))},
        "tiles": {"tiles": draw_tiles(rng, call, share=0.3)},
    }


KINDS = (
    "full", "causal", "window", "lengths", "segments", "packed", "softcap",
    "a negative scale", "sinks", "bias", "tiles",
)  # fmt: skip
KEPT = ("causal", "window", "lengths", "segments", "packed")


def call_of(rng: np.random.Generator, dtype: Any, kind: str) -> Call:
    if kind == "packed":
        return draw(rng, dtype, packed=True, cu_seqlens=BOUNDS, causal=True)
    call = draw(rng, dtype)
    return call.replace(**options(rng, call)[kind])


by_kind = by_turns("kind", KINDS, BF16, F32, F16)


@by_kind
def test_joined(rng, implementation, dtype, kind):
    kept = check_joined(rng, call_of(rng, dtype, kind), implementation)
    assert kept or kind not in KEPT


@by_turns("kind", [kind for kind in KINDS if kind not in ("bias", "sinks")], F32, BF16)
def test_added(rng, implementation, dtype, kind):
    check_added(rng, call_of(rng, dtype, kind), implementation)


@by_kernel(F32, BF16)
def test_deterministic_calls_add_too(rng, implementation, dtype):
    """With segments dq comes of a kernel of its own."""
    for kind in ("causal", "segments"):
        call = call_of(rng, dtype, kind).replace(deterministic=True)
        check_added(rng, call, implementation)


@by_kernel(F32, BF16)
def test_few_queries(rng, implementation, dtype):
    for t in (1, 16):
        call = draw(rng, dtype, q_len=t, kv_lens=np.int32([0, 77]), kv_len=300)
        assert check_joined(rng, call, implementation)


@by_kernel(F32, BF16)
def test_no_keys_keep_everything(rng, implementation, dtype):
    call = draw(rng, dtype, q_len=5, kv_len=0)
    assert check_joined(rng, call, implementation) == 2 * 5 * 4
    check_added(rng, call, implementation)
    call = draw(rng, dtype, q_len=0, kv_len=5)
    assert check_joined(rng, call, implementation) == 0
    check_added(rng, call, implementation)


WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
LARGE = {
    "causal": {"causal": True, "q_offset": jnp.int32(-40)},
    "lengths": {"q_lens": np.int32([333, 70]), "kv_lens": np.int32([0, 401])},
    "packed": {
        "cu_seqlens": (np.int32([9, 140, 140, 300]), np.int32([0, 150, 260, 517])),
        "causal": True,
    },
}


@pytest.mark.gpu
@by_kernel(*HALVES)
@pytest.mark.parametrize("dims", WIDTHS, ids=str)
@pytest.mark.parametrize("kind", LARGE)
def test_every_kernel(rng, implementation, dtype, dims, kind):
    """Each instance of the kernels, over several tiles."""
    call = draw(
        rng, dtype, q_len=333, kv_len=517, dim=dims[0], value_dim=dims[1],
        packed=kind == "packed", **LARGE[kind],
    )  # fmt: skip
    assert check_joined(rng, call, implementation)
    check_added(rng, call, implementation)


@by_kernel(F32, BF16)
def test_parts_of_keys_are_attention_to_all_of_them(rng, implementation, dtype):
    """In a loop, as a ring does it."""
    call = draw(rng, dtype, kv_len=120)
    config, x = checked(call, implementation)
    want, d_o = truth(call), call.cotangents[0]
    pieces = [
        x._replace(k=x.k[:, i : i + 40], v=x.v[:, i : i + 40]) for i in (0, 40, 80)
    ]
    o, lse = primitive.forward(config, pieces[0])
    lse = lse.value
    for piece in pieces[1:]:
        o, lse = joined(config, piece, o, lse)
    assert_close(o, want["out"], dtype)
    assert_close(jnp.swapaxes(lse, 1, 2), want["lse"], F32)
    delta = jnp.swapaxes((f64(d_o) * want["out"]).sum(-1) - call.cotangents[1], 1, 2)
    dq, found = None, []
    for piece in pieces:
        dq, *of_keys = backward(config, piece, LogSumExp(lse), delta, d_o, dq)
        found.append(of_keys)
    dk, dv = (jnp.concatenate(g, 1) for g in zip(*found, strict=True))
    for g, name in ((dq, "d_q"), (dk, "d_k"), (dv, "d_v")):
        assert_close(g, want[name], dtype)


def test_float64_stays_float64(rng):
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(rng.standard_normal((1, 9, 2, 8))) for _ in "qkv")
        config, whole = AttentionConfig(0.3), Operands(q, k, v)
        first = whole._replace(k=k[:, :4], v=v[:, :4])
        rest = whole._replace(k=k[:, 4:], v=v[:, 4:])
        o, lse = primitive.forward(config, first)
        got = primitive.joined(config, rest, o, lse.value)
        want = primitive.forward(config, whole)
        assert got[0].dtype == got[1].dtype == jnp.float64
        np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-14)
        np.testing.assert_allclose(got[1], want[1].value, rtol=0, atol=1e-14)
        rows = (want[1], jnp.ones_like(got[1]), o)
        one, two, all_ = (
            primitive.backward(config, x, *rows) for x in (first, rest, whole)
        )
        both_of = primitive.backward(config, rest, *rows, one[0])
        np.testing.assert_allclose(both_of[0], all_[0], rtol=0, atol=1e-14)
        np.testing.assert_allclose(both_of[1], two[1], rtol=0, atol=1e-14)


# ---- rounding ------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", HALVES)
def test_the_sum_of_dq_is_rounded_once(rng, dtype):
    """As that of float32s is: a second rounding would move one number of ten."""
    call = draw(rng, dtype, causal=True)
    before = others_of(rng, call)
    lse, delta = (jnp.full_like(before.lse, x) for x in (3.0, 0.5))
    config, x = checked(call)
    wide = x._replace(**{n: call.arrays[n].astype(F32) for n in "qkv"})
    d_o = call.cotangents[0]
    got = backward(config, x, LogSumExp(lse), delta, d_o, before.dq)[0]
    own = backward(config, wide, LogSumExp(lse), delta, d_o.astype(F32))[0]
    want = (before.dq.astype(F32) + own).astype(dtype)
    twice = before.dq + own.astype(dtype)
    off = lambda x: np.mean(bits(x) != bits(want))  # noqa: E731
    assert off(got) < 0.01 < 0.05 < off(twice)


@pytest.mark.parametrize("dtype", HALVES)
def test_eight_parts_that_round(rng, dtype):
    """As MOST_ROUNDED of sums.py says: 1.6 times the error of sums in float32."""
    parts = 8
    call = draw(rng, dtype, q_len=64, kv_len=8 * 32, dim=32)
    want, (config, x) = truth(call), checked(call)
    d_o = call.cotangents[0]
    pieces = [
        x._replace(k=x.k[:, i : i + 32], v=x.v[:, i : i + 32])
        for i in range(0, 32 * parts, 32)
    ]
    apart = [primitive.forward(config, piece) for piece in pieces]
    outs = tuple(o.astype(F32) for o, _ in apart)
    in_wide, _ = joining.merge_arrays(
        outs, tuple(jnp.swapaxes(lse.value, 1, 2) for _, lse in apart)
    )
    o, lse = apart[0][0], apart[0][1].value
    for piece in pieces[1:]:
        o, lse = joined(config, piece, o, lse)
    delta = jnp.swapaxes((f64(d_o) * want["out"]).sum(-1) - call.cotangents[1], 1, 2)
    dq, wide_dq = None, 0.0
    for piece in pieces:
        rows = (LogSumExp(lse), delta, d_o)
        wide_dq += backward(config, piece, *rows)[0].astype(F32)
        dq = backward(config, piece, *rows, dq)[0]

    def error(x: Any, name: str) -> float:
        return float(np.sqrt(np.mean((f64(x) - want[name]) ** 2)))

    for narrow, wide, name in ((o, in_wide, "out"), (dq, wide_dq, "d_q")):
        share = error(narrow, name) / error(wide.astype(dtype), name)
        assert 1.2 < share < 1.8, f"{name}: {share:.3g}"
