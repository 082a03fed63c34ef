"""Draws the README's picture of attention from a results file.

    python benchmarks/plot_attention.py benchmarks/results/nvidia-h200 -o out.svg

Every number comes from the newest attention run of the folder, peers included.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
from plot import newest

matplotlib.use("svg")
import matplotlib.pyplot as plt

# Okabe and Ito's colours, which differ for colour-blind readers and in grey.
SERIES = {
    "jax_kvblock": ("jax_kvblock", "#0072B2"),
    "flash attention 3": ("FlashAttention-3, dew-flash-attn", "#009E73"),
    "flash-attn3-jax": ("the same, flash-attn3-jax", "#66C2A5"),
    "cudnn in jax": ("cuDNN in JAX", "#999999"),
    "tokamax": ("tokamax", "#CC79A7"),
    "pallas mosaic gpu": ("Pallas' example", "#D55E00"),
    "jax_kvblock, cuda": ("jax_kvblock, sm_80 kernels", "#56B4E9"),
    "torch flash attention 2": ("FlashAttention-2 in PyTorch", "#E69F00"),
}
PITCH = 0.88 / len(SERIES)  # of the bars of one shape
SHAPES = (
    "B2 H16 S8192 D128 full",
    "B2 H16 S8192 D128 causal",
    "B4 H16 S4096 D128 causal",
    "B32 H16 S512 D128 causal",
    "B2 H32 S8192 D64 causal",
    "B2 H32/8 S8192 D128 causal",
    "B2 H8 S8192 D256 causal",
)


def rate(document: dict[str, Any], case: str, name: str) -> float | None:
    wanted = (case, name, "rate")
    for row in document["rows"]:
        if (row["case"], row["implementation"], row["metric"]) == wanted:
            return row["value"]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument(
        "--without",
        metavar="CASE",
        action="append",
        default=[],
        help="a case (as 'SHAPE / backward') whose kernel has changed since the run",
    )
    options = parser.parse_args()
    document = newest(options.folder, "attention")
    if document is None:
        parser.error(f"no attention-*.json in {options.folder}")
    # Stable ids, so that the same numbers make the same file.
    plt.rcParams["svg.hashsalt"] = "jax_kvblock"
    figure, panels = plt.subplots(1, 2, figsize=(11, 9.5), sharey=True)
    drawn: dict[str, Any] = {}
    for axes, metric in zip(panels, ("forward", "backward"), strict=True):
        for i, shape in enumerate(SHAPES):
            if f"{shape} / {metric}" in options.without:
                axes.text(
                    6, i, "changed since, to be measured", va="center", fontsize=8
                )
                continue
            there = [
                (label, colour, value)
                for name, (label, colour) in SERIES.items()
                if (value := rate(document, f"{shape} / {metric}", name)) is not None
            ]
            for j, (label, colour, value) in enumerate(there):
                y = i + (j - (len(there) - 1) / 2) * PITCH
                drawn[label] = axes.barh(y, value, 0.9 * PITCH, color=colour)
                axes.text(value + 6, y, f"{value:.0f}", va="center", fontsize=6)
        axes.set_title(metric, fontsize=10)
        axes.set_xlabel("TFLOP/s, bfloat16 (causal counts half)")
        axes.set_yticks(range(len(SHAPES)), SHAPES, fontsize=8.5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    labels = [label for label, _ in SERIES.values() if label in drawn]
    handles = [drawn[label] for label in labels]
    figure.legend(handles, labels, ncols=4, loc="upper center", frameon=False)
    versions = document["versions"]
    figure.text(
        0.5,
        0.005,
        f"{document['device']}, {document['date']}, commit {document['commit']}, "
        f"jax {versions['jax']}",
        ha="center",
        fontsize=8,
        color="#555555",
    )
    figure.tight_layout(rect=(0, 0.02, 1, 0.93))
    figure.savefig(options.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
