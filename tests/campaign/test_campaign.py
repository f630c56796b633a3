"""Campaigns without Slurm: one process, mpiexec, what goes wrong in a rollout, and what is refused before anything."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.campaign.local import living_pods
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import Rollout
from tests.support.campaigns import CALL, Make, forked, planned, rows, run_local, running, small_rows, stored, verb
from tests.support.waiting import until

MODEL = "model: {engine: scripted, script: answers.yaml}\n"


@pytest.mark.parametrize("ranks", ["1", "3"])
def test_a_campaign_runs_in_one_process_and_under_mpiexec(make_campaign: Make, ranks: str) -> None:
    result, done = run_local(make_campaign(3), "--ranks", ranks)
    assert done.returncode == 0, done.stderr
    assert result["state"] == "finished"
    assert result["rollouts"]["completed"] == result["rollouts"]["total"] == 6
    assert rows(result["run"]) == small_rows(3)


def test_python_submits_waits_and_streams(make_campaign: Make) -> None:
    run = Campaign.from_yaml(make_campaign(2)).submit(launcher="local")
    seen = [trajectory.id for trajectory in run.stream()]
    summary = run.wait(timeout_s=120)
    assert sorted(seen) == sorted(rows(run.path))
    assert summary["policies"]["oracle"]["solved"] == 2
    with open_trajectories(run.path) as store:
        assert len(store) == 4


@pytest.mark.slow
def test_a_failing_agent_is_verified_and_a_hanging_test_or_an_image_without_a_shell_costs_one_rollout(
    tmp_path: Path, make_campaign: Make, make_task: Make
) -> None:
    campaign = make_campaign(1, agent="oracle")
    (tmp_path / "bare" / "etc").mkdir(parents=True)
    shellless = make_task(tmp_path / "tasks", "shellless") / "task.toml"
    shellless.write_text(shellless.read_text().replace('"base"', '"bare"'))
    campaign.write_text(campaign.read_text().replace("images: {", f"images: {{bare: {tmp_path}/bare, "))
    make_task(tmp_path / "tasks", "fails", solution="echo 42 > answer; exit 3")
    make_task(tmp_path / "tasks", "loud", solution="head -c 100000000 /dev/zero; echo 42 > answer")
    make_task(tmp_path / "tasks", "slow", solution="sleep 600", agent_s=3)
    hang = make_task(tmp_path / "tasks", "hangs", test="sleep 600")
    toml = hang / "task.toml"
    toml.write_text(toml.read_text().replace("timeout_sec = 600.0", "timeout_sec = 2.0"))
    result, done = run_local(campaign)
    assert done.returncode == 1
    found = rows(result["run"])
    assert found["task0/oracle/0"] == ("completed", 1)
    assert found["fails/oracle/0"] == ("completed", 1)
    assert found["loud/oracle/0"] == ("completed", 1)
    assert found["slow/oracle/0"] == ("truncated", 0)
    assert found["hangs/oracle/0"] == ("completed", 0)
    assert result["failures"] == {"sandbox": 1}
    assert found["shellless/oracle/0"][0] == "failed"
    [warning] = result["warnings"]
    assert "task hangs: its verifier failed for all its rollouts (1)" in warning
    with open_trajectories(result["run"]) as store:
        attempts = store["hangs/oracle/0"].attempts
        assert [attempt.error_kind for attempt in attempts] == ["verifier"]


@pytest.mark.slow
def test_failed_rollouts_run_again_on_request_and_replace_the_failure(tmp_path: Path, make_campaign: Make) -> None:
    lacks = tmp_path / "lacks"
    agent = f'[oracle, {{name: "tests.support.odd_agent:Odd", args: {{what: read, place: {lacks}}}}}]'
    result, done = run_local(make_campaign(1, agent=agent))
    assert done.returncode == 1
    assert result["failures"] == {"user": 1}
    [cause] = result["first_failures"]
    assert (cause["kind"], cause["count"]) == ("user", 1)
    assert "FileNotFoundError" in cause["error"]
    assert cause["log"] == f"{result['run']}/logs/pod-local.log"
    assert rows(result["run"])[cause["id"]][0] == "failed"
    lacks.touch()
    again = forked("resume", result["run"], "--launcher", "local", "--failed", "--json")
    assert again.returncode == 0, again.stderr
    whole = {"task0/oracle/0": ("completed", 1), cause["id"]: ("completed", 0)}
    assert rows(result["run"]) == whole
    done = forked("resume", result["run"], "--launcher", "local")
    assert (done.returncode, rows(result["run"])) == (0, whole)
    assert "nothing to do" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["pod", "runner"])
def test_a_killed_pod_is_resumed_with_every_rollout_once(make_campaign: Make, victim: str) -> None:
    run = Campaign.from_yaml(make_campaign(4, solution="sleep 1; echo 42 > answer")).submit(launcher="local")
    assert run.local is not None
    until(lambda: stored(run), "a rollout is stored", 60)
    pid = run.local.pod.pid
    if victim == "runner":
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    run.local.pod.wait(60)
    run.local.stop()
    assert not run.ledger.finished
    again = Run(run.path)
    assert again.resume(launcher="local")
    again.wait(timeout_s=120)
    assert rows(run.path) == small_rows(4)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(make_campaign: Make) -> None:
    process, run = running(make_campaign(3, agent="oracle", solution="sleep 4; echo 42 > answer"))
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    first = next(line for line in process.stderr if "done" not in line and "jobs" not in line)
    stops = "interrupted: the local pod stops within a minute"
    assert first == f"{stops}; stored results stay (press Ctrl-C again to stop at once)\n"
    assert living_pods(Run(run).ledger.leases().values()), "what takes time is said before it is waited for"
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said.endswith(f"continue with: megaflow-hpc resume {run}\n")
    assert "interrupted" not in said
    assert Path(run, "trajectories.h5").exists()
    assert forked("resume", run, "--launcher", "local").returncode == 0
    assert len(rows(run)) == 3


@pytest.mark.slow
def test_cancel_ends_a_pod_that_nobody_follows_any_more(make_campaign: Make) -> None:
    few = "slurm: {pods: {slots_per_rank: 2}}\n"
    process, run = running(make_campaign(6, few, agent="oracle", solution="sleep 3; echo 42 > answer"))
    process.kill()
    process.communicate()
    done = json.loads(verb("cancel", run, "--json").stdout)
    [pod] = done["pods"]
    assert (done["before"], done["cancelled"]) == ("running", [])
    until(lambda: living_pods(Run(run).ledger.leases().values()) == {}, "the pod has drained", 60)
    assert 1 <= stored(Run(run)) < 6
    assert Run(run).status()["pods"][0]["pod"].startswith(pod)
    assert "cancelled" in verb("list", run).stdout


@pytest.mark.slow
def test_a_model_that_cannot_start_fails_its_rollouts_soon_and_names_the_cause(
    tmp_path: Path, make_campaign: Make
) -> None:
    (tmp_path / "answers.yaml").write_text("nonsense: 1\n")
    result, done = run_local(make_campaign(1, MODEL, agent="mini-swe-agent"))
    assert done.returncode == 1
    assert result["failures"] == {"model": 1}
    assert "answers.yaml" in result["servers"][0]["cause"]
    with open_trajectories(result["run"]) as store:
        assert "answers.yaml" in store[0].error


@pytest.mark.slow
def test_a_program_in_the_sandbox_reaches_its_model_and_nothing_else(make_campaign: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:  # the gateway's host, out of reach from inside
        other = f"socket.create_connection(('127.0.0.1', {outside.getsockname()[1]}))"
        leak = f"try:\n    {other}\n    open('answer', 'w').write('leak')\nexcept OSError:\n    pass\n"
        command = json.dumps("python3 -c '" + (CALL + leak).replace("'", "'\\''") + "'")
        agent = f"{{name: command, args: {{command: {command}}}}}"
        campaign = make_campaign(2, MODEL, agent=agent, answers=["42"])
        campaign.write_text(campaign.read_text().replace("network: none", "network: gateway") + "seed: 7\n")
        result, done = run_local(campaign)
    assert done.returncode == 0, done.stderr
    assert set(rows(result["run"]).values()) == {("completed", 1)}
    with open_trajectories(result["run"]) as store:
        for trajectory in store:
            assert [len(s.tokens) > 0 for s in trajectory.sequences] == [True]
            assert trajectory.messages[-1]["content"] == "42"
        named = [Rollout(*t.id.rsplit("/", 2)[:2], t.sample_index, "") for t in store]
        assert [t.seed for t in store] == [rollout.seed(7, 0) for rollout in named]


def test_an_agent_in_a_sandbox_without_any_network_is_refused_with_the_remedy(make_campaign: Make) -> None:
    campaign = make_campaign(1, MODEL, agent="{name: command, args: {command: 'true'}}", answers=["42"])
    with pytest.raises(ConfigError, match=r"campaign\.yaml:3: .*use gateway"):
        planned(campaign)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("tasks/*", "nowhere/*", "nowhere"),
        ("[oracle, nop]", "orakel", "orakel"),
        ("base: ", "other: ", "base"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    tmp_path: Path, make_campaign: Make, old: str, new: str, expected: str
) -> None:
    campaign = make_campaign(1)
    campaign.write_text(campaign.read_text().replace(old, new))
    done = verb("run", campaign, "--launcher", "local")
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_duplicate_task_ids_and_missing_tests_are_refused(tmp_path: Path, make_campaign: Make, make_task: Make) -> None:
    campaign = make_campaign(1)
    make_task(tmp_path / "more", "task0")
    text = campaign.read_text()
    campaign.write_text(text.replace("tasks/*", "[tasks/*, more/*]"))
    with pytest.raises(ConfigError, match="task0"):
        planned(campaign)
    campaign.write_text(text)
    (tmp_path / "tasks" / "task0" / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match=r"test\.sh"):
        planned(campaign)


def test_a_run_directory_of_another_minor_version_is_refused(make_campaign: Make) -> None:
    run = planned(make_campaign(1))
    text = run.dir.run_json.read_text()
    run.dir.run_json.write_text(text.replace('"version": "0.', '"version": "9.'))
    command = [sys.executable, "-m", "megaflow_hpc.pod", str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "install 9." in done.stderr
