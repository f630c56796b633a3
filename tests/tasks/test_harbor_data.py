"""The typed data of Harbor tasks, and the plain mapping by which they travel in block files."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from megaflow_hpc.environments.images.mapping import ImageMapping
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.tasks.harbor.data import HarborData
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.images import image_requests
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.types import Task
from tests.support.harbor_tasks import SEPARATE, write_files, write_steps, write_task

STEPS_BEFORE = """\
{
 "upload_environment": false,
 "healthcheck": {},
 "steps": [
  {
   "name": "first",
   "instruction": "Do the first.\\n",
   "agent_timeout_s": 630.0,
   "user": "1000",
   "min_reward": {
    "reward": 0.5
   },
   "healthcheck": {
    "command": "test -f ready",
    "retries": 3,
    "interval_sec": 5.0,
    "timeout_sec": 30.0,
    "start_interval_sec": 5.0,
    "start_period_sec": 0.0
   },
   "workdir": "ROOT/steps/first/workdir",
   "tests": [
    "ROOT/tests",
    "ROOT/steps/first/tests"
   ],
   "solution": "ROOT/steps/first/solution",
   "solution_env": {
    "WORD": "solved"
   },
   "artifacts": [
    {
     "source": "/app/log",
     "destination": null,
     "exclude": []
    }
   ],
   "verifier": {
    "timeout_s": 620.0,
    "user": null,
    "env": {
     "WHO": "all"
    },
    "network": null,
    "collect": []
   }
  },
  {
   "name": "second",
   "instruction": "Do the second.\\n",
   "agent_timeout_s": null,
   "user": null,
   "min_reward": {
    "reward": 0.0,
    "extra": 0.0
   },
   "healthcheck": {},
   "workdir": null,
   "tests": [
    "ROOT/tests",
    "ROOT/steps/second/tests"
   ],
   "solution": "ROOT/steps/second/solution",
   "solution_env": {
    "WORD": "solved"
   },
   "artifacts": [
    {
     "source": "/app/log",
     "destination": null,
     "exclude": []
    }
   ],
   "verifier": {
    "timeout_s": 610.0,
    "user": null,
    "env": {
     "WHO": "second"
    },
    "network": null,
    "collect": []
   }
  }
 ],
 "reward_strategy": "mean"
}
"""
"""What version 0.1 wrote of the task with steps into run.json and the blocks."""

SEPARATE_BEFORE = """\
{
 "upload_environment": false,
 "healthcheck": {},
 "tests": [
  "ROOT/tests"
 ],
 "solution": "ROOT/solution",
 "solution_env": {},
 "artifacts": [
  {
   "source": "answer",
   "destination": null,
   "exclude": []
  },
  {
   "source": "/data",
   "destination": "kept",
   "exclude": [
    "*.tmp"
   ]
  },
  {
   "source": "/missing",
   "destination": null,
   "exclude": []
  }
 ],
 "verifier": {
  "timeout_s": 620.0,
  "user": null,
  "env": {},
  "network": null,
  "collect": [
   {
    "command": "cat hidden > answer; id -u > /logs/artifacts/first; chmod 777 /logs/artifacts",
    "timeout_s": 60.0,
    "user": null
   },
   {
    "command": "id -u > /logs/artifacts/second",
    "timeout_s": 60.0,
    "user": "1000"
   }
  ],
  "environment": {
   "id": "environment",
   "instruction": "",
   "image": "base",
   "path": "ROOT",
   "kind": "harbor",
   "workdir": "/app",
   "user": null,
   "env": {},
   "agent_timeout_s": 900.0,
   "verifier_timeout_s": 600.0,
   "limits": {
    "memory_mb": null,
    "cpus": null,
    "disk_mb": null,
    "processes": 512,
    "cpu_s": null,
    "wall_s": null
   },
   "network": null,
   "mode": null,
   "metadata": {
    "harbor": {}
   }
  },
  "bundled": false
 }
}
"""
"""The same of the task with a separate verifier."""


@pytest.mark.parametrize(("written", "name"), [(STEPS_BEFORE, "walk"), (SEPARATE_BEFORE, "apart")])
def test_tasks_of_runs_made_before_are_read(tmp_path: Path, written: str, name: str) -> None:
    if name == "walk":
        root = write_steps(tmp_path)
    else:
        files = {"task.toml": SEPARATE, "instruction.md": "x", "tests/test.sh": "true"}
        root = write_files(tmp_path / name, files)
    now = read_harbor_task(root)
    harbor = json.loads(written.replace("ROOT", str(root)))
    before = Task.from_dict({**now.to_dict(), "metadata": {"harbor": harbor}})
    old, new = HarborData.of(before), HarborData.of(now)
    assert format_of(before).images(before) == format_of(now).images(now)
    assert old.verifier_environment(now.id) == new.verifier_environment(now.id)
    steps = [_with_todays_fields(HarborData.of(step)) for step in format_of(before).steps(before)]
    assert steps == [HarborData.of(step) for step in format_of(now).steps(now)]
    if name == "walk":
        assert old == new


def _with_todays_fields(data: HarborData) -> HarborData:
    """The verifier's environment is a task of its own, whose newer fields an old run lacks."""
    known = data.verifier.environment
    verifier = msgspec.structs.replace(data.verifier, environment=known and Task.from_dict(known).to_dict())
    return msgspec.structs.replace(data, verifier=verifier)


def test_data_survive_the_way_through_a_block_file(tmp_path: Path) -> None:
    task = read_harbor_task(write_steps(tmp_path))
    back = Task.from_dict(json.loads(json.dumps(task.to_dict())))
    assert (back, HarborData.of(back)) == (task, HarborData.of(task))


def test_what_this_version_cannot_read_names_the_task_and_the_field() -> None:
    task = Task("one", "Fix it.", "base", "/nowhere", metadata={"harbor": {"verifier": {"timeout_s": "long"}}})
    with pytest.raises(ConfigError, match=r"task one: metadata\.harbor: Expected `float`.*timeout_s"):
        HarborData.of(task)
    with pytest.raises(ConfigError, match="task one: kind 'quiz': expected one of swebench, python, harbor"):
        format_of(Task("one", "Fix it.", "base", "/nowhere", kind="quiz"))


def test_a_dockerfile_is_parsed_once_for_task_and_image(tmp_path: Path) -> None:
    """So a campaign is planned from one state of it; whoever plans anew reads it anew."""
    path = write_task(tmp_path, toml="", dockerfile="FROM org/base:1\nRUN true\n")
    (tmp_path / "base").mkdir()
    mapping = ImageMapping({"org/base:1": "base"}, tmp_path)
    images = Images(ImageStore(tmp_path / "store"))
    tasks = load_tasks([str(path)], tmp_path, images.dockerfiles)
    (path / "environment" / "Dockerfile").write_text("FROM org/base:1\nONBUILD RUN true\n")
    assert list(images.resolve_all(image_requests(tasks), mapping, build=False)) == [tasks[0].image]
    with pytest.raises(ConfigError, match="Dockerfile:2: ONBUILD is not supported"):
        Images(images.store).resolve_all(image_requests(tasks), mapping, build=False)
