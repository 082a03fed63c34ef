"""The picture of the particle system: lives that it computed, as an animated SVG.

Each dot is a particle, and the line that it takes is its life, again and again. Who is
born in a later frame begins later, so that at any time all ages are there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

WIDTH, HEIGHT, LEFT, RIGHT = 904, 600, 40, 864
TOP, BOTTOM = 190, 550  # of the panels
CARD, FRAME, INK, LINE = "#fbfcfe", "#d4dbe7", "#14233a", "#8a97ad"
STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:13px;fill:#33415a}"
    f".h1{{font-size:18px;font-weight:bold;fill:{INK}}}"
    f".e{{font-weight:bold;fill:{INK}}}"
    ".s{font-size:12px}"
    f".b{{fill:none;stroke:{LINE};stroke-width:1.2}}"
)
TITLE = "Particles: four graphs in one"
NODES = (
    ("SphereEmitter", "Rate, Seed, Lifetime"),
    ("GravityForce", "Gravity, DeltaTime"),
    ("DragForce", "DragCoeff, DeltaTime"),
    ("Integrate", "DeltaTime"),
)
LOOP = "the particles, and how many they are, to the next frame"
# Of a life: the colours that a particle has, and how much of it is seen.
COLOURS = ("#f0a52c", "#e2562d", "#a8327a", "#4a3f9c", "#2c4a86")
SEEN, SEEN_AT = (0, 0.9, 0.85, 0), (0, 0.05, 0.7, 1)
SLOWER, EVERY = 2, 6  # than life; frames from one corner of a line to the next
PIXELS, CAMERA, DOT = 50, 7, 2.1  # a meter; meters from the center; a dot's radius


class Panel(NamedTuple):
    """A run, and what is said of it. lives: positions float[particles, frames, 3]."""

    title: str
    lives: np.ndarray


def lives(
    rows: np.ndarray, counts: np.ndarray, rate: int, life: int, of: Sequence[int]
) -> np.ndarray:
    """Positions of those born in the first `life` frames, float[particles, life, 3].

    rows, counts: the particles after each frame, and how many. of: the columns where a
    position begins and ends, and that of the number.
    """
    begin, end, number = of
    found = np.full((rate * life, life, end - begin), np.nan)
    for frame, (now, count) in enumerate(zip(rows, counts, strict=True)):
        numbers = now[:count, number].astype(int)
        ours = numbers < len(found)
        ages = frame - numbers[ours] // rate
        found[numbers[ours], ages] = now[:count][ours, begin:end]
    assert not np.isnan(found).any(), "in so few frames not everybody lives to the end"
    return found


def picture(panels: Sequence[Panel], rate: int, seconds: float) -> str:
    """The SVG. rate: how many are born in a frame; seconds: of a life."""
    across = (RIGHT - LEFT) / len(panels)
    parts = [*card(len(panels)), *legend(seconds), *pipeline()]
    dots = []
    for i, panel in enumerate(panels):
        center = LEFT + across * (i + 0.5)
        parts.append(text(center, BOTTOM + 22, panel.title, "e", "middle"))
        if i:
            parts.append(line(f"M{LEFT + across * i:.0f} {TOP}V{BOTTOM}", 0.4))
        dots.append(project(panel.lives, center))
    life = panels[0].lives.shape[1]
    for birth in range(life):
        ours = slice(birth * rate, (birth + 1) * rate)
        together = [(paths[ours], sizes[ours]) for paths, sizes in dots]
        parts += born_together(together, birth / life, seconds * SLOWER)
    return "\n".join([*parts, "</svg>"]) + "\n"


# ---- particles -----------------------------------------------------------------------


def project(positions: np.ndarray, center: float) -> tuple[np.ndarray, np.ndarray]:
    """Where they are seen, [particles, frames, 2], and how large, [particles, frames].

    The camera looks along -z; the panel's middle is that of who is well seen.
    """
    x, y, z = np.moveaxis(positions, -1, 0)
    near = CAMERA / (CAMERA - z)
    up = PIXELS * y * near
    seen = up[:, : round(0.85 * up.shape[1])]
    middle = (TOP + BOTTOM) / 2 + (seen.max() + seen.min()) / 2
    return np.stack([center + PIXELS * x * near, middle - up], axis=-1), DOT * near


def born_together(
    dots: Sequence[tuple[np.ndarray, np.ndarray]], part: float, seconds: float
) -> list[str]:
    """Those that are born in one frame, after this part of a life."""
    begin = (part - 1) * seconds  # as if they had been there before
    loop = f'dur="{seconds:g}s" begin="{begin:.3f}s" repeatCount="indefinite"'
    age = 1 - part  # at first, and for good where nothing moves
    colours, seen = ";".join(COLOURS), ";".join(f"{s:g}" for s in SEEN)
    seen_at = ";".join(f"{t:g}" for t in SEEN_AT)
    made = [
        f'<g fill="{COLOURS[round(age * (len(COLOURS) - 1))]}" '
        f'fill-opacity="{np.interp(age, SEEN_AT, SEEN):.2f}">',
        f'<animate attributeName="fill" {loop} values="{colours}"/>',
        f'<animate attributeName="fill-opacity" {loop} values="{seen}" '
        f'keyTimes="{seen_at}"/>',
    ]
    for path, size in ((p, s) for some in dots for p, s in zip(*some, strict=True)):
        x, y = path[round(age * len(path)) % len(path)].round(1)
        corners = path[[*range(0, len(path) - 1, EVERY), -1]] - (x, y)
        values = ";".join(f"{dx:.1f},{dy:.1f}" for dx, dy in corners)
        made.append(
            f'<circle r="{size.mean():.1f}" cx="{x:.1f}" cy="{y:.1f}"><animateMotion '
            f'{loop} calcMode="linear" values="{values}"/></circle>'
        )
    return [*made, "</g>"]


# ---- what stands around them ---------------------------------------------------------


def card(runs: int) -> list[str]:
    said = (
        f"The same program runs {runs} times. Other values of its parameters compile "
        "nothing again."
    )
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{TITLE}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{CARD}"/>',
        f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" '
        f'fill="none" stroke="{FRAME}"/>',
        text(LEFT, 40, TITLE, "h1"),
        text(LEFT, 62, said),
    ]


def legend(seconds: float) -> list[str]:
    """The colours of a life."""
    stops = "".join(
        f'<stop offset="{i / (len(COLOURS) - 1):g}" stop-color="{colour}"/>'
        for i, colour in enumerate(COLOURS)
    )
    wide = 170
    return [
        f'<linearGradient id="age">{stops}</linearGradient>',
        f'<rect x="{RIGHT - wide}" y="32" width="{wide}" height="8" rx="4" '
        'fill="url(#age)"/>',
        text(RIGHT - wide, 60, "born", "s"),
        text(RIGHT, 60, f"{seconds:g} s old", "s", "end"),
    ]


def pipeline() -> list[str]:
    """The four graphs, their parameters, and what goes round."""
    wide, high, top = 170, 48, 86
    step = (RIGHT - LEFT - wide) / (len(NODES) - 1)
    made = []
    for i, (name, parameters) in enumerate(NODES):
        x = LEFT + step * i
        made += [
            f'<rect x="{x:g}" y="{top}" width="{wide}" height="{high}" rx="6" '
            f'fill="#eef1f6" stroke="{LINE}"/>',
            text(x + wide / 2, top + 20, name, "e", "middle"),
            text(x + wide / 2, top + 38, parameters, "s", "middle"),
        ]
        if i:
            start, end = x - step + wide + 4, x - 4
            made.append(line(f"M{start:g} {top + high / 2:g}H{end:g}m-6 -4l6 4l-6 4"))
    low, end, start = top + high, LEFT + wide / 2, RIGHT - wide / 2
    back = f"M{start:g} {low + 4}v14H{end:g}v-14m-4 6l4-6l4 6"
    middle, half = (LEFT + RIGHT) / 2, 170
    return [
        *made,
        line(back),
        f'<rect x="{middle - half:g}" y="{low + 8}" width="{2 * half}" height="20" '
        f'fill="{CARD}"/>',
        text(middle, low + 22, LOOP, "s", "middle"),
    ]


def line(path: str, opacity: float = 1.0) -> str:
    return f'<path class="b" opacity="{opacity:g}" d="{path}"/>'


def text(
    x: float, y: float, words: str, style: str = "t", anchor: str = "start"
) -> str:
    at = f'x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}"'
    return f"<text {at}>{words}</text>"
