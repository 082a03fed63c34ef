"""What serving a small model costs: a step beside its roofline, and the host's part.

The engine of examples/serve over a model in the shape of SmolLM2-135M with random
weights, so that nothing is downloaded: bfloat16 on a GPU, float32 on a CPU.

- A step of decoding: all requests run, and nobody reads prompts. "over reading" is the
  step's time over that of reading all weights, and the keys and values of all
  sequences, once, at the rate of a plain copy in the same run. As many steps in one
  program as the engine takes; one; and eight. On a GPU also after longer prompts, and
  with what lies between the attentions of two layers left to XLA, where the engine has
  one kernel for it (`between.py`).
- The host's part: the same steps where the device computes nothing; and of that the
  manager's, which is what tables, books and `BlockManager.update` take. What a request
  takes of the manager besides, as it begins, is read and ends, is told apart; so is
  where Python collects garbage meanwhile.
- The first token after a prefix that many requests share: computed; and brought up
  from host memory, as from a request to the next. Of the latter also what the host
  takes before the first copy begins, and between the last part's write into the pool
  and the step; and pauses to collect garbage. As in a server, the collector leaves
  alone what was there before.

Steps of decoding are always timed. `--cases` is a regular expression of what else is:
"other steps" in a program, "by XLA", "host" and "prefix".
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import bars
import ceilings
import jax
import jax.numpy as jnp
import numpy as np
from support import common
from support.common import OURS, Results

from jax_kvblock import BlockManager, BlockTable, KVPool, PrefixCache
from jax_kvblock.cache import programs

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from serve import between, config, fill
from serve import engine as engine_module
from serve.batch import Batch
from serve.engine import POLL, Engine
from serve.interface import Request, Stream
from serve.models import ByteTokenizer, LoadedModel

BLOCK = 16
OTHER_STEPS = 1, 8  # of a program, beside as many as the engine takes
LONGER_PROMPTS = 1024, 4096  # tokens
BY_XLA = f"{OURS}, between layers by XLA"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's shape, and what is asked of it."""

    layers: int = 30
    width: int = 576
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    ffn: int = 1536
    vocab: int = 49152
    requests: int = 64
    prompt: int = 128
    steps: int = 128
    rows: int = 512
    prefix: int = 32768
    prefix_rows: int = 4096
    turns: int = 5


SMOLLM2 = Case()
# Two cores: fewer requests, and a prefix that is read in a minute.
ON_CPU = dataclasses.replace(
    SMOLLM2, requests=8, steps=24, rows=128, prefix=512, prefix_rows=128, turns=3
)
TINY = Case(
    layers=2, width=64, heads=4, kv_heads=2, dim=16, ffn=96, vocab=257, requests=3,
    prompt=20, steps=8, rows=32, prefix=64, prefix_rows=32, turns=1,
)  # fmt: skip


class Numbers(ByteTokenizer):
    """A token's text is its number."""

    end_tokens = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def bench(options: argparse.Namespace, results: Results) -> None:
    case = TINY if options.quick else SMOLLM2 if common.on_gpu() else ON_CPU
    model = _model(case)
    ceilings.add_device_copy(results, options.quick, "before")
    name = f"{case.requests} requests"
    cases = {name: case}
    for prompt in LONGER_PROMPTS if common.on_gpu() and not options.quick else ():
        # The prompts are read in 32 steps: who came first is far from done by then.
        rows = case.requests * prompt // 32
        longer = dataclasses.replace(case, prompt=prompt, rows=rows)
        cases[f"{name} of {prompt} tokens"] = longer
    rates = {
        (at, OURS): _decode(at, of, model, results, OURS) for at, of in cases.items()
    }
    asked = functools.partial(re.search, options.cases)
    others = OTHER_STEPS if common.on_gpu() else OTHER_STEPS[:1]
    for steps in others if asked("other steps") else ():
        if 2 * steps < case.steps:  # else no program has all of its steps
            seconds = _step_seconds(case, model, steps)[0]
            at = f"{name} / a step of decoding, {steps} in a program"
            results.add(at, OURS, "time", seconds * 1e3, "ms")
    if asked("host"):
        _host(name, case, model, results)
    if asked("prefix"):
        _prefix(case, model, results)
    for at, of in cases.items() if common.on_gpu() and asked("by XLA") else ():
        rates[at, BY_XLA] = _decode(at, of, model, results, BY_XLA)
    ceilings.add_device_copy(results, options.quick, "after")
    # In units of copies: read + write counted, of which a step has the reading alone.
    copy = bars.best(results.rows, bars.DEVICE_COPY)
    for (at, who), rate in rates.items():
        over = copy / ceilings.in_unit(rate, ceilings.device_unit())
        results.add(f"{at} / a step of decoding", who, "over reading", over, "x")


