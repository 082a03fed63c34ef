"""The page in a real browser: what people see when they type, stop, or lose the server.

The browser is Chromium as PyQt6-WebEngine has it. Without that package these tests
are skipped; with KVBLOCK_REQUIRE_BROWSER=1, as in CI, the run fails instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
from books_engine import BooksEngine
from browser import Browser, has_browser
from http_servers import served
from waiting import wait_until

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(not has_browser(), reason="PyQt6-WebEngine is not installed"),
]

# What the page has, as JavaScript.
ANSWERS = "[...document.querySelectorAll('.assistant p')].map(p => p.textContent)"
NOTES = "[...document.querySelectorAll('.assistant small')].map(p => p.textContent)"
FREE = "!document.querySelector('#send').disabled"
COUNTS = "[...document.querySelectorAll('#legend b')].map(b => +b.textContent)"
STATE = "document.querySelector('#state').textContent"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def engine() -> BooksEngine:
    """Slow, where a test says so, until the test has seen what it wants to see."""
    return BooksEngine(num_blocks=96, max_tokens=600)


@pytest.fixture
def page(window: Browser, engine: BooksEngine) -> Iterator[Browser]:
    """The window with a fresh page, which complains of nothing."""
    with served(engine) as url:
        window.open(url)
        window.wait_for(f"{STATE} === 'connected'")
        known = window.complaints()
        yield window
        assert window.complaints() == known, known


def put(page: Browser, **values: Any) -> None:
    """Fills fields of the settings."""
    for name, value in values.items():
        page.js(f"document.querySelector('#{name}').value = {json.dumps(value)}")


def ask(page: Browser, text: str) -> None:
    """Types a question, and waits until the page has taken it."""
    asked = "document.querySelectorAll('.user').length"
    before = page.js(asked)
    page.click("#text")
    page.type(text + "\n")
    page.wait_for(f"{asked} === {before + 1}")


def test_a_question_is_answered_as_the_tokens_come(
    page: Browser, engine: BooksEngine
) -> None:
    expected = "system: Be brief.\nuser: hello there\nassistant: " * 3
    engine.delay = 0.05
    put(page, system="Be brief.", most=120)
    assert "Ask something" in page.js("document.querySelector('#log').textContent")
    ask(page, "hello there")
    part = page.wait_for(f"({ANSWERS})[0]")
    assert len(part) < 120 and expected.startswith(part)
    assert page.js(f"!({FREE})")  # one question at a time
    engine.delay = 0
    page.wait_for(FREE)
    assert page.js(ANSWERS) == [expected[:120]]
    assert page.js("document.querySelector('.user').textContent") == "hello there"
    (note,) = page.js(NOTES)
    said = r"120 tokens · [\d.]+ tokens/s · 0 of 47 prompt tokens cached"
    assert re.fullmatch(said, note), note
    # The next question has what was said before, which the cache has, too.
    ask(page, "and?")
    page.wait_for(f"({ANSWERS}).length === 2 && {FREE}")
    cached, prompt = re.findall(r"(\d+) of (\d+)", page.js(NOTES)[1])[0]
    assert int(prompt) > 47 + 120 and int(cached) == 47 // 8 * 8 + 120


def test_the_pool_is_shown_as_it_fills(page: Browser, engine: BooksEngine) -> None:
    blank = "document.createElement('canvas').toDataURL()"
    image = "document.querySelector('#pool').toDataURL()"
    empty = page.wait_for(f"({COUNTS})[0] && {image}")
    assert page.js(COUNTS) == [96, 0, 0, 0] and empty != page.js(blank)
    engine.delay = 0.05
    put(page, most=150, times=3)
    ask(page, "what is shared by all of these answers")
    page.wait_for(f"({COUNTS})[1] > 0 && ({COUNTS})[2] > 0")
    held = page.js(image)
    assert held != empty
    engine.delay = 0
    page.wait_for(FREE)
    assert len(page.js(ANSWERS)) == 3
    page.wait_for(f"({COUNTS})[3] > 0 && ({COUNTS})[1] + ({COUNTS})[2] === 0")
    stats = engine.stats()
    assert page.js(COUNTS) == [stats["free_blocks"], 0, 0, stats["idle_blocks"]]
    told = page.js("document.querySelector('#pool').ariaLabel")
    assert f"{stats['idle_blocks']} idle" in told
    assert page.js(image) not in (empty, held)
    share = round(100 * stats["cached_tokens"] / stats["prompt_tokens"])
    assert page.js("document.querySelector('#cached').textContent") == f"{share} %"
    assert float(page.js("document.querySelector('#rate').textContent")) > 0


def test_stop_cancels(page: Browser, engine: BooksEngine) -> None:
    engine.delay = 0.05
    put(page, most=250, times=2)
    ask(page, "a long story")
    page.wait_for(f"({ANSWERS}).length === 2 && ({ANSWERS}).every(text => text)")
    page.click("#stop")
    page.wait_for(FREE)
    assert page.js(NOTES) == ["stopped", "stopped"]
    wait_until(lambda: engine.stats()["cancelled"] == 2)
    wait_until(lambda: engine.stats()["held_blocks"] == 0)


def test_refusals_are_shown(page: Browser) -> None:
    put(page, most=2000)
    ask(page, "too much")
    page.wait_for(FREE)
    (note,) = page.js(NOTES)
    assert "2000 may follow, of 600 at most" in note
    # What was refused is no part of the next question.
    put(page, most=90)
    ask(page, "less")
    page.wait_for(FREE)
    (_, answer) = page.js(ANSWERS)
    assert "user: less\nassistant: system" in answer and "too much" not in answer


def test_texts_are_no_markup(page: Browser) -> None:
    put(page, system="", most=40)
    ask(page, "<img src=x onerror=history.back()><b>bold</b>")
    page.wait_for(f"({ANSWERS})[0].length === 40 && {FREE}")
    assert page.js("document.querySelector('#log img, #log b')") is None
    assert page.js(ANSWERS)[0].startswith("user: <img src=x")


def test_a_new_chat_forgets(page: Browser) -> None:
    put(page, system="", most=30)
    ask(page, "first")
    page.wait_for(f"({ANSWERS}).length === 1 && {FREE}")
    page.click("summary")
    page.wait_for("document.querySelector('details').open")
    page.click("#new")
    page.wait_for(f"({ANSWERS}).length === 0")
    ask(page, "second")
    page.wait_for(f"({ANSWERS}).length === 1 && {FREE}")
    assert page.js(ANSWERS) == ["user: second\nassistant: user: "]


def test_a_server_that_is_gone_is_told(window: Browser) -> None:
    with served(BooksEngine()) as url:
        window.open(url)
        window.wait_for(f"{STATE} === 'connected'")
    window.wait_for(f"{STATE} === 'no connection to the server'")
    ask(window, "anyone?")
    window.wait_for(f"({NOTES})[0] === 'Failed to fetch' && {FREE}")


CONTRAST = """
(() => {
  const level = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(
      c => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = e => {
    const colour = getComputedStyle(e).backgroundColor;
    return colour === 'rgba(0, 0, 0, 0)' ? behind(e.parentElement) : colour;
  };
  const texts = 'h1, h2, p, small, dt, dd, li, summary, label, textarea, header span';
  const all = [...document.querySelectorAll(texts), document.querySelector('#stop')];
  return all.map(e => {
    const levels = [level(getComputedStyle(e).color), level(behind(e))].sort();
    return [e.id || e.tagName, (levels[1] + .05) / (levels[0] + .05)];
  });
})()
"""
NAMELESS = """
[...document.querySelectorAll('textarea, input, button')].filter(
  e => !(e.labels.length ? e.labels[0] : e).textContent.trim()).map(e => e.id)
"""
WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.mark.parametrize("dark", [False, True])
def test_everybody_can_read_it(dark: bool) -> None:
    """In light and dark, on a telephone, by name for those who hear it."""
    with served(BooksEngine()) as url, Browser(360, 700, dark=dark) as browser:
        browser.open(url)
        browser.wait_for(f"{STATE} === 'connected'")
        put(browser, most=20)
        browser.js("document.querySelector('details').open = true")
        browser.js("(document.querySelector('#text').value = 'hi', send(), 1)")
        browser.wait_for(f"({NOTES})[0]?.includes('cached')")
        back = browser.js("getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(20, 23, 27)" if dark else "rgb(246, 247, 249)")
        ratios = browser.js(CONTRAST)
        assert len(ratios) > 20
        assert [each for each in ratios if each[1] < 4.5] == []
        assert browser.js(NAMELESS) == []
        assert not browser.js(WIDER)
        assert browser.complaints() == []
