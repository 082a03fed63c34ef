"""The launchers' own check of what no Python caller can get wrong: the C interface."""

from __future__ import annotations

import ctypes
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from attention_launches import I8, Attention, BlockScales, driver
from c_interface import (
    BACKWARD_BIAS,
    BACKWARD_KV,
    BACKWARD_Q,
    FORWARD,
    LAUNCHERS,
    check_attention,
    load_library,
)
from served_kernels import skip_unless_served

from jax_kvblock.core.ffi import BUILD

# Nothing lies there: a check that looked at an array would crash.
ARRAY = 4096
SM90, F32 = {"kernels": 1}, {"dtype": 2}
SUMS = {"dq_accum": ARRAY}
SPACE = {"workspace": ARRAY}
TURNS = {"deterministic": 1}
DQ = {"dq": ARRAY}
JOINS = {"joins": 1}
SEGMENTS = dict.fromkeys(
    ("q_segments", "kv_segments", "q_segment_ranges", "kv_segment_ranges"), ARRAY
)
BIAS = {"bias": ARRAY, "bias_dtype": 2, "bias_batch": 1, "bias_heads": 1}
TILES = {
    **dict.fromkeys(("tile_indices", "tile_counts"), ARRAY),
    **dict.fromkeys(("tile_batch", "tile_heads", "max_tiles"), 1),
    **dict.fromkeys(("tile_q", "tile_kv"), 128),
}
MASKS = {"tile_map": ARRAY, "tile_masks": ARRAY, "num_tile_masks": 1}
GRADIENTS = {"dbias": ARRAY, "dq": ARRAY}
NO_BIAS = "base is for calls with a bias: without one lse is kept whole"
NARROW = {
    **SM90,
    **SPACE,
    **dict.fromkeys(("q_scales", "k_scales", "v_scales"), BlockScales(ARRAY, 1, 1)),
    **dict.fromkeys(("head_dim", "value_dim"), 16),
    "dtype": 3,
}
LONG = {"q_len": 2**30 - 256, "kv_len": 2**30 - 256}
BACKWARD = dict.fromkeys(("lse", "d_o", "delta", "dk", "dv"), ARRAY)


def valid(**changes: Any) -> Attention:
    a = Attention(batch=1, num_heads=1, num_kv_heads=1, q_len=4, kv_len=4)
    a.head_dim = a.value_dim = 8
    a.scale, a.window_left, a.window_right = 1.0, -1, -1
    a.q = a.k = a.v = a.o = ARRAY
    for name, value in changes.items():
        setattr(a, name, value)
    return a


