"""Score stored rollouts again: by their tasks as they are today, and by functions, rubrics and scorers of training."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml

from megaflow_hpc.campaign.local import JudgeServers
from megaflow_hpc.cli import main
from megaflow_hpc.cli.runs.reverify import MAX_ERROR_CHARS, Reverified, _tasks_of_today
from megaflow_hpc.config import Policy, parse, resolved
from megaflow_hpc.config.sections import AgentConfig, Method
from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.errors import ConfigError, MegaflowError, ModelServiceError, UnscoredError
from megaflow_hpc.ledger.tasks import planned_tasks
from megaflow_hpc.pod.rollout.rescoring import NewScore, Rescoring, _restore
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.rundir.rewards import GivenReward, RewardLog, check_name, given_as, given_rewards
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.tasks.harbor.artifacts import collect, to_artifacts
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.scoring import Scorer, load_scorer
from megaflow_hpc.tasks.steps import prepare
from megaflow_hpc.training.algorithms.rewards import scores
from megaflow_hpc.training.buffer import stored_rollout
from megaflow_hpc.trajectories import open_trajectories
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Task, main_reward
from tests.support.campaigns import run_local, verb
from tests.support.harbor_tasks import write_task
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TASKS = """\
GIT = "git -c user.name=a -c user.email=a@b -c init.defaultBranch=main"

class Fix:
    image = "base"
    workdir = "/repo"
    instruction = "Write good into a."

    async def setup(self, sandbox):
        await sandbox.exec(f"cd /repo && {GIT} init -q && echo bad >a && git add a && {GIT} commit -qm one")

    async def score(self, sandbox, artifacts):
        assert set(artifacts) == {"calls.jsonl", "patch"}
        assert b"+good" in artifacts["patch"]
        return float(await sandbox.read("/repo/a") == b"good\\n")

class Loose:
    image = "base"
    workdir = "/app"
    instruction = "Write good into a."

    async def score(self, sandbox):
        return float(await sandbox.read("/app/a") == b"good\\n")

class Talk:
    image = "base"
    instruction = "Say good."

    async def setup(self, sandbox):
        self.seen = (await sandbox.exec("echo here")).stdout

    async def score(self, sandbox, messages, judge):
        assert self.seen == "here\\n"
        return float(await judge.ask(messages[-1]["content"]) == "yes")

class Out:
    image = "none"
    instruction = "Say good."

    async def score(self, sandbox, messages):
        return float(messages[-1]["content"] == "good")
"""
AGENT = """\
import json, urllib.request
from megaflow_hpc.types import AgentResult

class Works:
    async def run(self, task, sandbox, model):
        body = {"model": "default", "messages": [{"role": "user", "content": task.instruction}]}
        for _ in range(2):
            request = urllib.request.Request(model.base_url + "/chat/completions", json.dumps(body).encode(),
                {"Authorization": "Bearer " + model.api_key, "Content-Type": "application/json"})
            answer = json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]
            body["messages"] += [answer, {"role": "user", "content": "and now?"}]
        if task.image:
            await sandbox.exec("echo good >a")
        return AgentResult(turn_rewards=[0.5, 0.25])
"""
SCORERS = """\
def score(messages, task, reward):
    return {"reward": len(messages), "task": float(len(task.id)), "before": reward}

def turns(trajectory):
    return [float(number) for number in range(len(trajectory.turns))]

def too_many(trajectory):
    return {"reward": 1.0, "turn.7": 1.0}

def nan(trajectory):
    return [float("nan")] * len(trajectory.turns)

def text():
    return "good"

def raises(artifacts):
    return artifacts["nothing"]

async def asks(messages, judge):
    return float(await judge.ask("polite?") == "yes")

class Whole:
    async def score(self, sandbox, messages):
        return float(await sandbox.read("/a") == b"")

def batch(rollouts, more=1.0):
    return {sample.id: None if sample.task == "Out" else [more] * len(sample.turns) for sample, _ in rollouts}

def one_breaks(trajectory):
    if trajectory.task_id == "Out":
        raise ValueError("x" * (2 << 20))
    return 0.3

def slowly(messages):
    import time
    time.sleep(1)
    return 1
