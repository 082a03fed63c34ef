"""The primitives that choose tiles: what lowers to kernels; these do as JAX does.

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
from select_launches import TAUS, WEIGHS, Rows, draw, draw_weighed
from sparse_cases import TILES
from sparse_cases import draw as draw_qk

from jax_kvblock.attention.tile_lists import LIST_TILES, MOST_COLUMNS
from jax_kvblock.sparse import (
    AntidiagonalThreshold,
    LearnedGate,
    PooledThreshold,
    Random,
    Streaming,
    cuda,
    init_gate,
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


def hold_pieces(dtype, wanted, rng, dim=16):
    """Those of kernels beside plain JAX."""
    x = rng.standard_normal((2, 3, 70, 2, dim))
    x[0, 0, 64:, 0, :2] = -np.inf, np.inf  # a column of a piece that is cut short
    x = jnp.asarray(x, dtype)
    ends = jnp.int32([[70, 33, 0], [1, -5, 99]])
    how = {"side": 16, "pieces": 6, "wanted": wanted}
    made = jit(partial(primitive.pool_pieces, **how))(x, ends)
    known = jit(partial(plain.pool_pieces, **how))(x, ends)
    assert len(made) == (3 if wanted == "extremes" else 1)
    rounded, normed = wanted == "rounded", wanted == "normed"
    assert made[0].dtype == known[0].dtype == (dtype if rounded else np.float32)
    error = {"bfloat16": 1 / 128, "float16": 1 / 1024}.get(str(made[0].dtype), 1e-5)
    means = (np.asarray(x[0], np.float32) for x in (made, known))
    np.testing.assert_allclose(*means, rtol=error, atol=3e-6 if normed else 1e-6)
    assert_alike(made[1:], known[1:])


HOW_POOLED = pytest.mark.parametrize(
    "wanted", ["means", "rounded", "extremes", "normed"]
)


@HOW_POOLED
@pytest.mark.parametrize("dtype", cuda.POOLED)
def test_kernels_pool_as_plain_jax_does(dtype, wanted, select_as_cuda, rng):
    for dim in (
        (16, 24, 128) if wanted == "normed" else (16,)
    ):  # of 24 the kernel norms none
        hold_pieces(dtype, wanted, rng, dim)


@pytest.mark.gpu
@HOW_POOLED
@pytest.mark.parametrize("dtype", cuda.POOLED)
def test_kernels_pool_so_on_this_gpu(dtype, wanted, rng):
    for dim in (16, 24, 128, 256) if wanted == "normed" else (16,):
        hold_pieces(dtype, wanted, rng, dim)


def weigh(given, function, wrap=jit, **how):
    """`function` of what is drawn for kernels."""
    q, k, factors, bounds, *more, scale, tiles = given
    if factors is not None:  # by which the scores of a head are larger
        q = q * factors[..., None, :, None].astype(q.dtype)
    more = [x for x in more if x is not None]
    ranged, near = given.q_ranges is not None, given.places is not None
    (rows, cols), per_q = tiles, q.shape[-3] // tiles[0]
    # Rows of tiles in two parts, as under a causal mask.
    seen = bounds[..., 1].reshape(-1, rows, per_q).max((0, 2))
    seen = np.maximum.accumulate(np.clip(seen, 1, k.shape[-3]))
    parts = []
    for first, last in ((0, rows // 2), (rows // 2, rows)):
        if first < last:
            end = -(-int(seen[last - 1]) // (k.shape[-3] // cols))
            parts.append((first, last, end))
    how |= {"scale": scale, "tiles": tiles, "parts": tuple(parts)}
    if function is plain.weigh_tiles:
        how |= {"ranged": ranged, "near": near, "fine": False}
        return wrap(partial(function, **how))(q, k, bounds, *more)[0]
    names = {"ranges": more[: 2 * ranged], "near": more[2 * ranged :]}
    return wrap(partial(function, **how))(q, k, bounds, **names)


def hold_shares(case, dtype, rng):
    """Those of kernels beside plain JAX, whose products are as fine, or finer."""
    given = draw_weighed(rng, case, dtype)
    made, wanted = (weigh(given, of.weigh_tiles) for of in (primitive, plain))
    # Of float16 that float32 is rounded to, and of XLA's TF32 on a GPU.
    error = 4e-3 if dtype == "float32" else 1e-4
    np.testing.assert_allclose(made, wanted, rtol=error, atol=error / 100)
    assert made.dtype == np.float32 and np.asarray(made).any()


@pytest.mark.parametrize("dtype", cuda.POOLED)
@pytest.mark.parametrize("case", WEIGHS, ids=str)
def test_kernels_weigh_as_plain_jax_does(
    case, dtype, select_as_cuda, emulated_select, rng
):
    emulated_select.emulator_launches()
    hold_shares(case, dtype, rng)
    assert emulated_select.emulator_launches() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cuda.POOLED)
@pytest.mark.parametrize("case", WEIGHS, ids=str)
def test_kernels_weigh_so_on_this_gpu(case, dtype, rng):
    hold_shares(case, dtype, rng)


def hold(columns, tau, rng):
    """What the kernels give beside plain JAX. Sums are exact; XLA's quotients on GPUs
    are not."""
    rows = rows_of(rng, columns)
    kept, *held = jit(primitive.keep_tiles, static_argnums=3)(*rows, tau)
    wanted = jit(partial(plain.keep_tiles, tau=tau))(*rows)
    assert_alike([kept], wanted[:1])
    for a, b in zip(held, wanted[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-7, atol=0)
    for width in (1, columns):
        lists = jit(primitive.list_tiles, static_argnums=1)(kept, width)
        assert_alike(lists, jit(partial(plain.list_tiles, width=width))(kept))


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("columns", [1, 40, 300])
def test_kernels_choose_as_plain_jax_does(columns, tau, select_as_cuda, rng):
    hold(columns, tau, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("columns", [1, 40, 300, 8200, MOST_COLUMNS])
def test_kernels_choose_so_on_this_gpu(columns, tau, rng):
    hold(columns, tau, rng)


def test_modes_of_jax(select_as_cuda, emulated_select, rng):
    rows = rows_of(rng, 40)
    wanted = plain.keep_tiles(*rows, tau=0.5)

    def keep(*rows):
        return primitive.keep_tiles(*rows, 0.5)

    emulated_select.emulator_launches()
    assert_alike(keep(*rows), wanted)
    assert_alike(jax.vmap(keep)(*rows), wanted)
    # A batch along another axis, and operands that have none.
    over = jax.vmap(keep, (2, 2, None), 0)
    turned = [np.moveaxis(np.broadcast_to(x[:1], x.shape), 0, 2) for x in rows[:2]]
    limits = rows.limits[0]
    assert_alike(
        over(*turned, limits),
        plain.keep_tiles(
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


def test_modes_of_jax_of_shares(select_as_cuda, emulated_select, rng):
    """A batch of what has members already, along other axes and none; and a loop."""
    given = draw_weighed(rng, WEIGHS[1], "bfloat16")
    given = given._replace(factors=None)
    one = given._replace(
        **{
            name: x[0]
            for name, x in given._asdict().items()
            if isinstance(x, np.ndarray)
        }
    )
    wanted = weigh(given, plain.weigh_tiles)
    how = {"scale": given.scale, "tiles": given.tiles, "parts": ((0, 5, 7),)}

    def run(q, k, bounds, *more):
        return primitive.weigh_tiles(
            q, k, bounds, ranges=more[:2], near=more[2:], **how
        )

    operands = [x for x in given._replace(factors=None)[:-2] if x is not None]
    same = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    emulated_select.emulator_launches()
    same(jax.vmap(run)(*operands), wanted)
    turned = (np.moveaxis(given.queries, 0, 2), *[x[0] for x in operands[1:]])
    over = jax.vmap(run, (2, *[None] * 7))(*turned)
    same(over[0], weigh(one, plain.weigh_tiles))
    _, scanned = jax.lax.scan(lambda c, x: (c, run(*x)), 0, operands)
    same(scanned, wanted)
    assert emulated_select.emulator_launches() == 4  # a scan has two steps
    with jax.disable_jit():
        same(run(*operands), wanted)


def test_shares_have_derivatives(select_as_cuda, emulated_select, rng):
    """Plain JAX's, of vectors and of what is added to scores."""
    given = draw_weighed(rng, WEIGHS[1], "float32")

    def loss(function, q, k, distance):
        now = given._replace(queries=q, keys=k, distance=distance)
        shares = weigh(now, function, wrap=lambda f: f)
        return jnp.vdot(shares, jnp.cos(jnp.arange(shares.size).reshape(shares.shape)))

    operands = given.queries, given.keys, given.distance
    emulated_select.emulator_launches()
    for at in range(3):
        got, want = (
            jit(jax.grad(partial(loss, of.weigh_tiles), at))(*operands)
            for of in (primitive, plain)
        )
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
        assert np.asarray(want).any()
    assert emulated_select.emulator_launches() == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_gate_may_be_of_any_floats(dtype, select_as_cuda, emulated_select, rng):
    gate = jax.tree.map(lambda x: x.astype(dtype), init_gate(4, 2, 16))
    selector = LearnedGate(gate, sparsity_ratio=0.5, piece=8, **TILES)
    q, k, _ = draw_qk(rng)
    emulated_select.emulator_launches()
    tiles = jax.block_until_ready(jit(partial(selector, causal=True))(q, k))
    assert emulated_select.emulator_launches() == LAUNCHES["gate of pieces"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "serves", lambda *_, **__: False)
        jax.clear_caches()
        wanted = jit(partial(selector, causal=True))(q, k)
    same = np.asarray(tiles.indices) == np.asarray(wanted.indices)
    assert same.mean() > 0.9  # of scores that are close either may be taken


