"""How a sequence lies over devices: in runs, or in zigzag; positions, padding.

In zigzag over n devices a sequence is cut into 2 n chunks, and device i has chunks i
and 2 n - 1 - i. Under a causal mask every device then has as much to do as every other.
Packed documents are cut so one by one, each over all devices. The order is that of
Llama 3's training (Dubey et al., 2024, section 3.3.2) and of zigzag ring attention.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jax_kvblock.attention.integers import known_on_host
from jax_kvblock.core import debug
from jax_kvblock.core.checks import (
    as_array,
    check_choice,
    check_int32,
    check_integer,
    check_positive,
    show,
)
from jax_kvblock.core.types import ArrayIn, Integers
from jax_kvblock.parallel import axes

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped

SequenceLayout: TypeAlias = Literal["zigzag", "contiguous"]
LAYOUTS = ("zigzag", "contiguous")


def chunks_of(layout: str, size: int) -> int:
    """How many chunks a sequence is cut into; for one device it is whole."""
    return 2 * size if layout == "zigzag" and size > 1 else size


def to_zigzag(
    x: Shaped[ArrayIn, "..."],
    size: int,
    *,
    axis: int = 1,
    cu_seqlens: Integers | None = None,
) -> Shaped[jax.Array, "..."]:
    """Lays a sequence out in zigzag: what `size` devices then hold, device by device.

    Do it to tokens, targets and positions, where a batch is made: all that is computed
    position by position stays in this order.

    Args:
      x: an array whose `axis` is the sequence, whole.
      size: how many devices the sequence is cut over.
      axis: the sequence's.
      cu_seqlens: int32 `[documents + 1]`, for packed documents: the first row of each
        and the end of the last, multiples of 2 `size` where that is more than one
        device. Each is cut over all devices.
        Of traced ones only `debug_checks` knows whether they are; others' rows lie
        somewhere, some of them twice.

    Returns:
      An array like x. Cut over `size` devices along `axis`, each has its chunks.

    Raises:
      ValueError: a length is no multiple of 2 `size`, where that is more than one
        device; `pad_sequence` and `pad_documents` pad.

    Example:
      >>> to_zigzag(jnp.arange(8), 2, axis=0)
      Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    x, axis, order = _order_of("to_zigzag", x, size, axis, cu_seqlens)
    return taken(x, order, axis, unique_indices=True)


def from_zigzag(
    x: Shaped[ArrayIn, "..."],
    size: int,
    *,
    axis: int = 1,
    cu_seqlens: Integers | None = None,
) -> Shaped[jax.Array, "..."]:
    """Undoes `to_zigzag`, with the same arguments."""
    x, axis, order = _order_of("from_zigzag", x, size, axis, cu_seqlens)
    back = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.shape[0], dtype=jnp.int32), unique_indices=True)
    )
    return taken(x, back, axis, unique_indices=True)


def taken(x: jax.Array, order: Any, axis: int, **how: Any) -> jax.Array:
    """Rows in another order, cut over devices as they were.

    how: what a gather does about rows that are not there.
    """
    sharding: Any = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return jnp.take(x, order, axis=axis, **how)
    rows = x.at[(*[slice(None)] * axis, jnp.asarray(order))]
    return rows.get(out_sharding=sharding, **how)


def _order_of(
    where: str, x: Any, size: Any, axis: Any, cu_seqlens: Any
) -> tuple[jax.Array, int, jax.Array]:
    x = as_array(where, "x", x)
    (size,) = check_positive(where, size=size)
    axis = check_axis(where, axis, x)
    length = x.shape[axis]
    check_divides(where, f"dim {axis} of x", length, chunks_of("zigzag", size))
    bounds = None
    if cu_seqlens is not None:
        bounds = check_boundaries(where, cu_seqlens, length, chunks_of("zigzag", size))
    return x, axis % x.ndim, zigzag_rows(length, size, bounds)


def check_axis(where: str, axis: Any, x: jax.Array) -> int:
    axis = check_integer(where, "axis", axis, "it is a dim of x")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{where}: axis must be a dim of x, from {-x.ndim} to {x.ndim - 1}, got "
            f"{axis}; x is {show(x)}"
        )
    return axis


