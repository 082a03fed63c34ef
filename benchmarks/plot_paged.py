"""Draws paged attention's rates beside FlashInfer's from a results file.

    python benchmarks/plot_paged.py benchmarks/results/nvidia-h200 -o out.svg

Takes the newest results of paged_kernels.py. Of FlashInfer's paths a work has the
fastest one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from plot import newest

# Okabe and Ito's colours, as plot_attention.py has them.
OURS = ("jax_kvblock", "#0072B2")
PEER = ("FlashInfer, its fastest path", "#D55E00")
DENSE = ("jax_kvblock over dense arrays", "#999999")
PITCH = 0.27
# Titles, and which works a panel has by a part of their names.
PANELS = (
    ("one query a sequence, and drafts: TB/s of keys and values", ("B",)),
    ("chunks: TFLOP/s of the products", ("8 x",)),
)


def rates(document: dict[str, Any]) -> dict[str, dict[tuple[str, str], float]]:
    """By work, who has which rate."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for row in document["rows"]:
        if row["metric"] != "rate":
            continue
        work, name = found.setdefault(row["case"], {}), row["implementation"]
        if name.startswith("flashinfer"):
            work[PEER] = max(work.get(PEER, 0.0), row["value"])
        elif name == "jax_kvblock, dense":
            work[DENSE] = row["value"]
        elif name == "jax_kvblock":
            work[OURS] = row["value"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    document = newest(options.folder, "paged-kernels")
    if document is None:
        parser.error(f"no paged-kernels-*.json in {options.folder}")
    plt.rcParams["svg.hashsalt"] = "jax_kvblock"
    works = {
        title: {
            case: who
            for case, who in rates(document).items()
            if case.startswith(begins) and PEER in who
        }
        for title, begins in PANELS
    }
    figure, panels = plt.subplots(
        2, 1, figsize=(9, 10), height_ratios=[max(1, len(w)) for w in works.values()]
    )
    drawn: dict[str, Any] = {}
    for axes, (title, cases) in zip(panels, works.items(), strict=True):
        for i, who in enumerate(cases.values()):
            for j, (label, colour) in enumerate((OURS, PEER, DENSE)):
                if (label, colour) not in who:
                    continue
                y, value = i + (j - 1) * PITCH, who[label, colour]
                drawn[label] = axes.barh(y, value, 0.9 * PITCH, color=colour)
                axes.text(value, y, f" {value:.3g}", va="center", fontsize=6)
        axes.set_title(title, fontsize=10)
        axes.set_yticks(range(len(cases)), list(cases), fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()
    figure.legend(
        drawn.values(), drawn.keys(), ncols=3, loc="upper center", frameon=False
    )
    versions = document["versions"]
    about = f"{document['device']}, {document['date']}, commit {document['commit']}"
    about += f", FlashInfer {versions['flashinfer']}"
    figure.text(0.5, 0.005, about, ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.02, 1, 0.96))
    figure.savefig(options.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
