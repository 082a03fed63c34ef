"""The real engine behind HTTP: the same texts, tokens found, blocks given back."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("httpx")
pytest.importorskip("starlette")
import httpx
from http_servers import TEXT, chunks, served
from serve.engine import Engine
from serve.interface import Request
from serve.models import random_model
from waiting import wait_until

QUESTION = "What is kept in blocks, and who shares them? " * 2


def test_texts_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(
        random_model(), num_blocks=48, block_size=8, max_batch=2, max_tokens_per_step=16
    )
    with served(engine) as url:
        prompt = engine.model.tokenizer.encode(QUESTION)
        expected = engine.submit(Request(prompt=prompt, max_new_tokens=40)).text()
        body = {"model": "random-0", "prompt": QUESTION, "temperature": 0}
        whole = httpx.post(url + TEXT, json={**body, "max_tokens": 40}, timeout=60)
        answer = whole.json()
        assert answer["choices"][0]["text"] == expected
        details = answer["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": (len(prompt) - 1) // 8 * 8}
        given = {**body, "max_tokens": 40, "stream": True}
        parts = chunks(httpx.post(url + TEXT, json=given, timeout=60).text)
        assert "".join(part["choices"][0]["text"] for part in parts) == expected

        # Who leaves gives the blocks back; what was written stays to be found. Steps
        # take a while, so that not all tokens are there before.
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.05), step())[1])
        given = {**body, "max_tokens": 250, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", url + TEXT, json=given, timeout=60) as got:
            next(got.iter_lines())
            wait_until(lambda: engine.stats()["held_blocks"])
        wait_until(lambda: engine.stats()["held_blocks"] == 0)
        stats = httpx.get(url + "/pool").json()["stats"]
        assert stats["cancelled"] == 1 and stats["idle_blocks"] > 0
    engine.cache.check()
