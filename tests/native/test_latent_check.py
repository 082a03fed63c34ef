"""What the C interface of paged attention says of wrong calls over latent caches."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from c_interface import load_library
from paged_problems import COUNTERS, Paged

# Nothing lies there: a check that looked at an array would crash.
ARRAY = 4096
TABLE = (ctypes.c_void_p * 1)(ARRAY)
UNALIGNED = (ctypes.c_void_p * 1)(ARRAY + 8)
NULL = (ctypes.c_void_p * 1)(None)


def latent(**changes: Any) -> Paged:
    a = Paged(calls=1, sequences=2, rows=2, num_heads=16, num_kv_heads=1)
    a.head_dim, a.value_dim, a.values_in_keys = 576, 512, 1
    a.scale, a.window_left, a.window_right = 1.0, -1, 0
    a.q = a.query_start = a.kv_lens = a.block_tables = a.o = a.workspace = ARRAY
    a.table_width, a.block_size, a.num_blocks = 3, 16, 9
    a.num_arrays = a.num_layers = 1
    a.k = ctypes.addressof(TABLE)
    a.k_strides.block, a.k_strides.token = 16 * 1152, 1152
    for name, value in changes.items():
        of = a
        for part in name.split(".")[:-1]:
            of = getattr(of, part)
        setattr(of, name.split(".")[-1], value)
    return a


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "ok"),
    ({"head_dim": 192, "value_dim": 128}, "ok"),
    ({"num_heads": 128}, "ok"),
    ({"v": None, "v_strides.token": 3}, "ok"),
    ({"values_in_keys": 2}, "values_in_keys must be 0 or 1, got 2"),
    ({"value_dim": 576}, "must be 576 and 512, or 192 and 128, got 576 and 576"),
    ({"head_dim": 128, "value_dim": 64}, "or 192 and 128, got 128 and 64"),
    (
        {"num_kv_heads": 2},
        "with values_in_keys num_kv_heads must be 1, got 2",
    ),
    ({"cache_dtype": 3}, "with values_in_keys cache_dtype must be dtype, got 3"),
    ({"k": None}, "k or v is NULL"),
    ({"k": ctypes.addressof(NULL)}, "an array of k or v is NULL, of number, got 0"),
    ({"k": ctypes.addressof(UNALIGNED)}, "must be aligned to 16 bytes, array, got 0"),
    ({"k_strides.token": 1160}, "k_strides must be multiples of 16"),
    ({"values_in_keys": 0}, "head_dim and value_dim must be"),
    ({"softcap": 1e-9}, "scale / softcap"),
    ({"q": None}, "q is NULL"),
]


@pytest.mark.parametrize(("changes", "said"), CASES)
def test_the_check_says_what_is_wrong(changes: dict[str, Any], said: str) -> None:
    check = load_library().kvblock_paged_attention_check
    check.restype = ctypes.c_char_p
    message = check(ctypes.byref(latent(**changes)))
    assert said in (message or b"ok").decode()


def test_keys_and_values_of_their_own_have_smaller_head_dims() -> None:
    check = load_library().kvblock_paged_attention_check
    check.restype = ctypes.c_char_p
    a = latent(values_in_keys=0, v=ctypes.addressof(TABLE))
    assert b"head_dim" in check(ctypes.byref(a))


@pytest.mark.parametrize("heads", [1, 16, 20, 128])
def test_the_workspace_is_that_of_as_many_rows(heads: int) -> None:
    sized = load_library().kvblock_paged_attention_workspace
    sized.restype = ctypes.c_int64
    a = latent(num_heads=heads)
    rows = 16 if heads <= 16 else 32 if heads <= 32 else 64
    floats = 2 * 320 * (rows * 513 + 1)
    assert sized(ctypes.byref(a)) == -(-4 * floats // 16) * 16 + COUNTERS.itemsize
