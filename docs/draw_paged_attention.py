"""Draws the pictures of docs/paged_attention.md, in the manner of docs/layouts.svg.

    python docs/draw_paged_attention.py            # writes them beside this file
    python docs/draw_paged_attention.py --out DIR

Every number in them follows from the constants below. The same constants give the same
files, byte for byte.
"""

from __future__ import annotations

import itertools

from pictures import DARK, FRAME, INK, LEFT, LIGHT, NOBODY, RIGHT, Picture, main

# The call of the first two pictures: a pool, and three sequences with new tokens.
BLOCK_SIZE, NUM_BLOCKS = 4, 8
NAMES = "ABC"
TABLES = ((5, 2, -1), (5, 7, 0), (3, 6, -1))
KV_LENS = (7, 10, 5)
QUERY_START = (0, 1, 7, 10)
ROWS = 12  # two of no sequence
ROLES = ("decodes: 1 row", "reads a chunk: 6 rows", "checks drafts: 3 rows")
EXAMPLE = (0, 6)  # the sequence and position whose slot is worked out
FORMULA = "slot = block_tables[b, p // block_size] * block_size + p % block_size"

# The third picture: KV tiles of each sequence and key head, and who takes them.
SEQUENCE_TILES = (11, 5, 2)
KEY_HEADS, CTAS = 2, 8

LEGEND_OF_ROWS = (
    "Rows of q go down, key positions across. Dark is the row's own position, light "
    "are the other keys that it sees."
)
LEGEND_OF_SHARES = (
    "A piece that is a whole unit is the result. The others of a unit are combined, "
    "each weighted by its sum."
)
UNITS = "A1: sequence A, key head 1. A cell is a tile of the keys that its rows see."
PIECES = "what a CTA has of one unit: an output, and the log of the sum of its weights"


# ---- what is drawn -------------------------------------------------------------------


