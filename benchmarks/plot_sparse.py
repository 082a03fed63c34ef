"""Draws the quality of selectors against what they cost, from results files.

    python benchmarks/plot_sparse.py sparse-quality-DATE.json -o docs/sparse_quality.svg
    python benchmarks/plot_sparse.py QUALITY --times sparse-DATE.json -o out.svg

Of several files the later ones count where both have a number.

Quality is the mean over texts and layers of `sparse_quality.py`. It is drawn against
the share of tiles that are listed, one point for each budget; with the results of
`bench_sparse.py`, against the time of selecting and attending to a tenth of the tiles.
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
from matplotlib.ticker import LogLocator

# Okabe and Ito's colours, which differ for colour-blind readers; markers do in grey.
SERIES = {
    "random": ("#999999", "x"),
    "block sparse": ("#999999", "+"),
    "strided": ("#CC79A7", "v"),
    "local + global": ("#E69F00", "^"),
    "streaming": ("#E69F00", "s"),
    "threshold, stride 8": ("#56B4E9", "<"),
    "threshold, stride 16": ("#0072B2", "o"),
    "threshold, stride 32": ("#56B4E9", ">"),
    "pooled, pieces of 8": ("#D55E00", "p"),
    "pooled, pieces of 16": ("#D55E00", "P"),
    "pooled, pieces of 32": ("#D55E00", "X"),
    "pooled, pieces of 64": ("#D55E00", "h"),
    "learned, tiles": ("#009E73", "d"),
    "learned, pieces of 32": ("#009E73", "D"),
    "oracle": ("#000000", "*"),
}
METRICS = {"recall": "recall of attention's mass", "error": "error of the output"}
TENTH = 0.9  # the ratio that is timed


def quality(document: dict[str, Any], length: int) -> dict[tuple[str, float], Any]:
    """By (selector, ratio): the metrics over all texts and layers."""
    found: dict[tuple[str, float], dict[str, float]] = {}
    for row in document["rows"]:
        case = re.fullmatch(rf"all, {length} tokens / (\S+) left out", row["case"])
        if case:
            name = row["implementation"].removeprefix(f"{OURS}, ")
            at = found.setdefault((name, float(case[1])), {})
            at[row["metric"]] = row["value"]
    return found


def milliseconds(document: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """The shape; of a selection and its attention together, by selector; and dense."""
    found, timed = {}, ""
    for row in document["rows"]:
        shape, _, work = row["case"].partition(" / ")
        if shape.startswith("selectors") and row["metric"] == "time":
            name = row["implementation"].removeprefix(OURS).removeprefix(", ")
            if work == "whole" or (work == "dense" and not name):
                found[name or "dense"], timed = row["value"], shape
    return timed.rpartition(", ")[0].partition(" B")[2], found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("quality", type=Path, nargs="+")
    parser.add_argument(
        "--times", type=Path, nargs="+", default=[], help="results of bench_sparse.py"
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens of the texts")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in options.quality]
    found: dict[tuple[str, float], Any] = {}
    for document in documents:
        found |= quality(document, options.length)
    if not found:
        parser.error(f"no rows of {options.length} tokens in {options.quality}")
    shape, times = "", None
    for path in options.times:
        documents.append(json.loads(path.read_text()))
        shape, more = milliseconds(documents[-1])
        times = (times or {}) | more
    if times is not None and "dense" not in times:
        parser.error(f"no times of selectors in {options.times}")
    both = {name for name, ratio in found if ratio == TENTH} & set(times or {})
    if unknown := both - set(SERIES):
        parser.error(f"SERIES has no colour for {sorted(unknown)}")
    # Stable ids, so that the same numbers make the same file.
    plt.rcParams["svg.hashsalt"] = "jax_kvblock"
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.6))
    for axes, (metric, words) in zip(panels, METRICS.items(), strict=True):
        for name, (colour, marker) in SERIES.items():
            if times is None:
                points = sorted(
                    (value["share of tiles"], value[metric])
                    for (who, _), value in found.items()
                    if who == name
                )
            elif name in times and (name, TENTH) in found:
                points = [(times[name], found[name, TENTH][metric])]
            else:
                continue
            if points:
                style = {"color": colour, "marker": marker, "linewidth": 1}
                axes.plot(*zip(*points, strict=True), label=name, **style)
        axes.set_ylabel(words)
        what = "share of the mask's tiles"
        if times is not None:
            what = f"ms to select and attend, B{shape}"
            axes.axvline(times["dense"], color="#000000", linewidth=1)
            axes.text(times["dense"], axes.get_ylim()[0], "dense ", ha="right")
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        axes.set_xlabel(what)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, loc="upper center", frameon=False)
    said = "; ".join(
        f"{one['device']}, {one['date']}, {one['commit'][:7]}" for one in documents
    )
    figure.text(0.5, 0.01, said, ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 0.84))
    figure.savefig(options.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
