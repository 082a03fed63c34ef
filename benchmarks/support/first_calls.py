"""Times the first calls of a fresh process; prints seconds as one line of JSON.

`bench_objects.py` runs it, since in its own process everything is loaded already.
"""

from __future__ import annotations

import json
import statistics
import time

import jax.numpy as jnp


def main() -> None:
    jnp.zeros(8).block_until_ready()  # jax's own start is not ours to count
    start = time.perf_counter()
    import jax_kvblock

    times = {"import jax_kvblock": time.perf_counter() - start}

    def convert(n: int) -> float:
        x = jnp.zeros((n, 4, 2, 16, 8, 128), jnp.bfloat16).block_until_ready()
        start = time.perf_counter()
        jax_kvblock.block_to_universal(x).block_until_ready()
        return time.perf_counter() - start

    times["first conversion of a process"] = convert(1)
    times["first conversion of another shape"] = convert(2)
    times["conversion of a known shape, 512 KiB"] = statistics.median(
        convert(2) for _ in range(50)
    )
    print(json.dumps(times))


if __name__ == "__main__":
    main()
