"""Runs the benchmarks that make sense on this machine, one results file for each.

    python benchmarks/run.py                 all of them; results in benchmarks/results/
    python benchmarks/run.py --quick         a minute, tiny sizes: do the scripts work?
    python benchmarks/run.py --only host     some of them
    python benchmarks/run.py --check         exit with 1 when a bar is missed

The exit status is 1 when something did not run, or came out wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# The files beside this one, also under `python -P`.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import bars
import bench_append
import bench_attention
import bench_attention_cpu
import bench_attention_dropout
import bench_attention_float32
import bench_attention_fp8
import bench_cache_host
import bench_cpu
import bench_decode
import bench_decode_step
import bench_disk
import bench_fusion
import bench_host
import bench_kernels
import bench_layouts
import bench_objects
import bench_paged
import bench_paged_cpu
import bench_parallel
import bench_parallel_cache
import bench_serve
import bench_sparse
import bench_tiers
import bench_training
import ceilings
from support import common

BENCHES: dict[str, common.Bench] = {
    "ceilings": ceilings.bench,
    "objects": bench_objects.bench,
    "cache-host": bench_cache_host.bench,
    "host": bench_host.bench,
    "tiers": bench_tiers.bench,
    "layouts": bench_layouts.bench,
    "cpu": bench_cpu.bench,
    "append": bench_append.bench,
    "attention": bench_attention.bench,
    "attention-float32": bench_attention_float32.bench,
    "attention-fp8": bench_attention_fp8.bench,
    "attention-dropout": bench_attention_dropout.bench,
    "decode": bench_decode.bench,
    "decode-step": bench_decode_step.bench,
    "paged": bench_paged.bench,
    "kernels": bench_kernels.bench,
    "fusion": bench_fusion.bench,
    "parallel": bench_parallel.bench,
    "parallel-cache": bench_parallel_cache.bench,
    "serve": bench_serve.bench,
    "disk": bench_disk.bench,
    "sparse": bench_sparse.bench,
    "training": bench_training.bench,
    "attention-cpu": bench_attention_cpu.bench,
    "paged-cpu": bench_paged_cpu.bench,
}
# Each benchmark measures the ceilings it needs itself, in its own run.
ON_GPU = (
    *("objects", "cache-host", "host", "tiers", "layouts", "append", "attention"),
    *(
        "attention-float32",
        "attention-fp8",
        "attention-dropout",
        "decode",
        "decode-step",
        "paged",
        "kernels",
        "fusion",
        "parallel",
        "parallel-cache",
        "serve",
    ),
    "sparse",
    "training",
)
ON_CPU = (
    *("objects", "cache-host", "host", "disk", "serve", "cpu", "attention-cpu"),
    "paged-cpu",
)


def main() -> int:
    usual = ON_GPU if common.on_gpu() else ON_CPU
    parser = common.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--only", default=",".join(usual), help=f"some of {','.join(BENCHES)}"
    )
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in BENCHES]:
        parser.error(f"--only: no benchmark {unknown[0]!r}; take of {list(BENCHES)}")
    documents = [common.run_bench(name, BENCHES[name], options) for name in chosen]

    print("\n== summary ==")
    for name, (document, failures) in zip(chosen, documents, strict=True):
        verdicts = bars.judge(document)
        met = sum(verdict.met for verdict in verdicts)
        print(f"{name}: {met} of {len(verdicts)} bars met, {len(failures)} did not run")
        print("\n".join(bars.summary(verdicts)))
        for failure in failures:
            print(f"  did not run: {failure}")
    return common.exit_status(documents, options)


if __name__ == "__main__":
    sys.exit(main())
