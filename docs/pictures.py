"""What the pictures of these documents share: a card, and what is drawn on it.

The same numbers give the same files, byte for byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT = 904, 40, 864
# Of each sequence: dark with white text, light with dark text.
DARK, LIGHT = ("#1d4a87", "#a8480f", "#1f6b45"), ("#cfe0f5", "#fae0c8", "#cfeadb")
NOBODY, CARD, FRAME, INK = "#eef1f6", "#fbfcfe", "#d4dbe7", "#14233a"
STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:13px;fill:#33415a}"
    f".h1{{font-size:18px;font-weight:bold;fill:{INK}}}"
    f".e{{font-weight:bold;fill:{INK}}}"
    f".m{{font-family:Menlo,Consolas,monospace;fill:{INK}}}"
    f".s{{font-size:12px}}.k{{font-size:12px;fill:{INK}}}"
    ".w{font-size:12px;fill:#fff}"
    ".b{fill:none;stroke:#8a97ad;stroke-width:1.2}"
)


class Picture:
    """A card of a fixed width, light in a light page and in a dark one."""

    def __init__(self, title: str, subtitle: str, height: int) -> None:
        self.title, self.height = title, height
        self.parts: list[str] = []
        self.text(LEFT, 40, title, "h1")
        self.text(LEFT, 62, subtitle)

    def text(
        self, x: float, y: float, text: str, style: str = "t", anchor: str = "start"
    ) -> None:
        at = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{style}"{at}>{escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, stroke: str = ""
    ) -> None:
        line = f' stroke="{stroke}" stroke-width="1.6"' if stroke else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" '
            f'fill="{fill}"{line}/>'
        )

    def line(self, path: str) -> None:
        self.parts.append(f'<path class="b" d="{path}"/>')

    def bracket(self, x: float, y: float, w: float, up: bool = False) -> None:
        """A bracket over w, whose ends point down; or up."""
        end = y - 5 if up else y + 5
        self.line(f"M{x:g} {end:g}V{y:g}H{x + w:g}V{end:g}")

    def svg(self) -> str:
        w, h = WIDTH, self.height
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" '
            f'width="{w}" height="{h}" role="img" aria-label="{escape(self.title)}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{w}" height="{h}" rx="10" fill="{CARD}"/>',
            f'<rect x=".5" y=".5" width="{w - 1}" height="{h - 1}" rx="10" fill="none" '
            f'stroke="{FRAME}"/>',
        ]
        return "\n".join([*head, *self.parts, "</svg>"]) + "\n"


def main(about: str, pictures: Mapping[str, Callable[[], Picture]]) -> None:
    """Writes pictures to their files; about: what the script says of itself."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    for name, draw in pictures.items():
        (options.out / name).write_text(draw().svg(), encoding="utf-8")
