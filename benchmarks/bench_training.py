"""Training with products of 8 bits, beside the same in bfloat16.

- casts: a matrix to 8 bits in both orders, with its largest size, by the kernel and by
  XLA. TB/s of what has to move: the matrix in, its codes out twice. Beside them a copy
  of as many bytes, by XLA. All take turns.
- norms and casts: RMSNorm, of a sum or not, and such a cast, by one kernel.
- products: 8192 x 8192 x 8192, of matrices that are in 8 bits in the order that tensor
  cores want, and of bfloat16 ones that are cast first, with delayed scaling.
- layers: a layer of a transformer like Llama's, d 4096, 16384 tokens, forward and
  backward, attention by flash_attention; and with norms in the kernel that casts.
- steps: of a model like Llama's, with AdamW, without and with remat of layers. Beside
  the times, what the compiled programs say that they need.

Layers and steps are compiled with libraries' products alone. TFLOP/s count what the
mathematics needs, so what is computed again does not count.
"over bfloat16" is how many times as fast a row is as the same in bfloat16. Before a
product or a layer is timed it is compared with bfloat16's: the norm of what it is off
by, in parts of the result's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import ceilings
import jax
import jax.numpy as jnp
import optax
from bench_attention import TURNS
from support import common, narrow_casts
from support.common import OURS, Results
from support.rounds import median_of_each

from jax_kvblock import flash_attention
from jax_kvblock.training import (
    FP8Config,
    Fp8Scaling,
    count_products,
    fp8_dot,
    fp8_norm_dot,
    fp8_training,
)
from jax_kvblock.training.cast import narrow
from jax_kvblock.training.config import FP8Format

BF16 = "xla, bfloat16"
CASTS_BY_XLA = f"{OURS}, casts by xla"
NORMS_IN_CASTS = f"{OURS}, norms in the casts"  # `fp8_norm_dot`
# Of what was rounded, beside bfloat16: to e4m3; to e5m2, product after product.
MOST_OFF_PRODUCT, MOST_OFF_LAYER = 0.06, 0.2
IMPLEMENTATIONS = {OURS: FP8Config(), CASTS_BY_XLA: FP8Config(implementation="xla")}
WEIGHTS = ("qkv", "out", "gate_up", "down")
WARM_UP, STEPS_TIMED = 3, 8


@dataclasses.dataclass(frozen=True)
class Product:
    size: int = 8192

    @property
    def name(self) -> str:
        return f"{self.size} x {self.size} x {self.size}"

    @property
    def flops(self) -> int:
        return 2 * self.size**3


@dataclasses.dataclass(frozen=True)
class Model:
    """Layers like Llama's, of which a case may have one, and a vocabulary or none."""

    name: str
    batch: int
    length: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    layers: int = 1
    vocabulary: int = 0
    remat: bool = False  # of layers

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of a layer's weights."""
        heads = self.heads + 2 * self.kv_heads
        return {
            "qkv": (self.width, heads * self.head_dim),
            "out": (self.width, self.width),
            "gate_up": (self.width, 2 * self.hidden),
            "down": (self.hidden, self.width),
        }

    @property
    def parameters(self) -> int:
        each = sum(rows * columns for rows, columns in self.shapes.values())
        return self.layers * each + self.vocabulary * self.width

    @property
    def flops(self) -> int:
        """Forward: two for each weight and token, and those of causal attention."""
        tokens = self.batch * self.length
        attention = 2 * self.length * self.width * tokens * self.layers
        return 2 * self.parameters * tokens + attention


EPS = narrow_casts.EPS
PRODUCTS = (Product(),)
LAYERS = (Model("d 4096, 16384 tokens", 4, 4096, 4096, 32, 8, 14336),)
STEPS = (
    Model("1B parameters, 16384 tokens", 8, 2048, 2048, 32, 8, 8192, 16, 32768),
    Model("1B, remat, 16384 tokens", 8, 2048, 2048, 32, 8, 8192, 16, 32768, True),
)
# XLA else tries its own kernels for every product, which takes minutes.
LIBRARIES = {"xla_gpu_enable_triton_gemm": False}
QUICK = Model("small", 1, 64, 64, 4, 2, 128, 1, 64)


def bench(options: argparse.Namespace, results: Results) -> None:
    if not common.on_gpu() and not options.quick:
        raise RuntimeError("jax sees no GPU, and tensor cores of 8 bits are on one")
    quick = options.quick
    if common.on_gpu():
        narrow_casts.bench(options, results)
        ceilings.add_device_copy(results, quick)
    for product in common.wanted(options, PRODUCTS):
        _products(Product(256) if quick else product, results, quick)
        results.save()
    for layer in common.wanted(options, LAYERS):
        _layers(QUICK if quick else layer, results, quick)
        results.save()
    for step in common.wanted(options, STEPS):
        _steps(QUICK if quick else step, results, quick)
        results.save()


# ---- what is shared ------------------------------------------------------------------


def _served() -> dict[str, FP8Config]:
    """By whom 8 bits are cast here."""
    if common.on_gpu():
        return IMPLEMENTATIONS
    return {OURS: IMPLEMENTATIONS[OURS]}


