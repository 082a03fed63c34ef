"""A small GPT learns a real text twice, with flash attention and with plain attention.

Or on one device and on several: with --context-parallel the second run cuts every
sequence over that many devices, in zigzag. Or with --fp8 three runs, whose products
with weights are in bfloat16, in 8 bits and in float32, forward and backward, all by
optax.adamw; what 8 bits lose is told beside bfloat16. A CPU rounds as a GPU does, no
faster. With `--out DIR` their losses go to a record like those of the benchmarks,
`DIR/<device>/training-loss-<date>.json`.

All runs start from the same weights and see the same batches, in turns, so that a slow
second of the machine hits each. Their loss curves must agree; tokens a second and peak
bytes are printed for each. The text is the language reference that Python itself
carries (pydoc_data.topics, half a megabyte), read byte by byte.

    python examples/train_gpt.py                              # minutes on a CPU
    python examples/train_gpt.py --quick                      # a minute at most
    python examples/train_gpt.py --plot docs/gpt_loss.svg
    python examples/train_gpt.py --quick --context-parallel 4 --cpu-devices 4
    python examples/train_gpt.py --fp8 --plot docs/fp8_loss.svg   # 300 steps
    python examples/train_gpt.py --fp8 --large # a billion parameters, on a GPU

--fp8 needs optax (`pip install optax`).
"""

import argparse
import dataclasses
import sys
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
from jax_kvblock.training import Fp8Scaling, Fp8State, fp8_dot, fp8_training

RATE, LARGE_RATE = 1e-3, 2e-4  # of learning, in small models and in large ones
# Rounding differs, and training amplifies it: nats that the curves may lie apart, and
# with products of 8 bits the share of the last losses' mean in bfloat16.
TOLERANCE = {"float32": 0.002, "bfloat16": 0.01}
OF_8_BITS = 0.005


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The peer: XLA writes the scores [B, N, T, T] to memory."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


@dataclasses.dataclass(frozen=True)
class Way:
    """One of the ways to compute, and how the model's arrays lie for it."""

    name: str
    attend: gpt.Attention
    order: Any = None  # of the bytes, if it is not that of the text
    cut: NamedSharding | None = None
    product: gpt.Product = gpt.multiply
    optax: bool = False  # whether the optimizer is optax's, and not that of gpt.py


def in_bfloat16(x: jax.Array) -> jax.Array:
    """Rounded for certain: XLA may leave out two casts that follow each other."""
    return jax.lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16)


def multiply_in_bfloat16(x: jax.Array, weights: jax.Array, scales: Any) -> jax.Array:
    """Both rounded to bfloat16, and so are the result and a gradient's products."""
    made = in_bfloat16(x) @ in_bfloat16(weights)
    return in_bfloat16(made).astype(x.dtype)


FLASH = Way("flash", partial(flash_attention, causal=True))
PLAIN = Way("plain", plain_attention)
BY_PRODUCTS = [
    Way(name, FLASH.attend, product=product, optax=True)
    for name, product in (
        ("bfloat16", multiply_in_bfloat16),
        ("8 bits", fp8_dot),
        ("float32", gpt.multiply),
    )
]


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
    """One of the trainings."""

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


def start_run(
    way: Way, config: gpt.Config, rate: float, batch: jax.Array, seed: int
) -> Run:
    """Draws the weights and compiles the training step."""

    def loss(params: Any, scales: Any, batch: jax.Array) -> jax.Array:
        how = (way.attend, way.order, way.cut, way.product, scales)
        return gpt.loss(config, params, batch, *how)

    params = gpt.init(config, jax.random.key(seed))
    begin = by_optax if way.optax else by_hand
    state, step = begin(way, config, rate, loss, params)
    if way.cut is not None:  # weights are whole on every device
        everywhere = NamedSharding(way.cut.mesh, P())
        state, batch = jax.device_put((state, batch), everywhere)
    how = compiler_options(way.cut.mesh.devices.flat) if way.cut else None
    jit = jax.jit(step, compiler_options=how)
    compiled = jit.lower(state, jnp.int32(0), batch).compile()
    stats = compiled.memory_analysis()
    peak = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    return Run(way.name, state, compiled, peak, way.cut)


def by_hand(way: Way, config: gpt.Config, rate: float, loss: Any, params: Any) -> Any:
    """The first state and a step, by the optimizer that gpt.py has."""

    def step(state: Any, count: jax.Array, batch: jax.Array) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, None, batch)
        return gpt.adam(params, grads, moments, count, rate), value

    zeros = jax.tree.map(jnp.zeros_like, params)
    return (params, (zeros, zeros)), step


def by_optax(way: Way, config: gpt.Config, rate: float, loss: Any, params: Any) -> Any:
    """The first state and a step by AdamW; with products of 8 bits `fp8_training`'s."""
    import optax

    rising = optax.linear_schedule(rate / 60, rate, 59)
    clip = optax.clip_by_global_norm(1.0)
    optimizer = optax.chain(clip, optax.adamw(rising, b2=0.99))
    if way.product is fp8_dot:
        training = fp8_training(loss, optimizer)
        stacked = Fp8Scaling.create(layers=(config.num_layers,))
        state = training.init(params, dict.fromkeys(gpt.WEIGHTS, stacked))

        def narrow_step(state: Any, count: jax.Array, batch: jax.Array) -> Any:
            state, report = training.train_step(state, batch)
            return state, report.loss

        return state, narrow_step

    def step(state: Any, count: jax.Array, batch: jax.Array) -> Any:
        params, own = state
        value, grads = jax.value_and_grad(loss)(params, None, batch)
        updates, own = optimizer.update(grads, own, params)
        return (optax.apply_updates(params, updates), own), value

    return (params, optimizer.init(params)), step


