"""Fixtures that several rooms share. Components are real; a missing one fails the test and the message has the
remedy."""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.harbor_tasks import write_solved_task
from tests.support.labs import lab_to_oneself
from tests.support.requirements import REMEDY, required

pytest_plugins = [
    "tests.docs.group",
    "tests.support.desktops",
    "tests.support.engines",
    "tests.support.harbor_environment",
    "tests.support.viewers_environment",
    "tests.support.recipe_environment",
    "tests.support.sandboxes",
    "tests.support.second_user",
    "tests.support.serving",
]


if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # ignored in background shells and inherited by everything that the tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def forgotten_site() -> Iterator[None]:
    """Forget cached answers of Slurm, because the next test may use another Slurm or none."""
    yield
    module = sys.modules.get("megaflow_hpc.slurm.site")
    for value in vars(module).values() if module else ():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture(scope="session")
def base_sif() -> Path:
    """Return the Debian and Python image that the launchers build."""
    path = Path(required("MEGAFLOW_TEST_BASE_SIF"))
    if not path.exists():
        pytest.fail(f"MEGAFLOW_TEST_BASE_SIF={path} does not exist; {REMEDY}")
    return path


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run a single-machine Slurm lab for this xdist worker."""
    required("SLURM_CONF")
    with lab_to_oneself(tmp_path_factory.mktemp("lab")):
        yield


@pytest.fixture(scope="session")
def write_task() -> Callable[..., Path]:
    """Write a small Harbor task directory. The solution writes ``answer``, and the test checks it."""
    return write_solved_task


@pytest.fixture
def make_task(write_task: Callable[..., Path]) -> Callable[..., Path]:
    return write_task


@pytest.fixture
def make_campaign(tmp_path: Path, base_sif: Path, make_task: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that writes a campaign file with ``tasks`` small tasks and the given additional lines.

    ``answers`` are those of a scripted engine, written to ``answers.yaml``.
    """

    def make(
        tasks: int = 2, extra: str = "", agent: str = "[oracle, nop]", answers: object = None, **task: object
    ) -> Path:
        if answers is not None:
            (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"default": answers}))
        for number in range(tasks):
            make_task(tmp_path / "tasks", f"task{number}", **task)
        path = tmp_path / "campaign.yaml"
        path.write_text(
            f"name: small\ntasks: tasks/*\nagent: {agent}\n"
            f"environment: {{network: none, images: {{base: {base_sif}}}}}\n{textwrap.dedent(extra)}"
        )
        return path

    return make