"""
WRONG = {
    "too_many": "reward 'turn.7': the rollout made 2 model calls; expected turn.0 to turn.1",
    "nan": "expected a finite number",
    "text": "expected a finite number",
    "raises": "raised KeyError('nothing')",
    "Whole": "the scorer uses the sandbox, which is not restored here",
}
RUBRIC = "criteria: [{name: polite, text: It is polite.}]\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base_sif: Path) -> RunDir:
    """Run a campaign with one rollout of each task."""
    folder = tmp_path_factory.mktemp("reverified")
    (folder / "things.py").write_text(TASKS)
    (folder / "works.py").write_text(AGENT)
    (folder / "scorers.py").write_text(SCORERS)
    (folder / "rubric.yaml").write_text(RUBRIC)
    (folder / "agent.yaml").write_text(yaml.safe_dump({"default": ["good"]}))
    (folder / "grader.yaml").write_text(yaml.safe_dump({"default": ["yes"]}))
    grader = {"engine": "scripted", "script": "grader.yaml", "judge": True, "price": [1.0, 2e6]}
    fields = {
        "name": "reverified",
        "tasks": ["things:Fix", "things:Loose", "things:Talk", "things:Out"],
        "agent": "works:Works",
        "models": {"default": {"engine": "scripted", "script": "agent.yaml"}, "grader": grader},
        "environment": {"network": "gateway", "images": {"base": str(base_sif)}},
    }
    (folder / "campaign.yaml").write_text(yaml.safe_dump(fields))
    result, done = run_local(folder / "campaign.yaml")
    assert done.returncode == 0, done.stderr
    with open_trajectories(result["run"]) as store:
        assert {row.id: row.reward for row in store} == {
            f"{task}/default/0": 1.0 for task in ("Fix", "Loose", "Talk", "Out")
        }
    return RunDir(result["run"])


def reverify(run: RunDir, *arguments: str, status: int = 0) -> dict[str, Any]:
    """Call the verb in the campaign's directory; return its JSON."""
    paths, beside = [*sys.path], json.loads(run.run_json.read_text())["beside"]
    with chdir(beside):
        sys.path.insert(0, beside)
        try:
            done = verb("reverify", run, "--json", *arguments)
        finally:
            sys.path[:] = paths
            for module in ("scorers", "things"):
                sys.modules.pop(module, None)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def test_tasks_are_verified_again_as_they_are_today(run: RunDir) -> None:
    result = reverify(run, status=1)
    assert (result["scored"], result["mean"], result["changed"]) == (3, 1.0, 0)
    assert result["unscored"] == {"Loose/default/0": "the agent's changes are not stored: /app is in no git checkout"}
    use = result["judge"]["grader"]
    assert use["calls"] == 1
    assert use["usd"] == pytest.approx(use["prompt_tokens"] / 1e6 + 2 * use["sampled_tokens"])
    assert reverify(run, status=1)["already"] == 3, "a second call continues"

    things = Path(json.loads(run.run_json.read_text())["beside"], "things.py")
    things.write_text(TASKS.replace('b"good\\n")', 'b"better\\n")'))
    try:
        assert "give --name another name" in reverify(run, status=2)["error"]
        again = reverify(run, "--name", "stricter", "--only", "Fix", "Out/default")
        assert (again["scored"], again["mean_before"], again["mean"], again["changed"]) == (2, 1.0, 0.5, 1)
    finally:
        things.write_text(TASKS)

    with open_trajectories(run.path) as store:
        row = store["Fix/default/0"]
        assert row.reward == 1.0, "the campaign's own reward stays"
        assert row.rewards == {"reward": 1.0, "turn.0": 0.5, "turn.1": 0.25, "stricter": 0.0, "verifier": 1.0}
        assert {"stricter", "verifier"} <= set(store.reward_names)
        assert [store[int(one)].task_id for one in store.select("rewards.stricter == 1")] == ["Out"]
    shown = verb("show", run, "Fix/default/0")
    assert "stricter 0" in shown.stdout


def test_functions_score_the_stored_conversation(run: RunDir) -> None:
    result = reverify(run, "--with", "scorers.py", "--name", "mine")
    assert (result["scored"], result["mean"]) == (4, 4.0)
    assert given_as(run, "mine")["Fix/default/0"].named("mine") == {"mine": 4.0, "mine.task": 3.0, "mine.before": 1.0}
    turns = reverify(run, "--with", "scorers.py:turns", "--name", "by-turn")
    assert (turns["scored"], turns["mean"]) == (4, None)
    batch = reverify(run, "--with", "scorers:batch", status=1)
    assert (batch["scored"], list(batch["unscored"])) == (3, ["Out/default/0"])
    with open_trajectories(run.path) as store:
        rewards = store["Talk/default/0"].rewards
        assert (rewards["by-turn.turn.0"], rewards["by-turn.turn.1"]) == (0.0, 1.0)
        assert (rewards["scorers.turn.0"], rewards["scorers.turn.1"]) == (1.0, 1.0)
        assert math.isnan(store.column("rewards/scorers.turn.0")[store.ids.index("Out/default/0")])
        advantages = store.advantages("grpo", "mine.task")
        assert list(advantages) == [0.0] * 4
        rollouts = [stored_rollout(row.trajectory()) for row in store]
    for name, rewards in {"mine": {"score": 4.0}, "scorers": {"turn.0": 1.0, "turn.1": 1.0}}.items():
        method = Method(name="megaflow_hpc.training.recipes:given", args={"run": str(run), "name": name})
        assert scores(method, rollouts)["Talk/default/0"] == rewards
    assert scores(method, rollouts)["Out/default/0"] is None