def _model(case: Case) -> LoadedModel:
    """Random weights in a model's shape."""
    dtype = jnp.bfloat16 if common.on_gpu() else jnp.float32
    keys = iter(jax.random.split(jax.random.key(0), 4 * case.layers + 1))

    def drawn(outputs: int, inputs: int) -> jax.Array:
        shape = (outputs, inputs)
        return jax.random.normal(next(keys), shape, dtype) * inputs**-0.5

    own, kv = case.heads * case.dim, case.kv_heads * case.dim
    layers = [
        {
            "attn_norm": jnp.ones(case.width, jnp.float32),
            "mlp_norm": jnp.ones(case.width, jnp.float32),
            "qkv": drawn(own + 2 * kv, case.width),
            "out": drawn(case.width, own),
            "gate_up": drawn(2 * case.ffn, case.width),
            "down": drawn(case.width, case.ffn),
        }
        for _ in range(case.layers)
    ]
    params = {
        "embedding": drawn(case.vocab, case.width),
        "final_norm": jnp.ones(case.width, jnp.float32),
        "layers": layers,
    }
    shape = config.Config(
        num_layers=case.layers,
        width=case.width,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.dim,
        vocab_size=case.vocab,
        norm_eps=1e-5,
        inv_freq=config.frequencies(10_000.0, case.dim),
        interleaved=True,
        max_tokens=case.prefix + 4 * case.prompt + case.steps,
    )
    return LoadedModel("shape", shape, params, Numbers(case.vocab), jnp.dtype(dtype))


# ---- a step of decoding --------------------------------------------------------------


def _engine(
    case: Case, model: LoadedModel, steps: int | None = None, fused: bool = True
) -> Engine:
    tokens = case.prompt + case.steps + BLOCK
    return Engine(
        model,
        num_blocks=case.requests * -(-tokens // BLOCK) + 8,
        block_size=BLOCK,
        max_batch=case.requests,
        decode_steps=steps,
        fuse_layers=fused,
        max_tokens_per_step=max(case.rows, case.requests),
        max_waiting=case.requests,
        max_tokens=tokens,
        reserve=0.0,
    )


def _asked(case: Case, engine: Engine) -> list[Stream]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, case.vocab, (case.requests, case.prompt)).tolist()
    requests = [
        Request(prompt=prompt, max_new_tokens=case.steps, ignore_end=True)
        for prompt in prompts
    ]
    return [engine.submit(request) for request in requests]


def _steps(
    case: Case, engine: Engine, spent: Sequence[float] = ()
) -> tuple[list[float], list[float]]:
    """Seconds of each step in which all decode, of those of a program the mean; and
    what of them was `spent`, to which meanwhile is added."""
    streams = _asked(case, engine)
    while min(stream.num_new_tokens for stream in streams) < 2:
        engine.step()
    times, parts = [], []
    while max(stream.num_new_tokens for stream in streams) < case.steps - 1:
        before, known = streams[0].num_new_tokens, len(spent)
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        steps = streams[0].num_new_tokens - before
        times.append(seconds / steps)
        parts.append(sum(spent[known:]) / steps)
    engine.run()
    assert all(stream.num_new_tokens == case.steps for stream in streams)
    return times, parts


