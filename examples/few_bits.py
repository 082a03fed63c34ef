"""A small language model in few bits: which plan keeps most of it, for the same bytes.

The model learns the text that Python carries (pydoc_data.topics), a byte at a time.
Then it is stored in half of its bytes by S2's config, and in 3.5 bits a weight by each
strategy. A line says what each plan costs: how far, in nats a byte, what it predicts is
from what the model does. Last, the analysis says how few bits each weight bears.

    python examples/few_bits.py            # a longer training on a GPU
    python examples/few_bits.py --quick    # small on a GPU, too

It needs flax and optax (`pip install flax optax`).
"""

import argparse
import dataclasses
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_kvblock.precision import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    analyze_precision_opportunities,
    create_ultra_precision_module,
)

SEEN = 8  # bytes that the next one is told from
REDUCTION = 0.775  # of the bytes in 16 bits: what 3 bits for everything take is left
# Pieces with formats of their own: bytes of the text, and places among those seen.
PARTS = {"embedding.embedding": 4, "first.kernel": SEEN}

FORMATS = tuple(PrecisionFormat[f"INT{bits}"] for bits in (2, 3, 4, 5))
LOOK_AT_A_LOSS = (AllocationStrategy.GRADIENT_WEIGHTED, AllocationStrategy.LOSS_BASED)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model and its training."""

    embedding: int = 64
    hidden: int = 64
    batch: int = 128
    steps: int = 300


SMALL = Sizes()
LARGE = Sizes(hidden=256, batch=512, steps=1500)


class Model(nnx.Module):
    """The next byte from the last ones."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.embedding = nnx.Embed(256, sizes.embedding, rngs=rngs)
        self.first = nnx.Linear(SEEN * sizes.embedding, sizes.hidden, rngs=rngs)
        self.second = nnx.Linear(sizes.hidden, sizes.hidden, rngs=rngs)
        self.scores = nnx.Linear(sizes.hidden, 256, rngs=rngs)

    def __call__(self, seen: jax.Array) -> jax.Array:
        x = self.embedding(seen).reshape(*seen.shape[:-1], -1)
        x = nnx.gelu(self.first(x))
        return self.scores(x + nnx.gelu(self.second(x)))


def read_text() -> list[np.ndarray]:
    """The bytes of Python's language reference: nine tenths, and the rest."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    text = np.frombuffer(text.encode(), np.uint8)
    return np.split(text, [len(text) * 9 // 10])


def draw(text: np.ndarray, rng: np.random.Generator, count: int) -> jax.Array:
    """`[count, SEEN + 1]`: bytes, and the one that follows them."""
    starts = rng.integers(0, len(text) - SEEN, count)
    return jnp.asarray(text[starts[:, None] + np.arange(SEEN + 1)], jnp.int32)


def nats(scores: jax.Array, rows: jax.Array) -> jax.Array:
    """The mean cross entropy of the last bytes."""
    return optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, -1]).mean()


def train(sizes: Sizes, text: np.ndarray) -> Model:
    """The model after so many steps of Adam."""
    model, rng = Model(sizes), np.random.default_rng(0)
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, rows: jax.Array) -> None:
        grads = nnx.grad(lambda model: nats(model(rows[:, :-1]), rows))(model)
        optimizer.update(model, grads)

    for _ in range(sizes.steps):
        step(model, optimizer, draw(text, rng, sizes.batch))
    return model


def divergence(model: Any, other: Any, seen: jax.Array) -> jax.Array:
    """How far what another model predicts is from what this one does: KL, in nats."""
    log_p, log_q = (jax.nn.log_softmax(each(seen)) for each in (model, other))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1).mean()


def data_for(
    strategy: AllocationStrategy, model: Model, text: np.ndarray
) -> dict[str, Any]:
    """The loss and the batches that a strategy looks at, if it does.

    Gradients are those of next bytes, for many small batches. A loss that is measured
    is the divergence from the model itself, which has less noise.
    """
    graph, rng = nnx.graphdef(model), np.random.default_rng(1)

    def next_bytes(params: Any, rows: jax.Array) -> jax.Array:
        return nats(nnx.merge(graph, params)(rows[:, :-1]), rows)

    def moved(params: Any, rows: jax.Array) -> jax.Array:
        return divergence(model, nnx.merge(graph, params), rows[:, :-1])

    if strategy is AllocationStrategy.GRADIENT_WEIGHTED:
        batches = [draw(text, rng, 32) for _ in range(32)]
        return {"loss": next_bytes, "batches": batches}
    if strategy is AllocationStrategy.LOSS_BASED:
        return {"loss": moved, "batches": [draw(text, rng, 1024)]}
    return {}


def s2_config(model: Model, seen: jax.Array) -> None:
    """S2's config: 40 % of the bytes saved, by the entropy of the weights."""
    config = PrecisionConfig(
        allocation_strategy=AllocationStrategy.ENTROPY_BASED,
        target_memory_reduction=0.4,
        entropy_threshold=1.5,
    )
    module = create_ultra_precision_module(model, config)
    stats = module.get_precision_stats()
    cost = float(divergence(model, module, seen))
    print(f"Memory savings: {stats.memory_savings_ratio:.1%}, for {cost:.5f} nats")
    require(stats.memory_savings_ratio >= 0.4, "the target is reached")
    require(cost < 0.001, "8 bits cost next to nothing")