def check_divides(where: str, name: str, length: int, by: int) -> None:
    if length % by:
        raise ValueError(
            f"{where}: {name} must be a multiple of {by}, got {length}; pad the whole "
            "sequence, before it is laid out and cut, by "
            "jax_kvblock.parallel.pad_sequence (and say its length in kv_lens where "
            "the mask is not causal)"
        )


def check_boundaries(
    where: str, cu_seqlens: Any, total: int, by: int, name: str = "cu_seqlens"
) -> jax.Array:
    """Boundaries of documents.

    Their values are checked where they lie on the host, or under `debug_checks`.
    """
    bounds = check_int32(where, name, cu_seqlens, "[documents + 1]", 1)
    given = known_on_host(where, name, cu_seqlens)
    if bounds.shape[0] < 2:
        raise ValueError(
            f"{where}: {name} must be int32[documents + 1] with at least one document, "
            f"got {show(bounds)}; it begins with the first row of the first one and "
            "ends with the end of the last"
        )
    if given is None:
        return debug.checked(_look, bounds, where, name, total, by, name="given")
    _look(where, name, total, by, given=given)
    return bounds


def boundaries_on_host(
    where: str, cu_seqlens: Any, total: int | None, why: str
) -> np.ndarray:
    """Boundaries of documents that lie in a row from row 0.

    total: how many rows there are; None: as many as they say. why: they are on the
    host.
    """
    given = known_on_host(where, "cu_seqlens", cu_seqlens)
    if given is None:
        raise TypeError(
            f"{where}: cu_seqlens must be integers on the host, got a traced or a "
            f"device's array; {why}"
        )
    most = int(given.max(initial=0)) if total is None else total
    check_boundaries(where, cu_seqlens, most, 1)
    if given[0] != 0:
        raise ValueError(
            f"{where}: cu_seqlens must begin with 0, got {given[0]}; rows in front of "
            "the first document belong to none"
        )
    return given


def _look(where: str, name: str, total: int, by: int, *, given: np.ndarray) -> None:
    """Whether boundaries rise within `total` rows, in multiples of `by`."""
    if (given[1:] < given[:-1]).any() or given[0] < 0 or given[-1] > total:
        raise ValueError(
            f"{where}: {name} must rise from at least 0 to at most {total}, the rows "
            f"of all devices together, got {given.tolist()[:8]}; pass the cumulative "
            "sum of the documents' lengths, with 0 in front"
        )
    (odd,) = np.nonzero(given % by)
    if odd.size:
        raise ValueError(
            f"{where}: {name} must be multiples of {by}, so that every document is cut "
            f"evenly, got {given[odd[0]]} at {odd[0]}; pad documents by "
            "jax_kvblock.parallel.pad_documents"
        )


