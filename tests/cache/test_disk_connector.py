"""Jobs that share a folder: blocks by two shards, read by one, two and four."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tier_parts import HEAD_BYTES, HEADS, blocks, keys, namespace
from waiting import wait_until

from jax_kvblock import BlockManager, KVPool, PrefixCache
from jax_kvblock.cache import TieredCache
from jax_kvblock.cache.connector import ConnectorError, SlowConnectorError

pytest.importorskip("lmdb")
from jax_kvblock.cache.connectors.disk import DiskConnector, DiskPart
from jax_kvblock.cache.disk import DiskTier

ROOM = 4 << 20
TWO = (range(0, 2), range(2, 4))


def opened(path: Path, heads: range = range(HEADS), **options: object) -> DiskConnector:
    options = {"max_bytes": ROOM, "min_bandwidth": 0, **options}
    return DiskConnector(path, namespace=namespace(len(heads)), heads=heads, **options)


def reader(path: Path, heads: range = range(HEADS)) -> DiskConnector:
    return opened(path, heads, max_bytes=None)


def read(connector: DiskConnector, of: list[bytes]) -> tuple[list[bool], np.ndarray]:
    out = np.zeros((len(of), len(connector.heads) * HEAD_BYTES), np.uint8)
    return connector.get(of, out).result(30), out


@pytest.mark.cases(3)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_written_by_two_read_by_any(tmp_path: Path, size: int) -> None:
    of = keys(5)
    writers = [opened(tmp_path, heads) for heads in TWO]
    for writer in writers:
        writer.put(of[:4], blocks(of[:4], writer.heads)).result(30)
    writers[0].put(of[4:], blocks(of[4:], TWO[0])).result(30)  # half of the last one
    each = HEADS // size
    for rank in range(size):
        heads = range(rank * each, (rank + 1) * each)
        there = heads.stop <= 2
        with reader(tmp_path, heads) as connector:
            assert connector.has(of) == [True] * 4 + [there]
            found, out = read(connector, of)
            assert found == [True] * 4 + [there]
            np.testing.assert_array_equal(out[:4], blocks(of[:4], heads))
    for writer in writers:
        writer.close()
    with reader(tmp_path) as connector:  # and when the writers are gone
        assert read(connector, of)[0] == [True] * 4 + [False]


def test_folders_that_come_later(tmp_path: Path) -> None:
    of = keys(2)
    with reader(tmp_path / "not made yet") as connector:
        assert connector.has(of) == [False, False]
        (tmp_path / "not made yet" / "job.heads-0-9").mkdir(parents=True)
        (tmp_path / "not made yet" / "and a file").touch()
        space = namespace().digest.hex()
        (tmp_path / "not made yet" / "job.heads-0-9" / space).mkdir()
        (tmp_path / "not made yet" / "job.heads-0-4" / space).mkdir(parents=True)
        assert connector.has(of) == [False, False]
        assert "has 4 heads" in connector.unreadable["job.heads-0-9"]
        assert "holds no blocks" in connector.unreadable["job.heads-0-4"]
        with opened(tmp_path / "not made yet") as writer:
            writer.put(of[:1], blocks(of[:1])).result(30)
            assert connector.has(of) == [True, False]
            assert list(connector.unreadable) == ["job.heads-0-9"]
            writer.put(of[1:], blocks(of[1:])).result(30)
            found, out = read(connector, of)
            assert all(found) and (out == blocks(of)).all()


OTHER_JOB = """
import sys
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from test_disk_connector import opened
from tier_parts import blocks, keys
path, (room, first, end) = sys.argv[2], map(int, sys.argv[3:])
with opened(Path(path), job="job-2", max_bytes=room) as writer:
    of = keys(end)[first:]
    writer.put(of, blocks(of)).result(30)
