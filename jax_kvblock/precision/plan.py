"""Plans: which format each part of each weight is kept in, within a budget of bytes."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_kvblock.core.checks import check_integer, show
from jax_kvblock.precision.formats import PrecisionFormat, check_format, check_formats
from jax_kvblock.precision.mixed import store
from jax_kvblock.precision.packed import check_group_size
from jax_kvblock.precision.weights import (
    Weight,
    bytes_of,
    leaves_by_name,
    name_of,
    other_leaves,
)


@dataclasses.dataclass(frozen=True)
class PrecisionPlan:
    """A format for each part of each weight. Static and hashable.

    Attributes:
      weights: what there is to quantize, as `find_weights` found it.
      formats: of each weight, one for each of its parts.
      group_size: of the formats with groups.
    """

    weights: tuple[Weight, ...]
    formats: tuple[tuple[PrecisionFormat, ...], ...]
    group_size: int = 64

    def __getitem__(self, name: str) -> tuple[PrecisionFormat, ...]:
        """The formats of a weight, by its parts."""
        for weight, formats in zip(self.weights, self.formats, strict=True):
            if weight.name == name:
                return formats
        names = ", ".join(weight.name for weight in self.weights)
        raise KeyError(f"PrecisionPlan: there is no weight {name!r}, but {names}")

    def items(self) -> Iterator[tuple[Weight, int, PrecisionFormat]]:
        """Each weight, a part's number and its format."""
        for weight, formats in zip(self.weights, self.formats, strict=True):
            for part, format in enumerate(formats):
                yield weight, part, format

    @property
    def nbytes(self) -> int:
        """What the weights take, scales and offsets included."""
        return sum(
            weight.nbytes(format, self.group_size) for weight, _, format in self.items()
        )

    @property
    def bits_per_weight(self) -> float:
        numbers = sum(weight.size * weight.parts for weight in self.weights)
        return 8 * self.nbytes / numbers

    def apply(self, params: Any) -> Any:
        """The pytree with each weight stored as the plan says; others as they are.

        Weights become `PackedArray`s, `MixedArray`s where their parts differ, or arrays
        of FP32, FP16 and BF16. `dequantize` makes arrays of all. Works under jit, where
        many runs are much to compile.

        Raises:
          ValueError: params without the plan's weights in their shapes.
        """
        named = {
            weight.name: (weight, formats)
            for weight, formats in zip(self.weights, self.formats, strict=True)
        }
        leaves = leaves_by_name(params)
        for name, (weight, _) in named.items():
            leaf = leaves.get(name)
            if leaf is None or tuple(leaf.shape) != weight.shape:
                got = "nothing of that name" if leaf is None else show(leaf)
                raise ValueError(
                    f"PrecisionPlan: params must have {name} in the shape "
                    f"{list(weight.shape)}, got {got}; make the plan of these params"
                )

        def stored(path: Any, leaf: Any) -> Any:
            if name_of(path) not in named:
                return leaf
            return store(leaf, *named[name_of(path)], self.group_size)

        return jax.tree_util.tree_map_with_path(stored, params)


def uniform_plan(
    weights: Sequence[Weight], format: PrecisionFormat, *, group_size: int = 64
) -> PrecisionPlan:
    """One format for all."""
    check_format("uniform_plan", "format", format, tuple(PrecisionFormat))
    weights = tuple(weights)
    size = check_group_size("uniform_plan", group_size)
    return PrecisionPlan(weights, tuple((format,) * w.parts for w in weights), size)


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What each part of each weight costs in each format.

    Attributes:
      weights: as `find_weights` found them.
      formats: fewest bits first.
      costs: by a weight's name, float64 `[parts, formats]`: how much the loss grows,
        estimated or measured, in the loss's unit. Only differences between formats
        count, and sums over parts are what a plan makes small.
      group_size: of the formats with groups.
    """

    weights: tuple[Weight, ...]
    formats: tuple[PrecisionFormat, ...]
    costs: Mapping[str, np.ndarray]
    group_size: int = 64

    def of(self, plan: PrecisionPlan) -> float:
        """The sum over a plan's formats."""
        return float(
            sum(
                self.costs[weight.name][part, self.formats.index(format)]
                for weight, part, format in plan.items()
            )
        )


