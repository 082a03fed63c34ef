"""Attention in 8 bits on a GPU, beside this library's own in bfloat16.

"quantized" is `flash_attention` of arrays that are in 8 bits already, "with
quantization" is `fp8_attention` of bfloat16 arrays; "int8" has queries and keys in int8
where the others are e4m3. TFLOP/s as papers count. They take turns on a hot chip: 0.2 s
to warm up and 0.4 s that count in each of three, in an order drawn anew each time.

"quantization" is `quantize_qkv` alone, by the kernels and by XLA, in bytes of each
array read once and written once; "copy" is a copy of the three arrays as they are.

Errors are those of a call of 1024 positions, beside float64: the norm of what out is
off by, in parts of out's; "naive" is one scale for each array, and nothing else done to
it. "normal" arrays are normally distributed. "means" adds to each head's keys a mean of
4 standard deviations, "outliers" to one in a thousand queries' and keys' numbers one of
10 standard deviations, as FlashAttention-3's paper does.

"pages" are prefills over a cache of blocks at random places: one of bfloat16, one of
e4m3 whose numbers are widened on the way, and the same with `quantize_queries`, where
both products are in 8 bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import common
from support.common import OURS, Results, cases
from support.rounds import HOT, median_seconds

from jax_kvblock import flash_attention, paged_attention
from jax_kvblock.fp8 import FP8AttentionConfig, fp8_attention, quantize_qkv

BF16, NAIVE = f"{OURS}, bfloat16", "naive"
QUANTIZATION, COPY = f"{OURS}, quantization", "copy"
QUANTIZATION_BY_XLA = "xla, quantization"
CASES = (
    cases.AttentionCase(1, 32, 8, 16384, 128, causal=False, dtype="float8_e4m3fn"),
    cases.AttentionCase(1, 32, 8, 16384, 128, dtype="float8_e4m3fn"),
    cases.AttentionCase(4, 32, 8, 4096, 128, causal=False, dtype="float8_e4m3fn"),
    cases.AttentionCase(4, 32, 8, 4096, 128, dtype="float8_e4m3fn"),
    cases.AttentionCase(2, 32, 8, 16384, 64, dtype="float8_e4m3fn"),
)
PAGE = 64  # tokens


@dataclasses.dataclass(frozen=True)
class Paged:
    case: cases.AttentionCase

    @property
    def name(self) -> str:
        return f"pages of {PAGE}, {self.case.name}"


PAGED = (
    Paged(cases.AttentionCase(2, 32, 8, 8192, 128, dtype="float8_e4m3fn")),
    Paged(cases.AttentionCase(8, 32, 8, 2048, 128, dtype="float8_e4m3fn")),
)
INTEGERS = FP8AttentionConfig(qk_dtype="int8")
CONFIGS = {
    OURS: FP8AttentionConfig(),
    f"{OURS}, int8": INTEGERS,
    f"{OURS}, heads": FP8AttentionConfig("head", "head"),
    NAIVE: FP8AttentionConfig("tensor", "tensor", "tensor", False, False),
}


def bench(options: argparse.Namespace, results: Results) -> None:
    if not common.on_gpu():
        raise RuntimeError("jax sees no GPU, and the kernels are for one")
    for kind in ("normal", "means", "outliers"):
        _errors(kind, results)
    for case in common.wanted(options, CASES):
        _compare(case, results, options.quick)
        gc.collect()
        results.save()
    for paged in common.wanted(options, PAGED):
        _compare_pages(paged.case, paged.name, results, options.quick)
        gc.collect()
        results.save()


def _errors(kind: str, results: Results) -> None:
    rng = np.random.default_rng()
    shapes = (1, 1024, 8, 128), (1, 1024, 2, 128), (1, 1024, 2, 128)
    q, k, v = (rng.normal(size=shape) for shape in shapes)
    if kind == "means":
        k = k + rng.normal(0, 4, (1, 1, 2, 128))
    if kind == "outliers":
        for x in (q, k):
            x += rng.normal(0, 10, x.shape) * (rng.random(x.shape) < 0.001)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    want = _truth(*(np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v)))
    for who, config in CONFIGS.items():
        got = fp8_attention(q, k, v, config, causal=True).astype(jnp.float32)
        off = np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
        results.add(f"B1 H8/2 S1024 D128 causal, {kind} / out", who, "error", off, "")


def _truth(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention in float64."""
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bsnd->btnd", p / p.sum(-1, keepdims=True), v)


