"""Harbor task directories for tests: one to be read, one with several steps, one that an oracle solves."""

from __future__ import annotations

import stat
import textwrap
from collections.abc import Mapping
from pathlib import Path

from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.sources import ImageMapping
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.tasks.loading import image_requests
from megaflow_hpc.types import Task

TOML = """\
version = "1.0"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 30
env = { MODE = "strict" }
[environment]
docker_image = "org/base:1"
workdir = "/app"
cpus = 2
memory = "2G"
storage_mb = 500
allow_internet = false
"""


def write_task(root: Path, name: str = "one", toml: str = TOML, dockerfile: str | None = None) -> Path:
    """Writes a task directory to be read; its image is ``org/base:1`` unless there is a Dockerfile."""
    task = root / name
    (task / "tests").mkdir(parents=True)
    (task / "environment").mkdir()
    (task / "task.toml").write_text(toml)
    (task / "instruction.md").write_text("Fix it.\n")
    (task / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    if dockerfile is not None:
        (task / "environment" / "Dockerfile").write_text(textwrap.dedent(dockerfile))
    return task


STEPS = """\
schema_version = "1.4"
multi_step_reward_strategy = "mean"
artifacts = ["/app/log"]
[environment]
docker_image = "base"
workdir = "/app"
[agent]
timeout_sec = 650
[verifier]
timeout_sec = 620
env = { WHO = "all" }
[solution]
env = { WORD = "solved" }
[[steps]]
name = "first"
min_reward = 0.5
[steps.agent]
timeout_sec = 630
user = "1000"
[steps.healthcheck]
command = "test -f ready"
[[steps]]
name = "second"
min_reward = { reward = 0, extra = 0 }
[steps.verifier]
timeout_sec = 610
env = { WHO = "second" }
"""


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Writes files with dedented texts below ``root``, which is returned."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


def write_steps(tmp_path: Path, **more: str) -> Path:
    """Writes a task of two steps whose tests say who ran them and count what the agent left; ``more`` files on top."""
    files = {
        "task.toml": STEPS,
        "tests/.harborignore": "*.draft\n",
        "tests/notes.draft": "",
        "steps/first/solution/.harborignore": "/large\n",
        "steps/first/solution/large": "",
        "tests/common.sh": "test -e /tests/notes.draft && exit 1; n=$(grep -c $WORDS log 2>/dev/null || true)\n",
        "steps/first/instruction.md": "<!-- a canary of the benchmark -->\n# another CANARY\n\nDo the first.\n",
        "steps/first/workdir/setup.sh": "touch ready; echo begun >> log\n",
        "steps/first/solution/solve.sh": "test ! -e /solution/large || exit 9; echo $WORD one by $(id -u) >> log\n",
        "steps/first/tests/test.sh": "WORDS=solved . /tests/common.sh; echo $n > /logs/verifier/reward.txt\n"
        "test $WHO = all; echo private > /tests/secret; cat log\n",
        "steps/second/instruction.md": "Do the second.\n",
        "steps/second/solution/solve.sh": "test ! -e /tests/secret -a ! -e /logs/verifier/reward.txt || exit 9\n"
        "echo $WORD two by $(id -u) >> log\n",
        "steps/second/tests/test.sh": "cat log; test -e /tests/secret && exit 1; . /tests/common.sh\n"
        'echo "{\\"reward\\": $(grep -c solved log), \\"extra\\": 1, \\"who\\": $(test $WHO = second && echo 1)}"'
        " > /logs/verifier/reward.json\n",
        **more,
    }
    return write_files(tmp_path / "walk", files)


SEPARATE = """\
schema_version = "1.4"
artifacts = ["answer", { source = "/data", destination = "kept", exclude = ["*.tmp"] }, "/missing"]
[environment]
docker_image = "base"
workdir = "/app"
[verifier]
timeout_sec = 620
environment_mode = "separate"
[[verifier.collect]]
command = "cat hidden > answer; id -u > /logs/artifacts/first; chmod 777 /logs/artifacts"
[[verifier.collect]]
command = "id -u > /logs/artifacts/second"
user = 1000
"""
"""The task.toml of a task with artifacts and a verifier in a sandbox apart."""


def write_solved_task(
    root: Path, name: str, solution: str = "echo 42 > answer", test: str = "grep -q 42 answer", agent_s: float = 600
) -> Path:
    """Writes a task on the image ``base``: its solution writes ``answer``, its test looks for 42 in it."""
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


def resolve_images(tasks: list[Task], mapping: Mapping[str, str], base: Path, store: Path) -> dict[str, str]:
    """The image files of tasks, as a campaign resolves them, with a store of the test's own."""
    return Images(ImageStore(store), builder=Builder()).resolve_all(image_requests(tasks), ImageMapping(mapping, base))
