"""Arrays that hold a few bits a number, and the product with them."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.core.checks import (
    as_array,
    as_int,
    check_dtype,
    check_positive,
    show,
    shown,
)
from jax_kvblock.core.types import ArrayIn
from jax_kvblock.precision.formats import GROUPED, PrecisionFormat, check_format
from jax_kvblock.precision.words import CODES, pack, unpack

if TYPE_CHECKING:
    from jaxtyping import Float, Num

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
SHARE = jnp.bfloat16  # the dtype of scales and offsets
# Of a group's range, those that a quantization tries: few bits want the range's ends
# cut off. One more try fits scale and offset to the codes of each.
RANGES = tuple(1 - step / 20 for step in range(11))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedArray:
    """An array in a format with groups: `code * scale + offset`.

    A pytree; `quantize` makes one. Leading axes may be cut, stacked, mapped over and
    scanned over: what is static counts axes from the last one.

    Attributes:
      codes: words uint32 `[..., n * bits / 32]`, of FP8 `float8_e4m3fn` `[..., n]`,
        with the axis of the groups last.
      scales: bfloat16 `[..., n / group_size]`.
      offsets: the same, or None for FP8.
      format: which of the formats with groups.
      group_size: neighbours along the axis that share a scale.
      axis: the array's axis that is last in `codes`, negative.
    """

    codes: jax.Array
    scales: jax.Array
    offsets: jax.Array | None
    format: PrecisionFormat = dataclasses.field(metadata={"static": True})
    group_size: int = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(default=-1, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that is held, not of its words."""
        *lead, last = self.scales.shape
        lead.insert(len(lead) + 1 + self.axis, last * self.group_size)
        return tuple(lead)

    @property
    def ndim(self) -> int:
        return self.scales.ndim

    @property
    def size(self) -> int:
        return self.scales.size * self.group_size

    @property
    def nbytes(self) -> int:
        """Of codes, scales and offsets: all that is stored."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """The array; `code * scale + offset` is rounded once, to float32 or wider, and
        held to the largest number of the dtype."""
        return _dequantize(self, check_dtype("PackedArray.dequantize", "dtype", dtype))

    def __getitem__(self, index: int) -> PackedArray:
        """The entry at a Python integer along the first axis, as of stacked layers."""
        if self.axis == -self.ndim:
            raise IndexError(
                f"PackedArray: the first axis of {list(self.shape)} must not be "
                "that of the groups to be indexed; index dequantize()"
            )
        place = as_int(index)
        length = self.shape[0]
        if place is None or not -length <= place < length:
            raise IndexError(
                f"PackedArray: index must be an integer from {-length} to "
                f"{length - 1}, got {shown(index)}; a scan goes over the whole array"
            )
        entry: PackedArray = jax.tree.map(lambda leaf: leaf[place], self)
        return entry


def quantize(
    array: Float[ArrayIn, "..."],
    format: PrecisionFormat,
    *,
    group_size: int = 64,
    axis: int = -1,
) -> PackedArray:
    """The array in a format with groups; works under jit, vmap and scan.

    A group is `group_size` neighbours along the axis. Of INT8 to INT2 its range is cut
    by the factor, of 11 from 1 to 1/2, and by the line fitted to the codes of each,
    that leaves the smallest squared error; scales and offsets are rounded before codes
    are, to nearest, ties to even. Of FP8 a scale is the largest size over 448.

    Args:
      array: bfloat16, float16, float32 or float64 (of numbers that float32 holds),
        without inf and nan. Groups of numbers below 1e-34 may become 0.
      format: FP8, or INT8 to INT2.
      group_size: a multiple of 32 that divides the axis.
      axis: along which groups lie: the one that products sum over.

    Returns:
      A `PackedArray` of the array's shape.

    Raises:
      TypeError, ValueError: a format without groups, groups that do not divide, a dtype
        that is no float's.

    Example:
      >>> packed = quantize(weights, PrecisionFormat.INT3)
      >>> packed.nbytes * 8 / weights.size  # 3 bits and two scales of 16 for 64
      3.5
    """
    where = "quantize"
    x = as_array(where, "array", array)
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{where}: array must be bfloat16, float16 or float32, got {show(x)}; cast "
            "it with .astype(jnp.float32)"
        )
    check_format(where, "format", format, GROUPED)
    group_size = check_group_size(where, group_size)
    at = check_axis(where, "array", x.shape, axis)
    check_groups(where, "array", x.shape, at, group_size)
    return _quantize(x, format, group_size, at)


def check_group_size(where: str, group_size: Any) -> int:
    (size,) = check_positive(where, group_size=group_size)
    if size % CODES:
        raise ValueError(
            f"{where}: group_size must be a multiple of {CODES}, so that a group's "
            f"codes fill whole words, got {size}; 64, say"
        )
    return size


def check_axis(where: str, name: str, shape: tuple[int, ...], axis: Any) -> int:
    """The axis, counted from the last."""
    number = as_int(axis)
    if number is None or not -len(shape) <= number < len(shape):
        raise ValueError(
            f"{where}: axis must be one of the {len(shape)} axes of {name}, got "
            f"{shown(axis)} for the shape {list(shape)}"
        )
    return number if number < 0 else number - len(shape)


def check_groups(
    where: str,
    name: str,
    shape: tuple[int, ...],
    axis: int,
    group_size: int,
    fix: str = "leave the array as it is",
) -> None:
    if shape[axis] % group_size or not np.prod(shape):
        raise ValueError(
            f"{where}: {name} must have a multiple of {group_size} (group_size) "
            f"numbers along axis {axis}, got {list(shape)}; pass another group_size or "
            f"axis, or {fix}"
        )


def rounded(
    array: jax.Array, format: PrecisionFormat, *, group_size: int, axis: int
) -> jax.Array:
    """What an array is once a format has held it, float32 or wider.

    The numbers of `quantize(array, ...).dequantize()` without the packing, and of plain
    formats those of two casts.
    """
    if format.is_plain:
        wide = jnp.promote_types(array.dtype, jnp.float32)
        return array.astype(format.dtype).astype(wide)
    if not format.is_packed:
        return quantize(array, format, group_size=group_size, axis=axis).dequantize()
    groups = _grouped(array, group_size, axis)
    numbers, scales, offsets = _fitted(groups, _top(format))
    return _values(numbers, scales, offsets, groups.dtype, axis)


def _quantize(
    x: jax.Array, format: PrecisionFormat, group_size: int, axis: int
) -> PackedArray:
    groups = _grouped(x, group_size, axis)
    if not format.is_packed:
        codes, scales = _scaled(groups, format)
        return PackedArray(codes, scales, None, format, group_size, axis)
    numbers, scales, offsets = _fitted(groups, _top(format))
    words = _words(numbers, format.bits)
    return PackedArray(words, scales, offsets, format, group_size, axis)


# Programs of their own outside of jit; that which is much to compile knows nothing of
# the format.


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _grouped(x: jax.Array, group_size: int, axis: int) -> jax.Array:
    """`[..., groups, group_size]`, float32 or wider, the groups' axis behind others."""
    x = jnp.moveaxis(x, axis, -1).astype(jnp.promote_types(x.dtype, jnp.float32))
    return x.reshape(*x.shape[:-1], -1, group_size)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _scaled(groups: jax.Array, format: PrecisionFormat) -> tuple[jax.Array, jax.Array]:
    """e4m3 of groups, and their scales."""
    scales = _above(jnp.abs(groups).max(-1) / 448)
    codes = (groups / _divisor(scales)).astype(format.dtype)
    return codes.reshape(*groups.shape[:-2], -1), scales


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _words(numbers: jax.Array, bits: int) -> jax.Array:
    codes = numbers.reshape(*numbers.shape[:-2], -1).astype(jnp.uint32)
    return pack(codes, bits)


