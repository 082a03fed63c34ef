"""Arrays of few bits: their bits, their errors, products with them, transforms."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_model import jit
from messages import Table, check, check_row, f32, i32

from jax_kvblock.precision import PackedArray, PrecisionFormat, packed_dot, quantize
from jax_kvblock.precision.words import pack, unpack

pytestmark = pytest.mark.usefixtures("exact_products")

FP8 = PrecisionFormat.FP8
INTS = [format for format in PrecisionFormat if format.is_packed]
GROUPED = [*INTS, FP8]
INT3 = PrecisionFormat.INT3
BF16 = ml_dtypes.bfloat16


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """Bit j of code i is bit `bits * i + j`, from the lowest of the first word."""
    single = codes[..., None] >> np.arange(bits) & 1
    single = single.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    return np.packbits(single, axis=-1, bitorder="little").view("<u4")


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


def values_of(packed: PackedArray) -> np.ndarray:
    """What is held, by NumPy from the stored bits; the groups' axis last."""
    bits, group = packed.format.bits, packed.group_size
    if packed.format is FP8:
        codes = wide(packed.codes)
    else:
        raw = np.asarray(packed.codes)[..., None].view(np.uint8)
        single = np.unpackbits(raw, axis=-1, bitorder="little")
        single = single.reshape(*raw.shape[:-2], -1, bits)
        codes = (single * 2 ** np.arange(bits)).sum(-1).astype(np.float32)
    scales = np.repeat(wide(packed.scales), group, -1)
    if packed.offsets is None:
        return codes * scales
    return codes * scales + np.repeat(wide(packed.offsets), group, -1)


# ---- bits ----------------------------------------------------------------------------


