"""Tiles of any mask: what is made of it, and that attention follows the bits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_close, assert_exact
from attention_model import (
    BF16,
    F32,
    KERNELS,
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
from jax_kvblock.attention import arguments, cuda, dense, dispatch, tile_lists
from jax_kvblock.attention.config import _tiles_of_children, sizes_of

W = "AttentionTiles.from_mask"
T, S, HEADS = 300, 340, 2  # neither is whole tiles of 128
i32 = lambda *x: jnp.asarray(x, jnp.int32)  # noqa: E731

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
by_mask = pytest.mark.parametrize("name", MASKS)


def of_function(mask, t=T, s=S, heads=HEADS, **options):
    sizes = {"q_len": t, "kv_len": s, "heads": heads}
    return AttentionTiles.from_mask(mask, **sizes, **options)


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

ROOM = {"max_tiles": 3, "max_masks": 18}  # so that one program serves all masks


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


def assert_true(got, call):
    out, slopes = got
    want = truth(call, (call.cotangents[0], np.zeros_like(call.cotangents[1])))
    assert_close(out, want["out"])
    for name, x in slopes.items():
        assert_close(x, want[f"d_{name}"])


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


def operands_of(call, tiles):
    """A checked call over lists of tiles of 16 that were not looked at, as traced."""
    config, x = arguments.normalize("f", **call.arrays)
    config = dataclasses.replace(config, block_q=16, block_kv=16)
    x = x._replace(tile_indices=tiles.indices, tile_counts=tiles.counts,
                   tile_partial=tiles.partial, tile_masks=tiles.masks)  # fmt: skip
    return config, x, sizes_of(config, x)


def hold_what_the_kernels_get(rng):
    """Lists both ways, and a map; an entry whose bits do not exist is none."""
    mask = rng.random((2, 1, 70, 50)) < 0.02
    mask[0, 0, 16:32] = True
    tiles = AttentionTiles.from_mask(mask, block_q=16, block_kv=16)
    bad = jnp.where(tiles.partial == 3, 1000, tiles.partial)
    tiles = dataclasses.replace(tiles, partial=bad)
    call = draw(rng, q_len=70, kv_len=50, dim=8)
    # Where such an entry can be seen it is an error.
    got = cuda._optional("backward_kv", *operands_of(call, tiles))
    got = {name: np.asarray(a) for name, a in got.items() if name.startswith("tile")}
    assert set(got) == {name for name in cuda.OPTIONAL if name.startswith("tile")}
    want = {
        (b, i, int(tiles.indices[b, 0, i, c]), int(row))
        for b, i in np.ndindex(2, 5)
        for c in range(int(tiles.counts[b, 0, i]))
        if (row := tiles.partial[b, 0, i, c]) < 1000
    }

    def listed(way, swap):
        indices, counts = got[f"tile_indices{way}"], got[f"tile_counts{way}"]
        for b, _, i in np.ndindex(counts.shape):
            for entry in indices[b, 0, i, : counts[b, 0, i]]:
                if entry < 0:
                    continue
                flag, j = divmod(int(entry), cuda.PARTIAL)
                at = (j, i) if swap else (i, j)
                row = int(got["tile_map"][b, 0, *at])
                assert flag == (row >= 0)
                yield (b, *map(int, at), row)

    assert set(listed("", False)) == want == set(listed("_t", True))
    assert {-1} < {row[-1] for row in want}


def test_what_the_kernels_get_says_the_mask(emulated_select, rng):
    hold_what_the_kernels_get(rng)


@pytest.mark.gpu
def test_what_the_kernels_get_on_this_gpu(rng):
    hold_what_the_kernels_get(rng)


# ---- lists, transposed ---------------------------------------------------------------

NONE, FULL = dense.NOT_LISTED, -1
# What tiles are, by member, head, tile of queries and of keys: NONE, FULL or a row of
# the masks.
KINDS = {
    "shared": lambda rng: rng.choice([NONE, FULL], (1, 1, 6, 4)),
    "by head": lambda rng: rng.choice([NONE, FULL], (2, 4, 6, 4)),
    "partial": lambda rng: rng.choice([NONE, NONE, FULL, 0, 1], (2, 4, 6, 4)),
    "full": lambda rng: np.full((1, 4, 6, 4), FULL),
    "all partial": lambda rng: rng.integers(0, 2, (1, 4, 6, 4)),
    "nothing": lambda rng: np.full((2, 1, 6, 4), NONE),
    "empty rows": lambda rng: np.where(
        np.arange(6)[:, None] % 2, NONE, rng.integers(-1, 2, (1, 4, 6, 4))
    ),
    "empty columns": lambda rng: np.where(
        np.arange(4) % 2, NONE, rng.integers(-1, 2, (2, 1, 6, 4))
    ),
    "one row": lambda rng: rng.choice([NONE, FULL, 0], (1, 4, 1, 4)),
    "one column": lambda rng: rng.choice([NONE, FULL, 0], (1, 4, 6, 1)),
    "long": lambda rng: rng.choice([NONE, FULL, 1], (1, 1, 700, 3)),
}
by_kinds = pytest.mark.parametrize("name", KINDS)


def draw_lists(rng, kinds):
    """These tiles of 16 in any order, between entries that are none of them."""
    *leading, rows, columns = kinds.shape
    width = columns + 2
    indices = np.full((*leading, rows, width), -1, np.int32)
    partial = np.full((*leading, rows, width), FULL, np.int32)
    for at in np.ndindex(*leading, rows):
        order = rng.permutation(width)
        indices[at] = np.where(order < columns, order, columns + 5)
        row = np.pad(kinds[at], (0, 2), constant_values=FULL)
        indices[at][row[order] == NONE] = -1
        partial[at] = np.maximum(row[order], FULL)
    counts = np.full((*leading, rows), width, np.int32)
    masks = np.ones((2, 16, 1), np.uint32)
    if not (kinds >= 0).any():
        partial = masks = None
    return AttentionTiles(indices, counts, 16, 16, partial, masks)


def transposed(call, tiles):
    indices, counts = cuda._transposed(*operands_of(call, tiles))
    assert indices.dtype == counts.dtype == jnp.int32
    return np.asarray(indices), np.asarray(counts)


def hold_lists_the_other_way(name, rng, monkeypatch):
    """By the kernel and by sorting, beside the map itself."""
    kinds = KINDS[name](rng)
    rows, columns = kinds.shape[2:]
    call = draw(rng, q_len=16 * rows - 3, kv_len=16 * columns - 5, dim=8)
    tiles = jax.tree.map(jnp.asarray, draw_lists(rng, kinds))
    made = transposed(call, tiles)
    with monkeypatch.context() as patch:
        patch.setattr(tile_lists, "serves", lambda _: False)
        by_sorting = transposed(call, tiles)
    for indices, counts in (made, by_sorting):
        assert indices.shape == (*kinds.shape[:2], columns, rows)
        assert counts.shape == indices.shape[:-1]
        for *head, j in np.ndindex(counts.shape):
            of_column = kinds[(*head, slice(None), j)]
            want = [
                i + (cuda.PARTIAL if kind >= 0 else 0)
                for i, kind in enumerate(of_column)
                if kind != NONE
            ]
            assert counts[(*head, j)] == len(want)
            np.testing.assert_array_equal(indices[(*head, j)][: len(want)], want)
    behind = np.arange(rows) >= made[1][..., None]
    assert (made[0][behind] == -1).all()


@by_kinds
def test_lists_the_other_way(name, emulated_select, rng, monkeypatch):
    emulated_select.emulator_launches()
    hold_lists_the_other_way(name, rng, monkeypatch)
    assert emulated_select.emulator_launches() == 1


@pytest.mark.gpu
@by_kinds
def test_lists_the_other_way_on_this_gpu(name, rng, monkeypatch):
    hold_lists_the_other_way(name, rng, monkeypatch)


def slopes(implementation="cuda", **options):
    """The gradients of a call over lists."""

    def gradients(q, k, tiles):
        how = {"tiles": tiles, "implementation": implementation, **options}
        return jax.grad(lambda q, k: flash_attention(q, k, k, **how).sum(), (0, 1))(
            q, k
        )

    return gradients


def abstract(rows, columns, heads=1, masks=0):
    """Queries and keys of 2 heads, and lists of tiles of 128."""
    struct = jax.ShapeDtypeStruct
    q, k = (struct((1, 128 * n, 2, 64), BF16) for n in (rows, columns))
    indices = struct((1, heads, rows, 2), jnp.int32)
    counts = struct(indices.shape[:-1], jnp.int32)
    more = [indices, struct((masks, 128, 4), jnp.uint32)] if masks else []
    return q, k, AttentionTiles(indices, counts, 128, 128, *more)


def sorts_and_launches(function, *operands):
    """How often a program for an NVIDIA GPU sorts, and calls the kernel of lists."""
    traced = jax.jit(function).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "kvblock_attention" in text
    return text.count("stablehlo.sort"), text.count("@kvblock_list_tiles(")


@pytest.mark.parametrize("implementation", ["cuda", "cuda_sm90"])
def test_gradients_over_lists_sort_nothing(implementation):
    """Lists are made by a kernel, if they are not too long for it."""
    on_a_gpu = slopes(implementation)
    for sizes in ({}, {"heads": 2}, {"masks": 3}, {"heads": 2, "masks": 3}):
        assert sorts_and_launches(on_a_gpu, *abstract(3, 4, **sizes)) == (0, 1)
    again = slopes(implementation, deterministic=True)
    assert sorts_and_launches(again, *abstract(3, 4)) == (0, 1)
    most = tile_lists.MOST_COLUMNS
    assert sorts_and_launches(on_a_gpu, *abstract(most, 1)) == (0, 1)
    assert sorts_and_launches(on_a_gpu, *abstract(most + 1, 1)) == (1, 0)


def test_a_forward_pass_makes_no_lists():
    def attend(q, k, tiles):
        return flash_attention(q, k, k, tiles=tiles, implementation="cuda")

    assert sorts_and_launches(attend, *abstract(3, 4, heads=2, masks=3)) == (0, 0)


def test_members_have_their_lists_by_one_launch():
    q, k, tiles = abstract(3, 4, heads=2, masks=3)
    several = lambda x: jax.ShapeDtypeStruct((5, *x.shape), x.dtype)  # noqa: E731
    members = jax.tree.map(several, (q, k, tiles))
    assert sorts_and_launches(jax.vmap(slopes()), *members) == (0, 1)


@pytest.mark.parametrize("mapped", [True, False], ids=["shard_map", "jit"])
def test_each_device_makes_the_lists_of_its_part(
    mapped, four_cpus, float32_as_cuda, emulated_select, rng
):
    """Inside shard_map, and where jit cuts batch and heads."""
    P = jax.sharding.PartitionSpec
    mesh = mesh_of()
    call = draw(rng, batch=2, q_len=150, kv_len=200, heads=2, kv_heads=2, dim=64)
    mask = rng.random((2, 2, 150, 200)) < 0.3
    mask[:, :, :128, 128:] = False
    tiles = AttentionTiles.from_mask(mask)
    arrays, of_lists = P("b", None, "h"), P("b", "h")
    cut = AttentionTiles(of_lists, of_lists, 128, 128, of_lists, P())
    specs = (dict.fromkeys("qkv", arrays), cut, (arrays, arrays))

    def on_kernels(x, tiles, cotangents):
        attend = lambda x: flash_attention(**x, tiles=tiles, implementation="cuda")  # noqa: E731
        out, pull = jax.vjp(attend, x)
        return out, pull(cotangents[0])[0]

    operands = call.arrays, tiles, call.cotangents
    f = on_kernels
    if mapped:
        results = arrays, specs[0]
        f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=results)
    else:
        put = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))  # noqa: E731
        operands = jax.tree.map(put, operands, specs)
    emulated_select.emulator_launches()
    assert_true(jax.block_until_ready(jit(f)(*operands)), call.replace(tiles=tiles))
    assert emulated_select.emulator_launches() == 4


def test_exported_gradients_over_lists_have_the_kernel():
    """Its target is named among those of attention, as docs/attention.md has it."""
    allowed = jax.export.DisabledSafetyCheck.custom_call
    attention = [f"kvblock_attention_{op}" for op in ("forward", "backward_kv")]
    checks = [allowed(name) for name in attention]
    export = functools.partial(jax.export.export, jit(slopes()), platforms=["cuda"])
    operands = abstract(3, 4, masks=3)
    with pytest.raises(ValueError, match="kvblock_list_tiles"):
        export(disabled_checks=checks)(*operands)
    checks.append(allowed(tile_lists.LIST_TILES))
    assert (
        "kvblock_list_tiles" in export(disabled_checks=checks)(*operands).mlir_module()
    )


@by_mask
def test_gradients_over_lists_by_both_kernels(
    name, float32_as_cuda, emulated_select, rng
):
    """Attention's and that of lists, as they follow each other on a GPU."""
    sizes = {"q_len": 150, "kv_len": 200, "heads": HEADS, "kv_heads": 1, "dim": 64}
    tiles = of_function(MASKS[name], 150, 200, max_tiles=2, max_masks=8)
    call = draw(rng, F32, batch=1, **sizes).replace(tiles=tiles)
    emulated_select.emulator_launches()
    assert_exact(call, "cuda")
    assert emulated_select.emulator_launches() == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "implementation", [k for k in KERNELS if k != "xla"] or ["cuda"]
)
@by_mask
def test_gradients_over_lists_on_this_gpu(name, implementation, rng):
    sizes = {"q_len": T, "kv_len": S, "heads": HEADS, "kv_heads": 1, "dim": 64}
    call = draw(rng, BF16, batch=1, **sizes)
    assert_exact(call.replace(tiles=of_function(MASKS[name], **ROOM)), implementation)
