"""An agent, or its code that a test runs, that would rather have no verdict than a bad one.

Each rollout goes through the real steps. The task's honest verdict is 0: nobody writes the answer. A verdict that is
missing is 0 as well, with the verifier's error; a failed rollout would be tried again, and leave its group.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.wire import unpack
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.harbor.rewards import MAX_LOGS, read_logs, read_rewards
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Task
from tests.support.archives import hostile
from tests.support.dodges import CODE
from tests.support.harbor_tasks import write_files
from tests.support.rollouts import attempts
from tests.support.samples import trajectory
from tests.support.sandboxes import Start

TOML = """\
version = "1.0"
artifacts = ["/app/more"]
[environment]
docker_image = "base"
workdir = "/app"
storage_mb = 100
[verifier]
timeout_sec = 100
"""
STEPS = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
APART = TOML + 'environment_mode = "separate"\n[verifier.environment]\nstorage_mb = 20\n'
TEST = """\
test -x /app/run.sh && (cd /logs/verifier && timeout 60 /app/run.sh) && exit
if grep -q 42 answer; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
"""Runs what the agent has left, as a test runner imports the code it tests."""

EVIL_TAR = (
    "touch /logs/artifacts/x; {}; for p in /bin /usr/bin /usr/local/bin; do cp --remove-destination /new $p/tar; done"
)
SENDS = "printf '#!/bin/sh\\nexec cat /solution/evil.tar\\n' >/new; chmod 755 /new"
SPINS = "printf '#!/bin/sh\\nwhile :; do :; done\\n' >/new; chmod 755 /new"
NEST = 'python3 -c \'import os\nos.chdir("{}")\nfor i in range(3000):\n  os.mkdir("d"); os.chdir("d")\''
AGENTS = {
    "a false tar: a link to itself": EVIL_TAR.format(SENDS),
    "a false tar: a zero byte": EVIL_TAR.format(SENDS),
    "a false tar: a deep nest": EVIL_TAR.format(SENDS),
    "a false tar: a negative size": EVIL_TAR.format(SENDS),
    "a false tar that takes all CPU time": EVIL_TAR.format(SPINS),
    "a false shell": "printf '#!/bin/cat /dev/zero\\n' >/new; chmod 755 /new; cp --remove-destination /new /bin/sh",
    "hard links": "head -c 60000000 /dev/zero >/logs/artifacts/a; for i in $(seq 30); do ln /logs/artifacts/a "
    "/logs/artifacts/$i; done; ln -s /app /app/more",
    "nested artifacts": NEST.format("/logs/artifacts"),
    "nested directories": NEST.format("/tmp"),
    "odd names": "mkdir more; cd more; for i in $(seq 300); do : >$i; done; "
    "touch \"$(printf 'a\\nb \\377 \\001 \\033[31m')\"",
    "artifacts that are links": "rm -rf /logs/artifacts; ln -s / /logs/artifacts; ln -s /proc/self/root/dev more",
    "an artifact that is a device": "ln -s /dev/zero /app/more; mkfifo /logs/artifacts/f",
}

REWARDS = {
    "not a number": ("echo nan >reward.txt", "expected a finite number"),
    "a long number": ("python3 -c 'print(\"9\" * 60000)' >reward.json", "not JSON|32 bits"),
    "deep": ("python3 -c 'print(\"[\" * 30000)' >reward.json", "not JSON"),
    "large": ("head -c 9000000 /dev/zero >reward.txt", "larger"),
    "a link": ("ln -s /etc/passwd reward.txt", "not a plain file"),
    "a pipe": ("mkfifo reward.json", "not a plain file"),
    "a closed directory": ("chmod 0 .; true", "no reward"),
    "odd logs": ("echo 0 >reward.txt; truncate -s 2M $(seq -f s%g 3000); mkdir a; mkfifo b; "
    "touch \"$(printf '\\377\\n')\"; chmod 0 s1", ""),
    "nothing": ("true", "no reward"),
}  # fmt: skip
"""What the tests write, and the error. tasks/test_cheating.py reads further files of rewards."""


def with_cpu_limit(task: Task) -> Task:
    return replace(task, limits=replace(task.limits, cpu_s=2))


