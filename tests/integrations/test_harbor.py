"""Harbor itself, in its own environment, runs trials in these sandboxes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import megaflow_hpc
from megaflow_hpc.tasks.harbor.ignore import TaskFiles

ENVIRONMENT = "megaflow_hpc.integrations.harbor:ApptainerEnvironment"


pytestmark = pytest.mark.slow  # Harbor may need to be installed first


def run_harbor(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    package = Path(megaflow_hpc.__file__).parents[1]
    # Switch off its downloads and reports.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0", "DO_NOT_TRACK": "1"}
    env = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1", **quiet}
    command = [
        str(python.parent / "harbor"),
        "run",
        *arguments,
        "--env",
        ENVIRONMENT,
        "-o",
        str(folder / "jobs"),
        "--yes",
    ]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.timeout(900)
def test_harbor_runs_trials_in_these_sandboxes_and_leaves_nothing(
    tmp_path: Path, harbor_python: Path, make_task: Callable[..., Path], base_sif: Path
) -> None:
    make_task(tmp_path / "tasks", "image")
    for name, solution in (("dockerfile", "echo $WHERE > answer; pwd > /tmp/where"), ("unsolved", "true")):
        task = make_task(tmp_path / "tasks", name, solution=solution, test="grep -q 42 answer && [ $PWD = /srv/app ]")
        toml = task / "task.toml"
        toml.write_text(toml.read_text().replace('docker_image = "base"\n', "network_mode = 'no-network'\n"))
        (task / "environment" / "Dockerfile").write_text("FROM org/base:1\nENV WHERE=42\nWORKDIR /srv/app\n")
        (task / "environment" / "docker-compose.yml").write_text("services: {}  # data of the task\n")
    scratch = tmp_path / "scratch"
    images = f"images=base={base_sif},org/*={base_sif}"
    done = run_harbor(
        harbor_python, tmp_path, "-p", "tasks", "-a", "oracle", "-n", "3", "--ek", images, "--ek", f"scratch={scratch}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = {}
    for path in tmp_path.glob("jobs/*/*/result.json"):
        result = json.loads(path.read_text())
        assert result["exception_info"] is None, result["exception_info"]
        rewards[result["task_name"].rpartition("/")[2]] = result["verifier_result"]["rewards"]["reward"]
    assert rewards == {"image": 1.0, "dockerfile": 1.0, "unsolved": 0.0}, done.stdout
    assert list((scratch / "owners").iterdir()) == []


LEFT_OUT = """
import json, pathlib, sys
from harbor.models.task.file_filter import TaskFileFilter
root = pathlib.Path(sys.argv[1])
rules = TaskFileFilter(root)
print(json.dumps(sorted(str(p.relative_to(root)) for p in root.rglob("*") if rules.is_excluded(p))))
"""


def test_harborignore_leaves_out_what_it_does_in_harbor(tmp_path: Path, harbor_python: Path) -> None:
    """A tree with every kind of line and position, read by Harbor's own code and by ours."""
    names = ["a.log", "keep.log", "b.py", "data/c.log", "data/deep/d.py", "data/deep/keep.log", "cache/e", "cache/keep"]
    for home in ("tests", "solution", "steps/one/tests", "steps/one/solution", "steps/one/workdir", "environment"):
        for name in names:
            (tmp_path / home / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / home / name).write_text(name)
        (tmp_path / home / "link").symlink_to("a.log")
    rules = {
        "": "*.py\n",
        "tests": "*.log\n!keep.log\n/cache/\n!cache/keep\n# a comment\n\\#\n",
        "tests/data": "!c.log\n/deep/*.py\n",
        "tests/data/deep": "keep.log\n!d.py\n",
        "solution": "**/deep\ncach[e]\n",
        "steps/one/tests": "data/*\n!data/deep\n",
        "steps/one/workdir": "*\n",
        "environment": "*\n",
    }
    for place, text in rules.items():
        (tmp_path / place / ".harborignore").write_text(text)
    asked = [str(harbor_python), "-c", LEFT_OUT, str(tmp_path)]
    theirs = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    files = TaskFiles(tmp_path)
    ours = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if files.excludes(path))
    assert ours == theirs
    assert {"tests/a.log", "tests/link", "tests/cache/keep", "solution/data/deep/d.py"} < set(ours)
    assert not {"tests/keep.log", "tests/data/c.log", "tests/data/deep/d.py", "environment/a.log"} & set(ours)


def test_an_image_that_is_not_there_is_named(
    tmp_path: Path, harbor_python: Path, make_task: Callable[..., Path]
) -> None:
    make_task(tmp_path / "tasks", "one")
    done = run_harbor(harbor_python, tmp_path, "-p", "tasks/one", "-a", "oracle", "--ek", "images=base=gone.sif")
    (path,) = tmp_path.glob("jobs/*/*/result.json")
    told = json.loads(path.read_text())["exception_info"]["exception_message"]
    assert told.startswith("environment kwarg images: base: "), done.stdout
    assert "gone.sif: no such file" in told
