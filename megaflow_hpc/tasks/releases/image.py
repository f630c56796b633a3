"""Builds the shared image of tasks made from bugs: a base image, pytest, and the packages that the tests import.

The build installs wheels that were downloaded earlier for the base image's Python. So it needs neither a network nor
the host's pip settings, credentials and certificates. A stamp file next to the SIF records the build's inputs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.sources import BUILD_S
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host import apptainer as runtime
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.resources import resource
from megaflow_hpc.tasks.releases.bugs import Bug, BugFile
from megaflow_hpc.tasks.releases.sdists import fetch_wheels
from megaflow_hpc.tasks.releases.tasks import WORKDIR, Progress

INSTALL = """\
python3 -c 'import sys, unittest, sqlite3, venv; assert sys.version_info[:2] == ({python})'
git --version
python3 /opt/wheels/{pip}/pip install --no-index --find-links /opt/wheels --no-cache-dir \
    --break-system-packages --root-user-action=ignore --ignore-installed -- "$@"
rm -rf /opt/wheels
"""
"""Shell script that runs in the image. Requirements come from an untrusted file, so they are passed as arguments and
never interpolated."""


def requirements(content: BugFile, bugs: Iterable[Bug]) -> list[str]:
    """Returns all requirements to install in the image, without duplicates."""
    return list(dict.fromkeys([*content.requires, *(need for bug in bugs for need in bug.requires)]))


def build_image(content: BugFile, base: Path, target: Path, say: Progress) -> bool:
    """Builds the shared image on top of ``base`` (a SIF or an unpacked directory). Returns False if the image was
    already up to date.

    The image contains the requirements of all bugs in the file, regardless of ``--only``.
    """
    if not base.exists():
        recipe = resource("containers/task-base.def")
        raise ConfigError(f"--base {base}: no such image; build one with: megaflow-hpc images build {recipe}")
    needs = requirements(content, content.bugs)
    status = base.stat()
    made_from = json.dumps([INSTALL, content.image, needs, str(base.resolve()), status.st_size, status.st_mtime_ns])
    stamp = {"fingerprint": hashlib.sha256(made_from.encode()).hexdigest()[:32]}
    stamp_file = target.with_name(target.name + ".json")
    if target.exists() and _read_json(stamp_file) == stamp:
        say(f"{target}: already exists")
        return False
    apptainer = runtime.find_apptainer()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        major, minor = _python_of(apptainer, base)
        say(f"{target}: downloading wheels for Python {major}.{minor}: {', '.join(needs)}")
        wheels = Path(scratch) / "wheels"
        wheels.mkdir()
        files = fetch_wheels([*needs, "pip"], f"{major}.{minor}", wheels)
        for package in under_test(content, files):
            say(f"{target}: the tests' requirements install {package} itself: an agent can read another release of it")
        install = INSTALL.format(
            python=f"{major}, {minor}", pip=next(name for name in files if re.match(r"pip-[\d.]+-", name))
        )
        command = json.dumps(["/bin/sh", "-ec", install, "sh", *needs])
        dockerfile = Path(scratch) / "Dockerfile"
        dockerfile.write_text(f"FROM base\nCOPY wheels /opt/wheels\nRUN {command}\nWORKDIR {WORKDIR}\n")
        say(f"{target}: building over {base}")
        image = Path(scratch) / "image.sif"
        builder, images = Builder(), ImageStore(Path(scratch) / "store")
        images.prepare(str(target))
        layered = builder.build(Dockerfile(dockerfile), {"base": str(base)}, images.layers, BUILD_S)
        builder.export(images.add_layered(layered, str(target)).path, image)
        stamp_file.unlink(missing_ok=True)
        os.replace(image, target)
    write_json(stamp_file, stamp, 0o644)
    return True


def under_test(content: BugFile, wheels: Iterable[str]) -> list[str]:
    """Returns those tested packages whose wheels were downloaded. An agent could copy the fix from such a wheel."""

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    installed = {normal(name.split("-")[0]) for name in wheels}
    return sorted({bug.package for bug in content.bugs if normal(bug.package) in installed})


def _python_of(apptainer: str, image: Path) -> tuple[str, str]:
    """Returns the major and minor version of an image's ``python3``.

    Unpacks the image, because not all users can mount a SIF.
    """
    program = "import sys; print(*sys.version_info[:2])"
    options = ["--containall", "--cleanenv", "--no-home", *([] if image.is_dir() else ["--unsquash"])]
    command = [apptainer, "-q", "exec", *options, str(image), "python3", "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=runtime.clean_environment(), cwd="/", check=False
    )
    answer = re.fullmatch(r"(\d+) (\d+)", done.stdout.strip())
    if done.returncode != 0 or answer is None:
        raise SiteError(f"{image}: its python3 cannot be run: {runtime.last_line(done.stderr + done.stdout)}")
    return answer[1], answer[2]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