def test_what_is_not_finite_is_its_head_s(select_as_cuda, rng):
    """Of float32, all of which may be nothing then; other heads are as ever."""
    given = draw_weighed(rng, WEIGHS[2], "float32")._replace(factors=None)
    wanted = np.asarray(weigh(given, primitive.weigh_tiles))
    for bad in (np.nan, np.inf):
        queries = given.queries.copy()
        queries[0, 3, 1, 5] = bad
        made = np.asarray(weigh(given._replace(queries=queries), primitive.weigh_tiles))
        assert np.isnan(made[0, 1, 0]).any()
        np.testing.assert_array_equal(made[:, [0, 2]], wanted[:, [0, 2]])


def test_numbers_of_any_size(select_as_cuda, rng):
    """Powers of two divide them, whatever they are: shares stay."""
    given = draw_weighed(rng, WEIGHS[2], "float32")._replace(factors=None)
    wanted = weigh(given, primitive.weigh_tiles)
    for power in (-60, 60):
        scaled = given._replace(
            queries=given.queries * np.float32(2.0**power),
            keys=given.keys * np.float32(2.0**-power),
        )
        np.testing.assert_array_equal(weigh(scaled, primitive.weigh_tiles), wanted)


def test_what_is_chosen_has_no_derivative(select_as_cuda, rng):
    rows = rows_of(rng, 40)

    def loss(scores):
        kept, held = primitive.keep_tiles(scores, *rows[1:], 0.5)
        return jnp.where(kept, scores, 0).sum() + held.sum()

    kept, _ = primitive.keep_tiles(*rows, 0.5)
    np.testing.assert_array_equal(jit(jax.grad(loss))(rows.scores), kept)
    held = lambda x: primitive.keep_tiles(x, *rows[1:], 0.5)[1]  # noqa: E731
    _, zeros = jax.jvp(held, [rows.scores], [rows.scores])
    assert not np.asarray(zeros).any()


