"""Events: blocks in a row are one, numbers have no gaps, bytes are vLLM's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from managers import make_manager
from small_tiers import Setup

from jax_kvblock import _native
from jax_kvblock.cache import GroupedCache, Namespace, PrefixCache
from jax_kvblock.cache.event_source import Note
from jax_kvblock.cache.event_wire import BatchEncoder
from jax_kvblock.cache.events import (
    CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CallbackPublisher,
    Event,
    EventBatch,
    EventLog,
    EventSource,
    EventStream,
)

ROOT, TENANT = b"r" * 32, b"t" * 32
A, B, C = (bytes(range(first, first + 32)) for first in (100, 150, 200))


class Notes:
    """Books that noted this."""

    def __init__(self, *notes: Note) -> None:
        self.notes = list(notes)

    def drain_events(self) -> Sequence[Note]:
        drained, self.notes = self.notes, []
        return drained


def stored(key: bytes, parent: bytes, *tokens: int) -> Note:
    return "stored", key, parent, tokens, 0


def removed(key: bytes) -> Note:
    return "removed", key, bytes(32), (), 0


def told(*notes: Note, **source: Any) -> list[Event]:
    source = {"block_size": 2, "roots": {ROOT: None, TENANT: "poet"}} | source
    with EventStream([EventSource(Notes(*notes), **source)], []) as stream:
        batch = stream.flush()
    assert batch is not None and batch.events[0] == AllBlocksCleared()
    return list(batch.events[1:])


def plain(event: Event) -> dict[str, Any]:
    """An event's fields, for comparisons."""
    fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
    if "token_ids" in fields:
        fields["token_ids"] = fields["token_ids"].tolist()
    return fields


def batch_of(*events: Event, sequence: int = 0, rank: int | None = None) -> EventBatch:
    return EventBatch(sequence, 12.5, events, rank)


def numbered(count: int) -> list[EventBatch]:
    return [batch_of(BlockRemoved((A,)), sequence=i) for i in range(count)]


# ---- from notes to events ------------------------------------------------------------


def test_blocks_that_follow_each_other_are_one_event() -> None:
    (event,) = told(stored(A, ROOT, 1, 2), stored(B, A, 3, 4), stored(C, B, 5, 6))
    assert isinstance(event, BlockStored)
    assert plain(event) == {
        "block_hashes": (A, B, C),
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4, 5, 6],
        "block_size": 2,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": None,
        "kv_cache_spec_sliding_window": None,
    }


def test_a_block_with_another_parent_begins_an_event() -> None:
    events = told(stored(A, ROOT, 1, 2), stored(B, ROOT, 3, 4), stored(C, A, 5, 6))
    assert [plain(event)["block_hashes"] for event in events] == [(A,), (B,), (C,)]
    assert [plain(event)["parent_block_hash"] for event in events] == [None, None, A]


def test_events_keep_their_order() -> None:
    notes = (removed(A), removed(B), stored(A, ROOT, 1, 2), removed(A), removed(C))
    first, second, third = told(*notes, medium=CPU, group_idx=1)
    assert first == BlockRemoved((A, B), "CPU", 1)
    assert plain(second)["block_hashes"] == (A,)
    assert third == BlockRemoved((A, C), "CPU", 1)


def test_blocks_whose_tokens_nobody_knows_are_told_by_their_keys() -> None:
    events = told(stored(A, ROOT, 1, 2), stored(B, A), stored(C, B))
    assert [plain(event)["block_hashes"] for event in events] == [(A,), (B, C)]
    assert [plain(event)["token_ids"] for event in events] == [[1, 2], []]


def test_an_adapter_is_told_of_all_blocks_below_its_root() -> None:
    """Also of those that come in later batches, while the parent is there."""
    books = Notes(stored(A, TENANT, 1, 2))
    source = EventSource(books, 2, roots={ROOT: None, TENANT: "poet"})
    adapters = []
    stream = EventStream([source], [])
    for notes in ([], [stored(B, A, 1, 2)], [removed(B)], [stored(C, B, 1, 2)]):
        books.notes += notes
        batch = stream.flush()
        assert batch is not None
        adapters += [plain(event).get("lora_name", "-") for event in batch.events]
    assert adapters == ["-", "poet", "poet", "-", None]


