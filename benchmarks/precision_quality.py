"""How good plans of few bits are on a real model: SmolLM2-135M reading real text.

    python benchmarks/precision_quality.py [--model FILE.gguf]

The model is `examples/smollm2/`, and its weights are fetched unless a file is given.
These come in 4 and 8 bits with other groups and scales than ours; the model that they
dequantize to is the reference here, and what is measured is what our formats add to its
errors. The texts are those that come with Python: the language's reference, modules'
source, its licence, a list of news. Plans are made on other texts than those that they
are judged by.

Every plan has the same quantizer, group size and formats, and as many bytes: those of
one format for all weights. A plan's perplexity is that of all texts together, "excess"
is it less the reference's, and "log excess" their logarithms' difference, in nats a
token; "excess over uniform" is beside the best plan of one format that has as few
bytes.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import common, reading
from support.common import OURS, Results
from support.reading import Config, finish_layer, project_qkv, read_logits

from jax_kvblock import flash_attention
from jax_kvblock.precision import (
    PrecisionFormat,
    PrecisionPlan,
    Sensitivity,
    dequantize,
    entropy_sensitivity,
    find_weights,
    gradient_sensitivity,
    loss_sensitivity,
    make_plan,
    uniform_plan,
)

GROUP = 64
FORMATS = tuple(PrecisionFormat[f"INT{bits}"] for bits in (2, 3, 4, 5, 6))
UNIFORM = FORMATS[:3]
# Of a weight on average, with scales and offsets: those of INT3, of INT4, and between.
BITS = (3.5, 4.0, 4.5)
PIECES = 16  # that the rows of the embedding are cut into
LEARN = ("reference 0", "argparse inspect", "reference 2", "zipfile")
LEARN += ("reference 6", "tarfile")
JUDGE = ("reference 8", "reference 11", "typing ast", "smtplib mailbox")
JUDGE += ("file LICENSE.txt", "file idlelib/NEWS.txt")


# ---- the model -----------------------------------------------------------------------


def scores(config: Config, params: Any, tokens: jax.Array) -> jax.Array:
    """Log-probabilities `[T, vocabulary]` of what follows tokens `[T]`."""
    at = jnp.arange(len(tokens))

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        q, k, v = project_qkv(config, weights, x, at)
        attended = flash_attention(q[None], k[None], v[None], causal=True)[0]
        return finish_layer(config, weights, x, attended), None

    start = params["embedding"][tokens]
    x, _ = jax.lax.scan(jax.checkpoint(layer), start, params["layers"])
    return jax.nn.log_softmax(read_logits(config, params, x))


def next_token_loss(config: Config, params: Any, tokens: jax.Array) -> jax.Array:
    """Nats a token, of tokens `[T + 1]`."""
    found = scores(config, params, tokens[:-1])
    return -jnp.take_along_axis(found, tokens[1:, None], 1).mean()


def divergence(config: Config, params: Any, batch: Any) -> jax.Array:
    """Nats a token between the reference's predictions and these.

    A batch is tokens `[B, T]` and the reference's log-probabilities of what follows.
    """
    tokens, want = batch
    found = jax.vmap(functools.partial(scores, config, params))(tokens)
    return (jnp.exp(want) * (want - found)).sum(-1).mean()


# ---- what is measured ----------------------------------------------------------------


def windows(model: reading.Model, name: str, count: int, length: int) -> jax.Array:
    """Tokens `[count, length]`, from the beginning of a text."""
    tokens = model.tokens(reading.text_of(name))[: count * length]
    if len(tokens) < count * length:
        raise ValueError(
            f"{name}: {len(tokens)} tokens, {count * length} are asked for"
        )
    return jnp.asarray(tokens).reshape(count, length)


def sensitivities(
    model: reading.Model, weights: Any, options: argparse.Namespace
) -> Iterator[tuple[str, Sensitivity]]:
    config, params, formats = model.config, model.params, options.formats
    shared: dict[str, Any] = {"group_size": GROUP}
    yield "entropy", entropy_sensitivity(params, weights, formats, **shared)
    loss = functools.partial(next_token_loss, config)
    count, length = options.sequences, options.length
    batches = [
        tokens
        for name in LEARN[: options.texts]
        for tokens in windows(model, name, count, length + 1)
    ]
    yield (
        "gradients",
        gradient_sensitivity(loss, params, batches, weights, formats, **shared),
    )
    if options.no_loss:
        return
    few = [windows(model, name, 1, options.measured)[0] for name in LEARN[::2]]
    tokens = jnp.stack(few)
    want = jax.jit(jax.vmap(functools.partial(scores, config, params)))(tokens)
    apart = functools.partial(divergence, config)
    batch = [(tokens, want)]
    yield "loss", loss_sensitivity(apart, params, batch, weights, formats, **shared)


class Judge:
    """Reads the texts with a model's weights in another form."""

    def __init__(self, model: reading.Model, options: argparse.Namespace) -> None:
        self.texts = {
            name: windows(model, name, options.windows, options.window + 1)
            for name in options.judge
        }
        self.loss = jax.jit(functools.partial(next_token_loss, model.config))
        self.reference = self.read(model.params)

    def read(self, params: Any) -> dict[str, float]:
        """Nats a token, by text."""
        return {
            name: float(np.mean([self.loss(params, one) for one in tokens]))
            for name, tokens in self.texts.items()
        }

    def add(self, results: Results, bits: float, who: str, nats: Any) -> None:
        def row(text: str, found: float, want: float) -> None:
            case = f"{text} / {bits:g} bits"
            for metric, value, unit in (
                ("perplexity", math.exp(found), ""),
                ("excess", math.exp(found) - math.exp(want), ""),
                ("log excess", found - want, "nats"),
            ):
                shown = text == "all"
                results.add(case, f"{OURS}, {who}", metric, value, unit, show=shown)

        for text, found in nats.items():
            row(text, found, self.reference[text])
        row("all", _mean(nats), _mean(self.reference))

    def excess(self, nats: Any) -> float:
        return math.exp(_mean(nats)) - math.exp(_mean(self.reference))


