"""The oracle of the attention tests is itself right: gradients by differences."""

from __future__ import annotations

import numpy as np
import pytest
from attention_bar import plain
from attention_model import (
    draw,
    draw_bias,
    draw_segments,
    draw_tiles,
    truth,
)

OPTIONS = {
    "plain": {},
    "bent": {"softcap": 0.7, "scale": 1.3},
    "causal": {"causal": True, "q_offset": np.int32([-1, 2])},
    "window": {"window": (2, 1), "kv_offset": np.int32(1)},
    "lens": {"q_lens": np.int32([2, 3]), "kv_lens": np.int32([0, 4])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("extra", [False, True], ids=["", "bias and sinks"])
def test_the_truth_s_gradients_are_its_slopes(rng, options, extra):
    call = draw(rng, q_len=4, kv_len=5, heads=2, kv_heads=1, dim=8, **options)
    if extra:
        bias = draw_bias(rng, call, (True, False))
        call = call.replace(bias=bias, sinks=rng.standard_normal(2).astype(np.float32))
    # In float64 from here on, and off the float32 grid.
    arrays = {n: np.asarray(x, np.float64) for n, x in call.arrays.items()}
    want = truth(call)

    def loss(arrays):
        got = truth(call.replace(**arrays))
        lse = np.where(np.isneginf(got["lse"]), 0, got["lse"])
        d_out, d_lse = (np.asarray(x, np.float64) for x in call.cotangents)
        return (got["out"] * d_out).sum() + (lse * d_lse).sum()

    for name, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        ends = [loss(arrays | {name: x + h * direction}) for h in (1e-5, -1e-5)]
        slope = (ends[0] - ends[1]) / 2e-5
        found = (want[f"d_{name}"] * direction).sum()
        np.testing.assert_allclose(found, slope, rtol=1e-6, atol=1e-8)


def test_plain_jnp_agrees_with_the_truth(rng):
    """Or the bar would be no bar."""
    call = draw(rng, q_len=130, causal=True, softcap=2.0, q_offset=np.int32(3))
    call = call.replace(
        segment_ids=(draw_segments(rng, 2, 130),) * 2,
        tiles=draw_tiles(rng, call),
        sinks=rng.standard_normal(4).astype(np.float32),
        bias=draw_bias(rng, call, (False, True)),
    )
    got, want = plain(call), truth(call)
    assert set(got) == set(want)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4)


def test_packed_rows_are_calls_of_their_own(rng):
    """The truth of a packed call, from the truth of each sequence."""
    cu_q, cu_kv = np.int32([1, 3, 3, 9]), np.int32([0, 4, 6, 11])
    call = draw(rng, q_len=10, kv_len=12, packed=True, causal=True, window=(3, None))
    offsets = np.int32([0, 5, -2])
    want = truth(call.replace(cu_seqlens=(cu_q, cu_kv), q_offset=offsets))
    seen = np.zeros(10, bool)
    for i, offset in enumerate(offsets):
        rows, keys = slice(*cu_q[i : i + 2]), slice(*cu_kv[i : i + 2])
        q, (k, v) = call.arrays["q"][rows], (call.arrays[n][keys] for n in "kv")
        one = call.replace(q=q[None], k=k[None], v=v[None], q_offset=offset)
        part = truth(one, tuple(x[rows][None] for x in call.cotangents))
        seen[rows] = True
        for name, where in (("out", rows), ("lse", rows), ("d_q", rows), ("d_k", keys)):
            np.testing.assert_allclose(want[name][where], part[name][0], atol=1e-12)
    assert (want["out"][~seen] == 0).all()
    assert np.isneginf(want["lse"][~seen]).all()
