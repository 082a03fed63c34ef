"""Pictures of the server's page, from a server that runs; see docs/serving_http.md.

    python docs/draw_page.py http://127.0.0.1:8000 docs

Needs `pip install PyQt6-WebEngine pillow`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from browser import Browser

QUESTIONS = ("What is bread made of?", "Tell me about the oceans.")
SYSTEM = (
    "You are a friendly teacher of children. Explain things in a few short sentences, "
    "with an example from daily life, and use no difficult words."
)


def draw(url: str, folder: Path, name: str, *, dark: bool) -> None:
    """Asks a few questions, and takes a picture while the last answer comes."""
    with Browser(1120, 640, dark=dark) as browser:
        browser.open(url)
        browser.wait_for("document.querySelector('#state').textContent === 'connected'")
        browser.js(f"document.querySelector('#system').value = {SYSTEM!r}")
        browser.js("document.querySelector('#most').value = 60")
        for i, question in enumerate(QUESTIONS):
            last = i == len(QUESTIONS) - 1
            browser.js(f"document.querySelector('#times').value = {3 if last else 1}")
            browser.click("#text")
            browser.type(question + "\n")
            if not last:
                browser.wait_for("!document.querySelector('#send').disabled", 300)
        answers = "[...document.querySelectorAll('.assistant p')].slice(1)"
        said = f"{answers}.map(answer => answer.textContent).join('')"
        browser.wait_for(f"({said}).length > 200", 300)
        time.sleep(0.5)  # the pool is drawn four times a second
        with tempfile.TemporaryDirectory() as scratch:
            shot = Path(scratch) / "page.png"
            browser.save(str(shot))
            # Few colours, fewer bytes.
            picture = Image.open(shot).convert("RGB").quantize(256, dither=0)
            picture.save(folder / name, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="pictures of the server's page")
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    draw(options.url, options.folder, "serving_page.png", dark=False)
    draw(options.url, options.folder, "serving_page_dark.png", dark=True)


if __name__ == "__main__":
    main()
