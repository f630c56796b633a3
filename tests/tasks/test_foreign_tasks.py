"""Harbor tasks by other authors: reward 1 with their solution, 0 without.

Two packages of the package index contain them and are fetched by the test: two tasks of Terminal-Bench, and one with a
separate verifier. Their images are replaced by the base image with the tools that the tests would download: uv, pytest
and a directory of wheels.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from megaflow_hpc.agents.without_model import OracleAgent
from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.image_file import LABEL
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.sources import ImageMapping
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.loading import image_requests, in_image_directories
from megaflow_hpc.tasks.releases.sdists import fetch_wheels
from megaflow_hpc.tasks.validation import Validation, validate
from tests.support.sources import fetch_sources

PACKAGES = ("aeval-harbor==0.4.0", "tolokaforge-adapter-terminal-bench==0.2.0")
TERMINAL_BENCH = "aeval_harbor-0.4.0/suites/terminal-beach/vendor/upstream"
TASKS = {
    "terminal-bench": f"{TERMINAL_BENCH}/hello-world",
    "terminal-bench-dockerfile": f"{TERMINAL_BENCH}/openssl-selfsigned-cert",
    "separate-verifier": "tolokaforge_adapter_terminal_bench-0.2.0/tests/fixtures/v4_echo",
}
OFFLINE = """\
export UV_OFFLINE=1 UV_NO_INDEX=1 UV_FIND_LINKS=/opt/wheels UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy
export PIP_NO_INDEX=1 PIP_FIND_LINKS=/opt/wheels PIP_BREAK_SYSTEM_PACKAGES=1
"""


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the packages' sources."""
    place = tmp_path_factory.mktemp("foreign")
    fetch_sources(PACKAGES, place)
    return place


@pytest.fixture(scope="session")
def stand_in(rootfs: str, scratch: Path) -> Path:
    """Return the base image with uv, wheels and the work directory /app; its other files are hard links to the base
    image's."""
    image, wheels = scratch / "stand-in", scratch / "wheels"
    subprocess.run(["cp", "-al", rootfs, image], check=True)
    wheels.mkdir()
    fetch_wheels(["uv", "pytest==9.1.1", "colorama", "exceptiongroup", "tomli"], "3.11", wheels)
    shutil.copytree(wheels, image / "opt" / "wheels", ignore=shutil.ignore_patterns("uv-*"))
    with zipfile.ZipFile(next(wheels.glob("uv-*"))) as wheel:
        program = next(name for name in wheel.namelist() if name.endswith("/scripts/uv"))
        (image / "usr/local/bin/uv").write_bytes(wheel.read(program))
    (image / "usr/local/bin/uv").chmod(0o755)
    (image / "root/.local/bin").mkdir(parents=True)
    (image / "root/.local/bin/env").write_text("")
    (image / "app").mkdir()
    sources = image / "etc/apt/sources.list"
    sources.unlink()
    sources.write_text("")  # fail at once for a package that is missing
    (image / ".singularity.d/env/91-offline.sh").write_text(OFFLINE)
    labels = image / ".singularity.d/labels.json"
    changed = {**json.loads(labels.read_text()), LABEL: "/app"}
    labels.unlink()  # it belongs to the base image
    labels.write_text(json.dumps(changed))
    return image


@pytest.fixture(scope="session")
def validations(
    foreign: Path, stand_in: Path, scratch: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Validation]:
    """Validate all tasks at once; return the results by task id."""
    tasks = [read_harbor_task(foreign / path) for path in TASKS.values()]
    requests = image_requests(tasks)
    store = tmp_path_factory.mktemp("store")
    mapping = ImageMapping({request.base or request.name: str(stand_in) for request in requests}, store)
    resolver = Images(ImageStore(store), builder=Builder())
    images = resolver.resolve_all(requests, mapping)
    tasks = in_image_directories(tasks, images, resolver, mapping)

    async def main() -> dict[str, Validation]:
        async with ApptainerProvider(scratch) as provider:
            results = validate(tasks, images, OracleAgent(), provider, jobs=len(tasks))
            return {result.task: result async for result in results}

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_published_task_runs_without_changes(foreign: Path, validations: dict[str, Validation], name: str) -> None:
    result = validations[read_harbor_task(foreign / TASKS[name]).id]
    assert (result.before.error, result.before.reward) == ("", 0.0), result.before.output
    assert (result.after.error, result.after.reward) == ("", 1.0), result.after.output
    if name.startswith("terminal-bench"):
        assert "passed" in result.after.output
