"""What owners' arguments mean here: checks that several drop-ins share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvblock.attention.arguments import check_lengths, finite, window_side
from jax_kvblock.attention.qkv import FLOATS
from jax_kvblock.core.checks import (
    check_array,
    check_dtype,
    check_int32,
    show,
    shown,
    to_jax,
)

_STATIC = "it is compiled in: close over a Python float, or make it a static argument"


def refuse(where: str, instead: str, **given: Any) -> None:
    """An error for what is given and not served; `instead` says who serves it."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{where}: {name} is not served, got {_told(value)}; {instead}"
            )


def _told(value: Any) -> str:
    return show(value) if hasattr(value, "shape") else shown(value)


def number(where: str, name: str, value: Any) -> float:
    return finite(where, name, value, 1.0, _STATIC)


def factor(where: str, name: str, value: Any) -> float | None:
    """A scale that is compiled in, or None."""
    return None if value is None else number(where, name, value)


def divisor(where: str, name: str, value: Any) -> float | None:
    """A scale that is not 0, or None."""
    made = factor(where, name, value)
    if made == 0:
        raise ValueError(f"{where}: {name} must not be 0; pass None for none")
    return made


def temperature(where: str, name: str, value: Any) -> float | None:
    """A length whose logarithm is above 0, or None."""
    made = factor(where, name, value)
    if made is not None and made <= 1:
        raise ValueError(
            f"{where}: {name} must be above 1, got {value!r}; pass None for none"
        )
    return made


def soft_cap(where: str, name: str, value: Any) -> float | None:
    """A softcap above 0, or None."""
    if value is None:
        return None
    cap = finite(where, name, value, 0.0, _STATIC)
    if np.float32(cap) <= 0:
        raise ValueError(
            f"{where}: {name} must be positive, got {value!r}; pass None for none"
        )
    return cap


def sliding_window(where: str, name: str, value: Any) -> tuple[int, None] | None:
    """The window that ends with the query itself and holds `value` positions."""
    if value is None:
        return None
    width = window_side(where, name, value)
    if width < 1:
        raise ValueError(
            f"{where}: {name} must be at least 1, the query's own position, got "
            f"{value!r}; pass None for no window"
        )
    return width - 1, None


def queries(where: str, name: str, q: Any, form: str = "[tokens, N, D]") -> jax.Array:
    q = check_array(where, name, q)
    if q.ndim != 3:
        raise ValueError(f"{where}: {name} must be {form}, got {show(q)}")
    if q.dtype not in FLOATS:
        raise TypeError(
            f"{where}: {name} must be floats of 16 bits or more, got {show(q)}; cast "
            "it with .astype"
        )
    return to_jax(q)


def new_tokens(
    where: str, q: jax.Array, cache: jax.Array, **given: Any
) -> tuple[jax.Array, jax.Array]:
    """keys and values `[tokens, K, D]` of the cache's dtype, as many as queries."""
    made: list[jax.Array] = []
    for name, x in given.items():
        x = check_array(where, name, x)
        if x.ndim != 3 or (x.shape[0], x.shape[2]) != (q.shape[0], q.shape[2]):
            raise ValueError(
                f"{where}: {name} must be [{q.shape[0]}, K, {q.shape[2]}], a row for "
                f"each of queries, got {show(x)}"
            )
        if not x.shape[1] or q.shape[1] % x.shape[1]:
            raise ValueError(
                f"{where}: {name} must have a number of heads that divides the "
                f"{q.shape[1]} of queries, got {show(x)}"
            )
        if x.dtype != cache.dtype:
            raise TypeError(
                f"{where}: {name} must have the cache's dtype, {cache.dtype}, got "
                f"{show(x)}; divide it by its scale and cast it with "
                f".astype({str(cache.dtype)!r})"
            )
        if made and x.shape != made[0].shape:
            raise ValueError(
                f"{where}: keys and values must be alike, got {show(made[0])} and "
                f"{show(x)}"
            )
        made.append(to_jax(x))
    k, v = made
    return k, v


def flat_tables(
    where: str, page_indices: Any, kv_lens: Any
) -> tuple[jax.Array, jax.Array]:
    """The tables `[S, W]` of flat ones, and the lengths `[S]`."""
    lens = lengths(where, "kv_lens", kv_lens)
    flat = check_int32(where, "page_indices", page_indices, "[S W]", 1)
    if not lens.shape[0] or flat.shape[0] % lens.shape[0]:
        raise ValueError(
            f"{where}: page_indices must have as many entries for each of the "
            f"{lens.shape[0]} sequences of kv_lens, got {show(flat)}; fill tables up "
            "to one length, with -1"
        )
    return flat.reshape(lens.shape[0], -1), lens


def lengths(where: str, name: str, x: Any, sequences: int | None = None) -> jax.Array:
    """int32 `[S]`; of any S unless told."""
    if sequences is None:
        if np.ndim(x) != 1:
            raise ValueError(
                f"{where}: {name} must be int32[S], the keys of each sequence, its new "
                f"ones among them, got {_told(x)}"
            )
        sequences = np.shape(x)[0]
    if x is None:
        raise TypeError(f"{where}: {name} is missing; pass int32[{sequences}]")
    lens: jax.Array = check_lengths(where, name, x, sequences)
    return lens


def starts(where: str, name: str, x: Any, sequences: int) -> jax.Array:
    """int32 `[S + 1]`: where each sequence begins, and where the last ends."""
    x = check_int32(where, name, x, f"[{sequences + 1}]", 1)
    if x.shape != (sequences + 1,):
        raise ValueError(
            f"{where}: {name} must be int32[{sequences + 1}], the start of each of the "
            f"{sequences} sequences and the end of the last, got {show(x)}"
        )
    return x


def count_of(where: str, name: str, x: Any, length: int) -> jax.Array:
    """int32 of this length; its last says how many sequences count."""
    x = check_int32(where, name, x, f"[{length}]", 1)
    if x.shape != (length,):
        raise ValueError(f"{where}: {name} must be int32[{length}], got {show(x)}")
    return x


def sinks(where: str, name: str, x: Any, heads: int) -> jax.Array | None:
    """float32 `[N]`, of floats of any width; one for all heads as a scalar."""
    if x is None:
        return None
    x = np.float32(x) if isinstance(x, (int, float)) else check_array(where, name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.shape not in ((), (heads,)):
        raise ValueError(
            f"{where}: {name} must be float32[{heads}], one for each query head, got "
            f"{show(x)}"
        )
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    return jnp.broadcast_to(to_jax(x).astype(wide), (heads,))


def result_dtype(where: str, name: str, dtype: Any, q: jax.Array) -> np.dtype:
    return q.dtype if dtype is None else check_dtype(where, name, dtype)
