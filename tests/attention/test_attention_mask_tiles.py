"""Tiles of any mask: what is made of it, and that attention follows the bits."""

from __future__ import annotations

import contextlib
import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close, assert_exact
from attention_masks import (
    DOCUMENTS,
    HEADS,
    MASKS,
    ROOM,
    S,
    T,
    assert_true,
    by_mask,
    of_function,
)
from attention_model import (
    BF16,
    F32,
    cast,
    draw,
    draw_bias,
    draw_segments,
    jit,
    tile_mask,
    truth,
    who_attends,
)
from meshes import mesh_of
from messages import check

from jax_kvblock import AttentionTiles, flash_attention
from jax_kvblock.attention import arguments, dense, dispatch
from jax_kvblock.attention.config import _tiles_of_children

W = "AttentionTiles.from_mask"
i32 = lambda *x: jnp.asarray(x, jnp.int32)  # noqa: E731


def whole(mask, t=T, s=S, heads=HEADS):
    """The array of a function of positions."""
    q, kv = np.arange(t)[:, None], np.arange(s)[None]
    made = [np.broadcast_to(mask(0, h, q, kv), (t, s)) for h in range(heads)]
    return np.stack(made)[None]


def assert_same_tiles(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


# ---- what is made of a mask ----------------------------------------------------------


@by_mask
@pytest.mark.parametrize("blocks", [(128, 128), (16, 48), (256, 128), (64, 32)])
def test_tiles_hold_the_mask(name, blocks):
    """The model reads them by the letter of the docstring."""
    mask = MASKS[name]
    tiles = of_function(mask, block_q=blocks[0], block_kv=blocks[1])
    np.testing.assert_array_equal(tile_mask(tiles, T, S), whole(mask))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@by_mask
def test_an_array_and_a_function_give_the_same_tiles(name, kind):
    array = whole(MASKS[name])
    want = of_function(MASKS[name])
    assert_same_tiles(AttentionTiles.from_mask(kind(array)), want)
    if name != "by head":
        alone = AttentionTiles.from_mask(kind(array[0, 0]))
        assert_same_tiles(alone, of_function(MASKS[name], heads=1))


@pytest.mark.parametrize("t, s", [(0, 5), (5, 0), (0, 0), (1, 1), (16, 16), (17, 47)])
def test_sizes_at_the_edges(rng, t, s):
    mask = rng.random((2, 3, t, s)) < 0.5
    tiles = AttentionTiles.from_mask(mask, block_q=16, block_kv=16)
    assert tiles.counts.shape == (2, 3, -(-t // 16))
    np.testing.assert_array_equal(tile_mask(tiles, t, s), mask)


def test_bits_lie_along_the_keys():
    """Bit c of word w of a row is key 32 w + c; pairs that do not exist are 0."""
    mask = np.zeros((3, 70), bool)
    mask[1, [0, 31, 32, 69]] = True
    tiles = AttentionTiles.from_mask(mask)
    assert tiles.masks.shape == (1, 128, 4)
    assert tiles.masks.dtype == jnp.uint32
    want = np.zeros((128, 4), np.uint32)
    want[1] = [1 | 1 << 31, 1, 1 << 5, 0]
    np.testing.assert_array_equal(tiles.masks[0], want)


def test_a_causal_diagonal_is_one_partial_tile():
    tiles = AttentionTiles.from_mask(MASKS["causal"], q_len=512, kv_len=512)
    assert tiles.masks.shape == (1, 128, 4)
    np.testing.assert_array_equal(tiles.counts, [[[1, 2, 3, 4]]])
    np.testing.assert_array_equal(tiles.indices[0, 0, 2], [0, 1, 2, -1])
    np.testing.assert_array_equal(tiles.partial[0, 0, 2], [-1, -1, 0, -1])


def test_tiles_at_the_ends_are_full_where_all_that_exists_attends():
    tiles = of_function(MASKS["everything"])
    assert tiles.masks is None
    assert tiles.partial is None
    np.testing.assert_array_equal(tiles.counts, np.full((1, HEADS, 3), 3))


def test_a_function_of_the_batch_and_the_heads():
    lens = np.array([[3, 20], [33, 0]])
    tiles = AttentionTiles.from_mask(
        lambda b, h, q, kv: kv < lens[b, h], q_len=9, kv_len=40, batch=2, heads=2
    )
    found = tile_mask(tiles, 9, 40)
    np.testing.assert_array_equal(found[:, :, 0].sum(-1), lens)
    np.testing.assert_array_equal(tiles.counts[..., 0], [[1, 1], [1, 0]])


def test_a_function_of_jax_arrays():
    ids = jnp.asarray(DOCUMENTS)
    tiles = of_function(lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]))
    assert_same_tiles(tiles, of_function(MASKS["documents"]))


def test_a_function_is_asked_for_what_exists_in_pieces_that_are_small():
    asked = np.zeros((T, 9000), int)

    def mask(b, h, q, kv):
        assert q.dtype == kv.dtype == np.int32
        assert q.shape[1] == kv.shape[0] == 1
        assert q.size * kv.size <= 2**20
        asked[q, kv] += 1
        return kv >= 8000 + q

    tiles = AttentionTiles.from_mask(mask, q_len=T, kv_len=9000)
    assert (asked == 1).all()
    want = np.arange(9000) >= 8000 + np.arange(T)[:, None]
    np.testing.assert_array_equal(tile_mask(tiles, T, 9000)[0, 0], want)


def test_a_long_mask_is_never_whole_in_memory():
    """Neither as bools, 256 MiB, nor as bits, 32."""
    length = 16384
    ids = np.sort(np.random.default_rng(0).integers(0, 9, length))
    tracemalloc.start()
    try:
        tiles = AttentionTiles.from_mask(
            lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]),
            q_len=length,
            kv_len=length,
        )
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 * 2**20, f"{most / 2**20:.0f} MiB"
    assert tiles.masks.shape[0] < 64


