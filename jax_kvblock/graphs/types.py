"""Types of ports: a dtype and a shape whose sizes may be words.

`"float32[n, 3]"` is a float32 array of any number of rows of 3. The same word is the
same size everywhere in a graph, and `?` is any; `"float32[...]"` has any shape,
`"float32[]"` has no dimensions.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Size = int | str | None
TypeLike = Any  # "float32[n, 3]", an array, a jax.ShapeDtypeStruct, or an ArrayType


class Sizes:
    """What the words of a graph stand for in a call, and who said so."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[int, str]] = {}

    def __getitem__(self, word: str) -> int:
        if word not in self.known:
            has = ", ".join(map(repr, self.known)) or "none"
            raise ValueError(
                f"the size {word!r} is not known: what runs before does not have it; "
                f"known are {has}"
            )
        return self.known[word][0]

    def says(self, words: Sequence[Size]) -> str:
        """ "where n = 5 (input 'A')", for messages."""
        told = [
            f"{w} = {self.known[w][0]} ({self.known[w][1]})"
            for w in dict.fromkeys(words)
            if isinstance(w, str) and w in self.known
        ]
        return f" where {', '.join(told)}" if told else ""


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """A dtype, and a shape of sizes and words; `None`: of any shape, of any size."""

    dtype: np.dtype[Any]
    shape: tuple[Size, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype}[...]"
        sizes = ("?" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{', '.join(sizes)}]"

    def merged(self, other: ArrayType) -> ArrayType | None:
        """What is of both types, by the words of either; `None` where nothing is."""
        if self.dtype != other.dtype:
            return None
        if self.shape is None or other.shape is None:
            return self if other.shape is None else other
        if len(self.shape) != len(other.shape):
            return None
        sizes = []
        for a, b in zip(self.shape, other.shape, strict=True):
            if isinstance(a, int) and isinstance(b, int) and a != b:
                return None
            if isinstance(b, int) or a is None:
                a = b
            sizes.append(a)
        return ArrayType(self.dtype, tuple(sizes))

    def loads(self, other: ArrayType) -> bool:
        """Whether a scalar of this type is loaded from one of the other.

        Integers of a size are loaded alike, with a sign or without.
        """
        kinds = {self.dtype.kind, other.dtype.kind}
        alike = kinds == {"i", "u"} and self.dtype.itemsize == other.dtype.itemsize
        return (alike or self.dtype == other.dtype) and other.shape in ((), None)

    def bind(self, value: Any, sizes: Sizes, said_by: str) -> bool:
        """Whether a value is of this type. Its sizes are what the words stand for."""
        if value.dtype != self.dtype:
            return False
        if self.shape is None:
            return True
        if len(value.shape) != len(self.shape):
            return False
        for size, word in zip(value.shape, self.shape, strict=True):
            wanted = word
            if isinstance(word, str):
                wanted = sizes.known.setdefault(word, (int(size), said_by))[0]
            if wanted is not None and size != wanted:
                return False
        return True

    @property
    def words(self) -> set[str]:
        return {size for size in self.shape or () if isinstance(size, str)}

    @property
    def is_known(self) -> bool:
        """Whether it is one shape as soon as the words are known."""
        return self.shape is not None and None not in self.shape

    def with_sizes(self, sizes: Sizes) -> jax.ShapeDtypeStruct:
        """The type when all words are known."""
        assert self.shape is not None and self.is_known
        shape = tuple(sizes[s] if isinstance(s, str) else s for s in self.shape)
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def without_words(self) -> ArrayType:
        """As seen from another graph, where words stand for other sizes."""
        if self.shape is None:
            return self
        shape = tuple(s if isinstance(s, int) else None for s in self.shape)
        return ArrayType(self.dtype, shape)


def scalar_type(dtype: Any) -> ArrayType:
    return ArrayType(jnp.dtype(dtype), ())


def array_type(where: str, given: TypeLike) -> ArrayType:
    """The type that is given as text, as a struct, or as an array like it."""
    if isinstance(given, ArrayType):
        return given
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        return ArrayType(jnp.dtype(given.dtype), tuple(int(n) for n in given.shape))
    wrong = TypeError(
        f"{where}: a type is text like 'float32[n, 3]', or a jax.ShapeDtypeStruct, got "
        f"{given!r}"
    )
    if not isinstance(given, str):
        try:
            return ArrayType(jnp.dtype(given), None)
        except TypeError:
            raise wrong from None
    match = re.fullmatch(r"\s*(\w+)\s*(\[([^\[\]]*)\])?\s*", given)
    if match is None:
        raise wrong
    try:
        dtype = jnp.dtype(match[1])
    except TypeError:
        raise wrong from None
    if match[2] is None or match[3].strip() in ("...", "…"):
        return ArrayType(dtype, None)
    sizes: list[Size] = []
    for part in match[3].split(",") if match[3].strip() else []:
        size = part.strip()
        if not (is_word(size) or size.isdigit() or size == "?"):
            raise wrong
        word = None if size == "?" else size
        sizes.append(int(size) if size.isdigit() else word)
    return ArrayType(dtype, tuple(sizes))


def is_word(given: Any) -> bool:
    """Whether this may stand for a size."""
    return isinstance(given, str) and given.isidentifier()