def _compare(case: Any, results: Results, quick: bool) -> None:
    length = 512 if quick else case.length
    shape = (case.batch, length, case.num_heads, case.head_dim)
    kv_shape = (case.batch, length, case.num_kv_heads, case.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, size, jnp.bfloat16)
        for key, size in zip(keys, (shape, kv_shape, kv_shape), strict=True)
    )
    x, y = (
        jax.block_until_ready(quantize_qkv(q, k, v, config))
        for config in (None, INTEGERS)
    )
    given = {
        BF16: (lambda q, k, v: flash_attention(q, k, v, causal=case.causal), (q, k, v)),
        f"{OURS}, quantized": (
            lambda q, k, v, s: flash_attention(q, k, v, scales=s, causal=case.causal),
            (x.q, x.k, x.v, x.scales),
        ),
        f"{OURS}, with quantization": (
            lambda q, k, v: fp8_attention(q, k, v, causal=case.causal),
            (q, k, v),
        ),
        f"{OURS}, int8, quantized": (
            lambda q, k, v, s: flash_attention(q, k, v, scales=s, causal=case.causal),
            (y.q, y.k, y.v, y.scales),
        ),
        f"{OURS}, int8, with quantization": (
            lambda q, k, v: fp8_attention(q, k, v, INTEGERS, causal=case.causal),
            (q, k, v),
        ),
        QUANTIZATION: (quantize_qkv, (q, k, v)),
        QUANTIZATION_BY_XLA: (
            lambda q, k, v: quantize_qkv(q, k, v, implementation="xla"),
            (q, k, v),
        ),
        COPY: (lambda *x: tuple(jnp.copy(a) for a in x), (q, k, v)),
    }
    seconds = median_seconds(_compiled(case.name, given, results), quick, HOT)
    name = f"{case.name} / forward"
    numbers = sum(x.size for x in (q, k, v))
    moved = {COPY: 4 * numbers, QUANTIZATION: 3 * numbers}
    moved[QUANTIZATION_BY_XLA] = moved[QUANTIZATION]
    for who, value in seconds.items():
        results.add(name, who, "time", value * 1e3, "ms")
        if who in moved:
            results.add(name, who, "bandwidth", moved[who] / value / 1e12, "TB/s")
            continue
        results.add(name, who, "rate", case.flops / value / 1e12, "TFLOP/s")
        if BF16 in seconds and who != BF16:
            results.add(name, who, "over bfloat16", seconds[BF16] / value, "")


def _compiled(
    name: str, given: dict[str, tuple[Any, tuple[Any, ...]]], results: Results
) -> dict[str, Callable[[], Any]]:
    """Calls of functions with their arrays, compiled."""
    calls = {}
    for who, (function, arrays) in given.items():
        try:
            compiled = jax.jit(function).lower(*arrays).compile()
        except Exception as error:
            results.fail(name, who, error)
            continue
        calls[who] = functools.partial(compiled, *arrays)
    return calls


def _compare_pages(case: Any, name: str, results: Results, quick: bool) -> None:
    if quick:
        case = dataclasses.replace(case, length=512)
    batch, length = case.batch, case.length
    heads, dim = case.num_kv_heads, case.head_dim
    blocks = batch * length // PAGE
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (batch, length, case.num_heads, dim), jnp.bfloat16)
    k, v = (
        jax.random.normal(key, (blocks, PAGE, heads, dim), jnp.bfloat16)
        for key in keys[1:3]
    )
    narrow = [x.astype(jnp.float8_e4m3fn) for x in (k, v)]
    tables = jax.random.permutation(keys[3], blocks).reshape(batch, -1)
    lengths = jnp.full(batch, length, jnp.int32)

    def attend(
        q: Any, k: Any, v: Any, tables: Any, lengths: Any, **options: Any
    ) -> Any:
        return paged_attention(q, (k, v), None, tables, lengths, **options)

    def in_8_bits(*arrays: Any) -> Any:
        return attend(*arrays, k_scale=1.0, v_scale=1.0, quantize_queries=True)

    def widened(*arrays: Any) -> Any:
        return attend(*arrays, k_scale=1.0, v_scale=1.0)

    rest = tables.astype(jnp.int32), lengths
    given = {
        BF16: (attend, (q, k, v, *rest)),
        f"{OURS}, e4m3 widened": (widened, (q, *narrow, *rest)),
        f"{OURS}, 8 bits": (in_8_bits, (q, *narrow, *rest)),
    }
    outs = [jax.jit(f)(*arrays).astype(jnp.float32) for f, arrays in given.values()]
    for who, out in list(zip(given, outs, strict=True))[1:]:
        off = jnp.linalg.norm(out - outs[1]) / jnp.linalg.norm(outs[1])
        if who.endswith("8 bits"):
            results.add(f"{name} / out", who, "off the widened", float(off), "")
            if not 0 < off < 0.1:
                raise AssertionError(f"{who} is off by {off:.3g}")
    seconds = median_seconds(_compiled(name, given, results), quick, HOT)
    for who, value in seconds.items():
        work = f"{name} / forward"
        results.add(work, who, "time", value * 1e3, "ms")
        results.add(work, who, "rate", case.flops / value / 1e12, "TFLOP/s")
        if BF16 in seconds and who != BF16:
            results.add(work, who, "over bfloat16", seconds[BF16] / value, "")


if __name__ == "__main__":
    common.main("attention-fp8", bench, __doc__)
