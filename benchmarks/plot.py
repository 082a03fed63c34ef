"""Draws the README's picture of bandwidth from results files.

    python benchmarks/plot.py benchmarks/results/nvidia-h200 -o docs/bandwidth.svg

Takes the newest layouts (or cpu) and host results of the folder; a number is drawn only
beside the ceiling and the peers of its own run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import bars
import matplotlib
from bars import OURS, best

matplotlib.use("svg")
import matplotlib.pyplot as plt

SHAPE = "llama-8b, 16 tokens"
SHAPE_IN_WORDS = "32 layers, 8 KV heads of 128, bfloat16, 16 tokens to a block"

# What is drawn: the works, in this order, under these words.
LAYOUT_WORK = {
    "NHD to universal": "NHD → universal",
    "universal to NHD": "universal → NHD",
    "HND to universal": "HND → universal",
    "NHD to HND": "NHD → HND",
    "gather, NHD pool": "gather from an NHD pool",
    "scatter, NHD pool": "scatter into an NHD pool",
}
HOST_WORK = {
    "to host, scatter to universal pool": "device → pinned pool",
    "to device, gather from universal pool": "pinned pool → device",
}

# Okabe and Ito's colours, which differ for colour-blind readers and in grey.
COLOURS = {
    OURS: "#0072B2",
    "xla": "#E69F00",
    "kvbm": "#999999",
    "gather and device_put in jit": "#56B4E9",
    "device_put in jit": "#56B4E9",
    "jax.device_put": "#CC79A7",
}
NAMES = {
    "xla": "XLA, best of plain jnp",
    "kvbm": "KVBM kernels",
    "gather and device_put in jit": "device_put inside a jit",
    "device_put in jit": "device_put inside a jit",
    "jax.device_put": "eager jax.device_put",
}
OTHER = "#009E73"  # a peer without a colour of its own


def newest(folder: Path, *names: str) -> dict[str, Any] | None:
    """The latest results of the first of these benchmarks that has any."""
    for name in names:
        files = sorted(folder.glob(f"{name}-[0-9]*.json"))
        if files:
            document: dict[str, Any] = json.loads(files[-1].read_text())
            return document
    return None


def competitors(rows: list[dict[str, Any]], case: str) -> dict[str, float]:
    """The best bandwidth of each project on a case, ours first.

    Ours is the plain row. "xla loop" is a reading aid of the results, not drawn.
    """
    names = {
        row["implementation"].split(",")[0]
        for row in rows
        if row["case"] == case and row["metric"] == "bandwidth"
    } - {OURS, "xla loop"}
    found = {
        row["implementation"]: row["value"]
        for row in rows
        if (row["case"], row["implementation"], row["metric"])
        == (case, OURS, "bandwidth")
    }
    order = list(COLOURS)
    for name in sorted(names, key=lambda n: (order.index(n) if n in order else 99, n)):
        value = best(rows, case, name)
        if value is not None:
            found[name] = value
    return found


def draw(
    axes: Any, document: dict[str, Any], works: dict[str, str], ceilings: list[str]
) -> None:
    """One panel: a group of horizontal bars for each work, the ceiling as a line."""
    rows = document["rows"]
    position, ticks, unit = 0.0, [], "TB/s"
    top = max(filter(None, (best(rows, c) for c in ceilings)), default=0.0)
    for work, label in works.items():
        case = f"{SHAPE} / {work}"
        found = competitors(rows, case)
        if not found:
            continue
        unit = next(r["unit"] for r in rows if (r["case"], r["metric"]) ==
                    (case, "bandwidth"))  # fmt: skip
        start = position
        for name, value in found.items():
            axes.barh(position, value, 0.86, color=COLOURS.get(name, OTHER),
                      label=NAMES.get(name, name))  # fmt: skip
            _label(axes, position, value, top, name)
            position += 1
        ticks.append(((start + position - 1) / 2, label))
        position += 0.6
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    axes.set_ylim(position - 0.9, -0.7)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    longest = max((bar.get_width() for bar in axes.patches), default=0)
    axes.set_xlim(0, 1.04 * max(top, longest))
    axes.axvline(top, color="black", linestyle=(0, (4, 3)), linewidth=1)
    on_gpu = document["versions"]["platform"] == "gpu"
    what = "cudaMemcpyAsync" if on_gpu else "np.copyto"
    axes.text(top, -0.8, f"{what}, {top:.3g} {unit}", ha="right", va="bottom",
              fontsize=8)  # fmt: skip
    ways = "one way" if works is HOST_WORK else "read + write"
    axes.set_xlabel(f"{unit}, {ways}", fontsize=9)


def _label(axes: Any, position: float, value: float, top: float, name: str) -> None:
    """The number, inside a long bar, so that it stays clear of the ceiling's line."""
    inside = value > 0.2 * top
    axes.text(
        value + top * (-0.008 if inside else 0.008), position,
        f"{value:.2f}" if value < 10 else f"{value:.1f}",
        ha="right" if inside else "left", va="center_baseline", fontsize=8,
        color="white" if inside and name == OURS else "black",
        weight="bold" if name == OURS else "normal",
    )  # fmt: skip


def legend(figure: Any) -> None:
    """One legend for all panels, each name once."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center",
        ncols=min(3, len(entries)), frameon=False, fontsize=9,
    )  # fmt: skip


def plot(folder: Path, output: Path) -> None:
    layouts = newest(folder, "layouts", "cpu")
    host = newest(folder, "host")
    panels = [
        (document, works, ceilings, title)
        for document, works, ceilings, title in (
            (layouts, LAYOUT_WORK, [bars.DEVICE_COPY], "In device memory"),
            (host, HOST_WORK, [bars.TO_HOST, bars.TO_DEVICE],
             "Over the link to pinned host memory"),
        )
        if document is not None
    ]  # fmt: skip
    if not panels:
        raise SystemExit(f"{folder} has no layouts, cpu or host results")
    plt.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": "kvblock"})
    heights = [len(works) for _, works, _, _ in panels]
    figure, grid = plt.subplots(
        len(panels), 1, figsize=(8, 1.6 + 0.62 * sum(heights)), squeeze=False,
        height_ratios=heights, layout="constrained",
    )  # fmt: skip
    for axes, (document, works, ceilings, title) in zip(
        grid[:, 0], panels, strict=True
    ):
        draw(axes, document, works, ceilings)
        axes.set_title(title, loc="left", fontsize=10, weight="bold", pad=14)
    first = panels[0][0]
    figure.suptitle(
        f"Moving KV blocks on one {first['device']}: {SHAPE_IN_WORDS}", fontsize=10
    )
    legend(figure)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Without a date the same numbers give the same file.
    figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None,
                   facecolor="white", dpi=130)  # fmt: skip
    print(f"wrote {output}, {output.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="benchmarks/results/<device>")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/bandwidth.svg"))
    options = parser.parse_args()
    plot(options.folder, options.output)
