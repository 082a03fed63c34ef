"""The types of public arguments and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped


class SupportsDLPack(Protocol):
    """A tensor of another library."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


class HasIds(Protocol):
    """Blocks that know their ids."""

    @property
    def ids(self) -> np.ndarray: ...


# Quoted: a protocol and a class cannot be joined by | at run time.
ArrayIn: TypeAlias = "jax.Array | np.ndarray | SupportsDLPack"
Integers: TypeAlias = 'Int[ArrayIn, "..."] | Sequence[int] | HasIds'
Blocks: TypeAlias = 'Sequence[Shaped[ArrayIn, "..."]]'
Pieces: TypeAlias = 'Sequence[Sequence[Shaped[ArrayIn, "tokens heads dim"]]]'
IdRows: TypeAlias = 'Int[ArrayIn, "B length"] | list[list[int]]'
LayerIndex: TypeAlias = "int | np.integer | jax.Array | np.ndarray"
Heads: TypeAlias = "tuple[int, int] | range | slice | None"
Place: TypeAlias = "jax.Device | jax.sharding.Sharding | str | None"
