"""Events over ZMQ: vLLM's frames, replay, and an engine that never waits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from jax_kvblock.cache.event_socket import ZmqPublisher
from jax_kvblock.cache.events import BlockRemoved, EventBatch

SECONDS = 20.0  # a machine that is busy; nothing waits as long where all is right


def batch(sequence: int, size: int = 1) -> EventBatch:
    return EventBatch(sequence, 0.5, (BlockRemoved((b"k" * 32,) * size),))


class Subscriber:
    """Reads what vLLM's subscribers read: three frames, and replays by a DEALER."""

    def __init__(self, publisher: ZmqPublisher, topic: str = "") -> None:
        context = zmq.Context.instance()
        self.sub, self.dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for one in (self.sub, self.dealer):
            one.set_hwm(4)
        self.sub.subscribe(topic)
        self.sub.connect(publisher.endpoint)
        if publisher.replay_endpoint is not None:
            self.dealer.connect(publisher.replay_endpoint)

    def receive(self, seconds: float = SECONDS) -> tuple[bytes, int, bytes] | None:
        if not self.sub.poll(seconds * 1000):
            return None
        topic, number, payload = self.sub.recv_multipart()
        assert len(number) == 8
        return topic, int.from_bytes(number, "big"), payload

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        found = []
        while self.dealer.poll(SECONDS * 1000):
            empty, number, payload = self.dealer.recv_multipart()
            assert empty == b"" and len(number) == 8
            if not payload:
                assert number == b"\xff" * 8
                return found
            found.append((int.from_bytes(number, "big"), payload))
        raise AssertionError("the replay has no end")

    def close(self) -> None:
        self.sub.close(linger=0)
        self.dealer.close(linger=0)


@pytest.fixture
def publisher(request: pytest.FixtureRequest) -> Iterator[ZmqPublisher]:
    """In this process, where a subscriber is there as soon as it has connected."""
    name = f"inproc://{request.node.name}"
    made = ZmqPublisher(
        name, name + "-replay", topic="kv", capacity=50, high_water_mark=4
    )
    yield made
    made.close()


@pytest.fixture
def subscriber(publisher: ZmqPublisher) -> Iterator[Subscriber]:
    made = Subscriber(publisher, "kv")
    yield made
    made.close()


def first_of(publisher: ZmqPublisher, subscriber: Subscriber) -> int:
    """Publishes until the subscription has arrived; the number of what came first."""
    for number in range(1000):
        publisher.publish(batch(number))
        found = subscriber.receive(0.05)
        if found is not None:
            return found[1]
    raise AssertionError("nothing arrives")


def test_frames_are_topic_number_and_payload(
    publisher: ZmqPublisher, subscriber: Subscriber
) -> None:
    number = first_of(publisher, subscriber) + 1
    publisher.publish(batch(number))
    found = subscriber.receive()
    assert found is not None
    topic, read, payload = found
    assert (topic, read) == (b"kv", number)
    told = {"type": "BlockRemoved", "block_hashes": [b"k" * 32], "medium": "GPU"}
    assert msgspec.msgpack.decode(payload) == [0.5, [told], None]


def test_over_tcp_and_after_close_all_has_arrived() -> None:
    publisher = ZmqPublisher(replay_endpoint="tcp://127.0.0.1:*")
    subscriber = Subscriber(publisher)
    assert publisher.endpoint.startswith("tcp://127.0.0.1:")
    start = first_of(publisher, subscriber) + 1
    assert [number for number, _ in subscriber.replay(0)] == list(range(start))
    publisher.publish(batch(start))
    publisher.publish(batch(start + 1))
    publisher.close()
    assert not publisher._thread.is_alive()
    for number in (start, start + 1):
        found = subscriber.receive()
        assert found is not None and found[1] == number
    subscriber.close()
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish(batch(start + 2))


def test_a_slow_subscriber_sees_the_gap_and_gets_all_again(
    publisher: ZmqPublisher, subscriber: Subscriber
) -> None:
    start = first_of(publisher, subscriber) + 1
    last = start + 40
    for number in range(start, last):  # beyond both high-water marks
        publisher.publish(batch(number))
    subscriber.replay(last)  # an answer comes after all that was published
    seen = []
    while (found := subscriber.receive(0.2)) is not None:
        seen.append(found[1])
    assert 0 < len(seen) < last - start  # what did not fit was dropped
    assert seen == list(range(start, start + len(seen)))
    publisher.publish(batch(last))
    found = subscriber.receive()
    assert found is not None and found[1] == last  # the gap
    replayed = subscriber.replay(seen[-1] + 1)
    assert [number for number, _ in replayed] == list(range(seen[-1] + 1, last + 1))
    assert publisher.num_lost == 0


