"""A small model trains in 8 bits, as S2 shows it, beside the same in float32.

Its products with weights are in e4m3 and e5m2. Where nothing multiplies 8 bits, setting
up says so, and training goes on in float32. Then a model is converted, a step that is
not finite is skipped, another trainer goes on from a state bit for bit, and attention
is in 8 bits.

    python examples/eight_bits.py            # a CPU rounds as a GPU does, no faster
    python examples/eight_bits.py --quick    # small on a GPU, too

It needs flax and optax (`pip install flax optax`).
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_kvblock import flash_attention
from jax_kvblock.fp8 import FP8AttentionConfig, fp8_attention
from jax_kvblock.hardware import capabilities
from jax_kvblock.training import (
    FP8Config,
    FP8Format,
    FP8TrainingEngine,
    convert_model_to_fp8,
    create_fp8_trainer,
    fp8_layers,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model, its batches, and how long it trains."""

    width: int
    hidden: int
    batch: int
    steps: int


SMALL = Sizes(width=32, hidden=128, batch=256, steps=60)
LARGE = Sizes(width=128, hidden=1024, batch=2048, steps=150)
CLASSES = 8


class Model(nnx.Module):
    """Two layers in 8 bits, and a last one that stays as it is."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.up = nnx.Linear(sizes.width, sizes.hidden, rngs=rngs)
        self.down = nnx.Linear(sizes.hidden, sizes.width, rngs=rngs)
        self.head = nnx.Linear(sizes.width, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(x + self.down(nnx.gelu(self.up(x))))


def draw_batches(sizes: Sizes) -> list[tuple[jax.Array, jax.Array]]:
    """Inputs, and which of a few hidden directions each lies along most."""
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((sizes.width, CLASSES))
    xs = rng.standard_normal((8, sizes.batch, sizes.width))
    return [
        (
            jnp.asarray(x, jnp.float32),
            jnp.asarray(np.argmax(np.abs(x @ directions), -1)),
        )
        for x in xs
    ]


def train_in_float32(model: Model, batches: Any, steps: int) -> list[float]:
    """The peer, and the way to go on where there is no 8-bit unit."""
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, x: Any, y: Any) -> jax.Array:
        def loss_of(model: Model) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return losses.mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, *batches[i % 8])) for i in range(steps)]


def train_in_8_bits(
    trainer: FP8TrainingEngine, batches: Any, steps: int
) -> list[float]:
    """S2's loop. The optimizer is made once: its state is the trainer's."""
    optimizer, losses = optax.adam(3e-3), []
    with trainer:
        for i in range(steps):
            losses.append(float(trainer.training_step(*batches[i % 8])))
            trainer.optimizer_step(optimizer)
    return losses


def converted(sizes: Sizes, x: jax.Array) -> None:
    """`convert_model_to_fp8`: the same parameters, other products."""
    model = Model(sizes)
    copy = convert_model_to_fp8(model, inplace=False, exclude=["head"])
    apart = relative(copy(x), model(x))
    print(f"converted: {', '.join(fp8_layers(copy))}; outputs {apart:.3f} apart")
    require(1e-3 < apart < 0.1, "8 bits round by some percent, and no more")
    require(not fp8_layers(model), "inplace=False leaves the model as it is")


def skipped_and_restored(sizes: Sizes, batches: Any) -> None:
    """An infinity costs a step and nothing else; a state is all of a training."""
    optimizer, config = optax.adam(3e-3), FP8Config(FP8Format.HYBRID)
    trainers = [FP8TrainingEngine(Model(sizes, seed), config) for seed in (0, 1)]
    for trainer in trainers:
        trainer.setup_fp8_training()
    first, second = trainers
    x, y = batches[0]
    taken = []
    for inputs in (x, x.at[0, 0].set(jnp.inf), x):
        first.training_step(inputs, y)
        taken.append(first.optimizer_step(optimizer))
    known = first.get_training_statistics()
    print(f"Overflows: {known['overflows']}, Steps: {known['steps']}; taken: {taken}")
    require(taken == [True, False, True], "the step with an infinity is skipped")
    require((known["overflows"], known["steps"]) == (1, 2), "statistics count it")
    second.begin(optimizer)
    second.restore(first.state)
    losses = [float(trainer.training_step(x, y)) for trainer in trainers]
    print(f"restored: loss {losses[1]:.6f}, and {losses[0]:.6f} without")
    require(losses[0] == losses[1], "a restored training goes on bit for bit")


def attention(seed: int = 0) -> None:
    """`FP8AttentionConfig`: what 8 bits cost, and what is done about it."""
    keys = jax.random.split(jax.random.key(seed), 4)
    q, k, v = (jax.random.normal(key, (1, 256, 2, 64)) for key in keys[:3])
    k += 4 * jax.random.normal(keys[3], (1, 1, 2, 64))  # keys share a mean
    want = flash_attention(q, k, v, causal=True)
    bfloat16 = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    # A device without such kernels is an error, unless plain JAX is asked for by name.
    rows = {row.op: row.implementation for row in capabilities(jax.devices()[0])}
    by_name = None if rows["fp8_attention"].startswith("cuda") else "xla"
    errors = {}
    for name, config in {
        "as it is": FP8AttentionConfig(),
        "nothing but scales": FP8AttentionConfig(smooth_keys=False, rotate=False),
    }.items():
        out = fp8_attention(*bfloat16, config, causal=True, implementation=by_name)
        errors[name] = relative(out, want)
    print("attention:", ", ".join(f"{name} {e:.3f}" for name, e in errors.items()))
    require(errors["as it is"] < 0.06, "e4m3 rounds attention by some percent")
    require(errors["as it is"] < errors["nothing but scales"], "smooth keys help")


def relative(got: Any, want: Any) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def require(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"failed: {what}")


def main() -> None:
    """All of it; the exit code is 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small on GPUs, too")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    sizes = LARGE if on_gpu and not options.quick else SMALL
    batches = draw_batches(sizes)
    plain = train_in_float32(Model(sizes), batches, sizes.steps)
    print(f"float32: loss {plain[0]:.3f}, {plain[-1]:.3f} after {sizes.steps} steps")
    model = Model(sizes)
    try:
        trainer = create_fp8_trainer(
            model, FP8Format.E4M3, FP8Format.E5M2, exclude=["head"]
        )
        trainer.setup_fp8_training()
    except RuntimeError as error:
        print(f"FP8 training unavailable: {error}")
        again = train_in_float32(model, batches, sizes.steps)
        require(again == plain, "the model that was refused is as it was")
        print("trained in float32 instead")
        return
    narrow = train_in_8_bits(trainer, batches, sizes.steps)
    how = trainer.get_training_statistics()["implementation"]
    print(f"8 bits:  loss {narrow[0]:.3f}, {narrow[-1]:.3f}; products are {how}")
    require(plain[-1] < 0.7 * plain[0], "the model learns")
    require(abs(narrow[-1] - plain[-1]) < 0.05 * plain[0], "8 bits learn as float32")
    converted(sizes, batches[0][0])
    skipped_and_restored(sizes, batches)
    attention()


if __name__ == "__main__":
    main()
