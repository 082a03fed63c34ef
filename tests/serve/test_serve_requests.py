"""Requests come, end, are cancelled or refused; the engine goes on."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np
import pytest
from http_servers import call
from llama_engines import Greedy, ask, check_books, tokens_of
from llama_files import TinyModel
from serve.engine import Engine
from serve.http_server import create_app
from serve.interface import FREE, HELD, IDLE, SHARED, Event, QueueFullError, Request
from serve.models import LoadedModel

from jax_kvblock import BlockTable, PrefixCache
from jax_kvblock.cache.namespace import Namespace

pytestmark = pytest.mark.usefixtures("exact_products")
PROMPT = [7, 3, 9, 250, 8]


def make(model: LoadedModel, **given: Any) -> Engine:
    sizes = {"num_blocks": 64, "block_size": 8, "max_tokens": 128, "decode_steps": 1}
    return Engine(model, **{**sizes, **given})


@pytest.fixture
def engine(tiny: tuple[TinyModel, LoadedModel]) -> Iterator[Engine]:
    made = make(tiny[1], max_waiting=3)
    yield made
    made.stop()
    check_books(made)


@pytest.mark.parametrize("kind", [np.array, np.int32, list, tuple])
def test_tokens_of_a_request_are_pythons_ints(kind):
    """Whatever integers they came as: they go to tokenizers, and into JSON."""
    prompt = [np.int64(5), 7] if kind is list else kind([5, 7])
    request = Request(prompt=prompt, stop_tokens=[np.uint8(3)])
    assert request.prompt == (5, 7) and request.stop_tokens == (3,)
    assert {*map(type, (*request.prompt, *request.stop_tokens))} == {int}


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
def test_a_transfer_guard_lets_steps_pass(
    engine: Engine, greedy: Greedy, guard: str
) -> None:
    """A step's numbers go to the device as what its call is given, as is meant."""
    stream = ask(engine, PROMPT, 7)
    with jax.transfer_guard_host_to_device(guard):
        engine.run()
    greedy.check(PROMPT, stream, 7)