"""


def test_a_job_that_starts_again_with_another_size(tmp_path: Path) -> None:
    """Its files are shorter, longer or others than those that were opened."""

    here = Path(__file__).parent
    folders = f"{here}:{here.parent / 'support'}"

    def start(room: int, first: int, end: int) -> None:
        given = (folders, tmp_path, room, first, end)
        command = [sys.executable, "-P", "-c", OTHER_JOB, *map(str, given)]
        subprocess.run(command, check=True, timeout=60)

    of = keys(201)
    with opened(tmp_path) as connector:
        connector.put(of[200:], blocks(of[200:])).result(30)
        start(ROOM, 0, 190)
        assert all(read(connector, of[:190])[0])
        start(1 << 19, 190, 192)
        found, out = read(connector, of)
        assert all(found[190:192]) and found[200] and not all(found[:190])
        assert (out[found] == blocks(of)[found]).all()
        shutil.rmtree(tmp_path / "job-2.heads-0-4")
        assert not any(connector.has(of[:200]))
        start(ROOM, 192, 194)
        assert connector.has(of) == [False] * 192 + [True] * 2 + [False] * 6 + [True]
        assert not connector.unreadable


def test_a_folder_is_opened_once_by_threads_that_look_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, job="writer") as writer, opened(tmp_path) as connector:
        there = DiskPart.opened
        together = threading.Barrier(2)

        def slow(*args: Any, **options: Any) -> DiskPart:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(0.3)
            return there(*args, **options)

        monkeypatch.setattr(DiskPart, "opened", slow)
        looking = [threading.Thread(target=connector.parts) for _ in range(2)]
        for thread in looking:
            thread.start()
        for thread in looking:
            thread.join()
        (part,) = set(connector.parts()) - {connector._own}
        assert part._users == 2 and part is writer._own


def test_other_models_see_nothing(tmp_path: Path) -> None:
    of = keys(1)
    with opened(tmp_path) as writer:
        writer.put(of, blocks(of)).result(30)
        other = namespace(model="another")
        with DiskConnector(tmp_path, namespace=other, max_bytes=None) as connector:
            assert connector.has(of) == [False] and not connector.unreadable


def test_who_only_reads_puts_nothing(tmp_path: Path) -> None:
    with (
        reader(tmp_path) as connector,
        pytest.raises(ConnectorError, match="put: it was opened to read; pass max"),
    ):
        connector.put(keys(1), blocks(keys(1)))
    with (
        opened(tmp_path, TWO[1]) as connector,
        pytest.raises(ValueError, match=r"put: rows must be uint8\[1, 1536\]"),
    ):
        connector.put(keys(1), blocks(keys(1)))


@pytest.mark.parametrize("kind", ["connector", "tier"])
def test_what_is_only_read_does_not_fail_to_take(tmp_path: Path, kind: str) -> None:
    """Blocks that come down stay in host memory, and no error is counted."""
    manager = BlockManager(
        3, 4, num_kv_heads=HEADS, head_dim=8, num_blocks=8, dtype=jnp.float32
    )
    cache = PrefixCache(manager, model="m")
    with opened(tmp_path) as writer:
        given = {"namespace": cache.namespace.digest, "max_bytes": ROOM}
        given["block_bytes"] = manager.spec.block_bytes
        path = writer._own.tier.path.parent
    store = (
        reader(tmp_path)
        if kind == "connector"
        else DiskTier(path, read_only=True, **given)
    )
    with store, TieredCache(cache, host_bytes=1 << 20, store=store) as tiers:
        table = cache.open(range(14))
        table.reserve(14)
        table.commit(14)
        tiers.offload(table).wait()
        tiers.drain()
        assert tiers.store_error is None and not tiers.stats()["store"]["failed"]
        assert tiers.lookup(range(14))["device"] == 12 and not store.takes


def test_the_bandwidth_is_measured(tmp_path: Path) -> None:
    probe = {"probe_bytes": 1 << 20}
    with opened(tmp_path, min_bandwidth=1, **probe) as connector:
        assert connector.write_bandwidth > 1 and connector.read_bandwidth > 1
    assert [folder.name for folder in tmp_path.iterdir()] == ["job.heads-0-4"]
    said = r"writing: [\d.]+ GB/s with 0.123 MiB, less than min_bandwidth, 1e\+06 GB/s"
    with pytest.raises(SlowConnectorError, match=said):
        opened(tmp_path, min_bandwidth=1e15, **probe)
    assert [folder.name for folder in tmp_path.iterdir()] == ["job.heads-0-4"]
    with pytest.raises(ValueError, match="job must be letters, digits, _ and -"):
        opened(tmp_path, job="../elsewhere")


def test_measuring_takes_no_more_than_what_may_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = []
    whole = DiskConnector._open

    def noted(self, folder, heads, max_bytes, read_only=False):
        bounds.append(max_bytes)
        return whole(self, folder, heads, max_bytes, read_only)

    monkeypatch.setattr(DiskConnector, "_open", noted)
    with opened(tmp_path, min_bandwidth=1, max_bytes=4 << 20) as connector:
        assert connector.write_bandwidth > 1
    assert len(bounds) == 2 and max(bounds) <= 4 << 20


def test_what_a_killed_process_has_left_goes(tmp_path: Path) -> None:
    old, new = tmp_path / ".probe-old", tmp_path / ".probe-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "slots").write_bytes(bytes(10))
    hour_ago = time.time() - 3601
    os.utime(old, (hour_ago, hour_ago))
    opened(tmp_path, min_bandwidth=1, probe_bytes=1 << 20).close()
    assert not old.exists() and new.exists()


def test_who_only_reads_measures_with_what_is_there(tmp_path: Path) -> None:
    of = keys(60)
    probe = {"max_bytes": None, "min_bandwidth": 1e15, "probe_bytes": 1 << 20}
    with opened(tmp_path) as writer:
        writer.put(of[:3], blocks(of[:3])).result(30)
        with opened(tmp_path, **probe) as few:  # too few to tell
            assert few.read_bandwidth is None and few.has(of[:4]) == [True] * 3 + [
                False
            ]
        writer.put(of, blocks(of)).result(30)
    said = r"job.heads-0-4, reading: [\d.]+ GB/s with 0.176 MiB, less than min_bandwid"
    with pytest.raises(SlowConnectorError, match=said):
        opened(tmp_path, **probe)
    with opened(tmp_path, **{**probe, "min_bandwidth": 1}) as connector:
        assert connector.read_bandwidth > 1
        found, out = read(connector, of)
        assert all(found) and (out == blocks(of)).all()
    with opened(tmp_path) as writer:  # and whoever was refused holds nothing open
        assert writer.has(of) == [True] * 60


@pytest.mark.parametrize("when", ["few at the start", "no folder at the start"])
def test_what_comes_later_is_measured_once_it_is_read(
    tmp_path: Path, when: str
) -> None:
    """A slow folder is left out, with the reason; a fast one has its rate."""
    of, few = keys(60), keys(3)
    probe = {"max_bytes": None, "probe_bytes": 1 << 20}
    with contextlib.ExitStack() as stack:
        if when == "few at the start":
            writer = stack.enter_context(opened(tmp_path))
            writer.put(few, blocks(few)).result(30)
        slow = stack.enter_context(opened(tmp_path, min_bandwidth=1e15, **probe))
        fast = stack.enter_context(opened(tmp_path, min_bandwidth=1, **probe))
        if when != "few at the start":
            writer = stack.enter_context(opened(tmp_path))
            writer.put(few, blocks(few)).result(30)
        for connector in (slow, fast):  # again and again the same ones: nothing to tell
            for _ in range(60):
                assert all(read(connector, few)[0])
            assert connector.read_bandwidth is None and not connector.unreadable
        writer.put(of, blocks(of)).result(30)
        for connector in (slow, fast):  # one by one: no read is enough alone
            for key in of:
                read(connector, [key])
        wait_until(lambda: slow.has(of) == [False] * 60)
        wait_until(lambda: all(fast.has(of)) and fast.read_bandwidth is not None)
        assert slow.read_bandwidth is None
        said = slow.unreadable["job.heads-0-4"]
        assert "less than min_bandwidth, 1e+06 GB/s" in said
        assert not fast.unreadable and fast.read_bandwidth > 1
        found, out = read(fast, of)
        assert all(found) and (out == blocks(of)).all()
        assert not any(read(slow, of)[0])


def test_a_slow_folder_that_is_made_anew_is_measured_anew(tmp_path: Path) -> None:
    of, probe = keys(60), {"max_bytes": None, "probe_bytes": 1 << 20}
    with opened(tmp_path, min_bandwidth=1e15, **probe) as connector:
        with opened(tmp_path) as writer:
            writer.put(of, blocks(of)).result(30)
            assert all(read(connector, of)[0])
            wait_until(lambda: not any(connector.has(of)))
            assert list(connector.unreadable) == ["job.heads-0-4"]
        shutil.rmtree(tmp_path / "job.heads-0-4")
        connector._least = 1  # another disk is there now
        with opened(tmp_path) as writer:
            writer.put(of, blocks(of)).result(30)
            assert all(connector.has(of)) and not connector.unreadable
            read(connector, of)
            wait_until(
                lambda: all(connector.has(of)) and bool(connector.read_bandwidth)
            )


@pytest.mark.cases(3)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sequence_goes_from_two_shards_to_others(tmp_path: Path, size: int) -> None:
    """Through the tiers: two processes' caches write, those of another job read."""
    prompt = list(range(14))
    values = np.random.default_rng(3).random((8, 3, 2, 4, HEADS, 8), np.float32)
    for heads in TWO:
        manager = BlockManager(
            3, 4, num_kv_heads=2, head_dim=8, num_blocks=8, dtype=jnp.float32
        )
        cache = PrefixCache(manager, model="m", num_kv_heads=HEADS)
        own = values[..., heads.start : heads.stop, :]
        manager.pool = KVPool.wrap(jnp.array(own), manager.spec)
        store = DiskConnector(
            tmp_path, namespace=cache.namespace, heads=heads, max_bytes=ROOM,
            min_bandwidth=0,
        )  # fmt: skip
        with store, TieredCache(cache, host_bytes=1 << 20, store=store) as tiers:
            table = cache.open(prompt)
            table.reserve(len(prompt))
            assert table.ids.tolist() == [0, 1, 2, 3]
            table.commit(len(prompt))
            tiers.offload(table).wait()
            tiers.drain()
    each = HEADS // size
    for heads in (range(first, first + each) for first in range(0, HEADS, each)):
        manager = BlockManager(
            3, 4, num_kv_heads=each, head_dim=8, num_blocks=8, dtype=jnp.float32
        )
        cache = PrefixCache(manager, model="m", num_kv_heads=HEADS)
        store = DiskConnector(
            tmp_path, namespace=cache.namespace, heads=heads, max_bytes=None
        )
        with store, TieredCache(cache, host_bytes=1 << 20, store=store) as tiers:
            assert tiers.lookup(prompt) == {"device": 0, "host": 0, "store": 12}
            table, ticket = tiers.open(prompt)
            ticket.wait()
            assert table.match() == 12
            pool = np.asarray(manager.pool.data)
            wanted = values[:3, ..., heads.start : heads.stop, :]
            np.testing.assert_array_equal(pool[table.ids], wanted)
