"""Who sees whom, between the rows of one device and the keys of another.

A device's rows are *pieces*: of every document (every batch member) one run of rows, or
in zigzag two, each with a position. A *box* is a piece of the queries and a piece of
the keys, and the mask between them is a mask of positions: causal and window, moved by
how far the pieces are apart. So one kind of call, attention in boxes, computes any part
of the whole, and a few boxes join where they are seen alike.

Which device's keys are at hand is traced, so all devices run one program: boxes are
boundaries and offsets, operands of the kernels. In a box that nobody sees, no tile is
visited.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.attention import dropout
from jax_kvblock.attention.config import OPEN, AttentionConfig, Operands

# Ids of rows outside of a box; no segment of the caller's has them.
NO_QUERY, NO_KEY = -(2**31), -(2**31) + 1


class Piece(NamedTuple):
    """Of every document a run of rows: int32 `[documents]`, or one for all of them."""

    first: Any
    last: Any  # behind the last row that is there: lengths cut it
    position: Any  # of the first row, in its document


@dataclasses.dataclass(frozen=True)
class Side:
    """The rows of queries, or of keys, that one device has.

    Attributes:
      length: rows of a batch member; packed, of all documents.
      starts: int32 `[documents + 1]`, where each document's rows begin and the last
        one's end.
      pieces: one, or in zigzag two.
      places: for each piece and each device, which chunk it is. It is static, to leave
        boxes out.
      chunk: rows of one; 0 where chunks have no one size.
    """

    length: int
    starts: jax.Array
    pieces: tuple[Piece, ...]
    places: tuple[tuple[int, ...], ...]
    chunk: int
    cut: bool = False  # whether lengths cut pieces

    @property
    def documents(self) -> int:
        return self.starts.shape[0] - 1

    @property
    def whole(self) -> Piece:
        """All rows as one run: lengths leave the first ones, in zigzag too."""
        last = sum(p.last - p.first for p in self.pieces) + self.starts[:-1]
        return Piece(self.starts[:-1], last, self.pieces[0].position)


def contiguous_side(
    length: int, size: int, index: Any, starts: jax.Array, lens: Any, *,
    packed: bool, alike: bool = True,
) -> Side:  # fmt: skip
    """Device `index` of `size` has the rows from `index * length` on.

    starts: packed, the boundaries in the rows of all devices; else in this one's.
    alike: whether queries and keys have the same ones. Then rows of a document are as
    far apart as their positions.
    """
    places = (tuple(range(size)),)
    if not packed:
        first, last = starts[:-1], starts[1:]
        position = jnp.asarray(index * length, jnp.int32)
        last = _cut(first, last, position, lens)
        piece = Piece(first, last, position)
        return Side(length, starts, (piece,), places, length, lens is not None)
    own = jnp.clip(starts - index * length, 0, length)
    position = jnp.clip(index * length - starts[:-1], 0)
    last = _cut(own[:-1], own[1:], position, lens)
    piece = Piece(own[:-1], last, position)
    return Side(length, own, (piece,), places, length if alike else 0, lens is not None)


def zigzag_side(
    length: int, size: int, index: Any, starts: jax.Array, lens: Any, *,
    packed: bool, alike: bool = True,
) -> Side:  # fmt: skip
    """Device `index` has chunks `index` and `2 size - 1 - index` of each document.

    starts: packed, the boundaries in the rows of all devices; else in this one's.
    """
    own = starts // size if packed else starts
    chunk = (own[1:] - own[:-1]) // 2 if packed else jnp.int32(length // 2)
    first, pieces = own[:-1], []
    for place in (index, 2 * size - 1 - index):
        position = jnp.asarray(place * chunk, jnp.int32)
        last = _cut(first, first + chunk, position, lens)
        pieces.append(Piece(first, last, position))
        first = first + chunk
    places = (tuple(range(size)), tuple(range(2 * size - 1, size - 1, -1)))
    return Side(length, own, tuple(pieces), places, 0 if packed else length // 2,
                lens is not None)  # fmt: skip


def _cut(first: Any, last: Any, position: Any, lens: Any) -> Any:
    """The end of a piece of documents of these lengths."""
    if lens is None:
        return last
    return jnp.clip(first + lens - position, first, last)


class Box(NamedTuple):
    """A run of queries and a run of keys of every document, and the mask between.

    Attributes:
      q_whole, k_whole: all rows of the side, in one run.
      masked: by positions.
      by_rows: whose rows are in the order of positions: no offset.
      rows_before, keys_before: whether there may be some, in the document, behind the
        box before this one.
      rows_after, keys_after: whether there may be some behind the last box.
    """

    q: Piece
    k: Piece
    q_whole: bool
    k_whole: bool
    masked: bool
    by_rows: bool = False
    rows_before: bool = True
    keys_before: bool = True
    rows_after: bool = True
    keys_after: bool = True


Boxes = tuple[Box, ...]  # of one call: runs that follow each other on both sides


def boxes(
    config: AttentionConfig, q: Side, k: Side, *, alike: bool, size: int, step: int,
    late: Any, joined: bool, longest: int = OPEN,
) -> Iterator[Boxes]:  # fmt: skip
    """What the queries of `q` see of the keys of `k`, of `step` devices before.

    Devices stand in a circle.

    longest: the rows of the longest document, where that is known: no row sees keys
      that are farther away.
    alike: whether queries and keys have the same positions on every device.
    late: whether the keys come later in the sequence, traced.
    joined: whether a call may have several boxes.
    """
    left, right = config.window_left, config.window_right
    near = _within(config, longest)
    if longest != OPEN and not _is_seen(near, q, k, (0, 0), size, step, alike):
        return
    # Dropout goes by positions, also where no mask does: each run has to be one.
    by_runs = config.dropout > 0 and max(len(q.pieces), len(k.pieces)) > 1
    if left == OPEN and right == OPEN and not by_runs:
        yield (whole(q, k),)
    elif not by_runs and alike and len(k.pieces) == 2 and left == OPEN and right == 0:
        if step == 0:
            yield (whole(q, k)._replace(masked=True, by_rows=True),)
        else:
            half = _half(q, k, late)
            yield _parted(half, q, k, late) if joined else (half,)
    else:
        pairs = [
            (a, b)
            for b in range(len(k.pieces))
            for a in range(len(q.pieces))
            if _is_seen(near, q, k, (a, b), size, step, alike)
        ]
        one = (len(q.pieces) == 1, len(k.pieces) == 1)
        found = {
            (a, b): Box(q.pieces[a], k.pieces[b], *one, masked=True) for a, b in pairs
        }
        if joined and {(0, 0), (1, 1)} <= {*pairs}:
            yield (found.pop((0, 0)), found.pop((1, 1)))
        yield from ((box,) for box in found.values())


def _within(config: AttentionConfig, longest: int) -> AttentionConfig:
    """Windows that no document reaches beyond."""
    if longest == OPEN:
        return config
    sides = [
        longest - 1 if side == OPEN else min(side, longest - 1)
        for side in (config.window_left, config.window_right)
    ]
    return dataclasses.replace(config, window_left=sides[0], window_right=sides[1])


def whole(q: Side, k: Side) -> Box:
    """All rows and all keys, without a mask."""
    return Box(q.whole, k.whole, True, True, masked=False)


def reach_of(
    config: AttentionConfig, size: int, rows: int, keys: int, zigzag: bool, alike: bool,
    longest: int = OPEN,
) -> int:  # fmt: skip
    """Of how many devices in a circle some device sees a key, its own among them."""
    side = zigzag_side if zigzag and size > 1 else contiguous_side
    one = jnp.int32(0)
    q, k = (
        side(n, size, one, jnp.asarray([0, n], jnp.int32), None, packed=False)
        for n in (rows, keys)
    )
    shared = {"alike": alike, "size": size, "late": one > 0, "joined": False}
    shared |= {"longest": longest}
    return sum(
        any(True for _ in boxes(config, q, k, step=s, **shared)) for s in range(size)
    )


def _half(q: Side, k: Side, late: Any) -> Box:
    """In zigzag under a causal mask another device's keys are seen by halves, whole.

    All rows see the first piece of an earlier device; of a later one, all keys are seen
    by the second piece.
    """
    (q0, q1), (k0, k1) = q.pieces, k.pieces
    rows = Piece(jnp.where(late, q1.first, q0.first), q.whole.last, q0.position)
    rows = rows._replace(first=jnp.minimum(rows.first, rows.last))
    end = jnp.where(late, k.whole.last, k0.last)
    keys = Piece(k0.first, end, k1.position)
    return Box(rows, keys, False, False, masked=False)


def _parted(half: Box, q: Side, k: Side, late: Any) -> Boxes:
    """`_half` beside what it leaves out: rows before it, or keys behind it.

    Either way two boxes, of which one has rows and keys: it is the second if the keys
    are later. Not a third that is always empty, since kernels look at how long
    sequences are in the mean.
    """
    row = jnp.where(late, half.q.first, half.q.last)
    key = jnp.where(late, half.k.first, half.k.last)
    first = half._replace(
        q=half.q._replace(first=q.starts[:-1], last=row),
        k=half.k._replace(last=key),
        rows_before=False,
        keys_before=False,
    )
    second = first._replace(
        q=half.q._replace(first=row, last=q.whole.last),
        k=half.k._replace(first=key, last=k.whole.last),
        rows_after=q.cut,
        keys_after=k.cut,
    )
    return first, second


def _is_seen(
    config: AttentionConfig, q: Side, k: Side, pair: tuple[int, int], size: int,
    step: int, alike: bool,
) -> bool:  # fmt: skip
    """Whether some device sees anything in this box, as far as sizes are static."""
    apart = [
        q.places[pair[0]][i] - k.places[pair[1]][(i - step) % len(k.places[pair[1]])]
        for i in range(size)
    ]
    if not q.chunk or not k.chunk:  # each document has its own
        return not alike or config.window_right != 0 or max(apart) >= 0
    return any(_reach(config, q, k, pair, i, step) for i in range(size))


def _reach(
    config: AttentionConfig, q: Side, k: Side, pair: tuple[int, int], i: int, step: int
) -> bool:
    keys = k.places[pair[1]]
    first = q.places[pair[0]][i] * q.chunk
    to = keys[(i - step) % len(keys)] * k.chunk
    nearest = first - (to + k.chunk - 1)
    farthest = first + q.chunk - 1 - to
    left, right = config.window_left, config.window_right
    return (left == OPEN or nearest <= left) and (right == OPEN or farthest >= -right)


class Call(NamedTuple):
    """One call of attention: what is compiled in, the mask, and how arrays lie."""

    config: AttentionConfig
    mask: Operands
    packed: bool  # batch members are documents of packed arrays


def call_of(
    config: AttentionConfig, q: Side, k: Side, found: Boxes, segments: Any,
    dropout_keys: Any = None, *, packed: bool,
) -> Call:  # fmt: skip
    """Attention in boxes.

    segments: the ids of queries and keys, of batches, or None.
    dropout_keys: `[B, N, 2]`, of batches, or None.
    packed: whether the arrays are, or else a batch.
    """
    box = found[0]
    if not box.masked:
        config = dataclasses.replace(config, window_left=OPEN, window_right=OPEN)
    whole = box.q_whole and box.k_whole
    if packed or (segments is None and not whole):
        return _packed_call(config, q, k, found, dropout_keys)
    mask = Operands(None, None, None)
    shift = _shift(box)
    if segments is not None:
        inside = [
            _inside(segments[0], box.q, q, box.q_whole, NO_QUERY),
            _inside(segments[1], box.k, k, box.k_whole, NO_KEY),
        ]
        mask = mask._replace(q_segments=inside[0], kv_segments=inside[1])
        # Rows count from the first of all, not of the piece.
        before = (box.q.first - q.starts[:-1], box.k.first - k.starts[:-1])
        if shift is not None:
            shift = shift - (before[0] - before[1])
        if dropout_keys is not None:
            dropout_keys = dropout.moved(dropout_keys, -before[0], -before[1])
    if dropout_keys is not None:
        mask = mask._replace(dropout_keys=_keys_of(dropout_keys, box))
    if shift is not None:
        mask = mask._replace(shift=jnp.broadcast_to(shift, (q.documents,)))
    if q.cut:
        mask = mask._replace(q_lens=q.whole.last - q.starts[:-1])
    if k.cut:
        mask = mask._replace(kv_lens=k.whole.last - k.starts[:-1])
    return Call(config, mask, packed=False)


def _shift(box: Box) -> Any:
    """How far the queries' first position is behind the keys'."""
    if not box.masked or box.by_rows:
        return None
    return jnp.asarray(box.q.position - box.k.position, jnp.int32)


def _inside(ids: Any, run: Piece, side: Side, whole: bool, nobody: int) -> Any:
    """The ids of the rows in a run, `nobody` for the others."""
    if whole:
        return ids
    row = side.starts[:-1, None] + jnp.arange(side.length, dtype=jnp.int32)
    first, last = run.first[:, None], run.last[:, None]
    return jnp.where((row >= first) & (row < last), ids, nobody)


def _keys_of(dropout_keys: Any, box: Box) -> Any:
    """Those of a run of queries and a run of keys, whose rows count from 0."""
    return dropout.moved(dropout_keys, box.q.position, box.k.position)


def _packed_call(
    config: AttentionConfig, q: Side, k: Side, found: Boxes, dropout_keys: Any
) -> Call:
    config = dataclasses.replace(config, packed=True)
    box = found[0]
    sequences: list[Box | None] = [*found]
    if box.q_whole and box.k_whole and not (q.cut or k.cut):
        cu_q, cu_kv = q.starts, k.starts
    else:
        cu_q, cu_kv, sequences = _boundaries(q, k, found)
    shifts = [jnp.int32(0) if each is None else _shift(each) for each in sequences]
    shift = None
    if box.masked and not box.by_rows:
        rows = [jnp.broadcast_to(each, (q.documents,)) for each in shifts]
        shift = jnp.stack(rows, 1).reshape(-1)
    keys = None
    if dropout_keys is not None:
        of_each = [
            dropout_keys if each is None else _keys_of(dropout_keys, each)
            for each in sequences
        ]
        keys = jnp.stack(of_each, 1).reshape(-1, *dropout_keys.shape[1:])
    mask = Operands(
        None, None, None, cu_q=cu_q, cu_kv=cu_kv, shift=shift, dropout_keys=keys
    )
    return Call(config, mask, packed=True)


def _boundaries(
    q: Side, k: Side, found: Boxes
) -> tuple[jax.Array, jax.Array, list[Box | None]]:
    """Packed sequences, one for each box of each document, and None for those between.

    Those between walk past what is outside of boxes, in keys alone or in queries alone:
    a sequence without the other sees nothing. Where it is known that nothing is there,
    there is none, since kernels look at how long sequences are in the mean.
    """
    row = q.starts[:-1]
    made: list[tuple[Any, Any, Box | None]] = []  # with the ends of rows and of keys
    for box in found:
        if box.keys_before:
            made.append((row, box.k.first, None))
        if box.rows_before:
            made.append((box.q.first, box.k.first, None))
        made.append((box.q.last, box.k.last, box))
        row = box.q.last
    if found[-1].keys_after:
        made.append((row, k.starts[1:], None))
    if found[-1].rows_after:
        made.append((q.starts[1:], k.starts[1:], None))
    ends_q, ends_kv, sequences = zip(*made, strict=True)
    flat = []
    for side, ends in ((q, ends_q), (k, ends_kv)):
        starts = jnp.stack([side.starts[:-1], *ends[:-1]], 1).reshape(-1)
        flat.append(jnp.concatenate([starts, side.starts[-1:]]).astype(jnp.int32))
    return flat[0], flat[1], list(sequences)