def batches(text: np.ndarray, config: gpt.Config, steps: int, seed: int) -> Any:
    """`steps` batches [B, T + 1] from random places of the text."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - config.context, config.batch)
        rows = starts[:, None] + np.arange(config.context + 1)
        yield jnp.asarray(text[np.minimum(rows, len(text) - 1)], jnp.int32)


def record(config: gpt.Config, runs: list[Run], out: Path, commit: str | None) -> Path:
    """Writes each run's losses, and which steps 8 bits took, as benchmarks do."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
    from support import common

    results = common.Results()
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    case = (
        f"GPT of {sum(x.size for x in jax.tree.leaves(params)):,} parameters, "
        f"{config.num_layers} layers {config.width} wide, {config.batch} x "
        f"{config.context} tokens / {len(runs[0].losses)} steps"
    )
    for run in runs:
        who = f"{common.OURS}, {run.name}"
        last = float(np.mean(run.losses[-10:]))
        results.add(case, who, "mean of the last ten losses", last, "nats", show=False)
        for step, loss in enumerate(run.losses):
            results.add(case, who, f"loss of step {step}", loss, "nats", show=False)
        if isinstance(run.state, Fp8State):
            for count in ("steps", "overflows", "saturated"):
                value = float(getattr(run.state, count))
                results.add(case, who, count, value, "", show=False)
    document = results.document(argparse.Namespace(commit=commit))
    return common.write(document, "training-loss", out)


def draw_plot(runs: list[Run], title: str, path: Path) -> None:
    """All curves; the first is dashed, so that what lies below shows."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "gpt", "svg.fonttype": "none"}
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    styles = [("--", 1.4, "#1f4e9c"), ("-", 3.5, "#f0a35e"), ("-", 6.0, "#d9d9d9")]
    for run, (line, width, color) in reversed(list(zip(runs, styles, strict=False))):
        kinds = ("flash", "plain")
        label = f"{run.name} attention" if run.name in kinds else run.name
        axes.plot(run.losses, line, lw=width, color=color, label=label)
    axes.set(xlabel="step", ylabel="loss, nats a byte", title=title)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    print(f"wrote {path}")


def main() -> None:
    """Train, compare; the exit code is 1 if the curves come apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a tiny model, 40 steps")
    size.add_argument("--large", action="store_true", help="a billion parameters")
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
        "--fp8", action="store_true", help="products in bfloat16, 8 bits and float32"
    )
    parser.add_argument("--out", type=Path, default=None, help="where a record goes")
    parser.add_argument("--commit", help="the record's, where git is not at hand")
    options = parser.parse_args()
    if options.cpu_devices:
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    if options.dtype is None:
        on_gpu = jax.default_backend() == "gpu"
        options.dtype = "bfloat16" if on_gpu else "float32"
    if options.quick:
        context = 128 if options.fp8 else 256
        config, steps = gpt.Config(2, 2, 32, context=context, batch=4), 40
    else:
        heads = (20, 16, 128) if options.large else (4, 4, 32)
        config = gpt.Config(*heads, context=1024, batch=4 if options.large else 2)
        steps = 300 if options.fp8 else 120
    rate = LARGE_RATE if options.large else RATE
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
    ways = [FLASH, PLAIN]
    if options.context_parallel:
        ways = [FLASH, over_devices(options.context_parallel, config.context)]
    elif options.fp8:
        ways = BY_PRODUCTS
    runs = [start_run(way, config, rate, sample, options.seed) for way in ways]
    for step, batch in enumerate(batches(text, config, steps, options.seed)):
        for run in runs:
            run.train(step, batch)
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            all_of = ", ".join(f"{run.name} {run.losses[-1]:.4f}" for run in runs)
            print(f"step {step:4}: {all_of}", flush=True)

    first, other = runs[:2]
    apart = float(np.abs(np.subtract(first.losses, other.losses)).max())
    tokens = config.batch * config.context
    what = "products" if options.fp8 else "attention"
    for run in runs:
        rate = tokens / float(np.median(run.seconds))
        print(
            f"{run.name:9} {what}: {rate:9,.0f} tokens a second, "
            f"{run.peak_bytes / 2**20:7.1f} MiB at the peak of a step"
        )
    print(f"the loss curves lie at most {apart:.2g} nats apart")
    if options.out is not None:
        print(f"wrote {record(config, runs, options.out, options.commit)}")
    if options.plot is not None:
        title = f"GPT on {len(text) // 1000} kB of text, context {config.context}"
        draw_plot(runs, title, options.plot)

    learned = first.losses[0] - first.losses[-1]
    bar = TOLERANCE[options.dtype]
    if options.fp8:
        means = {run.name: float(np.mean(run.losses[-10:])) for run in runs}
        for run in runs[1:]:
            more = means[run.name] / means["bfloat16"] - 1
            print(f"the last ten losses: {run.name} {more:+.3%} of bfloat16's mean")
        print(f"8 bits: {other.state.steps} steps, {other.state.overflows} skipped")
        apart, bar = abs(means["8 bits"] / means["bfloat16"] - 1), OF_8_BITS
    if apart > bar or learned < 1:
        raise SystemExit("failed: the curves come apart, or nothing was learned")
    print("the same curve")


if __name__ == "__main__":
    main()
