"""The disk tier beside plain I/O of the same pattern on the same filesystem.

A round stores new blocks, which pushes out those of the round before, and reads them
back; plain threads write and read as many blocks of the same size in a preallocated
file, with as many threads and the same direct flag. They take turns, and each round's
ratio is one: medians of both. A write ends when its blocks are on the device and, for
the tier, are published. What goes through the page cache is dropped from it before it
is read. Where fio is installed it takes its turns, too: the same pattern again, by its
own account, which is of the transfers alone.

TMPDIR says which filesystem.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support import common
from support.common import MIB, OURS, Results
from support.plain_io import PlainFile, drop_cache, fio

from jax_kvblock.cache.disk import DiskTier
from jax_kvblock.cache.disk.aligned import aligned_empty

ROUNDS = 9


@dataclasses.dataclass(frozen=True)
class Disk:
    """Blocks of a size, put and got back in tickets of `ticket` blocks each."""

    what: str
    block_bytes: int
    ticket: int
    direct: bool = True
    threads: int = 4
    total: int = 256 * MIB

    @property
    def name(self) -> str:
        cache = "" if self.direct else ", buffered"
        return f"{self.what}, {self.ticket} to a ticket{cache}"


CASES = (
    # 16 tokens, keys and values: Llama 3 8B in bfloat16; 70B; SmolLM2-135M.
    Disk("llama-8b 2 MiB", 2 * MIB, 128),
    Disk("llama-8b 2 MiB", 2 * MIB, 16),
    Disk("llama-70b 5 MiB", 5 * MIB, 51),
    Disk("llama-70b, a head of 8, 640 KiB", 5 * MIB // 8, 64),
    Disk("smollm2-135m 360 KiB", 368_640, 64),
    Disk("64 KiB", 1 << 16, 256),
    Disk("llama-8b 2 MiB", 2 * MIB, 128, direct=False),
)


def bench(options: argparse.Namespace, results: Results) -> None:
    _checksums(results, options.quick)
    for case in common.wanted(options, CASES):
        if options.quick:
            case = dataclasses.replace(case, total=4 * case.block_bytes, ticket=2)
        with tempfile.TemporaryDirectory() as folder:
            try:
                _compare(case, Path(folder), results, 2 if options.quick else ROUNDS)
            except Exception as error:
                results.fail(case.name, OURS, error)
        results.save()


def _compare(case: Disk, folder: Path, results: Results, rounds: int) -> None:
    count = case.total // case.block_bytes
    blocks = aligned_empty(count, case.block_bytes)
    blocks[:] = np.random.default_rng(0).integers(0, 256, blocks.shape, np.uint8)
    out = aligned_empty(count, case.block_bytes)
    # As many slots as a round has blocks, and a little more.
    room = int(1.1 * case.total) + 8 * case.block_bytes + 4 * MIB
    tier = DiskTier(
        folder,
        namespace=bytes(32),
        block_bytes=case.block_bytes,
        max_bytes=room,
        num_threads=case.threads,
        direct=case.direct,
    )
    plain, others = (
        PlainFile(folder / name, blocks, case.threads, case.direct)
        for name in ("plain", "fio")
    )
    rates: dict[tuple[str, str], list[float]] = {}
    by_fio = count // case.threads * case.threads * case.block_bytes  # alike for each

    def timed(call: Callable[[], None]) -> float:
        start = time.perf_counter()
        call()
        return blocks.nbytes / (time.perf_counter() - start)

    def take_turns(
        work: str, ours: Callable[[], None], plain_: Callable[[], None], turn: int
    ) -> None:
        calls = {OURS: lambda: timed(ours), "plain": lambda: timed(plain_)}
        if shutil.which("fio"):
            calls["fio"] = lambda: fio(
                others.path, work, case.block_bytes, case.threads, by_fio, case.direct
            )
        names = list(calls)
        for i in range(len(names)):
            who = names[(i + turn) % len(names)]
            rates.setdefault((work, who), []).append(calls[who]() / 1e9)

    for turn in range(rounds + 1):
        keys = [(turn * count + i).to_bytes(32, "little") for i in range(count)]
        starts = range(0, count, case.ticket)

        def put(keys: list[bytes] = keys, starts: range = starts) -> None:
            cuts = [slice(start, start + case.ticket) for start in starts]
            tickets = [tier.put(keys[cut], blocks[cut]) for cut in cuts]
            assert sum(ticket.result() for ticket in tickets) == count

        def get(keys: list[bytes] = keys, starts: range = starts) -> None:
            cuts = [slice(start, start + case.ticket) for start in starts]
            tickets = [tier.get(keys[cut], out[cut]) for cut in cuts]
            assert all(ticket.result().all() for ticket in tickets)

        take_turns("write", put, plain.write, turn)
        if not case.direct:
            for path in (plain.path, others.path, tier.path / "slots"):
                drop_cache(path)
        take_turns("read", get, lambda: plain.read(out), turn)
        np.testing.assert_array_equal(out[-1], blocks[-1])
    assert not tier.stats().corrupt
    io = tier.stats().io
    tier.close()
    plain.close()
    others.close()
    for work in ("write", "read"):
        name, ours = f"{case.name} / {work}", rates[work, OURS][1:]
        results.add(name, OURS, "bandwidth", statistics.median(ours), "GB/s")
        for peer in ("plain", "fio") if (work, "fio") in rates else ("plain",):
            theirs = rates[work, peer][1:]
            results.add(name, peer, "bandwidth", statistics.median(theirs), "GB/s")
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            results.add(name, OURS, f"of {peer}", ratio, "x")
    results.versions["io"] = io if case.direct else results.versions.get("io", io)


def _checksums(results: Results, quick: bool) -> None:
    """Of parts of 128 KiB that are not in a processor's cache."""
    import blake3
    import xxhash

    data = np.random.default_rng(0).bytes((2 if quick else 128) * MIB)
    parts = [data[i : i + (1 << 17)] for i in range(0, len(data), 1 << 17)]
    for name, call in {
        "xxh3_128": xxhash.xxh3_128_digest,
        "blake3": lambda part: blake3.blake3(part).digest(),
    }.items():
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for part in parts:
                call(part)
            times.append(time.perf_counter() - start)
        rate = len(data) / statistics.median(times) / 1e9
        results.add("parts of 128 KiB / checksums", name, "bandwidth", rate, "GB/s")


if __name__ == "__main__":
    common.main("disk", bench, __doc__)
