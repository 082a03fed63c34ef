"""Draws what plans of few bits add to a model's loss, from a results file.

    python benchmarks/plot_precision.py RESULTS.json -o docs/precision_quality.svg

One line for each way to give bits, of the results of `precision_quality.py`: nats a
token above the model as it is, of all texts together.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
from bars import OURS

matplotlib.use("svg")
import matplotlib.pyplot as plt

# Okabe and Ito's colours, which differ for colour-blind readers; markers do in grey.
SERIES = {
    "entropy": ("#E69F00", "^"),
    "uniform": ("#000000", "s"),
    "loss": ("#0072B2", "o"),
    "gradients": ("#009E73", "D"),
}


def lines(document: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Bits a weight and nats, by way."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in document["rows"]:
        case = re.fullmatch(r"all / (\S+) bits", row["case"])
        if case and row["metric"] == "log excess":
            name = row["implementation"].removeprefix(f"{OURS}, ").split()[0]
            found.setdefault(name, []).append((float(case[1]), row["value"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("results", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    document = json.loads(options.results.read_text())
    found = lines(document)
    # Stable ids, so that the same numbers make the same file.
    plt.rcParams["svg.hashsalt"] = "jax_kvblock"
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, (colour, marker) in SERIES.items():
        points = sorted(point for point in found.get(name, []) if point[0] > 3)
        if points:
            style = {"color": colour, "marker": marker, "linewidth": 1.5}
            axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set_yscale("log")
    axes.set_xlabel("bits a weight, scales and offsets included")
    axes.set_ylabel("nats a token above the model as it is")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    said = f"{document['device']}, {document['date']}, commit {document['commit']}"
    figure.text(0.5, 0.01, said, ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(options.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
