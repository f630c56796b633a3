"""Services in whole campaigns: Harbor's compose tasks, the campaign's own, sick and killed ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc import open_trajectories
from megaflow_hpc.config import AgentConfig, CampaignConfig, Policy
from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.environments.sandbox.scratch import default_scratch
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout.rollout import AttemptResult, run_attempt
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.types import AgentResult, HealthCheck, ModelEndpoint, Rollout, Sandbox, Task
from tests.support.campaigns import Make, rows, run_local, verb
from tests.support.services import (
    BOUGHT,
    BUY,
    ECHO,
    SHOP_COMPOSE,
    SHOP_FILES,
    ask,
    echo_service,
    write_campaign,
    write_compose_task,
    write_counting,
)
from tests.support.waiting import until

ASKED = f"test \"$(python3 -c '{ask('echo', 7000, 'x')[2]}' echo 7000 hi)\" = 'echo hi'"
"""True if the campaign's echo service answers."""


def test_a_compose_task_and_the_campaigns_own_service_run(tmp_path: Path, base_sif: Path) -> None:
    """One service is built of a Dockerfile of the task, the other is of the campaign and has the task's image."""
    solution = f"{BUY}\n{ASKED.removesuffix(chr(10))} && echo asked > /app/asked"
    write_compose_task(
        tmp_path / "tasks", "shop", SHOP_COMPOSE, SHOP_FILES, solution, f"{BOUGHT} && {ASKED} && test -e /app/asked"
    )
    echo = {"command": ["python3", "-c", ECHO, "7000", "echo "], "ports": [7000]}
    campaign = write_campaign(tmp_path, base_sif, services={"echo": echo})
    validated = verb("tasks", "validate", tmp_path / "tasks" / "shop", "--campaign", campaign, "--json")
    assert json.loads(validated.stdout)["valid"], validated.stdout
    result, done = run_local(campaign)
    assert done.returncode == 0, done.stderr
    assert rows(result["run"]) == {"shop/oracle/0": ("completed", 1.0), "shop/nop/0": ("completed", 0.0)}


PYTHON_TASKS = """\
class Asks:
    image = "base"
    instruction = "Ask echo."
    services = {"echo": SERVICE}

    def score(self, sandbox):
        return {"reward": sandbox.exec(ASK).stdout == "echo hi\\n"}

class Talks:
    image = "none"
    instruction = "Say nothing."

    def score(self, sandbox, messages):
        return 1.0
"""


def test_a_python_task_has_services_of_its_own_next_to_a_task_without_a_sandbox(
    tmp_path: Path, base_sif: Path, make_task: Make
) -> None:
    """A task whose service is never healthy fails by the service's name, and no other task does."""
    service = {"command": ["python3", "-c", ECHO, "7000", "echo "], "ports": [7000]}
    (tmp_path / "asking.py").write_text(f"SERVICE = {service}\nASK = {ask('echo', 7000, 'hi')}\n{PYTHON_TASKS}")
    make_task(tmp_path / "tasks", "alone")
    sick = "services: {db: {image: base, command: [sh, -c, 'echo no disk; exit 3'], expose: [5432]}}"
    write_compose_task(tmp_path / "tasks", "sick", sick, {}, "true", "true")
    tasks = ["asking:Asks", "asking:Talks", "tasks/*"]
    result, done = run_local(write_campaign(tmp_path, base_sif, tasks=tasks, agent="nop"))
    with open_trajectories(result["run"]) as store:
        found = {t.task_id: t for t in store}
        failed = found.pop("sick")
        assert (failed.status, failed.error_kind, failed.attempt, failed.rewards) == ("failed", "sandbox", 2, {})
        assert failed.error == (
            "service db: its program ended with exit code 3 before it was healthy; its output ends with: no disk"
        )
        assert {task: (t.status, t.reward) for task, t in found.items()} == {
            "Asks": ("completed", 1.0), "Talks": ("completed", 1.0), "alone": ("completed", 0.0)
        }, done.stderr  # fmt: skip


def test_the_ranks_of_a_node_share_a_service(tmp_path: Path, base_sif: Path, make_task: Make) -> None:
    """Each rollout stores its number. None is there twice, so one service has given them all."""
    campaign = write_counting(tmp_path, base_sif, make_task, pause_s=1, per="node")
    task = tmp_path / "tasks" / "count" / "task.toml"
    task.write_text('artifacts = ["answer"]\n' + task.read_text())
    result, done = run_local(campaign, "--ranks", "3")
    assert done.returncode == 0, done.stderr
    with open_trajectories(result["run"]) as store:
        found = list(store)
        assert [(each.status, each.reward) for each in found] == [("completed", 1.0)] * 4
        assert len({each.rank for each in found}) == 2, "both workers had rollouts"
        numbers = [artifact.data for each in found for artifact in each.artifacts if artifact.name.endswith("answer")]
    assert len(set(numbers)) == 4
    assert not list(default_scratch().glob("services/*/*")), "nothing is left"


