"""A transformer's block, choice by choice: what is worth fusing by hand.

Each choice (q, k and v in one product, residual and norm, bias and GELU, RoPE and the
append, attention, the whole block) is timed in several ways on the same inputs, in
bfloat16: 16,384 tokens in four sequences, forward, and forward and backward; and a step
of decoding of 64 sequences, eight layers a program. Ways take turns on a hot chip, in
an order drawn anew each time, and the results of each are compared with the first one's
before it is timed. "over NAME" is how many times as fast a way is as the first, "over
xla's best" as the fastest that is jitted and XLA's or cuDNN's alone; "ours at best over
xla's" is that of the fastest of our ways, and what the bar is for.

Of whole blocks the kernels that a call runs are counted by JAX's profiler, also of the
same functions op by op. The compiled products say which epilogues of cuBLASLt's they
have. Times and counts are of one layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import random
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from support import common
from support import fusion_choices as choices
from support.common import OURS, Results
from support.fusion_choices import Choice, Sizes, Way

from jax_kvblock.fusion.launches import count_launches

ROUND = 0.025  # seconds
TURNS, WARM_UP, ROUNDS = 2, 1, 3  # rounds of a turn: first those that do not count
OP_BY_OP = "op by op"  # what is neither this nor ours is a peer
BEST = "over xla's best"
OF_BEST = "ours at best over xla's"  # of the fastest of our ways alone
FORWARD, BOTH = "forward", "forward and backward"
TINY: dict[str, Any] = {
    "width": 64, "heads": 4, "kv_heads": 2, "dim": 32, "hidden": 96,
}  # fmt: skip


def bench(options: argparse.Namespace, results: Results) -> None:
    if not (common.on_gpu() or options.quick):
        raise RuntimeError("jax sees no GPU; --small runs a tiny block on a CPU")
    for sizes in (choices.LARGE, choices.SMALL):
        if options.quick:
            sizes = _tiny(sizes)
        for what, make in _makers(sizes).items():
            name = f"{sizes.name} {what}"
            if not re.search(options.cases, name):
                continue
            began = time.perf_counter()
            try:
                _compare(name, make(sizes), sizes.layers, results, options.quick)
            except Exception as error:
                results.fail(name, "benchmark", error)
            gc.collect()
            results.save()
            print(f"  {name} took {time.perf_counter() - began:.1f} s", flush=True)


def _tiny(sizes: Sizes) -> Sizes:
    small = dataclasses.replace(sizes, **TINY, batch=2, layers=min(sizes.layers, 2))
    return dataclasses.replace(
        small, length=min(sizes.length, 128), context=min(sizes.context, 32)
    )


def _makers(sizes: Sizes) -> dict[str, Callable[[Sizes], Choice]]:
    """By a choice's name; what matters most comes first, if a run is cut off."""
    names = ("xla", "cudnn", OURS) if common.on_gpu() else ("xla", OURS)

    def named(make: Callable[..., Choice]) -> Callable[[Sizes], Choice]:
        return functools.partial(make, names=names)

    if sizes.context:
        whole = {"block, decoding": named(choices.decode_block)}
    else:
        whole = {"block": named(choices.block), "attention": named(choices.attention)}
    return whole | {
        "q, k and v": choices.projections,
        "bias and GELU": choices.bias_gelu,
        "RoPE and append": choices.rope_and_append,
        "residual, norm and product": choices.norm_product,
        "residual and norm": choices.residual_norm,
    }


# ---- calls ---------------------------------------------------------------------------


class Call:
    """A way's forward pass, or forward and backward, ready to run."""

    def __init__(self, choice: Choice, way: Way, weights: Any, work: str) -> None:
        self.x, self.weights = choice.x, weights
        self.state = None if way.state is None else way.state()
        self.text = ""
        function = way.function if work == FORWARD else _both(way.function)
        args = (self.x, self.weights)
        if self.state is not None:
            args = (self.state, *args)
        if way.jit:
            donated = () if self.state is None else (0,)
            jitted = jax.jit(function, donate_argnums=donated)
            compiled = jitted.lower(*args).compile(compiler_options=way.options)
            self.text = compiled.as_text()
            function = compiled
        self.function = function

    def __call__(self) -> Any:
        if self.state is None:
            return self.function(self.x, self.weights)
        self.state, made = self.function(self.state, self.x, self.weights)
        return made

    def epilogues(self) -> Counter[str]:
        """How many of the program's products have which epilogue of cuBLASLt's."""
        found = re.findall(r'"epilogue":"(\w+)"', self.text)
        return Counter(name for name in found if name != "DEFAULT")


def _both(function: Callable[..., Any]) -> Callable[..., Any]:
    """What it returns, and gradients for x and weights of a sum with slopes.

    Slopes are what came out, of the dtype it has: random enough, and no operand more.
    """

    def run(x: Any, weights: Any) -> Any:
        out, pull = jax.vjp(function, x, weights)
        return out, pull(out)

    return run


