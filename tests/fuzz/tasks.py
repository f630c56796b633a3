"""Fuzz the readers of tasks: SWE-bench lines, Harbor directories, reward files."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles
from megaflow_hpc.tasks.formats import TASK_ID, format_of
from megaflow_hpc.tasks.harbor.data import HarborData
from megaflow_hpc.tasks.harbor.format import steps_of
from megaflow_hpc.tasks.harbor.ignore import TaskFiles
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.harbor.rewards import read_rewards
from megaflow_hpc.tasks.swebench.instances import read_instances
from megaflow_hpc.tasks.swebench.plan import load, read_tasks
from megaflow_hpc.tasks.swebench.runs import judge
from megaflow_hpc.types import MAX_REWARD, Task
from tests.fuzz.contract import PART, Target, parts, reader, scratch
from tests.support.harbor_tasks import SEPARATE, STEPS, TOML


def _lines() -> list[bytes]:
    base = {"instance_id": "o__r-1", "repo": "o/r", "problem_statement": "It fails.", "FAIL_TO_PASS": ["t.py::a"]}
    lists_in_texts = {"FAIL_TO_PASS": '["t.py::a", "b"]', "PASS_TO_PASS": "['c']"}
    config = {"test_cmd": "pytest", "log_parser": "pytest", "env_vars": {"A": 1}}
    multi_swe = {"org": "O", "repo": "r", "number": 7, "fix_patch": "p", "base": {"sha": "s"}, "title": "x"}
    multi_swe |= {"f2p_tests": {"a": {}}, "p2p_tests": {"b": {}}, "resolved_issues": [{"title": "t", "body": None}]}
    smith = {"image_name": "swesmith/x", "patch": "+bug", "eval_script": "#!/bin/sh\n", "env": {"A": "b"}}
    named = {"install_config": "{'test_cmd': ['a', 'b']}", "test_cmds": ["a", "b"], "workdir": "/w", "runner": "named"}
    forms = [
        {**base, **lists_in_texts, "version": 1.5, "base_commit": "abc", "patch": "--- a\n"},
        {**base, "install_config": config, "docker_image": "x/y:1"},
        {**base, **named},
        {**base, **smith, "log_parser": "p"},
        multi_swe,
    ]
    three = b"\n".join(json.dumps({**base, "instance_id": f"i{n}"}).encode() for n in range(3))
    return [*(json.dumps(form).encode() for form in forms), three]


def _lines_found() -> list[bytes]:
    """Make tests, issues and a base of other types, and texts that no file or program can take."""
    start = b'{"org": "o", "repo": "r", "number": 1, "fix_patch": "p", "title": "t", '
    ends = (b'"f2p_tests": 7}', b'"base": "x", "f2p_tests": ["a"]}', b'"resolved_issues": 1, "f2p_tests": ["a"]}')
    one = b'{"instance_id": "a", "repo": "r", "problem_statement": "p", "FAIL_TO_PASS": ["t"], '
    unwritable = (
        b'"workdir": "/a\\u0000"}',
        b'"env": {"A": "\\u0000"}}',
        b'"test_patch": "\\ud800"}',
        b'"test_cmds": [1]}',
    )
    return [*(start + end for end in ends), *(one + end for end in unwritable)]


@reader
def swebench(data: bytes) -> None:
    """Read instances, make tasks of them, and write them again. The second reading is equal."""
    with scratch() as folder:
        file, again = folder / "instances.jsonl", folder / "again.jsonl"
        file.write_bytes(data)
        tasks = read_tasks(file)
        found = [instance for _, instance in read_instances(file)]
        for task, instance in zip(tasks, found, strict=True):
            _check(task)
            assert load(task) == instance
            judge(instance, dict.fromkeys(instance.FAIL_TO_PASS, "passed"))
            for text in (*instance.FAIL_TO_PASS, *instance.PASS_TO_PASS, *(instance.env or {}), instance.commands):
                _check_argument(text)
        again.write_text("".join(json.dumps(instance.record()) + "\n" for instance in found))
        assert [instance for _, instance in read_instances(again)] == found


def _check_argument(text: str) -> None:
    """Check that a program can be given a text."""
    assert "\0" not in text
    os.fsencode(text)


def _check(task: Task) -> None:
    """Check what the package relies on."""
    assert TASK_ID.fullmatch(task.id)
    for text in (task.image, task.workdir or "", task.user or "", *task.env, *task.env.values()):
        _check_argument(text)
    assert Task.from_dict(json.loads(json.dumps(task.to_dict(), default=str))).id == task.id
    format_of(task).images(task)


def _directories() -> list[bytes]:
    dockerfile = b"FROM debian:12\nWORKDIR /app\nENV A=b\nCOPY note .\nRUN make\n"
    tests, ignore = b"echo 1 > /logs/verifier/reward.txt\n", b"*.draft\n!/test.sh\n"
    extra = '[environment.healthcheck]\ncommand = "true"\nretries = 2\n[verifier.environment]\ndocker_image = "x"\n'
    tables = [TOML, STEPS, SEPARATE, TOML.replace('docker_image = "org/base:1"\n', ""), SEPARATE + extra]
    return [PART.join((table.encode(), b"<!-- canary -->\n\nFix it.\n", dockerfile, tests, ignore)) for table in tables]


_PLACES = ("task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh", "tests/.harborignore")


def _directories_found() -> list[bytes]:
    """Make asterisks that divide a name in very many ways, a range backwards, and huge numbers."""
    rest = (b"Fix it.\n", b"", b"true\n")
    ignores = (b"*" * 678, b"*t*" * 30 + b"x\n", b"**/" * 400, b"[5-2]")
    nines = b"9" * 5000
    image = b'[environment]\ndocker_image = "x"\n'
    sizes = (b'memory = "' + nines + b'G"\n', b"cpus = " + nines + b"\n", b"cpus = " + b"[" * 5000 + b"\n")
    tables = (b'schema_version = "1.' + nines + b'"\n', *(image + size for size in sizes))
    found = [PART.join((TOML.encode(), *rest, ignore)) for ignore in ignores]
    return found + [PART.join((table, *rest, b"")) for table in tables]


@reader
def harbor(data: bytes) -> None:
    """Read a task directory with steps."""
    with scratch() as folder:
        root = folder / "task"
        for step in ("first", "second"):
            for name in ("instruction.md", "tests/test.sh", "workdir/setup.sh"):
                _write(root / "steps" / step / name, b"x\n")
        _write(root / "environment" / "note", b"x")
        for place, text in zip(_PLACES, parts(data, len(_PLACES)), strict=True):
            if text or not place.startswith("environment"):
                _write(root / place, text)
        task = read_harbor_task(root, Dockerfiles())
        _check(task)
        assert HarborData.of(Task.from_dict(task.to_dict())) == HarborData.of(task)
        for step in steps_of(task):
            _check(step)
        TaskFiles(root).copy(root / "tests", folder / "copy")


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


@reader
def rewards(data: bytes) -> None:
    """Read both reward files. A ValueError means that the rollout has no reward."""
    with scratch() as folder:
        for name in ("reward.json", "reward.txt"):
            (folder / name).write_bytes(data)
            with contextlib.suppress(ValueError):
                found = read_rewards(folder)
                assert found
                assert all(abs(value) <= MAX_REWARD and name.isprintable() for name, value in found.items())
            (folder / name).unlink()


_TOML_WORDS = (
    b"[environment]\n", b"[[steps]]\n", b"[verifier.environment]\n", b'docker_image = "x"\n', b'"""', b"'''",
    b"${HOME:-x}", b"1979-05-27T07:32:00Z", b"inf", b"artifacts = [", b'{source = "x", destination = "y"}',
    b"a.b.c = 1\n", b"[a" + b".a" * 900 + b"]\n",
)  # fmt: skip
_LINE_WORDS = (b"('a',", b"__import__('os')", b"{id}", b"{0}", b"1e999", b"-" * 3000, b"(" * 300)
_REWARDS = (b"1", b"0.5\n", b'{"reward": 1, "tests": 0.25, "x": null}', b"-1e3", b"true", b"[1]")
TARGETS = {
    "swebench": Target(swebench, _lines, _lines_found, form="json", words=_LINE_WORDS),
    "harbor": Target(harbor, _directories, _directories_found, words=_TOML_WORDS),
    "rewards": Target(rewards, lambda: _REWARDS, form="json"),
}
