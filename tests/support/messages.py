"""Tables of bad calls and the words that their messages must hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import jax_kvblock as kv

SPEC = kv.BlockSpec(3, 2, 4, 5, 6, jnp.float32)
LAYOUT_NAMES = "'NHD', 'HND', 'operational', 'universal' or a Layout"


class Bad(NamedTuple):
    """A call that must fail, the shapes of its arrays, and the message it must give."""

    where: str  # the function; every message opens with it
    label: str
    call: Callable[..., Any]
    shapes: Sequence[Any]
    error: type[Exception]
    words: str  # separated by |

    def __str__(self) -> str:
        return f"{self.where}-{self.label}"


class Table(list[Bad]):
    """Rows of bad calls."""

    def value(self, where: str, label: str, call: Any, shapes: Any, words: str) -> None:
        self.append(Bad(where, label, call, shapes, ValueError, words))

    def kind(self, where: str, label: str, call: Any, shapes: Any, words: str) -> None:
        self.append(Bad(where, label, call, shapes, TypeError, words))


def check(where: str, error: type[Exception], words: str, call: Any) -> None:
    """`call` raises this, and the message opens with `where` and holds the words."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(f"{where}: "), message
    for word in words.split("|"):
        assert word in message, f"{word!r} is not in: {message}"


def check_row(bad: Bad) -> None:
    """Refused while tracing shapes, and just so when there are arrays."""
    check(
        bad.where, bad.error, bad.words, lambda: jax.eval_shape(bad.call, *bad.shapes)
    )
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), list(bad.shapes))
    check(bad.where, bad.error, bad.words, lambda: bad.call(*arrays))


def f32(*extents: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, dtype)


def i32(*extents: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, jnp.int32)


def pool_of(contiguous: bool = True, **changes: Any) -> kv.KVPool:
    """The shapes of a pool of 7 blocks."""
    spec = SPEC.replace(**changes)
    if contiguous:
        return kv.KVPool(f32(7, *spec.block_shape, dtype=spec.dtype), spec)
    layer = f32(7, *spec.block_shape[1:], dtype=spec.dtype)
    return kv.KVPool((layer,) * spec.num_layers, spec)
