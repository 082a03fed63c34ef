"""Attention over a sequence that is cut over GPUs: efficiency, and bytes a device.

Efficiency is time on one / (n × time on n), the sequence being the same, everybody in
turns, on hot chips. The one is the slowest of the GPUs, each of which is timed: the
others wait for it. "one on each" is the whole sequence on every GPU at once, as warm as
n of them are where they share it. Programs are compiled with `compiler_options()`;
"ring, as jit is" is without. "ring, in order" has packed documents in an even order
(`document_order`) and contiguous parts; the others cut each document over all GPUs in
zigzag.

With n GPUs here it is that of n GPUs. With one, "one of n, alone" is the part of the
first or of the last device, with sends that give back what they were given: what is
computed, without what travels, and so a bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support import common
from support.alone import one_of
from support.common import OURS, Results
from support.rounds import HOT, median_seconds

from jax_kvblock import flash_attention
from jax_kvblock.parallel import (
    compiler_options,
    context_parallel_attention,
    document_order,
    from_zigzag,
)

HEADS, KV_HEADS, DIM, DTYPE = 32, 8, 128, "bfloat16"
WORKS = ("forward", "both")
COUNTS = (2, 4)
EACH = "one on each"
PLAIN, IN_ORDER = "ring, as jit is", "ring, in order"
STRATEGIES = ("ring", PLAIN, "all_gather", "ulysses", "auto")
LONG = ("ring", "all_gather")  # from 100,000 tokens on, where a call takes a second


@dataclasses.dataclass(frozen=True)
class Length:
    """Causal attention of one sequence, or of packed documents."""

    tokens: int
    documents: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        packed = f" in {len(self.documents)} documents" if self.documents else ""
        return f"B1 H{HEADS}/{KV_HEADS} S{self.tokens} D{DIM} causal{packed}"


def _documents(tokens: int, count: int) -> tuple[int, ...]:
    """Lengths from short to 32 times as long, each a multiple of 64."""
    shares = np.geomspace(1, 32, count)
    lens = np.maximum(1, shares / shares.sum() * tokens // 64).astype(int) * 64
    lens[-1] += tokens - lens.sum()
    order = np.random.default_rng(0).permutation(count)
    return tuple(int(n) for n in lens[order])


CASES = (
    Length(16384),
    Length(32768),
    Length(65536, _documents(65536, 24)),
    Length(131072),
)


def bench(options: argparse.Namespace, results: Results) -> None:
    for case in common.wanted(options, CASES):
        if options.quick:
            short = _documents(1024, 4) if case.documents else ()
            case = Length(1024, short)
        _speed(case, results, options.quick)
        gc.collect()
        results.save()


def _speed(case: Length, results: Results, quick: bool) -> None:
    here = min(len(jax.devices()), max(COUNTS))
    running = {
        _one_of(i): _Timed(_one(case), drawn(case, 1, SingleDeviceSharding(device)))
        for i, device in enumerate(jax.devices()[:here])
    }
    for n in COUNTS:
        chosen = STRATEGIES if case.tokens < 100_000 else LONG
        for strategy in (*chosen, *([IN_ORDER] if case.documents else [])):
            for name, make in _over(case, n, strategy):
                try:
                    running[f"{n}, {strategy}{name}"] = make()
                except Exception as error:
                    results.fail(case.name, f"{n}, {strategy}{name}", error)
    calls = {
        (name, work): functools.partial(timed.run, work)
        for name, timed in running.items()
        for work in WORKS
    }
    ones = [running[_one_of(i)] for i in range(here)]
    for work in WORKS if here > 1 else ():
        calls[EACH, work] = functools.partial(_at_once, ones, work)
    times = median_seconds(calls, quick, HOT)
    for work in WORKS if here > 1 else ():
        who = f"{OURS}, {EACH} of {here} GPUs"
        at = f"{case.name} / {work}"
        results.add(at, who, "time", times[EACH, work] * 1e3, "ms")
    for name, timed in running.items():
        n = 1 if name.startswith("one") else int(name[0])
        who = OURS if name == "one" else f"{OURS}, {name}"
        for work in WORKS:
            at = f"{case.name} / {work}"
            results.add(at, who, "time", times[name, work] * 1e3, "ms")
            if n > 1:
                one = max(times[_one_of(i), work] for i in range(min(n, here)))
                share = one / n / times[name, work]
                results.add(at, who, "efficiency", share, "")
        memory = timed.bytes / _held(case, n)
        results.add(f"{case.name} / both", who, "memory", memory, "of what is held")


def _at_once(ones: list[_Timed], work: str) -> list[Any]:
    return [timed.run(work) for timed in ones]


def _one_of(i: int) -> str:
    return f"one, GPU {i}" if i else "one"


class _Timed:
    """Both functions compiled, with what they are called with."""

    def __init__(self, functions: Any, args: Any, options: Any = None) -> None:
        forward, both = functions
        self._args = args
        jit = functools.partial(jax.jit, compiler_options=options)
        self._compiled = {
            "forward": jit(forward).lower(*args[:-1]).compile(),
            "both": jit(both).lower(*args).compile(),
        }
        stats = self._compiled["both"].memory_analysis()
        self.bytes = (
            stats.argument_size_in_bytes
            + stats.output_size_in_bytes
            + stats.temp_size_in_bytes
        )

    def run(self, work: str) -> Any:
        args = self._args if work == "both" else self._args[:-1]
        return self._compiled[work](*args)


def _held(case: Length, n: int) -> float:
    """A device's q, k, v, out and gradients, and two shards of keys on their way."""
    rows = 4 * HEADS + 4 * KV_HEADS + (4 * KV_HEADS if n > 1 else 0)
    return case.tokens / n * rows * DIM * jnp.dtype(DTYPE).itemsize