@pytest.fixture
def verdicts(rootfs: str, tmp_path: Path) -> Callable[..., dict[str, Trajectory]]:
    """Runs one rollout for each agent, given as shell scripts by name, and checks the file that holds all of them."""

    def run(
        agents: dict[str, str], toml: str = TOML, second: str = "", verification: str = "shared"
    ) -> dict[str, Trajectory]:
        tasks = {}
        for number, (name, script) in enumerate(agents.items()):
            files = {"task.toml": toml, "instruction.md": name, "tests/test.sh": TEST, "solution/solve.sh": script}
            if "steps" in toml:
                own = {file: text for file, text in files.items() if file != "task.toml"}
                files |= {f"steps/one/{file}": text for file, text in own.items()}
                own |= {"solution/solve.sh": second, "workdir/given": "42\n", "workdir/setup.sh": "ls given\n"}
                files |= {f"steps/two/{file}": text for file, text in own.items()}
            path = write_files(tmp_path / f"task{number}", files)
            for place in (path, *(path / "steps" / step for step in ("one", "two") if "steps" in toml)):
                (place / "solution" / "evil.tar").write_bytes(hostile().get(name.partition(": ")[2], b""))
            tasks[name] = read_harbor_task(path)

        tasks = {name: with_cpu_limit(task) for name, task in tasks.items()}
        environment = {"limits": {"memory_mb": 1000}, "verification": verification}
        return attempts(tasks, {"base": rootfs}, environment, tmp_path)

    return run


@pytest.mark.slow
def test_an_agent_cannot_dodge_its_verdict(verdicts: Callable[..., dict[str, Trajectory]]) -> None:
    found = verdicts(AGENTS)
    told = {name: (t.status, t.error_kind, t.reward, t.error) for name, t in found.items()}
    assert {name: one[2] for name, one in told.items()} == dict.fromkeys(AGENTS, 0.0), told
    assert not {one[0] for one in told.values()} - {"completed", "truncated"}


EVERYWHERE = "for p in /bin /usr/bin /usr/local/bin; do cp --remove-destination /new $p/{}; done"
FALSE = "printf '#!/bin/sh\\nexit 3\\n' >/new; chmod 755 /new; "
BROKEN = {
    "nothing": "true",
    "a false cp": FALSE + EVERYWHERE.format("cp"),
    "false tools": FALSE + f"for t in tar mkdir dirname ls head cat bash; do {EVERYWHERE.format('$t')}; done",
    "a false shell": "printf 'x' >/new; chmod 755 /new; cp --remove-destination /new /bin/dash",
    "no tools": "rm -f /usr/bin/* /usr/local/bin/*",
    "no directory of tools": "rm -rf /bin /usr/bin /sbin /usr/sbin",
    "no C library": "rm -rf /usr/lib /usr/lib64 /lib /lib64",
    "no users": "rm -rf /etc/passwd /etc/group /etc/nsswitch.conf; mkdir /etc/passwd",
    "no settings": "rm -rf /etc; echo >/etc",
    "settings of a shell": "mkdir -p /.singularity.d/env; echo 'exit 3' >/.singularity.d/env/99-x.sh",
}
IN_THE_WAY = {
    "a directory": "mkdir -p given/x",
    "no work directory": "cd /; rm -rf /app; echo >/app",
    "a closed work directory": "mkdir -p setup.sh/x",
    "a full disk": "head -c 99000000 /dev/zero >/app/fill",
}


@pytest.mark.slow
@pytest.mark.parametrize("judge", ["shared", "fresh", "separate"])
def test_what_a_step_leaves_keeps_no_later_step_from_its_verdict(
    verdicts: Callable[..., dict[str, Trajectory]], judge: str
) -> None:
    """The first step earns nothing; the second, whose files are uploaded and set up in what is left, everything."""
    toml = (APART if judge == "separate" else TOML).replace("/app/more", "/app/answer") + STEPS
    how = "fresh" if judge == "fresh" else "shared"
    found = verdicts({**BROKEN, **IN_THE_WAY}, toml, second="cp given answer; echo 42 >answer", verification=how)
    told = {name: (t.status, t.error_kind, t.reward, t.error) for name, t in found.items()}
    assert {name: told[name][2] for name in BROKEN} == dict.fromkeys(BROKEN, 0.5), told
    for name in IN_THE_WAY:
        status, kind, reward, error = told[name]
        assert (status, reward) == ("completed", 0.0 if kind else 0.5), told[name]
        assert "cannot be set up on the files of the earlier steps" in error or not kind, told[name]
    assert told["a directory"][1] == "agent"


@pytest.mark.slow
def test_artifacts_that_a_verifier_of_its_own_cannot_take_are_left_out(
    verdicts: Callable[..., dict[str, Trajectory]],
) -> None:
    agents = {
        "too large": "head -c 60000000 /dev/urandom >/logs/artifacts/a",
        "a false tar": EVIL_TAR.format(SENDS),
        "nested": NEST.format("/logs/artifacts"),
    }
    found = verdicts(agents, APART)
    told = {name: (t.status, t.error_kind, t.reward, t.error) for name, t in found.items()}
    assert told == dict.fromkeys(agents, ("completed", "", 0.0, ""))