def test_masks_of_one_room_run_in_one_program(rng):
    """With `max_tiles` and `max_masks` new masks do not compile again."""
    call = draw(rng, q_len=20, kv_len=40, batch=1, heads=2, kv_heads=1, dim=8)
    room = {"block_q": 16, "block_kv": 16, "max_tiles": 4, "max_masks": 7}
    attend = jit(lambda tiles: call.replace(tiles=tiles).run())
    for mask in (np.tri(20, 40), np.eye(20, 40), np.ones((20, 40)), np.zeros((20, 40))):
        tiles = AttentionTiles.from_mask(mask > 0, **room)
        assert tiles.indices.shape == (1, 1, 2, 4)
        assert tiles.masks.shape == (7, 16, 1)
        got = attend(tiles)
        assert_close(got, truth(call.replace(tiles=tiles))["out"])
    assert attend._cache_size() == 1


# ---- attention follows the bits ------------------------------------------------------


def draw_call(rng, dtype=F32, **options):
    sizes = {"q_len": T, "kv_len": S, "heads": HEADS, "kv_heads": 1, "dim": 8}
    return draw(rng, dtype, batch=1, **sizes, **options)


@by_mask
def test_masks_against_the_truth(rng, name):
    call = draw_call(rng).replace(tiles=of_function(MASKS[name], **ROOM))
    got = assert_exact(call, "xla")
    empty = ~whole(MASKS[name]).any(-1)  # [1, N, T]
    empty = np.moveaxis(empty, 1, 2)
    for result in ("out", "d_q"):
        assert (np.asarray(got[result])[empty] == 0).all()
    assert np.isneginf(np.asarray(got["lse"])[empty]).all()


def test_a_mask_in_sixteen_bits(rng):
    call = draw_call(rng, BF16)
    assert_exact(call.replace(tiles=of_function(MASKS["chance"], **ROOM)), "xla")