def slot(sequence: int, position: int) -> int:
    """Where a position of a sequence lies in the pool."""
    block = TABLES[sequence][position // BLOCK_SIZE]
    return block * BLOCK_SIZE + position % BLOCK_SIZE


def owners() -> dict[int, tuple[int, list[int]]]:
    """Of each slot that is in use: the position in it, and whose it is."""
    found: dict[int, tuple[int, list[int]]] = {}
    for sequence, length in enumerate(KV_LENS):
        for position in range(length):
            found.setdefault(slot(sequence, position), (position, []))[1].append(
                sequence
            )
    return found


def queries() -> list[tuple[int, int]]:
    """Of each row of q that has one: its sequence, and its position there."""
    return [
        (sequence, KV_LENS[sequence] - QUERY_START[sequence + 1] + row)
        for sequence in range(len(TABLES))
        for row in range(QUERY_START[sequence], QUERY_START[sequence + 1])
    ]


def units() -> list[tuple[int, int, int]]:
    """Of each sequence and key head: the sequence, its first tile, and the end."""
    ends = [0]
    for tiles in SEQUENCE_TILES:
        for _ in range(KEY_HEADS):
            ends.append(ends[-1] + tiles)
    return [(i // KEY_HEADS, ends[i], ends[i + 1]) for i in range(len(ends) - 1)]


def shares() -> list[tuple[int, int]]:
    """The tiles of each CTA, from the first to the end."""
    total = KEY_HEADS * sum(SEQUENCE_TILES)
    begins = [total * cta // CTAS for cta in range(CTAS + 1)]
    return list(itertools.pairwise(begins))


def pieces(unit: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """What CTAs have of a unit: each CTA, its first tile there, and the end."""
    _, first, end = unit
    return [
        (cta, max(first, begin), min(end, stop))
        for cta, (begin, stop) in enumerate(shares())
        if max(first, begin) < min(end, stop)
    ]


# ---- the pictures --------------------------------------------------------------------


def draw_blocks() -> Picture:
    """The pool, the tables, and the slot of one key."""
    picture = Picture(
        "A pool of blocks, and the block tables of three sequences",
        f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens. A cell is a slot: the keys and "
        "values of one token. Its number is the token's position in its sequence.",
        432,
    )
    cell, pitch, top = 24, 104, 106
    for i, (name, table, length) in enumerate(zip(NAMES, TABLES, KV_LENS, strict=True)):
        y = top + 52 * i
        picture.text(LEFT, y + 17, name, "e")
        picture.text(LEFT + 24, y + 10, f"block_tables[{i}] = {list(table)}", "m")
        picture.text(LEFT + 24, y + 27, f"kv_lens[{i}] = {length}", "m")
        for entry, block in enumerate(table):
            x = 300 + entry * pitch
            if block < 0:
                picture.text(x, y + 17, "−1: no block", "s")
                continue
            picture.text(x + 2 * cell, y - 5, f"block {block}", "s", "middle")
            for offset in range(BLOCK_SIZE):
                _key(picture, x + offset * cell, y, [i], entry * BLOCK_SIZE + offset)
    x = 300 + 3 * pitch + 8
    picture.text(x, top + 10, "A and B begin with the", "s")
    picture.text(x, top + 27, "same 4 tokens: they", "s")
    picture.text(x, top + 44, "share block 5", "s")

    y = 306
    picture.text(LEFT, y - 26, "the pool", "e")
    order = "in the order of memory, one layer of it. Cells without a number may hold "
    picture.text(LEFT + 68, y - 26, order + "anything, also NaN.")
    held = owners()
    used = {block for table in TABLES for block in table}
    for block in range(NUM_BLOCKS):
        x = LEFT + block * pitch
        picture.text(x, y + 44, f"block {block}", "e" if block in used else "s")
        for offset in range(BLOCK_SIZE):
            position, whose = held.get(block * BLOCK_SIZE + offset, (None, []))
            _key(picture, x + offset * cell, y, whose, position, block in used)
    sequence, position = EXAMPLE
    block, offset = divmod(slot(*EXAMPLE), BLOCK_SIZE)
    for x, at in (
        (300 + position // BLOCK_SIZE * pitch + offset * cell, top + 52 * sequence),
        (LEFT + block * pitch + offset * cell, y),
    ):
        picture.box(x - 0.5, at - 0.5, cell, 27, "none", INK)
    picture.text(LEFT, 384, FORMULA, "m")
    name, entry = NAMES[sequence], position // BLOCK_SIZE
    picture.text(
        LEFT,
        406,
        f"Position {position} of {name}, framed: block_tables[{sequence}, {entry}] = "
        f"{block}, and {block} * {BLOCK_SIZE} + {offset} is slot {slot(*EXAMPLE)}.",
    )
    return picture


def _key(
    picture: Picture,
    x: float,
    y: float,
    whose: list[int],
    position: int | None,
    used: bool = True,
) -> None:
    """A slot: in the colours of those that hold it, and empty beyond their lengths."""
    cell, height = 23, 26
    whose = [i for i in whose if position is not None and position < KV_LENS[i]]
    if not whose:
        picture.box(x, y, cell, height, "#fff" if used else NOBODY, FRAME)
        return
    for n, i in enumerate(whose):
        part = height / len(whose)
        picture.box(x, y + n * part, cell, part, DARK[i])
    picture.text(x + cell / 2, y + 17, f"{position}", "w", "middle")


def draw_rows() -> Picture:
    """Rows of q, and the keys that each of them sees."""
    picture = Picture(
        "One call: a decode row, a chunk of a prefill, and drafts",
        "The new tokens of the same three sequences lie one after the other in q. They "
        "are the last positions of their sequence.",
        420,
    )
    cell, y = 34, 118
    picture.text(LEFT, y + 19, "q", "m")
    x0 = LEFT + 28
    found = queries()
    for row in range(ROWS):
        x = x0 + row * cell
        if row < len(found):
            picture.box(x, y, cell - 1, 28, DARK[found[row][0]])
            picture.text(x + 16.5, y + 18, f"{row}", "w", "middle")
        else:
            picture.box(x, y, cell - 1, 28, NOBODY, FRAME)
            picture.text(x + 16.5, y + 18, f"{row}", "k", "middle")
    for name, first, end in zip(NAMES, QUERY_START, QUERY_START[1:], strict=False):
        picture.bracket(x0 + first * cell, y - 8, (end - first) * cell - 1)
        middle = x0 + (first + end) / 2 * cell
        picture.text(middle, y - 14, name, "e", "middle")
    x = x0 + ROWS * cell + 16
    picture.text(x, y + 10, f"query_start = {list(QUERY_START)}", "m")
    picture.text(x, y + 27, f"kv_lens = {list(KV_LENS)}", "m")
    rest = f"Rows {QUERY_START[-1]} and after are of no sequence: they give zeros."
    picture.text(x, y + 54, rest, "s")

    y, x, small = 232, LEFT + 28, 22
    for i, (name, role, length) in enumerate(zip(NAMES, ROLES, KV_LENS, strict=True)):
        picture.text(x, y - 26, name, "e")
        picture.text(x + 14, y - 26, role, "s")
        for position in range(length):
            at = x + position * small + 10.5
            picture.text(at, y - 7, f"{position}", "k", "middle")
        own = range(QUERY_START[i], QUERY_START[i + 1])
        for n, row in enumerate(own):
            at = y + n * small
            picture.text(x - 8, at + 15, f"{row}", "k", "end")
            for position in range(length):
                seen, itself = position <= found[row][1], position == found[row][1]
                fill = DARK[i] if itself else LIGHT[i] if seen else "#fff"
                picture.box(x + position * small, at, small - 1, small - 1, fill, FRAME)
        x += length * small + 68
    picture.text(LEFT, 400, LEGEND_OF_ROWS)
    return picture


def draw_shares() -> Picture:
    """The line of all KV tiles, its shares, and the pieces that are combined."""
    found, total = units(), KEY_HEADS * sum(SEQUENCE_TILES)
    picture = Picture(
        "How the keys of few queries are shared out over a GPU",
        f"The KV tiles of all sequences lie in one line. Each of {CTAS} CTAs takes an "
        "equal share of it, however long they are.",
        420,
    )
    step = (RIGHT - LEFT) / total
    y = 140

    def at(tile: float) -> float:
        return round(LEFT + tile * step, 2)

    picture.text(LEFT, 96, "units", "e")
    picture.text(LEFT + 46, 96, UNITS)
    for n, (sequence, first, end) in enumerate(found):
        picture.bracket(at(first) + 1, y - 8, at(end) - at(first) - 3)
        name = f"{NAMES[sequence]}{n % KEY_HEADS}"
        picture.text(at((first + end) / 2), y - 15, name, "e", "middle")
        for tile in range(first, end):
            shade = (DARK if n % KEY_HEADS == 0 else LIGHT)[sequence]
            picture.box(at(tile), y, round(step - 1, 2), 26, shade)

    y = 196
    for cta, (begin, end) in enumerate(shares()):
        middle = at((begin + end) / 2)
        picture.bracket(at(begin) + 1, y - 22, at(end) - at(begin) - 3, up=True)
        picture.text(middle, y - 5, f"CTA {cta}", "e", "middle")
        picture.text(middle, y + 11, f"{end - begin} tiles", "s", "middle")

    y = 258
    picture.text(LEFT, y - 14, "pieces", "e")
    picture.text(LEFT + 56, y - 14, PIECES)
    result = 346
    picture.text(LEFT, result + 17, "results", "e")
    for n, unit in enumerate(found):
        sequence, first, end = unit
        middle = at((first + end) / 2)
        for cta, begin, stop in pieces(unit):
            x, w = at(begin) + 1, at(stop) - at(begin) - 3
            picture.box(x, y, w, 24, LIGHT[sequence], DARK[sequence])
            number = f"CTA {cta}" if stop - begin > 2 else f"{cta}"
            picture.text(x + w / 2, y + 16, number, "k", "middle")
            picture.line(f"M{x + w / 2:g} {y + 26}L{middle:g} {result - 4}")
        picture.box(middle - 18, result, 36, 26, DARK[sequence])
        name = f"{NAMES[sequence]}{n % KEY_HEADS}"
        picture.text(middle, result + 17, name, "w", "middle")
    picture.text(LEFT, 398, LEGEND_OF_SHARES)
    return picture


PICTURES = {
    "paged_blocks.svg": draw_blocks,
    "paged_rows.svg": draw_rows,
    "paged_shares.svg": draw_shares,
}


if __name__ == "__main__":
    main(__doc__.splitlines()[0], PICTURES)
