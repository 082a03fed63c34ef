"""What peers over several GPUs are asked for, and what is right; in plain Python."""

from __future__ import annotations

WORKS = ("forward", "both")
# Absolute for out; for a gradient, of its greatest element.
TOLERANCE = 0.02


def judge(name: str, off: float, greatest: float) -> None:
    limit = TOLERANCE * (1 if name == "out" else greatest)
    if not off <= limit:  # nan too
        raise AssertionError(
            f"{name} is off by {off:.3g} from one device's, allowed {limit:.3g}"
        )