def test_a_document_mask_is_segments_and_causal(rng):
    call = draw_call(rng)
    mask = MASKS["documents"]
    ids = tuple(jnp.asarray(DOCUMENTS[None, :n], jnp.int32) for n in (T, S))
    want = call.replace(causal=True, segment_ids=ids)
    got = call.replace(tiles=of_function(mask, heads=1))
    np.testing.assert_array_equal(who_attends(got)[0], who_attends(want)[0])
    np.testing.assert_allclose(got.run(), want.run(), atol=2e-6)


def everything(rng, tiles):
    """A mask beside every other option."""
    call = draw(rng, q_len=30, kv_len=70, dim=8, causal=True, window=(60, None))
    return call.replace(
        q_offset=i32(30, 41),
        segment_ids=(draw_segments(rng, 2, 30), draw_segments(rng, 2, 70)),
        q_lens=i32(30, 21),
        kv_lens=i32(66, 70),
        bias=draw_bias(rng, call, (False, True)),
        sinks=cast([2, -1, 0.5, 4], F32),
        softcap=3.0,
        tiles=tiles,
    )


def test_a_mask_meets_every_other_option(rng):
    """In tiles of 16 by 48, whose second word has bits that are no keys."""
    mask = rng.random((2, 1, 30, 70)) < 0.6
    tiles = AttentionTiles.from_mask(mask, block_q=16, block_kv=48)
    assert_exact(everything(rng, tiles), "xla")


def test_the_definition_reads_the_bits(rng):
    """attends(): the dense specification, too."""
    mask = rng.random((2, 1, 30, 70)) < 0.6
    mask[0, 0, :16] = True
    tiles = AttentionTiles.from_mask(mask, block_q=16, block_kv=48)
    call = everything(rng, tiles)
    config, x = arguments.normalize("f", **call.arrays, **call.operands, **call.static)
    found = np.broadcast_to(
        jit(dense.attends, static_argnums=0)(config, x), (2, 4, 30, 70)
    )
    np.testing.assert_array_equal(found, who_attends(call)[0])


def test_junk_in_tiles_that_a_mask_leaves_out(rng):
    """Keys 128 to 255 are in no tile: they may hold anything."""
    mask = np.random.default_rng(0).random((T, S)) < 0.5
    mask[:, 128:256] = False
    call = draw_call(rng)
    junk = {n: call.arrays[n].at[:, 128:256].set(jnp.nan) for n in "kv"}
    tiles = AttentionTiles.from_mask(mask)
    got = assert_exact(call.replace(tiles=tiles, **junk), "xla")
    for name in ("d_k", "d_v"):
        assert (np.asarray(got[name])[:, 128:256] == 0).all()


@pytest.mark.usefixtures("four_cpus")  # a GPU's products take room of their own
def test_no_mask_in_memory():
    """A compiled program holds neither scores nor an array of T × S bits."""
    length = 4096
    struct = jax.ShapeDtypeStruct
    x = struct((1, length, 1, 8), F32)
    lists = struct((1, 1, 32, 32), jnp.int32)
    counts = struct((1, 1, 32), jnp.int32)
    masks = struct((40, 128, 4), jnp.uint32)
    tiles = AttentionTiles(lists, counts, 128, 128, lists, masks)

    def slopes(x, tiles):
        attend = lambda x: flash_attention(x, x, x, tiles=tiles).sum()  # noqa: E731
        return jax.grad(attend)(x)

    memory = jit(slopes).lower(x, tiles).compile().memory_analysis()
    assert memory.temp_size_in_bytes < length * length / 8


# ---- entries that the caller promised not to make ------------------------------------


def by_hand(partial, masks=None):
    """A tile of 16 keys and another, the second query tile with none."""
    masks = np.ones((1, 16, 1), np.uint32) if masks is None else masks
    indices, counts = np.int32([[[[0, 1], [0, 0]]]]), np.int32([[[2, 0]]])
    return AttentionTiles(
        indices, counts, 16, 16, np.int32([[partial] * 2])[None], masks
    )