CASES: list[tuple[int, dict[str, Any], str]] = [
    (BACKWARD_KV, {}, "ok"),
    (BACKWARD_KV, SUMS, "ok"),
    (BACKWARD_KV, {**SM90, **SPACE, **DQ}, "ok"),
    (BACKWARD_KV, {**SM90, **SPACE, **DQ, **TURNS}, "ok"),
    (BACKWARD_KV, {**SM90, **SPACE}, "ok"),
    (BACKWARD_KV, {**SUMS, **SPACE}, "ok"),
    (BACKWARD_KV, {"kernels": 7}, "kernels must be KVBLOCK_KERNELS_GENERIC or"),
    (BACKWARD_KV, {**SM90, **DQ}, "workspace is NULL, and dq is not"),
    (BACKWARD_KV, {**SM90, **SUMS, **SPACE, **DQ}, "dq_accum is for the generic"),
    (BACKWARD_KV, {**SUMS, **TURNS}, "deterministic is for the sm_90a kernels"),
    (BACKWARD_KV, {"workspace": ARRAY + 8}, "workspace must be aligned to 16 bytes"),
    (
        BACKWARD_KV,
        {**SM90, **SPACE, **DQ, **TURNS, **SEGMENTS},
        "deterministic is for calls without segments and tiles",
    ),
    (BACKWARD_KV, {**SM90, **SPACE, **DQ, **JOINS}, "ok"),
    (BACKWARD_KV, {**SM90, **JOINS}, "joins is for the sm_90a kernels and their dq"),
    (BACKWARD_KV, {**SUMS, **JOINS}, "joins is for the sm_90a kernels and their dq"),
    (BACKWARD_Q, {**DQ, **JOINS}, "joins is for backward_kv"),
    (BACKWARD_BIAS, {**BIAS, "dbias": ARRAY, **JOINS}, "joins is for backward_kv"),
    (FORWARD, {**SM90, **JOINS, "lse": ARRAY}, "ok"),
    (FORWARD, {**JOINS, "lse": ARRAY}, "joins is for the sm_90a kernels"),
    (FORWARD, {**SM90, **JOINS, "lse": None}, "joins needs an lse"),
    *(
        (FORWARD, {**SM90, **JOINS, "lse": ARRAY, **more}, "joins is for a scale above")
        for more in (
            *(BIAS, TILES, {"sinks": ARRAY, "sink_batch": 1}),
            *({"softcap": 5.0}, {"scale": 0.0}, {"scale": -1.0}),
        )
    ),
    (FORWARD, NARROW, "ok"),
    (FORWARD, {**NARROW, "dtype": I8}, "ok"),
    (FORWARD, {**NARROW, "dtype": I8, "kernels": 0}, "8 bits are for the sm_90a"),
    (BACKWARD_KV, {**NARROW, "dq": None}, "or KVBLOCK_I8 in a forward pass, got 3"),
    (FORWARD, {**NARROW, "kernels": 0}, "8 bits are for the sm_90a kernels"),
    (FORWARD, {**NARROW, "head_dim": 24}, "multiples of 16 up to 128, got 24"),
    (FORWARD, {**NARROW, "value_dim": 144}, "multiples of 16 up to 128, got 144"),
    (FORWARD, {**NARROW, "workspace": None}, "8 bits need a workspace"),
    *(
        (FORWARD, {**NARROW, **more}, "8 bits are for a scale above 0")
        for more in (
            {"scale": 0.0},
            {"softcap": 5.0},
            TILES,
            BIAS,
            {"cu_q": ARRAY, "cu_kv": ARRAY},
            {**JOINS, "lse": ARRAY},
        )
    ),
    (FORWARD, {**NARROW, "q_scales": BlockScales(None, 1, 1)}, "q_scales is NULL"),
    (
        FORWARD,
        {**NARROW, "k_scales": BlockScales(ARRAY + 2, 1, 1)},
        "k_scales must be aligned to 4 bytes",
    ),
    (
        FORWARD,
        {**NARROW, "k_scales": BlockScales(ARRAY, 2, 1)},
        "k_scales.batch must divide batch = 1, got 2",
    ),
    (FORWARD, {**NARROW, "q_len": 300, "q_scales": BlockScales(ARRAY, 1, 3)}, "ok"),
    (
        FORWARD,
        {**NARROW, "q_len": 300, "q_scales": BlockScales(ARRAY, 1, 2)},
        "q_scales.blocks must be 1, or one for each 128 rows: 3, got 2",
    ),
    (
        FORWARD,
        {**NARROW, "kv_len": 300, "v_scales": BlockScales(ARRAY, 1, 3)},
        "v_scales.blocks must be 1, got 3",
    ),
    (
        FORWARD,
        {"q_scales": BlockScales(ARRAY, 1, 1)},
        "q_scales, k_scales and v_scales are for 8 bits",
    ),
    (BACKWARD_KV, {"lse": None}, "lse is NULL"),
    (BACKWARD_Q, DQ, "ok"),
    (BACKWARD_Q, {}, "dq is NULL"),
    (BACKWARD_BIAS, {**BIAS, "dbias": ARRAY}, "ok"),
    (BACKWARD_BIAS, BIAS, "dbias is NULL"),
    (BACKWARD_BIAS, {}, "bias is NULL"),
    # Forward, lse is written if it is asked for.
    (FORWARD, {"lse": None}, "ok"),
    (FORWARD, {"o": None}, "o is NULL"),
    (FORWARD, {"k": None}, "k is NULL"),
    (FORWARD, {"k": None, "v": None, "kv_len": 0}, "ok"),
    (FORWARD, {"scale": -1e-5, "softcap": 5.0}, "ok"),
    (FORWARD, {"scale": 0.0, "softcap": 5.0}, "ok"),
    (FORWARD, {"scale": 1e-5, "softcap": 50.0}, "scale / softcap must lie"),
    (FORWARD, {"scale": 1e-5, "softcap": 1024.0}, "ok"),
    (BACKWARD_KV, {"scale": 1e-5, "softcap": 50.0}, "ok"),
    (FORWARD, {"dtype": 4}, "dtype must be KVBLOCK_BF16, KVBLOCK_F16 or KVBLOCK_F32"),
    *(
        (which, {**F32, **more, **dims}, "ok")
        for which, more in ((FORWARD, {}), (BACKWARD_KV, SUMS), (BACKWARD_Q, DQ))
        for dims in ({}, {"head_dim": 128, "precision": 1})
    ),
    (FORWARD, {**F32, "head_dim": 256}, "ok"),
    (FORWARD, {**F32, "precision": 2}, "precision must be KVBLOCK_PRECISION_HIGHEST"),
    (FORWARD, {"precision": -1}, "KVBLOCK_PRECISION_DEFAULT, got -1"),
    (FORWARD, {**F32, **SM90}, "KVBLOCK_F32 is served by the generic kernels"),
    *(
        (which, {**F32, **more, "value_dim": 136}, "up to 128, got 136")
        for which, more in ((BACKWARD_KV, SUMS), (BACKWARD_Q, DQ))
    ),
    (FORWARD, {**F32, **BIAS, "bias_dtype": 0}, "bias_dtype must be dtype or"),
    (FORWARD, {"batch": -1}, "batch must not be negative, got -1"),
    (FORWARD, {"q_len": -1}, "q_len must be 0 to 2^30 - 256, got -1"),
    (FORWARD, {"num_heads": 2**16, "batch": 2**16}, "too large to address"),
    (FORWARD, {**LONG, "num_heads": 2**30, "batch": 1}, "too large to address"),
    (FORWARD, {**LONG, **BIAS}, "ok"),
    (
        FORWARD,
        {**LONG, **BIAS, "num_heads": 8, "bias_heads": 8},
        "bias_batch * bias_heads * q_len * kv_len is too large to address",
    ),
    (FORWARD, TILES, "ok"),
    (
        FORWARD,
        {**LONG, **TILES, "num_heads": 512, "tile_heads": 512, "max_tiles": 2**30},
        "tile lists are too large to address",
    ),
    (FORWARD, {**TILES, "tile_counts": None}, "tile_indices and tile_counts go"),
    (FORWARD, {"q": ARRAY + 8}, "must be aligned to 16 bytes"),
    (FORWARD, {**SEGMENTS, "q_segment_ranges": ARRAY + 4}, "be aligned to 8 bytes"),
    (FORWARD, {"lse": ARRAY + 2}, "must be aligned to their elements"),
    (FORWARD, {**BIAS, "bias": ARRAY + 2}, "must be aligned to their elements"),
    (FORWARD, {**BIAS, "bias": ARRAY + 2, "bias_dtype": 0}, "ok"),
    *((which, {**BIAS, **GRADIENTS, "base": ARRAY}, "ok") for which in range(4)),
    *((which, {**GRADIENTS, "base": ARRAY}, NO_BIAS) for which in range(4)),
    *(
        (which, {**BIAS, **GRADIENTS, "base": ARRAY + 2}, "aligned to their elements")
        for which in range(4)
    ),
    (FORWARD, {**BIAS, "workspace": ARRAY}, "ok"),
    (FORWARD, {"workspace": ARRAY + 8}, "workspace must be aligned to 16 bytes"),
    (FORWARD, {**TILES, **MASKS}, "ok"),
    (FORWARD, MASKS, "tile_masks go with tile lists"),
    (FORWARD, {**TILES, **MASKS, "tile_map": None}, "tile_map and tile_masks go"),
    (FORWARD, {**TILES, **MASKS, "num_tile_masks": 0}, "num_tile_masks must be posi"),
    (FORWARD, {**TILES, **MASKS, "tile_q": 2048}, "tiles of at most 1024"),
    (FORWARD, {**TILES, **MASKS, "tile_masks": ARRAY + 2}, "aligned to their elements"),
    (4, {}, "pass must be a kvblock_backward_pass, got 4"),
    (-1, {}, "pass must be a kvblock_backward_pass, got -1"),
]


