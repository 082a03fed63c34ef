"""The largest batch that fits: by what compiled programs say, none of which runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from jax_kvblock.hardware.usage import MemoryUsage


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """The largest batch whose program fits, and the next one, whose does not.

    Attributes:
      size: items of a batch, over all devices together.
      usage: what its program takes of each device.
      next_size: the next size that may be; None where `largest` was reached.
      next_usage: what that takes; None too where the compiler refused it for lack of
        memory.
      limit: bytes of each device.
      devices: how many the batch is cut over.
      programs: how many were compiled to find it.
    """

    size: int
    usage: MemoryUsage
    next_size: int | None
    next_usage: MemoryUsage | None
    limit: int
    devices: int
    programs: int

    def __str__(self) -> str:
        over = f" over {self.devices} devices" if self.devices > 1 else ""
        limit = f"{self.limit / 2**20:.1f} MiB"
        lines = [f"batch {self.size}{over}: {self.usage}; the limit is {limit}"]
        if self.next_size is not None:
            taken = self.next_usage or "the compiler finds no room for it"
            lines.append(f"batch {self.next_size}: {taken}")
        return "\n".join(lines)


def search(
    where: str,
    usage_of: Callable[[int], MemoryUsage],
    *,
    unit: int,
    largest: int | None,
    limit: int,
    devices: int,
) -> BatchSize:
    """The largest multiple of `unit` that fits: doubled till one does not, then halved.

    If memory does not only grow with the batch, there may be a larger one that fits
    too; the one found fits, and the next multiple does not.

    Raises:
      MemoryError: a batch of `unit` does not fit.
    """
    known: dict[int, MemoryUsage | None] = {}

    def fits(count: int) -> bool:
        known[count] = found = _usage(usage_of, count * unit)
        return found is not None and found.total <= limit

    if not fits(1):
        took = known[1] or "more than the compiler finds room for"
        raise MemoryError(
            f"{where}: limit must be enough for a batch of {unit}, which takes {took}, "
            f"got {limit} bytes ({limit / 2**20:.1f} MiB); make the model smaller, cut "
            "it over more devices, or pass a smaller multiple_of"
        )
    most = None if largest is None else largest // unit
    low, high = 1, None
    while high is None and (most is None or low < most):
        tried = 2 * low if most is None else min(2 * low, most)
        if fits(tried):
            low = tried
        else:
            high = tried
    while high is not None and high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    usage = known[low]
    assert usage is not None
    return BatchSize(
        size=low * unit,
        usage=usage,
        next_size=None if high is None else high * unit,
        next_usage=None if high is None else known[high],
        limit=limit,
        devices=devices,
        programs=len(known),
    )


def _usage(usage_of: Callable[[int], MemoryUsage], size: int) -> MemoryUsage | None:
    """What a batch takes; None if the compiler itself finds no room for it."""
    try:
        return usage_of(size)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
