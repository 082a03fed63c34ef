"""Whether results are right, row by row: a few wrong rows must not hide among many.

A row is what one query (or key) of one head has, the last axis of an array. It is held
to a bar of its own: what rounding may cost the terms that it sums. Positions of NaN and
infinities come first. All of it takes NumPy arrays; what a sweep on a GPU needs takes
torch tensors as well. There is no jax here.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

# The spacing of numbers from 1 on.
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
# A log-sum-exp is float32 whatever the inputs are.
LSE_ACCURACY = 2e-5


def library(x: Any) -> Any:
    """numpy or torch: whose array it is. Both have what is used here by one name."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else np


def f64(x: Any) -> Any:
    if library(x) is np:
        return np.asarray(x).astype(np.float64)
    return x.double()


# ---- bars ----------------------------------------------------------------------------


def bar_of_terms(
    want: Any, terms: Any, noise: Any, dtype: str, tolerance: float = 2.0
) -> Any:
    """What a sum may be off by, from what it sums: an array like `want`.

    terms: the root of the sum of the squares of the terms, each of which is rounded to
    `dtype` by itself. Errors of such roundings have 0.29 `eps` of a term at most as
    their deviation, so 2 are seven deviations. noise: an error in float32 on top.
    """
    eps = EPS[dtype]
    return tolerance * eps * terms + 0.75 * eps * abs(want) + noise


def bar_of_plain(
    want: Any,
    plain: Any,
    dtype: str,
    cancels: bool = True,
    subtracted: Any = 0.0,
) -> np.ndarray:
    """What a row may be off by, from how far plain code at `dtype` is: `[..., 1]`.

    Three times plain's error in this row, or what plain's error usually is (nine rows
    of ten) for a row of this size, whichever is more; above that a unit in the last
    place and float32 sums. (Half of all that is what a row of many has by chance, once
    in thousands.) cancels: rows are differences, so that a small one may have the error
    of an ordinary one. subtracted: `[...]`, the largest number in a row of what the
    method takes away from a sum that it rounds to `dtype`, where plain code takes away
    nothing: a unit in that number's last place on top, half of it for the sum's terms
    and half for the sum.
    """
    want, plain = f64(want), f64(plain)
    finite = np.isfinite(want)
    want = np.where(finite, want, 0)
    off = row_maximum(np.where(finite, abs(plain - want), 0))
    size = row_maximum(abs(want))
    usual = off[size > 0] / size[size > 0]
    share = np.quantile(usual, 0.9) if usual.size else 0.0
    eps = EPS[dtype]
    floor = 2e-6 * max(1.0, np.max(size, initial=0.0))
    if cancels and want.size:
        floor += 5 * eps * np.sqrt(np.mean(want**2))
    bar = 1.5 * np.maximum(off, share * size) + 0.5 * eps * size + floor
    return (2.0 * bar + eps * f64(subtracted))[..., None]


def bar_of_lse(want: Any, products: Any = 0.0) -> Any:
    """For a log-sum-exp. products: the size of the products that a score sums up."""
    xp = library(want)
    size = abs(xp.where(xp.isfinite(want), want, xp.zeros_like(want)))
    return LSE_ACCURACY * size.clip(1.0) + 2 * EPS["float32"] * products


def row_maximum(x: np.ndarray) -> np.ndarray:
    """Over the last axis, 0 of none."""
    return np.max(x, axis=-1, initial=0.0)


# ---- judging -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Verdict:
    """worst: the largest error in parts of its bar; wrong: what is, or nothing."""

    worst: float
    wrong: str = ""


def misplaced(got: Any, want: Any) -> str:
    """Where NaN, inf and -inf are not what they should be; nothing if they are."""
    xp = library(want)
    if bool((xp.isfinite(got) & xp.isfinite(want)).all()):
        return ""
    for what, test in (
        ("NaN", xp.isnan), ("inf", xp.isposinf), ("-inf", xp.isneginf)
    ):  # fmt: skip
        wrong = on_host(test(got) != test(want))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            return (
                f"{what} at the wrong {int(wrong.sum())} places of {wrong.size}, the "
                f"first {list(at)}: {float(got[at]):.5g} for {float(want[at]):.5g}"
            )
    return ""


