"""What a terminal shows while the engine runs: requests, their text, and the pool."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

import numpy as np

from serve.interface import FREE, HELD, IDLE, SHARED, Stats, Stream

MARKS = {FREE: "·", HELD: "■", SHARED: "▣", IDLE: "□"}
COLORS = {FREE: 90, HELD: 32, SHARED: 33, IDLE: 34}  # ANSI's grey, green, yellow, blue
BAR = 10


@dataclass
class Shown:
    """A request on the screen."""

    name: str
    stream: Stream
    text: str = ""
    tokens: list[int] = field(default_factory=list)

    def read(self) -> None:
        """Take what has come, without waiting."""
        while (event := self.stream.take()) is not None:
            self.text += event.text
            if event.token_id is not None:
                self.tokens.append(event.token_id)


def printable(text: str) -> str:
    """Without what could move a terminal's cursor, or worse."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def frame(
    shown: Sequence[Shown], pool: np.ndarray, stats: Stats, width: int
) -> list[str]:
    """The lines of a screen so wide."""
    lines = [_request(each, width) for each in shown]
    lines += ["", *_pool(pool, width), _legend(pool), summary(stats)[: width - 1]]
    return lines


def summary(stats: Stats) -> str:
    """A line of numbers."""
    parts = [
        f"{stats['tokens_per_second']:.1f} tokens/s",
        f"{stats['running']} running",
        f"{stats['waiting']} waiting",
        f"{stats['cached_tokens']} of {stats['prompt_tokens']} prompt tokens cached",
    ]
    if stats["drafted_tokens"]:
        drafts = f"{stats['accepted_tokens']} of {stats['drafted_tokens']}"
        parts.append(f"{drafts} drafts accepted")
    if stats["preemptions"]:
        parts.append(f"{stats['preemptions']} made way")
    return ", ".join(parts)


def _request(each: Shown, width: int) -> str:
    stream = each.stream
    share = stream.num_new_tokens / stream.request.max_new_tokens
    done = stream.finish_reason is not None
    filled = BAR if done else int(share * BAR)
    bar = "━" * filled + "─" * (BAR - filled)
    count = f"{stream.num_new_tokens:4}"
    room = width - 1 - 14 - BAR - len(count) - 3
    text = " ".join(printable(each.text).split())
    tail = text if len(text) <= room else "…" + text[-room + 1 :]
    return f"{each.name[:13]:13} \033[{32 if done else 36}m{bar}\033[0m{count}  {tail}"


def _pool(pool: np.ndarray, width: int) -> list[str]:
    """A mark for each block, as many to a line as fit."""
    across = max((width - 1) // 8 * 8, 8)
    return [
        "".join(f"\033[{COLORS[state]}m{MARKS[state]}" for state in row) + "\033[0m"
        for row in (pool[i : i + across].tolist() for i in range(0, len(pool), across))
    ]


def _legend(pool: np.ndarray) -> str:
    names = {FREE: "free", HELD: "held", SHARED: "shared", IDLE: "idle"}
    counts = np.bincount(pool, minlength=len(names))
    return "  ".join(
        f"\033[{COLORS[state]}m{MARKS[state]}\033[0m {counts[state]} {name}"
        for state, name in names.items()
    )


class Screen:
    """Lines that are drawn over those before, in plain ANSI."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out, self._drawn = out, 0

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines in place of the last ones."""
        up = f"\033[{self._drawn}F" if self._drawn else ""
        body = "".join(f"{line}\033[K\n" for line in lines)
        self._out.write(f"{up}{body}\033[J")
        self._out.flush()
        self._drawn = len(lines)
