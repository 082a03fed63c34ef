"""Attention takes what people hold, whatever JAX's modes are set to.

Integers of any width, lists and ranges, tensors of other libraries; 64-bit mode,
transfer guards, and jax_debug_infs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import (
    F32,
    Call,
    attend_with_gradients,
    draw,
    draw_segments,
    draw_tiles,
    jit,
    truth,
)

import jax_kvblock as kv

T, S, N, D = 5, 7, 4, 8


def full(rng: np.random.Generator) -> Call:
    """A call with every kind of integer operand."""
    call = draw(
        rng, batch=2, q_len=T, kv_len=S, heads=N, dim=D, causal=True, window=(4, None)
    )
    segments = draw_segments(rng, 2, T + S) // 2
    return call.replace(
        tiles=draw_tiles(rng, call, share=1.0),
        segment_ids=(segments[:, :T], segments[:, T:]),
        q_lens=np.int32([T, T - 1]),
        kv_lens=np.int32([S - 1, S]),
        q_offset=np.int32([1, 2]),
        kv_offset=np.int32(-1),
    )


def packed(rng: np.random.Generator) -> Call:
    call = draw(rng, packed=True, q_len=T, kv_len=S, heads=N, dim=D, causal=True)
    cu = (np.int32([0, 2, T]), np.int32([1, 4, S]))
    return call.replace(cu_seqlens=cu, q_offset=np.int32([0, 1]))


CALLS = {"batch": full, "packed": packed}
by_call = pytest.mark.parametrize("kind", CALLS)
attend = jit(attend_with_gradients, static_argnums=(3, 4))


def assert_right(got: Any, call: Call, bar: float = 2e-5) -> None:
    for name, want in truth(call).items():
        np.testing.assert_allclose(got[name], want, bar, bar, err_msg=name)


def parts(call: Call, operands: Any) -> tuple[Any, ...]:
    static = tuple(sorted(call.static.items()))
    return call.arrays, operands, call.cotangents, static, None


# ---- integers ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int64", "uint32"])
@by_call
def test_integers_of_any_width_in_64_bit_mode(rng, kind, dtype):
    """Out, lse and all gradients, which stay float32."""
    call = CALLS[kind](rng)
    ints = jax.tree.map(lambda x: np.maximum(np.asarray(x), 0), call.operands)
    if tiles := call.operands.get("tiles"):  # no tile, but the first one twice
        indices = np.where(np.asarray(tiles.indices) < 0, 7, tiles.indices)
        ints["tiles"] = dataclasses.replace(ints["tiles"], indices=indices)
    call = call.replace(**ints)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, dtype), ints)
        got = attend(*parts(call, wide))
    assert {x.dtype for x in got.values()} == {jnp.dtype(F32)}
    assert_right(got, call)


def test_vmap_in_64_bit_mode(rng):
    calls = [full(rng) for _ in range(3)]
    inputs = [(c.arrays, c.operands) for c in calls]
    with jax.enable_x64(True):
        stack = lambda *x: jnp.stack([jnp.asarray(y) for y in x])  # noqa: E731
        arrays, operands = jax.tree.map(stack, *inputs)
        is_int = lambda x: jnp.issubdtype(x.dtype, jnp.integer)  # noqa: E731
        operands = jax.tree.map(
            lambda x: x.astype(jnp.int64) if is_int(x) else x, operands
        )

        def one(arrays, operands):
            return Call(arrays, operands, calls[0].static, ()).run(return_lse=True)

        out, lse = jit(jax.vmap(one))(arrays, operands)
    for i, call in enumerate(calls):
        want = truth(call)
        np.testing.assert_allclose(out[i], want["out"], 2e-5, 2e-5)
        np.testing.assert_allclose(lse[i], want["lse"], 2e-5, 2e-5)


def test_float64_stays_float64_in_64_bit_mode(rng):
    call = packed(rng)
    with jax.enable_x64(True):
        wide = functools.partial(jnp.asarray, dtype=jnp.float64)
        arrays = {n: wide(x) for n, x in call.arrays.items()}
        cotangents = tuple(map(wide, call.cotangents))
        static = tuple(sorted(call.static.items()))
        got = attend(arrays, call.operands, cotangents, static, None)
    assert {x.dtype for x in got.values()} == {jnp.dtype("float64")}
    assert_right(got, call, 1e-12)


def test_dropins_in_64_bit_mode(rng):
    call = draw(rng, batch=1, q_len=T, kv_len=T, heads=2, dim=D)
    q, k, v = call.arrays.values()
    want = truth(call)["out"]
    with jax.enable_x64(True):
        lens = jnp.asarray([T], jnp.uint64)
        mask = jnp.ones((T, T), bool)
        rows = [x.swapaxes(1, 2) for x in (q, k, v)]
        lse = {"return_residual": True}
        got, residual = kv.dot_product_attention(
            q, k, v, mask=mask, query_seq_lengths=lens, **lse
        )
        O, l, m = kv.flash_attention_forward(*rows, return_residuals=True)
        slopes = kv.flash_attention_backward(*rows, O, O, l, m)
        assert {x.dtype for x in (got, residual, O, l, m, *slopes)} == {jnp.dtype(F32)}
    np.testing.assert_allclose(got, want, 2e-5, 2e-5)
    np.testing.assert_allclose(O.swapaxes(1, 2), want, 2e-5, 2e-5)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
def test_what_int32_does_not_hold(rng, dtype):
    """Lengths and offsets stop at its ends, and uint32 segments stay apart."""
    call = draw(rng, batch=2, q_len=T, kv_len=S, heads=N, dim=D)
    with jax.enable_x64(True):
        ids = jnp.asarray([[2**31] * 3 + [2**31 + 1] * 4] * 2, dtype)
        operands = {
            "segment_ids": (ids[:, :T], ids),
            "kv_lens": jnp.asarray([2**31 + 5, 2**32 - 1], dtype),
            "q_offset": jnp.asarray(2**31, dtype),
        }
        got = jit(lambda x: call.replace(causal=True, **x).run())(operands)
    segments = np.int32([[0] * 3 + [1] * 4] * 2)
    want = truth(call.replace(segment_ids=(segments[:, :T], segments)))
    np.testing.assert_allclose(got, want["out"], 2e-5, 2e-5)


@pytest.mark.parametrize("under_jit", [False, True], ids=["eager", "jit"])
@by_call
def test_lists_ranges_and_numpy_integers(rng, kind, under_jit):
    """Also inside of a jit, where they are constants."""
    call = CALLS[kind](rng)
    if kind == "packed":
        loose = {"cu_seqlens": (range(0, T + 1, T), [1, np.int64(S)])}
        loose |= {"q_offset": np.uint8(1)}
        call = call.replace(cu_seqlens=(np.int32([0, T]), np.int32([1, S])), q_offset=1)
    else:
        call = call.replace(kv_lens=np.int32([S - 2, S - 1]), q_offset=np.int32([1, 2]))
        x = call.operands
        tiles = kv.AttentionTiles(
            x["tiles"].indices.tolist(), x["tiles"].counts.tolist()
        )
        loose = {"kv_lens": range(S - 2, S), "q_offset": range(1, 3), "tiles": tiles}
        loose |= {"q_lens": x["q_lens"].astype(np.uint64), "kv_offset": -1}
        loose |= {"segment_ids": tuple(s.tolist() for s in x["segment_ids"])}
    run = lambda arrays: call.replace(**loose, **arrays).run()  # noqa: E731
    got = (jit(run) if under_jit else run)(call.arrays)
    np.testing.assert_allclose(got, truth(call)["out"], 2e-5, 2e-5)


def test_a_list_of_rows_is_one_array_of_segments(rng):
    call = draw(rng, batch=2, q_len=T, kv_len=T, heads=N, dim=D)
    rows = np.int32([[0] * 2 + [1] * (T - 2), [0] * (T - 1) + [1]])
    want = truth(call.replace(segment_ids=(rows, rows)))["out"]
    for given in (rows.tolist(), list(rows), [tuple(rows[0]), jnp.asarray(rows[1])]):
        got = call.replace(segment_ids=given).run()
        np.testing.assert_allclose(got, want, 2e-5, 2e-5)
    pair = [rows.tolist(), rows.tolist()]
    np.testing.assert_allclose(call.replace(segment_ids=pair).run(), want, 2e-5, 2e-5)


def test_segments_2_to_the_32_apart_are_one(rng):
    """As the docstring says; what differs by less stays apart."""
    call = draw(rng, batch=1, q_len=T, kv_len=T, heads=N, dim=D)
    with jax.enable_x64(True):
        ids = jnp.asarray([[0] + [2**32] * (T - 2) + [1]], jnp.int64)
        got = call.replace(segment_ids=ids).run()
    same = np.int32([[0] * (T - 1) + [1]])
    want = truth(call.replace(segment_ids=(same, same)))["out"]
    np.testing.assert_allclose(got, want, 2e-5, 2e-5)


# ---- tensors of other libraries ------------------------------------------------------


@pytest.mark.torch
@by_call
def test_torch_tensors(rng, kind):
    import torch

    call = CALLS[kind](rng)
    tensor = lambda x: torch.from_numpy(np.array(x))  # noqa: E731
    loose = jax.tree.map(tensor, call.arrays | call.operands)
    if kind == "batch":
        loose["q_lens"] = loose["q_lens"].long()
        loose["tiles"] = jax.tree.map(torch.Tensor.long, loose["tiles"])
        loose["bias"] = torch.zeros((1, 1, T, S))
    else:
        loose["cu_seqlens"] = tuple(x.long() for x in loose["cu_seqlens"])
    sinks = torch.full((N,), -1e30)
    got = kv.flash_attention(**loose, **call.static, sinks=sinks)
    np.testing.assert_allclose(got, truth(call)["out"], 2e-5, 2e-5)


@pytest.mark.torch
def test_integers_of_torch_are_checked_where_they_lie(rng, elsewhere):
    import torch

    q = torch.zeros((1, T, N, D))
    attend = functools.partial(kv.flash_attention, q, q, q)
    with pytest.raises(ValueError, match=r"q_lens must fit in int32, got values from"):
        attend(q_lens=torch.tensor([2**32]))
    twice = kv.AttentionTiles(torch.tensor([[[[0, 0]]]]), torch.tensor([[[2]]]))
    with pytest.raises(ValueError, match=r"tiles.indices must list a tile once"):
        attend(tiles=twice)
    cu = torch.tensor([0, 4, 3])
    with pytest.raises(ValueError, match=r"cu_seqlens\[0\] must rise from at least 0"):
        kv.flash_attention(q[0], q[0], q[0], cu_seqlens=(cu, cu))


@pytest.mark.torch
def test_torch_tensors_in_the_dropins(rng):
    import torch

    call = draw(rng, batch=1, q_len=T, kv_len=T, heads=2, dim=D)
    q, k, v = (torch.from_numpy(np.array(x)) for x in call.arrays.values())
    want = truth(call)["out"]
    got = kv.dot_product_attention(q, k, v, mask=torch.ones((T, T), dtype=torch.bool))
    np.testing.assert_allclose(got, want, 2e-5, 2e-5)
    Q, K, V = (x.transpose(1, 2) for x in (q, k, v))  # not contiguous
    O, l, m = kv.flash_attention_forward(Q, K, V, return_residuals=True)
    np.testing.assert_allclose(O.swapaxes(1, 2), want, 2e-5, 2e-5)
    tensors = [torch.from_numpy(np.array(x)) for x in (O, O, l, m)]
    for slope, again in zip(
        kv.flash_attention_backward(Q, K, V, *tensors),
        kv.flash_attention_backward(*map(jnp.asarray, (Q, K, V, O, O, l, m))),
        strict=True,
    ):
        np.testing.assert_array_equal(slope, again)
    assert kv.lm_to_lse(*tensors[2:]).shape == (1, 2, T)


# ---- jax's modes ---------------------------------------------------------------------


@by_call
def test_a_transfer_guard_lets_host_operands_pass(rng, kind):
    call = CALLS[kind](rng)
    arrays = {n: np.asarray(x) for n, x in call.arrays.items()}
    with jax.transfer_guard("disallow"):
        out, lse = call.replace(**arrays, kv_offset=3).run(return_lse=True)
    want = truth(call.replace(kv_offset=3))
    np.testing.assert_allclose(out, want["out"], 2e-5, 2e-5)
    np.testing.assert_allclose(lse, want["lse"], 2e-5, 2e-5)


def dropins(x: jax.Array, one: jax.Array, rows: jax.Array, mask: jax.Array) -> Any:
    """Every drop-in, where no row is empty: every result is finite."""
    O, l, m = kv.flash_attention_forward(rows, rows, rows, return_residuals=True)
    return (
        kv.dot_product_attention(x, x, x, mask=mask, return_residual=True),
        kv.dot_product_attention(one, one, one, mask=mask),
        kv.attention_fn(x, x, x, mask=mask),
        (O, l, m, kv.flash_attention_backward(rows, rows, rows, O, O, l, m)),
        (kv.lm_to_lse(l, m), kv.lse_to_lm(l), kv.lse_to_lm(l, m)),
    )


def test_transfer_guards_and_debug_infs_let_the_dropins_pass():
    """No −inf of a mask, and no constant, is seen outside of a program."""
    x, mask = jnp.ones((1, T, 2, D)), jnp.tril(jnp.ones((T, T), bool))
    args = x, x[0], x.swapaxes(1, 2), mask
    want = dropins(*args)
    for mode in (jax.transfer_guard("disallow"), jax.debug_infs(True)):
        with mode:  # one at a time: on a GPU, to look for infs is a transfer
            got = dropins(*args)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_debug_infs_lets_gradients_pass(rng):
    """Of a call in which every row attends to a key, and of one with sinks."""
    x = jnp.asarray(rng.standard_normal((1, T, N, D)), F32)
    sinks = jnp.zeros(N)

    def total(x, sinks):
        out = kv.flash_attention(x, x, x, causal=True)
        return out.sum() + kv.flash_attention(x, x, x, sinks=sinks, window=(1, 1)).sum()

    want = jax.grad(total, (0, 1))(x, sinks)
    with jax.debug_infs(True):
        got = jax.grad(total, (0, 1))(x, sinks)
    jax.tree.map(np.testing.assert_array_equal, got, want)
