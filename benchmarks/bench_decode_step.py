"""A whole decode step of a language model, and how close it comes to reading once.

A model in the shape of Llama 3 8B with random weights: one program, one layer after the
other, a donated pool; rope_append writes each new token's key and value, and
paged_attention reads the rest. (A scan over stacked weights copies each layer's on its
way: 15 GB more to write, and to read again.) Nothing can be faster than reading all
weights and all keys and values once: "over reading" is the step's time over that of as
many bytes at the rate of a plain copy, measured before and after. Beside it the same
step with the pages gathered first. Both take turns, and their logits are compared.

    python benchmarks/bench_decode_step.py            on a GPU with 80 GB or more
    python benchmarks/bench_decode_step.py --small    a tiny model, anywhere, in seconds
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import bars
import ceilings
import jax
import jax.numpy as jnp
import numpy as np
from support import common
from support.common import OURS, Results
from support.rounds import Turns, median_seconds

from jax_kvblock import (
    BlockSpec,
    KVPool,
    flash_attention,
    gather_kv,
    paged_attention,
    rope_append,
)

GATHERED = f"{OURS}, pages gathered first"
BLOCK, THETA, EPSILON = 16, 5e5, 1e-5
TURNS = Turns(turns=3, rounds=2, seconds=0.3, warm_up=1)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's shape, and `batch` sequences of `keys` tokens, one of each new."""

    shape: str
    batch: int
    keys: int
    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    ffn: int = 14336
    vocab: int = 128256
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.shape} B{self.batch} S{self.keys} {self.dtype}"

    @property
    def spec(self) -> BlockSpec:
        return BlockSpec(self.layers, 2, BLOCK, self.kv_heads, self.dim, self.dtype)

    @property
    def num_blocks(self) -> int:
        return self.batch * self.keys // BLOCK

    @property
    def weight_shapes(self) -> dict[str, tuple[int, int]]:
        """Of a layer's weights, `[in, out]`."""
        own = self.heads * self.dim
        return {
            "qkv": (self.width, own + 2 * self.kv_heads * self.dim),
            "out": (own, self.width),
            "gate_up": (self.width, 2 * self.ffn),
            "down": (self.ffn, self.width),
        }

    @property
    def weight_bytes(self) -> int:
        """That a step reads: all but the rows of the embedding that no token has."""
        layer = sum(a * b for a, b in self.weight_shapes.values()) + 2 * self.width
        other = (self.vocab + 1 + self.batch) * self.width
        return (self.layers * layer + other) * jnp.dtype(self.dtype).itemsize

    @property
    def cache_bytes(self) -> int:
        """The keys and values of all sequences."""
        return self.num_blocks * self.spec.block_bytes


CASES = (Model("Llama 3 8B", 64, 4096),)
TINY: dict[str, Any] = {
    "batch": 2,
    "keys": 64,
    "layers": 2,
    "width": 64,
    "heads": 4,
    "kv_heads": 2,
    "dim": 32,
    "ffn": 96,
    "vocab": 128,
}


class Inputs(NamedTuple):
    """Of a step: tokens `[B]`, and where they go. All int32."""

    tokens: Any
    tables: Any
    lens: Any
    starts: Any
    slots: Any


def bench(options: argparse.Namespace, results: Results) -> None:
    if not (common.on_gpu() or options.quick):
        raise RuntimeError("jax sees no GPU; --small runs a tiny model on a CPU")
    cases = common.wanted(options, CASES)
    if options.quick:
        cases = [dataclasses.replace(case, **TINY, shape="tiny") for case in cases]
    for case in cases:
        ceilings.add_device_copy(results, options.quick, "before")
        timed = _compare(case, results, options.quick)
        ceilings.add_device_copy(results, options.quick, "after")
        _report(case, timed, results)
        results.save()


def _report(case: Model, timed: dict[str, float], results: Results) -> None:
    name, unit = f"{case.name} / decode step", ceilings.device_unit()
    total = case.weight_bytes + case.cache_bytes
    copy = bars.best(results.rows, bars.DEVICE_COPY)
    results.add(name, "model", "weights", case.weight_bytes, "B")
    results.add(name, "model", "keys and values", case.cache_bytes, "B")
    for who, seconds in timed.items():
        rate = ceilings.in_unit(total / seconds, unit)
        results.add(name, who, "bandwidth", rate, unit)
        results.add(name, who, "time", seconds * 1e3, "ms")
        results.add(name, who, "tokens", case.batch / seconds, "1/s")
        if copy is not None:
            results.add(name, who, "over reading", copy / rate, "")


# ---- the model -----------------------------------------------------------------------


