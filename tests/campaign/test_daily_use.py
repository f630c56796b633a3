"""Faults in daily use: a program that is missing, errors that every rollout has, and hints that help."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.config import ModelConfig, load
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.swebench.plan import read_tasks
from tests.support.campaigns import Make, forked, planned, rows, run_local, verb
from tests.support.processes import processes
from tests.support.waiting import until


def with_command(make_campaign: Make, tasks: int, line: str, extra: str = "") -> Path:
    """Returns a campaign whose agent is a shell command that makes no model call."""
    agent = f"{{name: command, args: {{command: {line!r}}}}}"
    model = "model: {engine: scripted, script: answers.yaml, gpus: 0}\n"
    campaign = make_campaign(tasks, model + extra, agent=agent, answers=["42"])
    campaign.write_text(campaign.read_text().replace("network: none", "network: gateway"))
    return campaign


def test_an_agent_whose_program_the_image_lacks_fails_and_ends_the_campaign(make_campaign: Make) -> None:
    campaign = with_command(make_campaign, 1, "my-agnet --help", extra="samples: 30\n")
    result, done = run_local(campaign)
    assert done.returncode == 1
    counts = result["rollouts"]
    assert (counts["failed"], counts["completed"], counts["total"]) == (sum(result["failures"].values()), 0, 30)
    assert set(result["failures"]) == {"agent"}
    assert not result["retries"]
    assert 8 <= counts["failed"] < 30, "the first rollouts end it"
    [cause] = result["first_failures"]
    assert "exit code 127" in cause["error"]
    assert "my-agnet" in cause["error"]
    assert "could not be started in any of the first" in result["pods"][0]["why"]
    shown = forked("resume", result["run"], "--launcher", "local").stdout
    assert "could not be started in any of the first" in shown
    assert "plan a new run" in shown
    assert "megaflow-hpc resume" not in shown, "continuing cannot help"


def test_errors_of_agents_are_verified_and_named_in_the_summary(make_campaign: Make) -> None:
    campaign = with_command(make_campaign, 2, "echo no licence >&2; exit 3")
    done = forked("run", campaign, "--launcher", "local")
    assert done.returncode == 0, done.stderr
    assert "errors in verified rollouts: agent 2" in done.stdout
    assert re.search(r"first of agent: task\d/default/0: .* ended with exit code 3: no licence", done.stdout)
    assert "policy default: its agent ended with an error in all 2 verified rollouts" in done.stdout


def test_a_program_that_may_not_be_executed_fails_its_rollout(make_campaign: Make) -> None:
    agent = "{{as: {0}, name: command, args: {{command: 'touch run.sh; {1}'}}}}"
    agents = [agent.format("may", "true"), agent.format("mayNot", "chmod -x run.sh; ./run.sh")]
    campaign = with_command(make_campaign, 1, "true")
    text = campaign.read_text()
    campaign.write_text(re.sub("agent: .*", f"agent: [{', '.join(agents)}]", text).replace("mayNot", "may-not"))
    result, _ = run_local(campaign)
    found = {name: status for name, (status, _) in rows(result["run"]).items()}
    assert found == {"task0/default+may/0": "completed", "task0/default+may-not/0": "failed"}


def test_a_pod_on_a_node_without_apptainer_says_so(make_campaign: Make) -> None:
    campaign = make_campaign(1, "slurm: {check: false}\n")
    done = forked("run", campaign, "--launcher", "local", PATH="/usr/bin:/bin")
    assert done.returncode == 1
    assert "ended: no worker rank is left: " in done.stdout
    assert "apptainer: not on PATH" in done.stdout
    assert "2 of 2 rollouts are missing; once that is corrected, continue with: megaflow-hpc resume" in done.stdout
    run = done.stdout.splitlines()[-1].removeprefix("results: ")
    assert "apptainer: not on PATH" in verb("status", run).stdout


def test_a_campaign_for_slurm_does_not_run_on_a_login_node_by_default(make_campaign: Make) -> None:
    campaign = make_campaign(1, "slurm: {check: false, pods: {partition: cpu}}\n")
    done = forked("run", campaign, PATH="/nowhere")
    assert done.returncode == 3
    assert "has a slurm: section" in done.stderr
    assert "--launcher local" in done.stderr
    assert not campaign.with_name("runs").exists()
    checked = forked("check", campaign, PATH="/nowhere")
    assert checked.returncode == 0
    assert "warning: checked without Slurm: " in checked.stderr
    run = planned(campaign)
    again = forked("resume", run.path, PATH="/nowhere")
    assert again.returncode == 3
    assert "--launcher local" in again.stderr


BEYOND = {
    "samples: 1e9\n": "2,000,000,000 rollouts (tasks x policies x samples), expected at most 10,000,000",
    f"scheduling: {{spare: {10**30}}}\n": "rollouts (tasks x policies x samples)",
    "slurm: {pods: {count: 1e9}}\n": "expected a whole number of at least 1 and of at most 100000",
    "slurm: {pods: {pools: [{count: 1e9}]}}\n": "of at least 1 and of at most 100000",
    "model: {engine: scripted, script: answers.yaml, servers: [1, 1000000000]}\n": "at most 10000 servers",
}
ONE_GIGABYTE = """
import contextlib, io, json, resource, sys
from megaflow_hpc.cli import main
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(words)
    print(json.dumps([status, said.getvalue()]))
