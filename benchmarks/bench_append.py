"""What stands between the projections of a layer and its attention: rope_append.

Eight layers, each with q, k and v of its own, into one donated pool in one program, so
that the host's time is hidden. TB/s of what has to move: q, k and v in, q out, and k
and v as they are stored. Beside it the same in two steps, as it was written before: XLA
rotates (and quantizes), then append_kv copies. Both take turns, and what they write is
compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import common
from support.common import OURS, Results
from support.rounds import Turns, median_seconds

from jax_kvblock import BlockSpec, KVPool, KVScales, append_kv, rope_append

LAYERS, BLOCK, THETA = 8, 16, 5e5
LARGEST = 448.0
TWO_STEPS = "xla, then append_kv"
TURNS = Turns(turns=5, rounds=4, seconds=0.02, warm_up=1, least=3)


@dataclasses.dataclass(frozen=True)
class Append:
    """A step of `tokens`; `scale`: None, "tensor", or "computed" for each row."""

    tokens: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    scale: str | None = None
    norms: bool = False
    layout: str = "NHD"
    zero_tail: bool = False

    @property
    def name(self) -> str:
        stored = f"float8 {self.scale}" if self.scale else "bfloat16"
        more = ", norms" * self.norms + ", zero tail" * self.zero_tail
        heads = f"H{self.heads}/{self.kv_heads} D{self.dim}"
        return f"{self.tokens} tokens {heads} {self.layout} {stored}{more}"

    @property
    def spec(self) -> BlockSpec:
        dtype = "float8_e4m3fn" if self.scale else "bfloat16"
        size = (LAYERS, 2, BLOCK, self.kv_heads, self.dim)
        return BlockSpec(*size, dtype, self.layout)

    @property
    def bytes(self) -> int:
        """Of one layer."""
        rows = 2 * self.heads + 2 * self.kv_heads
        stored = self.spec.dtype.itemsize * self.dim + 4 * (self.scale == "computed")
        return self.tokens * (rows * self.dim * 2 + 2 * self.kv_heads * stored)


CASES = (
    Append(1),
    Append(64),
    Append(256),
    Append(2048),
    Append(8192),
    Append(64, scale="tensor"),
    Append(64, scale="computed"),
    Append(8192, scale="tensor"),
    Append(8192, scale="computed"),
    Append(8192, norms=True),
    Append(8192, layout="HND"),
    Append(8192, zero_tail=True),
    Append(8192, heads=16, kv_heads=2, dim=64),
    Append(8192, heads=16, kv_heads=4, dim=256),
)


def bench(options: argparse.Namespace, results: Results) -> None:
    for case in common.wanted(options, CASES):
        if options.quick:
            case = dataclasses.replace(case, tokens=min(case.tokens, 33))
        _compare(case, results, options.quick)
        results.save()


def _arguments(case: Append) -> tuple[Any, list[Any], Any]:
    """The pool and its scales; q, k, v of each layer; slots and positions."""
    blocks = max(64, 2 * case.tokens // BLOCK)
    kept = (
        KVPool.zeros(case.spec, blocks),
        KVScales.zeros(case.spec, blocks) if case.scale == "computed" else None,
    )
    rows = case.heads + 2 * case.kv_heads
    drawn = jax.random.normal(
        jax.random.key(0), (LAYERS, case.tokens, rows, case.dim), jnp.bfloat16
    )
    cuts = (case.heads, case.heads + case.kv_heads)
    split = jax.jit(lambda x: jnp.split(x, cuts, 1))
    layers = [split(x) for x in drawn]
    # Whole blocks one after the other, in any order, as a prefill has them.
    order = np.random.default_rng(0).permutation(blocks)
    token = np.arange(case.tokens)
    slots = order[token // BLOCK] * BLOCK + token % BLOCK
    return kept, layers, (jnp.asarray(slots, jnp.int32), jnp.asarray(token, jnp.int32))


def _ours(case: Append) -> Callable[..., Any]:
    weight = np.ones(case.dim, np.float32) if case.norms else None

    def run(kept: Any, layers: Any, at: Any) -> Any:
        pool, scales = kept
        made = []
        for layer, (q, k, v) in enumerate(layers):
            options: dict[str, Any] = {"q_norm": weight, "k_norm": weight}
            options |= {"theta": THETA, "zero_tail": case.zero_tail}
            if case.scale == "computed":
                options["scales"] = scales
            elif case.scale:
                options |= {"k_scale": 0.01, "v_scale": 0.01}
            q, pool, *rest = rope_append(q, k, v, pool, layer, *at, **options)
            scales = rest[0] if rest else None
            made.append(q)
        return (pool, scales), made

    return run


def _two_steps(case: Append) -> Callable[..., Any]:
    half = case.dim // 2
    frequency = jnp.asarray(THETA ** -(np.arange(half) / half), jnp.float32)

    def turned(x: Any, at: Any, norm: bool) -> Any:
        y = x.astype(jnp.float32)
        if norm:
            y *= jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
        angle = (at[:, None] * frequency)[:, None]
        a, b = jnp.split(y, 2, -1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def narrowed(x: Any) -> tuple[Any, Any]:
        if not case.scale:
            return x.astype(jnp.bfloat16), None
        x = x.astype(jnp.float32)
        scale = jnp.float32(0.01)
        if case.scale == "computed":
            scale = jnp.maximum(jnp.abs(x).max(-1) / LARGEST, 1e-30)
        wide = x / (scale[..., None] if scale.ndim else scale)
        return jnp.clip(wide, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn), scale

    def run(kept: Any, layers: Any, at: Any) -> Any:
        (pool, scales), (slots, positions), made = kept, at, []
        for layer, (q, k, v) in enumerate(layers):
            made.append(turned(q, positions, case.norms).astype(q.dtype))
            k, k_scale = narrowed(turned(k, positions, case.norms))
            v, v_scale = narrowed(v)
            pool = append_kv(pool, layer, k, v, slots)
            if case.scale == "computed":
                where = (layer, slots // BLOCK, slots % BLOCK)
                pairs = ((scales.k, k_scale), (scales.v, v_scale))
                scales = KVScales(*(a.at[where].set(x) for a, x in pairs))
        return (pool, scales), made

    return run


def _compare(case: Append, results: Results, quick: bool) -> None:
    name = f"{case.name} / append"
    running, seen = {}, {}
    calls = {OURS: _ours(case)}
    if not case.zero_tail:
        calls[TWO_STEPS] = _two_steps(case)
    for who, function in calls.items():
        kept, layers, at = _arguments(case)
        try:
            jitted = jax.jit(function, donate_argnums=0)
            compiled = jitted.lower(kept, layers, at).compile()
            kept, made = compiled(kept, layers, at)
            seen[who] = [np.asarray(x, np.float32) for x in (*kept[0].arrays, *made)]
            running[who] = [compiled, kept, layers, at]
        except Exception as error:
            results.fail(name, who, error)
    if len(seen) == 2:
        bar = 0.15 if case.scale else 0.02  # two roundings of float8; of bfloat16
        for one, other in zip(*seen.values(), strict=True):
            np.testing.assert_allclose(one, other, rtol=bar, atol=bar)
    for who, seconds in _take_turns(running, quick).items():
        results.add(name, who, "bandwidth", case.bytes / seconds / 1e12, "TB/s")
        results.add(name, who, "time", seconds * 1e6, "us")


def _take_turns(running: dict[str, list[Any]], quick: bool) -> dict[str, float]:
    """Median seconds of a layer."""

    def call(who: str) -> Any:
        compiled, kept, layers, at = running[who]
        running[who][1], made = compiled(kept, layers, at)
        return running[who][1], made

    calls = {who: functools.partial(call, who) for who in running}
    found = median_seconds(calls, quick, TURNS)
    return {who: seconds / LAYERS for who, seconds in found.items()}


if __name__ == "__main__":
    common.main("append", bench, __doc__)