def test_a_replay_of_all_that_is_kept_is_whole(
    publisher: ZmqPublisher, subscriber: Subscriber
) -> None:
    """More than the high-water mark of subscriptions, and no older than the log."""
    for number in range(120):
        publisher.publish(batch(number))
    assert [number for number, _ in subscriber.replay(0)] == list(range(70, 120))
    assert [number for number, _ in subscriber.replay(118)] == [118, 119]
    assert subscriber.replay(120) == []


def test_a_replay_is_whole_for_who_reads_it_later(
    publisher: ZmqPublisher, subscriber: Subscriber
) -> None:
    for number in range(50):
        publisher.publish(batch(number))
    subscriber.dealer.send_multipart([b"", bytes(8)])
    assert subscriber.dealer.poll(SECONDS * 1000)
    publisher.publish(batch(50))
    while publisher._next <= 50:  # by then the answer has been given
        time.sleep(0.001)
    read = [subscriber.dealer.recv_multipart()[1] for _ in range(51)]
    assert read == [*(n.to_bytes(8, "big") for n in range(50)), b"\xff" * 8]


def test_an_engine_does_not_wait_for_a_thread_that_is_stuck(
    publisher: ZmqPublisher, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = first_of(publisher, subscriber) + 1
    stuck, go = threading.Event(), threading.Event()
    encode = publisher._encoder.encode

    def slow(told: EventBatch) -> bytes:
        stuck.set()
        assert go.wait(SECONDS)
        return encode(told)

    monkeypatch.setattr(publisher._encoder, "encode", slow)
    publisher.publish(batch(start))
    assert stuck.wait(SECONDS)
    for number in range(start + 1, start + 101):
        publisher.publish(batch(number))  # returns, though nothing is sent
    go.set()
    # What the log could not keep is lost to all: a gap that a replay does not close.
    kept = [number for number, _ in subscriber.replay(start)]
    assert kept == list(range(start + 51, start + 101))
    assert publisher.num_lost == 50


def test_what_is_no_request_is_left_alone(
    publisher: ZmqPublisher, subscriber: Subscriber
) -> None:
    publisher.publish(batch(0))
    for frames in ([b"x"], [b"", b"short"], [b"", b"", b"", b""], [b"not", b"8" * 8]):
        subscriber.dealer.send_multipart(frames)
    assert [number for number, _ in subscriber.replay(0)] == [0]


def test_a_thread_that_ends_is_told(
    publisher: ZmqPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(told: EventBatch) -> bytes:
        raise MemoryError

    monkeypatch.setattr(publisher._encoder, "encode", fail)
    publisher.publish(batch(0))
    publisher._thread.join(SECONDS)
    with pytest.raises(RuntimeError, match=r"ended with MemoryError\(\)"):
        publisher.publish(batch(1))


def test_an_endpoint_that_is_taken_is_an_error_and_leaves_nothing() -> None:
    taken = ZmqPublisher("tcp://127.0.0.1:*")
    threads = threading.active_count()
    with pytest.raises(zmq.ZMQError) as caught:
        ZmqPublisher("inproc://free", taken.endpoint)
    assert threading.active_count() == threads
    # While the error has the other's frame. ZMQ gives endpoints back a little later.
    assert caught.tb is not None
    until = time.monotonic() + SECONDS
    while True:
        try:
            ZmqPublisher("inproc://free").close()
            break
        except zmq.ZMQError:
            assert time.monotonic() < until, "the first socket is open"
            time.sleep(0.01)
    taken.close()


def test_wake_ups_that_nobody_reads_do_not_block(publisher: ZmqPublisher) -> None:
    publisher._poller = None  # type: ignore[assignment]  # the thread ends
    publisher._wake()
    publisher._thread.join(SECONDS)
    for _ in range(1_000_000):
        try:
            publisher._waker.send(b"x" * 4096)
        except BlockingIOError:
            break
    publisher._wake()  # raises nothing, and returns


def test_who_forgets_to_close_ends_all_the_same() -> None:
    program = (
        "from jax_kvblock.cache.event_socket import ZmqPublisher\n"
        "from jax_kvblock.cache.events import BlockRemoved, EventBatch\n"
        "publisher = ZmqPublisher()\n"
        "publisher.publish(EventBatch(0, 0.0, (BlockRemoved((b'k',)),)))\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)
