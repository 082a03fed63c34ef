"""What a validation says: arrays that were compared, and how far they were apart."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One array of a layer beside float64.

    An error is that of the worst row (of the last axis): the length of its difference
    from float64 over the root mean square of all rows' lengths. It is infinite where an
    array has another shape, or either has infinities or NaNs; then nothing passes.

    Attributes:
      case: with which weights and mask the layer ran.
      name: "output", or "gradient of …".
      shape, dtype: the array's.
      error: of the layer.
      plain_error: of the reference in plain jnp at the dtype the layer computes in:
        the largest on the same inputs and on some that differ in their last bits.
      tolerance: the most that `error` may be.
    """

    case: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    error: float
    plain_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        # What is not finite bounds nothing.
        return self.error <= self.tolerance < math.inf

    def __str__(self) -> str:
        said = "ok" if self.passed else "WRONG"
        dims = ", ".join(map(str, self.shape))
        return (
            f"{said}: {self.case}, {self.name}, {self.dtype}[{dims}]: "
            f"error {self.error:.2e} of {self.tolerance:.2e}, "
            f"plain jnp {self.plain_error:.2e}"
        )


@dataclasses.dataclass(frozen=True)
class ValidationResult:
    """What a layer was compared in; true in an `if` when all of it passed.

    Attributes:
      component: the layer's class.
      seed: what the inputs were drawn from, to have them again.
      comparisons: each array of each case.
    """

    component: str
    seed: int
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(c.passed for c in self.comparisons)

    @property
    def failures(self) -> tuple[Comparison, ...]:
        return tuple(c for c in self.comparisons if not c.passed)

    @property
    def worst(self) -> float:
        """The largest error, in tolerances."""
        shares = (
            c.error / c.tolerance if math.isfinite(c.tolerance) else math.inf
            for c in self.comparisons
        )  # fmt: skip
        return max(shares, key=lambda share: math.inf if share != share else share)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        said = "passed" if self.passed else f"FAILED ({len(self.failures)})"
        lines = [f"{self.component} {said}, {len(self.comparisons)} arrays compared, "
                 f"seed {self.seed}"]  # fmt: skip
        return "\n".join([*lines, *(f"  {c}" for c in self.comparisons)])
