"""The command line in a process of its own or in this one, small campaigns on this host, and what a run has stored."""

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import h5py

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.cli import main
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import gather
from tests.support.samples import commit, trajectory
from tests.support.waiting import until
from tests.support.warm import COMMAND_LINE, WarmPython

Make = Callable[..., Path]
"""The fixtures ``make_campaign`` and ``make_task``."""


def cli(*arguments: object, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``megaflow-hpc`` with arguments, and variables on top of ours, to its end, whatever its exit status."""
    command = [sys.executable, "-m", "megaflow_hpc", *map(str, arguments)]
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=timeout, env=env, check=False)


@functools.cache
def _warm() -> WarmPython:
    return WarmPython("megaflow_hpc.cli.campaigns.control", "megaflow_hpc.cli.campaigns.start", "h5py")


def forked(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Does what :func:`cli` does in a process forked from one with the imports, which saves half a second of CPU."""
    return _warm().run(COMMAND_LINE, *map(str, arguments), variables=environment)


def verb(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Does what :func:`cli` does in this process, which is fastest. For verbs that start no rollout."""
    words = list(map(str, arguments))
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        status = main(words)
    said, errors = (each.buffer.getvalue().decode() for each in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(words, status, said, errors)


def run_local(campaign: Path, *arguments: str) -> tuple[dict, subprocess.CompletedProcess[str]]:
    """Runs a campaign without Slurm; returns the summary it prints as JSON, and the ended process."""
    done = forked("run", campaign, "--launcher", "local", "--json", *arguments)
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done


def planned(campaign: Path) -> Run:
    """Plans a campaign for this machine."""
    return Campaign.from_yaml(campaign).plan(launcher="local")


def gathered(campaign: Path, place: Path) -> RunDir:
    """Plans a campaign at ``place`` without running it, and gathers four rollouts into its file."""
    run = Campaign.from_yaml(campaign).plan(place, launcher="local").dir
    commit(run, "a", *((0, 0, trajectory(n)) for n in range(4)))
    gather(run)
    return run


def rows(run: str | Path) -> dict[str, tuple[str, float]]:
    """The status and reward of every stored rollout by id, read by plain h5py, as anyone would."""
    with h5py.File(Path(run) / "trajectories.h5") as file:
        table = file["trajectories"]
        ids = [i.decode() for i in table["id"][:]]
        statuses = [s.decode() for s in table["status"][:]]
        assert len(ids) == len(set(ids))
        return {i: (s, float(r)) for i, s, r in zip(ids, statuses, table["reward"][:], strict=True)}


def running(campaign: Path) -> tuple[subprocess.Popen[str], str]:
    """Starts ``run`` of a campaign on this host; returns its process and run directory once a rollout runs."""
    command = [sys.executable, "-m", "megaflow_hpc", "run", str(campaign), "--launcher", "local"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = iter(process.stderr.readline, "")
    run = next(line for line in said if line.startswith("run directory: ")).removeprefix("run directory: ").strip()

    def rollout_runs() -> bool:
        assert process.poll() is None, process.stderr.read()
        return bool(list(Path(run, "events").glob("*.jsonl"))) and Run(run).status()["rollouts"]["running"] > 0

    until(rollout_runs, "a rollout runs")
    return process, run


CALL = """\
import json, os, socket, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "What is the answer?"}]}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body, key)) as response:
    open("answer", "w").write(json.load(response)["choices"][0]["message"]["content"])
"""
"""A program for a sandbox: asks the rollout's model and writes what it says into ``answer``."""


def small_rows(tasks: int) -> dict[str, tuple[str, float]]:
    """What :func:`rows` returns of a finished campaign of ``make_campaign(tasks)``."""
    return {f"task{n}/{a}/0": ("completed", reward) for n in range(tasks) for a, reward in [("oracle", 1), ("nop", 0)]}


def started(campaign: Path) -> tuple[Run, str]:
    """Submits a campaign and waits for its first stored rollout; returns the run, and Slurm's id of its first pod."""
    run = Campaign.from_yaml(campaign).submit()
    until(lambda: stored(run) >= 1, "a rollout is stored")
    return run, f"{run.job_ids('pods')[0]}_0"


def stored(run: Run) -> int:
    """The number of rollouts that a run has stored, whatever became of them."""
    return sum(run.status()["rollouts"][state] for state in ("completed", "truncated", "failed"))
