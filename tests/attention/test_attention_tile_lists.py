"""Gradients over tile lists: by whom each tile of keys is listed, by a kernel."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_bar import assert_exact
from attention_masks import HEADS, MASKS, ROOM, S, T, assert_true, by_mask, of_function
from attention_model import BF16, F32, KERNELS, draw, jit
from meshes import mesh_of

from jax_kvblock import AttentionTiles, flash_attention
from jax_kvblock.attention import arguments, cuda, dense, tile_lists
from jax_kvblock.attention.config import sizes_of


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
