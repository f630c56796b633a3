"""The environment in which the packages of recipes are installed, and recipes made ready in it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megaflow_hpc.recipes import find_recipe
from tests.support.places import LAUNCHERS, ROOT


@pytest.fixture(scope="session")
def recipes_python() -> Path:
    """The interpreter of an environment with the packages that recipes need; made at the first use."""
    done = subprocess.run(["bash", str(LAUNCHERS / "recipes-env.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def initialised(name: str, directory: Path, python: Path) -> Path:
    """Write a recipe's files by ``init --recipe`` and make its tasks; return the directory."""
    done = typed(python, directory, f"megaflow-hpc init --recipe {name} --json .")
    for command in json.loads(done.stdout)["commands"]:
        recipe = find_recipe(name)
        if not command.startswith("megaflow-hpc run") and command not in (recipe.fetch, *recipe.after):
            typed(python, directory, command)
    return directory


def typed(python: Path, directory: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Type a command of a recipe into a shell in its directory, with the environment of recipes active."""
    first, *words = shlex.split(command)
    program = {"megaflow-hpc": [str(python), "-m", "megaflow_hpc"], "python": [str(python)]}[first]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [*program, *words],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
