"""Writers that are killed, and what the next one finds.

    python disk_kills.py random <folder> <seconds> <seed>
    python disk_kills.py steps <folder>
    python disk_kills.py damage <folder> <seed> <rounds>
    python disk_kills.py fork <folder>
    python disk_kills.py readers <folder> <seconds>
    python disk_kills.py stale <folder>

A forked process writes until it is killed (SIGKILL): at a random moment, or at each of
its calls that change a file, also in the middle of a write. Then the
folder is opened again, and every block that is found must be that of its key. Nothing
may be corrupt, since the system goes on: what was published had been written.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import disk_alone  # noqa: F401
import disk_tiers as disks
import numpy as np
from disk_tiers import keys

from jax_kvblock.cache.disk import index as disk_index
from jax_kvblock.cache.disk import slot_file
from jax_kvblock.cache.disk.errors import DiskTierError

SLOTS, BATCH, IN_FLIGHT = 48, 6, 3
NEWEST = 1_000_000  # of the random numbers of a writer


def verify(folder: Path, **changed: Any) -> list[int]:
    """Opens the folder after a kill; the blocks that are there, all of them right."""
    with disks.tier(folder, SLOTS, **changed) as tier:
        found = disks.numbers(tier)
        assert all(disks.read(tier, found)), "a block is in the index, but is a miss"
        disks.check_books(tier)
        assert tier.stats().corrupt == 0, tier.stats()
        assert not list(tier.path.glob("*.tmp")), "a draft was left"
    return found


def killed(work: Callable[[], None], after: float | None = None) -> bool:
    """Runs work in a process that is killed, or kills itself; False if it ended."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:
            print("the writer failed:", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert status == 0, f"the writer ended with {status}"
    return False


# ---- at random moments ----


def write_forever(folder: Path, first: int, acknowledged: np.ndarray) -> None:
    """Puts batches, gets some back, removes some; notes the last one that was done."""
    rng = random.Random(first)
    with disks.tier(folder, SLOTS, num_threads=3) as tier:
        tickets: list[tuple[int, Any]] = []
        for number in range(first, first + NEWEST, BATCH):
            wanted = keys(range(number, number + BATCH))
            ticket = tier.put(wanted, disks.contents(wanted))
            tickets.append((number, ticket))
            if len(tickets) == IN_FLIGHT:
                done, ticket = tickets.pop(0)
                assert ticket.result() == BATCH
                acknowledged[0] = done
            if rng.random() < 0.2:
                disks.read(tier, range(number - 2 * BATCH, number))
            if rng.random() < 0.2:
                old = rng.randrange(number - 8 * BATCH, number - 6 * BATCH)
                tier.remove([disks.key(max(old, 0))])


def random_kills(folder: Path, seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    acknowledged = np.memmap(folder / "acknowledged", np.int64, "w+", shape=1)
    begun, rounds, served, kept = time.monotonic(), 0, 0, 0

    def is_over() -> bool:  # a machine that is busy takes longer to come far enough
        enough = seconds if served and kept else 10 * seconds
        return time.monotonic() > begun + enough

    while not is_over():
        first = (rounds + 1) * NEWEST
        acknowledged[0] = -1
        killed(
            lambda first=first: write_forever(folder, first, acknowledged),
            after=rng.uniform(0, 0.09),
        )
        found = verify(folder, num_threads=1)
        if (last := int(acknowledged[0])) >= 0:
            lost = set(range(last, last + BATCH)) - set(found)
            assert not lost, f"{lost} were published, and nothing was evicted for long"
            kept += 1
        rounds, served = rounds + 1, served + len(found)
    assert served and kept, "no writer came far enough"
    print(f"{rounds} kills, {kept} of a writer that had published, {served} blocks")


# ---- at every step ----


class Steps:
    """Kills the process before its n-th step; of writes, half way through the n-th."""

    def __init__(self, left: int, half: bool) -> None:
        self.left, self.half = left, half

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*of: Any, **more: Any) -> Any:
            self.left -= 1
            if not self.left:
                if self.half:
                    fd, data, offset = of
                    size = len(data[0]) // 2 // 4096 * 4096
                    call(fd, [data[0][:size]], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*of, **more)

        return step


STEPS = ("posix_fallocate", "fdatasync", "fsync", "rename", "ftruncate")


def scenario(folder: Path, steps: Steps) -> None:
    """Makes a folder, fills it, evicts, removes, gets smaller, then larger."""
    slot_file.write_all = steps(slot_file.write_all)
    if not steps.half:
        for name in STEPS:
            setattr(os, name, steps(getattr(os, name)))
        disk_index.Index.commit = steps(disk_index.Index.commit)
        Path.unlink = steps(Path.unlink)
    with disks.tier(folder, SLOTS // 4, num_threads=1) as tier:
        for batch in range(3):
            disks.put(tier, range(batch * 6, batch * 6 + 6))
        tier.remove(keys(range(12, 15))).result()
        disks.put(tier, range(100, 104))
    for slots in (SLOTS // 8, SLOTS // 2):
        with disks.tier(folder, slots, num_threads=1) as tier:
            disks.put(tier, range(slots * 10, slots * 10 + 4))


def step_kills(folder: Path) -> None:
    counts = []
    for half in (False, True):
        for count in itertools.count(1):
            shutil.rmtree(folder / "tier", ignore_errors=True)
            steps = Steps(count, half)
            if not killed(lambda steps=steps: scenario(folder / "tier", steps)):
                break
            verify(folder / "tier", num_threads=1)
        counts.append(count - 1)
    assert counts[0] > 60 and counts[1] > 20, counts
    print(f"killed at {counts[0]} steps, and in the middle of {counts[1]} writes")


# ---- forks ----


def forked(folder: Path) -> None:
    """A tier is its process's; others read what is there, while it is written."""
    with disks.tier(folder) as tier:
        disks.put(tier, range(4))

        def use() -> None:
            try:
                tier.has(keys([1]))
            except ValueError as error:
                assert "whose threads a fork has not" in str(error)
                return
            raise AssertionError("a fork used the tier")

        killed(use)
    with disks.tier(folder):
        pass
    print("a fork may not use the tier")


def readers(folder: Path, seconds: float) -> None:
    """Read-only processes beside a writer that evicts all the time."""
    with disks.tier(folder, SLOTS):
        pass

    def read_all() -> None:
        end, hits = time.monotonic() + seconds, 0
        with disks.tier(folder, SLOTS, read_only=True) as tier:
            while time.monotonic() < end:
                # A key may go between the list and the read, and a slot may be
                # written again meanwhile: never is anything else served.
                hits += sum(disks.read(tier, disks.numbers(tier)))
            assert tier.stats().corrupt == 0, tier.stats()
        assert hits, "nothing was read"

    def write() -> None:
        end, number = time.monotonic() + seconds + 0.3, 0
        with disks.tier(folder, SLOTS, num_threads=1) as tier:
            while time.monotonic() < end:
                disks.put(tier, range(number, number + BATCH))
                number += BATCH

    children = []
    for work in (write, read_all, read_all):
        child = os.fork()
        if not child:
            try:
                work()
            except BaseException as error:
                print("failed:", repr(error), flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
        time.sleep(0.1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    print("two readers beside a writer")


def stale(folder: Path) -> None:
    """Readers that end or stop within a lookup, and keep its pages of the index."""
    slots = 200
    with disks.tier(folder, slots, block_bytes=1):
        pass

    def stopped() -> int:
        """A reader that has stopped in the middle of a lookup."""
        ready, told = os.pipe()
        child = os.fork()
        if not child:
            tier = disks.tier(folder, slots, block_bytes=1, read_only=True)
            with tier._folder.index._env.begin() as transaction:
                transaction.get(b"key")
                os.write(told, b"1")
                os.kill(os.getpid(), signal.SIGSTOP)
            tier.close()
            os._exit(0)
        os.read(ready, 1)
        os.waitpid(child, os.WUNTRACED)
        return child

    def replace_all(rounds: int, dying: int | None = None) -> None:
        with disks.tier(folder, slots, block_bytes=1) as tier:
            if dying:
                os.kill(dying, signal.SIGKILL)
                os.waitpid(dying, 0)
            first = max(disks.numbers(tier), default=0) + 1
            for number in range(first, first + rounds * slots, slots):
                assert disks.put(tier, range(number, number + slots)) == slots

    reader = stopped()
    try:
        replace_all(30)
    except DiskTierError as error:
        assert "has stopped within a lookup; end that process" in str(error), error
    else:
        raise AssertionError("the reader kept nothing")
    replace_all(30, reader)
    print("readers that ended and stopped")


# ---- damage ----


def live_pages(index: Path) -> list[int]:
    """The index's pages that hold something."""
    data = index.read_bytes()
    pages = range(0, len(data), 4096)
    return [at // 4096 for at in pages if any(data[at : at + 4096])]


def damages(folder: Path, seed: int, rounds: int) -> None:
    """An index with wrong bytes, pages of zeros, of noise, or of another place.

    Opened in a fork, so that a signal of lmdb's is seen. Either the damage is noticed,
    or what is served is right.
    """
    slots, rng = 60, random.Random(seed)
    with disks.tier(folder, slots) as tier:
        for first in range(0, 110, 10):
            disks.put(tier, range(first, first + 10))
        index = tier.path / "index.lmdb"
    whole, pages = index.read_bytes(), live_pages(index)
    told = served = 0
    for count in range(rounds):
        data, page = bytearray(whole), rng.choice(pages) * 4096
        match count % 4:
            case 0:
                for _ in range(3):
                    data[page + rng.choice([160, 4096]) - 1 - rng.randrange(160)] ^= (
                        0x41
                    )
            case 1:
                data[page : page + 4096] = bytes(4096)
            case 2:
                data[page : page + 4096] = rng.randbytes(4096)
            case 3:
                other = rng.choice(pages) * 4096
                data[page : page + 4096] = whole[other : other + 4096]
        index.write_bytes(data)

        def use() -> None:
            try:
                with disks.tier(folder, slots, num_threads=1) as tier:
                    disks.read(tier, range(50, 110))
                    disks.put(tier, range(200, 205))
                    disks.read(tier, range(200, 205))
            except DiskTierError as error:
                assert "remove the folder" in str(error), error
                os._exit(3)

        child = os.fork()
        if not child:
            try:
                use()
            except BaseException as error:
                print("failed:", repr(error), flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status in (0, 3 << 8), f"damage {count} ended the process with {status}"
        told, served = told + (status > 0), served + (status == 0)
    assert min(told, served) > rounds / 4, (told, served)
    print(f"{told} damages of the index were noticed, {served} did no harm")


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    more = [float(word) for word in sys.argv[3:]]
    folder.mkdir(exist_ok=True)
    modes = {"steps": step_kills, "fork": forked, "readers": readers, "stale": stale}
    if mode == "random":
        random_kills(folder, more[0], int(more[1]))
    elif mode == "damage":
        damages(folder, int(more[0]), int(more[1]))
    else:
        modes[mode](folder, *more)
    assert "jax" not in sys.modules, "the disk tier imports jax"


if __name__ == "__main__":
    main()
