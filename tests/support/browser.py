"""A real browser for tests: Qt WebEngine, which is Chromium, without a screen.

`Browser` starts this file as a process of its own, which holds one page, and talks to
it in lines of JSON. `pip install PyQt6-WebEngine` is all that it needs; the browser
is in it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Any

FLAGS = "QTWEBENGINE_CHROMIUM_FLAGS"
SETTINGS = {
    "QT_QPA_PLATFORM": "offscreen",
    "QT_QUICK_BACKEND": "software",
    # Pages of this machine alone are shown; root may have no sandbox.
    "QTWEBENGINE_DISABLE_SANDBOX": "1",
    FLAGS: "--disable-gpu --disable-background-networking",
    "QT_LOGGING_RULES": "*=false",
}


def has_browser() -> bool:
    """Whether the package is installed."""
    try:
        return importlib.util.find_spec("PyQt6.QtWebEngineWidgets") is not None
    except ImportError:  # not even PyQt6
        return False


class Browser:
    """A window with a page.

    Args:
        width, height: of the window.
        dark: whether pages are told that the system has a dark appearance.

    Example:
        >>> with Browser() as browser:
        ...     browser.open("http://127.0.0.1:8000")
        ...     browser.js("document.title")
    """

    def __init__(
        self, width: int = 1280, height: int = 800, *, dark: bool = False
    ) -> None:
        command = [sys.executable, "-P", __file__, str(width), str(height)]
        env = {**os.environ, **SETTINGS}
        if dark:
            env[FLAGS] += " --blink-settings=preferredColorScheme=0"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(
            command, env=env, stderr=subprocess.PIPE, **pipes
        )
        self._errors: list[str] = []
        self._reader = threading.Thread(target=self._keep_errors, daemon=True)
        self._reader.start()

    def _keep_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors += self._process.stderr

    def _ask(self, do: str, *given: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps([do, *given]) + "\n")
            stdin.flush()
            line = stdout.readline()
        if not line:
            self._reader.join(5)
            raise RuntimeError("the browser ended:\n" + "".join(self._errors))
        return json.loads(line)

    def open(self, url: str) -> None:
        """Shows a page, and waits until it is loaded."""
        assert self._ask("open", url), f"the browser cannot load {url}"

    def js(self, code: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        return self._ask("js", code)

    def wait_for(self, code: str, seconds: float = 30.0) -> Any:
        """Waits until an expression is true, and gives its value."""
        end = time.monotonic() + seconds
        while not (value := self.js(code)):
            assert time.monotonic() < end, f"not so after {seconds} seconds: {code}"
            time.sleep(0.02)
        return value

    def click(self, selector: str) -> None:
        """Presses the left button in the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        middle = f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})"
        self._ask("click", *self.js(middle))

    def type(self, text: str) -> None:
        """Presses the keys of a text, "\\n" is Enter, where the focus is."""
        self._ask("type", text)

    def resize(self, width: int, height: int) -> None:
        self._ask("resize", width, height)

    def save(self, path: str) -> None:
        """What the window shows, as a PNG file."""
        assert self._ask("save", path), f"cannot write {path}"

    def complaints(self) -> list[str]:
        """Warnings and errors of the console, those of the security policy too."""
        return self._ask("complaints")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# ---- the process of the browser ------------------------------------------------------


def main(width: int, height: int) -> None:
    from PyQt6.QtCore import QObject, QPoint, Qt, QUrl, pyqtSignal
    from PyQt6.QtTest import QTest
    from PyQt6.QtWebEngineCore import QWebEnginePage
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    complaints: list[str] = []

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(
            self, level: Any, message: str, line: int, source: str
        ) -> None:
            if level != QWebEnginePage.JavaScriptConsoleMessageLevel.InfoMessageLevel:
                complaints.append(f"{source}:{line}: {message}")

    class Asked(QObject):
        came = pyqtSignal(list)
        ended = pyqtSignal()

    app = QApplication(["browser"])
    view = QWebEngineView()
    page = Page(view)
    view.setPage(page)
    view.resize(width, height)
    view.show()

    def reply(value: Any) -> None:
        print(json.dumps(value), flush=True)

    def loaded(ok: bool) -> None:
        page.loadFinished.disconnect(loaded)
        reply(ok)

    def keys(text: str) -> None:
        for key in text:
            if key == "\n":
                QTest.keyClick(view.focusProxy(), Qt.Key.Key_Return)
            else:
                QTest.keyClicks(view.focusProxy(), key)

    def act(asked: list) -> None:
        do, *given = asked
        if do == "open":
            page.loadFinished.connect(loaded)
            page.load(QUrl(given[0]))
        elif do == "js":
            code = f"JSON.stringify({given[0]}) ?? null"
            page.runJavaScript(code, 0, lambda text: reply(json.loads(text or "null")))
        elif do == "click":
            left = Qt.MouseButton.LeftButton
            at = QPoint(*(round(x) for x in given))
            reply(QTest.mouseClick(view.focusProxy(), left, pos=at))
        elif do == "type":
            reply(keys(given[0]))
        elif do == "resize":
            reply(view.resize(*given))
        elif do == "save":
            reply(view.grab().save(given[0]))
        elif do == "complaints":
            reply(complaints)

    asked = Asked()
    asked.came.connect(act)
    asked.ended.connect(app.quit)

    def read() -> None:
        for line in sys.stdin:
            asked.came.emit(json.loads(line))
        asked.ended.emit()

    threading.Thread(target=read, daemon=True).start()
    app.exec()
    # Qt's own way out takes the page's process down in an order that it complains of.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
