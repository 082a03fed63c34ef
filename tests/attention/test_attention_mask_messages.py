"""What is said of masks and tiles that cannot be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import check

from jax_kvblock import AttentionTiles, flash_attention

W = "AttentionTiles.from_mask"

ONES = np.ones((5, 7), bool)
POSITIONS = {"q_len": 5, "kv_len": 7}
causal = lambda b, h, q, kv: q >= kv  # noqa: E731
FORM = "mask|bool[T, S] or bool[B|1, N|1, T, S]"
BAD = {
    "no bools": (TypeError, f"{FORM}|int32[5, 7]|astype(bool)", np.int32(ONES), {}),
    "rank": (ValueError, f"{FORM}|bool[1, 5, 7]", ONES[None], {}),
    "no array": (TypeError, "mask|array|got str", "causal", {}),
    "other T": (ValueError, "mask|q_len = 6|[5, 7]|leave q_len", ONES, {"q_len": 6}),
    "other B": (ValueError, "mask|batch = 2|bool[5, 7]", ONES, {"batch": 2}),
    "no q_len": (ValueError, "q_len|given|None|q.shape[1]", causal, {"kv_len": 7}),
    "no kv_len": (ValueError, "kv_len|given|None|k.shape[1]", causal, {"q_len": 7}),
    "-1": (ValueError, "kv_len|negative|-1", causal, {"q_len": 1, "kv_len": -1}),
    "1.5": (TypeError, "q_len|an integer|1.5", causal, {"q_len": 1.5, "kv_len": 1}),
    "two arguments": (
        TypeError, "mask|mask(b, h, q, kv)|lambda", lambda q, k: q >= k, POSITIONS
    ),
    "scores": (
        TypeError, "mask|bools|int32[5, 7]", lambda b, h, q, k: q - k, POSITIONS
    ),
    "one axis": (
        ValueError, "mask|bool[5, 7]|[5, 1]|[1, 7]|bool[5]",
        lambda b, h, q, k: q[:, 0] > 2, POSITIONS,
    ),
    "block_q": (ValueError, "block_q|multiple of 16|got 24", ONES, {"block_q": 24}),
    "block_kv": (TypeError, "block_kv|an integer|got 16.0", ONES, {"block_kv": 16.0}),
    "max_tiles": (ValueError, "max_tiles|at least 1|got 0", ONES, {"max_tiles": 0}),
    "max_masks": (
        ValueError, "max_masks|at least 1|partial tiles|got 0", ~np.eye(5, dtype=bool),
        {"max_masks": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_masks_that_cannot_be(bad):
    error, words, mask, options = BAD[bad]
    check(W, error, words, lambda: AttentionTiles.from_mask(mask, **options))


def test_a_traced_mask_says_to_make_tiles_outside_of_jit():
    words = "mask|traced bool[5, 7]|outside of jit|as an argument"
    check(W, TypeError, words, lambda: jax.jit(AttentionTiles.from_mask)(ONES))

    @jax.jit
    def of_ids(ids):
        mask = lambda b, h, q, kv: ids[q] == ids[kv]  # noqa: E731
        return AttentionTiles.from_mask(mask, q_len=5, kv_len=5)

    words = "mask|traced bool[5, 5]|outside of jit|as an argument"
    check(W, TypeError, words, lambda: of_ids(jnp.zeros(5, jnp.int32)))


LIST, COUNT = np.int32([[[[0, 1]]]]), np.int32([[[2]]])
BITS = np.ones((3, 128, 4), np.uint32)
SHAPE = "tiles.masks|uint32[P, 128, 4]"
BAD_TILES = {
    "no masks": (ValueError, "partial|masks|together|got no masks", LIST, None),
    "no partial": (ValueError, "partial|masks|together|got no partial", None, BITS),
    "partial's shape": (
        ValueError, "tiles.partial|[1, 1, 1, 2]|int32[1, 1, 1, 1]", LIST[..., :1], BITS
    ),
    "partial's dtype": (TypeError, "partial|int32|float32", np.float32(LIST), BITS),
    "int32 bits": (TypeError, f"{SHAPE}|got int32", LIST, np.int32(BITS)),
    "words": (ValueError, f"{SHAPE}|[3, 128, 3]", LIST, BITS[..., :3]),
    "rank": (ValueError, f"{SHAPE}|[128, 4]", LIST, BITS[0]),
    "beyond": (ValueError, "less than 3|got 3 in partial[0, 0, 0, 1]", LIST * 3, BITS),
    "below": (ValueError, "-1|got -2 in partial[0, 0, 0, 0]", LIST - 2, BITS),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_TILES)
def test_bits_that_cannot_be(bad):
    error, words, partial, masks = BAD_TILES[bad]
    q, k = jnp.zeros((1, 5, 1, 8)), jnp.zeros((1, 200, 1, 8))
    tiles = AttentionTiles(LIST, COUNT, 128, 128, partial, masks)
    f = lambda: flash_attention(q, k, k, tiles=tiles)  # noqa: E731
    check("flash_attention", error, words, f)


def test_a_mask_for_other_queries_says_so():
    q = jnp.zeros((1, 200, 1, 8))
    tiles = AttentionTiles.from_mask(np.tri(100, 100) > 0)
    words = "tiles.indices|T = 200|got int32[1, 1, 1, 1]"
    f = lambda: flash_attention(q, q, q, tiles=tiles)  # noqa: E731
    check("flash_attention", ValueError, words, f)
