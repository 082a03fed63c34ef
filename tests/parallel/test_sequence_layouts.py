"""Where rows lie when a sequence is cut over devices, against definitions by loops."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from settings import SETTINGS

from jax_kvblock.parallel import (
    from_zigzag,
    pad_documents,
    pad_sequence,
    shard_positions,
    to_zigzag,
)

pytestmark = pytest.mark.usefixtures("four_cpus")

# Values are exact, so that all of a test's draws share what is compiled.
often = settings(max_examples=60, deadline=None, derandomize=True, database=None)
by_size = pytest.mark.parametrize("size", [1, 2, 3, 4])
by_layout = pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
by_kind = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


# ---- definitions ---------------------------------------------------------------------


def runs_of(length: int, cu: Any) -> list[range]:
    """The documents, and the rows before the first and behind the last as two more."""
    bounds = [0, length] if cu is None else [0, *map(int, cu), length]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def zigzag(length: int, size: int, cu: Any = None) -> list[int]:
    """The rows of the sequence, device by device: of each document chunks i, 2n-1-i."""
    held: list[int] = []
    for device in range(size):
        for run in runs_of(length, cu):
            chunks = [[] for _ in range(2 * size)]
            for at, row in enumerate(run):
                chunks[at * 2 * size // len(run)].append(row)
            held += chunks[device] + chunks[2 * size - 1 - device]
    return held


def positions(rows: list[int], cu: Any) -> list[int]:
    """How many rows of its document come before each of these rows."""
    if cu is None:
        return list(rows)
    found = []
    for row in rows:
        begun = [int(b) for b in cu if b <= row]
        found.append(row - begun[-1] if begun else row)
    return found


def padded(x: np.ndarray, cu: Any, by: int) -> tuple[np.ndarray, list[int]]:
    """Documents, dim 0, with zeros up to a multiple of `by`."""
    rows, bounds = [], [0]
    for first, last in itertools.pairwise(cu):
        rows += list(x[first:last])
        while (len(rows) - bounds[-1]) % by:
            rows.append(np.zeros(x.shape[1:], x.dtype))
        bounds.append(len(rows))
    return np.asarray(rows, x.dtype).reshape(-1, *x.shape[1:]), bounds


def test_the_definitions():
    """By hand, in the examples that the library gives."""
    assert zigzag(8, 2) == [0, 1, 6, 7, 2, 3, 4, 5]
    assert zigzag(8, 4) == [0, 7, 1, 6, 2, 5, 3, 4]
    # A document of 4 and one of 8 rows over two devices, 4 rows before, none behind.
    assert zigzag(16, 2, [4, 8, 16]) == [
        0, 3, 4, 7, 8, 9, 14, 15, 1, 2, 5, 6, 10, 11, 12, 13,
    ]  # fmt: skip
    assert positions([3, 4, 7, 8, 15], [4, 8, 8]) == [3, 0, 3, 0, 7]
    got, cu = padded(np.arange(1, 11), [0, 3, 10], 4)
    assert got.tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 10, 0] and cu == [0, 4, 12]


# ---- there and back ------------------------------------------------------------------


def same(got: Any, want: Any) -> None:
    """The same bits, in an array of JAX."""
    assert isinstance(got, jax.Array)
    want = np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert np.asarray(got).tobytes() == want.tobytes()


def cuts(size: int, units: int, documents: int) -> st.SearchStrategy[Any]:
    """Boundaries of so many documents in `2 size units` rows; some may be empty."""
    places = st.lists(
        st.integers(0, units), min_size=documents + 1, max_size=documents + 1
    )
    return places.map(lambda x: np.int32(sorted(x)) * 2 * size)


@by_size
def test_whole_sequences(size):
    """Of every length that divides, of nothing too."""
    for chunk in (0, 1, 3):
        length = 2 * size * chunk
        x = np.arange(length, dtype=np.int32)
        laid = to_zigzag(x, size, axis=0)
        same(laid, x[zigzag(length, size)])
        same(from_zigzag(laid, size, axis=0), x)


def test_one_device_has_the_sequence_as_it_is():
    x = np.arange(24, dtype=np.int32).reshape(2, 12)
    same(to_zigzag(x, 1), x)
    same(from_zigzag(x, 1), x)
    same(to_zigzag(x, 1, cu_seqlens=[2, 2, 6, 10]), x)
    odd = x[:, :7]  # of any length
    same(to_zigzag(odd, 1, cu_seqlens=[1, 2, 5]), odd)
    same(from_zigzag(odd, 1), odd)
    assert pad_sequence(odd, 1).shape == odd.shape
    mesh = jax.make_mesh((1,), ("c",), devices=jax.devices("cpu")[:1])
    found = jax.shard_map(
        lambda: shard_positions(7, axis_name="c", cu_seqlens=[0, 3, 7]),
        mesh=mesh, in_specs=(), out_specs=P("c"),
    )()  # fmt: skip
    same(found, np.int32([0, 1, 2, 0, 1, 2, 3]))


@by_size
def test_documents(size):
    """Traced boundaries: cuts of any kind go through one program."""
    length = 2 * size * 12
    x = np.arange(length, dtype=np.int32)
    there = jax.jit(lambda x, cu: to_zigzag(x, size, axis=0, cu_seqlens=cu))
    back = jax.jit(lambda x, cu: from_zigzag(x, size, axis=0, cu_seqlens=cu))

    @often
    @given(cuts(size, 12, 5))
    @example(np.zeros(6, np.int32))
    @example(np.full(6, length, np.int32))
    @example(np.int32([0, 0, 1, 1, 12, 12]) * 2 * size)
    def check(cu):
        laid = there(x, cu)
        same(laid, x[zigzag(length, size, cu)])
        same(back(laid, cu), x)
        same(back(x, cu), np.argsort(laid).astype(np.int32))

    check()


FORMS = {
    "list": list,
    "tuple": tuple,
    "int64": lambda cu: np.asarray(cu, np.int64),
    "uint8": lambda cu: np.asarray(cu, np.uint8),
    "on a device": lambda cu: jnp.asarray(cu, jnp.int32),
    "int16 on a device": lambda cu: jnp.asarray(cu, jnp.int16),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_boundaries(form):
    """Static ones in any form, as traced ones of int32."""
    cu = [8, 8, 24, 32]
    x, given_cu = np.arange(40, dtype=np.int32), FORMS[form](cu)
    laid = to_zigzag(x, 4, axis=0, cu_seqlens=given_cu)
    same(laid, x[zigzag(40, 4, cu)])
    same(from_zigzag(laid, 4, axis=0, cu_seqlens=given_cu), x)
    same(jax.jit(lambda x: to_zigzag(x, 4, axis=0, cu_seqlens=given_cu))(x), laid)


@pytest.mark.parametrize("axis", range(-3, 3))
def test_any_axis(axis):
    x = np.arange(12 * 8 * 4, dtype=np.int32)
    shape = np.roll((12, 4, 8), axis)
    x = x.reshape(shape)
    length = x.shape[axis]
    size = length // 4
    for cu in (None, [0, 2 * size, 2 * size]):
        laid = to_zigzag(x, size, axis=axis, cu_seqlens=cu)
        same(laid, np.take(x, zigzag(length, size, cu), axis))
        same(from_zigzag(laid, size, axis=axis, cu_seqlens=cu), x)


def test_the_axis_is_the_second_one():
    x = np.arange(64, dtype=np.int32).reshape(2, 8, 4)
    same(to_zigzag(x, 4), x[:, zigzag(8, 4)])
    same(from_zigzag(to_zigzag(x, 4), 4), x)
    same(pad_sequence(x, 3), np.pad(x, [(0, 0), (0, 4), (0, 0)]))


DTYPES = (
    "bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16",
    "float32", "complex64", "float8_e4m3fn", "int4",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype(dtype):
    """Bits travel as they are; padding is zeros."""
    x = (np.arange(32).reshape(2, 16) % 7 - 2).astype(jnp.dtype(dtype))
    if x.dtype.kind in "fc":
        x[0, 0] = -0.0
    laid = to_zigzag(x, 4)
    same(laid, x[:, zigzag(16, 4)])
    same(from_zigzag(laid, 4), x)
    same(pad_sequence(x, 3), np.pad(x, [(0, 0), (0, 2)]))
    got, _ = pad_documents(x, [0, 3, 16], 2, axis=1)
    same(got, padded(x.T, [0, 3, 16], 4)[0].T)


@pytest.mark.parametrize("setting", ["x64", "strict"])
def test_settings(setting):
    """Positions and orders are int32 in 64-bit mode, too; nothing is promoted."""
    cu = np.int64([0, 8, 24])
    with SETTINGS[setting]():
        x = np.arange(32, dtype=np.int32)
        laid = to_zigzag(x, 4, axis=0, cu_seqlens=cu)
        same(laid, x[zigzag(32, 4, cu)])
        same(from_zigzag(laid, 4, axis=0, cu_seqlens=cu), x)
        got, bounds = pad_documents(x, cu, 4)
        assert bounds.dtype == np.int32 and got.shape == (24,)
        want = np.int32(positions(zigzag(32, 4, cu), cu))
        same(own_positions(8, cu_seqlens=cu), want)


# ---- transforms ----------------------------------------------------------------------


@pytest.mark.parametrize("cu", [None, np.int32([8, 24, 24, 40])], ids=["", "packed"])
def test_gradients_go_the_way_back(rng, cu):
    """The gradient of the one is the other, at any order; linear in forward mode."""
    x, g = rng.standard_normal((2, 3, 40)).astype(np.float32)
    order = zigzag(40, 4, cu)

    def there(x, cu):
        return to_zigzag(x, 4, axis=1, cu_seqlens=cu)

    def back(x, cu):
        return from_zigzag(x, 4, axis=1, cu_seqlens=cu)

    for f, other in ((there, np.argsort(order)), (back, np.asarray(order))):
        loss = lambda x, cu, f=f: (f(x, cu) * g).sum()  # noqa: E731
        same(jax.jit(jax.grad(loss))(x, cu), g[:, other])
        same(jax.jvp(lambda x, f=f: f(x, cu), (x,), (g,))[1], f(g, cu))
        square = lambda x, f=f: (f(x, cu) ** 2).sum()  # noqa: E731
        hessian = jax.jvp(jax.grad(square), (x,), (g,))[1]
        np.testing.assert_allclose(hessian, 2 * g, rtol=1e-6)


def test_vmap(rng):
    """Over arrays, and over the boundaries of batches of documents."""
    x = rng.integers(0, 99, (3, 32)).astype(np.int32)
    cus = np.int32([[0, 8, 32], [8, 8, 16], [16, 24, 24]])
    lay = lambda x, cu=None: to_zigzag(x, 4, axis=0, cu_seqlens=cu)  # noqa: E731
    same(jax.vmap(lay)(x), x[:, zigzag(32, 4)])
    same(jax.vmap(lay, 1, 1)(x.T), x[:, zigzag(32, 4)].T)
    want = [a[zigzag(32, 4, cu)] for a, cu in zip(x, cus, strict=True)]
    same(jax.vmap(lay)(x, cus), want)
    back = lambda x, cu: from_zigzag(x, 4, axis=0, cu_seqlens=cu)  # noqa: E731
    same(jax.vmap(back)(np.stack(want), cus), x)


# ---- sharded arrays ------------------------------------------------------------------


def mesh_of(size: int, kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((size,), ("c",), (kind,), devices=jax.devices("cpu")[:size])


COLLECTIVES = re.compile(r" (all-\w+|collective-\w+|reduce-scatter|ragged-\S+)\(")


@pytest.mark.parametrize(
    ("spec", "out", "talks"),
    [
        (P("c"), P("c"), True),
        (P(None, "c"), P(None, "c"), False),
        (P(), P("c"), False),
        (P("c"), P(), True),
    ],
    ids=["sequence", "another dim", "whole, then cut", "cut, then whole"],
)
def test_sharded_arrays_under_jit(spec, out, talks):
    """Rows change devices once, and only where the sequence is what is cut."""
    mesh, order = mesh_of(4), zigzag(32, 4)
    x = np.arange(128, dtype=np.int32).reshape(32, 4)
    for f, want in ((to_zigzag, x[order]), (from_zigzag, x[np.argsort(order)])):
        lay = jax.jit(
            lambda x, f=f: f(x, 4, axis=0), out_shardings=NamedSharding(mesh, out)
        )
        put = jax.device_put(x, NamedSharding(mesh, spec))
        compiled = lay.lower(put).compile()
        assert len(COLLECTIVES.findall(compiled.as_text())) == talks
        got = compiled(put)
        same(got, want)
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)


@by_kind
@pytest.mark.parametrize("f", [to_zigzag, from_zigzag], ids=lambda f: f.__name__)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_sharded_arrays_of_any_kind_of_mesh(f, kind, packed):
    """What devices hold of a sequence is laid out as one array is."""
    mesh, cu = mesh_of(4, kind), np.int32([8, 16, 32]) if packed else None
    x = np.arange(64, dtype=np.int32).reshape(2, 32)
    order = zigzag(32, 4, cu)
    want = x[:, order if f is to_zigzag else np.argsort(order)]
    put = jax.device_put(x, NamedSharding(mesh, P(None, "c")))
    same(f(put, 4, cu_seqlens=cu), want)
    same(jax.jit(lambda x: f(x, 4, cu_seqlens=cu))(put), want)


@by_kind
@pytest.mark.parametrize("spec", [P(None, "c"), P("c"), P()], ids=str)
def test_padding_of_sharded_arrays(kind, spec):
    """Cut along the documents or along another dim, they stay so."""
    mesh, cu = mesh_of(4, kind), [0, 11, 36]
    x = np.arange(1, 145, dtype=np.int32).reshape(4, 36)
    want, at = padded(x.T, cu, 8)
    put = jax.device_put(x, NamedSharding(mesh, spec))
    got, bounds = pad_documents(put, cu, 4, axis=1)
    same(got, want.T)
    assert bounds.tolist() == at
    inside = jax.jit(lambda x: pad_documents(x, cu, 4, axis=-1)[0])(put)
    same(inside, want.T)
    if kind == AxisType.Explicit:
        cut = NamedSharding(mesh, spec)
        assert got.sharding.is_equivalent_to(cut, 2)
        assert inside.sharding.is_equivalent_to(cut, 2)
    with jax.set_mesh(mesh):
        same(pad_documents(put, cu, 4, axis=1)[0], want.T)


# ---- positions -----------------------------------------------------------------------


def own_positions(length: int, size: int = 4, **options: Any) -> jax.Array:
    """What all devices say, one behind the other."""
    own = lambda: shard_positions(length, axis_name="c", **options)  # noqa: E731
    over = jax.shard_map(own, mesh=mesh_of(size), in_specs=(), out_specs=P("c"))
    return jax.jit(over)()


@pytest.mark.parametrize("size", [1, 2, 4])
@by_layout
def test_positions(size, layout):
    for length in (1, 3, 2, 6):
        if length % 2 and layout == "zigzag":
            continue
        total = length * size
        rows = zigzag(total, size) if layout == "zigzag" else range(total)
        same(own_positions(length, size, layout=layout), np.int32(rows))


def test_zigzag_is_what_is_said_without_a_layout():
    same(own_positions(6), np.int32(zigzag(24, 4)))
    same(own_positions(6), to_zigzag(np.arange(24, dtype=np.int32), 4, axis=0))


@pytest.mark.parametrize("size", [1, 2, 4])
@by_layout
def test_positions_in_documents(size, layout):
    """Traced boundaries, of empty documents too, at any row where nothing is cut."""
    by = 2 * size if layout == "zigzag" else 1
    units, total = 48 // by, 48

    def own(cu):
        return shard_positions(
            total // size, axis_name="c", layout=layout, cu_seqlens=cu
        )

    f = jax.jit(jax.shard_map(own, mesh=mesh_of(size), in_specs=P(), out_specs=P("c")))

    @often
    @given(cuts(1, units, 4).map(lambda cu: cu // 2 * by))
    @example(np.zeros(5, np.int32))
    @example(np.int32([0, 1, 1, 2, units]) * by)
    def check(cu):
        rows = zigzag(total, size, cu) if layout == "zigzag" else range(total)
        same(f(cu), np.int32(positions(rows, cu)))

    check()


@by_layout
def test_static_boundaries_of_positions(layout):
    cu = [8, 8, 24, 32]
    rows = zigzag(48, 4, cu) if layout == "zigzag" else range(48)
    for form in FORMS.values():
        got = own_positions(12, layout=layout, cu_seqlens=form(cu))
        same(got, np.int32(positions(rows, cu)))


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ["a", "b"]], ids=str)
def test_positions_over_two_axes(names):
    """The first axis counts by the second one's devices, as in a PartitionSpec."""
    devices = np.asarray(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh, spec = Mesh(devices, ("a", "b")), P(tuple(names))
    own = lambda: shard_positions(4, axis_name=names)  # noqa: E731
    over = jax.shard_map(own, mesh=mesh, in_specs=(), out_specs=spec)
    same(jax.jit(over)(), np.int32(zigzag(16, 4)))


def test_positions_of_padded_documents(rng):
    """Padded, laid out and cut, a row of a document still has its position."""
    given_cu = [0, 11, 11, 30, 31]
    within = np.concatenate([np.arange(n) for n in np.diff(given_cu)]).astype(np.int32)
    mark, cu = pad_documents(within + 1, given_cu, 4)
    laid = to_zigzag(mark, 4, axis=0, cu_seqlens=cu)
    real = np.asarray(laid) > 0
    assert real.sum() == 31
    found = own_positions(len(mark) // 4, cu_seqlens=cu)
    assert np.array_equal(np.asarray(found)[real], np.asarray(laid)[real] - 1)


# ---- padding -------------------------------------------------------------------------


@by_layout
@by_size
def test_pad_sequence(size, layout):
    """The least that divides, behind the sequence, and nothing where it does."""
    by = 2 * size if layout == "zigzag" and size > 1 else size
    for length in range(3 * by + 2):
        x = np.arange(1, length + 1, dtype=np.int32)
        want = list(x)
        while len(want) % by:
            want.append(0)
        same(pad_sequence(x, size, axis=0, layout=layout), np.int32(want))


@pytest.mark.parametrize("axis", range(-3, 3))
def test_pad_any_axis(axis):
    x = np.arange(1, 3 * 5 * 7 + 1, dtype=np.int32).reshape(3, 5, 7)
    wide = [(0, 0)] * 3
    wide[axis] = (0, -x.shape[axis] % 4)
    same(pad_sequence(x, 2, axis=axis), np.pad(x, wide))
    length = x.shape[axis]
    got, cu = pad_documents(x, [0, 1, length], 2, axis=axis)
    want, bounds = padded(np.moveaxis(x, axis, 0), [0, 1, length], 4)
    same(got, np.moveaxis(want, 0, axis))
    assert cu.tolist() == bounds


def test_pad_documents():
    """Rows behind the last document are left out; boundaries are NumPy's.

    On one device a document is whole, of any length.
    """
    x = np.arange(1, 41, dtype=np.int32).reshape(20, 2)

    @often
    @given(st.lists(st.integers(0, 20), max_size=4), st.integers(1, 3))
    @example([], 1)
    @example([0, 0], 2)
    @example([20, 20], 3)
    def check(ends, size):
        cu = [0, *sorted(ends)] if ends else [0, 0]
        got, bounds = pad_documents(x, cu, size)
        want, at = padded(x, cu, 2 * size if size > 1 else 1)
        same(got, want)
        assert isinstance(bounds, np.ndarray) and bounds.dtype == np.int32
        assert bounds.tolist() == at

    check()


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_boundaries_of_padding(form):
    """Whatever lies on the host; x may be traced, and has gradients."""
    cu, x = FORMS[form]([0, 3, 3, 10]), np.arange(10, dtype=np.float32)
    want, at = padded(x, [0, 3, 3, 10], 4)
    got, bounds = pad_documents(x, cu, 2)
    same(got, want)
    assert bounds.tolist() == at
    same(jax.jit(lambda x: pad_documents(x, cu, 2)[0])(x), want)
    weight = np.arange(1, 13, dtype=np.float32)
    slope = jax.grad(lambda x: (pad_documents(x, cu, 2)[0] * weight).sum())(x)
    same(slope, weight[[0, 1, 2, 4, 5, 6, 7, 8, 9, 10]])


def test_transforms_of_pad_sequence(rng):
    x, g = rng.standard_normal((2, 3, 7)).astype(np.float32)
    weight = np.pad(g, [(0, 0), (0, 1)], constant_values=5)
    loss = lambda x: (pad_sequence(x, 2, axis=-1) * weight).sum()  # noqa: E731
    same(jax.jit(jax.grad(loss))(x), g)
    pad = jax.vmap(lambda x: pad_sequence(x, 2, axis=0))
    same(pad(x), np.pad(x, [(0, 0), (0, 1)]))
