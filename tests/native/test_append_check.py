"""The launcher's own check of what no Python caller can get wrong: the C interface."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from append_launches import CAppend
from c_interface import load_library

from jax_kvblock.core.ffi import BUILD

ARRAY = 4096  # nothing lies there: a check that looked at an array would crash
F32, E4M3 = 2, 3
ROTATION = {"rotary_dim": 8, "inv_freq": ARRAY, "positions": ARRAY}
TABLE = {"rotary_dim": 8, "cos_sin": ARRAY, "cos_sin_rows": 4}
FP8 = {"cache_dtype": E4M3}
GIVEN = {**FP8, "k_scale": ARRAY, "v_scale": ARRAY}
GIVEN |= {"k_scale_heads": 1, "v_scale_heads": 2}
COMPUTED = {**FP8, "k_scales": ARRAY, "v_scales": ARRAY, "scale_layers": 3}
NORMS = {"q_norm": ARRAY, "k_norm": ARRAY, "q_norm_dtype": F32, "k_norm_dtype": F32}
BY_LAYERS = {"layer_table_stride": 1, "layer_stride": 0}


def valid(changes: dict[str, Any], buffers: tuple[int, ...] = (ARRAY,)) -> CAppend:
    """A pool of 3 layers and 5 blocks of 4 slots, 2 heads of 8; 3 tokens."""
    a = CAppend(dtype=F32, cache_dtype=F32, tokens=3, num_heads=4, num_kv_heads=2)
    a.head_dim, a.num_outer, a.layers = 8, 2, 1
    a.q = a.k = a.v = a.q_out = a.slots = ARRAY
    a.buffers = (ctypes.c_void_p * len(buffers))(*buffers)
    a.num_buffers, a.buffer_bytes = len(buffers), 5 * 3 * 2 * 4 * 2 * 8 * 4
    a.num_layers, a.num_blocks, a.block_size = 3, 5, 4
    strides = {"layer": 512, "block": 1536, "outer": 256, "token": 64, "head": 32}
    for axis, stride in strides.items():
        setattr(a, f"{axis}_stride", stride)
    a.dim_stride = 4
    for name, value in changes.items():
        setattr(a, name, value)
    return a


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "ok"),
    (ROTATION, "ok"),
    (TABLE, "ok"),
    ({**TABLE, "cos_sin_rows": 1, "positions": ARRAY}, "ok"),
    (GIVEN, "ok"),
    (COMPUTED, "ok"),
    (NORMS, "ok"),
    ({"num_heads": 0, "q": None, "q_out": None}, "ok"),
    ({"num_outer": 1, "v": None}, "ok"),
    ({"num_heads": 0, "layers": 3}, "ok"),
    ({"layer_at": ARRAY}, "ok"),
    ({"zero_tail": 1}, "ok"),
    ({"q_token_stride": 64, "kv_token_stride": 64}, "ok"),
    ({"q_token_stride": 32, "kv_token_stride": 16}, "ok"),
    ({"tokens": 0, "k": None, "v": None, "q": None, "slots": None}, "ok"),
    ({"dtype": E4M3}, "dtype must be KVBLOCK_APPEND_BF16, F16 or F32, got 3"),
    ({"cache_dtype": 0}, "cache_dtype must be dtype, or one of 8 bits, got 0"),
    ({"cache_dtype": 6}, "cache_dtype must be dtype, or one of 8 bits, got 6"),
    ({"tokens": -1}, "tokens must be 0 to 2^31 - 1, got -1"),
    ({"num_kv_heads": 0}, "num_kv_heads must be positive, got 0"),
    ({"num_heads": -1}, "num_heads must not be negative, got -1"),
    ({"num_heads": 1 << 18}, "at most 2^17 rows of heads to a token"),
    ({"num_outer": 3}, "num_outer must be 1 or 2, got 3"),
    ({"head_dim": 0}, "head_dim must be positive"),
    ({"head_dim": 513}, "a row at most 2048 bytes, got 513"),
    ({"layer": 3}, "layer and layers must lie within num_layers = 3, got 3 and 1"),
    ({"layer": -1}, "layer and layers must lie within num_layers = 3, got -1 and 1"),
    ({"layers": 2}, "layers must be 1 with q, got 2"),
    ({"layers": 2, "layer_at": ARRAY}, "layers must be 1 with layer_at, got 2"),
    ({"q_token_stride": 31}, "q_token_stride must be 0, or at least num_heads * head_"),
    ({"q_token_stride": -64}, "q_token_stride must be 0, or at least num_heads * head"),
    ({"kv_token_stride": 15}, "kv_token_stride must be 0, or at least num_kv_heads * "),
    ({"kv_token_stride": -16}, "kv_token_stride must be 0, or at least num_kv_heads "),
    ({"kv_token_stride": 1 << 60}, "q_token_stride or kv_token_stride is too large to"),
    ({"q_token_stride": 1 << 60}, "q_token_stride or kv_token_stride is too large to"),
    ({"num_blocks": 1 << 30}, "num_blocks * block_size must be 1 to 2^31 - 1"),
    ({"block_size": 0}, "num_blocks * block_size must be 1 to 2^31 - 1"),
    ({"num_buffers": 0}, "num_buffers must be 1 to 256, got 0"),
    ({"num_buffers": 257}, "num_buffers must be 1 to 256, got 257"),
    ({"layer_table_stride": 2}, "layer_table_stride must be 0 or 1, got 2"),
    (BY_LAYERS, "num_buffers must be num_layers where each layer is a buffer, got 1"),
    ({"token_stride": -4}, "token_stride must not be negative, got -4"),
    ({"head_stride": 30}, "head_stride must be a multiple of the element's size"),
    ({"block_stride": 1 << 62}, "block_stride is too large to address"),
    ({"block_stride": 1540}, "the cache reaches 7696 bytes, past the end of a buffer"),
    ({"buffer_bytes": 7679}, "the cache reaches 7680 bytes, past the end of a buffer"),
    ({"k_scale": ARRAY}, "scales are for caches of 8 bits"),
    (FP8, "a cache of 8 bits has k_scale, or k_scales, and one of both"),
    ({**GIVEN, **COMPUTED}, "a cache of 8 bits has k_scale, or k_scales, and one"),
    ({**GIVEN, "v_scale": None}, "k_scale and v_scale go with k and v"),
    ({**COMPUTED, "v_scales": None}, "k_scales and v_scales go with k and v"),
    ({**GIVEN, "k_scale_heads": 3}, "k_scale_heads must be 1 or num_kv_heads, got 3"),
    ({**COMPUTED, "scale_layers": 2}, "scale_layers must be num_layers, or 1 where"),
    ({**ROTATION, "rotary_dim": 7}, "rotary_dim must be even, and 0 to head_dim"),
    ({**ROTATION, "rotary_dim": 10}, "rotary_dim must be even, and 0 to head_dim"),
    ({**ROTATION, "inv_freq": None}, "rotary_dim goes with inv_freq or cos_sin"),
    ({**ROTATION, **TABLE}, "rotary_dim goes with inv_freq or cos_sin, and with one"),
    ({**ROTATION, "positions": None}, "positions is NULL"),
    ({**TABLE, "cos_sin_rows": 2}, "cos_sin_rows must be positive, and tokens without"),
    ({"norm_eps": -1.0}, "norm_eps must not be negative"),
    ({"norm_eps": float("nan")}, "norm_eps must not be negative"),
    ({**NORMS, "q_norm_dtype": 0}, "q_norm_dtype and k_norm_dtype must be dtype or"),
    ({"q": None}, "q is NULL"),
    ({"q_out": None}, "q_out is NULL"),
    ({"k": None}, "k is NULL"),
    ({"v": None}, "v is NULL"),
    ({"slots": None}, "slots is NULL"),
    ({"k": ARRAY + 2}, "arrays must be aligned to their elements"),
    ({"slots": ARRAY + 2}, "arrays must be aligned to their elements"),
]


def check(a: CAppend | None) -> str:
    said = load_library().kvblock_append_check(None if a is None else ctypes.byref(a))
    return "ok" if said is None else said.decode()


@pytest.mark.parametrize(("changes", "words"), CASES)
def test_every_number_is_checked(changes: dict[str, Any], words: str) -> None:
    said = check(valid(changes))
    assert said == "ok" == words or (said.startswith("append: ") and words in said)


def test_buffers_are_checked() -> None:
    assert check(valid(BY_LAYERS, (ARRAY,) * 3)) == "ok"
    assert (
        check(valid(BY_LAYERS, (ARRAY, 0, ARRAY))) == "append: a buffer is NULL, got 1"
    )
    assert "not aligned to its elements, got 0" in check(valid({}, (ARRAY + 2,)))
    assert check(valid({"buffers": None})) == "append: buffers is NULL"
    assert check(None) == "append: the struct is NULL"


def test_the_launcher_checks_first() -> None:
    library = load_library()
    a = valid({"tokens": -1})
    said = library.kvblock_append_cuda(ctypes.byref(a), None).decode()
    assert said == "append: tokens must be 0 to 2^31 - 1, got -1"
    if not BUILD["cuda"]:
        said = library.kvblock_append_cuda(ctypes.byref(valid({})), None).decode()
        assert "no CUDA kernels; rebuild it where nvcc is on the PATH" in said
