"""From the device to host memory to disk, and back in another process's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_tiers import SIZE, Setup

import jax_kvblock
from jax_kvblock.cache.disk import DiskTier

SUPPORT = Path(__file__).parents[1] / "support"


def opened(
    folder: Path,
    max_bytes: int = 4 << 20,
    gpudirect: bool | None = None,
    **options: object,
) -> tuple[Setup, DiskTier]:
    """A cache over a disk tier, as a process has it that starts."""
    sample = Setup(**options)
    sample.tiers.close()
    tier = DiskTier(
        folder,
        namespace=sample.cache.namespace.digest,
        block_bytes=sample.size,
        max_bytes=max_bytes,
        gpudirect=gpudirect,
    )
    return Setup(store=tier, **options), tier


def closed(one: Setup, tier: DiskTier) -> None:
    one.tiers.close()
    one.tiers.check()
    tier.close()


@pytest.mark.parametrize("layout", ["NHD", "operational"])
def test_a_prompt_of_an_earlier_process_is_on_disk(tmp_path: Path, layout: str) -> None:
    """Written from one layout, read into another: below the device there is one."""
    first, tier = opened(tmp_path)
    first.only_below(range(41))
    assert tier.stats().num_blocks == 10
    closed(first, tier)

    second, tier = opened(tmp_path, layout=layout)
    assert second.tiers.lookup(range(41)) == {"device": 0, "host": 0, "store": 40}
    table, ticket = second.tiers.open(range(41))
    ticket.wait()
    assert ticket.exception is None and table.match() == 40
    second.holds(table)
    assert tier.stats().hits == 10 and tier.stats().corrupt == 0
    closed(second, tier)


def test_a_block_that_rots_is_a_miss_and_what_follows_is_computed(
    tmp_path: Path,
) -> None:
    first, tier = opened(tmp_path)
    first.only_below(range(41))
    keys = first.cache.namespace.keys(np.arange(40, dtype=np.int32))
    with tier.held([keys[6]]) as (place,):
        path, middle = place.path, place.offset + place.num_bytes // 2
    closed(first, tier)
    with path.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)
        file.seek(middle)
        file.write(bytes([byte[0] ^ 1]))

    second, tier = opened(tmp_path)
    table, ticket = second.tiers.open(range(41))
    ticket.wait()
    assert ticket.num_missing == 4
    assert table.match() == 24  # six blocks of four tokens, and none behind a hole
    second.holds(table)
    assert tier.stats().corrupt == 1 and tier.has([keys[6]]) == [False]
    # It is computed, goes down again, and is right.
    table.free()
    second.only_below(range(41))
    assert tier.has([keys[6]]) == [True]
    closed(second, tier)


def test_blocks_of_another_kind_are_not_found(tmp_path: Path) -> None:
    first, tier = opened(tmp_path)
    first.only_below(range(41))
    closed(first, tier)
    second, tier = opened(tmp_path, num_outer=1)
    assert second.tiers.lookup(range(41))["store"] == 0
    closed(second, tier)
    assert len([folder for folder in tmp_path.iterdir() if folder.is_dir()]) == 2


def test_random_work_in_three_tiers_that_are_all_too_small(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Each pushes blocks out all the time, and now and then a process ends."""
    sizes = {"num_blocks": 12, "host_blocks": 10, "max_bytes": 450_000}
    came, lost, evicted = {"device": 0, "host": 0, "store": 0}, 0, 0
    one, tier = opened(tmp_path, **sizes)
    for count in range(160):
        if count % 40 == 39:
            evicted += tier.stats().evicted
            closed(one, tier)
            one, tier = opened(tmp_path, **sizes)
        first, length = rng.integers(12), rng.integers(5, 33)
        if quiet := bool(rng.integers(2)):
            one.tiers.drain()
        tokens = [int(first), *range(length)]
        found = one.tiers.lookup(tokens)
        table, ticket = one.tiers.open(tokens)
        ticket.wait()
        reached = table.match()
        # A block may be pushed out after it was found, by those that made room for it.
        # Those that are still on their way down may push out others, or be found later.
        lost += ticket.num_missing
        whole = sum(found.values()) - ticket.num_missing * SIZE
        assert reached == whole if quiet else reached in range(0, len(tokens), SIZE)
        for name in came:
            came[name] += found[name]
        missing = -(-table.num_tokens // SIZE) - len(table)
        one.tiers.make_room(missing)
        table.reserve(table.num_tokens)
        one.write(table)
        one.holds(table)
        one.tiers.offload(table)
        table.free()
    stats = tier.stats()
    assert min(came.values()) > 20 and lost < 50, (came, lost)
    assert evicted + stats.evicted > 50, stats
    assert stats.num_slots < 12 * 8 and stats.corrupt == stats.failed == 0
    closed(one, tier)


def test_a_cache_that_is_killed(tmp_path: Path) -> None:
    """What the next process finds on disk, and what comes up, is what keys say."""
    paths = [str(SUPPORT), str(Path(jax_kvblock.__file__).parents[1])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    own = {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-P", SUPPORT / "tier_kills.py", tmp_path, "4", "1"],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