def _weights(case: Model) -> dict[str, Any]:
    """Random ones, array by array, so that drawing them takes little memory."""
    keys = iter(jax.random.split(jax.random.key(0), 8 * (case.layers + 1)))
    ones = jnp.ones(case.width, case.dtype)

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: Any, shape: tuple[int, int]) -> Any:
        return jax.random.normal(key, shape, case.dtype) * shape[0] ** -0.5

    def layer() -> dict[str, Any]:
        made = {name: draw(next(keys), of) for name, of in case.weight_shapes.items()}
        return made | {"norm": ones, "ffn_norm": ones}

    return {
        "layers": [layer() for _ in range(case.layers)],
        "head": draw(next(keys), (case.width, case.vocab)),
        "embedding": draw(next(keys), (case.vocab, case.width)) * case.vocab**0.5,
        "norm": ones,
    }


def _pool(case: Model) -> KVPool:
    """A few random blocks, again and again."""
    few = min(case.num_blocks, 64)

    @jax.jit
    def draw(key: Any) -> Any:
        shape = (few, *case.spec.block_shape)
        noise = jax.random.normal(key, shape, case.dtype)
        copies = -(-case.num_blocks // few)
        return jnp.tile(noise, (copies, *[1] * (noise.ndim - 1)))[: case.num_blocks]

    return KVPool(draw(jax.random.key(1)), case.spec)


def _inputs(case: Model) -> Inputs:
    """Every sequence has all of its keys; the last one is that of this step."""
    rng = np.random.default_rng(0)
    tables = rng.permutation(case.num_blocks).reshape(case.batch, -1)
    slots = tables[:, -1] * BLOCK + BLOCK - 1
    given = (
        rng.integers(0, case.vocab, case.batch),
        tables,
        np.full(case.batch, case.keys),
        np.arange(case.batch + 1),
        slots,
    )
    return Inputs(*(jnp.asarray(a, jnp.int32) for a in given))


def _paged(q: Any, pool: KVPool, layer: Any, at: Inputs) -> Any:
    return paged_attention(q, pool, layer, at.tables, at.lens, query_start=at.starts)


def _gathered(q: Any, pool: KVPool, layer: Any, at: Inputs) -> Any:
    k, v = gather_kv(pool, layer, at.tables.reshape(-1))
    batch = at.tables.shape[0]
    k, v = (a.reshape(batch, -1, *a.shape[1:]) for a in (k, v))
    return flash_attention(q[:, None], k, v, kv_lens=at.lens)[:, 0]


def make_step(case: Model, attend: Callable[..., Any]) -> Callable[..., Any]:
    """A function of pool, weights and inputs: the new pool, and logits `[B, vocab]`."""

    def norm(x: Any, weight: Any) -> Any:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide * wide, -1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean + EPSILON)).astype(x.dtype) * weight

    def step(pool: KVPool, weights: dict[str, Any], at: Inputs) -> Any:
        x = weights["embedding"].at[at.tokens].get(mode="clip")
        for layer, w in enumerate(weights["layers"]):
            qkv = (norm(x, w["norm"]) @ w["qkv"]).reshape(case.batch, -1, case.dim)
            q, pool = rope_append(
                qkv, None, None, pool, layer, at.slots, at.lens - 1, theta=THETA
            )
            seen = attend(q, pool, layer, at)
            x = x + seen.reshape(case.batch, -1) @ w["out"]
            gate, up = jnp.split(norm(x, w["ffn_norm"]) @ w["gate_up"], 2, axis=-1)
            x = x + (jax.nn.silu(gate) * up) @ w["down"]
        return pool, norm(x, weights["norm"]) @ weights["head"]

    return step


# ---- how fast it is ------------------------------------------------------------------


def _compare(case: Model, results: Results, quick: bool) -> dict[str, float]:
    """Median seconds of a step, by who attends."""
    weights, at, pool = _weights(case), _inputs(case), _pool(case)
    name, seen = f"{case.name} / decode step", {}
    running: dict[str, Any] = {}
    for who, attend in ((OURS, _paged), (GATHERED, _gathered)):
        jitted = jax.jit(make_step(case, attend), donate_argnums=0)
        compiled = jitted.lower(pool, weights, at).compile()
        took = compiled.memory_analysis().temp_size_in_bytes
        results.add(name, who, "temporaries", took, "B", show=False)
        # The same key and value again: the pool is what it was for the next one.
        pool, logits = compiled(pool, weights, at)
        seen[who] = np.asarray(logits, np.float32)
        running[who] = compiled
    _alike(*seen.values())

    def step(who: str) -> Any:
        nonlocal pool
        pool, logits = running[who](pool, weights, at)
        return pool.data, logits

    calls = {who: functools.partial(step, who) for who in running}
    return median_seconds(calls, quick, TURNS)


def _alike(one: np.ndarray, other: np.ndarray) -> None:
    """Row by row; roundings of bfloat16 grow with the layers."""
    assert np.isfinite(one).all() and np.isfinite(other).all()
    apart = np.linalg.norm(one - other, axis=1) / np.linalg.norm(other, axis=1)
    assert apart.max() < 0.05, f"logits differ by {apart.max():.3g} of their norm"


if __name__ == "__main__":
    common.main("decode-step", bench, __doc__)