def _add(results: Results, case: str, seconds: dict[str, float], flops: float) -> None:
    for who, found in seconds.items():
        results.add(case, who, "time", found * 1e3, "ms", show=False)
        results.add(case, who, "rate", flops / found / 1e12, "TFLOP/s")
        if who != BF16 and BF16 in seconds:
            results.add(case, who, "over bfloat16", seconds[BF16] / found, "")


def _check(
    results: Results, case: str, who: str, got: Any, want: Any, most: float
) -> None:
    """Compares with bfloat16's result, leaf by leaf."""
    norm = jax.jit(lambda x: jnp.linalg.norm(x.astype(jnp.float32).ravel()))
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        off = norm(a.astype(jnp.float32) - b.astype(jnp.float32)) / norm(b)
        worst = max(worst, float(off))
    results.add(case, who, "error", worst, "")
    if not worst < most:
        raise AssertionError(f"off by {worst:.3g} of bfloat16's result")


# ---- products ------------------------------------------------------------------------


def _products(product: Product, results: Results, quick: bool) -> None:
    n = product.size
    keys = jax.random.split(jax.random.key(1), 2)
    x, w = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in keys)
    scaling = Fp8Scaling.create()
    scale = jnp.float32(16)
    form = FP8Format.E4M3
    x8, w8 = (jax.jit(lambda a: narrow(a, scale, form)[0].codes)(a) for a in (x, w.T))

    def quantized(x8: Any, w8: Any, scale: Any) -> Any:
        rows = (((1,), (1,)), ((), ()))
        out = jax.lax.dot_general(x8, w8, rows, preferred_element_type=jnp.float32)
        return (out * (1 / (scale * scale))).astype(jnp.bfloat16)

    want = jax.jit(jnp.matmul)
    running = {BF16: functools.partial(want, x, w)}
    running[f"{OURS}, quantized"] = functools.partial(jax.jit(quantized), x8, w8, scale)
    for who, config in _served().items():
        whole = jax.jit(functools.partial(fp8_dot, config=config))
        running[f"{who}, with quantization"] = functools.partial(whole, x, w, scaling)
    case = f"{product.name} / product"
    for who in list(running)[1:]:
        try:
            _check(results, case, who, running[who](), want(x, w), MOST_OFF_PRODUCT)
        except Exception as error:
            results.fail(case, who, error)
            del running[who]
    _add(
        results,
        case,
        median_of_each(running, results, case, quick, TURNS),
        product.flops,
    )


# ---- layers --------------------------------------------------------------------------


def _normalize(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    over = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)
    return (wide * over * weight).astype(x.dtype)


class Apart:
    """Products, and norms in front of them as operations of their own."""

    def __init__(self, product: Callable[..., jax.Array], config: FP8Config) -> None:
        self.times, self.config = product, config

    def normed(self, x: Any, residual: Any, gamma: Any, w: Any, scaling: Any) -> Any:
        """The product of normed x, or of its sum with a residual; and that sum."""
        x = x if residual is None else x + residual
        return self.times(_normalize(x, gamma), w, scaling), x


class InCasts(Apart):
    """Norms are in the kernel that casts."""

    def normed(self, x: Any, residual: Any, gamma: Any, w: Any, scaling: Any) -> Any:
        made = fp8_norm_dot(
            x, gamma, w, scaling, residual=residual, eps=EPS, config=self.config
        )
        return (made, x) if residual is None else made


def _layer(model: Model, by: Apart, x: Any, weights: Any, scales: Any) -> jax.Array:
    def times(x: jax.Array, name: str) -> jax.Array:
        return by.times(x, weights[name], scales[name])

    def normed(x: Any, residual: Any, which: int, name: str) -> Any:
        gamma = weights["norm"][which]
        return by.normed(x, residual, gamma, weights[name], scales[name])

    heads, kv_heads = model.heads, model.kv_heads
    h, x = normed(x, None, 0, "qkv")
    h = h.reshape(*x.shape[:2], heads + 2 * kv_heads, model.head_dim)
    q, k, v = jnp.split(h, (heads, heads + kv_heads), axis=2)
    h = flash_attention(q, k, v, causal=True).reshape(x.shape)
    h, x = normed(times(h, "out"), x, 1, "gate_up")
    gate, up = jnp.split(h, 2, -1)
    return x + times(jax.nn.silu(gate) * up, "down")


def _weights(model: Model, key: jax.Array, stacked: tuple[int, ...] = ()) -> Any:
    keys = jax.random.split(key, len(WEIGHTS))
    made = {
        name: jax.random.normal(k, (*stacked, *model.shapes[name])) * 0.02
        for name, k in zip(WEIGHTS, keys, strict=True)
    }
    return made | {"norm": jnp.ones((*stacked, 2, model.width))}


def _in_bfloat16(x: jax.Array, w: jax.Array, scaling: Any) -> jax.Array:
    return x @ w.astype(x.dtype)


