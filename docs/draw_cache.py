"""Draws the pictures of docs/cache.md from a cache that does what they show.

    python docs/draw_cache.py            # writes them beside this file
    python docs/draw_cache.py --out DIR

The package has to be installed. The same code gives the same files, byte for byte.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from pictures import DARK, FRAME, INK, LEFT, LIGHT, NOBODY, Picture, main

from jax_kvblock import BlockManager, BlockTable, PrefixCache
from jax_kvblock.cache import TieredCache

SIZE, NUM_BLOCKS, HOST_BLOCKS = 4, 10, 6
NAMES = "ABC"
SYSTEM = (11, 12, 13, 14, 15, 16, 17, 18)  # what all three begin with
OWN = ((21, 22, 23, 24, 25, 26), (31, 32, 33), (41, 42, 43, 44, 45))


class Scene(NamedTuple):
    """Three sequences in one cache; the last one has ended."""

    cache: PrefixCache
    tables: list[BlockTable]  # as they were before any ended
    ids: list[list[int]]
    keys: list[list[bytes]]


def play() -> Scene:
    device = jax.devices("cpu")[0]
    manager = BlockManager(
        1,
        SIZE,
        num_kv_heads=1,
        head_dim=2,
        num_blocks=NUM_BLOCKS,
        dtype=jnp.float32,
        device=device,
    )
    cache = PrefixCache(manager, model="a model")
    tables = []
    for own in OWN:
        table = cache.open([*SYSTEM, *own])
        table.reserve(table.num_tokens)
        table.commit(table.num_tokens)
        tables.append(table)
    ids, keys = [t.ids.tolist() for t in tables], [t.keys for t in tables]
    tables[2].free()
    return Scene(cache, tables, ids, keys)


def draw_prefixes() -> Picture:
    """The tree of keys, the tables and the pool."""
    scene = play()
    picture = Picture(
        "Three sequences that begin alike, and the blocks that they share",
        f"Blocks of {SIZE} tokens. A block's key is made from its tokens and the key "
        "before it, so equal beginnings have equal keys.",
        560,
    )
    width, height, step = 4 * 30, 26, 158
    top, x0 = 116, LEFT + 92
    picture.text(LEFT, top - 22, "the tree of keys", "e")
    rows = (top + 58, top, top + 116)  # of A (with what is shared), B and C

    def node(column: int, y: float, tokens: tuple[int, ...], whose: list[int]) -> None:
        x = x0 + column * step
        for i in range(SIZE):
            held = i < len(tokens)
            for n, owner in enumerate(whose):
                part = height / len(whose)
                fill = (
                    "#fff" if not held else LIGHT[owner] if owner == 2 else DARK[owner]
                )
                if len(whose) > 1:
                    fill = DARK[owner] if held and owner != 2 else fill
                picture.box(x + 30 * i, y + n * part, 29, part, fill, "")
            picture.box(x + 30 * i, y, 29, height, "none", FRAME)
            if held:
                light = whose == [2]
                style = "k" if light else "w"
                picture.text(x + 30 * i + 14.5, y + 17, f"{tokens[i]}", style, "middle")

    def key(column: int, y: float, digest: bytes) -> None:
        x = x0 + column * step + width / 2
        picture.text(x, y + height + 15, digest.hex()[:8] + "…", "m", "middle")

    root = scene.tables[0].root
    y = rows[0]
    picture.text(LEFT, y + 17, root.hex()[:6] + "…", "m")
    picture.text(LEFT, y + 34, "the root", "s")
    everything = [[*SYSTEM, *own] for own in OWN]
    for block in range(2):
        node(block, y, SYSTEM[SIZE * block : SIZE * block + SIZE], [0, 1])
        key(block, y, scene.keys[0][block])
        left = x0 + block * step - (step - width) + (6 if block else 0)
        picture.line(f"M{left} {y + 13}H{x0 + block * step - 4}")
    for i, row in enumerate(rows):
        blocks = range(2, -(-len(everything[i]) // SIZE))
        for block in blocks:
            tokens = tuple(everything[i][SIZE * block : SIZE * block + SIZE])
            node(block, row, tokens, [i])
            if block < len(scene.keys[i]):
                key(block, row, scene.keys[i][block])
            else:
                x = x0 + block * step + width / 2
                picture.text(x, row + height + 15, "not full: no key", "s", "middle")
            x = x0 + block * step
            start = x - (step - width) + 6
            from_y = y + 13 if block == 2 else row + 13
            picture.line(f"M{start} {from_y}L{x - 4} {row + 13}")
        x = x0 + len(everything[i]) // SIZE * step + width + 22
        if len(everything[i]) % SIZE == 0:
            x -= step
        picture.text(x, row + 17, NAMES[i], "e")
    ended = x0 + 3 * step + width + 36
    picture.text(ended + 2, rows[2] + 17, "has ended", "s")

    y = 332
    picture.text(LEFT, y - 18, "the tables", "e")
    for i, name in enumerate(NAMES):
        at = LEFT + 276 * i
        ids = str(scene.ids[i]) if i != 2 else f"{scene.ids[i]}, freed"
        picture.text(at, y + 4, name, "e")
        picture.text(at + 20, y + 4, ids, "m")

    y = 398
    picture.text(LEFT, y - 20, "the pool", "e")
    stats = scene.cache.stats()
    counts = (
        f"{stats['held']} held, {stats['idle']} idle, {stats['free']} free. Idle "
        "blocks are found by their keys until their places are needed."
    )
    picture.text(LEFT + 68, y - 20, counts)
    pitch = 82.4
    live = [set(ids) for ids in scene.ids[:2]]
    for block in range(NUM_BLOCKS):
        x = LEFT + block * pitch
        whose = [i for i in range(2) if block in live[i]]
        idle = not whose and scene.cache._free_list.is_published(block)
        fills = [DARK[i] for i in whose] or [LIGHT[2] if idle else NOBODY]
        for n, fill in enumerate(fills):
            part = 40 / len(fills)
            picture.box(x, y + n * part, pitch - 8, part, fill)
        state = " and ".join(NAMES[i] for i in whose) or ("idle" if idle else "free")
        style = "w" if whose else "k"
        picture.text(x + (pitch - 8) / 2, y + 24, state, style, "middle")
        picture.text(x + (pitch - 8) / 2, y + 57, f"block {block}", "s", "middle")
    notes = (
        "A and B hold the blocks of their beginning together. A block that others see "
        "is copied before it is written.",
        "C's own full block stays, idle, until its place is needed. Its last block, "
        "which was not full, is free again.",
    )
    for n, note in enumerate(notes):
        picture.text(LEFT, 496 + 24 * n, note, "s")
    return picture


def draw_tiers() -> Picture:
    """Where blocks lie after some went down, and how they get there."""
    scene = play()
    tiers = TieredCache(
        scene.cache, host_bytes=HOST_BLOCKS * scene.cache.manager.spec.block_bytes
    )
    tiers.offload(scene.keys[2]).wait()  # what C had: two blocks that others hold, too
    tiers.make_room(scene.cache.num_free_blocks + 1)  # C's own one leaves the device
    tiers.drain()
    device, below = scene.cache._free_list, tiers.below.host.books
    names = {}
    for i, keys in enumerate(scene.keys):
        for n, key in enumerate(keys):
            names.setdefault(key, (f"{n}" if n < 2 else f"{NAMES[i]}{n}", i))
    found = tiers.lookup([*SYSTEM, *OWN[2]])
    tiers.close()

    picture = Picture(
        "Two tiers: the pool of the device, and slots in pinned host memory",
        "The same cache, after C's blocks were copied down and room was made on the "
        "device. 0 and 1 are the blocks that all begin with.",
        430,
    )

    def row(y: float, books: object, count: int, pitch: float) -> None:
        at = {books.find(key): key for key in names}  # type: ignore[attr-defined]
        for place in range(count):
            x = LEFT + place * pitch
            key = at.get(place)
            fill, text = NOBODY, ""
            if key is not None:
                name, owner = names[key]
                text, fill = name, LIGHT[owner] if owner == 2 else DARK[owner]
                if len(name) == 1:
                    fill = INK
            picture.box(x, y, pitch - 8, 36, fill, FRAME)
            style = "k" if fill in (NOBODY, *LIGHT) else "w"
            if text:
                picture.text(x + (pitch - 8) / 2, y + 23, text, style, "middle")

    picture.text(LEFT, 104, "the device's pool", "e")
    picture.text(LEFT + 160, 104, "any layout; blocks that are found by a key", "t")
    row(118, device, NUM_BLOCKS, 82.4)
    picture.text(LEFT, 318, "pinned host memory", "e")
    picture.text(LEFT + 170, 318, "slots, each a block in universal order", "t")
    row(332, below, HOST_BLOCKS, 82.4)

    down, up = 250, 640
    for x, ways, title in (
        (down, ("gather: a program", "copy: a thread"), "offload"),
        (up, ("scatter: a program", "copy: a thread"), "onboard"),
    ):
        picture.box(x - 70, 206, 140, 34, "#fff", FRAME)
        picture.text(x, 227, "staging, an array", "s", "middle")
        picture.text(x + 14, 188, ways[0], "s")
        picture.text(x + 14, 276, ways[1], "s")
        picture.text(x - 84, 227, title, "e", "end")
        for start, end in ((164, 202), (244, 300)):
            if title == "onboard":
                start, end = end, start
            back = end - 6 if end > start else end + 6
            picture.line(f"M{x} {start}V{end}M{x - 5} {back}L{x} {end}L{x + 5} {back}")
    device_tokens, host_tokens = found["device"], found["host"]
    text = (
        f"C comes again: {device_tokens} of its tokens are on the device, the next "
        f"{host_tokens} on the host. They are on their way up while others decode."
    )
    picture.text(LEFT, 404, text)
    return picture


PICTURES = {"cache_prefixes.svg": draw_prefixes, "cache_tiers.svg": draw_tiers}

if __name__ == "__main__":
    main(__doc__.splitlines()[0], PICTURES)
