"""Sources of packages of the package index, fetched when a test runs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from megaflow_hpc.tasks.releases.sdists import run_pip


def fetch_sources(packages: Sequence[str], place: Path) -> None:
    """Unpacks the sources of packages, named with their versions, below ``place``."""
    # Named, not :all:, or pip builds their build back ends from source as well.
    names = ",".join(package.partition("==")[0] for package in packages)
    options = ["--no-deps", "--no-binary", names, "--ignore-requires-python", "--no-input", "-d", str(place)]
    done = run_pip(["download", *options, *packages])
    assert done.returncode == 0, done.stderr
    for archive in place.glob("*.tar.gz"):
        subprocess.run(["tar", "-xf", archive, "-C", place], check=True)
