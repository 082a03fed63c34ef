"""Products of 8 bits in NumPy, the sums in float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

LIMITS = {"e4m3": 448.0, "e5m2": 57344.0}
DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def scale_for(largest: float, form: str, margin: int = 0) -> float:
    """By trying: the largest power of two that fits, halved `margin` times."""
    if not (0 < largest < math.inf):
        return 1.0
    fits = [i for i in range(-200, 201) if largest * 2.0**i <= LIMITS[form]]
    return 2.0 ** min(60, max(-60, max(fits, default=-200) - margin))


def narrowed(x: Any, scale: float, form: str) -> np.ndarray:
    """What a tensor is in a product: float64 of its 8 bits, still scaled."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.asarray(x, np.float32) * np.float32(scale)
    held = np.clip(scaled, -LIMITS[form], LIMITS[form])
    return held.astype(DTYPES[form]).astype(np.float64)


class Truth(NamedTuple):
    out: np.ndarray
    d_x: np.ndarray
    d_w: np.ndarray
    report: np.ndarray  # of inputs, weights and gradients


def product(x: Any, w: Any, d_out: Any, scales: Any, forms: Any) -> Truth:
    """Of matrices, whose result is rounded nowhere."""
    given = x, w, d_out
    a, b, g = (
        narrowed(t, s, f) / s for t, s, f in zip(given, scales, forms, strict=True)
    )
    ratios = [
        np.abs(np.asarray(t, np.float64)).max(initial=0) * s / LIMITS[f]
        for t, s, f in zip(given, scales, forms, strict=True)
    ]
    return Truth(a @ b, g @ b.T, a.T @ g, np.array(ratios) ** 4)