def test_pieces_have_derivatives(select_as_cuda, emulated_select, rng):
    """Plain JAX's, which computes all of it then."""
    x = jnp.asarray(rng.standard_normal((1, 20, 2, 4)), jnp.float32)

    def loss(pool, x):
        how = {"side": 8, "pieces": 3, "wanted": "extremes"}
        made = pool(x, jnp.int32([17]), **how)
        return sum(jnp.vdot(y, jnp.cos(y)) for y in made)

    emulated_select.emulator_launches()
    got = jit(jax.grad(partial(loss, primitive.pool_pieces)))(x)
    want = jit(jax.grad(partial(loss, plain.pool_pieces)))(x)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert np.asarray(got)[:, :17].all() and not np.asarray(got)[:, 17:].any()
    assert emulated_select.emulator_launches() == 0


def selectors():
    return {
        "threshold": PooledThreshold(tau=0.9, sparsity_ratio=0.5, **TILES),
        "ratio": PooledThreshold(tau=None, sparsity_ratio=0.5, **TILES),
        "gate": LearnedGate(init_gate(4, 2, 16), sparsity_ratio=0.5, **TILES),
        "gate of pieces": LearnedGate(
            init_gate(4, 2, 16), sparsity_ratio=0.5, piece=8, **TILES
        ),
        "union": Streaming(**TILES) | PooledThreshold(tau=0.5, **TILES),
        "random": Random(sparsity_ratio=0.5, seed=3, **TILES),
    }


