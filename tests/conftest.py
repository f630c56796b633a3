"""What tests of several rooms share. Real components only; a missing one fails the test and says how to get it."""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.harbor_tasks import write_solved_task
from tests.support.labs import lab_to_oneself
from tests.support.requirements import REMEDY, required

pytest_plugins = [
    "tests.docs.group",
    "tests.support.engines",
    "tests.support.harbor_environment",
    "tests.support.sandboxes",
    "tests.support.second_user",
    "tests.support.serving",
]


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background, and so in all that the tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def forgotten_site() -> Iterator[None]:
    """What one test learned of its Slurm is no answer to the next, which may have another or none."""
    yield
    module = sys.modules.get("megaflow_hpc.slurm.site")
    for value in vars(module).values() if module else ():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture(scope="session")
def base_sif() -> Path:
    """The Debian + Python image that the launchers build."""
    path = Path(required("MEGAFLOW_TEST_BASE_SIF"))
    if not path.exists():
        pytest.fail(f"MEGAFLOW_TEST_BASE_SIF={path} does not exist; {REMEDY}")
    return path


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A single-machine Slurm lab of this worker's."""
    required("SLURM_CONF")
    with lab_to_oneself(tmp_path_factory.mktemp("lab")):
        yield


@pytest.fixture(scope="session")
def write_task() -> Callable[..., Path]:
    """Writes a small Harbor task directory: the solution writes ``answer``, the test looks for it."""
    return write_solved_task


@pytest.fixture
def make_task(write_task: Callable[..., Path]) -> Callable[..., Path]:
    return write_task


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