def test_traced_entries_beyond_the_masks_are_skipped(rng):
    """As tiles are that do not exist; below -1 they are full."""
    call = draw(rng, q_len=20, kv_len=30, dim=8)
    attend = jit(lambda tiles: call.replace(tiles=tiles).run())
    for partial in ([7, 0], [2**31 - 1, -1], [-5, 1]):
        tiles = by_hand(partial)
        assert_close(attend(tiles), truth(call.replace(tiles=tiles))["out"])


def test_no_partial_tiles_at_all(rng):
    call = draw(rng, q_len=20, kv_len=30, dim=8)
    tiles = by_hand([-1, -1], np.zeros((0, 16, 1), np.uint32))
    assert_close(
        call.replace(tiles=tiles).run(), truth(call.replace(tiles=tiles))["out"]
    )


# ---- transforms ----------------------------------------------------------------------


def draw_masks(rng, members=()):
    """Tiles of 16 by 16 by chance, some full, per member of the batch and by head."""
    mask = rng.random((*members, 2, 2, 20, 40)) < 0.4
    mask[..., 1, :16, :16] = True
    make = functools.partial(
        AttentionTiles.from_mask, block_q=16, block_kv=16, max_tiles=3, max_masks=24
    )
    each = [make(mask[at]) for at in np.ndindex(members)]
    stack = lambda *x: np.stack(x).reshape(*members, *x[0].shape)  # noqa: E731
    return jax.tree.map(stack, *each)


def small(rng):
    return draw(rng, batch=2, q_len=20, kv_len=40, heads=2, kv_heads=1, dim=8)


def asked(arrays, tiles, cotangents):
    """out and the gradients."""
    out, pull = jax.vjp(lambda x: flash_attention(**x, tiles=tiles), arrays)
    return out, pull(cotangents[0])[0]


LEAVES = ("indices", "counts", "partial", "masks")


@pytest.mark.parametrize(
    "batched",
    [("masks",), ("partial",), ("indices", "counts"), LEAVES, ("q",), ("q", "masks")],
    ids=",".join,
)
def test_vmap(rng, batched):
    """Each leaf of the tiles, at some axis; members that share share one array."""
    draws = [draw_masks(rng) for _ in range(3)]
    calls = [small(rng) for _ in range(3)]
    size = len(draws)
    tiles, axes = draws[0], jax.tree.map(lambda _: None, draws[0])
    one = [draws[0]] * size
    for n in batched:
        if n == "q":
            continue
        axis = int(rng.integers(0, getattr(tiles, n).ndim + 1))
        stacked = jnp.stack([getattr(x, n) for x in draws], axis)
        tiles = _replace(tiles, **{n: stacked})
        axes = _replace(axes, **{n: axis})
        one = [
            _replace(x, **{n: getattr(d, n)}) for x, d in zip(one, draws, strict=True)
        ]
    arrays, array_axes = calls[0].arrays, dict.fromkeys("qkv")
    if "q" in batched:
        arrays = arrays | {"q": jnp.stack([c.arrays["q"] for c in calls], 1)}
        array_axes["q"] = 1
    cotangents = calls[0].cotangents
    f = jax.vmap(asked, (array_axes, axes, None))
    got = jit(f)(arrays, tiles, cotangents)
    for i in range(size):
        member = calls[0].replace(tiles=one[i])
        if "q" in batched:
            member = member.replace(q=calls[i].arrays["q"])
        assert_true(jax.tree.map(lambda x: x[i], got), member)  # noqa: B023


def _replace(tiles, **changes):
    fields = {n: getattr(tiles, n) for n in (*LEAVES, "block_q", "block_kv")}
    return AttentionTiles(**fields | changes)


