"""Attention over sequences that are too long for one device, by length.

The sequence is cut over all devices in zigzag: each has 1 / n of the queries, keys and
values, and of the gradients. A line is printed for each length: the time of a forward
pass and of both, the rate of all devices together, and the bytes that a device needs.
Some rows of the result are computed again by definition; gradients have to be finite,
and at the smallest length those of one device.

    python examples/long_context.py                    # on GPUs: up to 1,048,576 tokens
    python examples/long_context.py --cpu-devices 4    # small, on a CPU
    python examples/long_context.py --plot build/long_context.svg

With `--out DIR` times and bytes go to a record like those of the benchmarks, which are
beside the examples in the source tree.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kvblock import flash_attention
from jax_kvblock.parallel import (
    compiler_options,
    context_parallel_attention,
    from_zigzag,
    to_zigzag,
)

AXIS = "context"
# What a device may need beyond its parts of q, k, v, out and their gradients, as shares
# of those: two shards on their way, and sums in float32.
SPARE = 1.5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What one length is tried with."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: Any

    def flops(self, length: int) -> float:
        """Of a causal forward pass; a backward pass has 2.5 times as many."""
        return 2 * length * length * self.heads * self.head_dim

    def held(self, length: int) -> int:
        """Bytes of q, k, v, out and their gradients."""
        rows = 4 * self.heads + 4 * self.kv_heads
        return length * rows * self.head_dim * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass
class Line:
    """What came of one length."""

    length: int
    forward: float  # seconds
    both: float
    bytes: int  # that a device needs for both passes


def attention_over(mesh: Mesh, strategy: str) -> Any:
    """Causal attention of whole arrays `[1, S, N, D]` in zigzag order."""
    rows = P(None, AXIS)
    local = partial(
        context_parallel_attention,
        axis_name=AXIS,
        strategy=strategy,
        causal=True,
        compiler_options=True,
    )
    return jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)


def both_passes(attend: Any, q: Any, k: Any, v: Any, d_out: Any) -> Any:
    """out, and the gradients of q, k and v."""
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(d_out)


def draw(sizes: Sizes, length: int, mesh: Mesh, seed: int) -> list[jax.Array]:
    """q, k, v and the gradient of out, each device's part made where it lies."""
    place = NamedSharding(mesh, P(None, AXIS))
    made = []
    for i, heads in enumerate(
        (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    ):
        shape = (1, length, heads, sizes.head_dim)
        normal = jax.jit(
            partial(jax.random.normal, shape=shape, dtype=sizes.dtype),
            out_shardings=place,
        )
        made.append(normal(jax.random.key(4 * seed + i)))
    return made


def seconds_of(f: Any, *args: Any, times: int) -> tuple[float, Any]:
    """The median of some runs after a first one, or of one alone; and what it gave."""
    if times > 1:
        jax.block_until_ready(f(*args))
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        made = jax.block_until_ready(f(*args))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken), made


def worst_row(out: Any, q: Any, k: Any, v: Any, order: np.ndarray, rows: Any) -> float:
    """How far these rows of the result are from the definition, in float32."""
    group = q.shape[2] // k.shape[2]

    @jax.jit
    def definition(row: Any, position: Any, q: Any, k: Any, v: Any, order: Any) -> Any:
        one = q[0, row].astype(jnp.float32).reshape(k.shape[2], group, -1)
        scores = jnp.einsum("kgd,skd->kgs", one, k[0].astype(jnp.float32))
        seen = order <= position
        scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, -jnp.inf)
        p = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("kgs,skd->kgd", p, v[0].astype(jnp.float32))

    worst = 0.0
    for row in rows:
        want = definition(row, order[row], q, k, v, jnp.asarray(order))
        got = np.asarray(out[0, row], np.float32).reshape(want.shape)
        worst = max(worst, float(np.abs(got - np.asarray(want)).max()))
    return worst


@jax.jit
def are_finite(a: jax.Array) -> jax.Array:
    return jnp.isfinite(a).all()


def worst_gradient(mesh: Mesh, slopes: Any, *given: jax.Array) -> float:
    """How far gradients are from one device's, beside the largest of each array.

    given: q, k, v and the gradient of out, in zigzag.
    """
    device, parts = mesh.devices.flat[0], mesh.size
    whole = [from_zigzag(jax.device_put(a, device), parts) for a in given]
    attend = partial(flash_attention, causal=True)
    _, wants = jax.jit(partial(both_passes, attend))(*whole)
    worst = 0.0
    for slope, want in zip(slopes, wants, strict=True):
        got = from_zigzag(jax.device_put(slope, device), parts)
        off = jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32)).max()
        worst = max(worst, float(off / jnp.abs(want).max()))
    return worst


