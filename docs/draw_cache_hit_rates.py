"""Draws the hit rates of docs/cache_events.md from docs/cache_hit_rates.json.

    python docs/draw_cache_hit_rates.py            # writes it beside this file
    python docs/draw_cache_hit_rates.py --out DIR

`python -m jax_kvblock simulate` writes the numbers (`--json`). The same numbers give
the same file, byte for byte.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pictures import CARD, DARK, FRAME, LEFT, RIGHT, Picture, main

RESULTS = Path(__file__).parent / "cache_hit_rates.json"
GREY = "#8a97ad"
POLICIES = {"lru": DARK[0], "lfu": DARK[1]}
TOP, BOTTOM, GAP = 118, 318, 60
HIGHEST = 0.7  # of the scale
SHARES = (0.0, 0.2, 0.4, 0.6)


def draw_hit_rates() -> Picture:
    """A panel for each trace: capacity to the right, the share of blocks found up."""
    traces: dict[str, list[dict[str, Any]]] = json.loads(RESULTS.read_text())
    picture = Picture(
        "How much a larger pool finds again",
        "Mooncake's traces, one request after the other. Share of the prompts' blocks "
        "that were found, by the pool's capacity.",
        384,
    )
    width = (RIGHT - LEFT - GAP * len(traces)) / len(traces)
    for i, (name, rows) in enumerate(traces.items()):
        _panel(picture, LEFT + GAP + i * (width + GAP), width, name, rows)
    picture.text(LEFT, 366, "capacity in blocks of 512 tokens, both policies:", "s")
    for i, (policy, colour) in enumerate(POLICIES.items()):
        x = LEFT + 290 + 70 * i
        _mark(picture, policy, x, 362)
        _line(picture, f"M{x - 12} 362H{x + 12}", colour)
        picture.text(x + 18, 366, policy, "m")
    return picture


def _panel(
    picture: Picture, x: float, width: float, name: str, rows: list[dict[str, Any]]
) -> None:
    bounded = [row for row in rows if row["capacity"] is not None]
    capacities = sorted({row["capacity"] for row in bounded})
    first, last = math.log(capacities[0]), math.log(capacities[-1])

    def across(capacity: int) -> float:
        return round(x + width * (math.log(capacity) - first) / (last - first), 1)

    best = max(_rate(row) for row in rows if row["capacity"] is None)
    title = name.removesuffix("_trace.jsonl")
    picture.text(x, TOP - 22, title, "e")
    asked = f"{rows[0]['num_requests']:,} requests, {rows[0]['num_blocks']:,} blocks"
    picture.text(x + 100, TOP - 22, asked, "s")
    for share in SHARES:
        _line(picture, f"M{x:g} {_up(share)}H{x + width:g}", FRAME)
        picture.text(x - 8, _up(share) + 4, f"{share:.0%}", "k", "end")
    for capacity in capacities[::2]:
        picture.text(across(capacity), BOTTOM + 20, f"{capacity:,}", "k", "middle")
    _line(picture, f"M{x:g} {_up(best)}H{x + width:g}", GREY, "4 3")
    picture.text(x + 4, _up(best) + 16, f"{best:.1%} without a bound", "s")
    for policy, colour in POLICIES.items():
        points = [
            (across(row["capacity"]), _up(_rate(row)))
            for row in bounded
            if row["policy"] == policy
        ]
        path = "L".join(f"{at:g} {up:g}" for at, up in points)
        _line(picture, f"M{path}", colour)
        for point in points:
            _mark(picture, policy, *point)


def _line(picture: Picture, path: str, colour: str, dashes: str = "none") -> None:
    picture.parts.append(
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.4" '
        f'stroke-dasharray="{dashes}"/>'
    )


def _mark(picture: Picture, policy: str, x: float, y: float) -> None:
    """Filled for one policy, and smaller and open for the other, which lies on it."""
    if policy == "lru":
        picture.box(x - 5, y - 5, 10, 10, CARD, POLICIES[policy])
    else:
        picture.box(x - 2, y - 2, 4, 4, POLICIES[policy])


def _rate(row: dict[str, Any]) -> float:
    return float(row["num_hits"] / row["num_blocks"])


def _up(share: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * share / HIGHEST, 1)


PICTURES = {"cache_hit_rates.svg": draw_hit_rates}


if __name__ == "__main__":
    main(__doc__.splitlines()[0], PICTURES)
