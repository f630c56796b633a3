"""Tasks whose tests change during a campaign: the change is detected and named, and nothing is judged by it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger.tasks import planned_tasks
from megaflow_hpc.tasks.digests import changed, check_unchanged, definition_digest, fixed
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.types import Task
from tests.support.campaigns import Make, cli, rows
from tests.support.harbor_tasks import write_solved_task


@pytest.fixture
def task(tmp_path: Path) -> Task:
    write_solved_task(tmp_path / "tasks", "one")
    [task] = fixed(load_tasks(["tasks/*"], tmp_path))
    return Task.from_dict(json.loads(json.dumps(task.to_dict())))


def test_what_rollouts_do_not_read_may_change_and_a_copy_is_no_change(task: Task, tmp_path: Path) -> None:
    check_unchanged(task)
    (tmp_path / "tasks" / "one" / "instruction.md").write_text("kept with the run")
    (tmp_path / "tasks" / "one" / "tests" / "__pycache__").mkdir()
    for file in (tmp_path / "tasks").rglob("*"):
        os.utime(file, (1, 1))  # as a copy without times
    check_unchanged(task)
    (tmp_path / "tasks").rename(tmp_path / "away")
    shutil.copytree(tmp_path / "away", tmp_path / "tasks", symlinks=True)
    check_unchanged(task)
    assert changed([task]) == []


def test_a_tasks_definition_has_its_settings_and_instruction_wherever_it_is_stored(task: Task, tmp_path: Path) -> None:
    def today(folder: str = "tasks") -> str:
        [one] = fixed(load_tasks([f"{folder}/*"], tmp_path))
        return definition_digest(one)

    before, toml = today(), tmp_path / "tasks" / "one" / "task.toml"
    shutil.copytree(tmp_path / "tasks", tmp_path / "copied")
    assert today() == today("copied") == before
    settings = toml.read_text()
    toml.write_text("# a comment changes nothing\n" + settings)
    assert today() == before
    toml.write_text(settings + "\n[solution.env]\nA = 'b'\n")
    assert today() != before
    assert changed([task]) == [], "rollouts read the settings from the plan"
    toml.write_text(settings)
    (tmp_path / "tasks" / "one" / "instruction.md").write_text("another one")
    assert today() != before


@pytest.mark.parametrize("edit", ["bytes", "mode", "more", "gone", "link"])
def test_changed_tests_are_refused_and_named(task: Task, tmp_path: Path, edit: str) -> None:
    file = tmp_path / "tasks" / "one" / "tests" / "test.sh"
    said = "tests"
    if edit == "bytes":
        status = file.stat()
        file.write_text(file.read_text()[:-1] + "#")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        said = file.name
    elif edit == "mode":
        file.chmod(file.stat().st_mode ^ 0o100)
    elif edit == "more":
        file.with_name("conftest.py").touch()
    elif edit == "gone":
        shutil.rmtree(file.parent)
        said = "No such file"
    else:
        file.rename(tmp_path / "elsewhere.sh")
        file.symlink_to(tmp_path / "elsewhere.sh")
    with pytest.raises(ConfigError, match=rf"changed after the campaign was planned \(last: .*{said}"):
        check_unchanged(task)
    assert changed([task]) == ["one"]


def test_the_source_of_a_class_is_fixed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = tmp_path / "fixed_task_of_a_class.py"
    source.write_text("class Add:\n    image = 'base'\n    instruction = 'Add.'\n    def score(self, s): return 1.0\n")
    [task] = fixed(load_tasks(["fixed_task_of_a_class:Add"], tmp_path))
    check_unchanged(task)
    source.write_text(source.read_text().replace("1.0", "0.5"))
    with pytest.raises(ConfigError, match=source.name):
        check_unchanged(task)


@pytest.mark.slow  # a whole campaign, resumed twice
def test_a_campaign_judges_by_the_tests_that_it_was_planned_with(make_campaign: Make) -> None:
    run = Campaign.from_yaml(make_campaign(2, agent="oracle")).plan(launcher="local")
    [first, _] = [planned.task for planned in planned_tasks(run.dir, run.record).values()]
    test = Path(first["path"], "tests", "test.sh")
    planned = test.read_text()
    test.write_text("#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    done = cli("resume", run.path, "--launcher", "local")
    assert f"1 task was changed after the run was planned, so rollouts fail: {first['id']}" in done.stderr
    found = rows(run.path)
    assert found.pop(f"{first['id']}/oracle/0")[0] == "failed"
    assert set(found.values()) == {("completed", 1.0)}
    [failed] = [event for event in Run(run.path).status()["first_failures"] if event["kind"] == "user"]
    assert "changed after the campaign was planned" in failed["error"]
    test.write_text(planned)
    assert cli("resume", run.path, "--failed", "--launcher", "local").returncode == 0
    assert set(rows(run.path).values()) == {("completed", 1.0)}
