"""Time the demo's moves against the same work in plain jnp, and print the table."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import moves
import plain_jnp
from smollm2.model import store_prompt

from jax_kvblock import KVPool

REPEATS = 9


class Place(NamedTuple):
    """Some blocks of a pool."""

    pool: KVPool
    ids: jax.Array

    @property
    def bare(self) -> tuple[jax.Array, jax.Array]:
        """The pool as its array, for plain jnp."""
        return self.pool.data, self.ids

    def emptied(self) -> "Place":
        """The same blocks of a fresh pool, for a move to write."""
        spec, kind = self.pool.spec, self.pool.memory_kind
        pool = KVPool.zeros(spec, self.pool.num_blocks, memory_kind=kind)
        return Place(pool, self.ids)


@dataclass(frozen=True)
class Row:
    """One move: the bytes of KV it moves, and the seconds that takes."""

    step: str
    num_bytes: int
    seconds: float
    plain_seconds: float


def time_call(call: Callable[[], Any]) -> float:
    """Median seconds of a call, results ready, after two calls to warm up."""
    seconds = []
    for _ in range(2 + REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def time_update(update: Callable[..., Any], target: Any, *operands: Any) -> float:
    """`time_call` of an update that donates its target and returns the new one."""

    def call() -> Any:
        nonlocal target
        target = update(target, *operands)
        return target

    return time_call(call)


def time_moves(
    source: Place, host: Place, target: Place, k: jax.Array, v: jax.Array
) -> Iterator[Row]:
    """Time every move of the demo, in its order.

    Args:
        source: blocks of an NHD pool.
        host: blocks of an HND pool in host memory.
        target: blocks of an HND pool in device memory.
        k: the prompt's keys [num_layers, T, num_kv_heads, head_dim].
        v: its values.
    """
    slices = moves.cut_heads(*source)
    k, v = k.astype(source.pool.spec.dtype), v.astype(source.pool.spec.dtype)
    on_host = {"on_host": host.pool.memory_kind != "device"}
    plain_merge = partial(plain_jnp.merge_heads, **on_host)
    plain_fetch = partial(plain_jnp.fetch_blocks, **on_host)

    def row(step: str, kv: Any, seconds: float, plain_seconds: float) -> Row:
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(kv))
        return Row(step, num_bytes, seconds, plain_seconds)

    yield row(
        "append the prompt's K and V",
        (k, v),
        time_update(store_prompt, *source.emptied(), k, v),
        time_update(plain_jnp.store_prompt, *source.emptied().bare, k, v),
    )
    yield row(
        "gather to universal",
        slices,
        time_call(lambda: moves.to_universal(*source)),
        time_call(lambda: plain_jnp.to_universal(*source.bare)),
    )
    yield row(
        "cut for three ranks",
        slices,
        time_call(lambda: moves.cut_heads(*source)),
        time_call(lambda: plain_jnp.cut_heads(*source.bare)),
    )
    yield row(
        "merge the slices in host memory",
        slices,
        time_update(moves.merge_heads, *host.emptied(), slices),
        time_update(plain_merge, *host.emptied().bare, slices),
    )
    yield row(
        "fetch from host memory",
        slices,
        time_update(moves.fetch_blocks, *target.emptied(), *host),
        time_update(plain_fetch, *target.emptied().bare, *host.bare),
    )
    yield row(
        "or straight: NHD to HND pool",
        slices,
        time_update(moves.fetch_blocks, *target.emptied(), *source),
        time_update(plain_jnp.nhd_to_hnd, *target.emptied().bare, *source.bare),
    )


def print_table(rows: Iterator[Row]) -> None:
    """One line a move, printed when it is timed."""
    titles = f"{'MB':>7}{'ms':>9}{'GB/s':>8}{'plain jnp GB/s':>17}{'ratio':>8}"
    print(f"{'step':<34}{titles}", flush=True)
    for row in rows:
        rate = row.num_bytes / row.seconds / 1e9
        plain_rate = row.num_bytes / row.plain_seconds / 1e9
        print(
            f"{row.step:<34}{row.num_bytes / 1e6:>7.1f}{row.seconds * 1e3:>9.3f}"
            f"{rate:>8.2f}{plain_rate:>17.2f}{rate / plain_rate:>7.1f}x",
            flush=True,
        )
    print(f"GB/s is MB of KV over the median ms of {REPEATS} calls, results ready.")