def zigzag_rows(length: int, size: int, bounds: jax.Array | None) -> jax.Array:
    """Which row of a sequence is row r of its zigzag order, int32 `[length]`.

    Rows of no document, before the first and behind the last, are cut like a document.
    """
    if bounds is None:
        bounds = jnp.asarray([0, length], jnp.int32)
    else:
        ends = jnp.zeros((1,), jnp.int32)
        bounds = jnp.concatenate([ends, bounds, ends + length])
    row = jnp.arange(length, dtype=jnp.int32)
    local = length // size
    device, row = row // local, row % local
    document, within = _find(bounds // size, row)
    chunk = (bounds[document + 1] - bounds[document]) // (2 * size)
    late = within >= chunk
    place = jnp.where(late, 2 * size - 1 - device, device)
    return bounds[document] + place * chunk + within - jnp.where(late, chunk, 0)


def _find(bounds: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which document a row is in, and where in it."""
    document = jnp.searchsorted(bounds[1:-1], row, side="right").astype(jnp.int32)
    return document, row - bounds[document]


def shard_positions(
    length: int,
    *,
    axis_name: Hashable,
    layout: SequenceLayout = "zigzag",
    cu_seqlens: Integers | None = None,
) -> Int[jax.Array, " length"]:
    """The positions of this device's rows in their sequence; inside `jax.shard_map`.

    What rotary embeddings ask for.

    Args:
      length: how many rows each device has.
      axis_name: the mesh axis, or axes, that the sequence is cut over.
      layout: "zigzag" or "contiguous".
      cu_seqlens: int32 `[documents + 1]`, boundaries in the rows of all devices
        together: positions count from each document's first row.

    Returns:
      int32 `[length]`.

    Example:
      >>> # on the second of two devices
      >>> shard_positions(4, axis_name="context")
      Array([2, 3, 4, 5], dtype=int32)
    """
    where = "shard_positions"
    check_choice(where, "layout", layout, LAYOUTS)
    (length,) = check_positive(where, length=length)
    size = axes.axis_size(where, axis_name)
    total = length * size
    by = chunks_of(layout, size) if layout == "zigzag" else 1
    if layout == "zigzag" and size > 1:
        check_divides(where, "length, a device's rows in zigzag,", length, 2)
    bounds = None
    if cu_seqlens is not None:
        bounds = check_boundaries(where, cu_seqlens, total, by)
    rows = jnp.arange(total, dtype=jnp.int32)
    if layout == "zigzag":
        rows = zigzag_rows(total, size, bounds)
    own = axes.index(axis_name) * length
    rows = jax.lax.dynamic_slice_in_dim(rows, own, length)
    if bounds is None:
        return rows
    first = jnp.concatenate([jnp.zeros((1,), jnp.int32), bounds])
    found = jnp.searchsorted(bounds, rows, side="right")
    return rows - first[found]


def pad_sequence(
    x: Shaped[ArrayIn, "..."],
    size: int,
    *,
    axis: int = 1,
    layout: SequenceLayout = "zigzag",
) -> Shaped[jax.Array, "..."]:
    """Zeros behind a sequence, so that `size` devices hold equal parts of it.

    Under a causal mask no row of the sequence sees the padding. Else say the length in
    kv_lens.

    Example:
      >>> pad_sequence(jnp.ones((1, 1000)), 4).shape
      (1, 1000)
      >>> pad_sequence(jnp.ones((1, 1001)), 4).shape
      (1, 1008)
    """
    where = "pad_sequence"
    x = as_array(where, "x", x)
    check_choice(where, "layout", layout, LAYOUTS)
    (size,) = check_positive(where, size=size)
    axis = check_axis(where, axis, x)
    by = chunks_of(layout, size)
    wide = [(0, 0)] * x.ndim
    wide[axis] = (0, -x.shape[axis] % by)
    return jnp.pad(x, wide)


def pad_documents(
    x: Shaped[ArrayIn, "..."], cu_seqlens: Any, size: int, *, axis: int = 0
) -> tuple[Shaped[jax.Array, "..."], np.ndarray]:
    """Zeros behind every packed document, so that each is cut evenly in zigzag.

    Args:
      x: an array whose `axis` holds the documents, one behind the other from row 0.
      cu_seqlens: integers `[documents + 1]` on the host, since they decide the result's
        size: from 0 to at most the rows of x.
      size: how many devices they are cut over.
      axis: the documents'.

    Returns:
      The documents, each a multiple of 2 `size` rows long (of one device as long as it
      is), and their boundaries, int32.
      Rows behind the last document are left out.

    Example:
      >>> x, cu = pad_documents(jnp.arange(10), [0, 3, 10], 2, axis=0)
      >>> x.shape, cu
      ((12,), array([ 0,  4, 12], dtype=int32))
    """
    where = "pad_documents"
    x = as_array(where, "x", x)
    (size,) = check_positive(where, size=size)
    axis = check_axis(where, axis, x)
    why = "they decide the size of the result"
    given = boundaries_on_host(where, cu_seqlens, x.shape[axis], why)
    by = chunks_of("zigzag", size)
    lens = np.diff(given)
    starts = np.concatenate([[0], np.cumsum(-(-lens // by) * by)]).astype(np.int32)
    total = int(starts[-1])
    source = np.full(total, x.shape[axis], np.int64)  # beyond x: filled with zeros
    for first, n, to in zip(given, lens, starts, strict=False):
        source[to : to + n] = np.arange(first, first + n)
    return taken(x, source, axis % x.ndim, mode="fill", fill_value=0), starts
