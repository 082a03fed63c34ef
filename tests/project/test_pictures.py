"""Pictures are drawn by their scripts, legible, and true."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

from jax_kvblock import paged_attention

DOCS = Path(__file__).parents[2] / "docs"
# Of each script: the pictures, and the document that shows them.
SCRIPTS = {
    "draw_paged_attention": (
        "paged_attention.md",
        ("paged_blocks.svg", "paged_rows.svg", "paged_shares.svg"),
    ),
    "draw_cache": ("cache.md", ("cache_prefixes.svg", "cache_tiers.svg")),
}
NAMES = tuple(name for _, names in SCRIPTS.values() for name in names)


def load(script: str) -> ModuleType:
    path = DOCS / f"{script}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(DOCS))  # as when the script runs
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(DOCS))
    return module


draw = load("draw_paged_attention")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_draws_what_is_there(script: str) -> None:
    document, names = SCRIPTS[script]
    drawn = load(script).PICTURES
    assert tuple(drawn) == names
    for name in names:
        assert (DOCS / name).read_text(encoding="utf-8") == drawn[name]().svg(), (
            f"run python docs/{script}.py"
        )
        assert f"]({name})" in (DOCS / document).read_text()


# ---- legible -------------------------------------------------------------------------

# Of the font's size: how wide a letter is, at most on average.
WIDTHS = {"m": 0.605, "h1": 0.57, "e": 0.6}
SIZES = {"h1": 18.0, "s": 12.0, "k": 12.0, "w": 12.0}


def texts(name: str) -> list[tuple[str, float, float, float, float]]:
    """Each text, and the box that it takes: left, top, right, bottom."""
    found = []
    for element in ElementTree.parse(DOCS / name).iter():
        if not element.tag.endswith("}text"):
            continue
        style, text = element.get("class", ""), "".join(element.itertext())
        size = SIZES.get(style, 13.0)
        width = WIDTHS.get(style, 0.52) * size * len(text)
        anchor = element.get("text-anchor", "start")
        left = float(element.get("x", 0)) - width * (anchor == "middle") / 2
        left -= width * (anchor == "end")
        bottom = float(element.get("y", 0))
        found.append((text, left, bottom - 0.75 * size, left + width, bottom))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_texts_lie_in_the_card_and_not_on_each_other(name: str) -> None:
    root = ElementTree.parse(DOCS / name).getroot()
    width, height = (float(root.get(side, 0)) for side in ("width", "height"))
    found = texts(name)
    assert len(found) > 20
    for text, left, top, right, bottom in found:
        inside = left > 8 and right < width - 8 and top > 8 and bottom < height - 8
        assert inside, f"{text!r} leaves the card"
    for one, other in itertools.combinations(found, 2):
        apart = (
            one[3] <= other[1]
            or other[3] <= one[1]
            or one[4] <= other[2]
            or other[4] <= one[2]
        )
        assert apart, f"{one[0]!r} lies on {other[0]!r}"


def luminance(colour: str) -> float:
    """As the Web Content Accessibility Guidelines define it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_texts_stand_out_on_light_and_dark_pages() -> None:
    assert all(contrast(dark, "#ffffff") >= 4.5 for dark in draw.DARK)
    assert all(contrast(light, draw.INK) >= 4.5 for light in (*draw.LIGHT, draw.NOBODY))
    pictures = load("pictures")
    style, paper = pictures.STYLE, pictures.CARD
    (grey,) = re.findall(r"^text\{.*?fill:(#\w{6})", style)
    for name in NAMES:
        text = (DOCS / name).read_text(encoding="utf-8")
        # The first thing drawn is the card, so that the page's colour never matters.
        card = re.findall(r"<(?:rect|text|path)[^>]*>", text)[0]
        assert f'fill="{paper}"' in card and 'width="904"' in card
        assert contrast(grey, paper) >= 4.5 and contrast(draw.INK, paper) >= 4.5


# ---- true ----------------------------------------------------------------------------


def test_rows_and_slots_are_those_of_paged_attention() -> None:
    """The value of a key is its slot, and a row sees its own position alone."""
    slots = jnp.arange(draw.NUM_BLOCKS * draw.BLOCK_SIZE, dtype=jnp.float32)
    pages = slots.reshape(draw.NUM_BLOCKS, draw.BLOCK_SIZE, 1, 1)
    out, lse = paged_attention(
        jnp.zeros((draw.ROWS, 1, 1)),
        (jnp.zeros_like(pages), pages),
        None,
        jnp.array(draw.TABLES),
        jnp.array(draw.KV_LENS),
        query_start=jnp.array(draw.QUERY_START),
        window=(0, 0),
        return_lse=True,
    )
    rows = draw.queries()
    wanted = [draw.slot(sequence, position) for sequence, position in rows]
    assert out[: len(rows), 0, 0].tolist() == wanted
    assert np.isneginf(lse[len(rows) :]).all() and len(rows) < draw.ROWS


def test_rows_see_as_many_keys_as_are_drawn() -> None:
    pages = jnp.zeros((draw.NUM_BLOCKS, draw.BLOCK_SIZE, 1, 1))
    _, lse = paged_attention(
        jnp.zeros((draw.ROWS, 1, 1)),
        (pages, pages),
        None,
        jnp.array(draw.TABLES),
        jnp.array(draw.KV_LENS),
        query_start=jnp.array(draw.QUERY_START),
        return_lse=True,
    )
    seen = np.exp(np.asarray(lse)[: len(draw.queries()), 0]).round().tolist()
    assert seen == [position + 1 for _, position in draw.queries()]


def test_a_shared_block_holds_the_same_positions_for_all() -> None:
    shared = [whose for _, whose in draw.owners().values() if len(whose) > 1]
    assert len(shared) == draw.BLOCK_SIZE
    for sequence, length in enumerate(draw.KV_LENS):
        for position in range(length):
            held, whose = draw.owners()[draw.slot(sequence, position)]
            assert held == position and sequence in whose


def test_shares_are_even_and_pieces_make_up_the_units() -> None:
    sizes = {end - begin for begin, end in draw.shares()}
    assert max(sizes) - min(sizes) <= 1
    tiles = [t for begin, end in draw.shares() for t in range(begin, end)]
    assert tiles == list(range(draw.KEY_HEADS * sum(draw.SEQUENCE_TILES)))
    counts = set()
    for unit in draw.units():
        own = draw.pieces(unit)
        held = [t for _, begin, end in own for t in range(begin, end)]
        assert held == list(range(unit[1], unit[2]))
        counts.add(len(own))
    assert {1, 2, 3} <= counts  # whole units, and units that are cut
    text = (DOCS.parent / "cpp/ops/attention/schedule/shares.cuh").read_text()
    assert "Begin(c) = total * c / ctas" in text  # what `shares` draws