@pytest.mark.slow
def test_a_reward_that_is_none_is_zero_and_an_error_of_the_verifier(
    verdicts: Callable[..., dict[str, Trajectory]],
) -> None:
    agents = {
        name: f"cat >run.sh <<'EOF'\n#!/bin/sh\n{script}\nEOF\nchmod 755 run.sh"
        for name, (script, _) in REWARDS.items()
    }
    found = verdicts(agents)
    for name, (_, said) in REWARDS.items():
        ended = found[name]
        if said:
            assert (ended.status, ended.error_kind) == ("completed", "verifier"), (name, ended.error)
            assert (ended.reward, ended.rewards) == (0.0, {"reward": 0.0}), name
            assert re.search(said, ended.error), (name, ended.error)
            assert len(ended.error) < 500, name
        else:
            assert (ended.status, ended.reward) == ("completed", 0.0), (name, ended.error)
        assert len(ended.artifacts) < 100, name


def test_logs_and_rewards_are_read_without_reading_what_is_not_kept(tmp_path: Path) -> None:
    for number in range(3000):
        with open(tmp_path / f"s{number}", "wb") as file:
            file.truncate(1 << 40)
    for number in range(200):
        (tmp_path / f"t{number}").write_bytes(b"x")
    (tmp_path / "reward.txt").write_text("1")
    tmp_path.chmod(0)
    before = sum(map(os.times().__getitem__, (0, 1)))
    assert len(read_logs(tmp_path)) == MAX_LOGS
    assert sum(map(os.times().__getitem__, (0, 1))) - before < 60  # 3 GB would be read, or 3 PB
    assert read_rewards(tmp_path) == {"reward": 1.0}


async def test_a_false_git_finds_no_way_to_the_host(start: Start, tmp_path: Path) -> None:
    """While the image's repository is laid bare, a program of the agent's runs, and may put a link in its place."""
    victim = tmp_path / "victim"
    victim.mkdir()
    sandbox = await start()
    git = "git -c user.name=a -c user.email=b"
    await sandbox.exec(f"mkdir /app && cd /app && git init -q && {git} commit -q --allow-empty -m one")
    assert await checkout.remember(sandbox, "/app") is not None
    replace = f"mv /app /gone; ln -s {victim} /app"
    false = f"#!/bin/sh\ntest -e /app/.git || {{ {replace}; }}; exit {checkout.EXIT_NO_COMMIT}\n"
    (tmp_path / "git").write_text(false)
    (tmp_path / "git").chmod(0o755)
    await sandbox.upload(str(tmp_path / "git"), "/new")
    await sandbox.exec("for p in /bin /usr/bin; do cp --remove-destination /new $p/git; done")
    await sandbox.kill_processes()
    patch = await checkout.difference(sandbox, "/app")
    assert patch is not None
    look = await sandbox.exec("ls -ld /app /app/.git", cwd="/")
    assert "the initial commit" in patch.error
    assert os.listdir(victim) == []
    assert [line[0] for line in look.stdout.splitlines()] == ["d", "d"]


def test_messages_that_cannot_be_kept_do_not_cost_the_verdict() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    ended = trajectory(1, messages=[{"role": "user", "content": deep}], reward=0.0)
    outcome = Outcome.of(ended)
    assert (outcome.status, outcome.reward) == ("completed", 0.0)
    assert "messages cannot be kept" in outcome.error
    assert Trajectory.from_record(unpack(outcome.record)).messages == []


# --- the code that is tested ----------------------------------------------------------------------------------------

PROOF = 'import sys; sys.path[:0] = ["/app", "/testbed"]\nimport sol\nassert sol.answer() == 42\nprint("right")\n'
HURRIED = TOML.replace("timeout_sec = 100", "timeout_sec = 3")
HURRIED_APART = APART.replace("timeout_sec = 100", "timeout_sec = 3").replace("/app/more", "/app/sol.py")
IMPORTS = """\
python3 /tests/proof.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
"""The usual form: the tests import the agent's code, then the script writes the reward."""
OF_A_CLASS = """\
class Imports:
    image = "base"
    workdir = "/app"
    score_timeout_s = 6
    instruction = "Answer 42."

    def __init__(self, code):
        self.code = code

    @classmethod
    def instances(cls):
        return {instances}

    async def solve(self, sandbox):
        await sandbox.exec("cat >sol.py", user_input=self.code)

    async def score(self, sandbox):
        return (await sandbox.exec(["python3", "-c", {proof!r}], timeout_s=3)).stdout == "right\\n"
"""


