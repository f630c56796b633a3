"""The environment in which the packages of recipes are installed, and recipes made ready in it."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc.recipes import find_recipe
from tests.support.places import LAUNCHERS, ROOT
from tests.support.warm import COMMAND_LINE, WarmPython

SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
IMPORTED = ("megaflow_hpc.cli.campaigns.start", "h5py")


@pytest.fixture(scope="session")
def recipes_python() -> Iterator[WarmPython]:
    """The Python of an environment with the packages that recipes need; made at the first use."""
    done = subprocess.run(["bash", str(LAUNCHERS / "recipes-env.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with warm(done.stdout.strip(), "reasoning_gym") as python:
        yield python


def warm(python: str, *modules: str) -> WarmPython:
    """Return a Python that has imported the package, and the given modules."""
    return WarmPython(*IMPORTED, *modules, python=python, variables={"PYTHONPATH": str(ROOT)})


def initialised(name: str, directory: Path, python: WarmPython, options: str = "") -> Path:
    """Write a recipe's files by ``init --recipe`` and make its tasks, with options; return the directory."""
    done = typed(python, directory, f"megaflow-hpc init --recipe {name} --json .")
    for command in json.loads(done.stdout)["commands"]:
        recipe = find_recipe(name)
        if not command.startswith("megaflow-hpc run") and command not in (recipe.fetch, *recipe.after):
            typed(python, directory, f"{command} {options}" if command == recipe.make else command)
    return directory


def typed(
    python: WarmPython, directory: Path, command: str, status: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Type a command of a recipe into a shell in its directory, with the environment of recipes active."""
    first, *words = shlex.split(command)
    program = {"megaflow-hpc": COMMAND_LINE, "python": SCRIPT}[first]
    done = python.run_several(program, *words, variables=[{}], folder=directory)
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done
