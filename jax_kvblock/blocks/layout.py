"""What a block is (`BlockSpec`) and how it may lie in memory (`Layout`).

A layout is nothing but an order of the five axes of a block:

    L layer   O outer (K and V)   T token in the block   H KV head   D head dim

From the order and the extents follow the strides, and strides are all that the copy
engine knows. So a new layout is one line here, not a new kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np
from jax.typing import DTypeLike

from jax_kvblock.core import checks

AXES = "LOTHD"
_SIZES = ("num_layers", "num_outer", "block_size", "num_kv_heads", "head_dim")


@dataclasses.dataclass(frozen=True)
class Layout:
    """An order of a block's axes, outermost first; parentheses merge axes into one.

    One in the order of "NHD", "HND" or "universal" equals that name, and the others in
    that order; the rest are equal where name and axes are. "operational" is no order of
    its own: its tail follows a pool's.

    Args:
      name: how messages call it.
      axes: each of L, O, T, H, D once, for example `"H L O T D"` or `"L O (T H D)"`.

    Raises:
      ValueError: when `axes` does not name each axis exactly once.

    Example:
      >>> page_first = Layout("page_first", "T L O H D")
      >>> page_first.shape(BlockSpec(2, 2, 16, 8, 128, "bfloat16"))
      (16, 2, 2, 8, 128)
    """

    name: str
    axes: str

    def __post_init__(self) -> None:
        letters = re.sub(r"[ ()]", "", self.axes)
        if not re.fullmatch(
            r"(\s*([LOTHD]|\(\s*[LOTHD][LOTHD ]*\)))*\s*", self.axes
        ) or sorted(letters) != sorted(AXES):
            raise ValueError(
                f"Layout: axes must name each of L, O, T, H and D once, like "
                f"'H L O T D' or 'L O (T H D)', got {self.axes!r}"
            )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return _identity(self) == other
        if isinstance(other, Layout):
            return _identity(self) == _identity(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(_identity(self))

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """One tuple of axes for each array dimension."""
        return parse_axes(self.axes)

    def shape(self, spec: BlockSpec) -> tuple[int, ...]:
        """The shape of one block of `spec` in this layout."""
        sizes = spec.sizes
        return tuple(math.prod(sizes[axis] for axis in group) for group in self.groups)


@functools.lru_cache(maxsize=256)
def parse_axes(text: str) -> tuple[tuple[str, ...], ...]:
    """`"L O (T H D)"` as `(("L",), ("O",), ("T", "H", "D"))`."""
    groups = re.findall(r"\(([^()]*)\)|([A-Za-z])", text)
    return tuple(
        tuple(merged.replace(" ", "")) if merged else (single,)
        for merged, single in groups
    )


def _identity(layout: Layout) -> str | tuple[str, str]:
    """What makes a layout the same as another: a name that stands for its order."""
    for known in (NHD, HND, UNIVERSAL):
        if layout.groups == known.groups:
            return known.name
    return layout.name, layout.axes


NHD = Layout("NHD", "L O T H D")
HND = Layout("HND", "L O H T D")
UNIVERSAL = Layout("universal", "H L O T D")
OPERATIONAL = Layout("operational", "L O (T H D)")
OPERATIONAL_HND = Layout("operational", "L O (H T D)")
LAYOUT_NAMES = ("NHD", "HND", "operational", "universal")


def find_layout(where: str, name: str, layout: str | Layout, inner: str) -> Layout:
    """The layout of a name; `inner` (NHD or HND) orders an operational block's tail.

    A `Layout` in the order of a known one is that one, whatever it is called.
    """
    if layout == "operational":
        return OPERATIONAL_HND if inner == "HND" else OPERATIONAL
    for known in (NHD, HND, UNIVERSAL, OPERATIONAL):
        if layout == known.name:
            return known
        if isinstance(layout, Layout) and layout.groups == known.groups:
            return known
    if isinstance(layout, Layout):
        return layout
    raise ValueError(
        f"{where}: {name} must be one of {', '.join(map(repr, LAYOUT_NAMES))} or a "
        f"Layout, got {layout!r}"
    )


def _missing(name: str) -> Callable[[], NoReturn]:
    """For a field that must be given, though it follows one that need not be."""

    def missing() -> NoReturn:
        raise TypeError(f"BlockSpec: {name} is missing; pass {name}=")

    return missing


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """The extents, dtype and layout of a KV-cache block.

    Args:
      num_layers: layers in a block.
      num_outer: 2 for K and V, the default where extents are given by name; 1 for a
        combined or latent cache.
      block_size: tokens to a block.
      num_kv_heads: KV heads.
      head_dim: elements to a head.
      dtype: any dtype of 1, 2, 4, 8 or 16 bytes, fp8 too.
      layout: "NHD", "HND", "operational", "universal" or a `Layout`. "operational"
        stands for pieces of NHD order. A `Layout` in the order of one of these is
        that one.

    Raises:
      ValueError: for an extent below 1 or an unknown layout name.
      TypeError: for a dtype smaller than a byte, or no dtype.

    Example:
      >>> spec = BlockSpec(32, 2, 16, 8, 128, jnp.bfloat16)
      >>> spec.block_shape, spec.block_bytes
      ((32, 2, 16, 8, 128), 2097152)
    """

    num_layers: int
    num_outer: int = 2
    block_size: int = dataclasses.field(default_factory=_missing("block_size"))
    num_kv_heads: int = dataclasses.field(default_factory=_missing("num_kv_heads"))
    head_dim: int = dataclasses.field(default_factory=_missing("head_dim"))
    dtype: np.dtype = dataclasses.field(default_factory=_missing("dtype"))
    layout: str | Layout = "NHD"

    if TYPE_CHECKING:  # the field is an np.dtype; what makes one may be given

        @overload
        def __init__(
            self,
            num_layers: int,
            num_outer: int,
            block_size: int,
            num_kv_heads: int,
            head_dim: int,
            dtype: DTypeLike,
            layout: str | Layout = ...,
        ) -> None: ...
        @overload
        def __init__(
            self,
            num_layers: int,
            *,
            num_outer: int = ...,
            block_size: int,
            num_kv_heads: int,
            head_dim: int,
            dtype: DTypeLike,
            layout: str | Layout = ...,
        ) -> None: ...
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in _SIZES}
        numbers = checks.check_positive("BlockSpec", **sizes)
        for name, number in zip(_SIZES, numbers, strict=True):
            object.__setattr__(self, name, number)
        if self.num_outer > 2:
            raise ValueError(
                "BlockSpec: num_outer must be 2 (K and V) or 1 (combined or latent), "
                f"got {self.num_outer}"
            )
        object.__setattr__(
            self, "dtype", checks.check_dtype("BlockSpec", "dtype", self.dtype)
        )
        layout = find_layout("BlockSpec", "layout", self.layout, "NHD")
        if layout in (NHD, HND, UNIVERSAL, OPERATIONAL):
            object.__setattr__(self, "layout", layout.name)

    @property
    def sizes(self) -> dict[str, int]:
        """The extent of each axis, by its letter."""
        return {
            "L": self.num_layers,
            "O": self.num_outer,
            "T": self.block_size,
            "H": self.num_kv_heads,
            "D": self.head_dim,
        }

    @property
    def inner(self) -> str:
        """The order of an operational block's tail: "HND" for HND blocks, else
        "NHD".
        """
        return "HND" if self.layout == "HND" else "NHD"

    @functools.cached_property
    def block_layout(self) -> Layout:
        """`layout`, resolved."""
        return find_layout("BlockSpec", "layout", self.layout, self.inner)

    @functools.cached_property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of one block in this spec's layout."""
        return self.block_layout.shape(self)

    @functools.cached_property
    def block_bytes(self) -> int:
        """The bytes of one block."""
        return math.prod(self.sizes.values()) * self.dtype.itemsize

    def replace(self, **changes: object) -> BlockSpec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def check_spec(where: str, spec: Any) -> None:
    if not isinstance(spec, BlockSpec):
        raise TypeError(
            f"{where}: spec must be a BlockSpec, got {type(spec).__name__}; build one "
            "with BlockSpec(num_layers, num_outer, block_size, num_kv_heads, head_dim, "
            "dtype)"
        )