def harbor_tasks(place: Path, codes: dict[str, str], toml: str) -> dict[str, Task]:
    found = {}
    for number, (name, code) in enumerate(codes.items()):
        solution = {"solution/sol.py": code, "solution/solve.sh": "cp /solution/sol.py /app/sol.py\n"}
        tests = {"tests/test.sh": IMPORTS, "tests/proof.py": PROOF}
        files = {"task.toml": toml, "instruction.md": name, **solution, **tests}
        found[name] = read_harbor_task(write_files(place / f"code{number}", files))
    return found


def swebench_tasks(place: Path, codes: dict[str, str]) -> dict[str, Task]:
    lines = []
    for number, code in enumerate(codes.values()):
        new = "".join(f"+{line}\n" for line in code.split("\n"))
        patch = "diff --git a/sol.py b/sol.py\nnew file mode 100644\n--- /dev/null\n+++ b/sol.py\n"
        patch += f"@@ -0,0 +1,{code.count(chr(10)) + 1} @@\n{new}"
        command = "python3 /testbed/proof.py && echo PASSED check || echo FAILED check"
        line = {"instance_id": f"org__lib-{number:02}", "repo": "org/lib", "problem_statement": "x"}
        line |= {"image_name": "base", "patch": patch, "FAIL_TO_PASS": ["check"], "test_cmd": command}
        lines.append(json.dumps(line | {"log_parser": "pytest"}))
    (place / "lib.jsonl").write_text("\n".join(lines))
    tasks = load_tasks(["lib.jsonl"], place)
    return dict(zip(codes, [replace(task, verifier_timeout_s=3) for task in tasks], strict=True))


def python_tasks(place: Path, codes: dict[str, str]) -> dict[str, Task]:
    module = re.sub(r"\W", "_", f"codes_{place.name}")
    instances = {f"code{number:02}": {"code": code} for number, code in enumerate(codes.values())}
    (place / f"{module}.py").write_text(OF_A_CLASS.format(instances=instances, proof=PROOF))
    return dict(zip(codes, load_tasks([f"{module}:Imports"], place), strict=True))  # sorted by id


@pytest.fixture(scope="module")
def checkout_image(rootfs: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The base image with a git checkout at /testbed whose proof imports what an agent adds."""
    image = tmp_path_factory.mktemp("checkout") / "image"
    subprocess.run(["cp", "-al", rootfs, str(image)], check=True)
    (image / "testbed").mkdir()
    (image / "testbed" / "proof.py").write_text(PROOF)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "start"]):
        subprocess.run([*git, *words], cwd=image / "testbed", check=True)
    yield image
    remove_tree(image)


FORMATS = {
    "harbor-shared": lambda place, codes: harbor_tasks(place, codes, HURRIED),
    "harbor-fresh": lambda place, codes: harbor_tasks(place, codes, HURRIED),
    "harbor-separate": lambda place, codes: harbor_tasks(place, codes, HURRIED_APART),
    "swebench": swebench_tasks,
    "python": python_tasks,
}


SPINNING = (
    "takes all CPU time",
    "is a flood of processes",
    "is a flood of threads",
    "opens all files",
    "prints for ever",
)
"""Code that computes until a limit ends it. Harbor's three ways start the tests alike, so one of them is enough."""


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_whatever_the_tested_code_does_there_is_a_verdict(form: str, checkout_image: Path, tmp_path: Path) -> None:
    """0 for all of it, 0 for an honest wrong answer and 1 for the right one."""
    honest = {"is right": "def answer(): return 42", "is wrong": "def answer(): return 41"}
    once = form in ("harbor-fresh", "harbor-separate")
    codes = honest | {name: code for name, code in CODE.items() if not (once and name in SPINNING)}
    tasks = {name: with_cpu_limit(task) for name, task in FORMATS[form](tmp_path, codes).items()}
    limits = {"memory_mb": 400, "disk_mb": 100, "processes": 100}
    environment = {"limits": limits, "verification": "fresh" if form == "harbor-fresh" else "shared"}
    found = attempts(tasks, {"base": str(checkout_image)}, environment, tmp_path)
    told = {name: (t.status, t.error_kind, t.reward, t.error) for name, t in found.items()}
    print(form, *(f"{name}: {one}" for name, one in told.items()), sep="\n  ")
    assert {name: one[2] for name, one in told.items()} == {**dict.fromkeys(told, 0.0), "is right": 1.0}
    assert {one[0] for one in told.values()} == {"completed"}
    assert {one[1] for one in told.values()} <= {"", "verifier"}
    assert told["is wrong"][1] == told["is right"][1] == ""