@pytest.mark.parametrize("per", ["campaign", "node"])
def test_a_shared_service_that_is_killed_starts_anew_and_no_verdict_is_invented(
    tmp_path: Path, base_sif: Path, make_task: Make, per: str
) -> None:
    """One service serves all rollouts: it starts once more, for the kill. Those of a node begin at once, so the kill
    finds them at work."""
    campaign = write_counting(tmp_path, base_sif, make_task, pause_s=2, per=per)
    marker = f"counter-of-{tmp_path.name}-{os.getpid()}"
    campaign.write_text(campaign.read_text().replace("time.sleep(1)", f"time.sleep(1)  # {marker}"))
    others = {*default_scratch().glob("services/*/counter.json")}
    with subprocess.Popen(
        [sys.executable, "-m", "megaflow_hpc", "run", campaign, "--launcher", "local", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as running:
        if per == "campaign":
            until(lambda: list(tmp_path.glob("runs/*/logs/server-0-local.log")), "its server runs")
            (log,) = tmp_path.glob("runs/*/logs/server-0-local.log")
            until(lambda: "serving at" in log.read_text(), "the service is healthy")
            time.sleep(2)
        else:
            until(lambda: {*default_scratch().glob("services/*/counter.json")} - others, "the service is healthy")
            time.sleep(1)
        for pid in processes_with(marker.encode()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        result = json.loads(running.communicate(timeout=240)[0])
    assert set(rows(result["run"]).values()) == {("completed", 1.0)}
    if per == "campaign":
        said = log.read_text()
        assert said.count("serving at https://") == 2
        assert "its program ended with exit code 137" in said
        assert re.findall("[0-9a-f]{64}", said) == [], "no key in a log"
        assert not list(tmp_path.glob("runs/*/endpoints/service*")), "it has left"
    else:
        with open_trajectories(result["run"]) as store:
            errors = [attempt.error for row in store for attempt in row.attempts if attempt.error]
        assert errors
        assert all(error.startswith("service counter: ") for error in errors), errors


def test_a_service_of_the_campaign_that_is_never_healthy_ends_it_with_the_cause(
    tmp_path: Path, base_sif: Path, make_task: Make
) -> None:
    make_task(tmp_path / "tasks", "alone")
    sick = {"image": "base", "command": ["sh", "-c", "echo no disk; exit 3"], "ports": [5432], "per": "campaign"}
    result, done = run_local(write_campaign(tmp_path, base_sif, agent="oracle", services={"db": sick}))
    assert done.returncode == 1, done.stderr
    with open_trajectories(result["run"]) as store:
        (failed,) = store
        assert (failed.status, failed.error_kind, failed.rewards) == ("failed", "sandbox", {})
        error = failed.error
    assert "db: its program ended with exit code 3 before it was healthy; its output ends with: no disk" in error
    (server,) = json.loads(verb("status", result["run"], "--json").stdout)["servers"]
    assert (server["policy"], server["state"]) == ("service:db", "failed")


@pytest.mark.parametrize(
    ("services", "said"),
    [
        ({"Bad": {"image": "base"}}, r"services.*'Bad' must be lower-case"),
        ({"localhost": {"image": "base"}}, "reserved"),
        ({"a": {"image": "base", "per": "job"}}, r"services\.a\.per 'job': expected 'rollout', 'node' or 'campaign'"),
        ({"a": {"ports": [70000]}}, r"services\.a\.ports.*of at most 65535"),
        ({"a": {"image": "base", "after": ["b"]}}, "waits for 'b', which is not a service; known here: a"),
        (
            {"a": {"image": "base", "after": ["b"]}, "b": {"image": "base", "after": ["a"]}},
            "services a, b wait for one another",
        ),
        ({"a": {"ports": [1]}}, r"services\.a: a service without an image uses the task's, and needs command"),
        (
            {name: {"command": "true", "ports": [5], "after": ["a"] * (name == "b")} for name in "ab"},
            "services b and a both serve port 5",
        ),
        ({"shop": {"command": "true", "ports": [1]}}, r"services\.shop: task shop has a service of this name"),
    ],
)
def test_wrong_services_are_refused_when_planned(
    tmp_path: Path, base_sif: Path, services: dict[str, Any], said: str
) -> None:
    compose = "services: {shop: {image: base, command: 'true', expose: [5000]}}"
    write_compose_task(tmp_path / "tasks", "shop", compose, {}, "true", "true")
    done = verb("check", write_campaign(tmp_path, base_sif, services=services), "--no-site")
    assert done.returncode == 2, done.stdout
    assert re.search(said, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ("{image: base, expose: [1]}", "task shop: service shop: its image 'base' names no program; write command:"),
        ("{image: base, command: x}", "task shop: service shop: it has no port, so nothing can reach it"),
        (
            f"{{image: base, command: x, expose: {list(range(2000, 2065))}}}",
            "task shop: its services have 65 ports, of at most 64",
        ),
        ("{image: base, command: x, expose: [80]}", "task shop: service shop serves port 80, which no user may listen"),
    ],
)
def test_what_an_image_does_not_say_is_refused_when_it_is_known(
    tmp_path: Path, base_sif: Path, service: str, said: str
) -> None:
    write_compose_task(tmp_path / "tasks", "shop", f"services: {{shop: {service}}}", {}, "true", "true")
    environment = {"network": "host", "images": {"base": str(base_sif)}}
    done = verb("run", write_campaign(tmp_path, base_sif, environment=environment), "--launcher", "local")
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


# --- attempts, with services that are killed ---


def service_pids() -> list[int]:
    """Returns the processes of this test's echo services, as the host sees them."""
    return processes_with(os.environ["ECHO_MARKER"].encode())


def processes_with(marker: bytes) -> list[int]:
    """Returns the Python processes whose command line has a text."""
    pids = []
    for name in os.listdir("/proc"):
        try:
            words = Path("/proc", name, "cmdline").read_bytes() if name.isdigit() else b""
            if marker in words and words.startswith(b"python3"):
                pids.append(int(name))
        except OSError:
            continue
    return pids


class Buyer:
    """Solves the task by asking the service, slowly."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        for _ in range(5):
            await asyncio.sleep(0.1)
            asked = await sandbox.exec([*ask("echo", 7000, "x")])
        await sandbox.exec(["sh", "-c", 'echo "$1" > answer', "sh", asked.stdout])
        return AgentResult()


def attempts(place: Path, image: Path, number: int, kills: bool) -> list[AttemptResult]:
    """Runs attempts one after another. If ``kills``, kills each one's service at a random instant."""
    files = {
        "task.toml": 'version = "1.0"\n[environment]\ndocker_image = "base"\nworkdir = "/app"\n',
        "instruction.md": "Ask.\n",
        "tests/test.sh": f"grep -q 'echo x' answer && {ASKED} && echo 1 > /logs/verifier/reward.txt || "
        "echo 0 > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        (place / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "task" / name).write_text(text)
    task = read_harbor_task(place / "task")
    marker = os.environ["ECHO_MARKER"]
    command = ("python3", "-c", ECHO, "7000", "echo ", marker)
    task = Task.from_dict({**task.to_dict(), "services": [asdict(echo_service(command=command))]})
    config = CampaignConfig.model_validate(
        {"name": "x", "tasks": "x", "agent": "nop", "environment": {"network": "none"}}
    )
    agent = f"{__name__}:Buyer"
    choose = random.Random(7)

    async def one(services: Services) -> AttemptResult:
        attempt = asyncio.ensure_future(run_attempt(services, Rollout("task", "p", 0, agent), task, 0))
        while kills and not attempt.done():
            await asyncio.sleep(0.05)
            if pids := service_pids():
                await asyncio.sleep(choose.uniform(0, 2.5))
                for pid in pids:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                break
        return await attempt

    async def main() -> list[AttemptResult]:
        async with ApptainerProvider(place / "scratch") as provider:
            policies = {"p": Policy(agents=(AgentConfig(name=agent),))}
            services = Services(config, policies, {"base": str(image)}, provider, ModelGateway())
            found = [await one(services) for _ in range(number)]
            assert not provider._sandboxes
            return found

    try:
        return asyncio.run(main())
    finally:
        remove_tree(place / "scratch")


def test_an_attempt_whose_service_is_killed_has_no_verdict(
    tmp_path: Path, base_sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the service dies, the attempt fails for this cause, or it had ended before with its right reward."""
    monkeypatch.setenv("ECHO_MARKER", f"echo-of-{tmp_path.name}-{os.getpid()}")
    (whole,) = attempts(tmp_path / "whole", base_sif, 1, kills=False)
    assert (whole.trajectory.status, whole.trajectory.reward, whole.cause) == ("completed", 1.0, ""), whole.trajectory
    killed = attempts(tmp_path / "killed", base_sif, 4, kills=True)
    for each in killed:
        found = each.trajectory
        if found.status == "completed":
            assert found.reward == 1.0
        else:
            assert (found.status, found.reward, found.rewards, each.cause) == ("failed", None, {}, "service"), found
            assert "service echo: its program ended with exit code 137" in found.error
    assert sum(each.cause == "service" for each in killed) >= 2
    assert service_pids() == []


def test_services_and_health_checks_survive_a_block_file() -> None:
    service = echo_service(health=HealthCheck(("true",), 2.0), after=("x",))
    task = Task("t", "", "base", "/t", services=(service,))
    assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task
