"""What `paged_attention` says of arguments that are wrong."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvblock import (
    BlockSpec,
    KVPool,
    paged_attention,
)

Q, PAGES = np.zeros((5, 4, 16), np.float32), np.zeros((9, 16, 2, 16), np.float32)
GIVEN = {
    "q": Q,
    "pages": (PAGES, PAGES),
    "layer": None,
    "block_tables": np.zeros((2, 3), np.int32),
    "kv_lens": np.zeros(2, np.int32),
    "query_start": np.zeros(3, np.int32),
}
SPEC = BlockSpec(3, 2, 16, 2, 16, "float32")
STANDIN = KVPool(jax.ShapeDtypeStruct((9, *SPEC.block_shape), jnp.float32), SPEC)
WRONG = {
    "q of rank 4": ({"q": Q[None]}, ValueError, r"q must be \[tokens, N, D\], got"),
    "q of rank 3": (
        {"query_start": None},
        ValueError,
        r"q must be \[B, T, N, D\].*pass query_start",
    ),
    "integers": ({"q": Q.astype(int)}, TypeError, "q must be floats"),
    "another dtype": (
        {"q": Q.astype(np.float16)},
        TypeError,
        r"one dtype, got float16 and float32; cast q with .astype\('float32'\)",
    ),
    "pages": ({"pages": PAGES}, TypeError, r"a KVPool or a pair \(k_pages, v_pages\)"),
    "pages of rank 5": (
        {"pages": (PAGES[None], PAGES)},
        ValueError,
        r"pages\[0\], k_pages, must be \[P, T, K, D\]",
    ),
    "pages that differ": (
        {"pages": (PAGES, PAGES[:1])},
        ValueError,
        "must be alike but for their last dim",
    ),
    "no blocks": (
        {"pages": (PAGES[:0], PAGES[:0])},
        ValueError,
        "blocks of at least one token, got",
    ),
    "heads": (
        {"q": Q[:, :3]},
        ValueError,
        "a multiple of the blocks' 2 KV heads, got 3",
    ),
    "head dim": ({"q": Q[..., :8]}, ValueError, "must have one head dim"),
    "a layer of a pair": ({"layer": 0}, ValueError, "layer must be None with a pair"),
    "no layer": ({"pages": STANDIN}, TypeError, "layer must be an integer or an int32"),
    "layer 3": ({"pages": STANDIN, "layer": 3}, IndexError, "must be 0 to 2, got 3"),
    "no tables": (
        {"block_tables": np.zeros(3, np.int32)},
        ValueError,
        r"block_tables must be int32\[B, W\]",
    ),
    "float tables": (
        {"block_tables": np.zeros((2, 3))},
        TypeError,
        r"block_tables must be int32\[B, W\].*cast",
    ),
    "no lengths": ({"kv_lens": None}, TypeError, "kv_lens is missing; pass int32"),
    "three lengths": (
        {"kv_lens": np.zeros(3, np.int32)},
        ValueError,
        r"kv_lens must be int32\[2\]",
    ),
    "two starts": (
        {"query_start": np.zeros(2, np.int32)},
        ValueError,
        r"query_start must be int32\[3\], the first row of each",
    ),
    "both": (
        {"q_lens": np.zeros(2, np.int32)},
        ValueError,
        "query_start and q_lens say the same",
    ),
    "another batch": (
        {"q": Q[:, None], "query_start": None},
        ValueError,
        "one batch, got .* and 2 rows of block_tables",
    ),
    "a window": ({"window": 4}, ValueError, r"window must be a pair \(left, right\)"),
    "an implementation": (
        {"implementation": "cudnn"},
        ValueError,
        "implementation must be one of None, 'cuda', 'xla'",
    ),
    "ranges of rank 3": (
        {"ranges": np.zeros((1, 5, 2), np.int32)},
        ValueError,
        r"ranges must be int32\[tokens, 2\], got",
    ),
    "ranges of other rows": (
        {"ranges": np.zeros((4, 2), np.int32)},
        ValueError,
        r"ranges must be int32\[tokens, 2\] = \[5, 2\], of each row .*got .*; stack",
    ),
    "ranges of one number": (
        {"ranges": np.zeros((5, 1), np.int32)},
        ValueError,
        r"ranges must be int32\[tokens, 2\] = \[5, 2\]",
    ),
    "ranges of a batch": (
        {
            "q": np.zeros((2, 3, 4, 16), np.float32),
            "query_start": None,
            "ranges": np.zeros((2, 2), np.int32),
        },
        ValueError,
        r"ranges must be int32\[B, T, 2\]",
    ),
    "float ranges": (
        {"ranges": np.zeros((5, 2))},
        TypeError,
        r"ranges must be int32\[tokens, 2\].*cast",
    ),
    "a mask of booleans": (
        {"tree_mask": np.zeros((5, 32), bool)},
        TypeError,
        r"tree_mask must be bits in int32 or uint32\[tokens, words\], got .*packbits",
    ),
    "bits in int64": (
        {"tree_mask": np.zeros((5, 1), np.int64)},
        TypeError,
        "tree_mask must be bits in int32 or uint32",
    ),
    "bits of other rows": (
        {"tree_mask": np.zeros((4, 1), np.uint32)},
        ValueError,
        r"tree_mask must be .* with a row for each of q's \[5\], got .*; rows without",
    ),
    "bits of rank 1": (
        {"tree_mask": np.zeros(5, np.uint32)},
        ValueError,
        r"tree_mask must be int32\[tokens, words\]",
    ),
    "bits beyond int32 in a list": (
        {"tree_mask": [[2**32 - 1]] * 5},
        ValueError,
        "tree_mask must fit in int32",
    ),
    "a flag": ({"causal": 1}, TypeError, "causal must be"),
    "a part": ({"split_size": -3}, ValueError, "keys of a part, got -3; it is"),
    "heads of all": ({"q_heads": (0, 6)}, ValueError, "multiple of q's 4, got 6"),
}


@pytest.mark.parametrize("name", WRONG)
def test_messages(name):
    changes, error, message = WRONG[name]
    with pytest.raises(error, match="^paged_attention: .*" + message):
        jax.eval_shape(lambda: paged_attention(**GIVEN | changes))


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        ("x", TypeError, "got 'x'; pass a Python float"),
        (True, TypeError, "got True; pass a Python float"),
        ([[1], [1, 2]], TypeError, r"got \[\[1\], \[1, 2\]\]; pass a Python float"),
        (object(), TypeError, "got <object"),
        (np.ones(3, np.float32), ValueError, r"got float32\[3\]; one for all, for ea"),
        (np.ones(2, np.float16), ValueError, r"got float16\[2\]; cast it with .asty"),
    ],
)
def test_messages_of_scales(scale, error, message):
    pages = jnp.asarray(PAGES, jnp.float8_e4m3fn)
    given = GIVEN | {"pages": (pages, pages), "k_scale": scale}
    with pytest.raises(error, match="^paged_attention: k_scale must be .*" + message):
        jax.eval_shape(lambda: paged_attention(**given))


@pytest.mark.parametrize("name", ["q", "block_tables"])
def test_symbolic_shapes_are_errors(name):
    shapes = {"q": "b, 1, 4, 16", "block_tables": "2, w"}
    given = GIVEN | {"q": Q[:2, None], "query_start": None}
    dtype = given.pop(name).dtype
    some = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shapes[name]), dtype)
    attend = jax.jit(lambda a: paged_attention(**given | {name: a}))
    with pytest.raises(
        NotImplementedError, match=f"^paged_attention: {name} must have a shape of numb"
    ):
        jax.export.export(attend)(some)