# Queries and keys are pooled, pieces weighed, rows kept, lists made. Each part of the
# union keeps its own; what both keep is listed once.
LAUNCHES = {"threshold": 5, "ratio": 5, "gate": 4, "gate of pieces": 5}
LAUNCHES |= {"union": 6, "random": 2}


@pytest.mark.parametrize("name", LAUNCHES)
def test_selectors_take_them(name, select_as_cuda, emulated_select, rng):
    q, k, _ = draw_qk(rng)
    lens = jnp.int32([128, 77])
    mask = {"causal": True, "q_lens": lens, "kv_lens": lens}
    selector = selectors()[name]
    emulated_select.emulator_launches()
    got = jax.block_until_ready(jit(partial(selector.select, **mask))(q, k))
    assert emulated_select.emulator_launches() == LAUNCHES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "serves", lambda *_, **__: False)
        jax.clear_caches()
        wanted = jit(partial(selector.select, **mask))(q, k)
    assert emulated_select.emulator_launches() == 0
    for name in ("indices", "counts"):
        assert_alike([getattr(got.tiles, name)], [getattr(wanted.tiles, name)])
    assert_alike([got.report.listed], [wanted.report.listed])


@pytest.mark.parametrize("name", ["ratio", "gate of pieces"])
def test_exports_of_plain_jax_may_have_a_symbol_for_a_batch(name, rng):
    with jax.default_device(jax.devices("cpu")[0]):
        q, k, _ = draw_qk(rng)

        def choose(q, k):
            return selectors()[name].select(q, k, causal=True).tiles.indices

        symbol = jax.export.symbolic_shape("b")
        batches = [jax.ShapeDtypeStruct(symbol + x.shape[1:], x.dtype) for x in (q, k)]
        made = jax.export.export(jit(choose), platforms=["cpu"])(*batches)
        again = jax.export.deserialize(made.serialize())
        np.testing.assert_array_equal(again.call(q, k), jit(choose)(q, k))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", ["gate", "gate of pieces", "ratio"])
