"""What tests of several rooms share. Real components only; a missing one fails the test and says how to get it."""

from __future__ import annotations

import os
import signal
import stat
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["tests.support.sandboxes", "tests.support.serving"]

REMEDY = "run the suite with launchers/test, which provides it"

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background, and so in all that the tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)


def required(variable: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        pytest.fail(f"{variable} is not set; {REMEDY}")
    return value


@pytest.fixture(scope="session")
def base_sif() -> Path:
    """The Debian + Python image that the launchers build."""
    path = Path(required("MEGAFLOW_TEST_BASE_SIF"))
    if not path.exists():
        pytest.fail(f"MEGAFLOW_TEST_BASE_SIF={path} does not exist; {REMEDY}")
    return path


@pytest.fixture(scope="session")
def slurm() -> None:
    """The single-machine Slurm lab."""
    required("SLURM_CONF")


@pytest.fixture(scope="session")
def write_task() -> Callable[..., Path]:
    """Writes a small Harbor task directory: the solution writes ``answer``, the test looks for it."""
    return _write_task


@pytest.fixture
def make_task(write_task: Callable[..., Path]) -> Callable[..., Path]:
    return write_task


def _write_task(
    root: Path, name: str, solution: str = "echo 42 > answer", test: str = "grep -q 42 answer", agent_s: float = 600
) -> Path:
    task = root / name
    for part in ("environment", "solution", "tests"):
        (task / part).mkdir(parents=True)
    (task / "task.toml").write_text(
        textwrap.dedent(
            f"""\
            version = "1.0"
            [metadata]
            category = "test"
            [agent]
            timeout_sec = {agent_s}
            [verifier]
            timeout_sec = 600.0
            [environment]
            docker_image = "base"
            """
        )
    )
    (task / "instruction.md").write_text(f"Task {name}: write 42 into the file answer.\n")
    (task / "environment" / "README").write_text("nothing here\n")
    scripts = {
        "solution/solve.sh": solution,
        "tests/test.sh": f"if {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt",
    }
    for path, body in scripts.items():
        file = task / path
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return task


@pytest.fixture
def make_campaign(tmp_path: Path, base_sif: Path, make_task: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a campaign file with ``tasks`` small tasks; further lines are appended to it."""

    def make(tasks: int = 2, extra: str = "", agent: str = "[oracle, nop]", **task: object) -> Path:
        for number in range(tasks):
            make_task(tmp_path / "tasks", f"task{number}", **task)
        path = tmp_path / "campaign.yaml"
        path.write_text(
            f"name: small\ntasks: tasks/*\nagent: {agent}\n"
            f"environment: {{network: none, images: {{base: {base_sif}}}}}\n{textwrap.dedent(extra)}"
        )
        return path

    return make