def test_an_unknown_parent_is_told_as_it_is() -> None:
    (event,) = told(stored(B, A, 1, 2))
    assert plain(event)["parent_block_hash"] == A


# ---- of a cache ----------------------------------------------------------------------


class Router:
    """Follows events as a router does: which blocks lie there, and after which."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()

    def follow(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                root = event.parent_block_hash
                if root is None:
                    root = NAMESPACE.root(event.lora_name)
                keys = _native.chain_keys(root, event.token_ids, event.block_size)
                assert tuple(keys) == event.block_hashes
                assert not self.blocks & set(keys)
                self.blocks |= set(keys)
            elif isinstance(event, BlockRemoved):
                assert self.blocks >= set(event.block_hashes)
                self.blocks -= set(event.block_hashes)
            else:
                self.blocks.clear()


NAMESPACE = Namespace("model", make_manager().spec)


def test_who_follows_the_events_knows_what_the_cache_has(
    rng: np.random.Generator,
) -> None:
    manager = make_manager(num_blocks=12)
    cache = PrefixCache(manager, model="model", events=True)
    router, seen = Router(), dict[bytes, str | None]()
    stream = EventStream(
        [EventSource.of(cache, adapters=["poet"])], [CallbackPublisher(router.follow)]
    )
    router.blocks.add(A)  # of an engine before this one
    for _ in range(200):
        tokens = rng.integers(0, 2, rng.integers(1, 24))
        adapter = ("poet", None)[rng.integers(2)]
        salt = ("", "secret")[rng.integers(2)]
        with cache.open(tokens, adapter=adapter, salt=salt) as table:
            table.reserve(len(tokens))
            table.commit(len(tokens))
            seen |= dict.fromkeys(table.keys, adapter)
        if rng.random() < 0.02:
            cache.clear()
        stream.flush()
        there = {key for key in seen if manager_finds(cache, key)}
        assert router.blocks == there
    assert len(seen) > 3 * 12  # many were evicted


def manager_finds(cache: PrefixCache, key: bytes) -> bool:
    return cache._free_list.find(key) is not None


def test_a_salted_sequence_is_told_apart_and_its_salt_is_not_told() -> None:
    cache = PrefixCache(make_manager(), model="model", events=True)
    stream = EventStream([EventSource.of(cache)], [log := EventLog()])
    for salt in ("", "secret"):
        with cache.open(range(4), salt=salt) as table:
            table.reserve(4)
            table.commit(4)
    stream.flush()
    _, plain_one, salted = log.replay()[0].events
    assert plain(plain_one)["parent_block_hash"] is None
    assert plain(salted)["parent_block_hash"] == cache.namespace.root(None, "secret")
    assert b"secret" not in BatchEncoder().encode(log.replay()[0])


def test_sources_that_would_tell_nothing() -> None:
    cache = PrefixCache(make_manager(), model="model")
    with pytest.raises(ValueError, match=r"keeps no events, .*\(\.\.\., events=True\)"):
        EventSource.of(cache)
    kept = PrefixCache(cache.manager, model="other", events=True)
    source = EventSource.of(cache)  # of one pool: its books keep them for both
    with pytest.raises(TypeError, match=r"several names, got 'french'; pass \['fren"):
        EventSource.of(kept, adapters="french")
    for given in ([cache], source, [source, cache]):
        with pytest.raises(TypeError, match="must be several EventSources, got"):
            EventStream(given, [])


def test_host_memory_tells_what_comes_and_goes() -> None:
    one = Setup(host_blocks=2)
    with EventStream([EventSource.of_host(one.tiers)], []) as stream:
        keys = []
        for i in range(3):
            with one.computed([i, *range(3)]) as table:
                one.tiers.offload(table).wait()
                keys += table.keys
        batch = stream.flush()
    assert batch is not None
    told = [plain(event) for event in batch.events[1:]]
    assert {event["medium"] for event in told} == {"CPU"}
    stored = [k for e in told if "token_ids" in e for k in e["block_hashes"]]
    gone = [k for e in told if "token_ids" not in e for k in e["block_hashes"]]
    assert stored == keys and gone == keys[:1]
    one.tiers.close()


def test_groups_of_layers_are_told_apart() -> None:
    caches = {
        name: PrefixCache(make_manager(), model=name, events=True)
        for name in ("full", "sliding")
    }
    grouped = GroupedCache(caches, windows={"sliding": 6})
    sources = [
        EventSource.of(one, group_idx=i, window=grouped.windows.get(name))
        for i, (name, one) in enumerate(grouped.caches.items())
    ]
    with EventStream(sources, []) as stream, grouped.open(range(4)) as table:
        table.reserve(4)
        table.commit(4)
        batch = stream.flush()
    assert batch is not None
    told = [plain(event) for event in batch.events[1:]]
    assert [event["group_idx"] for event in told] == [0, 1]
    windows = [event["kv_cache_spec_sliding_window"] for event in told]
    assert windows == [None, 6]


# ---- batches -------------------------------------------------------------------------


def test_batches_are_numbered_and_none_is_empty() -> None:
    books, log = Notes(), EventLog()
    with EventStream([EventSource(books, 2)], [log], rank=3) as stream:
        for i in range(4):
            if i % 2:
                books.notes.append(removed(A))
            stream.flush()
        books.notes.append(removed(B))
    first, *_, last = log.replay()
    assert [batch.sequence for batch in log.replay()] == [0, 1, 2, 3]
    assert first.events == (AllBlocksCleared(),)
    assert last.events == (BlockRemoved((B,)),)  # at the end, by `close`
    assert {batch.rank for batch in log.replay()} == {3}
    with pytest.raises(RuntimeError, match="closed"):
        stream.flush()


def test_numbers_have_no_gaps_when_threads_flush() -> None:
    books, log = Notes(), EventLog()
    stream = EventStream([EventSource(books, 2)], [log])

    def work() -> None:
        for _ in range(200):
            books.notes.append(removed(A))
            stream.flush()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.flush()
    numbers = [batch.sequence for batch in log.replay()]
    assert numbers == list(range(len(numbers)))


def test_a_batch_is_published_before_the_next_one_is_made() -> None:
    inside, go = threading.Event(), threading.Event()
    entered: list[int] = []

    def wait(batch: EventBatch) -> None:
        entered.append(batch.sequence)
        inside.set()
        assert go.wait(20)

    books = Notes(removed(A))
    stream = EventStream([EventSource(books, 2)], [CallbackPublisher(wait)])
    first, second = (threading.Thread(target=stream.flush) for _ in range(2))
    first.start()
    assert inside.wait(20)
    books.notes.append(removed(B))
    second.start()
    second.join(0.2)
    assert entered == [0]
    go.set()
    first.join()
    second.join()
    assert entered == [0, 1]


def test_who_fails_keeps_nothing_from_the_others() -> None:
    def fail(batch: EventBatch) -> None:
        raise KeyError(batch.sequence)

    log, books = EventLog(), Notes(removed(A))
    stream = EventStream([EventSource(books, 2)], [CallbackPublisher(fail), log])
    with pytest.raises(ExceptionGroup, match="at batch 0") as caught:
        stream.flush()
    assert [type(error) for error in caught.value.exceptions] == [KeyError]
    assert len(log.replay()) == 1


def test_a_log_keeps_the_last_batches() -> None:
    log = EventLog(capacity=3)
    for batch in numbered(5):
        log.publish(batch)
    for start, kept in ((0, [2, 3, 4]), (3, [3, 4]), (4, [4]), (5, [])):
        assert [batch.sequence for batch in log.replay(start)] == kept
    with pytest.raises(ValueError, match="capacity must be at least 1 batch, got 0"):
        EventLog(0)


# ---- bytes ---------------------------------------------------------------------------
# What vLLM's readers declare, written down anew: names, order and defaults of fields.

Hash = bytes | int


def readers(array_like: bool) -> msgspec.msgpack.Decoder[Any]:
    def struct(name: str, *fields: Any, **how: Any) -> type:
        return msgspec.defstruct(name, fields, omit_defaults=True, **how)

    like: dict[str, Any] = {"tag": True, "array_like": array_like}
    stored_event = struct(
        "BlockStored",
        ("block_hashes", list[Hash]),
        ("parent_block_hash", Hash | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
        ("medium", str | None),
        ("lora_name", str | None),
        ("extra_keys", list[tuple[Any, ...] | None] | None, None),
        ("group_idx", int | None, None),
        ("kv_cache_spec_kind", str | None, None),
        ("kv_cache_spec_sliding_window", int | None, None),
        **like,
    )
    removed_event = struct(
        "BlockRemoved",
        ("block_hashes", list[Hash]),
        ("medium", str | None),
        ("group_idx", int | None, None),
        **like,
    )
    cleared = struct("AllBlocksCleared", **like)
    batch = struct(
        "KVEventBatch",
        ("ts", float),
        ("events", list[stored_event | removed_event | cleared]),  # type: ignore[valid-type]
        ("data_parallel_rank", int | None, None),
        array_like=True,
    )
    return msgspec.msgpack.Decoder(batch, strict=True)


def wire_events() -> tuple[Event, ...]:
    tokens = np.arange(4, dtype=np.int32)
    return (
        BlockStored((A, B), None, tokens, 2),
        BlockStored((C,), B, tokens[:2], 2, "CPU", "poet", 1, 1024),
        BlockStored((C,), B, tokens[:2], 2, group_idx=0),
        BlockRemoved((A, B)),
        BlockRemoved((A,), "STORAGE", 1),
        AllBlocksCleared(),
    )


@pytest.mark.parametrize("form", ["maps", "arrays"])
@pytest.mark.parametrize("hashes", ["bytes", "int"])
def test_readers_of_vllm_read_every_event(form: Any, hashes: Any) -> None:
    payload = BatchEncoder(form, hashes).encode(batch_of(*wire_events(), rank=2))
    read = readers(array_like=form == "arrays").decode(payload)
    assert (read.ts, read.data_parallel_rank) == (12.5, 2)
    name: Callable[[bytes], Hash] = lambda key: (  # noqa: E731
        key if hashes == "bytes" else int.from_bytes(key, "big") % 2**64
    )
    first, second, third, fourth, fifth, sixth = read.events
    assert msgspec.structs.astuple(first) == (
        *([name(A), name(B)], None, [0, 1, 2, 3], 2, None, "GPU", None),
        *(None, None, None, None),
    )
    assert msgspec.structs.astuple(second) == (
        *([name(C)], name(B), [0, 1], 2, None, "CPU", "poet"),
        *(None, 1, "sliding_window", 1024),
    )
    assert msgspec.structs.astuple(third)[8:] == (0, "full_attention", None)
    assert msgspec.structs.astuple(fourth) == ([name(A), name(B)], "GPU", None)
    assert msgspec.structs.astuple(fifth) == ([name(A)], "STORAGE", 1)
    assert type(sixth).__name__ == "AllBlocksCleared"


@pytest.mark.parametrize("form", ["maps", "arrays"])
@pytest.mark.parametrize("rank", [None, 0, 5])
def test_the_bytes_are_those_that_vllm_would_send(form: Any, rank: int | None) -> None:
    """What its readers' types write of what they read is what they read."""
    payload = BatchEncoder(form).encode(batch_of(*wire_events(), rank=rank))
    read = readers(array_like=form == "arrays").decode(payload)
    assert msgspec.msgpack.encode(read) == payload


@pytest.mark.parametrize("argument", [{"form": "json"}, {"hashes": "hex"}])
def test_unknown_forms_are_refused(argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be one of \('\w+', '\w+'\), got '"):
        BatchEncoder(**argument)