@pytest.mark.parametrize(("which", "change", "said"), CASES)
def test_the_check_tells_what_does_not_belong(
    which: int, change: dict[str, Any], said: str
) -> None:
    given = change if which == FORWARD else {**BACKWARD, **change}
    error = check_attention(load_library(), valid(**given), which)
    message = "ok" if error is None else error.decode()
    assert (message == "ok") == (said == "ok"), message
    assert said in message


def test_launchers_refuse_what_the_check_refuses() -> None:
    library = load_library()
    for which, launcher in enumerate(LAUNCHERS):
        launch = getattr(library, f"kvblock_attention_{launcher}")
        assert launch(None, None) == b"attention: the struct is NULL"
        wrong = valid(batch=-1).of(launcher)
        assert launch(ctypes.byref(wrong), None).startswith(
            b"attention: batch must not be negative"
        )
        assert check_attention(library, None, which)


@pytest.mark.skipif(BUILD["cuda"], reason="this build has the CUDA launchers")
def test_without_cuda_a_right_struct_is_told_how_to_rebuild() -> None:
    a = valid().of("forward")
    error = load_library().kvblock_attention_forward(ctypes.byref(a), None)
    assert b"this build of jax_kvblock has no CUDA kernels; rebuild" in error


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["cuda", "cuda_sm90"])
def test_keys_without_queries_get_gradients_of_zero(kernels: str) -> None:
    skip_unless_served(kernels, backward=True)
    k, dk, dv = (jnp.full((1, 4, 1, 8), n, jnp.bfloat16) for n in (1, 2, 3))
    places = [x.block_until_ready().unsafe_buffer_pointer() for x in (k, dk, dv)]
    a = valid(kernels=int(kernels == "cuda_sm90"), q_len=0, q=None, o=None)
    a.k, a.dk, a.dv = places
    a.v = a.k
    struct = a.of("backward_kv")
    error = load_library().kvblock_attention_backward_kv(ctypes.byref(struct), None)
    assert error is None, error
    driver("cuCtxSynchronize")
    assert not np.asarray(dk).any() and not np.asarray(dv).any()
