"""An agent, or its code that a test runs, that would rather have no verdict than a bad one.

Each rollout goes through the real steps. The task's honest verdict is 0: nobody writes the answer. A verdict that is
missing must be the verifier's error; a failure of the infrastructure or of "user" code would be tried again or excused.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.config import AgentConfig, CampaignConfig, Policy
from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.wire import unpack
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.pod.rollout.rollout import run_attempt
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.harbor.rewards import MOST_LOGS, read_logs, read_rewards
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.maintenance.validate import validate
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Rollout
from tests.support.archives import hostile
from tests.support.harbor_tasks import write_files
from tests.support.samples import trajectory
from tests.support.waiting import some_at_a_time

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
    "infinite": ("echo '{\"reward\": Infinity}' >reward.json", "expected a finite number"),
    "an overflow": ("echo 1e999 >reward.txt", "expected a finite number"),
    "a negative overflow": ("echo '{\"a\": 1, \"reward\": -1e999}' >reward.json", "expected a finite number"),
    "beyond 32 bits": ("echo 3.5e38 >reward.txt", "32 bits"),
    "a long number": ("python3 -c 'print(\"9\" * 60000)' >reward.json", "not JSON|32 bits"),
    "deep": ("python3 -c 'print(\"[\" * 30000)' >reward.json", "not JSON"),
    "a list": ("python3 -c 'print(\"{\\\"a\\\":\" + \"[\" * 900 + \"]\" * 900 + \"}\")' >reward.json", "a list"),
    "twice": ("echo '{\"reward\": 0, \"reward\": 1}' >reward.json", "twice"),
    "text": ("echo '{\"reward\": \"1\"}' >reward.json", "expected a finite number"),
    "many names": (
        "python3 -c 'import json; print(json.dumps(dict.fromkeys(range(100), 1)))' >reward.json",
        "100 rewards",
    ),
    "a name of controls": ("printf '{\"a\\\\u0000\\\\ud800\": 1}' >reward.json", "is called"),
    "bytes": ("head -c 1000 /dev/urandom >reward.json", "not JSON"),
    "large": ("head -c 9000000 /dev/zero >reward.txt", "larger"),
    "a link": ("ln -s /etc/passwd reward.txt", "not a plain file"),
    "a pipe": ("mkfifo reward.json", "not a plain file"),
    "a directory": ("mkdir reward.txt", "not a plain file"),
    "a closed directory": ("chmod 0 .; true", "no reward"),
    "odd logs": ("echo 0 >reward.txt; for i in $(seq 3000); do truncate -s 2M s$i; done; mkdir a; mkfifo b; "
    "touch \"$(printf '\\377\\n')\"; chmod 0 s1", ""),
    "nothing": ("true", "no reward"),
}  # fmt: skip


@pytest.fixture
def verdicts(base_sif: Path, tmp_path: Path) -> Callable[..., dict[str, Trajectory]]:
    """Runs one rollout for each agent, given as shell scripts by name, and checks the file that holds all of them."""

    def run(
        agents: dict[str, str], toml: str = TOML, second: str = "", verification: str = "shared"
    ) -> dict[str, Trajectory]:
        config = CampaignConfig.model_validate(
            {
                "name": "verdicts",
                "tasks": str(tmp_path),
                "agent": "oracle",
                "environment": {
                    "network": "none",
                    "limits": {"cpu_s": 5, "memory_mb": 1000},
                    "verification": verification,
                },
            }
        )
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

        async def main() -> dict[str, Trajectory]:
            async with ApptainerProvider(tmp_path / "scratch") as provider:
                policies = {"default": Policy(agent=AgentConfig(name="oracle"))}
                services = Services(config, policies, {"base": str(base_sif)}, provider, ModelGateway())

                async def one(number: int, name: str) -> Trajectory:
                    rollout = Rollout(tasks[name].id, "default", 0, "oracle")
                    return (await run_attempt(services, rollout, tasks[name], 0)).trajectory

                running = [one(number, name) for number, name in enumerate(tasks)]
                return dict(zip(tasks, await asyncio.gather(*some_at_a_time(3, running)), strict=True))

        found = asyncio.run(main())
        assert os.listdir(tmp_path / "scratch" / "owners") == []
        remove_tree(tmp_path / "scratch")
        with TrajectoryWriter(tmp_path / "trajectories.h5", "verdicts") as writer:
            for ended in found.values():
                writer.append(Trajectory.from_record(unpack(Outcome.of(ended).record)))
        assert validate(tmp_path / "trajectories.h5") == []
        return found

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
        assert "cannot be set up in what the steps before have left" in error or not kind, told[name]
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
def test_a_reward_that_is_none_is_an_error_of_the_verifier(verdicts: Callable[..., dict[str, Trajectory]]) -> None:
    agents = {
        name: f"cat >run.sh <<'EOF'\n#!/bin/sh\n{script}\nEOF\nchmod 755 run.sh"
        for name, (script, _) in REWARDS.items()
    }
    found = verdicts(agents)
    for name, (_, said) in REWARDS.items():
        ended = found[name]
        if said:
            assert (ended.status, ended.error_kind) == ("failed", "verifier"), (name, ended.error)
            assert (ended.reward, ended.rewards) == (None, {}), name
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
    assert len(read_logs(tmp_path)) == MOST_LOGS
    assert sum(map(os.times().__getitem__, (0, 1))) - before < 60  # 3 GB would be read, or 3 PB
    assert read_rewards(tmp_path) == {"reward": 1.0}


def test_a_false_git_finds_no_way_to_the_host(in_sandbox: Callable[..., Any], tmp_path: Path) -> None:
    """While the image's repository is laid bare, a program of the agent's runs, and may put a link in its place."""
    victim = tmp_path / "victim"
    victim.mkdir()

    async def use(sandbox: ApptainerSandbox) -> list[str]:
        git = "git -c user.name=a -c user.email=b"
        await sandbox.exec(f"mkdir /app && cd /app && git init -q && {git} commit -q --allow-empty -m one")
        assert await checkout.remember(sandbox, "/app") is not None
        false = f"#!/bin/sh\ntest -e /app/.git || {{ mv /app /gone; ln -s {victim} /app; }}; exit {checkout.GONE}\n"
        (tmp_path / "git").write_text(false)
        (tmp_path / "git").chmod(0o755)
        await sandbox.upload(str(tmp_path / "git"), "/new")
        await sandbox.exec("for p in /bin /usr/bin; do cp --remove-destination /new $p/git; done")
        await sandbox.kill_processes()
        patch = await checkout.difference(sandbox, "/app")
        assert patch is not None
        look = await sandbox.exec("ls -ld /app /app/.git", cwd="/")
        return [patch.error, look.stdout]

    error, look = in_sandbox(use)
    assert "nowhere any more" in error
    assert os.listdir(victim) == []
    assert [line[0] for line in look.splitlines()] == ["d", "d"]


def test_messages_that_cannot_be_kept_do_not_cost_the_verdict() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    ended = trajectory(1, messages=[{"role": "user", "content": deep}], reward=0.0)
    outcome = Outcome.of(ended)
    assert (outcome.status, outcome.reward) == ("completed", 0.0)
    assert "messages cannot be kept" in outcome.error
    assert Trajectory.from_record(unpack(outcome.record)).messages == []