def test_a_prompt_is_hashed_once_however_long_it_waits(
    tiny: tuple[TinyModel, LoadedModel], greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is submitted: no step of the others waits for that."""
    made, hashed = PrefixCache.empty_table, []

    def counted(cache: PrefixCache, tokens: Seq[int], *given: Any) -> BlockTable:
        hashed.append(list(tokens))
        return made(cache, tokens, *given)

    keys, of_namespace = Namespace.keys, []

    def keyed(namespace: Namespace, tokens: Seq[int], *given: Any) -> list[bytes]:
        of_namespace.append(list(tokens))
        return keys(namespace, tokens, *given)

    monkeypatch.setattr(PrefixCache, "empty_table", counted)
    monkeypatch.setattr(Namespace, "keys", keyed)
    engine = make(tiny[1], num_blocks=6, max_batch=2)
    long = PROMPT * 8
    first, second = ask(engine, PROMPT, 30), ask(engine, long, 8)
    engine.step()
    engine.step()
    assert engine.stats()["waiting"] == 1  # for blocks
    assert hashed == [PROMPT, long]
    engine.run()
    assert hashed == [PROMPT, long] and not of_namespace
    greedy.check(PROMPT, first, 30)
    greedy.check(long, second, 8)
    engine.stop()
    check_books(engine)


def test_a_collection_of_garbage_does_not_go_through_texts(engine: Engine) -> None:
    """It comes wherever Python likes, and takes longer the more there is."""
    ask(engine, PROMPT * 8, 3)
    engine.step()
    (sequence,) = engine._scheduler.running
    assert len(gc.get_referents(sequence.tokens)) <= 1  # its type
    assert list(sequence.tokens[: 5 * 8]) == PROMPT * 8
    engine.run()


def test_what_has_ended_is_no_garbage_to_collect(engine: Engine) -> None:
    """Thousands of tokens go as they end, not when Python looks for garbage."""
    gc.collect()
    gc.disable()
    try:
        stream = ask(engine, PROMPT * 8, 3)
        engine.step()
        ended = weakref.ref(*engine._scheduler.running)
        engine.run()
        assert ended() is None and stream.finish_reason == "length"
    finally:
        gc.enable()
    stream.cancel()  # does nothing


def test_what_is_refused_is_not_read_and_no_garbage(
    tiny: tuple[TinyModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(tiny[1], max_waiting=1)
    ask(engine, PROMPT, 3)
    made, sequences = engine._sequence, []

    def watched(*given: Any) -> Any:
        sequences.append(weakref.ref(sequence := made(*given)))
        return sequence

    monkeypatch.setattr(engine, "_sequence", watched)
    monkeypatch.setattr(engine, "_prompt", None)  # it would be called
    with pytest.raises(QueueFullError, match="1 requests wait already"):
        ask(engine, PROMPT, 3)
    monkeypatch.undo()
    monkeypatch.setattr(engine, "_sequence", watched)
    monkeypatch.setattr(engine._inbox, "check", lambda: None)  # it fills meanwhile
    add, full = engine._inbox.add, QueueFullError("it is full by now")

    def refuse(sequence: Any) -> None:
        raise full

    monkeypatch.setattr(engine._inbox, "add", refuse)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(QueueFullError, match="by now"):
            ask(engine, PROMPT, 3)
        full.__traceback__ = None
        assert [each() for each in sequences] == [None]
    finally:
        gc.enable()
    monkeypatch.setattr(engine._inbox, "add", add)
    engine.run()
    engine.stop()


# ---- how texts end -------------------------------------------------------------------


def test_a_text_ends_by_its_length(engine: Engine) -> None:
    stream = ask(engine, PROMPT, 7)
    engine.run()
    events = list(stream)
    assert [event.finish_reason for event in events] == [None] * 6 + ["length"]
    tokens = [event.token_id for event in events]
    tokenizer = engine.model.tokenizer
    assert "".join(event.text for event in events) == tokenizer.decode(tokens)


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_a_text_ends_by_a_token(
    draft_tokens: int, tiny: tuple[TinyModel, LoadedModel], greedy: Greedy
) -> None:
    engine, tokens = make(tiny[1], draft_tokens=draft_tokens), greedy.after(PROMPT, 9)
    place = next(i for i in range(3, 9) if tokens[i] not in tokens[:i])
    stream = ask(engine, PROMPT, 30, stop_tokens=[tokens[place]])
    engine.run()
    events = list(stream)
    assert [event.token_id for event in events] == tokens[: place + 1]
    assert events[-1].finish_reason == "stop"
    text = "".join(event.text for event in events)
    assert text == engine.model.tokenizer.decode(tokens[:place])
    assert stream.num_new_tokens == engine.stats()["new_tokens"] == place + 1
    check_books(engine)
    engine.stop()


def test_a_text_ends_by_the_models_own_token(
    engine: Engine, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = greedy.after(PROMPT, 9)
    ends = frozenset([tokens[4]])
    monkeypatch.setattr(engine.model.tokenizer, "end_tokens", ends)
    stream = engine.submit(Request(prompt=PROMPT, max_new_tokens=9))
    other = ask(engine, PROMPT, 9)  # which ignores it
    engine.run()
    assert tokens_of(stream) == tokens[: tokens.index(tokens[4]) + 1]
    assert stream.finish_reason == "stop"
    assert tokens_of(other) == tokens and other.finish_reason == "length"


def test_a_text_ends_by_a_text(engine: Engine, greedy: Greedy) -> None:
    whole = engine.model.tokenizer.decode(greedy.after(PROMPT, 30))
    stop = next(whole[i : i + 2] for i in range(5, 20) if whole[i : i + 2].isascii())
    stream = engine.submit(
        Request(prompt=PROMPT, max_new_tokens=30, stop=[stop], ignore_end=True)
    )
    engine.run()
    assert stream.text() == whole[: whole.index(stop)]
    assert stream.finish_reason == "stop"


# ---- cancelled, refused, failed ------------------------------------------------------


def test_a_stream_is_cancelled_while_it_waits_or_runs(
    engine: Engine, greedy: Greedy
) -> None:
    streams = [ask(engine, [*PROMPT, i], 20) for i in range(3)]
    streams[0].cancel()
    for _ in range(4):
        engine.step()
    streams[1].cancel()
    engine.run()
    assert list(streams[0]) == [Event(None, "", "cancelled")]
    assert tokens_of(streams[1]) == greedy.after([*PROMPT, 1], 3)
    assert streams[1].finish_reason == "cancelled"
    greedy.check([*PROMPT, 2], streams[2], 20)
    assert engine.stats()["cancelled"] == 2 and engine.stats()["finished"] == 3


def test_a_prompt_that_grows_meanwhile_is_what_it_was(
    engine: Engine, greedy: Greedy
) -> None:
    """A conversation is one list: its reader appends what comes."""
    conversation, stop = list(PROMPT), [9999]
    stream = ask(engine, conversation, 7, stop_tokens=stop)
    came = []
    for _ in range(40):
        engine.step()
        while (event := stream.take()) is not None:
            came.append(event)
            conversation.append(event.token_id)
            stop.append(event.token_id)
    assert conversation == [*PROMPT, *greedy.after(PROMPT, 7)]
    assert [event.finish_reason for event in came] == [None] * 6 + ["length"]


def test_who_leaves_before_the_engine_looks_leaves_the_queue(
    engine: Engine, greedy: Greedy
) -> None:
    """It compiles, for example, which takes a while."""
    for _ in range(3):
        left = [ask(engine, PROMPT) for _ in range(3)]
        for stream in left:
            stream.cancel()
    kept = ask(engine, PROMPT, 5)
    assert engine.stats()["waiting"] == 1
    engine.run()
    greedy.check(PROMPT, kept, 5)
    assert [stream.finish_reason for stream in left] == ["cancelled"] * 3
    assert engine.stats()["cancelled"] == 9 and engine.stats()["finished"] == 10


def test_requests_that_do_not_fit_are_refused(
    tiny: tuple[TinyModel, LoadedModel],
) -> None:
    engine = make(tiny[1], max_tokens=64, max_waiting=2)
    with pytest.raises(ValueError, match=r"5 \+ 60 tokens, of at most 64"):
        ask(engine, PROMPT, 60)
    with pytest.raises(ValueError, match="the prompt is 999, none of the model's 267"):
        ask(engine, [1, 999])
    with pytest.raises(ValueError, match=f"prompt is {-(2**40)}, none of the model's"):
        ask(engine, [1, -(2**40)])
    with pytest.raises(ValueError, match=f"prompt is {2**32 + 5}, none of the model's"):
        ask(engine, np.array([2**32 + 5, 3, 9, 250, 8]))  # 5, in 32 bits
    streams = [ask(engine, PROMPT, 59) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        ask(engine, PROMPT)
    engine.run()
    assert [stream.finish_reason for stream in streams] == ["length"] * 2
    engine.stop()
    engine.stop()
    with pytest.raises(RuntimeError, match="has stopped"):
        ask(engine, PROMPT)
    with pytest.raises(RuntimeError, match="was started before"):
        engine.start()


def test_sizes_that_do_not_go_together(tiny: tuple[TinyModel, LoadedModel]) -> None:
    with pytest.raises(ValueError, match="max_batch must be from 1 to"):
        make(tiny[1], max_batch=9, max_tokens_per_step=8)
    with pytest.raises(ValueError, match="draft_tokens must be from 0 to 31, got 32"):
        make(tiny[1], draft_tokens=32)
    for given in ({"decode_steps": 0}, {"decode_steps": 2, "draft_tokens": 1}):
        with pytest.raises(ValueError, match="decode_steps must be from 1 on, and 1 b"):
            make(tiny[1], **given)
    for most in (0, -3):
        with pytest.raises(
            ValueError, match=f"max_tokens must be from 1 on, .* {most}$"
        ):
            make(tiny[1], max_tokens=most)
    for name in ("max_tokens", "decode_steps", "max_waiting", "num_blocks"):
        with pytest.raises(TypeError, match=f"Engine: {name} must be of int, got 2.0"):
            make(tiny[1], **{name: 2.0})
    assert make(tiny[1], max_tokens=1).max_tokens == 1
    assert make(tiny[1], num_blocks=4).max_tokens == 32
    assert Engine(tiny[1], num_blocks=999).max_tokens == 512  # the model's


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_fails_ends_what_runs_and_nothing_else(
    when: str,
    engine: Engine,
    greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where the pool is lost with it: what is cached is gone, not wrong."""
    text = PROMPT * 4
    first = ask(engine, text, 20)
    for _ in range(3):
        engine.step()
    update = engine._manager.update

    def fail(*args: Any, **kwargs: Any) -> Any:
        if when == "after":
            update(*args, **kwargs)
            engine._manager.pool.data.delete()
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine._manager, "update", fail)
    engine.step()
    monkeypatch.setattr(engine._manager, "update", update)
    *_, last = first
    assert last == Event(None, last.text, "error", "RuntimeError: out of luck")
    assert "a step failed" in caplog.text
    again = ask(engine, text, 20)
    engine.run()
    greedy.check(text, again, 20)
    assert again.num_cached_tokens == 0
    assert engine.stats()["failed"] == 1


