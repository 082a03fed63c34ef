"""Draft tokens by prompt lookup: what followed when the text last went like this.

    tokens   ... the cat sat on ... the cat ran to ... the cat
    drafts   row 0: cat   1: ran   2: to   3: sat   4: on
                           parents: 0       1       0       3

A step computes the newest token and its drafts as rows of one sequence, each of which
sees its own ancestors (`tree_mask`). A draft is accepted if the token behind its parent
is the one that the draft guessed; what follows the last accepted one comes for free.
(Saxena, 2023; trees as in SpecInfer, Miao et al., 2023.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

MOST_DRAFTS = 31  # bits of a word, less the newest token's
LONGEST, SHORTEST = 4, 2  # tokens that have to be the same
BRANCHES = 2
MOST_PLACES = 16  # that are looked at, the last ones
LONGEST_PAUSE = 32  # steps without drafts, where the last ones were wrong


@dataclass(frozen=True)
class Draft:
    """A tree of guesses behind the newest token. The first guess's rows come first.

    Attributes:
        tokens: of rows 1, 2, ...
        parents: of the same rows, 0 being the newest token's.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depths(self) -> list[int]:
        """How far behind the newest token each row is, row 0 included."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def masks(self) -> list[int]:
        """The bits of the rows that each row sees, row 0 included."""
        masks = [1]
        for row, parent in enumerate(self.parents, start=1):
            masks.append(masks[parent] | 1 << row)
        return masks

    def accept(self, after: Sequence[int]) -> list[int]:
        """The tokens that come next, by what the model puts behind each row."""
        tokens, row = [after[0]], 0
        for child, parent in enumerate(self.parents, start=1):
            if parent == row and self.tokens[child - 1] == tokens[-1]:
                row = child
                tokens.append(after[row])
        return tokens


class PromptLookup:
    """Where a text's last tokens came before.

    Args:
        tokens: the text so far.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._misses = self._pause = 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the text's next tokens."""
        for token in tokens:
            self._tokens.append(int(token))
            end = len(self._tokens)
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends.setdefault(tuple(self._tokens[-size:]), []).append(end)

    def propose(self, most: int) -> Draft | None:
        """A tree of up to `most` drafts; None where the text is new.

        After trees of which nothing was right it pauses, twice as long each time.
        """
        if self._pause:
            self._pause -= 1
            return None
        for size in range(LONGEST, SHORTEST - 1, -1):
            *before, _ = self._ends.get(tuple(self._tokens[-size:]), [0])
            if before and most > 0:
                ends = before[-MOST_PLACES:]
                return _tree([self._tokens[end : end + most] for end in ends], most)
        return None

    def learn(self, num_accepted: int) -> None:
        """Note how many drafts of the last tree were right."""
        self._misses = 0 if num_accepted else self._misses + 1
        self._pause = min(2**self._misses - 1, LONGEST_PAUSE)


def _tree(chains: list[list[int]], most: int) -> Draft:
    """The newest chain, beside the newest ones that differ from it.

    They get nodes in turn, level by level, so that each has its share.
    """
    different: list[list[int]] = []
    for chain in reversed(chains):
        if not any(other[: len(chain)] == chain for other in different):
            different.append(chain)
        if len(different) == BRANCHES:
            break
    paths: dict[tuple[int, ...], None] = {}
    for level in range(1, most + 1):
        for chain in different:
            if level <= len(chain) and len(paths) < most:
                paths[tuple(chain[:level])] = None
    first = tuple(different[0])
    ordered = sorted(paths, key=lambda path: (path != first[: len(path)], len(path)))
    rows = {(): 0} | {path: row for row, path in enumerate(ordered, start=1)}
    return Draft(
        tuple(path[-1] for path in ordered), tuple(rows[path[:-1]] for path in ordered)
    )
