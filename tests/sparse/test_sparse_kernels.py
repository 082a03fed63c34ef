"""The primitives of lists of tiles: what lowers to kernels; these choose as JAX does.

On a CPU the kernels run on the emulator, on a GPU as they are.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_model import jit
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from select_launches import TAUS, Rows, draw
from sparse_cases import TILES
from sparse_cases import draw as draw_qk

from jax_kvblock.sparse import (
    PooledThreshold,
    Random,
    Streaming,
    cuda,
    plain,
    primitive,
    select_tiles,
)

LEADING = (2, 3, 5)  # members, heads and rows of tiles


def rows_of(rng, columns, leading=LEADING):
    rows = draw(rng, (int(np.prod(leading)), columns))
    return Rows(*(x.reshape(*leading, *x.shape[1:]) for x in rows))


def assert_alike(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def hold(columns, tau, rng):
    """What the kernels give, whatever plain JAX does; sums are exact."""
    rows = rows_of(rng, columns)
    kept, *held = jit(primitive.keep, static_argnums=3)(*rows, tau)
    wanted = jit(partial(plain.keep, tau=tau))(*rows)
    assert_alike([kept, *held], wanted)
    for width in (1, columns):
        lists = jit(primitive.lists, static_argnums=1)(kept, width)
        assert_alike(lists, jit(partial(plain.lists, width=width))(kept))


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("columns", [1, 40, 300])
def test_kernels_choose_as_plain_jax_does(columns, tau, select_as_cuda, rng):
    hold(columns, tau, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("columns", [1, 40, 300, 8200, cuda.MOST_COLUMNS])
def test_kernels_choose_so_on_this_gpu(columns, tau, rng):
    hold(columns, tau, rng)


def test_modes_of_jax(select_as_cuda, emulated_select, rng):
    rows = rows_of(rng, 40)
    wanted = plain.keep(*rows, tau=0.5)

    def keep(*rows):
        return primitive.keep(*rows, 0.5)

    emulated_select.emulator_launches()
    assert_alike(keep(*rows), wanted)
    assert_alike(jax.vmap(keep)(*rows), wanted)
    # A batch along another axis, and operands that have none.
    over = jax.vmap(keep, (2, 2, None), 0)
    turned = [np.moveaxis(np.broadcast_to(x[:1], x.shape), 0, 2) for x in rows[:2]]
    limits = rows.limits[0]
    assert_alike(
        over(*turned, limits),
        plain.keep(
            *(np.broadcast_to(x[:1], x.shape) for x in rows[:2]),
            np.broadcast_to(limits, rows.limits.shape),
            tau=0.5,
        ),
    )
    _, scanned = jax.lax.scan(lambda c, x: (c, keep(*x)), 0, rows)
    assert_alike(scanned, wanted)
    assert emulated_select.emulator_launches() == 5  # a scan has two steps
    with jax.disable_jit():
        assert_alike(keep(*rows), wanted)


def test_what_is_chosen_has_no_derivative(select_as_cuda, rng):
    rows = rows_of(rng, 40)

    def loss(scores):
        kept, held = primitive.keep(scores, *rows[1:], 0.5)
        return jnp.where(kept, scores, 0).sum() + held.sum()

    kept, _ = primitive.keep(*rows, 0.5)
    np.testing.assert_array_equal(jit(jax.grad(loss))(rows.scores), kept)
    held = lambda x: primitive.keep(x, *rows[1:], 0.5)[1]  # noqa: E731
    _, zeros = jax.jvp(held, [rows.scores], [rows.scores])
    assert not np.asarray(zeros).any()


def selectors():
    return {
        "threshold": PooledThreshold(tau=0.9, sparsity_ratio=0.5, **TILES),
        "ratio": PooledThreshold(tau=None, sparsity_ratio=0.5, **TILES),
        "union": Streaming(**TILES) | PooledThreshold(tau=0.5, **TILES),
        "random": Random(sparsity_ratio=0.5, seed=3, **TILES),
    }


@pytest.mark.parametrize("name", ["threshold", "ratio", "union", "random"])
def test_selectors_take_them(name, select_as_cuda, emulated_select, rng):
    q, k, _ = draw_qk(rng)
    lens = jnp.int32([128, 77])
    mask = {"causal": True, "q_lens": lens, "kv_lens": lens}
    selector = selectors()[name]
    emulated_select.emulator_launches()
    got = jax.block_until_ready(jit(partial(selector.select, **mask))(q, k))
    # Each part of the union keeps its own; what both keep is listed once.
    assert emulated_select.emulator_launches() == (3 if name == "union" else 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "serves", lambda *_: False)
        jax.clear_caches()
        wanted = jit(partial(selector.select, **mask))(q, k)
    assert emulated_select.emulator_launches() == 0
    for name in ("indices", "counts"):
        assert_alike([getattr(got.tiles, name)], [getattr(wanted.tiles, name)])
    assert_alike([got.report.listed], [wanted.report.listed])


def lowered(function, *operands):
    """The text of a program for an NVIDIA GPU, without one."""
    traced = jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def chosen(scores):
    return select_tiles(scores, q_len=80, kv_len=640, tau=0.5, **TILES)


def test_a_gpus_program_has_the_kernels():
    text = lowered(chosen, jnp.zeros((1, 2, 5, 40)))
    assert text.count("kvblock_keep") == text.count("kvblock_lists") == 1
    assert "while" not in text and "sort" not in text


def test_rows_too_long_for_them():
    columns = cuda.MOST_COLUMNS + 1
    scores = jax.ShapeDtypeStruct((1, columns), jnp.float32)
    states = jax.ShapeDtypeStruct((1, columns), jnp.uint8)
    limits = jax.ShapeDtypeStruct((1,), jnp.int32)
    assert "kvblock" not in lowered(primitive.keep, scores, states, limits)
    fits = [jax.ShapeDtypeStruct((1, columns - 1), x.dtype) for x in (scores, states)]
    assert "kvblock_keep" in lowered(primitive.keep, *fits, limits)


def test_no_columns_at_all(select_as_cuda, emulated_select):
    emulated_select.emulator_launches()
    kept, held = primitive.keep(*rows_of(np.random.default_rng(1), 0), 0.5)
    assert kept.shape == (*LEADING, 0) and (np.asarray(held) == 1).all()
    indices, counts = primitive.lists(kept, 3)
    assert (np.asarray(indices) == -1).all() and not np.asarray(counts).any()
    assert emulated_select.emulator_launches() == 0


# ---- several devices -----------------------------------------------------------------


def mesh_of(kind):
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    return Mesh(devices, ("b", "h"), axis_types=(kind, kind))


@pytest.mark.usefixtures("four_cpus", "select_as_cuda")
def test_each_device_has_its_rows(emulated_select, rng):
    """Inside shard_map by the kernels; where XLA cuts the program in plain JAX, of
    which nothing is gathered."""
    rows = rows_of(rng, 40, (2, 4, 5))
    wanted = plain.keep(*rows, tau=0.5)
    wanted += plain.lists(wanted[0], width=7)

    def choose(*rows):
        kept, held = primitive.keep(*rows, 0.5)
        return [kept, held, *primitive.lists(kept, 7)]

    emulated_select.emulator_launches()
    mapped = jax.shard_map(
        choose, mesh=mesh_of(AxisType.Auto), in_specs=P("b", "h"), out_specs=P("b", "h")
    )
    assert_alike(jit(mapped)(*rows), wanted)
    assert emulated_select.emulator_launches() == 8
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind)
        with jax.set_mesh(mesh):
            put = [jax.device_put(x, NamedSharding(mesh, P("b", "h"))) for x in rows]
            program = jit(choose).lower(*put).compile()
            made = program(*put)
        assert_alike(made, wanted)
        assert "all-gather" not in program.as_text()
        for x in made:
            assert x.sharding.shard_shape(x.shape)[:2] == (1, 2)
    assert emulated_select.emulator_launches() == 0