def judge(name: str, got: Any, want: Any, bar: Any) -> Verdict:
    """How `got` compares with `want`, each row of the last axis with its `bar`.

    bar: broadcasts to `want`. Names the first rows that are wrong, and how many are.
    """
    got, want = f64(got), f64(want)
    if tuple(got.shape) != tuple(want.shape):
        return Verdict(np.inf, f"{name}: {tuple(got.shape)} for {tuple(want.shape)}")
    if 0 in want.shape:
        return Verdict(0.0)
    if wrong := misplaced(got, want):
        return Verdict(np.inf, f"{name}: {wrong}")
    xp = library(want)
    with np.errstate(invalid="ignore", divide="ignore"):
        off = xp.where(xp.isfinite(want), abs(got - want), xp.zeros_like(want))
        share = off / bar
    worst = float(share.max())
    if worst <= 1.0:
        return Verdict(worst)
    off, share = on_host(off), on_host(share)  # a bar of 0 makes NaN of no error
    if not np.isfinite(worst):
        share = np.nan_to_num(share, nan=0.0, posinf=np.inf)
        if (worst := float(share.max())) <= 1.0:
            return Verdict(worst)
    rows = np.argwhere((share > 1.0).any(-1))
    shown = ", ".join(str(row.tolist()) for row in rows[:4])
    at = tuple(rows[0])
    column = int(np.argmax(share[at]))
    return Verdict(
        worst,
        f"{name}: {len(rows)} rows of {off[..., 0].size} are wrong, {shown}"
        f"{', ...' if len(rows) > 4 else ''}: the first is off by "
        f"{off[at][column]:.3g} where {off[at][column] / share[at][column]:.3g} is "
        f"allowed; the worst by {worst:.3g} times what is allowed",
    )


def assert_rows(name: str, got: Any, want: Any, bar: Any) -> float:
    """`judge`, as an assertion; the largest error in parts of its bar."""
    verdict = judge(name, got, want, bar)
    assert not verdict.wrong, verdict.wrong
    return verdict.worst


STRAIGHT = ("out", "d_v")  # sums of values, of which none cancels another


def assert_rows_near(
    name: str, got: Any, want: Any, plain: Any, dtype: Any, subtracted: Any = 0.0
) -> float:
    """Every row of `got` is about as near to the truth as plain code's is.

    dtype: the call's, that of q. Rows of one dimension have an element each.
    subtracted: what a row may be off by for besides, as for `bar_of_plain`.
    """
    if np.ndim(want) == 1:
        got, want, plain = (f64(x)[:, None] for x in (got, want, plain))
    cancels, dtype = name not in STRAIGHT, np.dtype(dtype).name
    bar = bar_of_plain(want, plain, dtype, cancels, subtracted)
    return assert_rows(name, got, want, bar)


def assert_lse_near(got: Any, want: Any, products: Any = 0.0) -> float:
    """Every log-sum-exp is right to float32's accuracy, whatever the inputs' is."""
    want = f64(want)[..., None]
    if np.ndim(products):
        products = f64(products)[..., None]
    return assert_rows("lse", f64(got)[..., None], want, bar_of_lse(want, products))


def assert_rows_alike(name: str, got: Any, want: Any, share: float = 0.06) -> None:
    """Each row of a 16-bit result is another implementation's, to 6 % of its size.

    For calls too large for the truth; that of an ordinary row counts, too, since rows
    are differences. All rows together are off by 1 % at the most.
    """
    off = np.linalg.norm(f64(got) - f64(want))
    assert off <= 1e-2 * np.linalg.norm(f64(want)), f"{name}: off by {off:.3g}"
    size = row_maximum(np.abs(f64(want)))
    typical = np.median(size[size > 0])
    assert_rows(name, f64(got), f64(want), share * (size + typical)[..., None])


def on_host(x: Any) -> np.ndarray:
    return np.asarray(x) if library(x) is np else x.cpu().numpy()