def test_who_made_way_in_a_step_that_fails_goes_on(
    tiny: tuple[TinyModel, LoadedModel],
    greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The token that it was about to get is lost with the step: it is drawn again."""
    engine = make(tiny[1], num_blocks=8, max_tokens=60)
    texts = [[*PROMPT, i] for i in range(2)]
    streams = [ask(engine, text, 40) for text in texts]
    dispatch = engine._runner.dispatch

    def fail_once(parts: Any) -> Any:
        if engine.stats()["preemptions"] == 1:
            monkeypatch.setattr(engine._runner, "dispatch", dispatch)
            assert [each.num_unread for each in engine._scheduler.waiting] == [1]
            raise RuntimeError("out of luck")
        return dispatch(parts)

    monkeypatch.setattr(engine._runner, "dispatch", fail_once)
    engine.run()
    assert [stream.finish_reason for stream in streams] == ["error", "length"]
    greedy.check(texts[1], streams[1], 40)
    check_books(engine)
    engine.stop()


def test_a_plan_that_always_fails_ends_all(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever, and nothing turns in circles."""
    streams = [ask(engine, PROMPT) for _ in range(3)]
    monkeypatch.setattr(engine._scheduler, "plan", lambda: 1 // 0)
    engine.run()
    assert {stream.finish_reason for stream in streams} == {"error"}
    monkeypatch.undo()


# ---- threads -------------------------------------------------------------------------


def test_a_device_that_is_lost_ends_all_and_the_engine(
    tiny: tuple[TinyModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a thread that has ended, and monitors are told."""

    def lost(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    engine = make(tiny[1], max_batch=1)
    monkeypatch.setattr(engine._runner, "dispatch", lost)
    monkeypatch.setattr(engine._runner, "reset", lost)
    streams = [ask(engine, PROMPT, 5) for _ in range(3)]
    engine.start()
    engine._thread.join(60)
    assert not engine._thread.is_alive()
    assert [stream.finish_reason for stream in streams] == ["error"] * 3
    assert "the device is lost" in list(streams[2])[-1].error
    assert engine.stats()["failed"] == 3
    with pytest.raises(RuntimeError, match="has stopped"):
        ask(engine, PROMPT)
    assert engine.stopped
    told = call(create_app(engine), "GET", "/health")
    assert told.status_code == 503 and "the device is lost" in told.text
    engine.stop()
    engine.stop()
    check_books(engine)


def test_a_thread_serves_many(engine: Engine, greedy: Greedy) -> None:
    engine.start()
    found: dict[int, list[int]] = {}

    def client(i: int) -> None:
        while True:
            try:
                found[i] = tokens_of(ask(engine, [*PROMPT, i % 5], 6))
                return
            except QueueFullError:
                time.sleep(0.01)

    clients = [threading.Thread(target=client, args=(i,)) for i in range(12)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(120)
    assert len(found) == 12
    for i, tokens in found.items():
        assert tokens == greedy.after([*PROMPT, i % 5], 6)
    assert engine.stats()["finished"] == 12


def test_stop_cancels_what_is_open(
    tiny: tuple[TinyModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(tiny[1], max_batch=1)
    streams = [ask(engine, PROMPT, 100) for _ in range(3)]
    dispatch = engine._runner.dispatch

    def dispatch_slowly(parts: Any) -> Any:
        while engine.stats()["steps"] > 9 and not engine._inbox.closed:
            time.sleep(0.001)  # else all could be said before it is stopped
        return dispatch(parts)

    monkeypatch.setattr(engine._runner, "dispatch", dispatch_slowly)
    engine.start()
    next(streams[0])
    engine.stop()
    assert [stream.finish_reason for stream in streams] == ["cancelled"] * 3
    check_books(engine)


# ---- what it tells -------------------------------------------------------------------


def test_the_pool_is_shown_as_it_is(engine: Engine) -> None:
    def counts() -> list[int]:
        return np.bincount(engine.pool_map(), minlength=4).tolist()

    assert counts() == [64, 0, 0, 0]
    shared = list(range(17))
    first = ask(engine, [*shared, 1], 20)
    for _ in range(2):
        engine.step()
    assert counts()[HELD] == 3 and counts()[SHARED] == 0
    second = ask(engine, [*shared, 2], 20)
    for _ in range(2):
        engine.step()
    assert counts()[SHARED] == 2  # the whole blocks of what both begin with
    assert counts()[HELD] == 2
    first.cancel()
    second.cancel()
    engine.run()
    assert counts()[IDLE] == 2 and counts()[FREE] == 62


def test_statistics_count(engine: Engine) -> None:
    assert math.isnan(engine.stats()["mean_time_to_first_token"])
    ask(engine, PROMPT, 9)
    ask(engine, [*PROMPT, 1], 9)
    assert engine.stats()["waiting"] == 2
    engine.step()
    assert engine.stats()["running"] == 2
    began = time.monotonic()
    engine.run()
    took = time.monotonic() - began
    stats = engine.stats()
    assert stats["prompt_tokens"] == 11 and stats["new_tokens"] == 18
    assert stats["finished"] == 2 and stats["running"] == stats["waiting"] == 0
    assert stats["steps"] == 9  # what is dispatched ahead is not dispatched in vain
    assert stats["tokens_per_second"] > 16 / took / 2
    assert 0 < stats["mean_time_to_first_token"] < 60
    assert stats["max_waiting"] == 3 and stats["num_blocks"] == 64


def test_books_are_right_whoever_goes_when(
    tiny: tuple[TinyModel, LoadedModel], greedy: Greedy
) -> None:
    """Cancelled while they wait, read, write, are parked, or are on their way back."""
    engine = make(
        tiny[1],
        num_blocks=12,
        max_batch=4,
        max_tokens=72,
        max_tokens_per_step=16,
        host_bytes=1 << 15,
    )
    random = np.random.default_rng(3)
    shared = random.integers(256, size=24).tolist()
    texts = [[*shared[:n], i] for n in (3, 17, 24) for i in range(2)]
    seen: set[str] = set()
    open_, kept = [], []
    for step in range(100):
        if len(open_) < 8:
            text = texts[int(random.integers(len(texts)))]
            open_.append((text, ask(engine, text, 40)))
        engine.step()
        scheduler = engine._scheduler
        if step % 3 == 0:
            text, stream = open_.pop(int(random.integers(len(open_))))
            (state,) = [
                "parked" if each.parked else "arriving" if each.arriving else where
                for where in ("waiting", "running")
                for each in getattr(scheduler, where)
                if each.stream is stream
            ] or ["ended"]
            seen.add(state)
            stream.cancel()
            kept.append((text, stream))
    engine.run()
    assert {"waiting", "running", "parked"} <= seen
    for text, stream in [*kept, *open_]:
        tokens = tokens_of(stream)
        assert stream.finish_reason in ("cancelled", "length")
        assert tokens == greedy.after(text, len(tokens))
    assert engine.stats()["finished"] == len(kept) + len(open_)
    check_books(engine)
    engine.stop()