def test_vmap_in_vmap(rng):
    """Masks in both axes, and entries beyond a member's own reach no other's."""
    call, tiles = small(rng), draw_masks(rng, (2, 3))
    tiles.partial[0, 1, 0, 0, 0, 0] = 24
    attend = lambda tiles: flash_attention(**call.arrays, tiles=tiles)  # noqa: E731
    got = jit(jax.vmap(jax.vmap(attend)))(tiles)
    for at in np.ndindex(2, 3):
        one = call.replace(tiles=jax.tree.map(lambda x: x[at], tiles))  # noqa: B023
        assert_close(got[at], truth(one)["out"])


def test_vmap_of_an_empty_axis_of_masks(rng):
    call, tiles = small(rng), draw_masks(rng, (2,))
    none = jax.tree.map(lambda x: x[:0], tiles)
    attend = lambda tiles: flash_attention(**call.arrays, tiles=tiles)  # noqa: E731
    assert jax.vmap(attend)(none).shape == (0, 2, 20, 2, 8)


@pytest.mark.usefixtures("four_cpus")
def test_shard_map_cuts_the_lists_and_not_the_masks(rng):
    P = jax.sharding.PartitionSpec
    call, tiles = small(rng), draw_masks(rng)
    cut = AttentionTiles(P("b"), P("b"), 16, 16, P("b"), P())
    specs = {"mesh": mesh_of(), "in_specs": (P("b"), cut, P("b")), "out_specs": P("b")}
    got = jit(jax.shard_map(asked, **specs))(call.arrays, tiles, call.cotangents)
    assert_true(got, call.replace(tiles=tiles))


def test_masks_survive_export(rng):
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    call, tiles = small(rng), draw_masks(rng)
    args = call.arrays, tiles, call.cotangents
    data = jax.export.export(jax.jit(asked))(*args).serialize()
    assert_true(
        jit(jax.export.deserialize(data).call)(*args), call.replace(tiles=tiles)
    )


def test_exports_from_before_masks_have_none():
    tiles = _tiles_of_children((128, 256), (1.0, 2.0))
    assert tiles == AttentionTiles(1.0, 2.0, 128, 256)


@pytest.mark.parametrize(
    "mode",
    [
        jax.disable_jit,
        functools.partial(jax.numpy_dtype_promotion, "strict"),
        functools.partial(jax.enable_x64, True),
        functools.partial(jax.transfer_guard, "disallow"),
        contextlib.nullcontext,
    ],
    ids=["without jit", "strict promotion", "x64", "transfer guard", "eager"],
)
def test_masks_in_every_mode(rng, mode):
    """from_mask, too."""
    call = draw(rng, batch=1, q_len=16, kv_len=20, heads=1, kv_heads=1, dim=8)
    mask = rng.random((16, 20)) < 0.5
    with mode():
        tiles = AttentionTiles.from_mask(mask, block_q=16, block_kv=32)
        out = call.replace(tiles=tiles).run()
    assert_close(out, truth(call.replace(tiles=tiles))["out"])


def test_the_masks_are_part_of_the_pytree():
    tiles = of_function(MASKS["chance"])
    leaves, tree = jax.tree.flatten(tiles)
    assert len(leaves) == 4
    assert_same_tiles(jax.tree.unflatten(tree, leaves), tiles)


# ---- who computes --------------------------------------------------------------------

SMALL = AttentionTiles(np.int32([[[[0]]]]), np.int32([[[1]]]), 128, 64)


def test_small_tiles_go_to_xla():
    q = jnp.zeros((1, 5, 1, 64), BF16)

    def chosen(implementation):
        options = {"tiles": SMALL, "implementation": implementation}
        return dispatch.choose(*arguments.normalize("f", q, q, q, **options), "cuda")

    assert chosen(None) == "xla"
    for name in ("cuda", "cuda_sm90"):
        message = f"implementation='{name}' does not serve|tiles of 128 x 64|'xla'"
        check("flash_attention", ValueError, message, lambda: chosen(name))  # noqa: B023