# ---- right first ---------------------------------------------------------------------


@jax.jit
def _apart(one: Any, other: Any) -> Any:
    """How far arrays are from others, in parts of their norm; NaN if one has it."""

    def size(x: Any) -> Any:
        return sum(jnp.sum(jnp.square(a.astype(jnp.float32))) for a in x)

    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    away = [a.astype(jnp.float32) - b.astype(jnp.float32) for a, b in pairs]
    return jnp.sqrt(size(away) / size(jax.tree.leaves(other)))


def _seen(made: Any, work: str) -> Any:
    """What ways are compared by: what came out, and x's gradient."""
    return made if work == FORWARD else (made[0], made[1][0])


# ---- how fast ------------------------------------------------------------------------


def _compare(
    name: str, choice: Choice, layers: int, results: Results, quick: bool
) -> None:
    running: dict[tuple[str, str], Call] = {}
    works = (FORWARD, BOTH) if choice.backward else (FORWARD,)
    prepared = {
        who: [way.prepare(w) for w in choice.weights]
        for who, way in choice.ways.items()
    }
    with ThreadPoolExecutor(8) as pool:  # compiling takes longer than timing
        made = {
            (who, work): pool.submit(Call, choice, way, prepared[who], work)
            for who, way in choice.ways.items()
            for work in works
            if work == FORWARD or way.backward
        }
    known: dict[str, Any] = {}
    for (who, work), future in made.items():
        case = f"{name} / {work}"
        try:
            call = future.result()
            seen = _seen(call(), work)
            apart = float(_apart(seen, known.setdefault(work, seen)))
            if not apart <= choice.alike:
                raise AssertionError(f"results are {apart:.3g} of their norm apart")
            running[who, work] = call
        except Exception as error:
            results.fail(case, who, error)
            continue
        for epilogue, count in call.epilogues().items():
            results.add(case, who, f"epilogue {epilogue}", count, "")
        if choice.launches:
            _count(case, who, call, layers, results)
    known.clear()
    _add(choice, _take_turns(running, quick), name, layers, results)


def _add(
    choice: Choice,
    times: dict[tuple[str, str], float],
    name: str,
    layers: int,
    results: Results,
) -> None:
    """Times and ratios of each work."""
    first = next(iter(choice.ways))
    for work in (FORWARD, BOTH):
        case = f"{name} / {work}"
        of_work = {who: seconds for (who, at), seconds in times.items() if at == work}
        ours = {who: x for who, x in of_work.items() if who.startswith(OURS)}
        peers = [x for who, x in of_work.items() if who not in (*ours, OP_BY_OP)]
        for who, seconds in of_work.items():
            results.add(case, who, "time", seconds * 1e3 / layers, "ms")
            if first in of_work and who != first:
                results.add(case, who, f"over {first}", of_work[first] / seconds, "")
            if peers and who in ours:
                results.add(case, who, BEST, min(peers) / seconds, "", show=False)
        if peers and ours:
            who = min(ours, key=lambda who: ours[who])
            results.add(case, who, OF_BEST, min(peers) / ours[who], "")


def _count(case: str, who: str, call: Call, layers: int, results: Results) -> None:
    if not common.on_gpu():
        return
    found = count_launches(call)
    if found.kernels is None:
        results.fail(case, who, found.reason)
        return
    results.add(case, who, "kernels", found.kernels / layers, "")
    results.add(case, who, "copies and fills", (found.moves or 0) / layers, "")
    counts: defaultdict[str, float] = defaultdict(float)  # of names that begin alike
    for kernel, count in found.names.items():
        counts[kernel[:60]] += count / layers
    for kernel, count in counts.items():
        results.add(case, who, f"kernel {kernel}", count, "", show=False)


def _take_turns(running: dict[Any, Call], quick: bool) -> dict[Any, float]:
    """Median seconds of a call."""

    def a_round(who: Any, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            made = running[who]()
        jax.block_until_ready(made)
        return (time.perf_counter() - start) / count

    counts = {}
    for who in running:
        tries = [a_round(who, 1 if quick else 2) for _ in range(1 if quick else 3)]
        once = min(tries)  # the first calls can take many times as long
        counts[who] = 1 if quick else max(2, min(1000, int(ROUND / once)))
    times: dict[Any, list[float]] = {who: [] for who in running}
    order = random.Random(0)
    warm_up, rounds = (0, 1) if quick else (WARM_UP, ROUNDS)
    for _ in range(1 if quick else TURNS):
        for who in order.sample(list(running), len(running)):
            found = [a_round(who, counts[who]) for _ in range(warm_up + rounds)]
            times[who] += found[warm_up:]
    return {who: statistics.median(found) for who, found in times.items()}


if __name__ == "__main__":
    common.main("fusion", bench, __doc__)