def test_exports_have_them_and_a_batch_may_be_a_symbol(
    name, dtype, select_as_cuda, emulated_select, rng
):
    """Where their targets are named, as docs/sparse.md does."""
    targets = map(
        jax.export.DisabledSafetyCheck.custom_call,
        (cuda.POOL_PIECES, cuda.WEIGH_TILES, cuda.KEEP_TILES, LIST_TILES),
    )

    def choose(q, k):
        tiles, _ = selectors()[name].select(q, k, causal=True)
        return tiles.indices, tiles.counts

    q, k, _ = draw_qk(rng, dtype=dtype)
    symbol = jax.export.symbolic_shape("b")
    batches = [jax.ShapeDtypeStruct(symbol + x.shape[1:], x.dtype) for x in (q, k)]
    made = jax.export.export(jit(choose), disabled_checks=[*targets])(*batches)
    again = jax.export.deserialize(made.serialize())
    emulated_select.emulator_launches()
    assert_alike(jax.block_until_ready(again.call(q, k)), choose(q, k))
    assert emulated_select.emulator_launches() == 2 * LAUNCHES[name]


def lowered(function, *operands):
    """The text of a program for an NVIDIA GPU, without one."""
    traced = jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def chosen(scores):
    return select_tiles(scores, q_len=80, kv_len=640, tau=0.5, **TILES)


def test_a_gpus_program_has_the_kernels():
    text = lowered(chosen, jnp.zeros((1, 2, 5, 40)))
    assert text.count("kvblock_keep_tiles") == text.count("kvblock_list_tiles") == 1
    assert "while" not in text and "sort" not in text


def test_a_gpus_program_pools_once():
    shapes = [jax.ShapeDtypeStruct((1, 640, n, 64), jnp.bfloat16) for n in (4, 2)]
    gate = LearnedGate(init_gate(4, 2, 64), sparsity_ratio=0.5)
    assert lowered(gate.select, *shapes).count("kvblock_pool_pieces") == 2
    # Of heads that the kernel does not norm it gives what is normed.
    wide = [jax.ShapeDtypeStruct((1, 640, n, 96), jnp.bfloat16) for n in (4, 2)]
    gate = LearnedGate(init_gate(4, 2, 96), sparsity_ratio=0.5)
    assert lowered(gate.select, *wide).count("kvblock_pool_pieces") == 2
    pooled = PooledThreshold(tau=None, sparsity_ratio=0.5)
    assert lowered(pooled.select, *shapes).count("kvblock_pool_pieces") == 2
    odd = [jax.ShapeDtypeStruct((1, 640, n, 60), jnp.bfloat16) for n in (1, 1)]
    assert "kvblock_pool_pieces" not in lowered(pooled.select, *odd)


def test_a_gpus_program_weighs_by_a_kernel():
    """Where pieces are not too wide, as many as a power of two, and of no finer
    precision than TF32."""

    def has(selector, *shapes, dtype=jnp.bfloat16):
        shapes = [jax.ShapeDtypeStruct((1, 768, *x), dtype) for x in shapes]
        return "kvblock_weigh_tiles" in lowered(selector.select, *shapes)

    heads = (4, 128), (2, 128)
    pooled = partial(PooledThreshold, tau=None, sparsity_ratio=0.5)
    assert all(has(pooled(piece=piece), *heads) for piece in (4, 8, 16, 32, 64, 128))
    assert not has(pooled(piece=2), *heads)
    assert not has(pooled(block_q=96, piece=32), *heads)  # three of a tile
    assert has(pooled(), (4, 256), (4, 256))
    assert not has(pooled(), (4, 264), (4, 264))
    assert not has(pooled(), (4, 252), (4, 252))
    assert has(pooled(), *heads, dtype=jnp.float32)
    with jax.default_matmul_precision("highest"):
        assert not has(pooled(), *heads, dtype=jnp.float32)
        assert has(pooled(), *heads)
    gate = init_gate(4, 2, 128)
    assert has(LearnedGate(gate, sparsity_ratio=0.5, piece=32), *heads)
    lines = partial(AntidiagonalThreshold, tau=None, sparsity_ratio=0.5)
    assert has(lines(stride=4), (4, 64), (2, 64))
    assert not has(lines(stride=8), (4, 64), (2, 64))


