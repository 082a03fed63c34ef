"""The launcher's check of what rows of paged attention see: the C interface."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from c_interface import load_library
from paged_problems import BF16, Paged

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
    check = load_library().kvblock_paged_attention_check
    check.restype = ctypes.c_char_p
    address = (ctypes.c_void_p * 1)(ARRAY)
    said = check(ctypes.byref(valid(changes, address)))
    said = "ok" if said is None else said.decode()
    assert said == words if words == "ok" else words in said
    assert said == "ok" or said.startswith("paged_attention: ")
