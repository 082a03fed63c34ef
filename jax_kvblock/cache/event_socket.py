"""Events over ZMQ, as vLLM sends them: a PUB socket, and a ROUTER socket that replays.

    PUB     topic, sequence number (8 bytes, big-endian), payload
    ROUTER  asked with an empty frame and a sequence number, answers with an empty
            frame, a sequence number and a payload for each batch from there on that
            is kept; at the end the number is -1 and the payload empty

A thread of its own sends: an engine that publishes appends to a log and goes on. Who
reads too slowly loses batches at the socket's high-water mark, sees the gap in the
numbers, and asks for them again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from jax_kvblock.cache.event_types import EventBatch
from jax_kvblock.cache.event_wire import BatchEncoder, Form, Hashes
from jax_kvblock.cache.events import EventLog

if TYPE_CHECKING:
    import zmq

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_LINGER = 1000  # milliseconds for messages that are under way when sockets close


class ZmqPublisher:
    """Sends batches to whoever subscribes, and again to whoever asks.

    Args:
      endpoint: what the PUB socket binds to, as "tcp://*:5557" or "ipc:///run/kv"; by
        default any free port of this machine alone, which `endpoint` tells.
      replay_endpoint: what the ROUTER socket binds to; None for no replay.
      topic: the first frame of each message, by which subscribers choose.
      capacity: batches that are kept, for replay and for a thread that is late.
      high_water_mark: messages that wait for one subscriber; what comes then is
        dropped for this one.
      form, hashes: see `BatchEncoder`.

    Attributes:
      endpoint, replay_endpoint: what subscribers connect to.

    Raises:
      ImportError: pyzmq or msgspec is not installed.
      zmq.ZMQError: an endpoint is taken, or is none.

    Example:
      >>> publisher = ZmqPublisher("tcp://*:5557", "tcp://*:5558", topic="kv-events")
      >>> stream = EventStream([EventSource.of(cache)], [publisher])
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:*",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        capacity: int = 10_000,
        high_water_mark: int = 10_000,
        form: Form = "maps",
        hashes: Hashes = "bytes",
    ) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ImportError(
                "ZmqPublisher: sockets are pyzmq's, which is not installed; "
                "`pip install pyzmq`"
            ) from error
        self._encoder = BatchEncoder(form, hashes)
        self._topic = topic.encode()
        self._log = EventLog(capacity)
        self._next = 0
        self._num_lost = 0
        self._failure: Exception | None = None
        self._closing = False
        # One byte in a pipe wakes the thread: a poller sees it beside the sockets.
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._pub = self._bind(zmq.PUB, endpoint, high_water_mark)
            self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
            self._router: zmq.Socket[bytes] | None = None
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                # Room for all that one answer may have.
                self._router = self._bind(zmq.ROUTER, replay_endpoint, capacity + 1)
                self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:
            self._close_sockets()
            raise
        self._poller = zmq.Poller()
        for readable in (self._wakened, self._router):
            if readable is not None:
                self._poller.register(readable, zmq.POLLIN)
        self._thread = threading.Thread(
            target=self._run, name="kvblock-events", daemon=True
        )
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Batches that left the log before the thread came to send them."""
        return self._num_lost

    def publish(self, batch: EventBatch) -> None:
        """Leaves a batch to the thread; never waits.

        Raises:
          RuntimeError: the publisher is closed, or its thread failed.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"ZmqPublisher: its thread ended with {self._failure!r}"
            ) from self._failure
        if self._closing:
            raise RuntimeError("ZmqPublisher: it is closed")
        self._log.publish(batch)
        self._wake()

    def close(self) -> None:
        """Sends what was published, and closes the sockets. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        self._close_sockets()

    # ---- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            closing = False
            while not closing:
                ready = dict(self._poller.poll())
                if self._wakened.fileno() in ready:
                    self._wakened.recv(4096)
                closing = self._closing  # before sending: nothing comes after it
                self._send_new()
                if self._router in ready:
                    self._answer()
        except Exception as error:
            self._failure = error  # the next `publish` raises it

    def _send_new(self) -> None:
        for batch in self._log.replay(self._next):
            self._num_lost += batch.sequence - self._next
            self._next = batch.sequence + 1
            payload = self._encoder.encode(batch)
            self._pub.send_multipart((self._topic, _number(batch), payload))

    def _answer(self) -> None:
        """Replays what one client asked for. What is no request gets no answer."""
        assert self._router is not None
        client, *request = self._router.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            return
        for batch in self._log.replay(int.from_bytes(request[1], "big")):
            payload = self._encoder.encode(batch)
            self._router.send_multipart((client, b"", _number(batch), payload))
        self._router.send_multipart((client, b"", END_OF_REPLAY, b""))

    # ---- sockets ---------------------------------------------------------------------

    def _bind(
        self, kind: int, endpoint: str, high_water_mark: int
    ) -> zmq.Socket[bytes]:
        import zmq

        bound: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._sockets.append(bound)
        bound.set_hwm(high_water_mark)
        bound.bind(endpoint)
        return bound

    def _wake(self) -> None:
        # A pipe that is full wakes the thread, too.
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def _close_sockets(self) -> None:
        for bound in self._sockets:
            bound.close(linger=_LINGER)
        self._waker.close()
        self._wakened.close()


def _number(batch: EventBatch) -> bytes:
    return batch.sequence.to_bytes(8, "big")
