"""Masks as functions of a pair's indices, and what attention over them is held to."""

from __future__ import annotations

import numpy as np
import pytest
from attention_bar import assert_close
from attention_model import truth

from jax_kvblock import AttentionTiles

T, S, HEADS = 300, 340, 2  # neither is whole tiles of 128

DOCUMENTS = np.sort(np.random.default_rng(1).integers(0, 5, S))
CHANCE = np.random.default_rng(2).random((1, HEADS, T, S)) < 0.3

MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "documents": lambda b, h, q, kv: (q >= kv) & (DOCUMENTS[q] == DOCUMENTS[kv]),
    "prefix": lambda b, h, q, kv: (kv < 140) | (q >= kv),
    "window with holes": lambda b, h, q, kv: (abs(q - kv) < 90) & ((q - kv) % 7 != 3),
    "by head": lambda b, h, q, kv: (kv - q) % (h + 2) == 0,
    "chance": lambda b, h, q, kv: CHANCE[0, h, q, kv],
    "empty rows and keys": lambda b, h, q, kv: (q % 5 > 1) & (q < 200) & (kv > 150),
    "everything": lambda b, h, q, kv: True,
    "nothing": lambda b, h, q, kv: False,
}
ROOM = {"max_tiles": 3, "max_masks": 18}  # so that one program serves all masks
by_mask = pytest.mark.parametrize("name", MASKS)


def of_function(mask, t=T, s=S, heads=HEADS, **options):
    sizes = {"q_len": t, "kv_len": s, "heads": heads}
    return AttentionTiles.from_mask(mask, **sizes, **options)


def assert_true(got, call):
    """got: out, and the gradients by name."""
    out, slopes = got
    want = truth(call, (call.cotangents[0], np.zeros_like(call.cotangents[1])))
    assert_close(out, want["out"])
    for name, x in slopes.items():
        assert_close(x, want[f"d_{name}"])
