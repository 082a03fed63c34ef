"""What a selector is: queries and keys in, a list of tiles for each row out."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypedDict, Unpack

import jax

from jax_kvblock.attention.config import AttentionTiles
from jax_kvblock.core.checks import check_array
from jax_kvblock.core.types import ArrayIn, IdRows, Integers
from jax_kvblock.sparse.arguments import check_blocks, check_qk, grid_of, scale_of
from jax_kvblock.sparse.grid import Grid
from jax_kvblock.sparse.select import (
    Choice,
    Selection,
    nothing,
    selection,
    warn_if_short,
)

if TYPE_CHECKING:
    from jaxtyping import Float


class MaskOptions(TypedDict, total=False):
    """Who attends to whom, by the names of `flash_attention`."""

    causal: bool
    window: tuple[int | None, int | None] | None
    q_offset: Integers | int | None
    kv_offset: Integers | int | None
    q_lens: Integers | None
    kv_lens: Integers | None
    segment_ids: IdRows | tuple[IdRows, IdRows] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Selector:
    """Chooses the tiles that attention visits; this is what all selectors share.

    A selector is frozen, hashable where it holds no arrays, and a pytree. A selector of
    one's own defines `choose` and `width`, or only `mass` of a `ScoredSelector`.

    Attributes:
      block_q, block_kv: the tiles' sides, multiples of 16 (of 128 for the CUDA
        kernels).
    """

    block_q: int = dataclasses.field(default=128, metadata={"static": True})
    block_kv: int = dataclasses.field(default=128, metadata={"static": True})

    def __post_init__(self) -> None:
        check_blocks(self.name, self.block_q, self.block_kv)

    @property
    def name(self) -> str:
        return type(self).__name__

    def __call__(
        self,
        q: Float[ArrayIn, "B T N D"],
        k: Float[ArrayIn, "B S K D"],
        *,
        scale: float | None = None,
        **mask: Unpack[MaskOptions],
    ) -> AttentionTiles:
        """The tiles of `select`.

        It warns of rows that are short of tau, as the report would tell; under jit that
        there may be some, where tau has a bound.
        """
        tiles, report = self.select(q, k, scale=scale, **mask)
        kv_len = check_array(self.name, "k", k, in_place=True).shape[1]
        warn_if_short(self.name, report, "call select", self.may_be_short(kv_len))
        return tiles

    def select(
        self,
        q: Float[ArrayIn, "B T N D"],
        k: Float[ArrayIn, "B S K D"],
        *,
        scale: float | None = None,
        **mask: Unpack[MaskOptions],
    ) -> Selection:
        """Chooses, under jit or not, without a gradient.

        Args:
          q: `[B, T, N, D]`, floats. k: `[B, S, K, D]` in its dtype; K divides N.
          scale: of the scores, `1 / sqrt(D)` unless given.
          **mask: `causal`, `window`, `q_offset`, `kv_offset`, `q_lens`, `kv_lens` and
            `segment_ids` as in `flash_attention`; all but `causal` and `window` may be
            traced.

        Returns:
          `Selection(tiles, report)`. Tiles that the mask does not visit are not listed.
          Under `causal`, a window or segments those of a row's own positions are, or,
          where a query's own key is not one it sees, that of the nearest it does: no
          query that attends to something is left with nothing. Without members or
          queries lists are empty, and the report has no mass.

        Raises:
          TypeError, ValueError: shapes or dtypes do not fit; the selector cannot serve
            this call, as when a capacity is too small for what is always listed.
        """
        where = self.name
        q, k = check_qk(where, q, k, may_be_empty=True)
        sizes = (q.shape[0], q.shape[1], k.shape[1])
        grid = grid_of(where, sizes, (self.block_q, self.block_kv), **mask)
        width = self.width(grid)
        number = scale_of(where, scale, q.shape[3])
        if 0 in q.shape:
            return nothing(grid, (q.shape[0], q.shape[2], grid.rows), width)
        q, k = jax.lax.stop_gradient((q, k))
        choice = self.choose(q, k, grid, number)
        return selection(where, grid, choice, width)

    def choose(self, q: jax.Array, k: jax.Array, grid: Grid, scale: float) -> Choice:
        """The tiles as a map."""
        raise NotImplementedError

    def width(self, grid: Grid) -> int:
        """The entries that a list has room for."""
        raise NotImplementedError

    def may_be_short(self, kv_len: int) -> bool:
        """Whether rows over so many keys may list less than a tau asks for."""
        return getattr(self, "tau", None) is not None

    def __or__(self, other: Selector) -> Union:
        """What either of them lists."""
        if not isinstance(other, Selector):
            return NotImplemented
        blocks = {"block_q": self.block_q, "block_kv": self.block_kv}
        return Union((self, other), **blocks)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Union(Selector):
    """What any of several selectors lists: `Streaming() | AntidiagonalThreshold()`.

    Its report has no mass; rows are short where those of a part are, and some tile that
    the mask visits is not listed.
    """

    parts: tuple[Selector, ...] = dataclasses.field(kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # JAX also puts pytrees together with other things in place of their parts.
        for part in self.parts if isinstance(self.parts, tuple) else ():
            if not isinstance(part, Selector):
                continue
            if (part.block_q, part.block_kv) != (self.block_q, self.block_kv):
                raise ValueError(
                    f"{self.name}: parts must have tiles of one size, got "
                    f"{part.block_q} x {part.block_kv} beside {self.block_q} x "
                    f"{self.block_kv}; pass the same block_q and block_kv to all"
                )

    def choose(self, q: jax.Array, k: jax.Array, grid: Grid, scale: float) -> Choice:
        choices = [part.choose(q, k, grid, scale) for part in self.parts]
        kept, short, unknown = choices[0].kept, None, None
        for choice in choices[1:]:
            kept = kept | choice.kept
        for choice in choices:
            if choice.short is not None:
                short = choice.short if short is None else short | choice.short
            if choice.unknown is not None:
                more = choice.unknown
                unknown = more if unknown is None else unknown | more
        if short is not None:
            # A row that lists all there is holds all of attention.
            short = short & (grid.visible() & ~kept).any(-1)
        return Choice(kept, None, short, unknown)

    def width(self, grid: Grid) -> int:
        return min(grid.cols, sum(part.width(grid) for part in self.parts))

    def may_be_short(self, kv_len: int) -> bool:
        return any(part.may_be_short(kv_len) for part in self.parts)
