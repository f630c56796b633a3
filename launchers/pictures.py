#!/usr/bin/env python3
"""Draws the pictures of `megaflow-hpc watch` in docs/pictures from a run of its own: watch.svg, watch-rollout.svg.

usage: python launchers/pictures.py [DIRECTORY]

In the environment of `launchers/test`. Builds the tasks of launchers/bugs.yaml in DIRECTORY (default: one that is
removed), lets mini-swe-agent work on them with the answers of a scripted engine that takes its time, and draws the view
while it works. Without Slurm; three minutes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from solutions import solution

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.cli.view.app import WatchApp, write_picture

ROOT = Path(__file__).resolve().parents[1]
UNSOLVED = "wcwidth-hangul-jamo"
"""A task of which the engine knows nothing."""
BROKEN = "isodate-decimal-months"
"""A task whose tests are made to say nothing."""
THINKING_S = 6.0
CAMPAIGN = """\
name: fix-bugs
tasks: tasks/*
agent: {name: mini-swe-agent, max_turns: 6}
samples: 2
model: {engine: scripted, script: answers.yaml}
environment: {images: {megaflow-bugs: images/megaflow-bugs.sif}}
slurm: {pods: {slots_per_rank: 8}}
"""


def prepare(folder: Path) -> Path:
    """Builds the tasks and writes the campaign file."""
    command = [sys.executable, "-m", "megaflow_hpc", "tasks", "build", str(ROOT / "launchers" / "bugs.yaml")]
    command += ["--output", str(folder / "tasks"), "--base", os.environ["MEGAFLOW_TEST_BASE_SIF"]]
    subprocess.run(command, check=True)
    tasks = [task.parent for task in sorted((folder / "tasks").glob("*/task.toml"))]
    (folder / "tasks" / BROKEN / "tests" / "test.sh").write_text("exit 0\n")
    known = [solution(task) for task in tasks if task.name != UNSOLVED]
    for number, script in enumerate(known):
        script["answers"] = [{"text": text, "delay_s": THINKING_S + number} for text in script["answers"]]
    looks = {"text": "I look first.\n\n```mswea_bash_command\nls -R | head -40\n```", "delay_s": 2 * THINKING_S}
    (folder / "answers.yaml").write_text(yaml.safe_dump({"tasks": known, "default": [looks]}))
    (folder / "campaign.yaml").write_text(CAMPAIGN)
    return folder / "campaign.yaml"


async def draw(run: Run, pictures: Path) -> None:
    """Draws the list when half is stored, and a rollout that has made some turns."""
    app = WatchApp(Run(run.path))
    async with app.run_test(size=(100, 30)) as pilot:
        while app.snapshot is None or len(app.snapshot.rollouts) < 22 or max(turns(app), default=0) < 2:
            await pilot.pause(0.5)
        write_picture(app, pictures / "watch.svg")
        made = turns(app)
        await pilot.press(*["down"] * made.index(max(made)), "enter")
        end = time.monotonic() + 15
        while time.monotonic() < end and "assistant" not in str(app.screen.query_one("#body").lines):
            await pilot.pause(0.5)
        write_picture(app, pictures / "watch-rollout.svg")


def turns(app: WatchApp) -> list[int]:
    """The model calls of the rollouts that run, as far as their pod tells."""
    assert app.snapshot is not None
    return [row.turns or 0 for row in app.snapshot.rollouts[:8] if row.stored is None]


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        run = Campaign.from_yaml(prepare(Path(sys.argv[1] if sys.argv[1:] else scratch).resolve())).submit("local")
        try:
            asyncio.run(draw(run, ROOT / "docs" / "pictures"))
        finally:
            assert run.local is not None
            run.local.kill()


if __name__ == "__main__":
    main()