@functools.partial(jax.jit, static_argnums=(3, 4), inline=True)
def _values(
    codes: jax.Array, scales: jax.Array, offsets: Any, dtype: Any, axis: int
) -> jax.Array:
    """The array of codes `[..., groups, group_size]`."""
    wide = jnp.promote_types(dtype, jnp.float32)
    # The product of a code and a scale has at most 16 bits: it is exact.
    values = codes.astype(wide) * scales[..., None].astype(wide)
    if offsets is not None:
        values = values + offsets[..., None].astype(wide)
    # The largest number of a group may round to more than the dtype holds.
    most = np.asarray(jnp.finfo(dtype).max, wide)
    values = jnp.clip(values, -most, most)
    values = values.reshape(*codes.shape[:-2], -1)
    return jnp.moveaxis(values.astype(dtype), -1, axis)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _dequantize(packed: PackedArray, dtype: Any) -> jax.Array:
    codes = packed.codes
    if packed.format.is_packed:
        codes = unpack(codes, packed.format.bits)
    codes = codes.reshape(*packed.scales.shape, packed.group_size)
    return _values(codes, packed.scales, packed.offsets, dtype, packed.axis)


def _top(format: PrecisionFormat) -> np.ndarray:
    """The largest code, as an operand."""
    return np.asarray(2**format.bits - 1, np.float32)