def try_length(
    sizes: Sizes, length: int, mesh: Mesh, options: Any, first: bool = False
) -> Line:
    """Times and bytes of one length; raises if a row or a gradient is wrong.

    first: gradients are held against one device's, too, which has to have the room.
    """
    q, k, v, d_out = draw(sizes, length, mesh, options.seed)
    attend = attention_over(mesh, options.strategy)
    jit = partial(jax.jit, compiler_options=compiler_options(mesh.devices.flat))
    forward = jit(attend).lower(q, k, v).compile()
    compiled = jit(partial(both_passes, attend)).lower(q, k, v, d_out).compile()
    stats = compiled.memory_analysis()
    needed = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
    )
    times = 1 if length > 600_000 else 3 if length > 200_000 else 7
    forward_time, out = seconds_of(forward, q, k, v, times=times)
    both_time, (_, slopes) = seconds_of(compiled, q, k, v, d_out, times=times)
    line = Line(length, forward_time, both_time, needed)
    order = np.asarray(to_zigzag(jnp.arange(length), mesh.size, axis=0))
    rows = np.random.default_rng(0).integers(0, length, 4)
    off = worst_row(out, q, k, v, order, rows)
    bar = 3e-2 if jnp.dtype(sizes.dtype).itemsize == 2 else 1e-4
    if off > bar:
        raise SystemExit(f"failed: a row is off by {off:.3g} at length {length}")
    if not all(are_finite(slope) for slope in slopes):
        raise SystemExit(f"failed: a gradient is not finite at length {length}")
    if first:
        off = worst_gradient(mesh, slopes, q, k, v, d_out)
        if off > bar:
            raise SystemExit(f"failed: a gradient is off by {off:.3g} of its largest")
    return line


def record(lines: list[Line], sizes: Sizes, who: str, options: Any) -> Path:
    """Writes each length's times and bytes, as benchmarks do."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
    from support import common

    results = common.Results()
    for line in lines:
        heads = f"H{sizes.heads}/{sizes.kv_heads}"
        case = f"B1 {heads} S{line.length} D{sizes.head_dim} causal"
        who_ran = f"{common.OURS}, {who}"
        for work, metric, value, unit in (
            ("forward", "time", line.forward * 1e3, "ms"),
            ("both", "time", line.both * 1e3, "ms"),
            ("both", "memory", line.bytes / 2**20, "MiB a device"),
        ):
            results.add(f"{case} / {work}", who_ran, metric, value, unit, show=False)
    return common.write(results.document(options), "long-context", options.out)


def draw_plot(lines: list[Line], sizes: Sizes, devices: int, path: Path) -> None:
    """Times and bytes by length, beside lines of the second and first power."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "long context", "svg.fonttype": "none"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    lengths = [line.length for line in lines]
    styles = {"both": ("o-", "forward and backward"), "forward": ("s-", "forward")}
    for name, (style, label) in styles.items():
        left.plot(lengths, [getattr(line, name) for line in lines], style, label=label)
    left.set(xlabel="tokens", ylabel="seconds", title=f"time on {devices} devices")
    right.plot(lengths, [line.bytes / 2**30 for line in lines], "o-", label="needed")
    held = [sizes.held(n) / devices / 2**30 for n in lengths]
    right.plot(lengths, held, ":", label="q, k, v, out, gradients")
    right.set(xlabel="tokens", ylabel="GiB a device", title="memory")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    print(f"wrote {path}")


def main() -> None:
    """Every length; the exit code is 1 if a row is wrong or memory grows too fast."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=None)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=None, help="all unless given")
    parser.add_argument("--cpu-devices", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=None, help="an .svg to write")
    parser.add_argument("--out", type=Path, default=None, help="where a record goes")
    parser.add_argument("--commit", help="the record's, where git is not at hand")
    options = parser.parse_args()
    if options.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    devices = jax.devices()[: options.devices]
    mesh = Mesh(np.array(devices), (AXIS,))
    if jax.default_backend() == "gpu":
        sizes = Sizes(32, 8, 128, jnp.bfloat16)
        lengths = options.lengths or [2**n for n in range(15, 21)]
    else:
        sizes = Sizes(4, 2, 16, jnp.float32)
        lengths = options.lengths or [512, 1024, 2048]
    print(
        f"causal attention, {sizes.heads} query and {sizes.kv_heads} key heads of "
        f"{sizes.head_dim}, over {len(devices)} x {devices[0].device_kind}"
    )
    print("    tokens   forward ms      both ms   TFLOP/s   MiB a device")
    lines = []
    for length in lengths:
        first = length == min(lengths)
        line = try_length(sizes, length, mesh, options, first)
        lines.append(line)
        rate = 3.5 * sizes.flops(length) / line.both / 1e12
        print(
            f"{length:10,} {line.forward * 1e3:12.2f} {line.both * 1e3:12.2f} "
            f"{rate:9.2f} {line.bytes / 2**20:14.1f}",
            flush=True,
        )
    if options.plot is not None:
        draw_plot(lines, sizes, len(devices), options.plot)
    if options.out is not None:
        who = f"{len(devices)}, {options.strategy}"
        print(f"wrote {record(lines, sizes, who, options)}")
    print("rows and gradients that were looked at are right")
    if jax.default_backend() != "gpu":  # blocks of plain JAX need room of their own
        return
    most = max(line.bytes * len(devices) / sizes.held(line.length) for line in lines)
    if most > 1 + SPARE:
        raise SystemExit(f"failed: a device needs {most:.2f} times what it holds")
    print("memory grows as the length does")


if __name__ == "__main__":
    main()
