"""Block copies for the fuzzes: drawn mostly right and partly hostile, with a model.

`run_model` is the copy of block_copy.h in a dozen lines of Python, with unbounded
integers and every access checked.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

INT64 = 2**63
LIMITS = (-INT64, -1, 0, 1, 3, 2**31 - 1, 2**31, 2**32, 2**32 + 3, INT64 - 8, INT64 - 1)
HOSTILE = st.one_of(
    st.integers(0, 40), st.sampled_from(LIMITS), st.integers(-INT64, INT64 - 1)
)
MAX_COORDINATES = 4096
SIDE_NUMBERS = 8  # offset, four numbers about ids, three about the start; then strides


@dataclasses.dataclass(frozen=True)
class Side:
    """One side as the handler decodes it, with the sizes of its buffers in bytes."""

    sizes: tuple[int, ...]
    numbers: tuple[int, ...]
    ids: tuple[int, ...] | None = None
    start: int | None = None

    def place(self, at: tuple[int, ...]) -> tuple[int, int] | None:
        """The buffer and offset of a coordinate; None outside of ids or start."""
        offset, id_limit, id_inner, id_outer, id_step, *start = self.numbers[:8]
        strides = self.numbers[SIDE_NUMBERS:]
        table = 0
        if self.ids is not None:
            index = self.ids[at[0]]
            if not 0 <= index < id_limit:
                return None
            offset += index // id_inner * id_outer + index % id_inner * id_step
        if self.start is not None:
            if not 0 <= self.start < start[0]:
                return None
            offset += self.start * start[1]
            table += self.start * start[2]
        for k, c in enumerate(at):
            offset += c * strides[k]
            table += c * strides[len(at) + k]
        return table, offset

    def may_fit(self, dims: tuple[int, ...], unit: int) -> bool:
        """False only when the strides alone leave the buffers."""
        if self.ids is not None or self.start is not None or not self.sizes:
            return True
        walk = zip(dims, self.numbers[SIDE_NUMBERS:], strict=False)
        last = self.numbers[0] + sum((n - 1) * stride for n, stride in walk) + unit
        return last <= min(self.sizes)


@dataclasses.dataclass(frozen=True)
class Case:
    dims: tuple[int, ...]
    unit: int
    src: Side
    dst: Side

    @property
    def takes_forever(self) -> bool:
        """Whether a call that nothing is wrong with would walk too many coordinates."""
        count = math.prod(max(n, 0) for n in self.dims)
        sides = (self.src, self.dst)
        return count > MAX_COORDINATES and all(
            side.may_fit(self.dims, self.unit) for side in sides
        )


def run_model(
    case: Case, sources: list[bytes], before: list[bytes]
) -> list[dict[int, set[int]]]:
    """For each destination buffer, what each written byte may hold afterwards."""
    written: list[dict[int, set[int]]] = [{} for _ in before]
    if 0 in case.dims:  # the other dims may be huge
        return written
    for at in itertools.product(*map(range, case.dims)):
        target, origin = case.dst.place(at), case.src.place(at)
        if target is None:
            continue
        value = bytes(case.unit)
        if origin is not None:
            value = inside(sources, origin, case.unit)
        inside(before, target, case.unit)
        for i, byte in enumerate(value):
            written[target[0]].setdefault(target[1] + i, set()).add(byte)
    return written


def inside(buffers: list[bytes], place: tuple[int, int], unit: int) -> bytes:
    table, offset = place
    assert 0 <= table < len(buffers), "accepted a copy that leaves its buffers"
    assert offset >= 0, "accepted a copy that starts before a buffer"
    assert offset + unit <= len(buffers[table]), "accepted a copy past a buffer's end"
    return buffers[table][offset : offset + unit]


def compare(written: dict[int, set[int]], before: bytes | None, after: bytes) -> None:
    """Bytes that are written twice may hold either value; `before` None is garbage."""
    for i, byte in enumerate(after):
        if i in written:
            assert byte in written[i], f"byte {i} is {byte}, not {written[i]}"
        elif before is not None:
            assert byte == before[i], f"byte {i} was not to be written"


@st.composite
def sides(draw: Any, dims: tuple[int, ...], unit: int) -> Side:
    rank = len(dims)
    ids = start = None
    id_limit, id_inner, id_outer, id_step = 0, 1, 0, 0
    order = list(range(rank))
    stride, strides, tables = unit, [0] * rank, [0] * rank
    if draw(st.booleans()) and draw(st.booleans()):
        n = dims[0]
        ids = tuple(draw(st.lists(st.integers(-2, 6), min_size=n, max_size=n)))
        order.remove(0)
    table = draw(st.sampled_from([None, *order]))
    for k in draw(st.permutations(order)):
        if k == table:
            tables[k] = 1
        else:
            strides[k], stride = stride, stride * max(dims[k], 1)
    if ids is not None:
        id_inner = draw(st.integers(1, 3))
        id_limit, id_step, id_outer = 2 * id_inner, stride, stride * id_inner
        stride *= 2 * id_inner
    limit = step = 0
    if draw(st.integers(0, 3)) == 0:
        start, limit, step = draw(st.integers(-1, 3)), 2, stride
        stride *= 2
    offset = unit * draw(st.integers(0, 2))
    size = offset + stride + unit * draw(st.integers(0, 2))
    count = 1 if table is None else max(dims[table], 1)
    sizes = (size,) * (count + draw(st.integers(0, 1)))
    about_ids = (id_limit, id_inner, id_outer, id_step)
    return Side(
        sizes, (offset, *about_ids, limit, step, 0, *strides, *tables), ids, start
    )


@st.composite
def cases(draw: Any) -> Case:
    dims = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    unit = draw(st.sampled_from([1, 2, 4, 8, 16]))
    src, dst = draw(sides(dims, unit)), draw(sides(dims, unit))
    dims = spoil(draw, dims, chance=10)
    unit = spoil(draw, (unit,), chance=40)[0]
    numbers = [spoil(draw, side.numbers, chance=4) for side in (src, dst)]
    case = Case(
        dims,
        unit,
        dataclasses.replace(src, numbers=numbers[0]),
        dataclasses.replace(dst, numbers=numbers[1]),
    )
    assume(not case.takes_forever)
    return case


def spoil(draw: Any, numbers: tuple[int, ...], chance: int) -> tuple[int, ...]:
    """One time in `chance`, the same numbers with one or two replaced."""
    if draw(st.integers(1, chance)) > 1:
        return numbers
    spoiled = list(numbers)
    for _ in range(draw(st.integers(1, 2))):
        spoiled[draw(st.integers(0, len(numbers) - 1))] = draw(HOSTILE)
    return tuple(spoiled)


def contents(sizes: tuple[int, ...], seed: int) -> list[bytes]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 256, n, np.uint8).tobytes() for n in sizes]


def look_up(ids: tuple[int, ...], id_limit: int, id_inner: int, **more: Any) -> Case:
    """One dim of bytes, looked up in a source of 64 bytes."""
    outer, start, start_limit = (more.get(k) for k in ("outer", "start", "start_limit"))
    numbers = (0, id_limit, id_inner, outer or 0, 0, start_limit or 0, 0, 0, 0, 0)
    whole = Side((len(ids),), (0, 0, 1, 0, 0, 0, 0, 0, 1, 0))
    return Case((len(ids),), 1, Side((64,), numbers, ids, start), whole)


# Each was a crash or an access outside of the buffers, or would be without its check.
DIVIDES_BY_ZERO = look_up((0, 1, 2), 16, 0, start=0, start_limit=0)
INNER_OF_33_BITS = look_up((0, 7, 60), 64, 2**32, outer=1)
INNER_WRAPS_TO_3 = look_up((0, 7, 60), 64, 2**32 + 3, outer=2**20)
EMPTY_POOL_FAR_TABLE = Case(
    (2, 3),
    1,
    Side((8,), (0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1000), (0, 1)),
    Side((6,), (0, 0, 1, 0, 0, 0, 0, 0, 3, 1, 0, 0)),
)
KNOWN = (DIVIDES_BY_ZERO, INNER_OF_33_BITS, INNER_WRAPS_TO_3, EMPTY_POOL_FAR_TABLE)