@pytest.mark.parametrize("format", INTS)
def test_codes_are_packed_without_gaps(rng, format):
    bits = format.bits
    codes = rng.integers(0, 2**bits, (3, 96), dtype=np.uint32)
    words = jit(lambda codes: pack(codes, bits))(codes)
    assert words.dtype == jnp.uint32 and words.shape == (3, 96 * bits // 32)
    np.testing.assert_array_equal(words, words_of(codes, bits))
    np.testing.assert_array_equal(jit(lambda w: unpack(w, bits))(words), codes)


@pytest.mark.parametrize("format", GROUPED)
def test_what_is_stored_is_what_it_says(rng, format):
    x = rng.standard_normal((4, 192)).astype(np.float32)
    packed = quantize(x, format, group_size=64)
    shared = (1 if format is FP8 else 2) * 16 / 64
    assert packed.nbytes * 8 == x.size * (format.bits + shared)
    assert packed.nbytes == sum(np.asarray(a).nbytes for a in jax.tree.leaves(packed))
    assert (packed.shape, packed.ndim, packed.size) == ((4, 192), 2, 768)
    assert packed.scales.dtype == jnp.bfloat16


@pytest.mark.parametrize("format", GROUPED)
def test_values_bit_by_bit(rng, format):
    packed = quantize(rng.standard_normal((4, 192)).astype(np.float32), format)
    want = values_of(packed)
    np.testing.assert_array_equal(jit(lambda p: p.dequantize())(packed), want)
    half = packed.dequantize(jnp.bfloat16)
    np.testing.assert_array_equal(wide(half), wide(want.astype(BF16)))


@pytest.mark.parametrize("format", GROUPED)
def test_codes_are_the_nearest(rng, format):
    """By NumPy from the scales and offsets, ties to even."""
    x = rng.standard_normal((4, 192)).astype(np.float32)
    packed = quantize(x, format)
    grouped = x.reshape(4, 3, 64)
    scales = wide(packed.scales)[..., None]
    if format is FP8:
        want = (grouped / scales).astype(ml_dtypes.float8_e4m3fn).reshape(4, 192)
        np.testing.assert_array_equal(wide(packed.codes), wide(want))
        size = np.abs(grouped).max(-1, keepdims=True) / 448
        assert ((scales >= size) & (scales <= size * (1 + 2**-7))).all()
        return
    offsets = wide(packed.offsets)[..., None]
    codes = np.clip(np.rint((grouped - offsets) / scales), 0, 2**format.bits - 1)
    want = words_of(codes.astype(np.uint32).reshape(4, 192), format.bits)
    np.testing.assert_array_equal(packed.codes, want)


# ---- errors --------------------------------------------------------------------------


def least_error(x: np.ndarray, bits: int) -> np.ndarray:
    """Of groups `[..., size]`: the best of all ranges and of lines through codes."""
    top = 2**bits - 1
    x = x.astype(np.float64)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    least = np.full(low.shape, np.inf)

    def attempt(scale, offset):
        codes = np.clip(np.rint((x - offset) / np.where(scale > 0, scale, 1)), 0, top)
        error = np.square(codes * scale + offset - x).sum(-1, keepdims=True)
        return codes, np.minimum(least, error)

    for step in range(11):
        factor = 1 - step / 20
        middle, half = (low + high) / 2, (high - low) / 2 * factor
        offset = middle - half
        down = offset.astype(BF16).astype(np.float64)
        below = np.nextafter(offset.astype(BF16), BF16(-np.inf)).astype(np.float64)
        offset = np.where(down > offset, below, down)
        scale = 2 * half / top
        up = scale.astype(BF16).astype(np.float64)
        above = np.nextafter(scale.astype(BF16), BF16(np.inf)).astype(np.float64)
        codes, least = attempt(np.where(up < scale, above, up), offset)
        mean = codes.mean(-1, keepdims=True)
        spread = np.maximum(np.square(codes - mean).sum(-1, keepdims=True), 1)
        slope = np.maximum(((codes - mean) * x).sum(-1, keepdims=True) / spread, 0)
        line = x.mean(-1, keepdims=True) - slope * mean
        _, least = attempt(
            slope.astype(BF16).astype(np.float64), line.astype(BF16).astype(np.float64)
        )
    return least[..., 0]


@pytest.mark.parametrize("format", INTS)
def test_errors_are_the_least_that_the_search_finds(rng, format):
    x = rng.standard_t(4, (8, 256)).astype(np.float32)  # with some large numbers
    packed = quantize(x, format)
    error = np.square(np.float64(values_of(packed)) - x).reshape(8, 4, 64).sum(-1)
    # Where two tries are alike to float32 the other one may win.
    np.testing.assert_allclose(
        error, least_error(x.reshape(8, 4, 64), format.bits), 1e-2
    )
    np.testing.assert_allclose(
        error.sum(), least_error(x.reshape(8, 4, 64), format.bits).sum(), 1e-3
    )


def test_fewer_bits_err_more(rng):
    x = rng.standard_normal((16, 256)).astype(np.float32)
    ordered = sorted(INTS, key=lambda format: format.bits)
    errors = [
        np.square(np.asarray(quantize(x, format).dequantize()) - x).sum()
        for format in ordered
    ]
    assert all(few > 2.5 * more for few, more in itertools.pairwise(errors))


@pytest.mark.parametrize("format", GROUPED)
@pytest.mark.parametrize("number", [0.0, 1.5, -3.0, 1e-30, 1e30])
def test_groups_of_one_number(format, number):
    got = quantize(jnp.full((2, 64), number), format).dequantize()
    near = 2**-4 if format is FP8 else 2**-8  # of e4m3, of bfloat16
    np.testing.assert_allclose(got, np.full((2, 64), number), rtol=near)


@pytest.mark.parametrize("size", [1e-34, 1e-30, 1e30, 3e37])
def test_large_and_small_numbers_alike(rng, size):
    x = rng.standard_normal((2, 64)).astype(np.float32)
    size = 2.0 ** np.round(np.log2(size))
    got = quantize((x * size).astype(np.float32), INT3).dequantize()
    np.testing.assert_array_equal(got, quantize(x, INT3).dequantize() * size)


@pytest.mark.parametrize("format", GROUPED)
def test_the_largest_numbers_stay_finite(format):
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        most = float(jnp.finfo(dtype).max)
        x = np.linspace(most / 2, most, 64).astype(dtype)
        x = jnp.asarray([x, -x, np.full_like(x, most)])
        got = np.float64(quantize(x, format).dequantize(dtype))
        assert np.abs(got / np.float64(x) - 1).max() < (
            0.2 if format.bits < 4 else 0.07
        )


@pytest.mark.parametrize("format", GROUPED)
def test_numbers_too_small_for_a_scale(rng, format):
    """They are no better than 0, and no worse than one number."""
    for size in (1e-36, 1e-37, 1e-38):
        x = (rng.standard_normal((4, 64)) * size).astype(np.float32)
        off = np.float64(quantize(x, format).dequantize()) - x
        assert np.linalg.norm(off / size) < 1.2 * np.linalg.norm(np.float64(x) / size)
    near = (1e-33 * (1 + rng.uniform(0, 1e-6, (2, 64)))).astype(np.float32)
    np.testing.assert_allclose(quantize(near, format).dequantize(), near, rtol=0.07)


@pytest.mark.parametrize("format", INTS)
def test_numbers_that_codes_can_hold_come_back(rng, format):
    codes = rng.integers(0, 2**format.bits, (4, 64))
    codes[:, :2] = 0, 2**format.bits - 1  # the whole range
    x = codes * 0.25 - 1.0
    np.testing.assert_array_equal(
        quantize(x.astype(np.float32), format).dequantize(), x
    )


# ---- products and transforms ---------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("format", GROUPED)
def test_products_by_float64(rng, format, axis):
    w = rng.standard_normal((128, 192) if axis == -1 else (192, 128))
    x = rng.standard_normal((3, 5, 192)).astype(np.float32)
    packed = quantize(w.astype(np.float32), format, axis=axis)
    assert packed.shape == w.shape
    held = np.moveaxis(values_of(packed), -1, axis)
    np.testing.assert_array_equal(packed.dequantize(), held)
    got = jit(packed_dot)(x, packed)
    x, held, at = np.float64(x), np.float64(held), ((-1,), (axis,))
    want, sizes = np.tensordot(x, held, at), np.tensordot(abs(x), abs(held), at)
    assert (np.abs(got - want) <= 2**-21 * sizes).all()


def test_a_product_in_half_precision(rng):
    w = quantize(rng.standard_normal((64, 128)).astype(np.float32), INT3)
    x = jnp.asarray(rng.standard_normal((4, 128)), jnp.bfloat16)
    got = packed_dot(x, w)
    assert got.dtype == jnp.bfloat16 and packed_dot(x, w, dtype="float32").dtype == "f4"
    want = np.float64(wide(x)) @ np.float64(wide(w.dequantize(jnp.bfloat16))).T
    np.testing.assert_allclose(np.float64(wide(got)), want, rtol=2**-8, atol=1e-3)


def test_derivatives_of_a_product(rng):
    w = quantize(rng.standard_normal((64, 128)).astype(np.float32), INT3)
    x = jnp.asarray(rng.standard_normal((4, 128)), jnp.float32)
    back = rng.standard_normal((4, 64)).astype(np.float32)
    slope = jit(jax.grad(lambda x: (packed_dot(x, w) * back).sum()))(x)
    np.testing.assert_allclose(slope, back @ values_of(w), rtol=0, atol=1e-5)

    def of_scales(scales):
        shifted = PackedArray(w.codes, scales, w.offsets, w.format, w.group_size)
        return (packed_dot(x, shifted) * back).sum()

    found = jax.grad(of_scales)(w.scales.astype(jnp.float32))
    bare = PackedArray(w.codes, jnp.ones_like(w.scales), None, w.format, w.group_size)
    want = (back.T @ x * values_of(bare)).reshape(64, 2, 64).sum(-1)
    np.testing.assert_allclose(found, want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("format", [INT3, FP8])
def test_stacked_layers_scan_map_and_index(rng, format):
    w = rng.standard_normal((5, 64, 64)).astype(np.float32) / 8
    x = rng.standard_normal((2, 64)).astype(np.float32)
    stack = quantize(w, format)
    singles = [quantize(layer, format) for layer in w]
    for i, one in enumerate(singles):
        for leaf, want in zip(
            jax.tree.leaves(stack[i]), jax.tree.leaves(one), strict=True
        ):
            np.testing.assert_array_equal(wide(leaf), wide(want))
    mapped = jit(jax.vmap(lambda layer: quantize(layer, format)))(w)
    assert mapped.shape == stack.shape
    np.testing.assert_array_equal(mapped.dequantize(), stack.dequantize())
    each = jit(jax.vmap(packed_dot, (None, 0)))(x, stack)
    want = [packed_dot(x, one) for one in singles]
    np.testing.assert_allclose(each, want, rtol=0, atol=1e-6)

    def through(x, stack):
        return jax.lax.scan(lambda x, layer: (packed_dot(x, layer), None), x, stack)[0]

    wanted = x
    for one in singles:
        wanted = packed_dot(wanted, one)
    np.testing.assert_allclose(jit(through)(x, stack), wanted, rtol=0, atol=1e-6)
    slope = jit(jax.grad(lambda x: through(x, stack).sum()))(x)
    back = np.ones((2, 64))
    for one in reversed(singles):
        back = back @ np.float64(values_of(one))
    np.testing.assert_allclose(slope, back, rtol=0, atol=1e-5)


# ---- what is refused -----------------------------------------------------------------

BAD = Table()
for _label, _format, _error, _words in (
    ("name", "int3", TypeError, "PrecisionFormat.INT3|'int3'"),
    ("plain", PrecisionFormat.FP16, ValueError, "PrecisionFormat.FP8|FP16"),
):
    _row = BAD.kind if _error is TypeError else BAD.value
    _row("quantize", _label, lambda x, f=_format: quantize(x, f), [f32(2, 64)], _words)
BAD.value(
    "quantize",
    "group",
    lambda x: quantize(x, INT3, group_size=48),
    [f32(2, 96)],
    "group_size|multiple of 32|48",
)
BAD.value(
    "quantize",
    "no group",
    lambda x: quantize(x, INT3, group_size=0),
    [f32(2, 64)],
    "group_size|at least 1|0",
)
BAD.value(
    "quantize",
    "divide",
    lambda x: quantize(x, INT3),
    [f32(2, 96)],
    "multiple of 64 (group_size)|axis -1|[2, 96]",
)
BAD.value(
    "quantize",
    "axis",
    lambda x: quantize(x, INT3, axis=2),
    [f32(2, 64)],
    "axis must be one of the 2 axes|got 2",
)
BAD.value("quantize", "empty", lambda x: quantize(x, INT3), [f32(0, 64)], "[0, 64]")
BAD.kind("quantize", "integers", lambda x: quantize(x, INT3), [i32(2, 64)], "int32")
BAD.kind(
    "packed_dot",
    "not packed",
    packed_dot,
    [f32(2, 64), f32(64, 64)],
    "PackedArray|float32[64, 64]|quantize",
)
BAD.value(
    "packed_dot",
    "width",
    lambda x, w: packed_dot(x, quantize(w, INT3)),
    [f32(2, 32), f32(64, 64)],
    "x must be [..., 64]|float32[2, 32]|[64, 64]",
)
BAD.kind(
    "packed_dot",
    "integers",
    lambda x, w: packed_dot(x, quantize(w, INT3)),
    [i32(2, 64), f32(64, 64)],
    "int32[2, 64]|cast",
)
BAD.kind(
    "packed_dot",
    "dtype",
    lambda x, w: packed_dot(x, quantize(w, INT3), dtype="float23"),
    [f32(2, 64), f32(64, 64)],
    "dtype must be a dtype|got 'float23'",
)
BAD.kind(
    "PackedArray.dequantize",
    "dtype",
    lambda x: quantize(x, INT3).dequantize(None),
    [f32(2, 64)],
    "dtype must be a dtype|got None",
)


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_calls_are_errors(bad):
    check_row(bad)


def test_entries_that_there_are_not():
    stack = quantize(jnp.ones((3, 2, 64)), INT3)
    where = "PackedArray"
    check(where, IndexError, "from -3 to 2|got 3", lambda: stack[3])
    check(
        where, IndexError, "traced", lambda: jax.eval_shape(lambda i: stack[i], i32())
    )
    kernel = quantize(jnp.ones((64, 32)), INT3, axis=0)
    check(where, IndexError, "groups|dequantize()", lambda: kernel[0])