"""
"""Runs verbs one after another with an address space of 1 GiB, and prints the exit status and the text of each."""


def test_counts_beyond_all_bounds_are_refused_in_little_memory(make_campaign: Make, tmp_path: Path) -> None:
    campaign, verbs = make_campaign(1, answers=["42"]), []
    for number, extra in enumerate(BEYOND):
        path = tmp_path / f"beyond{number}.yaml"
        agent = "agent: mini-swe-agent" if "model" in extra else "agent: [oracle, nop]"
        path.write_text(campaign.read_text().replace("agent: [oracle, nop]", agent) + extra)
        verbs += [[name, str(path)] for name in ("check", "plan", "run")]
    campaign.write_text(campaign.read_text() + "samples: 4_000_000\nslurm: {pods: {count: 3}}\n")
    check = ["check", str(campaign), "--no-site"]
    dry_run = ["run", str(campaign), "--launcher", "local", "--dry-run", "--rollout-seconds", "1"]
    asked = json.dumps([*verbs, check, [*check, "--max-rollouts", "5000"], dry_run])
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ONE_GIGABYTE, asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=True)
    *refused, counted, too_many, shown = map(json.loads, done.stdout.splitlines())
    for words, (status, said) in zip(verbs, refused, strict=True):
        assert status == 2, said
        assert list(BEYOND.values())[int(Path(words[1]).stem[-1])] in said
    assert not (tmp_path / "runs").exists()
    assert "1 task, 8000000 rollouts" in counted[1]
    assert too_many[0] == 2
    assert "8000000 rollouts of 1 task in " in shown[1], shown


def test_a_repaired_test_is_accepted_and_recorded(tmp_path: Path, make_campaign: Make) -> None:
    campaign = make_campaign(1, agent="oracle")
    script = tmp_path / "tasks" / "task0" / "tests" / "test.sh"
    run = planned(campaign)
    script.write_text(script.read_text() + "# repaired\n")
    done = forked("resume", run.path, "--launcher", "local")
    assert done.returncode == 1
    assert f"repeat the failed rollouts with: megaflow-hpc resume {run.path} --failed --accept-changes" in done.stdout
    again = forked(*re.findall(r"megaflow-hpc (resume .*)", done.stdout)[-1].split(), "--launcher", "local")
    assert again.returncode == 0, again.stdout
    assert rows(run.path) == {"task0/oracle/0": ("completed", 1)}
    [(task, change)] = json.loads((run.path / "ledger" / "tasks.json").read_text()).items()
    [step] = change["changes"]
    assert task == "task0"
    assert step["before"] != step["after"] == change["files"]["content"]
    for words in (["status"], ["report", "--json", "--no-pictures"]):
        assert "1 task was changed during the run and accepted" in verb(words[0], run.path, *words[1:]).stdout
    assert "changed after the run was planned" not in forked("resume", run.path, "--launcher", "local").stderr


def test_tasks_that_a_campaign_leaves_out_may_be_invalid(tmp_path: Path, make_campaign: Make, make_task: Make) -> None:
    campaign = make_campaign(1)
    services = make_task(tmp_path / "tasks", "services") / "environment"
    services.mkdir(exist_ok=True)
    (services / "docker-compose.yaml").write_text("services: {db: {image: x, privileged: true}}\n")
    data = make_task(tmp_path / "tasks", "data") / "environment"
    data.mkdir(exist_ok=True)
    (data / "docker-compose.yml").write_text("services: {}\n")
    assert "services.db.privileged: not supported" in verb("check", campaign, "--no-site").stderr
    campaign.write_text(campaign.read_text().replace("tasks: tasks/*", "tasks: [{path: tasks/*, exclude: [serv*]}]"))
    done = verb("check", campaign, "--no-site")
    assert "ok: 2 tasks, 4 rollouts" in done.stdout, done.stderr


def test_lines_that_a_campaign_leaves_out_may_be_invalid(tmp_path: Path) -> None:
    good = {"instance_id": "a__a-1", "repo": "a/a", "problem_statement": "Mend it.", "base_commit": "HEAD"}
    good |= {"patch": "", "test_patch": "", "image": "x", "FAIL_TO_PASS": ["t"], "test_cmd": "pytest"}
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(good | more) + "\n" for more in ({}, {"instance_id": "b", "repo": 7})))
    with pytest.raises(ConfigError, match=r"lines\.jsonl:2"):
        read_tasks(path)
    assert [task.id for task in read_tasks(path, lambda name: name != "b")] == ["a__a-1"]
    for names in ("['t::a'\n 't::b']", "[\"t::a\" 't::b']"):
        path.write_text(json.dumps(good | {"FAIL_TO_PASS": names}) + "\n")
        with pytest.raises(ConfigError, match="separated by commas"):
            read_tasks(path)
    for names in ("['t[\" \"]', 't2']", json.dumps(["t[' ']", 't[" "]'])):
        path.write_text(json.dumps(good | {"FAIL_TO_PASS": names}) + "\n")
        assert len(read_tasks(path)) == 1


def test_scripted_engines_ask_for_no_gpu_unless_told() -> None:
    assert ModelConfig(engine="scripted", script="a").gpus == 0
    assert ModelConfig(engine="scripted", script="a", gpus=2).gpus == 2
    assert ModelConfig(path="m").gpus == 1


def test_only_may_be_repeated(make_campaign: Make) -> None:
    campaign = make_campaign(3, "slurm: {check: false}\n")
    run = forked("plan", campaign, "--only", "task0/*", "--only", "task2/*", PATH="/nowhere")
    assert Run(run.stdout.strip()).record.total == 4, run.stderr


def test_two_agents_of_one_class_are_refused_with_a_remedy(make_campaign: Make) -> None:
    done = verb("check", make_campaign(1, agent="[oracle, oracle]"), "--no-site")
    assert done.returncode == 2
    assert "give each its own name, such as {as: careful, name: oracle}" in done.stderr


def test_a_first_campaign_file_maps_the_image_of_new_tasks(tmp_path: Path) -> None:
    campaign = tmp_path / "campaign.yaml"
    assert verb("tasks", "new", "a", tmp_path / "tasks").returncode == 0
    assert verb("init", campaign).returncode == 0
    assert load(campaign).environment.images == {"base": "docker://debian:12", "*": "docker://*"}
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "base.sif").touch()
    assert verb("init", campaign, "--force").returncode == 0
    assert load(campaign).environment.images["base"] == "images/base.sif"
    assert len(campaign.read_text().splitlines()) <= 40


def test_tasks_list_shows_the_valid_tasks_and_names_the_others(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        verb("tasks", "new", name, tmp_path)
    (tmp_path / "b" / "task.toml").write_text("schema_version = 7\n")
    done = verb("tasks", "list", tmp_path)
    assert done.returncode == 2
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["a", "c"]
    (error,) = done.stderr.splitlines()
    assert f"{tmp_path}/b/task.toml:1: schema_version = 7" in error
    done = verb("tasks", "list", tmp_path / "[ab]", "--json")
    assert (done.returncode, [task["id"] for task in json.loads(done.stdout)]) == (2, ["a"])
    done = verb("tasks", "list", tmp_path / "c*")
    assert (done.returncode, done.stderr) == (0, "")
    lines = tmp_path / "x.jsonl"
    line = {"instance_id": "d", "repo": "a/a", "problem_statement": "x", "FAIL_TO_PASS": ["t"], "runner": "named"}
    lines.write_text(f"{json.dumps(line)}\nbroken\n")
    done = verb("tasks", "list", lines, "--json")
    assert (done.returncode, [task["id"] for task in json.loads(done.stdout)]) == (2, ["d"])
    assert f"{lines}:2: not JSON" in done.stderr


def test_a_task_that_cannot_be_read_is_left_out_and_counted_and_strict_refuses_it(
    tmp_path: Path, make_campaign: Make
) -> None:
    campaign = make_campaign(3, agent="oracle")
    name = sorted(path.name for path in (tmp_path / "tasks").iterdir())[1]
    (tmp_path / "tasks" / name / "task.toml").write_text("schema_version = 7\n")
    done = verb("check", campaign, "--no-site")
    assert (done.returncode, done.stdout.rpartition(": ")[2]) == (0, "2 tasks, 2 rollouts; 1 task left out\n")
    assert f"{name}/task.toml:1: schema_version = 7" in done.stderr
    found = json.loads(verb("check", campaign, "--no-site", "--json").stdout)
    assert [f"{name}/task.toml:1" in line for line in found["left_out"]] == [True]
    run = planned(campaign)
    assert (run.record.left_out, run.record.total) == (1, 2)
    campaign.write_text(campaign.read_text().replace("tasks: tasks/*", "tasks: [{path: tasks/*, strict: true}]"))
    done = verb("check", campaign, "--no-site")
    assert done.returncode == 2
    assert f"{name}/task.toml:1: schema_version = 7" in done.stderr
    campaign.write_text(campaign.read_text().replace("strict: true", f"strict: true, exclude: [{name}]"))
    assert verb("check", campaign, "--no-site").returncode == 0


def test_tasks_without_a_statement_are_left_out_of_an_import(tmp_path: Path) -> None:
    smith = {"repo": "a/a", "patch": "x", "FAIL_TO_PASS": ["t"], "image": "x", "runner": "named"}
    path = tmp_path / "smith.jsonl"
    statements = ("adds wrongly", "", None)
    lines = [{**smith, "instance_id": f"i{n}", "problem_statement": text} for n, text in enumerate(statements)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for options in ((), ("--workdir", "/here")):
        done = verb("tasks", "import", path, "-o", tmp_path / "out", *options)
        assert done.returncode == 0, done.stderr
        assert f"left out: {path}:2: problem_statement '': expected a text that is not empty" in done.stderr
        assert f"left out: {path}:3: problem_statement None: expected a text that is not empty" in done.stderr
        assert "1 instances, tested by named: 1; 2 left out" in done.stdout
        assert [task.id for task in read_tasks(tmp_path / "out" / "smith.jsonl")] == ["i0"]
    assert verb("tasks", "import", path, "--strict").returncode == 2
    with pytest.raises(ConfigError, match=r"smith\.jsonl:2: problem_statement ''"):
        read_tasks(path)
    path.write_text(json.dumps(lines[2]) + "\n")
    assert "smith.jsonl:1: problem_statement None: expected a text" in verb("tasks", "import", path).stderr


def test_list_and_status_agree_on_a_run_that_was_copied_or_moved(tmp_path: Path, make_campaign: Make) -> None:
    few = "slurm: {pods: {slots_per_rank: 3}}\n"
    run = planned(make_campaign(8, few, agent="oracle", solution="sleep 2; echo 42 > answer"))
    command = [sys.executable, "-m", "megaflow_hpc", "resume", str(run.path), "--launcher", "local"]
    home = tmp_path / "elsewhere"
    home.mkdir()

    def told(path: Path) -> tuple[str, int]:
        status = json.loads(verb("status", path, "--json").stdout)
        (row,) = [row for row in json.loads(verb("list", path.parent, "--json").stdout) if row["path"] == str(path)]
        assert (row["state"], row["done"]) == (status["state"], status["rollouts"]["completed"]), path.name
        return row["state"], row["done"]

    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        until(lambda: run.status()["rollouts"]["completed"] >= 3, "three rollouts are stored")
        shutil.copytree(run.path, home / "while-it-ran", symlinks=True)
        process.kill()
        for pid in [pid for pid, words in processes() if str(run.path) in words and "megaflow_hpc.pod" in words]:
            os.kill(pid, signal.SIGKILL)
    state, done = told(run.path)
    assert state == "stopped"
    assert 3 <= done < 8
    shutil.copytree(run.path, home / "copied", symlinks=True)
    assert told(home / "copied") == (state, done)
    os.rename(run.path, home / "moved")
    assert told(home / "moved") == (state, done)
    assert told(home / "while-it-ran")[0] == "stopped"
    assert forked("resume", home / "moved", "--launcher", "local").returncode == 0
    assert told(home / "moved") == ("finished", 8)
    assert told(home / "copied") == (state, done)


def test_a_run_planned_by_another_version_whose_limits_have_another_key_runs(make_campaign: Make) -> None:
    run = planned(make_campaign(2, agent="oracle"))
    tasks = run.path / "tasks.jsonl"
    content = tasks.read_bytes()
    assert content.count(b'"cpu_s"') == 2
    tasks.write_bytes(content.replace(b'"cpu_s"', b'"cpu_h"'))
    done = forked("resume", run.path, "--launcher", "local")
    assert (done.returncode, {reward for _, reward in rows(run.path).values()}) == (0, {1.0}), done.stderr


def test_usage_of_a_run_without_slurm_says_that_no_job_was_accounted(make_campaign: Make) -> None:
    run = planned(make_campaign(1))
    done = verb("usage", run.path)
    assert done.returncode == 0, done.stderr
    assert f"{run.path}: Slurm's accounting has no started job of it; report shows" in done.stderr
