"""The table of docs/precision.md beside its results file, and what was asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "precision.md").read_text()
FILE = "amd-epyc-2-cores/precision-quality-2026-11-30.json"
ROWS = json.loads((ROOT / "benchmarks" / "results" / FILE).read_text())["rows"]
FOUND = {
    (row["case"], row["implementation"].removeprefix("jax_kvblock, "), row["metric"]):
        row["value"]
    for row in ROWS
}  # fmt: skip
WAYS = {"by entropy": "entropy", "by gradients": "gradients", "by the loss": "loss"}

pytestmark = pytest.mark.cpu


def table() -> list[tuple[str, list[str]]]:
    """Bits, and the other cells of each row."""
    rows, bits = [], ""
    part = TEXT[TEXT.index("| bits a weight, with scales") :]
    for line in part.splitlines()[2:]:
        if not line.startswith("|"):
            return rows
        first, *rest = (cell.strip(" *") for cell in line.strip("|").split("|"))
        bits = first or bits
        rows.append((bits, rest))
    return rows


def test_every_row_is_the_files():
    assert FILE in TEXT and len(table()) == 12
    for bits, (_, plan, perplexity, nats, over) in table():
        uniform = re.match(r"uniform, (\d) bits", plan)
        name = f"uniform INT{uniform[1]}" if uniform else WAYS[plan]
        case = f"all / {float(uniform[1]) + 0.5 if uniform else bits} bits"
        digits = len(perplexity.partition(".")[2])
        assert float(perplexity) == round(FOUND[case, name, "perplexity"], digits)
        assert float(nats) == round(FOUND[case, name, "log excess"], 2)
        if not uniform:
            found = FOUND[case, name, "excess over uniform"]
            assert float(over) == round(found, len(over.partition(".")[2]))


def test_plans_are_as_good_as_was_asked_for():
    """At the same bytes: 0.7 of what the best plan of one format adds."""
    for way in ("gradients", "loss"):
        for bits in ("3.5", "4", "4.5"):
            assert FOUND[f"all / {bits} bits", way, "excess over uniform"] <= 0.7
