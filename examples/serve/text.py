"""Text that comes token by token: whole characters, and nothing of a stop text."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
CHARACTER = 4  # bytes, and so tokens, at most


class TextStream:
    """The text of a request.

    Args:
        decode: token ids to text.
        stops: texts that end it.
        prompt: the tokens before it, on whose end the first one's text may depend.

    Example:
        >>> stream = TextStream(tokenizer.decode, ["END"])
        >>> stream.push(17)
        (" a wor", False)
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        self._decode, self._stops = decode, tuple(stops)
        # A few tokens before, from the beginning of a character on, and later what is
        # not out yet.
        for size in range(CHARACTER, 2 * CHARACTER):
            self._ids = list(prompt[-size:])
            if not decode(self._ids).startswith(REPLACEMENT):
                break
        self._num_old = len(self._ids)
        self._old = decode(self._ids).rstrip(REPLACEMENT)  # the text of those before
        self._held = ""  # text that may be the beginning of a stop text

    def push(self, token: int) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop text has come."""
        self._ids.append(token)
        text = self._decode(self._ids)
        may_go_on = len(self._ids) - self._num_old < CHARACTER
        if (text.endswith(REPLACEMENT) and may_go_on) or len(text) < len(self._old):
            return "", False
        return self._add(text)

    def push_together(self, tokens: Sequence[int]) -> list[str]:
        """The same of several tokens, where there are no stop texts: one text of each.

        The last one has that of all, unless bytes of its character are to come.
        """
        ids = [*self._ids, *tokens]
        text = self._decode(ids)
        if text.endswith(REPLACEMENT) or len(text) < len(self._old):
            return [self.push(token)[0] for token in tokens]
        self._ids = ids
        return [""] * (len(tokens) - 1) + [self._add(text)[0]]

    def finish(self) -> str:
        """What was held back; bytes that are no character become U+FFFD."""
        text, stopped = self._add(self._decode(self._ids))
        return text if stopped else text + self._release(0)

    def _add(self, text: str) -> tuple[str, bool]:
        new = text[len(self._old) :]
        # Some tokens stay: the text of a token may depend on the one before.
        self._ids = self._ids[self._num_old :] if new else self._ids
        self._old = self._decode(self._ids)
        self._num_old = len(self._ids)
        self._held += new
        return self._without_stops()

    def _without_stops(self) -> tuple[str, bool]:
        if not self._stops:
            return self._release(0), False
        places = [self._held.find(stop) for stop in self._stops]
        found = [place for place in places if place >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            return text, True
        return self._release(self._may_begin()), False

    def _may_begin(self) -> int:
        """How many characters at the end may be the beginning of a stop text."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

    def _release(self, keep: int) -> str:
        place = len(self._held) - keep
        text, self._held = self._held[:place], self._held[place:]
        return text
