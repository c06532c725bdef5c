"""Headless Chromium for tests of pages: what a page is once its scripts have run, and how it looks.

Knows how to start the browser so that it works as root, without a network and beside other browsers. Knows no page.
A test asks for the fixture `browser`; without Chromium it is skipped with the line that installs it.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

OPTIONS = (
    "--headless",
    "--no-sandbox",  # Chromium refuses to run as root with one
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers have 64 MB of /dev/shm
    "--hide-scrollbars",
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-quic", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"),  # nothing from elsewhere
)
PATIENCE_S = 180
"""A page takes two seconds on a quiet machine."""

MISSING = "needs Chromium: apt-get install chromium (.ci/run does it where it may)"


class Browser:
    """One program, started anew with an empty profile for every question."""

    def __init__(self, program: str) -> None:
        self._program = program

    @classmethod
    def installed(cls) -> Browser | None:
        found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        return cls(found) if found else None

    def document(self, page: Path, script: str = "", *, settle_ms: int = 3000) -> str:
        """Load a page, run `script` after it, and return the document as HTML.

        `script` is where a test clicks, hovers and asks: what it writes into the document comes back. `settle_ms` is
        virtual time for timers and animations, not time on the wall.
        """
        with tempfile.TemporaryDirectory(prefix="page-") as directory:
            if script:
                copy = Path(directory) / page.name
                html = page.read_text(encoding="utf-8")
                copy.write_text(f"{html}\n<script>addEventListener('load', () => {{ {script} }})</script>", "utf-8")
                page = copy
            return self._run("--dump-dom", f"--virtual-time-budget={settle_ms}", page.as_uri())

    def served(self, address: str, *, settle_ms: int = 3000) -> str:
        """The document behind a local server's address, once its scripts have run for so long."""
        return self._run("--dump-dom", f"--virtual-time-budget={settle_ms}", address)

    def screenshot(self, page: Path, out: Path) -> Path:
        """Write a PNG of the page into `out`."""
        self._run(f"--screenshot={out}", "--window-size=1120,2600", page.as_uri())
        return out

    def _run(self, *arguments: str) -> str:
        with tempfile.TemporaryDirectory(prefix="browser-") as profile:
            done = subprocess.run(
                [self._program, *OPTIONS, f"--user-data-dir={profile}", *arguments],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout
