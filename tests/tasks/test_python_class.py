"""Tasks as Python classes: reading, refusals, and campaigns together with SWE-bench style files."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc import open_trajectories
from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.errors import ConfigError, UserCodeError
from megaflow_hpc.tasks.formats import VerificationContext
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.tasks.python_class import MAX_ERROR_CHARS, call, solve
from megaflow_hpc.tasks.steps import prepare, verify
from megaflow_hpc.types import Task, Verdict

CODE = """\
class Base:
    image = "base"
    workdir = "/app"

    def instruction(self):
        return f"How many files are in {self.workdir}?"

class Plain(Base):
    def setup(self, sandbox):
        sandbox.exec("touch a b c")
        self.count = 3

    def score(self, sandbox):
        answer = sandbox.exec("cat answer").stdout.strip()
        return {"reward": float(answer == str(self.count)), "asked": 1}

    def solve(self, sandbox):
        assert sandbox.exec("echo 3 > answer").exit_code == 0

class Waiting(Base):
    env = {"GREETING": "hello"}
    memory_mb = 512
    instruction = "Greet."

    def __init__(self, word="hello"):
        self.word = word

    @classmethod
    def instances(cls):
        return {"greet-en": {"word": "hello"}, "greet-de": {"word": "hallo"}}

    async def score(self, sandbox):
        return (await sandbox.exec("cat answer")).stdout.strip() == self.word

    async def solve(self, sandbox):
        await sandbox.exec(f"echo {self.word} > answer")

class Broken(Base):
    def setup(self, sandbox):
        sandbox.exec("true")

    def score(self, sandbox):
        return self.helper()

    def helper(self):
        return int("no number")  # line 46

class Slow(Base):
    score_timeout_s = 1

    async def score(self, sandbox):
        await sandbox.exec("sleep 60")

class Wrong(Base):
    def score(self, sandbox):
        return "good"

class Stuck(Base):
    score_timeout_s = 1

    def score(self, sandbox):
        import threading
        threading.Event().wait()

class Leaving(Base):
    async def score(self, sandbox):
        raise SystemExit(3)

class LeavingThread(Base):
    def score(self, sandbox):
        raise SystemExit(3)

class Told(Base):
    def score(self, sandbox):
        read = sandbox.read("answer")
        return {"read": read == b"3\\n", "told": sandbox.exec("cat answer").stdout == "3\\n"}

class Judged(Base):
    calls = 0

    def score(self, sandbox):
        from megaflow_hpc.errors import ModelServiceError
        self.calls += 1
        if self.calls < 3:
            raise ModelServiceError("the judge is away")
        return self.calls

class Large(Base):
    def score(self, sandbox):
        return {"reward": -0.0, "size": 1e39}

class Undefined(Base):
    def score(self, sandbox):
        return {"reward": 1.0, "turn.0": float("nan")}

class Zero(Base):
    def score(self, sandbox):
        return -0.0

class Fetching(Base):
    def score(self, sandbox):
        sandbox.download("/app/answer", "/tmp/no-such-answer")
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    """Write a module of tasks to ``tmp_path`` under a new name, because imported modules stay in memory."""
    name = re.sub(r"\W", "_", f"tasks_{tmp_path.name}")
    (tmp_path / f"{name}.py").write_text(CODE)
    return name


Acts = Callable[[Task, ApptainerSandbox], Awaitable[Any]]


def run(scratch: Path, rootfs: str, task: Task, agent: Acts, fresh: bool = False) -> Verdict:
    async def main() -> Verdict:
        async with ApptainerProvider(scratch) as provider:
            spec = SandboxSpec(rootfs, workdir=task.workdir, env=task.env)
            async with await provider.start(spec) as sandbox:
                await prepare(task, sandbox)
                await agent(task, sandbox)
                return await verify(task, sandbox, VerificationContext(fresh=fresh))

    return asyncio.run(main())


async def idle(task: Task, sandbox: ApptainerSandbox) -> None:
    pass


def test_a_class_is_one_task_and_its_instances_are_several(tmp_path: Path, module: str) -> None:
    plain, german, english = load_tasks([f"{module}:Plain", f"{module}:Waiting"], tmp_path)
    assert (plain.id, plain.kind, plain.image, plain.workdir) == ("Plain", "python", "base", "/app")
    assert plain.instruction == "How many files are in /app?"
    assert [english.id, german.id] == ["greet-en", "greet-de"]
    assert (english.env, english.limits.memory_mb) == ({"GREETING": "hello"}, 512)
    assert Task.from_dict(json.loads(json.dumps(german.to_dict()))) == german


SOME = """
class Some:
    image, workdir, instruction = "base", "/app", "Write a number."

    def __init__(self, number):
        self.number = int(number)

    @classmethod
    def instances(cls):
        return {"one": {"number": 1}, "bad": {"number": "many"}, "two": {"number": 2}}

    async def score(self, sandbox):
        return 1.0
"""


def test_an_instance_that_is_invalid_is_left_out_or_excluded_and_the_others_are_tasks(tmp_path: Path) -> None:
    (tmp_path / "some_of_them.py").write_text(SOME)
    left_out: list[str] = []
    tasks = load_tasks(["some_of_them:Some"], tmp_path, left_out=left_out)
    assert [task.id for task in tasks] == ["one", "two"]
    (line,) = left_out
    assert re.sub(r" \(.*?\)", "", line, count=1).startswith("some_of_them:Some: bad raised ValueError(")
    chosen = {"path": "some_of_them:Some", "exclude": ["bad"], "strict": True}
    assert [task.id for task in load_tasks([chosen], tmp_path, left_out=left_out)] == ["one", "two"]
    with pytest.raises(ConfigError, match="bad raised ValueError"):
        load_tasks([{**chosen, "exclude": []}], tmp_path, left_out=left_out)


@pytest.mark.parametrize("name", ["Plain", "Waiting"])
def test_methods_with_and_without_await_prepare_solve_and_score(
    tmp_path: Path, module: str, name: str, scratch: Path, rootfs: str
) -> None:
    task, *_ = load_tasks([f"{module}:{name}"], tmp_path)
    solved = run(scratch, rootfs, task, solve)
    assert (solved.reward, solved.error) == (1.0, "")
    assert run(scratch, rootfs, task, idle).reward == 0.0
    if name == "Plain":
        assert solved.rewards == {"reward": 1.0, "asked": 1.0}


@pytest.mark.parametrize(
    ("does", "fresh", "expected"),
    [
        ("echo 3 > answer", True, {"read": 1, "told": 1}),
        ("true", True, {"read": 0, "told": 0}),
        ("printf '#!/bin/sh\necho 3\n' > /usr/bin/cat", False, {"read": 0, "told": 0}),
        ("printf '#!/bin/sh\necho 3\n' > /usr/bin/cat", True, {"read": 0, "told": 0}),
    ],
)
def test_verification_fresh_leaves_a_score_nothing_of_the_agents_but_its_work_directory(
    tmp_path: Path, module: str, does: str, fresh: bool, expected: dict[str, float], scratch: Path, rootfs: str
) -> None:
    (task,) = load_tasks([f"{module}:Told"], tmp_path)

    async def agent(task: Task, sandbox: ApptainerSandbox) -> None:
        assert (await sandbox.exec(does)).exit_code == 0

    assert run(scratch, rootfs, task, agent, fresh).rewards == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Broken", r"{file}:46: score of task Broken raised ValueError\(.*no number"),
        ("Slow", r"{file}:5\d: score of task Slow ran longer than its 1 s"),
        ("Stuck", r"{file}:6\d: score of task Stuck ran longer than its 1 s"),
        ("Leaving", r"{file}:6\d: score of task Leaving raised SystemExit\(3\)"),
        ("LeavingThread", r"{file}:7\d: score of task LeavingThread raised SystemExit\(3\)"),
        ("Wrong", r"{file}:5\d: score of task Wrong returned 'good'; expected a finite number"),
        ("Large", r"{file}:8\d: score of task Large returned .* expected a finite number"),
        ("Undefined", r"{file}:9\d: score of task Undefined returned .* \(reward 'turn.0' is nan; expected a finite"),
        ("Fetching", r"/app/answer: nothing to download"),
    ],
)
def test_what_user_code_does_wrong_is_named_by_file_and_line(
    tmp_path: Path, module: str, name: str, said: str, scratch: Path, rootfs: str
) -> None:
    (task,) = load_tasks([f"{module}:{name}"], tmp_path)
    verdict = run(scratch, rootfs, task, idle)
    assert (verdict.reward, verdict.rewards) == (0.0, {"reward": 0.0})
    assert re.search(said.format(file=re.escape(str(tmp_path / f"{module}.py"))), verdict.error), verdict.error


def test_an_exception_that_quotes_a_long_answer_is_shortened() -> None:
    def score() -> float:
        return float("x" * 1_000_000)

    with pytest.raises(UserCodeError, match="raised ValueError") as raised:
        asyncio.run(call(Task("t", "Do it.", "", "/nowhere"), score, None, 5))
    assert len(str(raised.value)) < 2 * MAX_ERROR_CHARS


