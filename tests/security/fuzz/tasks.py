"""Tasks of others: SWE-bench lines, Harbor directories, reward files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.tasks.formats import TASK_ID, format_of
from megaflow_hpc.tasks.harbor.data import HarborData
from megaflow_hpc.tasks.harbor.ignore import TaskFiles
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.harbor.rewards import MAX_REWARD, read_rewards
from megaflow_hpc.tasks.harbor.steps import steps_of
from megaflow_hpc.tasks.swebench.instances import read_instances
from megaflow_hpc.tasks.swebench.lines import load, read_tasks
from megaflow_hpc.tasks.swebench.runs import judge
from megaflow_hpc.types import Task
from tests.security.fuzz.target import PART, Broken, Feed, Target, parts
from tests.support.harbor_tasks import SEPARATE, STEPS, TOML


def _lines() -> list[bytes]:
    base: dict[str, Any] = {
        "instance_id": "o__r-1",
        "repo": "o/r",
        "problem_statement": "It fails.",
        "FAIL_TO_PASS": ["t.py::a"],
    }
    forms: list[dict[str, Any]] = [
        {
            **base,
            "FAIL_TO_PASS": '["t.py::a", "b"]',
            "PASS_TO_PASS": "['c']",
            "version": 1.5,
            "base_commit": "abc",
            "patch": "--- a\n",
        },
        {
            **base,
            "install_config": {"test_cmd": "pytest", "log_parser": "pytest", "env_vars": {"A": 1}},
            "docker_image": "x/y:1",
        },
        {
            **base,
            "install_config": "{'test_cmd': ['a', 'b']}",
            "test_cmds": ["a", "b"],
            "workdir": "/w",
            "runner": "named",
        },
        {
            **base,
            "image_name": "swesmith/x",
            "patch": "+bug",
            "eval_script": "#!/bin/sh\n",
            "env": {"A": "b"},
            "log_parser": "p",
        },
        {
            "org": "O",
            "repo": "r",
            "number": 7,
            "fix_patch": "p",
            "base": {"sha": "s"},
            "f2p_tests": {"a": {}},
            "p2p_tests": {"b": {}},
            "resolved_issues": [{"title": "t", "body": None}],
            "title": "x",
        },
    ]
    return [json.dumps(form).encode() for form in forms] + [
        b"\n".join(json.dumps({**base, "instance_id": f"i{n}"}).encode() for n in range(3))
    ]


@contextlib.contextmanager
def _swebench(folder: Path) -> Iterator[Feed]:
    """Read, made tasks of, and written again to the same."""
    file, again = folder / "instances.jsonl", folder / "again.jsonl"

    def feed(data: bytes) -> None:
        file.write_bytes(data)
        tasks = read_tasks(file)
        found = [instance for _, instance in read_instances(file)]
        for task, instance in zip(tasks, found, strict=True):
            _check(task)
            if load(task) != instance:
                raise Broken("a task's line is another")
            judge(instance, dict.fromkeys(instance.FAIL_TO_PASS, "passed"))
            for text in (*instance.FAIL_TO_PASS, *instance.PASS_TO_PASS, *(instance.env or {}), instance.test_cmd):
                _check_argument(text)
        text = "".join(json.dumps(instance.record()) + "\n" for instance in found)
        again.write_text(text)
        if [instance for _, instance in read_instances(again)] != found:
            raise Broken("written again, it is another instance")

    yield feed


def _check_argument(text: str) -> None:
    """Whether a program can be given a text."""
    if "\0" in text:
        raise Broken("a NUL")
    os.fsencode(text)


def _check(task: Task) -> None:
    """What the rest relies on."""
    if not TASK_ID.fullmatch(task.id):
        raise Broken("a task's id", repr(task.id))
    for text in (task.image, task.workdir or "", task.user or "", *task.env, *task.env.values()):
        _check_argument(text)
    if Task.from_dict(json.loads(json.dumps(task.to_dict(), default=str))).id != task.id:
        raise Broken("sent, it is another task")
    format_of(task).images(task)


def _directories() -> list[bytes]:
    dockerfile = b"FROM debian:12\nWORKDIR /app\nENV A=b\nCOPY note .\nRUN make\n"
    tests, ignore = b"echo 1 > /logs/verifier/reward.txt\n", b"*.draft\n!/test.sh\n"
    extra = '[environment.healthcheck]\ncommand = "true"\nretries = 2\n[verifier.environment]\ndocker_image = "x"\n'
    extra += '[metadata]\nsandbox_mode = "overlay"\n'
    tables = [TOML, STEPS, SEPARATE, TOML.replace('docker_image = "org/base:1"\n', ""), SEPARATE + extra]
    return [PART.join((table.encode(), b"<!-- canary -->\n\nFix it.\n", dockerfile, tests, ignore)) for table in tables]


_PLACES = ("task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh", "tests/.harborignore")


@contextlib.contextmanager
def _harbor(folder: Path) -> Iterator[Feed]:
    root = folder / "task"

    def feed(data: bytes) -> None:
        for step in ("first", "second"):
            for name in ("instruction.md", "tests/test.sh", "workdir/setup.sh"):
                (root / "steps" / step / name).parent.mkdir(parents=True, exist_ok=True)
                (root / "steps" / step / name).write_text("x\n")
        (root / "environment").mkdir()
        (root / "environment" / "note").write_text("x")
        try:
            for place, text in zip(_PLACES, parts(data, len(_PLACES)), strict=True):
                if text or not place.startswith("environment"):
                    (root / place).parent.mkdir(parents=True, exist_ok=True)
                    (root / place).write_bytes(text)
            task = read_harbor_task(root, Dockerfiles())
            _check(task)
            if HarborData.of(Task.from_dict(task.to_dict())) != HarborData.of(task):
                raise Broken("sent, it is another task")
            for step in steps_of(task):
                _check(step)
            TaskFiles(root).copy(root / "tests", folder / "copy")
        finally:
            remove_tree(root)
            remove_tree(folder / "copy")

    yield feed


@contextlib.contextmanager
def _rewards(folder: Path) -> Iterator[Feed]:
    """Both files; the verifier takes a ValueError for a task without a reward."""

    def feed(data: bytes) -> None:
        for name in ("reward.json", "reward.txt"):
            (folder / name).write_bytes(data)
            with contextlib.suppress(ValueError):
                found = read_rewards(folder)
                valid = all(abs(value) <= MAX_REWARD and name.isprintable() for name, value in found.items())
                if not found or not valid:
                    raise Broken("rewards", found)
            (folder / name).unlink()

    yield feed


def targets() -> list[Target]:
    """SWE-bench lines, Harbor directories, reward files."""
    words = (
        b"[environment]\n",
        b"[[steps]]\n",
        b"[verifier.environment]\n",
        b'docker_image = "x"\n',
        b'"""',
        b"'''",
        b"${HOME:-x}",
        b"1979-05-27T07:32:00Z",
        b"inf",
        b"artifacts = [",
        b'{source = "x", destination = "y"}',
        b"a.b.c = 1\n",
        b"[a" + b".a" * 900 + b"]\n",
    )
    rewards = [b"1", b"0.5\n", b'{"reward": 1, "tests": 0.25, "x": null}', b"-1e3", b"true", b"[1]"]
    return [
        Target(
            "swebench",
            _swebench,
            _lines,
            form="json",
            words=(b"('a',", b"__import__('os')", b"{id}", b"{0}", b"1e999", b"-" * 3000, b"(" * 300),
        ),
        Target("harbor", _harbor, _directories, words=words),
        Target("rewards", _rewards, lambda: rewards, form="json"),
    ]
