"""`PageLayout`: its strides and its `take` say the same, whatever the axes are."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvblock.paged.attention import attend_pages, paged_attention
from jax_kvblock.paged.pages import PageLayout, Pages, PageSizes

# Layouts, and the shapes of arrays with 7 pages of 4 tokens, 3 heads and head dim 8.
LAYOUTS: dict[str, tuple[PageLayout, tuple[tuple[int, ...], ...]]] = {
    "a pair": (PageLayout("P T H D"), ((7, 4, 3, 8), (7, 4, 3, 8))),
    "heads first": (PageLayout("H P T D"), ((3, 7, 4, 8), (3, 7, 4, 8))),
    "heads in a page": (PageLayout("P H T D"), ((7, 3, 4, 8), (7, 3, 4, 8))),
    "by head": (PageLayout("P T (H O) D"), ((7, 4, 6, 8),)),
    "all keys first": (PageLayout("P T (O H) D"), ((7, 4, 6, 8),)),
    "one row": (PageLayout("P T H (O D)"), ((7, 4, 3, 16),)),
    "an axis": (PageLayout("P O T H D"), ((7, 2, 4, 3, 8),)),
    "outermost": (PageLayout("O P T H D"), ((2, 7, 4, 3, 8),)),
    "slots": (PageLayout("(P T) H D", page_size=4), ((28, 3, 8),) * 2),
    "merged heads": (PageLayout("P T (H D)", head_dim=8), ((7, 4, 24),) * 2),
    "all in one": (PageLayout("P T (H O D)", head_dim=8), ((7, 4, 48),)),
    "heads, tokens": (PageLayout("P (H T) D", page_size=4), ((7, 12, 8),) * 2),
    "padded rows": (PageLayout("P T (H O) D", head_dim=8), ((7, 4, 6, 16),)),
    "padded heads": (PageLayout("P T (H O) D", heads=3), ((7, 4, 8, 8),)),
    "padded halves": (PageLayout("P T H (O D)", head_dim=8), ((7, 4, 3, 32),)),
    "padded pages": (PageLayout("P T H D", page_size=4), ((7, 6, 3, 8),) * 2),
    "tiles": (PageLayout("P T (H O) D", heads=3, tiled=True), ((7, 4, 2, 4, 8),)),
    "tiles of one": (PageLayout("P T (H O) D", tiled=True), ((7, 4, 6, 1, 8),)),
    "tiled rows": (PageLayout("P T H (O D)", heads=3, tiled=True), ((7, 4, 2, 2, 16),)),
    "tiles first": (PageLayout("H P T D", heads=3, tiled=True), ((1, 4, 7, 4, 8),) * 2),
    "another value dim": (PageLayout("P T H D"), ((7, 4, 3, 8), (7, 4, 3, 5))),
    "less of values": (PageLayout("P T H (O D)", value_dim=5), ((7, 4, 3, 16),)),
}
# Every layout at one dtype, and every dtype in one layout.
CROSS = [*((name, "bfloat16") for name in LAYOUTS)]
CROSS += [("by head", dtype) for dtype in ("float32", "float8_e5m2", "int8")]


def drawn(shapes: Any, rng: np.random.Generator) -> list[np.ndarray]:
    return [3 * rng.standard_normal(shape) for shape in shapes]


def by_strides(layout: PageLayout, arrays: list[np.ndarray], ids: Any) -> Any:
    """The keys and values of `ids`, an element after the other."""
    sizes = layout.sizes("test", [a.shape for a in arrays])
    itemsize = arrays[0].dtype.itemsize
    strides = layout.strides("test", [a.shape for a in arrays], itemsize)
    for place, dim in zip(strides, (sizes.head_dim, sizes.value_dim), strict=True):
        flat = arrays[place.array].reshape(-1)
        page, token, head, d = np.ix_(
            ids, *(np.arange(n) for n in (sizes.page_size, sizes.heads, dim))
        )
        at = place.offset + page * place.page + token * place.token + head * place.head
        assert not (at % itemsize).any()
        yield flat[at // itemsize + d]


@pytest.mark.parametrize(("name", "dtype"), [*CROSS, ("a pair", "float8_e4m3fn")])
def test_take_reads_what_the_strides_say(name, dtype, rng):
    layout, shapes = LAYOUTS[name]
    sizes = layout.sizes("test", shapes)
    assert sizes[:4] == (7, 4, 3, 8)
    arrays = [a.astype(jnp.dtype(dtype)) for a in drawn(shapes, rng)]
    ids = np.array([5, 0, 6, 5], np.int32)
    taken = layout.take(layout.check("test", arrays), jnp.asarray(ids))
    for got, want in zip(taken, by_strides(layout, arrays, ids), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(
            np.asarray(got).astype(np.float32), want.astype(np.float32)
        )


ONE_DIM = [name for name in LAYOUTS if "value" not in name]


@pytest.mark.parametrize("name", ONE_DIM)
def test_append_writes_where_take_reads(name, rng):
    """And nothing else, but for the heads that fill up a tile."""
    layout, shapes = LAYOUTS[name]
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in drawn(shapes, rng)]
    k, v = jnp.asarray(rng.standard_normal((2, 5, 3, 8)), jnp.bfloat16)
    page, token = jnp.int32([6, -1, 0, 7, 2]), jnp.int32([3, 0, 0, 1, 4])
    made = layout.append(arrays, k, v, page, token)
    everything = jnp.arange(7)
    old, new = (layout.take(a, everything) for a in (arrays, made))
    for before, after, x in zip(old, new, (k, v), strict=True):
        want = before.at[6, 3].set(x[0]).at[0, 0].set(x[2])
        np.testing.assert_array_equal(after, want)
    padding = 2 * 16 if "tile" in name else 0
    for before, after in zip(arrays, made, strict=True):
        changed = int((before != after).sum())
        assert changed <= 2 * 2 * 3 * 8 // len(arrays) + padding


def test_append_says_what_it_cannot():
    layout = PageLayout("P T H D")
    arrays, places = [jnp.zeros((7, 4, 3, 8)), jnp.zeros((7, 4, 3, 5))], jnp.zeros(1)
    k = jnp.zeros((1, 3, 8))
    with pytest.raises(NotImplementedError, match="must have one head dim and shape"):
        layout.append(arrays, k, k, places, places)
    layout, arrays = PageLayout("P T (H O) D", tiled=True), [jnp.zeros((7, 4, 2, 3, 8))]
    with pytest.raises(NotImplementedError, match="tiles must hold heads whole"):
        layout.append(arrays, k, k, places, places)


def test_strides_in_bytes():
    """Of a row that holds both, and of heads that hold both in turns."""
    k, v = PageLayout("P T H (O D)").strides("test", [(9, 16, 4, 128)], 2)
    assert k == (0, 0, 16 * 4 * 256, 4 * 256, 256) and v == (0, 128, *k[2:])
    k, v = PageLayout("H P T D").strides("test", [(4, 9, 16, 80), (4, 9, 16, 64)], 4)
    assert k == (0, 0, 16 * 320, 320, 9 * 16 * 320)
    assert v == (1, 0, 16 * 256, 256, 9 * 16 * 256)
    padded = PageLayout("P T (H O) D", heads=3, head_dim=80)
    assert padded.sizes("test", [(9, 16, 8, 128)]) == PageSizes(9, 16, 3, 80, 80)
    k, v = padded.strides("test", [(9, 16, 8, 128)], 1)
    assert k == (0, 0, 16 * 1024, 1024, 256) and v == (0, 128, *k[2:])


def test_a_row_without_a_head_dim(rng):
    """As of factors, one for each token and head."""
    layout = PageLayout("H P T")
    arrays = rng.standard_normal((2, 3, 7, 4)).astype(np.float32)
    assert layout.sizes("test", [a.shape for a in arrays]) == (7, 4, 3, 1, 1)
    assert layout.strides("test", [a.shape for a in arrays], 4)[1] == (1, 0, 16, 4, 112)
    for made, want in zip(
        layout.take(list(arrays), jnp.int32([5])), arrays, strict=True
    ):
        np.testing.assert_array_equal(made[0, :, :, 0], want[:, 5].T)


def test_layouts_are_values():
    assert PageLayout("P  T ( H O) D") == PageLayout("P T (H O) D")
    assert len({PageLayout("P T H D"), PageLayout(" P T H D"), PAIR_OF_80}) == 2
    assert jax.tree.leaves(PageLayout("P T H D")) == []


PAIR_OF_80 = PageLayout("P T H D", head_dim=80)


@pytest.mark.parametrize(("name", "dtype"), CROSS)
def test_attention_over_pages_of_any_layout(name, dtype, rng):
    """It is paged_attention's over the same keys and values, bit for bit."""
    layout, shapes = LAYOUTS[name]
    arrays = [a.astype(jnp.dtype(dtype)) for a in drawn(shapes, rng)]
    q = rng.standard_normal((5, 6, 8)).astype(np.float32)
    tables, lens = np.array([[3, 1, -1], [0, 6, 2]], np.int32), np.array([6, 11])
    starts = np.array([0, 1, 5])
    made = attend_pages(
        "test", q, Pages(tuple(arrays), layout), tables, lens, query_start=starts
    )
    pair = [jnp.asarray(a) for a in by_strides(layout, arrays, np.arange(7))]
    want = paged_attention(
        q,
        tuple(a.astype(jnp.float32) for a in pair),
        None,
        tables,
        lens,
        query_start=starts,
        return_lse=True,
    )
    for got, same in zip(made, want, strict=True):
        np.testing.assert_array_equal(got, same)


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "dtype"), CROSS)
def test_nothing_of_the_cache_is_copied(name, dtype):
    layout, shapes = LAYOUTS[name]
    more = 4096  # times as many pages
    shapes = [tuple(n * more if n in (7, 28) else n for n in s) for s in shapes]
    arrays = tuple(jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes)
    sizes = layout.sizes("test", shapes)
    given = [
        jax.ShapeDtypeStruct((3, 6, 8), jnp.float32),
        jax.ShapeDtypeStruct((3, 9), jnp.int32),
        jax.ShapeDtypeStruct((3,), jnp.int32),
    ]

    def step(arrays: Any, q: Any, tables: Any, lens: Any) -> Any:
        pages = Pages(arrays, layout)
        return attend_pages("test", q[:, None], pages, tables, lens)

    compiled = jax.jit(step).lower(arrays, *given).compile()
    cache = math.prod(sizes[:4]) * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < cache / 4