def _one(case: Length) -> tuple[Callable[..., Any], Callable[..., Any]]:
    bounds = _bounds(case)

    def attend(q: Any, k: Any, v: Any) -> Any:
        if bounds is None:
            return flash_attention(q, k, v, causal=True)
        return flash_attention(q, k, v, causal=True, cu_seqlens=(bounds, bounds))

    return attend, functools.partial(both, attend)


def _bounds(case: Length) -> Any:
    if not case.documents:
        return None
    return np.cumsum([0, *case.documents]).astype(np.int32)


def both(attend: Callable[..., Any], q: Any, k: Any, v: Any, d_out: Any) -> Any:
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(d_out)


def _over(
    case: Length, n: int, strategy: str
) -> Iterator[tuple[str, Callable[[], _Timed]]]:
    """(name, what makes the calls): over n devices, or one device's part."""
    tuned = strategy != PLAIN
    compiled = compiler_options(combine_gathers=True) if tuned else None
    options = {"axis_name": "context", "strategy": strategy.split(",")[0]}
    options |= {"causal": True, "compiler_options": tuned}
    if strategy == IN_ORDER:
        order = document_order(_bounds(case), n)
        case = dataclasses.replace(
            case, documents=tuple(case.documents[i] for i in order)
        )
        options["layout"] = "contiguous"
    if case.documents:
        options["cu_seqlens"] = _bounds(case)
    local = functools.partial(context_parallel_attention, **options)
    if len(jax.devices()) >= n:
        in_zigzag = strategy != IN_ORDER
        yield "", functools.partial(_over_devices, case, n, local, compiled, in_zigzag)
    elif strategy != "auto" and len(jax.devices()) == 1:  # it is one of the others
        for place, which in ((0, "first"), (n - 1, "last")):
            name = f", {which} of {n} alone"
            yield name, functools.partial(_alone, case, n, place, local)


def ours_over(case: Length, n: int) -> _Timed:
    """What `auto` takes over n GPUs that are here, and right."""
    ((_, make),) = _over(case, n, "auto")
    return make()


def _over_devices(
    case: Length, n: int, local: Callable[..., Any], options: Any, in_zigzag: bool
) -> _Timed:
    """All of it, and right."""
    rows = P("context") if case.documents else P(None, "context")
    mesh = Mesh(np.array(jax.devices()[:n]), ("context",))
    attend = jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
    args = drawn(case, 1, NamedSharding(mesh, rows))
    made = _Timed((attend, functools.partial(both, attend)), args, options)
    bounds = {"axis": 0, "cu_seqlens": _bounds(case)} if case.documents else {}
    here = jax.devices()[0]
    natural = [jax.device_put(a, here) for a in (*args[:3], made.run("forward"))]
    if in_zigzag:
        natural = [from_zigzag(a, n, **bounds) for a in natural]
    want = jax.jit(_one(case)[0])(*natural[:3])
    off = jnp.abs(want.astype(jnp.float32) - natural[3].astype(jnp.float32)).max()
    if off > 0.02:
        raise AssertionError(f"off by {off:.3g} from one device's")
    return made


def _alone(case: Length, n: int, place: int, local: Callable[..., Any]) -> _Timed:
    def attend(place: Any, *qkv: Any) -> Any:
        with one_of(n, place):
            return local(*qkv)

    def with_gradients(place: Any, *arrays: Any) -> Any:
        with one_of(n, place):
            return both(local, *arrays)

    args = (jnp.int32(place), *drawn(case, n, None))
    return _Timed((attend, with_gradients), args)


def drawn(case: Length, parts: int, place: Any) -> tuple[jax.Array, ...]:
    """q, k, v and the gradient of out; of one device's rows where there are parts."""
    tokens = case.tokens // parts
    lead = (tokens,) if case.documents else (1, tokens)
    made = []
    for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS)):
        draw = functools.partial(
            jax.random.normal, shape=(*lead, heads, DIM), dtype=DTYPE
        )
        made.append(jax.jit(draw, out_shardings=place)(jax.random.key(i)))
    return tuple(made)


if __name__ == "__main__":
    common.main("parallel", bench, __doc__)
