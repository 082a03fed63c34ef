"""The tables of docs/fp8_training.md beside their results files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TEXT = (ROOT / "docs" / "fp8_training.md").read_text()
H200 = "nvidia-h200/training-2026-11-28.json"
PRODUCTS = "nvidia-h200/training-products-2026-11-29.json"
STEPS = "nvidia-h200/training-steps-2026-11-30.json"
CASTS = "nvidia-h200/training-casts-2026-11-29.json"
H100 = "nvidia-h100-80gb-hbm3/training-2026-11-26.json"

pytestmark = pytest.mark.cpu


def ratios(file: str, metric: str) -> dict[tuple[str, str], float]:
    """By case and implementation, with this package's name taken off."""
    rows = json.loads((RESULTS / file).read_text())["rows"]
    return {
        (row["case"], row["implementation"].removeprefix("jax_kvblock").strip(", ")):
            row["value"]
        for row in rows if row["metric"] == metric
    }  # fmt: skip


def cells(label: str) -> list[str]:
    (row,) = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", TEXT, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def numbers(cell: str) -> list[float]:
    return [float(x) for x in re.findall(r"\b\d\.\d\d\b", cell)]


PRODUCT = "8192 x 8192 x 8192 / product"
LAYER = "d 4096, 16384 tokens / layer, forward and backward"
STEP = "1B parameters, 16384 tokens / step with AdamW"
REMAT = "1B, remat, 16384 tokens / step with AdamW"
XLA, NORMS = "casts by xla", "norms in the casts"
# By the row's label: where and what its numbers are of, and how many an H100 has.
OVER_BFLOAT16 = {
    "a product 8192 x 8192 x 8192, quantized": (PRODUCTS, [(PRODUCT, "quantized")], 1),
    "with both operands cast": (
        PRODUCTS,
        [(PRODUCT, "with quantization"), (PRODUCT, f"{XLA}, with quantization")], 1,
    ),
    "a layer, d 4096, 16,384 tokens, forward and backward": (
        PRODUCTS, [(LAYER, ""), (LAYER, XLA)], 1,
    ),
    "the same, norms by `fp8_norm_dot`": (PRODUCTS, [(LAYER, NORMS)], 0),
    "a step with AdamW, 1B parameters, 16,384 tokens": (
        STEPS, [(STEP, ""), (STEP, XLA)], 1,
    ),
    "a step, norms by `fp8_norm_dot`": (STEPS, [(STEP, NORMS)], 0),
    "a step with remat; and norms by `fp8_norm_dot`": (
        H200, [(REMAT, ""), (REMAT, NORMS)], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("label", OVER_BFLOAT16)
def test_products_layers_and_steps(label):
    measured, of, on_h100 = OVER_BFLOAT16[label]
    _, h200, h100 = cells(label)
    for cell, file, own in ((h200, measured, of), (h100, H100, of[:on_h100])):
        found = ratios(file, "over bfloat16")
        assert numbers(cell) == [round(found[one], 2) for one in own]


BF16 = [f"{shape} / cast" for shape in (
    "8192 x 8192 bfloat16 e4m3", "16384 x 4096 bfloat16 e5m2",
    "16384 x 14336 bfloat16 e4m3",
)]  # fmt: skip
NORM, WIDTHS = "16384 x {} bfloat16, of {} / norm and cast", (2048, 4096, 8192)
# By the row's label: what its numbers are of, and whether they are the least and most.
OVER_A_COPY = {
    "casts, both orders and largest size, of bfloat16": (BF16, True),
    "of float32": (["4096 x 14336 float32 e4m3 / cast"], False),
    "RMSNorm of a sum, and casts: widths 2,048, 4,096, 8,192": (
        [NORM.format(width, "a sum") for width in WIDTHS], False,
    ),
    "RMSNorm of x, and casts": ([NORM.format(width, "x") for width in WIDTHS], False),
    "of a sum, of x, 14,336 wide": (
        [NORM.format(14336, of) for of in ("a sum", "x")], False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("label", OVER_A_COPY)
def test_kernels_that_cast(label):
    of, is_range = OVER_A_COPY[label]
    _, before, now, h100, _ = cells(label)
    for cell, file in ((before, H200), (now, CASTS), (h100, H100)):
        if (file == H100 and "Norm" in label) or not cell:
            continue  # a note
        found = ratios(file, "over a copy")
        told = [found[one, "cuda"] for one in of]
        want = [min(told), max(told)] if is_range else told
        assert numbers(cell) == [round(x, 2) for x in want]
