"""`PageLayout`: how one layer's keys and values lie in arrays of pages.

Its axes are those of a block (`blocks/layout.py`) without the layer, and the pages
themselves:

    P page   T token in the page   H KV head   O outer (K, then V)   D head dim

Readers need no more of it than strides (a kernel) or `take` (plain JAX).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvblock.blocks.copy import block_copy
from jax_kvblock.blocks.layout import parse_axes
from jax_kvblock.blocks.plan import Copy, Form, Side
from jax_kvblock.core.checks import check_array, check_positive, show, to_jax

_NAMES = {"P": "pages", "T": "page_size", "H": "heads", "D": "head_dim"}


class PageSizes(NamedTuple):
    """Pages, tokens of a page, KV heads, head dim of keys, and of values."""

    pages: int
    page_size: int
    heads: int
    head_dim: int
    value_dim: int


class PageStrides(NamedTuple):
    """Where keys (or values) lie: all but `array` in bytes.

    Attributes:
      array: which of the arrays holds them.
      offset: their first element in it.
      page, token, head: from one to the next. Elements of a head are neighbours.
    """

    array: int
    offset: int
    page: int
    token: int
    head: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PageLayout:
    """How one layer's keys and values lie in one array of pages, or in a pair.

    `axes` names each dimension of the arrays, outermost first; parentheses merge axes
    into one dimension. With O it is one array that holds keys and values, without O a
    pair (k_pages, v_pages) of that order. P is a dimension of its own or the first of a
    merged one, and D is innermost, so that a page is found by an id and a head is a
    row.

        "P T H D"      a pair, as `paged_attention` takes it
        "H P T D"      a pair, heads first, as the GPU kernel of Pallas takes it
        "P T (H O) D"  one array whose heads are K0, V0, K1, V1, …
        "P T H (O D)"  one array whose rows are a head's key, then its value

    With `tiled`, the dimension of H is two: tiles, and what a tile holds.

    A dimension may be larger than what is used of it, as rows of 128 for a head dim of
    80 are: the fields say what is used, None all that there is. Of axes that are
    merged, O has 2, the first of the others has what the dimension leaves, and those
    behind it have what the fields say.

    Args:
      axes: P, T and H once each, O and D at most once. Without D a row is one element,
        as those are that scale others.
      page_size, heads, head_dim, value_dim: what is used of T, H and D, integers of at
        least 1. value_dim is of the values; without it they have head_dim.
      tiled: whether the dimension of H is cut in two, as caches of TPUs are.

    Raises:
      ValueError: for other axes or sizes.

    Example:
      >>> PageLayout("P T (H O) D", head_dim=80).strides("f", [(9, 16, 4, 128)], 2)[1]
      PageStrides(array=0, offset=256, page=16384, token=1024, head=512)
    """

    axes: str
    page_size: int | None = None
    heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    tiled: bool = False

    def __post_init__(self) -> None:
        where, letters = "PageLayout", re.sub(r"[ ()]", "", self.axes)
        if not re.fullmatch(
            r"(\s*([PTHOD]|\(\s*[PTHOD][PTHOD ]*\)))*\s*", self.axes
        ) or sorted(letters.replace("O", "", 1).replace("D", "", 1)) != sorted("PTH"):
            raise ValueError(
                f"{where}: axes must name each of P, T and H once, O and D at most "
                f"once, like 'P T H D' or 'P T (H O) D', got {self.axes!r}"
            )
        if "D" in self.axes and self.groups[-1][-1] != "D":
            raise ValueError(
                f"{where}: axes must end with D, so that a head's elements are "
                f"neighbours, got {self.axes!r}"
            )
        if not any(group[0] == "P" for group in self.groups):
            raise ValueError(
                f"{where}: P must be a dimension of its own or the first of a merged "
                f"one, so that an id finds a page, got {self.axes!r}"
            )
        order = " ".join(
            g[0] if len(g) == 1 else f"({' '.join(g)})" for g in self.groups
        )
        object.__setattr__(self, "axes", order)
        for name in (*_NAMES.values(), "value_dim"):
            if getattr(self, name, None) is not None:
                (size,) = check_positive(where, **{name: getattr(self, name)})
                object.__setattr__(self, name, size)
        for group in self.groups:
            for axis in _behind(group):
                if self._used(axis) is None:
                    raise ValueError(
                        f"{where}: {_NAMES[axis]} must be given where {axis} is merged "
                        f"behind another axis, in {self.axes!r}; nothing else says how "
                        "its dimension is cut"
                    )

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """One tuple of axes for each array dimension."""
        return parse_axes(self.axes)

    @property
    def arrays(self) -> int:
        """How many arrays hold the pages: 1 with O, else 2."""
        return 1 if "O" in self.axes else 2

    def sizes(self, where: str, shapes: Any) -> PageSizes:
        """What arrays of these shapes hold.

        Args:
          where: the function that asks, for messages.
          shapes: one shape for each array.

        Raises:
          ValueError: when a shape does not fit.
        """
        shapes = [tuple(shape) for shape in shapes]
        if len(shapes) != self.arrays:
            raise ValueError(
                f"{where}: pages in {self.axes!r} are {self._described()}, got "
                f"{len(shapes)} shapes"
            )
        stored = [self._stored(where, shape) for shape in shapes]
        k, v = stored[0], stored[-1]
        for axis in "PTH":
            if k[axis] != v[axis]:
                raise ValueError(
                    f"{where}: k_pages and v_pages must be alike but for their head "
                    f"dim, got shapes {shapes[0]} and {shapes[1]}; they differ in "
                    f"{_NAMES[axis]}"
                )
        value_dim = self.value_dim if self.value_dim is not None else self.head_dim
        used = {
            "pages": (None, k["P"]),
            "page_size": (self.page_size, k["T"]),
            "heads": (self.heads, k["H"]),
            "head_dim": (self.head_dim, k["D"]),
            "value_dim": (value_dim, v["D"]),
        }
        for name, (wanted, there) in used.items():
            if (wanted or 1) > there:
                raise ValueError(
                    f"{where}: the pages must have room for {name}={wanted or 1}, got "
                    f"{there} in shape {shapes[-1 if name == 'value_dim' else 0]} of "
                    f"{self.axes!r}"
                )
        return PageSizes(*(there if n is None else n for n, there in used.values()))

    def strides(
        self, where: str, shapes: Any, itemsize: int
    ) -> tuple[PageStrides, PageStrides]:
        """Where keys and where values lie in arrays of these shapes, row by row.

        Args:
          where: the function that asks, for messages.
          shapes: one shape for each array.
          itemsize: bytes of an element.

        Returns:
          The strides of keys and of values.

        Raises:
          ValueError: when a shape does not fit.
        """
        shapes = [tuple(shape) for shape in shapes]
        self.sizes(where, shapes)
        made = []
        for outer, array in ((0, 0), (1, self.arrays - 1)):
            steps = self._steps(where, shapes[array], itemsize)
            offset = outer * steps.get("O", 0)
            made.append(PageStrides(array, offset, steps["P"], steps["T"], steps["H"]))
        return made[0], made[1]

    def check(self, where: str, arrays: Any) -> tuple[jax.Array, ...]:
        """The arrays as JAX arrays of one dtype whose shapes fit.

        Args:
          where: the function that asks, for messages.
          arrays: one array or a pair, as `axes` say.

        Raises:
          TypeError, ValueError: when they do not fit.
        """
        if not isinstance(arrays, (tuple, list)) or len(arrays) != self.arrays:
            raise TypeError(
                f"{where}: pages in {self.axes!r} must be {self._described()}, got "
                f"{show(arrays)}"
            )
        names = ("pages",) if self.arrays == 1 else ("k_pages", "v_pages")
        arrays = [
            check_array(where, name, a) for name, a in zip(names, arrays, strict=True)
        ]
        for a in arrays:
            if a.dtype != arrays[0].dtype:
                raise TypeError(
                    f"{where}: k_pages and v_pages must have one dtype, got "
                    f"{show(arrays[0])} and {show(a)}"
                )
        self.sizes(where, [a.shape for a in arrays])
        return tuple(map(to_jax, arrays))

    def take(self, arrays: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The keys and values of some pages; nothing of the cache's size is made.

        Args:
          arrays: one array or a pair that `check` let pass.
          ids: int32 `[n]`. What is no page reads anything.

        Returns:
          k `[n, T, H, D]` and v `[n, T, H, Dv]`, in the pages' dtype.
        """
        sizes = self.sizes("PageLayout.take", [a.shape for a in arrays])
        taken = [self._take(a, ids) for a in arrays]  # [n, T, H, O, D]
        if self.arrays == 1:
            taken = [taken[0][..., :1, :], taken[0][..., 1:, :]]
        k, v = (
            a[:, : sizes.page_size, : sizes.heads, 0, :dim]
            for a, dim in zip(taken, (sizes.head_dim, sizes.value_dim), strict=True)
        )
        return k, v

    def append(
        self,
        arrays: Sequence[jax.Array],
        k: jax.Array,
        v: jax.Array,
        page: jax.Array,
        token: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """The arrays with keys and values of new tokens; in place when donated.

        Args:
          arrays: one array or a pair that `check` let pass.
          k, v: `[n, H, D]` of the pages' dtype; keys and values have one head dim.
          page, token: int32 `[n]`, where each goes. What is no page, and what is no
            token of it, is dropped. Places must not repeat.

        Returns:
          The new arrays. What pads their dimensions stays as it is.
        """
        where = "PageLayout.append"
        sizes = self.sizes(where, [a.shape for a in arrays])
        if sizes.head_dim != sizes.value_dim or len({a.shape for a in arrays}) > 1:
            raise NotImplementedError(
                f"{where}: keys and values must have one head dim and shape, got "
                f"{', '.join(map(show, arrays))}; append_kv serves pools"
            )
        room = self._stored(where, arrays[0].shape)
        inside = (page >= 0) & (page < sizes.pages)
        inside &= (token >= 0) & (token < sizes.page_size)
        slots = jnp.where(inside, page * room["T"] + token, -1)
        form, room, tile = self._form(where, arrays[0].shape, room)
        if k.shape[1] % tile:
            more = ((0, 0), (0, -k.shape[1] % tile), (0, 0))
            k, v = jnp.pad(k, more), jnp.pad(v, more)
        extents = {"N": k.shape[0], "O": 2, "H": k.shape[1] // tile, "D": k.shape[2]}
        heads: tuple[str, ...] = ("H",)
        if tile > 1:
            extents, heads = {**extents, "I": tile}, ("H", "I")
        copy = Copy(
            extents=tuple(extents.items()),
            src=Side(Form(("O",), (("N",), heads, ("D",))), tuple(extents.items())),
            dst=Side(
                Form(("O",) if self.arrays == 2 else (), form),
                tuple({**room, "O": 2}.items()),
                index=("B", "T"),
            ),
            in_place=True,
        )
        return tuple(block_copy(copy, [k, v], arrays, (None, slots)))

    def _form(
        self, where: str, shape: tuple[int, ...], room: dict[str, int]
    ) -> tuple[tuple[tuple[str, ...], ...], dict[str, int], int]:
        """The dimensions as copies name them, the room of their axes, heads of a tile.

        A block that an id finds is B there; I are the heads of a tile.
        """
        room = {"B" if axis == "P" else axis: size for axis, size in room.items()}
        form = [
            tuple("B" if axis == "P" else axis for axis in group)
            for group in self.groups
        ]
        if not self.tiled:
            return tuple(form), room, 1
        at = self._tiles
        pack, group = shape[at + 1], form[at]
        outer = 2 if "O" in group else 1
        tile = max(1, pack // outer)
        if group not in (("H",), ("H", "O")) or pack not in (1, tile * outer):
            raise NotImplementedError(
                f"{where}: tiles must hold heads whole, K and V by turns, got shape "
                f"{shape} of {self.axes!r}"
            )
        inner = ("I", *group[1:]) if pack > 1 else ("I",)
        outer_group = ("H",) if pack > 1 else group
        form[at : at + 1] = [outer_group, inner]
        return tuple(form), {**room, "H": room["H"] // tile, "I": tile}, tile

    def _take(self, pages: jax.Array, ids: jax.Array) -> jax.Array:
        """`[n, T, H, O, D]` of one array, with O 1 where it is no axis."""
        stored = self._stored("PageLayout.take", pages.shape)
        at = next(i for i, group in enumerate(self.groups) if group[0] == "P")
        at += self.tiled and at > self._tiles
        made = _rows(_cut_pages(pages, at, stored["P"]), ids, at)
        axes = [axis for group in self.groups for axis in group]
        axes += [axis for axis in "OD" if axis not in axes]
        stored["P"] = ids.shape[0]
        whole = made.reshape([stored.get(axis, 1) for axis in axes])
        return whole.transpose([axes.index(axis) for axis in "PTHOD"])

    @property
    def _tiles(self) -> int:
        """The dimension of H, which tiles cut."""
        return next(i for i, group in enumerate(self.groups) if "H" in group)

    def _used(self, axis: str) -> int | None:
        name = _NAMES.get(axis)
        return None if name in (None, "pages") else getattr(self, name)

    def _stored(self, where: str, shape: tuple[int, ...]) -> dict[str, int]:
        """How much room each axis has in an array of this shape."""
        if len(shape) != len(self.groups) + self.tiled:
            tiled = ", tiled" if self.tiled else ""
            raise ValueError(
                f"{where}: pages must have the dims {self.axes}{tiled}, got shape "
                f"{shape}"
            )
        if self.tiled:
            at = self._tiles
            shape = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
        room = {}
        for group, size in zip(self.groups, shape, strict=True):
            known = {axis: self._used(axis) for axis in _behind(group)}
            if "O" in group:
                known["O"] = 2
            rest = math.prod(n for n in known.values() if n is not None)
            if size % rest:
                raise ValueError(
                    f"{where}: dimension ({' '.join(group)}) of the pages must be a "
                    f"multiple of {rest}, got {size} in shape {shape} of {self.axes!r}"
                )
            for axis in group:
                room[axis] = known.get(axis) or size // rest
        return {"D": 1, **room}

    def _steps(
        self, where: str, shape: tuple[int, ...], itemsize: int
    ) -> dict[str, int]:
        """Bytes from one index of an axis to the next, of an array without gaps."""
        room, step, steps = self._stored(where, shape), itemsize, {}
        for axis in reversed([axis for group in self.groups for axis in group]):
            steps[axis] = step
            step *= room[axis]
        return steps

    def _described(self) -> str:
        return "one array" if self.arrays == 1 else "a pair (k_pages, v_pages)"


class Pages(NamedTuple):
    """The arrays of one layer, and how they lie."""

    arrays: tuple[jax.Array, ...]
    layout: PageLayout


def _behind(group: tuple[str, ...]) -> list[str]:
    """The axes of a dimension whose size it does not tell: all but the first and O."""
    return [axis for axis in group if axis != "O"][1:]


def _cut_pages(pages: jax.Array, at: int, count: int) -> jax.Array:
    """The pages as a dimension of their own. No element moves: it is a bitcast."""
    shape = pages.shape
    if shape[at] == count:
        return pages
    return pages.reshape(*shape[:at], count, shape[at] // count, *shape[at + 1 :])


def _rows(pages: jax.Array, ids: jax.Array, at: int) -> jax.Array:
    """These pages along dimension `at`.

    XLA's CPU backend has no gather of floats of 8 and 16 bits: it would widen all pages
    ahead of the loop. It gathers integers as they are.
    """
    dtype = pages.dtype
    narrow = {1: jnp.uint8, 2: jnp.uint16}
    bits = narrow.get(dtype.itemsize, dtype)
    pages, ids = jax.lax.optimization_barrier((pages, ids))
    index = (*[slice(None)] * at, ids)
    made = jax.lax.bitcast_convert_type(pages, bits).at[index].get(mode="clip")
    return jax.lax.bitcast_convert_type(made, dtype)


PAIR = PageLayout("P T H D")  # of `paged_attention`
