"""A small GPT learns a real text twice, with flash attention and with plain attention.

Or on one device and on several: with --context-parallel the second run cuts every
sequence over that many devices, in zigzag. Or with --fp8 the second run's products with
weights are in 8 bits, forward and backward; a CPU rounds as a GPU does, no faster.

Both runs start from the same weights and see the same batches, in turns, so that a slow
second of the machine hits both. Their loss curves must agree; tokens a second and peak
bytes are printed for both. The text is the language reference that Python itself
carries (pydoc_data.topics, half a megabyte), read byte by byte.

    python examples/train_gpt.py                              # minutes on a CPU
    python examples/train_gpt.py --quick                      # a minute at most
    python examples/train_gpt.py --plot docs/gpt_loss.svg
    python examples/train_gpt.py --quick --context-parallel 4 --cpu-devices 4
    python examples/train_gpt.py --fp8 --plot docs/fp8_loss.svg
"""

import argparse
import dataclasses
import time
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock import flash_attention
from jax_kvblock.parallel import (
    compiler_options,
    context_parallel_attention,
    to_zigzag,
)
from jax_kvblock.training import Fp8Scaling, fp8_dot

RATE = 1e-3
# Rounding differs, and training amplifies it: nats that the curves may lie apart, and
# with products of 8 bits the share of the last losses' mean.
TOLERANCE = {"float32": 0.002, "bfloat16": 0.01}
OF_8_BITS = 0.01


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The peer: XLA writes the scores [B, N, T, T] to memory."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


@dataclasses.dataclass(frozen=True)
class Way:
    """One of the two ways to compute, and how the model's arrays lie for it."""

    name: str
    attend: gpt.Attention
    order: Any = None  # of the bytes, if it is not that of the text
    cut: NamedSharding | None = None
    product: gpt.Product = gpt.multiply
    scaled: bool = False  # whether products take scales


FLASH = Way("flash", partial(flash_attention, causal=True))
PLAIN = Way("plain", plain_attention)
NARROW = Way("8 bits", FLASH.attend, product=fp8_dot, scaled=True)


def over_devices(count: int, context: int) -> Way:
    """Every sequence cut over so many devices."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("context",))
    rows = P(None, "context")
    local = partial(
        context_parallel_attention,
        axis_name="context",
        causal=True,
        compiler_options=True,
    )
    attend = jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
    order = to_zigzag(jnp.arange(context), count, axis=0)
    return Way(f"{count} devices", attend, order, NamedSharding(mesh, rows))


def read_text() -> np.ndarray:
    """The bytes of Python's language reference."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(text.encode(), np.uint8)


@dataclasses.dataclass
class Run:
    """One of the two trainings."""

    name: str
    state: Any
    step: Any  # compiled: (state, step, batch) -> state, loss
    peak_bytes: int
    cut: NamedSharding | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def train(self, step: int, batch: jax.Array) -> None:
        count = jnp.int32(step)
        if self.cut is not None:
            count, batch = jax.device_put(
                (count, batch), NamedSharding(self.cut.mesh, P())
            )
        start = time.perf_counter()
        self.state, loss = self.step(self.state, count, batch)
        self.losses.append(float(loss))  # waits
        self.seconds.append(time.perf_counter() - start)


def start_run(way: Way, config: gpt.Config, batch: jax.Array, seed: int) -> Run:
    """Draws the weights and compiles the training step."""

    def loss(params: Any, scales: Any, batch: jax.Array) -> jax.Array:
        how = (way.attend, way.order, way.cut, way.product, scales)
        return gpt.loss(config, params, batch, *how)

    def step(state: Any, count: jax.Array, batch: jax.Array) -> Any:
        params, moments, scales = state
        value, (grads, reports) = jax.value_and_grad(loss, argnums=(0, 1))(
            params, scales, batch
        )
        params, moments = gpt.adam(params, grads, moments, count, RATE)
        if way.scaled:  # their cotangent is a report
            scales = {name: own.update(reports[name]) for name, own in scales.items()}
        return (params, moments, scales), value

    params = gpt.init(config, jax.random.key(seed))
    zeros = jax.tree.map(jnp.zeros_like, params)
    scales = None
    if way.scaled:
        stacked = Fp8Scaling.create(layers=(config.num_layers,))
        scales = dict.fromkeys(gpt.WEIGHTS, stacked)
    state = (params, (zeros, zeros), scales)
    if way.cut is not None:  # weights are whole on every device
        everywhere = NamedSharding(way.cut.mesh, P())
        state, batch = jax.device_put((state, batch), everywhere)
    how = compiler_options(way.cut.mesh.devices.flat) if way.cut else None
    jit = jax.jit(step, compiler_options=how)
    compiled = jit.lower(state, jnp.int32(0), batch).compile()
    stats = compiled.memory_analysis()
    peak = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    return Run(way.name, state, compiled, peak, way.cut)


