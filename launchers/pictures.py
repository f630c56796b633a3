#!/usr/bin/env python3
"""Draws the pictures of docs/pictures from a run that works: the live view, a rollout in it, and the report's top.

usage: python launchers/pictures.py RUNS DIRECTORY

Waits for a run that begins under RUNS from now on, and writes watch.svg and watch-rollout.svg into DIRECTORY while it
works, and report.png when it has ended. `launchers/demo --pictures` does so with its second campaign. The last picture
needs Chromium.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megaflow_hpc.campaign.run import Run
from megaflow_hpc.cli.view.app import WatchApp

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
QUIET = ("--headless", "--disable-gpu", "--no-sandbox", "--disable-dev-shm-usage")
SIZE = "1280,1780"
"""Of the report's picture, in pixels."""
WAIT_S = 1800.0
START_S = 5.0
"""This program may take so long to start, while the run is planned beside it."""


def next_run(runs: Path) -> Run:
    """The next run that is planned under ``runs``."""
    begin, end = time.time() - START_S, time.monotonic() + WAIT_S
    while time.monotonic() < end:
        for found in runs.glob("*/run.json"):
            if found.stat().st_mtime > begin:
                return Run(found.parent)
        time.sleep(0.5)
    raise SystemExit(f"{runs}: no run began")


def at_work(app: WatchApp) -> list[int]:
    """The model calls of the rollouts that run and stand first, as far as their pod tells."""
    return [row.turns or 0 for row in app.snapshot.rollouts[:8] if row.stored is None] if app.snapshot else []


def has_ended(app: WatchApp) -> bool:
    """Whether nothing more will be seen at work."""
    return app.snapshot is not None and app.snapshot.status["state"] in ("finished", "cancelled")


def write_picture(app: WatchApp, path: Path) -> None:
    """Writes the screen as an SVG file without links to web fonts."""
    path.write_text(re.sub(r"@font-face \{.*?\}", "", app.export_screenshot(), flags=re.DOTALL), encoding="utf-8")


async def draw(run: Run, pictures: Path) -> None:
    """Draws the list while rollouts run, and of these the one with most calls."""
    app = WatchApp(run)
    async with app.run_test(size=(100, 30)) as pilot:
        while not has_ended(app) and max(at_work(app), default=0) < 1:
            await pilot.pause(0.5)
        write_picture(app, pictures / "watch.svg")
        made = at_work(app)
        await pilot.press(*["down"] * (made.index(max(made)) if made else 0), "enter")
        end = time.monotonic() + 60
        while time.monotonic() < end and "assistant" not in str(app.screen.query_one("#body").lines):
            await pilot.pause(0.5)
        write_picture(app, pictures / "watch-rollout.svg")


def draw_report(run: Run, picture: Path) -> None:
    """Draws the top of the report, once the run has ended."""
    end = time.monotonic() + WAIT_S
    while not run.dir.trajectories.exists() and time.monotonic() < end:
        time.sleep(1.0)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no report.png: none of {', '.join(BROWSERS)} is on PATH")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "megaflow_hpc", "report", run.path, "-o", folder], check=True)
        shown = [f"--window-size={SIZE}", "--hide-scrollbars", f"--screenshot={picture}", f"file://{folder}/index.html"]
        quiet = [
            "--headless",
            "--disable-gpu",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            f"--user-data-dir={folder}/b",
        ]
        subprocess.run([browser, *quiet, *shown], check=True, timeout=120, stderr=subprocess.DEVNULL)


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    pictures = Path(sys.argv[2]).absolute()
    pictures.mkdir(parents=True, exist_ok=True)
    run = next_run(Path(sys.argv[1]))
    asyncio.run(draw(run, pictures))
    draw_report(Run(run.path), pictures / "report.png")
    print(f"pictures: {pictures}")


if __name__ == "__main__":
    main()