@functools.partial(jax.jit, inline=True)
def _fitted(x: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes 0 to top of groups `[..., group_size]`, as floats, scales and offsets."""
    # By a power of two each group's numbers become about 1, which rounds nothing: so
    # squares of none are too large or too small. It and one over it are normal floats.
    exponent = jnp.clip(jnp.frexp(jnp.abs(x).max(-1))[1] - 1, -126, 126)
    unit = jnp.ldexp(jnp.ones_like(x[..., 0]), exponent)
    x = x / unit[..., None]
    low, high = x.min(-1), x.max(-1)
    middle, half = (low + high) / 2, (high - low) / 2

    def coded(scale: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes = (x - offset[..., None].astype(x.dtype)) / _divisor(scale)
        codes = jnp.clip(jnp.round(codes), 0, top)
        values = codes * scale[..., None].astype(x.dtype)
        values = values + offset[..., None].astype(x.dtype)
        return codes, jnp.square(values - x).sum(-1)

    def better(best: Any, scale: jax.Array, offset: jax.Array) -> tuple[Any, jax.Array]:
        codes, error = coded(scale, offset)
        old_scale, old_offset, least = best
        won = error < least
        scale = jnp.where(won, scale, old_scale)
        offset = jnp.where(won, offset, old_offset)
        return (scale, offset, jnp.minimum(error, least)), codes

    def attempt(best: Any, factor: jax.Array) -> tuple[Any, None]:
        offset = _below(middle - half * factor)
        best, codes = better(best, _above(2 * half * factor / top), offset)
        # The line through the codes and their numbers, by least squares.
        mean = codes.mean(-1)
        apart = codes - mean[..., None]
        slope = (apart * x).sum(-1) / jnp.maximum(jnp.square(apart).sum(-1), 1)
        slope = jnp.maximum(slope, 0)
        line = x.mean(-1) - slope * mean
        best, _ = better(best, _near(slope), _near(line))
        return best, None

    nothing = jnp.zeros_like(low, SHARE)
    start = (nothing, nothing, jnp.full_like(low, jnp.inf))
    factors = jnp.asarray(RANGES, x.dtype)
    (scales, offsets, _), _ = jax.lax.scan(attempt, start, factors)
    numbers, unit = coded(scales, offsets)[0], unit.astype(SHARE)
    # A scale that is no normal float becomes 0 (some devices know no others), and then
    # all numbers are the offset.
    lost = (scales > 0) & (scales < jnp.asarray(2.0**-126, SHARE) / unit)
    offsets = jnp.where(lost, _near(middle), offsets)
    scales = jnp.where(lost, jnp.zeros_like(scales), scales)
    most = jnp.finfo(SHARE).max
    return numbers, scales * unit, jnp.clip(offsets * unit, -most, most)


def _divisor(scale: jax.Array) -> jax.Array:
    """The scales of groups, to divide by: 1 where all numbers are one."""
    scale = scale[..., None].astype(jnp.float32)
    return jnp.where(scale > 0, scale, 1)


def _above(x: jax.Array) -> jax.Array:
    """The nearest bfloat16 that is not smaller."""
    return -_below(-x)


def _near(x: jax.Array) -> jax.Array:
    """The nearest bfloat16: XLA leaves out conversions there and back, if it is let."""
    return jax.lax.reduce_precision(x, 8, 7).astype(SHARE)


def _below(x: jax.Array) -> jax.Array:
    """The nearest bfloat16 that is not larger."""
    near = _near(x)
    return jnp.where(near.astype(x.dtype) > x, jnp.nextafter(near, -jnp.inf), near)


def packed_dot(
    x: Num[ArrayIn, "... K"], weights: PackedArray, *, dtype: Any = None
) -> jax.Array:
    """The product of rows with an array of few bits, unpacked inside of the program.

    Plain JAX: codes become numbers where the product reads them, as far as XLA fuses
    the two. On the CPU it writes the numbers to memory first, one array of them. There
    are derivatives for x, scales and offsets.

    Args:
      x: `[..., K]`, floats.
      weights: its groups' axis has K numbers; that axis is summed over.
      dtype: of the result; x's unless given. Numbers are multiplied in x's dtype and
        summed in float32 at least.

    Returns:
      x's axes but the last, then the weights' axes but theirs.

    Raises:
      TypeError, ValueError: weights that are not packed, K that differs.
    """
    where = "packed_dot"
    x = as_array(where, "x", x)
    if not isinstance(weights, PackedArray):
        raise TypeError(
            f"{where}: weights must be a PackedArray, got {show(weights)}; make one "
            "with quantize, or multiply with jnp.dot"
        )
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{where}: x must be bfloat16, float16 or float32, got {show(x)}; cast it "
            "with .astype(jnp.float32)"
        )
    if not x.ndim or x.shape[-1] != weights.shape[weights.axis]:
        raise ValueError(
            f"{where}: x must be [..., {weights.shape[weights.axis]}], as the weights' "
            f"axis {weights.axis} has it, got {show(x)} beside {list(weights.shape)}"
        )
    dtype = x.dtype if dtype is None else check_dtype(where, "dtype", dtype)
    axis = weights.axis + weights.ndim
    made = jax.lax.dot_general(
        x,
        weights.dequantize(x.dtype),
        (((x.ndim - 1,), (axis,)), ((), ())),
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )
    return made.astype(dtype)