def batches(text: np.ndarray, config: gpt.Config, steps: int, seed: int) -> Any:
    """`steps` batches [B, T + 1] from random places of the text."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - config.context, config.batch)
        rows = starts[:, None] + np.arange(config.context + 1)
        yield jnp.asarray(text[np.minimum(rows, len(text) - 1)], jnp.int32)


def draw_plot(runs: list[Run], title: str, path: Path) -> None:
    """Both curves; the first is dashed, so that what lies below shows."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "gpt", "svg.fonttype": "none"}
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    styles = (("--", 1.4, "#1f4e9c"), ("-", 3.5, "#f0a35e"))
    for run, (line, width, color) in reversed(list(zip(runs, styles, strict=True))):
        kinds = ("flash", "plain")
        label = f"{run.name} attention" if run.name in kinds else run.name
        axes.plot(run.losses, line, lw=width, color=color, label=label)
    axes.set(xlabel="step", ylabel="loss, nats a byte", title=title)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    print(f"wrote {path}")


def main() -> None:
    """Train both, compare; the exit code is 1 if the curves come apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, 40 steps")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--context", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=None, help="an .svg to write")
    parser.add_argument(
        "--dtype",
        choices=list(TOLERANCE),
        default=None,
        help="of q, k and v; the rest is float32 (so are these, but on a GPU)",
    )
    second_run = parser.add_mutually_exclusive_group()
    second_run.add_argument(
        "--context-parallel", type=int, default=None, help="devices of the second run"
    )
    parser.add_argument("--cpu-devices", type=int, default=None)
    second_run.add_argument(
        "--fp8", action="store_true", help="the second run's products are in 8 bits"
    )
    options = parser.parse_args()
    if options.cpu_devices:
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    if options.dtype is None:
        on_gpu = jax.default_backend() == "gpu"
        options.dtype = "bfloat16" if on_gpu else "float32"
    if options.quick:
        config, steps = gpt.Config(2, 2, 32, context=256, batch=4), 40
    else:
        config, steps = gpt.Config(4, 4, 32, context=1024, batch=2), 120
    config = dataclasses.replace(
        config,
        context=options.context or config.context,
        attention_dtype=jnp.dtype(options.dtype),
    )
    steps = options.steps or steps

    text = read_text()
    print(
        f"{len(text):,} bytes of Python's language reference; {config.num_layers} "
        f"layers of {config.num_heads} heads of {config.head_dim}, {config.batch} x "
        f"{config.context} tokens a step, attention in {options.dtype}, on "
        f"{jax.devices()[0].device_kind}"
    )
    sample = next(iter(batches(text, config, 1, options.seed)))
    second = PLAIN
    if options.context_parallel:
        second = over_devices(options.context_parallel, config.context)
    elif options.fp8:
        second = NARROW
    runs = [start_run(way, config, sample, options.seed) for way in (FLASH, second)]
    for step, batch in enumerate(batches(text, config, steps, options.seed)):
        for run in runs:
            run.train(step, batch)
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            both = ", ".join(f"{run.name} {run.losses[-1]:.4f}" for run in runs)
            print(f"step {step:4}: {both}", flush=True)

    flash, other = runs
    apart = float(np.abs(np.subtract(flash.losses, other.losses)).max())
    tokens = config.batch * config.context
    for run in runs:
        rate = tokens / float(np.median(run.seconds))
        print(
            f"{run.name:9} attention: {rate:9,.0f} tokens a second, "
            f"{run.peak_bytes / 2**20:7.1f} MiB at the peak of a step"
        )
    print(f"the loss curves lie at most {apart:.2g} nats apart")
    if options.plot is not None:
        title = f"GPT on {len(text) // 1000} kB of text, context {config.context}"
        draw_plot(runs, title, options.plot)

    learned = flash.losses[0] - flash.losses[-1]
    bar = TOLERANCE[options.dtype]
    if options.fp8:
        ends = [float(np.mean(run.losses[-10:])) for run in runs]
        apart, bar = abs(ends[1] / ends[0] - 1), OF_8_BITS
        print(f"the last ten losses are {100 * apart:.2f} % apart in their mean")
    if apart > bar or learned < 1:
        raise SystemExit("failed: the curves come apart, or nothing was learned")
    print("the same curve")


if __name__ == "__main__":
    main()
