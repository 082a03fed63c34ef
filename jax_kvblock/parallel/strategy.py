"""What a strategy costs, by rates of H200s; `strategy="auto"` takes the cheapest.

The model knows what is computed, what travels, what of that hides under what is
computed, and what merging costs. docs/context_parallel.md has the rule in words, and
which rate is of which run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, TypeAlias

import numpy as np

from jax_kvblock.attention.config import OPEN, AttentionConfig
from jax_kvblock.attention.cuda import MOST_JOINED_DIM

Strategy: TypeAlias = Literal["auto", "all_gather", "ring", "ulysses", "ulysses_ring"]
STRATEGIES = ("auto", "all_gather", "ring", "ulysses", "ulysses_ring")
# Up to so many parts, each call takes in what the calls before it gave, in the queries'
# dtype: that is in the kernels' last step, and a pass over memory less. But a sum of n
# parts is then rounded n times, and roundings add up: 8 parts have 1.5 (dq) and 1.6
# (out) times the error that sums in float32 have. More parts are added up apart from
# their calls, in float32.
MOST_ROUNDED = 8
# Of a ring's time gathering, which takes more memory, has to save as much. Runs of one
# program differ by more, and so does the model from runs.
WORTH = 0.01


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of one device among several, in units of a second."""

    flops: float = 725e12  # attention forward, D128 bf16, of the slowest of the GPUs
    row: float = 0.33e-9  # of a row of a head in a call: its tiles begin and end
    permute: float = 333e9  # bytes that a device sends and receives at once
    gather: float = 241e9  # bytes that come in; of a run whose record was not kept
    exchange: float = 247e9  # bytes of heads that go and come
    memory: float = 4.3e12  # bytes read and written, as a copy does
    launch: float = 15e-6  # of a collective
    # What a shard costs that NCCL gathers, its way aside: by so much gathering took
    # longer than a ring, forward, on 2 and 4 H200s, than the rest says; older kernels.
    gathered: float = 46e-6


H200 = Rates()


@dataclasses.dataclass(frozen=True)
class Work:
    """A call over `size` devices: `rows` and `keys` are one device's, batch and all."""

    size: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    seen: float  # keys that a row sees, in the mean
    reach: int  # devices of a ring whose keys are seen by somebody
    direct: bool = False  # whether copy engines send what is gathered

    @property
    def shard(self) -> int:
        """Bytes of a device's keys and values."""
        width = self.head_dim + self.value_dim
        return self.keys * self.kv_heads * width * self.itemsize

    @property
    def queries(self) -> int:
        """Bytes of a device's queries and outputs."""
        width = self.head_dim + self.value_dim
        return self.rows * self.heads * width * self.itemsize

    def compute(self, rates: Rates) -> float:
        width = self.head_dim + self.value_dim
        return 2 * self.rows * self.seen * self.heads * width / rates.flops

    def call(self, rates: Rates) -> float:
        """What each call of attention takes beside that, with any keys.

        A group has the rows of all its devices and its share of the heads: as many.
        """
        return self.rows * self.heads * rates.row


def work_of(
    config: AttentionConfig, size: int, sizes: tuple[int, ...], batch: int, rows: int,
    keys: int, lens: tuple[np.ndarray, np.ndarray], itemsize: int, reach: int,
    direct: bool,
) -> Work:  # fmt: skip
    """sizes: heads, KV heads, head dim and value dim; rows, keys: a sequence's shard.

    lens: how many rows and keys each packed document has; a sequence is one.
    """
    heads, kv_heads, head_dim, value_dim = sizes
    half = lens[1] / 2
    left, right = config.window_left, config.window_right
    sides = [half if side == OPEN else np.minimum(side, half) for side in (left, right)]
    seen = float(lens[0] @ sum(sides)) / max(1, rows * size)
    return Work(
        size, batch * rows, batch * keys, heads, kv_heads, head_dim, value_dim,
        itemsize, seen, reach, direct,
    )  # fmt: skip


def groups(work: Work) -> Iterator[int]:
    """How many devices can exchange heads for rows: divisors of all of them."""
    for group in range(1, work.size + 1):
        if not work.size % group and serves_heads(work.heads, work.kv_heads, group):
            yield group


def serves_heads(heads: int, kv_heads: int, group: int) -> bool:
    """Whether so many devices can have whole heads, KV heads perhaps repeated."""
    return not heads % group and (not kv_heads % group or not group % kv_heads)


def largest_group(work: Work) -> int:
    """The most devices that get KV heads of their own; below all of them if it can."""
    own = [g for g in groups(work) if not work.kv_heads % g]
    return max((g for g in own if g < work.size), default=max(own))


def seconds(work: Work, strategy: str, group: int = 1, rates: Rates = H200) -> float:
    """An estimate of the forward pass of one device."""
    if strategy == "all_gather":
        return _gathered(work, rates)
    return _exchanged(work, group, rates) + _ring(work, group, rates)


def _gathered(work: Work, rates: Rates) -> float:
    """Own keys are seen while the others' arrive; a collective's, not for nothing."""
    compute, others = work.compute(rates) / work.size, work.size - 1
    call = work.call(rates)
    if work.direct:
        arrives = others * (work.shard / rates.permute + rates.launch)
        in_order = 2 * others * work.shard / rates.memory
    else:
        arrives = others * work.shard / rates.gather + rates.launch
        in_order = 2 * work.size * work.shard / rates.memory
        in_order += others * rates.gathered
    rest = others * compute + call + _merge(work, 2, rates)
    return max(compute + call, arrives) + in_order + rest


def _exchanged(work: Work, group: int, rates: Rates) -> float:
    """There and back, and what was exchanged laid in order."""
    if group == 1:
        return 0.0
    repeated = max(1, group // work.kv_heads)
    moved = work.queries + repeated * work.shard
    away = moved * (group - 1) / group
    return away / rates.exchange + 2 * moved / rates.memory + 2 * rates.launch


def _ring(work: Work, group: int, rates: Rates) -> float:
    """A device of a ring of `size / group`, each with `1 / group` of the heads."""
    steps = max(1, math.ceil(work.reach / group))
    compute = work.compute(rates) / steps + work.call(rates)
    repeated = max(1, group // work.kv_heads)
    arrives = repeated * work.shard / rates.permute + rates.launch
    return compute + (steps - 1) * max(compute, arrives) + _merge(work, steps, rates)


def _merge(work: Work, parts: int, rates: Rates) -> float:
    """Few parts merge where they are computed, of wide heads by a pass of its own.

    Of more, what there is so far is float32, and parts come in 16 bits.
    """
    if parts > MOST_ROUNDED:
        passes = 5 * (parts - 1) - 2
    else:
        wide = max(work.head_dim, work.value_dim) > MOST_JOINED_DIM
        passes = 3 * (parts - 1) if wide else 0
    return passes * work.queries / 2 / rates.memory


def choose(work: Work, rates: Rates = H200) -> tuple[str, int]:
    """The strategy that takes the least time, and how many devices exchange heads.

    Keys are gathered where that takes no more memory than a device's queries and
    outputs do, and saves some time.
    """
    found = [("ring", 1)]
    if work.size * work.shard <= work.queries:
        gathered = seconds(work, "all_gather", 1, rates)
        if gathered < (1 - WORTH) * seconds(work, "ring", 1, rates):
            found.append(("all_gather", 1))
    for group in groups(work):
        if group > 1:
            found.append(("ulysses" if group == work.size else "ulysses_ring", group))
    return min(found, key=lambda each: seconds(work, each[0], each[1], rates))