def _options() -> dict[str, Any]:
    return LIBRARIES if common.on_gpu() else {}


def _multipliers() -> dict[str, Apart]:
    """Products by whom."""
    found = {BF16: Apart(_in_bfloat16, FP8Config())}
    for who, config in _served().items():
        found[who] = Apart(functools.partial(fp8_dot, config=config), config)
    if common.on_gpu():
        config = FP8Config(implementation="cuda")
        times = functools.partial(fp8_dot, config=config)
        found[NORMS_IN_CASTS] = InCasts(times, config)
    return found


def _layers(model: Model, results: Results, quick: bool) -> None:
    """Weights in float32, as those of training; scales as after some steps."""
    keys = jax.random.split(jax.random.key(2), 3)
    weights = _weights(model, keys[0])
    shape = (model.batch, model.length, model.width)
    x, d_out = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:])
    d_out = d_out * 2**-10
    first = {name: Fp8Scaling.create() for name in WEIGHTS}
    case = f"{model.name} / layer, forward and backward"
    running, made = {}, {}
    for who, by in _multipliers().items():

        def both(x: Any, w: Any, scales: Any, d_out: Any, by: Apart = by) -> Any:
            layer = functools.partial(_layer, model, by)
            out, pull = jax.vjp(layer, x, w, scales)
            return out, pull(d_out)

        try:
            lowered = jax.jit(both).lower(x, weights, first, d_out)
            run = lowered.compile(compiler_options=_options())
            scales = first
            if who != BF16:
                _, (_, _, report) = run(x, weights, first, d_out)
                scales = {n: first[n].update(report[n], by.config) for n in WEIGHTS}
            out, (d_x, d_w, _) = run(x, weights, scales, d_out)
            made[who] = out, d_x, {name: d_w[name] for name in WEIGHTS}
            if who != BF16:
                _check(results, case, who, made[who], made[BF16], MOST_OFF_LAYER)
        except Exception as error:
            results.fail(case, who, error)
            continue
        running[who] = functools.partial(run, x, weights, scales, d_out)
        _describe(results, case, who, run)
    made.clear()
    _add(
        results,
        case,
        median_of_each(running, results, case, quick, TURNS),
        3 * model.flops,
    )


def _describe(results: Results, case: str, who: str, compiled: Any) -> None:
    stats = compiled.memory_analysis()
    if stats is not None:
        held = stats.argument_size_in_bytes / 2**30
        results.add(case, who, "arguments", held, "GiB", show=False)
        results.add(case, who, "temporaries", stats.temp_size_in_bytes / 2**30, "GiB")
    count = count_products(compiled)
    results.add(case, who, "products in 8 bits", count.narrow, "")
    results.add(case, who, "other products", count.wide, "")


# ---- steps ---------------------------------------------------------------------------


def _steps(model: Model, results: Results, quick: bool) -> None:
    """Each by itself, for the memory's sake; not in turns, but on a hot chip."""
    tokens = jax.random.randint(
        jax.random.key(3), (model.batch, model.length + 1), 0, model.vocabulary
    )
    case = f"{model.name} / step with AdamW"
    seconds = {}
    for who, by in _multipliers().items():
        try:
            seconds[who] = _step(model, by, tokens, results, case, who)
        except Exception as error:
            results.fail(case, who, error)
        gc.collect()
    _add(results, case, seconds, 3 * model.flops)


def _step(
    model: Model,
    by: Apart,
    tokens: jax.Array,
    results: Results,
    case: str,
    who: str,
) -> float:
    def loss(params: Any, scalings: Any, tokens: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            return _layer(model, by, x, *own), None

        embedding = params["embedding"].astype(jnp.bfloat16)
        x = embedding[tokens[:, :-1]]
        body = jax.checkpoint(layer) if model.remat else layer
        x, _ = jax.lax.scan(body, x, (params["layers"], scalings))
        logits = (x @ embedding.T).astype(jnp.float32)
        scores = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()

    layers = (model.layers,)
    keys = jax.random.split(jax.random.key(4))
    table = jax.random.normal(keys[0], (model.vocabulary, model.width)) * 0.02
    params = {"embedding": table, "layers": _weights(model, keys[1], layers)}
    scalings = {name: Fp8Scaling.create(by.config, layers) for name in WEIGHTS}
    training = fp8_training(loss, optax.adamw(3e-4), by.config)
    state = jax.jit(training.init)(params, scalings)
    del params
    lowered = training.train_step.lower(state, tokens)
    step = lowered.compile(compiler_options=_options())
    _describe(results, case, who, step)
    times = []
    for _ in range(2 if not common.on_gpu() else WARM_UP + STEPS_TIMED):
        start = time.perf_counter()
        state, report = step(state, tokens)
        jax.block_until_ready(report)
        times.append(time.perf_counter() - start)
    results.add(case, who, "loss", float(report.loss), "", show=False)
    if not bool(report.applied):
        raise AssertionError("the step was skipped")
    return statistics.median(times[WARM_UP:] or times)


if __name__ == "__main__":
    common.main("training", bench, __doc__)
