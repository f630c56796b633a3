"""The typed data of Harbor tasks, and the plain mapping in which block files store it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.sources import ImageMapping
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.tasks.harbor.data import HarborData
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.loading import image_requests, load_tasks
from megaflow_hpc.types import Task
from tests.support.harbor_tasks import write_steps, write_task


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
    """One planning reads a Dockerfile once, so task and image agree. The next planning reads it again."""
    path = write_task(tmp_path, toml="", dockerfile="FROM org/base:1\nRUN true\n")
    (tmp_path / "base").mkdir()
    mapping = ImageMapping({"org/base:1": "base"}, tmp_path)
    images = Images(ImageStore(tmp_path / "store"))
    tasks = load_tasks([str(path)], tmp_path, images.dockerfiles)
    (path / "environment" / "Dockerfile").write_text("FROM org/base:1\nONBUILD RUN true\n")
    assert list(images.resolve_all(image_requests(tasks), mapping, build=False)) == [tasks[0].image]
    with pytest.raises(ConfigError, match="Dockerfile:2: ONBUILD is not supported"):
        Images(images.store).resolve_all(image_requests(tasks), mapping, build=False)


def test_a_step_may_have_a_verifier_image_of_its_own(tmp_path: Path) -> None:
    toml = '[environment]\ndocker_image = "base"\n[[steps]]\nname = "first"\n'
    toml += '[steps.verifier]\nenvironment_mode = "separate"\n'
    path = write_task(tmp_path, toml=toml)
    tests = path / "steps" / "first" / "tests"
    tests.mkdir(parents=True)
    (tests.parent / "instruction.md").write_text("Fix it.\n")
    (tests / "Dockerfile").write_text("FROM org/judge:1\n")
    [step] = HarborData.of(read_harbor_task(path)).steps
    assert step.verifier.bundled
    environment = step.verifier_environment("one")
    assert environment is not None
    assert environment.image == "org/judge:1"
