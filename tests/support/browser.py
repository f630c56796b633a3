"""A real browser without a window: Chromium, which shows a file and says what it did."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.requirements import REMEDY

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
VIRTUAL_MS = 20_000
"""Of the page's own clock, which runs as fast as it can: within it every chart is drawn."""


@dataclass(frozen=True)
class Visit:
    """What became of a page."""

    dom: str
    """Its markup after its scripts have run."""
    console: list[str]
    """What scripts and the browser itself said to the console."""
    asked_for: list[str]
    """Addresses that were asked for, other than of files."""


def browser() -> str:
    """The program; the test fails with the remedy where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(f"none of {', '.join(NAMES)} is on PATH; {REMEDY}")
    return found


def visit(page: Path, fragment: str, scratch: Path, *options: str) -> Visit:
    """Opens a file at ``#fragment`` as its reader would, and waits until its scripts have nothing to do."""
    log = scratch / "net.json"
    command = [browser(), "--headless", "--disable-gpu", "--no-sandbox", "--disable-dev-shm-usage", *options]
    command += [f"--user-data-dir={scratch / 'profile'}", f"--log-net-log={log}", "--window-size=1280,2400"]
    command += [f"--virtual-time-budget={VIRTUAL_MS}", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run(
        [*command, f"file://{page}#{fragment}"], capture_output=True, encoding="utf-8", timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    asked = re.findall(r'"url":"((?!file:|data:|blob:)[^"]*)"', log.read_text())
    return Visit(done.stdout, said, asked)
