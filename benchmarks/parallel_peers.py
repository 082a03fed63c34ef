"""Attention over a sequence that is cut over GPUs, as others have it.

    python benchmarks/parallel_peers.py --devices 2 --lengths 16384 32768 131072

The work of `bench_parallel.py`, without its documents, on N GPUs of one machine, and
ours beside those in JAX:

- cuDNN in JAX, all_gather (rows in zigzag) and ulysses (rows in their order):
  `support/peers_in_jax.py`;
- `context_parallel` in torch, one process a GPU: `support/peers_in_torch.py`.

Efficiency is time on one / (n × time on n), by the same kernels. Before anything is
timed, it is compared with one device's results, gradients too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The files beside this one, also under `python -P`.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
from bench_parallel import DIM, HEADS, KV_HEADS
from support import common
from support.common import Results
from support.peers_in_jax import case_name, jax_name, report, time_in_jax

LENGTHS = (16384, 32768, 131072)
WAYS = ("all_gather", "ulysses")
BACKENDS = ("flash", "cudnn")  # torch's
TORCH_LIMIT = 300  # seconds for all of torch
RANK = Path(__file__).resolve().parent / "support" / "peers_in_torch.py"


def main() -> None:
    parser = common.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--backends", nargs="*", choices=BACKENDS, default=["flash"])
    options = parser.parse_args()
    if options.quick:
        options.lengths = [1024]
    # Before jax looks at the GPUs, of which it would take most of the memory.
    from_torch = _in_torch(options) if options.backends else []
    bench = functools.partial(_bench, from_torch)
    outcome = common.run_bench("parallel-peers", bench, options)
    for failure in outcome[1]:
        print(f"did not run: {failure}")
    sys.exit(common.exit_status([outcome], options))


def _bench(
    from_torch: list[dict[str, Any]], options: argparse.Namespace, results: Results
) -> None:
    for said in from_torch:
        where = case_name(said["tokens"]), said["who"]
        if "refused" in said:
            print(f"{where[0]:42} {where[1]:25} REFUSED: {said['refused'][:300]}")
        elif "failed" in said:
            results.fail(*where, said["failed"])
        else:
            report(results, *where, said["seconds"], said["one"], options.devices)
    results.save()
    if len(jax.devices()) < options.devices:
        error = f"{options.devices} devices are asked for, {len(jax.devices())} here"
        results.fail("all", jax_name(), error)
        return
    for tokens in options.lengths:
        time_in_jax(tokens, options, results)
        gc.collect()
        results.save()


# ---- torch, in processes of its own --------------------------------------------------


def _in_torch(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What rank 0 said, and why it said no more."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = {
            "heads": (HEADS, KV_HEADS, DIM),
            "n": options.devices,
            "lengths": list(options.lengths),
            "backends": list(options.backends),
            "quick": options.quick,
            "folder": name,
        }
        with contextlib.ExitStack() as stack:
            ranks = []
            for rank in range(options.devices):
                errors = stack.enter_context(_errors(folder, rank).open("w"))
                words = json.dumps({"rank": rank} | asked)
                command = [sys.executable, "-P", str(RANK), words]
                ranks.append(
                    subprocess.Popen(command, stdout=errors, stderr=subprocess.STDOUT)
                )
            problem = _await(ranks, folder)
        rows = folder / "said"
        lines = rows.read_text().splitlines() if rows.exists() else []
    said = [json.loads(line) for line in lines]
    if problem:
        said.append({"tokens": None, "who": "peer torch", "failed": problem})
    return said


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"errors-{rank}"


def _await(ranks: list[subprocess.Popen[bytes]], folder: Path) -> str:
    """Waits for all; ends them when one has failed, or time is up."""

    def failed() -> list[int]:
        return [i for i, rank in enumerate(ranks) if rank.poll()]

    until = time.monotonic() + TORCH_LIMIT
    try:
        while any(rank.poll() is None for rank in ranks):
            if failed():
                break
            if time.monotonic() > until:
                return f"not done after {TORCH_LIMIT} s"
            time.sleep(0.1)
        if not failed():
            return ""
        first = failed()[0]
        lines = _errors(folder, first).read_text().splitlines()
        told = [line for line in lines if "Error" in line] or lines or ["no message"]
        return f"rank {first}: {told[-1]}"
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


if __name__ == "__main__":
    main()