# ---- messages ------------------------------------------------------------------------

AXES = {
    "P T D": "must name each of P, T and H once, O and D at most",
    "P T H D D": "must name each of P, T and H once",
    "P T H H D": "must name each of P, T and H once",
    "P T O O H D": "must name each of P, T and H once",
    "P T (H (O)) D": "must name each of P, T and H once",
    "P L T H D": "must name each of P, T and H once",
    "P T D H": "must end with D",
    "(T P) H D": "P must be a dimension of its own or the first",
    "(P T) H D": r"page_size must be given where T is merged behind another axis",
    "P T (H D)": "head_dim must be given where D is merged",
}


@pytest.mark.parametrize("axes", AXES)
def test_axes_that_are_no_layout(axes):
    with pytest.raises(ValueError, match="^PageLayout: .*" + AXES[axes]):
        PageLayout(axes)


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="PageLayout: heads must be an integer of at"):
        PageLayout("P T H D", heads=0)


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


WRONG: dict[str, tuple[PageLayout, Any, type[Exception], str]] = {
    "one of a pair": (
        PAIR_OF_80,
        array(9, 4, 2, 80),
        TypeError,
        r"pages in 'P T H D' must be a pair \(k_pages, v_pages\), got float32\[9",
    ),
    "two for one": (
        PageLayout("P T (H O) D"),
        (array(9, 4, 2, 8),) * 2,
        TypeError,
        r"pages in 'P T \(H O\) D' must be one array, got tuple",
    ),
    "rank": (
        PAIR_OF_80,
        (array(9, 4, 80),) * 2,
        ValueError,
        "pages must have the dims P T H D, got",
    ),
    "odd": (
        PageLayout("P T (H O) D"),
        (array(9, 4, 3, 8),),
        ValueError,
        r"dimension \(H O\) of the pages must be a multiple of 2, got 3",
    ),
    "no room": (
        PAIR_OF_80,
        (array(9, 4, 2, 64),) * 2,
        ValueError,
        "must have room for head_dim=80, got 64",
    ),
    "no room for values": (
        PAIR_OF_80,
        (array(9, 4, 2, 80), array(9, 4, 2, 64)),
        ValueError,
        "must have room for value_dim=80, got 64",
    ),
    "none": (
        PageLayout("P T H D"),
        (array(0, 4, 2, 8),) * 2,
        ValueError,
        "must have room for pages=1, got 0",
    ),
    "that differ": (
        PageLayout("P T H D"),
        (array(9, 4, 2, 8), array(9, 4, 3, 8)),
        ValueError,
        "must be alike but for their head dim.*they differ in heads",
    ),
    "of two dtypes": (
        PageLayout("P T H D"),
        (array(9, 4, 2, 8), array(9, 4, 2, 8, dtype=np.float16)),
        TypeError,
        "k_pages and v_pages must have one dtype",
    ),
    "no arrays": (
        PageLayout("P T H D"),
        ([[1.0]], [[1.0]]),
        TypeError,
        "k_pages must be an array, got list",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_messages(name):
    layout, arrays, error, message = WRONG[name]
    with pytest.raises(error, match="^f: .*" + message):
        layout.check("f", arrays)


def test_pages_hold_numbers():
    with pytest.raises(TypeError, match="f: pages must hold floats of 8 bits or more"):
        attend_pages(
            "f",
            array(1, 1, 2, 8),
            Pages((array(9, 4, 2, 8, dtype=np.int16),) * 2, PageLayout("P T H D")),
            np.zeros((1, 1), np.int32),
            np.zeros(1, np.int32),
        )
