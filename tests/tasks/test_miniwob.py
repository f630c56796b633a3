"""Tasks of MiniWoB++: imported from the image of desktops, solved, and not rewarded for doing nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.agents.without_model import NopAgent, OracleAgent
from megaflow_hpc.cli import main
from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.tasks.sets import miniwob, miniwob_oracle
from megaflow_hpc.types import Task
from tests.support.desktops import RandomClicker, played

ASKED = {
    "click-test-2": "Click button ONE.",
    "click-dialog": 'Close the dialog box by clicking the "x".',
    "focus-text": "Focus into the textbox.",
    "simple-arithmetic": "Solve the math problem and type your answer into the textbox. Press submit when done.",
}


def rewards(tasks: list[Task], agent: Any, desktop_sif: Path, scratch: Path) -> list[float]:
    async def played_in_turn() -> list[float]:
        async with ApptainerProvider(scratch) as provider:
            images = {"desktop": str(desktop_sif)}
            return [reward for reward, _ in [await played(task, images, provider, agent) for task in tasks]]

    return asyncio.run(played_in_turn())


def test_every_page_becomes_a_task_that_says_what_the_page_asks(
    desktop_sif: Path, scratch: Path, tmp_path: Path
) -> None:
    """An instruction is that of the served episode: a page asks for a text that depends on the seed, and the solution
    types the one of the instruction."""
    words = ["--image", str(desktop_sif), "-o", str(tmp_path), "--seeds", "2"]
    assert main(["tasks", "import", "miniwob", *words]) == 0
    tasks = {task.id: task for task in load_tasks([f"{tmp_path}/miniwob/*"], "/")}
    pages = {name.rpartition("-s")[0] for name in tasks}
    assert (len(pages), set(tasks)) == (130, {f"{page}-s{seed}" for page in pages for seed in range(2)})
    assert tasks["click-dialog-s0"].instruction.startswith('Close the dialog box by clicking the "x".')
    assert {task.network for task in tasks.values()} == {"gateway"}
    assert {service.name for task in tasks.values() for service in task.services} == {"screen"}
    keys = {service.env["SCREEN_KEY"] for task in tasks.values() for service in task.services}
    assert len(keys) == len(tasks)
    solved = {task.id for task in tasks.values() if Path(task.path, "solution/solve.sh").exists()}
    assert solved == {f"{page}-s{seed}" for page in miniwob_oracle.PAGES for seed in range(2)}
    record = json.loads((tmp_path / "miniwob.source.json").read_text())
    assert (record["revision"], record["licence"], record["tasks"]) == ("1.1.0", "MIT", len(tasks))
    seeds = [tasks[f"enter-text-s{seed}"] for seed in range(2)]
    assert seeds[0].instruction != seeds[1].instruction
    assert rewards(seeds, OracleAgent(), desktop_sif, scratch) == [1.0, 1.0]


def test_solutions_get_one_nothing_gets_zero_and_random_clicks_something_between(
    desktop_sif: Path, scratch: Path, tmp_path: Path
) -> None:
    """`python -m tests.bench.desktops --tasks` plays all pages."""
    for page, utterance in ASKED.items():
        miniwob.write_task(tmp_path / "tasks", miniwob.AskedPage(page, "3", utterance), "1.1.0")
    tasks = load_tasks([f"{tmp_path}/tasks/*"], "/")
    assert rewards(tasks, OracleAgent(), desktop_sif, scratch) == [1.0] * len(ASKED)
    assert rewards(tasks[:1], NopAgent(), desktop_sif, scratch) == [0.0]
    assert 0 < sum(rewards(tasks, RandomClicker(10), desktop_sif, scratch)) < len(ASKED)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "its pages are in the image of desktops"),
        (["--image", "/no/desktop.sif"], "--image /no/desktop.sif: no such file"),
        (["--image", "/no", "--from", "/tmp"], "leave out @VERSION, --from, --mirror"),
        (["--seeds", "0"], "--seeds"),
    ],
)
def test_a_wrong_call_names_the_remedy(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", "import", "miniwob", "-o", str(tmp_path / "tasks"), *words]) == 2
    assert reason in capsys.readouterr().err


def test_an_image_without_pages_and_one_that_lists_false_ones_are_refused(rootfs: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name an image built from containers/desktop\.def"):
        miniwob.read_pages(Path(rootfs), 1)
    image = tmp_path / "image"
    unused = shutil.ignore_patterns("share", "python3*", "gcc*")
    shutil.copytree(rootfs, image, symlinks=True, copy_function=os.link, ignore=unused)
    (image / "opt/miniwob").mkdir(parents=True)
    program = image / "usr/local/bin/screen"
    for version, line in (
        ("1.1.0", {"page": "../../evil", "seed": "0", "utterance": "x"}),
        ("1.1.0", {"page": "a", "seed": "0\nkey", "utterance": "x"}),
        ('1"\nkey = 1', {"page": "a", "seed": "0", "utterance": "x"}),
    ):
        (image / "opt/miniwob/VERSION").write_text(version)
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(line)}\nEND\n")
        program.chmod(0o755)
        with pytest.raises(ConfigError, match="its pages cannot be listed"):
            miniwob.read_pages(image, 1)