def _step_seconds(
    case: Case, model: LoadedModel, steps: int | None = None, fused: bool = True
) -> tuple[float, Engine]:
    """Of a step, and the engine that took it, which has ended."""
    engine = _engine(case, model, steps, fused)
    engine.compile()
    seconds = statistics.median(_steps(case, engine)[0])
    engine.stop()
    return seconds, engine


def _decode(
    name: str, case: Case, model: LoadedModel, results: Results, who: str
) -> float:
    """Adds a case's rows; the bytes that a step reads, a second."""
    seconds, engine = _step_seconds(case, model, fused=who == OURS)
    pool = engine._manager.pool
    join = between.choose(model.config, model.params, case.requests, pool)
    by_kernel = case.layers - 1 if who == OURS and join is between.between else 0
    spec = engine._manager.spec
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    keys = case.requests * (case.prompt + case.steps / 2)
    read = weights + keys * spec.block_bytes / BLOCK
    name += " / a step of decoding"
    results.add(name, who, "time of a step", seconds * 1e3, "ms")
    results.add(name, who, "new tokens", case.requests / seconds, "1/s")
    results.add(name, who, "steps in a program", engine._scheduler.steps, "steps")
    results.add(name, who, "between layers by a kernel", by_kernel, "times")
    results.add(name, who, "read", read / 1e6, "MB")
    return read / seconds