def make_plan(
    params: Any,
    sensitivity: Sensitivity,
    budget_bytes: int,
    formats: Sequence[PrecisionFormat] | None = None,
) -> PrecisionPlan:
    """The formats of smallest cost whose bytes fit in a budget.

    Every part begins with the fewest bytes. Of all steps to more bytes the one that
    takes most cost off for a byte is next, along the lower convex hull of a part's
    formats, as long as it fits; what does not fit is passed over. Where the last step
    fits exactly this is the best plan there is, else it lies within one step of it
    (Sinha and Zoltners, "The multiple-choice knapsack problem", 1979).

    Args:
      params: the pytree, or its shapes; what is stored beside the weights counts, too.
      sensitivity: of its weights.
      budget_bytes: of all arrays together.
      formats: among those of the sensitivity; all of them unless given.

    Raises:
      TypeError, ValueError: formats that were not measured; a budget that no plan
        meets.

    Example:
      >>> plan = make_plan(params, sensitivity, budget_bytes=60_000_000)
      >>> stored = plan.apply(params)
    """
    budget = check_integer("make_plan", "budget_bytes", budget_bytes, "round it down")
    return allocate("make_plan", params, sensitivity, budget, formats)


def allocate(
    where: str,
    params: Any,
    sensitivity: Sensitivity,
    budget: int,
    formats: Sequence[PrecisionFormat] | None = None,
) -> PrecisionPlan:
    """`make_plan`, in the name of a function that calls it."""
    if not isinstance(sensitivity, Sensitivity):
        raise TypeError(
            f"{where}: sensitivity must be a Sensitivity, got {show(sensitivity)}; "
            "gradient_sensitivity makes one, say"
        )
    among = sensitivity.formats
    if formats is not None:
        among = check_formats(where, "formats", formats)
        for format in among:
            check_format(where, "formats", format, sensitivity.formats)
    group_size = sensitivity.group_size
    rest = sum(bytes_of(leaf) for leaf in other_leaves(params, sensitivity.weights))
    parts = [
        (weight, part) for weight in sensitivity.weights for part in range(weight.parts)
    ]
    columns = [sensitivity.formats.index(format) for format in among]
    options = [
        [
            (
                w.nbytes(format, group_size),
                float(sensitivity.costs[w.name][part, column]),
            )
            for format, column in zip(among, columns, strict=True)
        ]
        for w, part in parts
    ]
    chosen = cheapest(options, budget - rest)
    if chosen is None:
        least = rest + sum(min(bytes_ for bytes_, _ in option) for option in options)
        raise too_small(where, budget, least, rest, among)
    at = iter(chosen)
    found = tuple(
        tuple(among[next(at)] for _ in range(weight.parts))
        for weight in sensitivity.weights
    )
    return PrecisionPlan(sensitivity.weights, found, group_size)


def too_small(
    where: str, budget: int, least: int, rest: int, among: Sequence[PrecisionFormat]
) -> ValueError:
    """Of a budget that no plan meets."""
    return ValueError(
        f"{where}: budget_bytes must be at least {least}, what the smallest of "
        f"{', '.join(one.name for one in among)} takes with {rest} bytes of arrays "
        f"that are no weights, got {budget}; allow more bytes, or formats of fewer bits"
    )


Option = tuple[int, float]  # bytes and cost


def cheapest(options: Sequence[Sequence[Option]], budget: int) -> list[int] | None:
    """Which option of each to take, or None where even the smallest do not fit."""
    hulls = [hull(option) for option in options]
    taken = [0] * len(hulls)
    spent = sum(option[h[0]][0] for option, h in zip(options, hulls, strict=True))
    if spent > budget:
        return None
    steps: list[tuple[float, int]] = []

    def offer(item: int) -> None:
        """The item's next step, the one that takes most off for a byte first."""
        if taken[item] + 1 < len(hulls[item]):
            more, less = _step(options[item], hulls[item], taken[item])
            heapq.heappush(steps, (-less / more, item))

    for item in range(len(hulls)):
        offer(item)
    while steps:
        _, item = heapq.heappop(steps)
        more, _ = _step(options[item], hulls[item], taken[item])
        if spent + more <= budget:
            taken[item] += 1
            spent += more
            offer(item)
    return [h[place] for h, place in zip(hulls, taken, strict=True)]


def _step(option: Sequence[Option], at: list[int], place: int) -> tuple[int, float]:
    """Bytes more, and cost less."""
    (bytes_, cost), (next_bytes, next_cost) = option[at[place]], option[at[place + 1]]
    return next_bytes - bytes_, cost - next_cost


def hull(option: Sequence[Option]) -> list[int]:
    """Those on the lower convex hull, fewest bytes first: each step costs less.

    Options that cost as much as one of fewer bytes are left out.
    """
    kept: list[int] = []
    for index in sorted(range(len(option)), key=lambda i: option[i]):
        size, cost = option[index]
        if kept and cost >= option[kept[-1]][1]:
            continue
        while len(kept) > 1:
            (first, high), (last, low) = option[kept[-2]], option[kept[-1]]
            # The last one lies on or above the line from the one before to the new.
            if (high - low) * (size - last) <= (low - cost) * (last - first):
                kept.pop()
            else:
                break
        kept.append(index)
    return kept