def test_a_judge_that_is_away_is_asked_again_and_a_negative_zero_is_zero(
    tmp_path: Path, module: str, scratch: Path, rootfs: str
) -> None:
    judged, zero = load_tasks([f"{module}:Judged", f"{module}:Zero"], tmp_path)
    assert run(scratch, rootfs, judged, idle).rewards == {"reward": 3.0}, "the same instance scores"
    assert str(run(scratch, rootfs, zero, idle).reward) == "0.0"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("class Plain", "class Other", r":Plain: module \w+ has no class Plain"),
        ('    image = "base"\n', "", r"image is missing; name an image, and map it"),
        ('workdir = "/app"', "workdir = 7", r"workdir is 7: expected str"),
        ('return f"How', 'return 1 or f"How', r"instruction is 1: expected a text"),
        ("def score(self, sandbox):\n        answer", "def rate(self, sandbox):\n        answer", "has no 'score"),
        *(
            ("class Base:", f"class Base:\n    services = {services}", said)
            for services, said in (
                ("{'db': {'command': 'x', 'ports': [0]}}", r"services\.db: ports\.0 0: .* 1"),
                ("{'db': {'command': 'x', 'ports': [1], 'image': 'i', 'per': 'node'}}", r"services\.db\.per: only se"),
                ("{'DB': {'command': 'x', 'ports': [1]}}", r"services: service 'DB' must be lower-case"),
                ("{'db': {'command': 'x', 'ports': [1], 'after': ['web']}}", r"services: service 'db' waits for 'web'"),
                ("['db']", r"services is \['db'\]: expected dict"),
            )
        ),
        ("class Base:", "import nothing_of_that_name\nclass Base:", r"cannot be imported: .*nothing_of_that_name"),
        ("class Base:", "class Base(:", r"cannot be imported at .*\.py:1"),
    ],
)
def test_a_class_that_cannot_be_a_task_is_refused(tmp_path: Path, module: str, old: str, new: str, said: str) -> None:
    assert old in CODE
    (tmp_path / f"{module}.py").write_text(CODE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=said):
        load_tasks([f"{module}:Plain"], tmp_path)


@pytest.mark.slow
def test_a_campaign_runs_both_kinds_and_stores_whose_fault_a_failure_is(
    tmp_path: Path, module: str, rootfs: str
) -> None:
    image = tmp_path / "image"
    subprocess.run(["cp", "-al", rootfs, str(image)], check=True)
    tree = image / "testbed"
    tree.mkdir()
    (tree / "lib.py").write_text("x = 1\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "start"]):
        subprocess.run([*git, *words], cwd=tree, check=True)
    patch = "diff --git a/lib.py b/lib.py\n--- a/lib.py\n+++ b/lib.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
    command = "grep -q 'x = 2' lib.py && echo PASSED check || echo FAILED check"
    instance = {"instance_id": "org__lib-1", "repo": "org/lib", "problem_statement": "x is wrong", "patch": patch}
    instance |= {"FAIL_TO_PASS": ["check"], "test_cmd": command, "log_parser": "pytest", "image_name": "org/lib:1"}
    (tmp_path / "lib.jsonl").write_text(json.dumps(instance) + "\n")
    campaign = tmp_path / "campaign.yaml"
    campaign.write_text(
        f"name: kinds\ntasks: [lib.jsonl, '{module}:Plain', '{module}:Broken']\nagent: [oracle, nop]\n"
        f"environment: {{network: none, images: {{base: {image}, 'org/*': {image}}}}}\n"
    )
    words = [sys.executable, "-m", "megaflow_hpc", "run", str(campaign), "--launcher", "local", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert result["failures"] == {"user": 1}
    (warning,) = result["warnings"]
    assert "task Broken: its verifier failed for all its rollouts (1), which have reward 0" in warning
    with open_trajectories(result["run"]) as store:
        rows = [store[index] for index in range(len(store))]
        rewards = {row.id: row.reward for row in rows if row.status == "completed"}
        kinds = {row.id: row.error_kind for row in rows}
        errors = {row.id: row.error for row in rows}
    assert rewards.pop("Broken/nop/0") == 0
    assert kinds["Broken/nop/0"] == "verifier"
    assert rewards == {"org__lib-1/oracle/0": 1, "org__lib-1/nop/0": 0, "Plain/oracle/0": 1, "Plain/nop/0": 0}
    assert f"{module}.py:46: score of task Broken raised ValueError" in errors["Broken/nop/0"]
    assert "has no 'solve(self, sandbox)'" in errors["Broken/oracle/0"]
    assert "Traceback" not in errors["Broken/nop/0"]
    subprocess.run(["chmod", "-R", "u+w", str(image)], check=False)
    subprocess.run(["rm", "-rf", str(image)], check=True)
