"""A server in a process of its own, as `run` makes it; prints its URL, then "stopped".

python tests/support/http_process.py fake|books|broken|random|model|disk [delay] [drain]
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import tempfile
import time
from typing import Any

from fake_engine import FakeEngine
from serve.http_answers import Limits
from serve.http_server import run

SEED = 3  # of a model for which no answer to a soak's questions hangs on a rounding


def books(delay: float) -> Any:
    from books_engine import BooksEngine

    return BooksEngine(delay=delay)


def broken(delay: float) -> Any:
    """Loses the blocks of requests that are cancelled, memory, and some letters."""
    from books_engine import BooksEngine, Sequence
    from serve.interface import Event

    lost: list[Any] = []

    class Broken(BooksEngine):
        def _end(self, sequence: Sequence, event: Event) -> None:
            if event.finish_reason == "cancelled":
                lost.append((sequence.table.fork(), b"x" * (8 << 20)))
            super()._end(sequence, event)

        def _advance(self, sequence: Sequence) -> None:
            super()._advance(sequence)
            if len(sequence.said) == 19:
                sequence.shown = sequence.shown[:-1]  # said twice

    return Broken(num_blocks=4096, delay=delay)


def bad_disk() -> None:
    """A disk that is full now and then, slow, and fails."""
    from jax_kvblock.cache.disk import slot_file

    chance = random.Random(0)

    def faulty(call: Any, error: int) -> Any:
        def or_fails(*given: Any) -> None:
            fate = chance.random()
            if fate < 0.1:
                raise OSError(error, os.strerror(error))
            if fate < 0.2:
                time.sleep(0.1)
            call(*given)

        return or_fails

    slot_file.write_all = faulty(slot_file.write_all, errno.ENOSPC)
    slot_file.read_all = faulty(slot_file.read_all, errno.EIO)


def real(model: Any, **more: Any) -> Any:
    """The engine, with a pool so small that sequences have to make way.

    Of the soak's longest texts, of 306 tokens and fewer, it has room for one.
    """
    from serve.engine import Engine

    return Engine(
        model,
        num_blocks=40,
        block_size=8,
        max_batch=4,
        max_tokens_per_step=32,
        max_waiting=8,
        host_bytes=1 << 20,
        **more,
    )


def main(name: str, delay: str = "0", drain_seconds: str = "5") -> None:
    if name == "fake":
        engine: Any = FakeEngine(delay=float(delay))
    elif name in ("books", "broken"):
        engine = {"books": books, "broken": broken}[name](float(delay))
    else:
        more: dict[str, Any] = {}
        if name == "disk":
            more = {"disk": tempfile.mkdtemp(), "disk_bytes": 16 << 20}
        from serve.models import load_model, random_model

        model = load_model() if name == "model" else random_model(SEED)
        engine = real(model, **more)
        if name == "disk":
            bad_disk()
    limits = Limits(drain_seconds=int(drain_seconds))
    run(engine, port=0, limits=limits, ready=lambda url: print(url, flush=True))
    if hasattr(engine, "cache"):
        engine.cache.check()
    if getattr(engine, "tiers", None) is not None:
        print(json.dumps(engine.tiers.stats()["store"]))
    print("stopped", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
