"""A group's directory as the pages assume it: an image, tasks, a finished campaign, and one that is still in
journals."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.session import Session, variables
from tests.support.campaigns import run_local
from tests.support.harbor_tasks import write_solved_task
from tests.support.scripted import SOLVE

CAMPAIGN = """\
name: fix-bugs
tasks: tasks/*
agent: mini-swe-agent
samples: 4
model: {engine: scripted, script: answers.yaml}
environment: {network: gateway, images: {base: images/base.sif}}
slurm:
  pods: {partition: cpu, count: 1, mem: 3G, time: 30}
  servers: {partition: gpu, time: 30}
"""


@pytest.fixture(scope="session")
def group_directory(tmp_path_factory: pytest.TempPathFactory, base_sif: Path) -> Path:
    """Make ``campaign.yaml``, ``tasks/``, ``images/base.sif`` and its finished run ``runs/fix-bugs``."""
    directory = tmp_path_factory.mktemp("group")
    for name in ("fix-humanize-0", "fix-humanize-1"):
        write_solved_task(directory / "tasks", name)
    (directory / "images").mkdir()
    (directory / "images" / "base.sif").symlink_to(base_sif)
    (directory / "answers.yaml").write_text(yaml.safe_dump({"default": SOLVE}))
    (directory / "campaign.yaml").write_text(CAMPAIGN)
    summary, done = run_local(directory / "campaign.yaml", "--run-dir", str(directory / "runs" / "fix-bugs"))
    assert done.returncode == 0, done.stderr
    assert summary["rollouts"]["completed"] == 8
    return directory


@pytest.fixture
def session(group_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Copy the group's directory for one page. ``RUN`` is its run."""
    directory = tmp_path / "group"
    shutil.copytree(group_directory, directory, symlinks=True)
    (directory / "RUN").symlink_to("runs/fix-bugs")
    monkeypatch.chdir(directory)
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    program = bin_ / "megaflow-hpc"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megaflow_hpc "$@"\n')
    program.chmod(0o755)
    environment = variables(directory)
    environment["PATH"] = f"{bin_}:{environment['PATH']}"
    return Session(directory, environment)
