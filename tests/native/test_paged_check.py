"""The launcher's checks of paged attention, of rows and of 8 bits: the C interface."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from c_interface import load_library
from paged_problems import BF16, NUMBERS, Paged, Scales

ARRAY = 4096  # nothing lies there: a check that looked at an array would crash
BOTH = {"ranges": ARRAY, "tree_mask": ARRAY, "tree_words": 2}
CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "ok"),
    ({"ranges": ARRAY}, "ok"),
    ({"tree_mask": ARRAY, "tree_words": 1}, "ok"),
    (BOTH, "ok"),
    ({"ranges": ARRAY + 2}, "arrays of int32 must be aligned to their elements"),
    ({**BOTH, "tree_mask": ARRAY + 1}, "tree_mask must be aligned to its elements"),
    ({"tree_mask": ARRAY}, "tree_words must be positive with tree_mask, got 0"),
    ({**BOTH, "tree_words": -1}, "tree_words must be positive with tree_mask, got -1"),
    ({"tree_words": 2}, "tree_words must be 0 without tree_mask, got 2"),
]
NARROW = {"cache_dtype": NUMBERS["e4m3"], "narrow_queries": 1}
OF_TOKENS = Scales(data=ARRAY, each=1, block=32, token=2, head=1)
IN_8_BITS: list[tuple[dict[str, Any], str]] = [
    ({}, "ok"),
    ({"k_scale": Scales(data=ARRAY, head=1), "v_scale": Scales(data=ARRAY)}, "ok"),
    ({"rows": 4096, "split_size": 256}, "ok"),
    ({"narrow_queries": 2}, "narrow_queries must be 0 or 1, got 2"),
    ({"dtype": NUMBERS["float16"]}, "dtype must be KVBLOCK_BF16"),
    ({"cache_dtype": NUMBERS["e5m2"]}, "cache_dtype must be KVBLOCK_E4M3"),
    ({"cache_dtype": NUMBERS["int8"]}, "cache_dtype must be KVBLOCK_E4M3"),
    ({"cache_dtype": BF16}, "cache_dtype must be KVBLOCK_E4M3"),
    ({"head_dim": 144}, "head dims are at most 128, got 144"),
    ({"value_dim": 256}, "head dims are at most 128, got 256"),
    ({"head_dim": 72}, "with a cache of 8 bits head dims must be multiples of 16"),
    ({"scale": 0.0}, "scale must be above 0"),
    ({"scale": -1.0}, "scale must be above 0"),
    ({"softcap": 2.0}, "narrow_queries does not go with softcap"),
    ({"ranges": ARRAY}, "narrow_queries does not go with ranges or tree_mask"),
    (
        {"tree_mask": ARRAY, "tree_words": 1},
        "narrow_queries does not go with ranges or tree_mask",
    ),
    ({"table_first": ARRAY}, "narrow_queries does not go with table_first"),
    ({"k_scale": OF_TOKENS}, "scales are one of all, or one for each key head"),
    ({"v_scale": OF_TOKENS}, "scales are one of all, or one for each key head"),
    ({"rows": 2**29, "sequences": 2**25}, "rows are too many for 32 bits"),
    ({"sequences": 2**20, "table_width": 2**26}, "the workspace is too large"),
]


def valid(changes: dict[str, Any], address: Any) -> Paged:
    """Two sequences of 5 blocks of 16 slots, 2 key heads of 64; 3 rows."""
    a = Paged(dtype=BF16, cache_dtype=BF16, calls=1, sequences=2, rows=3)
    a.num_heads, a.num_kv_heads, a.head_dim, a.value_dim = 4, 2, 64, 64
    a.scale, a.window_left, a.window_right = 0.125, -1, 0
    for name in ("q", "query_start", "kv_lens", "block_tables", "o", "workspace"):
        setattr(a, name, ARRAY)
    a.table_width, a.block_size, a.num_blocks = 5, 16, 9
    a.k = a.v = ctypes.addressof(address)
    a.num_arrays = a.num_layers = 1
    for strides in (a.k_strides, a.v_strides):
        strides.block, strides.token, strides.head = 4096, 256, 128
    for name, value in changes.items():
        setattr(a, name, value)
    return a


@pytest.mark.parametrize(("changes", "words"), CASES)
def test_what_rows_see_is_checked(changes: dict[str, Any], words: str) -> None:
    hold(changes, words)


@pytest.mark.parametrize(("changes", "words"), IN_8_BITS)
def test_8_bits_are_checked(changes: dict[str, Any], words: str) -> None:
    hold(NARROW | changes, words)


def hold(changes: dict[str, Any], words: str) -> None:
    check = load_library().kvblock_paged_attention_check
    check.restype = ctypes.c_char_p
    address = (ctypes.c_void_p * 1)(ARRAY)
    said = check(ctypes.byref(valid(changes, address)))
    said = "ok" if said is None else said.decode()
    assert said == words if words == "ok" else words in said
    assert said == "ok" or said.startswith("paged_attention: ")
