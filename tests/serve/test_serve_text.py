"""Text that comes token by token: whole characters, and nothing of a stop text."""

from __future__ import annotations

import numpy as np
import pytest
from llama_files import tokenizer
from serve.text import TextStream


def as_bytes(ids: list[int]) -> str:
    """A tokenizer whose tokens are bytes; those from 256 on are special."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def outcome(stream: TextStream, ids: list[int]) -> tuple[list[str], bool]:
    texts, stopped = [], False
    for token in ids:
        text, stopped = stream.push(token)
        texts.append(text)
        if stopped:
            break
    if not stopped:
        texts.append(stream.finish())
    return texts, stopped


def test_characters_come_whole() -> None:
    texts, _ = outcome(TextStream(as_bytes), list("aé漢😊!".encode()))
    assert texts == ["a", "", "é", "", "", "漢", "", "", "", "😊", "!", ""]


@pytest.mark.parametrize("text", ["", "x", "naïve 漢字 😊😊", "é" * 20, "\ufffd?"])
@pytest.mark.parametrize("specials", [False, True])
def test_all_text_comes_out(text: str, specials: bool) -> None:
    between = [300] * specials
    ids = [token for c in text for token in (*between, *c.encode())]
    texts, _ = outcome(TextStream(as_bytes, ["never"]), ids)
    assert "".join(texts) == text
    assert all("\ufffd" not in part for part in texts) or "\ufffd" in text


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("text", ["plain text", "naïve 漢字 😊😊", "é" * 20, "\ufffd?"])
def test_tokens_that_come_together_make_the_same_text(text: str, size: int) -> None:
    """Where the last one ends within a character, the whole ones before come out."""
    ids = list(text.encode())
    stream, texts = TextStream(as_bytes), []
    for first in range(0, len(ids), size):
        some = ids[first : first + size]
        came = stream.push_together(some)
        assert len(came) == len(some)
        texts += came
        shown = bytes(ids[: first + size]).decode(errors="ignore")
        assert "".join(texts) == shown or "\ufffd" in text
    assert "".join(texts) + stream.finish() == text


def test_broken_bytes_are_replaced_and_hold_nothing_up() -> None:
    texts, _ = outcome(TextStream(as_bytes), [0xE6, 0xBC, *b"abc"])
    assert "".join(texts) == "\ufffdabc" and texts[2] == "\ufffda"
    texts, _ = outcome(TextStream(as_bytes), [97, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 98])
    assert "".join(texts) == "a\ufffd\ufffd\ufffd\ufffd\ufffdb"
    texts, _ = outcome(TextStream(as_bytes), [97, 0xF0, 0x9F])
    assert texts == ["a", "", "", "\ufffd"]


def test_spaces_depend_on_the_token_before() -> None:
    """As with SentencePiece, whose first space is no part of the text."""
    words = {0: " the", 1: " sea", 2: "s"}

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).removeprefix(" ")

    stream = TextStream(decode, prompt=[0, 1])
    assert outcome(stream, [0, 1, 2, 0]) == ([" the", " sea", "s", " the", ""], False)
    assert outcome(TextStream(decode), [0, 1]) == (["the", " sea", ""], False)


def test_a_character_may_begin_in_the_prompt() -> None:
    first, *rest = "é".encode()
    assert outcome(TextStream(as_bytes, prompt=[97, first]), rest)[0] == ["é", ""]


def test_what_is_kept_of_a_prompt_begins_with_a_character() -> None:
    """SentencePiece's decoder makes U+FFFD of all bytes beside one that is none."""

    def decode(ids: list[int]) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return len(ids) * "\ufffd"

    prompt = list("é漢".encode())
    for given in (prompt, prompt[2:], [97, *prompt], prompt[:2]):
        texts, _ = outcome(TextStream(decode, prompt=given), list("b好a".encode()))
        assert "".join(texts) == "b好a"


def test_byte_pairs_of_a_real_tokenizer() -> None:
    made = tokenizer()
    text = "then naïve 漢 the inner 😊 on the"
    texts, _ = outcome(TextStream(made.decode), made.encode(text).ids)
    assert "".join(texts) == text and " the" in texts


@pytest.mark.parametrize(
    ("stops", "text", "wanted"),
    [
        (["END"], "so far END and on", "so far "),
        (["END"], "so EN END", "so EN "),
        (["aab"], "aaab", "a"),
        (["b", "abc"], "xabcb", "xa"),
        (["漢"], "a漢b", "a"),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
    ],
)
def test_stop_texts_end_it_in_front(stops: list[str], text: str, wanted: str) -> None:
    texts, stopped = outcome(TextStream(as_bytes, stops), list(text.encode()))
    assert stopped and "".join(texts) == wanted


def test_what_may_be_a_stop_text_is_held_back() -> None:
    texts, stopped = outcome(TextStream(as_bytes, ["END"]), list(b"aEbENE"))
    assert texts == ["a", "", "Eb", "", "", "EN", "E"] and not stopped


def test_stop_texts_against_the_plain_rule() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(random.choice(list("abé"), size=12))
        stops = ["".join(random.choice(list("abé"), size=3)) for _ in range(2)]
        texts, stopped = outcome(TextStream(as_bytes, stops), list(text.encode()))
        ends = [
            (text.find(stop) + len(stop), text.find(stop))
            for stop in stops
            if stop in text
        ]
        assert stopped == bool(ends)
        # The first one that is whole ends it; of several, the one that begins first.
        first = min(end for end, _ in ends) if ends else 0
        wanted = text[: min(at for end, at in ends if end == first)] if ends else text
        assert "".join(texts) == wanted