def _host(name: str, case: Case, model: LoadedModel, results: Results) -> None:
    """The host's work for the same steps: programs are not called."""
    engine = _engine(case, model)
    runner, manager = engine._runner, engine._manager

    def nothing(batch: Batch) -> np.ndarray:
        return np.ones((batch.shape.steps, batch.shape.outputs), np.int32)

    runner._call = nothing
    with _pauses() as paused, _clocked(paused) as spent:
        times, parts = _steps(case, engine, spent)
    # In so many programs each sequence comes to the end of a block once.
    window = -(-BLOCK // engine._scheduler.steps)
    means = [
        statistics.mean(parts[at : at + window])
        for at in range(0, max(len(parts) - window, 0) + 1, window)
    ]
    books = statistics.median(means)
    steps = engine._scheduler.steps
    of_requests = (sum(spent) - sum(parts) * steps) / case.requests
    around = _around(manager, (runner._params, runner._last)) / steps
    engine.stop()
    (step,) = [
        row["value"] / 1e3
        for row in results.rows
        if row["case"] == f"{name} / a step of decoding"
        and row["metric"] == "time of a step"
    ]
    at = f"{name} / the host's part of a step"
    results.add(at, OURS, "host time", statistics.median(times) * 1e6, "us")
    results.add(at, OURS, "the manager's", (books + around) * 1e6, "us")
    results.add(at, OURS, "of these around a program", around * 1e6, "us")
    results.add(at, OURS, "pauses to collect garbage", sum(paused) * 1e3, "ms")
    results.add(at, OURS, "a request's besides", of_requests * 1e6, "us")
    results.add(at, OURS, "the manager's, of a step", (books + around) / step, "x")


@contextlib.contextmanager
def _pauses() -> Iterator[list[float]]:
    """The seconds of each collection of garbage. Python has them wherever something is
    allocated, and they take the longer the more a process holds."""
    paused: list[float] = []
    began = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            paused.append(time.perf_counter() - began)

    gc.callbacks.append(note)
    try:
        yield paused
    finally:
        gc.callbacks.remove(note)


@contextlib.contextmanager
def _clocked(paused: list[float]) -> Iterator[list[float]]:
    """The seconds of each call of the cache's books by the engine, without pauses."""
    spent: list[float] = []

    def clocked(call: Any) -> Any:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, began = len(paused), time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                taken = time.perf_counter() - began
                spent.append(taken - sum(paused[before:]))

        return timed

    named = [(engine_module, f"{what}_tokens") for what in ("append", "commit")]
    named += [(fill, "prepare_step")]
    of_tables = ("append", "commit", "fork", "free", "match", "reserve")
    named += [(BlockTable, name) for name in of_tables]
    named += [(PrefixCache, name) for name in ("can_admit", "empty_table")]
    with contextlib.ExitStack() as stack:
        for owner, name in named:
            stack.enter_context(
                mock.patch.object(owner, name, clocked(getattr(owner, name)))
            )
        yield spent


def _around(manager: BlockManager, given: tuple[Any, ...]) -> float:
    """Seconds that `BlockManager.update` takes beside the call of its program."""

    def same(pool: KVPool, *given: Any) -> KVPool:
        return pool

    program = jax.jit(same, donate_argnums=0)

    def alone() -> None:
        manager.pool = program(manager.pool, *given)

    def by_manager() -> None:
        manager.update(same, *given)

    times: dict[Callable[[], None], list[float]] = {alone: [], by_manager: []}
    for _ in range(50):
        for call, taken in times.items():
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    alone_, managed = (statistics.median(taken) for taken in times.values())
    return managed - alone_


# ---- a prefix that many share --------------------------------------------------------


@contextlib.contextmanager
def _settled() -> Iterator[None]:
    """Python's collector leaves alone what is there, as in a server."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _noted(owner: Any, name: str) -> Iterator[list[float]]:
    """When a function is called meanwhile, by the clock."""
    times: list[float] = []
    call = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        times.append(time.perf_counter())
        return call(*args, **kwargs)

    with mock.patch.object(owner, name, noted):
        yield times


def _prefix(case: Case, model: LoadedModel, results: Results) -> None:
    tokens = case.prefix + case.prompt + BLOCK
    blocks = -(-tokens // BLOCK)
    spec_bytes = 2 * case.layers * case.kv_heads * case.dim * model.dtype.itemsize
    engine = Engine(
        model,
        num_blocks=blocks + 8,
        block_size=BLOCK,
        max_batch=1,
        max_tokens_per_step=case.prefix_rows,
        max_tokens=tokens,
        host_bytes=(blocks + 8) * BLOCK * spec_bytes,
        reserve=0.0,
    )
    engine.compile()
    rng = np.random.default_rng(1)
    prefix = rng.integers(0, case.vocab, case.prefix).tolist()

    def first_token() -> tuple[float, float, int]:
        own = rng.integers(0, case.vocab, case.prompt).tolist()
        request = Request(prompt=prefix + own, max_new_tokens=1, ignore_end=True)
        start = time.perf_counter()
        stream = engine.submit(request)
        while not stream.num_new_tokens:
            if not engine.step():  # as the engine's own loop does, for a transfer
                time.sleep(POLL)
        seconds = time.perf_counter() - start
        engine.run()
        return start, seconds, stream.num_cached_tokens

    below = f"{OURS}, from host memory"
    times: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    with (
        _settled(),
        _pauses() as paused,
        _noted(engine.tiers.below, "bring") as copies,
        _noted(programs, "write_blocks") as writes,
        _noted(engine._runner, "_call") as steps,
    ):
        for _ in range(case.turns + 1):
            engine.cache.clear()
            engine.tiers.below.host.books.forget_idle()
            _, seconds, cached = first_token()
            assert cached == 0
            times[f"{OURS}, computed", "time"].append(seconds)
            with engine.cache.open([*prefix, 0]) as table:
                engine.tiers.offload(table).wait()
            engine.cache.clear()
            for noted in (paused, copies, writes, steps):
                noted.clear()
            start, seconds, cached = first_token()
            assert cached == case.prefix
            times[below, "time"].append(seconds)
            times[below, "until the first copy begins"].append(copies[0] - start)
            behind = steps[0] - writes[-1]
            times[below, "from the last write to the step"].append(behind)
            times[below, "pauses to collect garbage"].append(sum(paused))
    engine.stop()
    name = f"prefix of {case.prefix} tokens / the first token"
    medians = {what: statistics.median(taken[1:]) for what, taken in times.items()}
    for (who, metric), seconds in medians.items():
        results.add(name, who, metric, seconds * 1e3, "ms")
    ratio = medians[below, "time"] / medians[f"{OURS}, computed", "time"]
    results.add(name, OURS, "of computing it", ratio, "x")


if __name__ == "__main__":
    common.main("serve", bench, __doc__)
