"""What there is to run on, what serves each op there, and the largest batch that fits.

Bytes are read from compiled programs, which nobody runs to find out. Then two things
are held to be true: the batch that was found runs, and the next one would take more
than the limit.

    python examples/which_hardware.py            # sized for what there is to run on
    python examples/which_hardware.py --quick    # small on a GPU, too

It needs flax (`pip install flax`).
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_kvblock.hardware import (
    HardwareAbstractionLayer,
    detect_available_devices,
)


def show_devices() -> dict[str, list[jax.Device]]:
    """S2's `detect_available_devices`, and what serves each op on the first of each."""
    devices = detect_available_devices()
    for platform, found in devices.items():
        print(f"{platform}: {len(found)} x {found[0].device_kind}")
        for row in HardwareAbstractionLayer(found).implementations():
            print(f"  {row.op:50} {row.implementation}")
    return devices


def largest_batch(
    hal: HardwareAbstractionLayer, model: Any, sample: Any, limit: int
) -> int:
    """S2's `get_optimal_batch_size`, and what is known of the next size."""
    found = hal.find_batch_size(model, sample, limit=limit)
    print("  " + str(found).replace("\n", "\n  "))
    if found.usage.total > found.limit:
        raise SystemExit("failed: the batch does not fit")
    if found.next_usage is not None and found.next_usage.total <= found.limit:
        raise SystemExit("failed: the next batch fits, too")
    if hal.get_optimal_batch_size(model, sample, limit=limit) != found.size:
        raise SystemExit("failed: two answers to one question")
    return found.size


def main() -> None:
    """All of it; the exit code is 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small on GPUs, too")
    options = parser.parse_args()
    small = jax.default_backend() != "gpu" or options.quick
    tokens, width, limit = (512, 64, 2**26) if small else (4096, 1024, 2**33)

    devices = show_devices()
    (platform, *_) = devices  # those of the default backend come first
    hal = HardwareAbstractionLayer(devices[platform][:1])

    model = nnx.MultiHeadAttention(8, width, decode=False, rngs=nnx.Rngs(0))
    optimized_model = hal.optimize_for_hardware(model)
    sample = jax.ShapeDtypeStruct((1, tokens, width), jnp.float32)
    sizes = []
    for name, each in (("as flax has it", model), ("optimized", optimized_model)):
        usage = hal.estimate_memory_usage(each, 4, sample)
        print(f"{name}, batch of 4: {usage}")
        sizes.append(largest_batch(hal, each, sample, limit))
    plain, better = sizes
    print(f"batches that fit: {plain} as flax has it, {better} optimized")
    if better < 2 * plain:
        raise SystemExit("failed: without scores in memory twice the batch must fit")

    x = jax.random.normal(jax.random.key(0), (2, tokens, width))
    outs = [np.asarray(each(x), np.float64) for each in (model, optimized_model)]
    apart = np.linalg.norm(outs[0] - outs[1]) / np.linalg.norm(outs[0])
    print(f"outputs {apart:.1e} apart")
    if apart > 5e-3:
        raise SystemExit("failed: the optimized model computes something else")
    graph, state = nnx.split(optimized_model)
    x = jnp.ones((better, tokens, width))
    out = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    jax.block_until_ready(out)
    print(f"the batch of {better} runs")


if __name__ == "__main__":
    main()
