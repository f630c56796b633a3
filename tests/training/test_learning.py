"""The tasks of the learning curve: each is told from the others by what comes out, and proves itself in sandboxes."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.campaigns import rows, run_local
from tests.support.places import LAUNCHERS

FOLDER = LAUNCHERS / "learning"
sys.path.append(str(FOLDER))
from operations import OPERATIONS, content, is_done  # type: ignore[import-not-found]  # noqa: E402
from searches import SEARCHES, VERBS, Search  # type: ignore[import-not-found]  # noqa: E402


@pytest.mark.parametrize("seed", range(3))
def test_a_command_does_its_own_operation_and_no_other(tmp_path: Path, seed: int) -> None:
    text = content(random.Random(seed))
    (tmp_path / "in").write_text(text)
    outputs = {}
    for name, operation in OPERATIONS.items():
        subprocess.run(["sh", "-c", operation.solution], cwd=tmp_path, env={"LC_ALL": "C"}, check=True)
        outputs[name] = (tmp_path / "out").read_text()
    for asked, done in itertools.product(OPERATIONS, OPERATIONS):
        assert is_done(OPERATIONS[asked], text, outputs[done]) == (asked == done), f"{asked} by {done}: {text!r}"
    assert not any(is_done(operation, text, output) for operation in OPERATIONS.values() for output in ("", text))


def test_texts_differ_from_rollout_to_rollout() -> None:
    chance = random.Random(0)
    assert len({content(chance) for _ in range(200)}) == 200


@pytest.mark.parametrize("seed", range(3))
def test_a_search_is_solved_by_its_turns_and_by_no_other_verb_or_file(tmp_path: Path, seed: int) -> None:
    search = Search("copy")
    world = search.world(random.Random(seed))
    (tmp_path / "d").mkdir()
    (tmp_path / "note").write_text(f"{world.animal}\n")
    for animal, name in world.names.items():
        (tmp_path / "d" / name).write_text(world.contents[animal])
    assert [_sh(tmp_path, command) for command, _ in search.turns(world)] == [out for _, out in search.turns(world)]
    for (verb, asked), (animal, name) in itertools.product(VERBS.items(), world.names.items()):
        _sh(tmp_path, asked.command.format(f"d/{name}"))
        output = (tmp_path / "out").read_text()
        solved = {other for other in VERBS if Search(other).is_done(world, output)}
        assert solved == ({verb} if animal == world.animal else set()), f"{verb} of {animal}: {output!r}"


def _sh(folder: Path, command: str) -> str:
    environment = {"LC_ALL": "C", "PATH": os.environ["PATH"]}
    return subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
def test_tasks_are_rewarded_when_solved_and_not_when_left(tmp_path: Path, base_sif: Path) -> None:
    for file in FOLDER.glob("*.py"):
        shutil.copy(file, tmp_path)
    campaign = yaml.safe_load((FOLDER / "campaign.yaml").read_text())
    kinds = {"ShellTask": OPERATIONS, "TwoTurns": SEARCHES[2], "ThreeTurns": SEARCHES[3]}
    some = {name: [*kind][:2] for name, kind in kinds.items()}  # the tests above try each of them without a sandbox
    classes = [{"path": f"shell_tasks:{name}", "include": names} for name, names in some.items()]
    campaign |= {"tasks": classes, "agent": ["oracle", "nop"], "samples": 1, "run_dir": str(tmp_path / "runs")}
    del campaign["model"], campaign["training"]
    campaign["environment"]["images"] = {"megaflow-base": str(base_sif)}
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(campaign))
    result, done = run_local(tmp_path / "campaign.yaml")
    assert result["state"] == "finished", done.stderr
    rewards = {"oracle": 1, "nop": 0}
    names = itertools.chain(*some.values())
    expected = {f"{name}/{agent}/0": ("completed", rewards[agent]) for name in names for agent in rewards}
    assert rows(result["run"]) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--staleness", "often"], "often: expected a whole number of at least 0"),
        (["--steps", "0"], "0: expected a whole number of at least 1"),
        (["--seed", "-1"], "-1: expected a whole number of at least 0"),
        (["--quick"], "unrecognized arguments: --quick"),
        (["--model", "smollm2"], "--model smollm2 has no task of one turn; use --turns 2 or --turns 3"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_set_up(given: list[str], said: str) -> None:
    command = ["bash", str(LAUNCHERS / "learn"), *given]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr
