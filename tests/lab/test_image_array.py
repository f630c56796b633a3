"""Images built by a plain job array of the lab: one share for each element, by the script that users submit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megaflow_hpc.environments.images.store import ImageStore
from tests.support.places import ROOT
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]


def write_context(place: Path, number: int, step: str) -> str:
    """Writes a Dockerfile whose first step all others share, and whose copied file is its own."""
    place.mkdir(parents=True)
    (place / "file").write_text(f"{number}\n")
    (place / "Dockerfile").write_text(f"FROM base\nRUN echo shared > /shared\nCOPY file /file\nRUN {step}\n")
    return str(place / "Dockerfile")


def submit(array: str, logs: Path, store: Path, *words: str) -> str:
    """Submits the array, waits for it, and returns the states of its elements."""
    script = ROOT / "sbatch" / "build_images.sbatch"
    options = [f"--array={array}", "--time=10", "--mem=900", f"--output={logs}/%a.log"]
    environment = os.environ | {"MEGAFLOW_IMAGE_STORE": str(store)}
    command = ["sbatch", "--wait", "--parsable", *options, script, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    query = ["sacct", "-n", "-X", "-P", "-j", done.stdout.strip(), "-o", "State"]
    states: list[str] = []

    def ended() -> bool:
        states[:] = sorted(subprocess.check_output(query, text=True).split())
        return len(states) == 2 and not {"PENDING", "RUNNING"} & set(states)

    until(ended, "accounting has both elements", 30)
    return " ".join(states)


def test_elements_build_their_shares_and_an_image_that_fails_fails_alone(tmp_path: Path, busybox_rootfs: str) -> None:
    store, logs = tmp_path / "store", tmp_path / "logs"
    logs.mkdir()
    good = [write_context(tmp_path / f"task{number}", number, "true") for number in range(3)]
    bad = write_context(tmp_path / "bad", 9, "echo never to be built; exit 7")
    words = (*good, bad, "--map", f"base={busybox_rootfs}")
    assert submit("1-2", logs, store, *words) == "COMPLETED FAILED"
    built = {path.name for path in (store / "names").iterdir()}
    assert len(built) == 3
    assert len([image for image in ImageStore(store).images()]) == 3
    assert f"{bad} failed: " in (logs / "2.log").read_text()
    assert "never to be built" in (logs / "2.log").read_text()

    Path(bad).write_text(Path(bad).read_text().replace("exit 7", "true"))
    assert submit("1-2", logs, store, *words) == "COMPLETED COMPLETED"
    assert "images: 2, 1 in the store, 1 to be made" in (logs / "2.log").read_text()
    assert built < {path.name for path in (store / "names").iterdir()}