@pytest.fixture
def beside(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The campaign's directory, in which this process works."""
    folder = Path(json.loads(run.run_json.read_text())["beside"])
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield folder
    for module in ("scorers", "things"):
        sys.modules.pop(module, None)


def test_what_one_rollout_breaks_costs_no_other_its_reward(
    run: RunDir, beside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither an error of the scorer, nor one of this package."""
    result = reverify(run, "--with", "scorers.py:one_breaks", "--name", "breaks", status=1)
    assert (result["scored"], list(result["unscored"])) == (3, ["Out/default/0"])
    assert len(result["unscored"]["Out/default/0"]) == MAX_ERROR_CHARS
    by_scorer = Rescoring.by_scorer

    async def broken(rescoring: Rescoring, scorer: Scorer, task: Task, trajectory: Trajectory) -> NewScore:
        if task.id == "Fix":
            raise KeyError("no such thing")
        return await by_scorer(rescoring, scorer, task, trajectory)

    monkeypatch.setattr(Rescoring, "by_scorer", broken)
    assert main(["reverify", str(run), "--with", "scorers.py:turns", "--name", "broken", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["scored"] == 3
    assert result["failed"]["Fix/default/0"].endswith(": KeyError('no such thing')")


def test_files_that_change_meanwhile_give_no_reward(run: RunDir, beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_task = Rescoring.by_task

    async def edit(rescoring: Rescoring, task: Task, agent: AgentConfig, trajectory: Trajectory) -> NewScore:
        (beside / "things.py").write_text(TASKS + "# changed\n")
        return await by_task(rescoring, task, agent, trajectory)

    monkeypatch.setattr(Rescoring, "by_task", edit)
    try:
        assert main(["reverify", str(run), "--name", "edited", "--only", "Out"]) == 1
    finally:
        (beside / "things.py").write_text(TASKS)
    assert given_as(run, "edited") == {}


def test_functions_need_no_apptainer(run: RunDir, beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFLOW_APPTAINER", "/nowhere")
    assert main(["reverify", str(run), "--with", "scorers.py", "--name", "without"]) == 0


def test_rewards_of_one_name_come_from_one_scorer(run: RunDir) -> None:
    """Also if each call scores other tasks."""
    assert reverify(run, "--with", "scorers.py:turns", "--name", "one", "--only", "Fix")["scored"] == 1
    scorers = Path(json.loads(run.run_json.read_text())["beside"], "scorers.py")
    scorers.write_text(SCORERS + "# changed\n")
    try:
        again = reverify(run, "--with", "scorers.py:turns", "--name", "one", "--only", "Out", status=2)
        assert "give --name another name" in again["error"]
    finally:
        scorers.write_text(SCORERS)


def test_an_equal_reward_has_not_changed() -> None:
    """The campaign's own is read as float32."""
    outcome = Reverified()
    for rollout, before, now in (("a", 0.30000001192092896, 0.3), ("b", 0.3, 0.4), ("c", 0.0, 0.0)):
        outcome.before[rollout] = before
        outcome.scored[rollout] = GivenReward(id=rollout, at=1.0, digest="", reward=now)
    assert outcome.report(RunDir("run"), "x")["changed"] == 1


def test_rewards_of_turns_and_sequences_are_no_reward_of_the_rollout() -> None:
    assert main_reward({"turn.0": 1.0, "sequence.0": 2.0}) is None
    assert main_reward({"turn.0": 1.0, "sequence.0": 2.0, "part": 3.0}) == 3.0


def test_a_judge_of_an_engine_pool_that_is_down_is_an_error(tmp_path: Path) -> None:
    planned: Any = SimpleNamespace(servers=[])
    with pytest.raises(ModelServiceError, match="judge grader: its engine pool has no server now"):
        JudgeServers(RunDir(tmp_path), planned, ["grader"])


def test_tasks_have_the_campaigns_services(tmp_path: Path) -> None:
    """Without them, tests would fail instead of being refused."""
    write_task(tmp_path)
    services = {"db": {"image": "postgres", "ports": [5432]}}
    config = parse({"name": "a", "tasks": [str(tmp_path / "*")], "agent": "oracle", "services": services})
    planned: Any = SimpleNamespace(config=config, beside="")
    (task,) = _tasks_of_today(planned).values()
    assert [service.name for service in task.services] == ["db"]


def test_rubrics_ask_the_judges(run: RunDir) -> None:
    result = reverify(run, "--with", "rubric.yaml", "--only", "Out")
    assert (result["scored"], result["judge"]["grader"]["calls"]) == (1, 1)
    assert given_as(run, "rubric")["Out/default/0"].rewards == {"reward": 1.0, "polite": 1.0}
    assert reverify(run, "--with", "scorers.py:asks", "--name", "asks", "--only", "Out")["mean"] == 1.0


def test_a_wrong_scorer_gives_no_reward(run: RunDir) -> None:
    """Load each scorer in this process, and score a stored rollout with it."""
    beside = Path(json.loads(run.run_json.read_text())["beside"])
    planned = read_run(run)

    async def main() -> dict[str, str]:
        policies = {name: resolved(Policy, msgspec.to_builtins(one)) for name, one in planned.policies.items()}
        services = await Services.open(planned.config, policies, beside)
        reasons = {}
        try:
            with open_trajectories(run.path) as store:
                trajectory = store["Out/default/0"].trajectory()
            task = Task.from_dict(planned_tasks(run, planned)["Out"].task)
            for name in WRONG:
                scorer = load_scorer(f"{beside}/scorers.py:{name}")
                with pytest.raises(UnscoredError) as raised:
                    await Rescoring(services).by_scorer(scorer, task, trajectory)
                reasons[name] = str(raised.value)
        finally:
            await services.close()
        return reasons

    for name, reason in asyncio.run(main()).items():
        assert WRONG[name] in reason, name


def test_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong_scorers.py").write_text("RUN = 1\n\ndef odd(sandbox, colour):\n    return 1\n")
    (tmp_path / "wrong_syntax.py").write_text("def score(:\n")
    (tmp_path / "json.py").write_text("def score():\n    return 1\n")
    for source, message in {
        "none.py": "none.py: no such file",
        "wrong_scorers.py": "has no score; define it, or name another",
        "wrong_scorers.py:RUN": "RUN is int; expected a function, or a class with score",
        "wrong_scorers.py:odd": r"wrong_scorers.py:3: parameter 'colour' is unknown; expected messages, roles, patch",
        "wrong_scorers": "expected FILE.py",
        "wrong_syntax.py": r"wrong_syntax.py:1: SyntaxError",
        "json.py": "a module of this name is already imported",
        "no_such_module:score": "no_such_module cannot be imported",
        "rubric.yml": "No such file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_scorer(source)
    for name in ("reward", "turn", "a.b", "../x", ""):
        with pytest.raises(ConfigError, match="expected letters"):
            check_name(name)


def test_shares_side_by_side_of_which_one_is_killed_equal_one_call(run: RunDir) -> None:
    beside = Path(json.loads(run.run_json.read_text())["beside"])

    def started(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "megaflow_hpc", "reverify", str(run), "--with", "scorers.py:slowly", "--json"]
        return subprocess.Popen([*command, *words], cwd=beside, stdout=subprocess.PIPE, text=True)

    def share(number: int) -> subprocess.Popen[str]:
        return started("--name", "parts", "--jobs", "1", "--share", f"{number}/2")

    assert json.loads(started("--name", "whole", "--jobs", "4").communicate(timeout=120)[0])["scored"] == 4
    with open_trajectories(run.path) as store:
        of_first = {one for one in store.ids if zlib.crc32(one.encode()) % 2 == 0}
    assert 1 <= len(of_first) <= 3
    shares = [share(1), share(2)]
    longer = 0 if len(of_first) > 1 else 1
    until(lambda: len(given_as(run, "parts")) >= 1, "a reward")
    shares[longer].send_signal(signal.SIGKILL)
    for each in shares:
        each.communicate(timeout=120)
    assert [each.returncode for each in shares].count(0) >= 1
    before = given_as(run, "parts")
    again = [json.loads(share(number).communicate(timeout=120)[0]) for number in (1, 2)]
    assert [one["already"] + one["scored"] for one in again] == [len(of_first), 4 - len(of_first)]
    whole, parts = given_as(run, "whole"), given_as(run, "parts")
    assert {name: (one.reward, one.rewards, one.digest) for name, one in parts.items()} == {
        name: (one.reward, one.rewards, one.digest) for name, one in whole.items()
    }
    assert {name: parts[name] for name in before} == before, "nothing that was stored is scored again"
    lines = b"".join(path.read_bytes() for path in (run.rewards / "parts").iterdir()).count(b"\n")
    assert lines == 4


def test_an_unknown_or_damaged_line_is_skipped_and_the_earliest_counts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for at, reward in ((2.0, 0.25), (1.0, 0.75)):
        log = RewardLog(run, "mine")
        log.add(GivenReward(id="a/p/0", at=at, digest="x", reward=reward))
        log.close()
    (run.rewards / "mine" / "0.x.jsonl").write_bytes(
        b'{"id": 3}\nnot json\n{"id": "b/p/0", "at": 0, "digest": "", "reward": 1e999}\n{"id": "a/p/0", "at": 0.5'
    )
    (run.rewards / "not.a.name").mkdir()
    assert {name: list(given) for name, given in given_rewards(run).items()} == {"mine": ["a/p/0"]}
    assert given_as(run, "mine")["a/p/0"].reward == 0.75
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", run.rewards / "linked")
    with pytest.raises(Exception, match="is a symbolic link"):
        RewardLog(run, "linked").add(GivenReward(id="a/p/0", at=1.0, digest="x", reward=1.0))


ARTIFACTS = """\
artifacts = ["/data"]
[environment]
docker_image = "base"
workdir = "/app"
[verifier]
environment_mode = "separate"
"""


def test_artifacts_are_restored_with_their_programs_or_not_at_all(rootfs: str, scratch: Path, tmp_path: Path) -> None:
    """Collect the artifacts of one sandbox, and put what is stored of them into another."""
    task = read_harbor_task(write_task(tmp_path, toml=ARTIFACTS))

    async def main() -> tuple[bool, str]:
        async def stored(sandbox: ApptainerSandbox, number: int) -> dict[str, bytes]:
            collected = await collect(task, sandbox, tmp_path / str(number))
            return {artifact.name: artifact.data for artifact in to_artifacts(collected)}

        async with ApptainerProvider(scratch) as provider:
            spec = SandboxSpec(rootfs, workdir=task.workdir)
            async with await provider.start(spec) as one, await provider.start(spec) as other:
                await prepare(task, one)
                await prepare(task, other)
                await one.exec("mkdir -p /data/a && echo x >/data/a/b")
                await one.exec("(echo '#!/bin/sh'; echo echo ran) >/data/made; chmod 755 /data/made")
                await one.exec("echo log >/logs/artifacts/log")
                alone = await format_of(task).put_back(task, other, await stored(one, 0))
                seen = await other.exec("cat /data/a/b /logs/artifacts/log && test ! -x /data/a/b && /data/made")
                await one.exec("ln -s b /data/a/c")
                with pytest.raises(UnscoredError, match="not all files of its artifact /data are stored"):
                    await format_of(task).put_back(task, other, await stored(one, 1))
                return alone, seen.stdout

    assert asyncio.run(main()) == (True, "x\nlog\nran\n")


def test_no_changes_are_a_patch_too_and_a_record_without_one_is_left_alone(
    rootfs: str, scratch: Path, tmp_path: Path
) -> None:
    task = read_harbor_task(write_task(tmp_path, toml='[environment]\ndocker_image = "base"\nworkdir = "/repo"\n'))
    make = "git init -q && echo a >a && git add a && git -c user.name=a -c user.email=a@b commit -qm one"

    async def main() -> list[str]:
        async with ApptainerProvider(scratch) as provider:
            async with await provider.start(SandboxSpec(rootfs, workdir="/repo")) as sandbox:
                await sandbox.exec(f"mkdir -p /repo && cd /repo && {make}", cwd="/")
                await checkout.remember(sandbox, "/repo")
                unchanged = checkout.to_artifacts(await checkout.difference(sandbox, "/repo"))
                assert [(one.name, one.data) for one in unchanged] == [("patch", b"")]
                said = []
                context: Any = SimpleNamespace(fresh=True)
                for stored in ({"patch": b""}, {}):
                    try:
                        await _restore(task, sandbox, stored, context)
                        said.append("")
                    except MegaflowError as error:
                        said.append(str(error))
                return said

    assert asyncio.run(main()) == [
        "",
        "the record has no patch, not even an empty one: the agent's sandbox had no checkout or no git",
    ]
    failed = checkout.to_artifacts(checkout.Patch(b"", "git took too long"))
    assert [one.name for one in failed] == ["patch.error"]
