"""A real browser without a window, which opens a page from the disk, and says what came of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

# Debian's packages: chromium-headless-shell, chromium.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 240
HEIGHT = 2400


@dataclass(frozen=True)
class Seen:
    """A page as the browser had it in the end. dom: as HTML. console: what scripts said there, and what it refused."""

    dom: str
    console: list[str]


def browser() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no browser on the PATH: apt-get install chromium-headless-shell")
    return found


def look(page: Path, width: int, *, screenshot: Path | None = None) -> Seen:
    """Opens the page in a window of that width, without a network. screenshot: a PNG of it, of HEIGHT."""
    shown = ["--dump-dom"] if screenshot is None else [f"--screenshot={screenshot}"]
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *(browser(), "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={profile}"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--hide-scrollbars"),
            *(f"--window-size={width},{HEIGHT}", *shown, page.as_uri()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return Seen(done.stdout, re.findall(r":CONSOLE[(:]\d+\)?\] (.*)", done.stderr))