def _mean(nats: dict[str, float]) -> float:
    return float(np.mean(list(nats.values())))  # texts are of one length


def bench(options: argparse.Namespace, results: Results) -> None:
    model = reading.random_model() if options.quick else reading.smollm2(options.model)
    results.versions |= {"model": model.name, **dict(_sources(options))}
    params = model.params
    weights = find_weights(
        params,
        group_size=GROUP,
        is_weight=lambda name, array: not name.endswith("norm"),
        parts={"embedding": PIECES},
    )
    numbers = sum(weight.size * weight.parts for weight in weights)
    rest = sum(x.nbytes for x in jax.tree.leaves(params)) - numbers * 4
    judge = Judge(model, options)
    for text, nats in judge.reference.items():
        results.add(f"{text} / 32 bits", model.name, "perplexity", math.exp(nats), "")
    whole = math.exp(_mean(judge.reference))
    results.add("all / 32 bits", model.name, "perplexity", whole, "")

    def measure(plan: PrecisionPlan) -> dict[str, float]:
        stored = plan.apply(params)
        kept = sum(leaf.nbytes for leaf in jax.tree.leaves(stored))
        assert kept == plan.nbytes + rest, "what is stored is not what was planned"
        return judge.read(dequantize(stored))

    uniform = {}
    for format in UNIFORM:
        plan = uniform_plan(weights, format, group_size=GROUP)
        uniform[plan.nbytes] = (format.name, measure(plan))
        at = plan.bits_per_weight
        judge.add(results, at, f"uniform {format.name}", uniform[plan.nbytes][1])
        case = f"all / {at:g} bits"
        results.add(case, f"{OURS}, uniform {format.name}", "stored", plan.nbytes, "B")
        results.save()
    best = {
        bits: min(
            judge.excess(nats)
            for size, (_, nats) in uniform.items()
            if size <= numbers * bits / 8
        )
        for bits in BITS
    }
    start = time.perf_counter()
    for who, found in sensitivities(model, weights, options):
        spent = time.perf_counter() - start
        print(f"{who}: {spent:.0f} s to know what each part costs", flush=True)
        for bits in BITS:
            plan = make_plan(params, found, int(numbers * bits / 8) + rest)
            nats = measure(plan)
            judge.add(results, bits, who, nats)
            case, name = f"all / {bits:g} bits", f"{OURS}, {who}"
            results.add(case, name, "stored", plan.nbytes, "B")
            ratio = judge.excess(nats) / best[bits]
            results.add(case, name, "excess over uniform", ratio, "")
            for weight, formats in zip(plan.weights, plan.formats, strict=True):
                mean = float(np.mean([format.bits for format in formats]))
                what = f"bits of {weight.name}"
                results.add(case, name, what, mean, "", show=False)
                digits = "".join(str(format.bits) for format in formats)
                print(f"  {weight.name:14}{digits}", flush=True)
            results.save()
        start = time.perf_counter()


def _sources(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """What the texts were, by the beginnings of their SHA-256."""
    for name in (*LEARN[: options.texts], *options.judge):
        text = reading.text_of(name).encode()
        yield f"text {name}", hashlib.sha256(text).hexdigest()[:12]


def main() -> None:
    parser = common.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, help="the GGUF file, if it is here")
    parser.add_argument("--judge", nargs="*", default=JUDGE, help="texts, by name")
    parser.add_argument("--windows", type=int, default=2, help="of each of these")
    parser.add_argument("--window", type=int, default=512, help="tokens of each window")
    parser.add_argument("--texts", type=int, default=len(LEARN), help="to learn from")
    parser.add_argument("--sequences", type=int, default=16, help="of each of these")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument(
        "--measured", type=int, default=64, help="of three texts, tokens"
    )
    parser.add_argument("--no-loss", action="store_true", help="leave its plans out")
    options = parser.parse_args()
    options.formats = FORMATS
    if options.quick:
        options.formats = UNIFORM
        options.judge, options.windows, options.window = JUDGE[1:3], 1, 128
        options.texts, options.sequences, options.length = 2, 2, 64
        options.measured = 32
    outcome = common.run_bench("precision-quality", bench, options)
    sys.exit(common.exit_status([outcome], options))


if __name__ == "__main__":
    main()