def test_rows_too_long_for_them():
    columns = MOST_COLUMNS + 1
    scores = jax.ShapeDtypeStruct((1, columns), jnp.float32)
    states = jax.ShapeDtypeStruct((1, columns), jnp.uint8)
    limits = jax.ShapeDtypeStruct((1,), jnp.int32)
    assert "kvblock" not in lowered(primitive.keep_tiles, scores, states, limits)
    fits = [jax.ShapeDtypeStruct((1, columns - 1), x.dtype) for x in (scores, states)]
    assert "kvblock_keep_tiles" in lowered(primitive.keep_tiles, *fits, limits)


def test_no_columns_at_all(select_as_cuda, emulated_select):
    emulated_select.emulator_launches()
    kept, held = primitive.keep_tiles(*rows_of(np.random.default_rng(1), 0), 0.5)
    assert kept.shape == (*LEADING, 0) and (np.asarray(held) == 1).all()
    indices, counts = primitive.list_tiles(kept, 3)
    assert (np.asarray(indices) == -1).all() and not np.asarray(counts).any()
    assert emulated_select.emulator_launches() == 0


# ---- several devices -----------------------------------------------------------------


POOLED = {"side": 8, "pieces": 5, "wanted": "means"}


def mesh_of(kind):
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    return Mesh(devices, ("b", "h"), axis_types=(kind, kind))


@pytest.mark.usefixtures("four_cpus", "select_as_cuda")
def test_each_device_has_its_rows(emulated_select, rng):
    """Inside shard_map by the kernels; where XLA cuts the program in plain JAX, of
    which nothing is gathered."""
    rows = rows_of(rng, 40, (2, 4, 5))
    x = rng.integers(-8, 8, (2, 40, 4, 16)).astype(np.float32)
    wanted = plain.keep_tiles(*rows, tau=0.5)
    wanted += plain.list_tiles(wanted[0], width=7)
    wanted += plain.pool_pieces(x, np.int32([40, 9]), **POOLED)
    # Whose exponentials are exact, as are the rows' sums: a piece of queries sees one
    # of keys, or two that are alike.
    bounds = np.int32([[[0, 1], [1, 2], [0, 2]], [[0, 2], [0, 0], [1, 2]]])
    vectors = (np.ones((2, 3, 4, 16), np.float32), np.ones((2, 2, 2, 16), np.float32))
    how = {"scale": 0.5, "tiles": (3, 2), "parts": ((0, 3, 2),)}
    flags = dict.fromkeys(("ranged", "near", "fine"), False)
    wanted += plain.weigh_tiles(*vectors, bounds, **how, **flags)

    def choose(*operands):
        *rows, x, ends, queries, keys, bounds = operands
        kept, held = primitive.keep_tiles(*rows, 0.5)
        means = primitive.pool_pieces(x, ends, **POOLED)
        shares = primitive.weigh_tiles(queries, keys, bounds, **how)
        return [kept, held, *primitive.list_tiles(kept, 7), *means, shares]

    rows = (*rows, x, np.int32([40, 9]), *vectors, bounds)
    of_rows = P("b", "h")
    of_heads = P("b", None, "h")
    specs = (*[of_rows] * 3, of_heads, P("b"), of_heads, of_heads, P("b"))
    out_specs = [*[of_rows] * 4, of_heads, of_rows]

    emulated_select.emulator_launches()
    mapped = jax.shard_map(
        choose, mesh=mesh_of(AxisType.Auto), in_specs=specs, out_specs=out_specs
    )
    assert_alike(jit(mapped)(*rows), wanted)
    assert emulated_select.emulator_launches() == 16
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind)
        with jax.set_mesh(mesh):
            put = [
                jax.device_put(x, NamedSharding(mesh, spec))
                for x, spec in zip(rows, specs, strict=True)
            ]
            program = jit(choose).lower(*put).compile()
            made = program(*put)
        assert_alike(made, wanted)
        assert "all-gather" not in program.as_text()
        for x in made:
            assert 4 * np.prod(x.sharding.shard_shape(x.shape)) == x.size
    assert emulated_select.emulator_launches() == 0
