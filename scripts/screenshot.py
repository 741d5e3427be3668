"""Picture of a web page in Chromium, without a display: `python scripts/screenshot.py PAGE PICTURE [--width 390]`.

PAGE is a file or an address, PICTURE a .png, .jpg or .webp file. Chromium comes from PyPI as part of Qt:
`pip install PyQt6-WebEngine` into an environment of its own; Plinth does not depend on it. Prints what the page writes
to its console, and exits with 1 if the page does not load or is wider than the window, which a phone shows as sideways
scrolling.
"""

import argparse
import os
import sys
from pathlib import Path

# Qt reads these at its import. As root, as in a container, Chromium starts without its sandbox only.
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QT_QUICK_BACKEND", "software")
os.environ.setdefault(
    "QTWEBENGINE_CHROMIUM_FLAGS", "--disable-gpu --log-level=3" + (" --no-sandbox" if os.geteuid() == 0 else "")
)

try:
    from PyQt6.QtCore import QTimer, QUrl
    from PyQt6.QtWebEngineCore import QWebEnginePage
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication
except ImportError as missing:
    sys.exit(f"error: {missing}; pip install PyQt6-WebEngine into an environment of its own, and use its python")

_MAX_HEIGHT = 16_000  # Chromium leaves the rest of a taller window empty.
_SIZE = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"


class Page(QWebEnginePage):
    """A page whose console messages go to stderr."""

    def javaScriptConsoleMessage(self, level: object, message: str | None, line: int, source: str | None) -> None:
        print(f"console: {message} ({source}:{line})", file=sys.stderr)


class Screenshot:
    """Loads a page, runs a script in it, waits, and saves the picture; `code` is the exit code."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.code = 0
        self.view = QWebEngineView()
        self.view.setPage(Page(self.view))
        self.view.resize(arguments.width, arguments.height)
        self.view.loadFinished.connect(self._loaded)
        self.view.load(QUrl.fromUserInput(arguments.page, str(Path.cwd())))
        self.view.show()

    def _later(self, function: object) -> None:
        QTimer.singleShot(int(1000 * self.arguments.wait_s), function)

    def _loaded(self, is_loaded: bool) -> None:
        if not is_loaded:
            self._finish(f"{self.arguments.page} does not load")
            return
        self.view.page().runJavaScript(self.arguments.script or "0")
        self._later(lambda: self.view.page().runJavaScript(_SIZE, self._measured))

    def _measured(self, size: list[float]) -> None:
        width, height = map(int, size)
        if width > self.arguments.width:
            self.code = 1
            print(f"the page is {width} px wide, the window {self.arguments.width} px", file=sys.stderr)
        if self.arguments.full:
            self.view.resize(self.arguments.width, min(height, _MAX_HEIGHT))
        self._later(self._save)

    def _save(self) -> None:
        saved = self.view.grab().save(self.arguments.picture)
        self._finish("" if saved else f"{self.arguments.picture} cannot be written")

    def _finish(self, problem: str) -> None:
        if problem:
            self.code = 1
            print(f"error: {problem}", file=sys.stderr)
        QApplication.quit()


def main() -> int:
    """Takes the picture; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page")
    parser.add_argument("picture")
    parser.add_argument("--width", type=int, default=1280, help="of the window in CSS pixels; a phone has 390")
    parser.add_argument("--height", type=int, default=800)
    parser.add_argument("--full", action="store_true", help="the whole page instead of its first screen")
    parser.add_argument("--scale", type=float, default=1, help="picture pixels for each CSS pixel")
    parser.add_argument("--script", help="JavaScript to run before the picture is taken")
    parser.add_argument("--wait-s", type=float, default=1, help="seconds after loading and after the script")
    arguments = parser.parse_args()
    os.environ["QT_SCALE_FACTOR"] = str(arguments.scale)
    application = QApplication(sys.argv[:1])
    screenshot = Screenshot(arguments)
    application.exec()
    return screenshot.code


if __name__ == "__main__":
    sys.exit(main())