def strategies(model: Model, text: np.ndarray, seen: jax.Array) -> None:
    """Every strategy in as many bytes as 3 bits for everything take."""
    costs = {}
    for strategy in AllocationStrategy:
        config = PrecisionConfig(
            allocation_strategy=strategy,
            target_memory_reduction=REDUCTION,
            formats=FORMATS,
        )
        data = data_for(strategy, model, text)
        module = create_ultra_precision_module(model, config, parts=PARTS, **data)
        stats = module.get_precision_stats()
        costs[strategy] = float(divergence(model, module, seen))
        print(
            f"  {strategy.value:17} {stats.stored_bytes:9,} bytes, "
            f"{stats.bits_per_weight:.2f} bits a weight: {costs[strategy]:.4f} nats"
        )
        require(stats.memory_savings_ratio >= REDUCTION, "a budget is kept")
    most = max(costs[s] for s in LOOK_AT_A_LOSS)
    share = most / costs[AllocationStrategy.UNIFORM]
    print(f"plans that look at a loss cost at most {share:.0%} of the uniform one")
    require(share < 0.7, "a plan by the loss is 30 % better")
    entropy = costs[AllocationStrategy.ENTROPY_BASED]
    require(most < entropy, "a plan by the loss is better than one by entropy")


def analysis(model: Model, seen: jax.Array) -> None:
    """S2's `analyze_precision_opportunities`: what each weight bears by itself."""
    opportunities = analyze_precision_opportunities(model, sample_input=seen)
    print(f"Potential memory savings: {opportunities['potential_savings']:.1%}")
    print(f"Recommended optimizations: {len(opportunities['recommendations'])}")
    for one in opportunities["recommendations"]:
        error = f"outputs {one.output_error:.3f} apart"
        print(f"  {one.name} in {one.format.name}: {error}")


def main() -> None:
    """All of it; the exit code is 1 if a plan is not what it promises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small on GPUs, too")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    sizes = LARGE if on_gpu and not options.quick else SMALL
    learned, unseen = read_text()
    model = train(sizes, learned)
    rows = draw(unseen, np.random.default_rng(2), 4096)
    seen, cost = rows[:, :-1], float(nats(model(rows[:, :-1]), rows))
    print(f"the model: {cost:.3f} nats a byte of text that it has not seen")
    s2_config(model, seen)
    strategies(model, learned, seen)
    analysis(model, seen[:256])


def require(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"failed: {what}")


if __name__ == "__main__":
    main()
