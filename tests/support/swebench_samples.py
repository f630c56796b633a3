"""SWE-bench style instances made from released packages: two releases, a checkout of the earlier one in an image.

The difference in code is ``patch``, that in the named test files ``test_patch``. The image is the base image's tree by
hard links, the checkout at ``/testbed``, and what SWE-bench's images have: an ``activate`` script, ``python``,
``pytest``, the checkout importable as if installed in place.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.tasks.releases import sdists
from megaflow_hpc.tasks.releases.sdists import Release

UNUSED = ("doc", "man", "zoneinfo", "perl", "perl5")
"""Half of the base image's files, which would only cost time to link and to remove."""


@dataclass(frozen=True)
class Pair:
    """Two releases, and what tells them apart."""

    package: str
    buggy: str
    fixed: str
    tests: tuple[str, ...]
    """Test files of the fixed release that make up the test patch."""
    requires: tuple[str, ...] = ()


@dataclass
class Made:
    """The patches of a pair, and its trees."""

    patch: str
    test_patch: str
    buggy: Path
    fixed: Path
    commit: str


def make(pair: Pair, cache: Path, scratch: Path) -> Made:
    old, new = Release(pair.package, pair.buggy), Release(pair.package, pair.fixed)
    archives = sdists.fetch([old, new], cache)
    buggy, fixed = sdists.unpack(archives[old], scratch / "buggy"), sdists.unpack(archives[new], scratch / "fixed")
    sdists.commit(buggy, str(old))
    patch = sdists.difference(buggy, fixed).text.decode()
    for name in pair.tests:
        (buggy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(fixed / name, buggy / name)
    sdists.git(buggy, "add", "-A")
    test_patch = sdists.git(buggy, "diff", "--cached", "--no-color").decode()
    sdists.git(buggy, "reset", "--hard", "-q")
    commit = sdists.git(buggy, "rev-parse", "HEAD").decode().strip()
    assert patch
    assert test_patch
    return Made(patch, test_patch, buggy, fixed, commit)


def build_image(rootfs: str, target: Path, requires: Sequence[str]) -> Path:
    """An unpacked image with pytest and what the tests import; the checkout is put in by :func:`with_checkout`."""
    subprocess.run(["cp", "-al", rootfs, str(target)], check=True)
    for name in ("var/lib/dpkg", "usr/lib/python3", *(f"usr/share/{part}" for part in UNUSED)):
        if (target / name).is_dir():
            subprocess.run(["chmod", "-R", "u+w", str(target / name)], check=True)
            shutil.rmtree(target / name)
    version = next(Path(rootfs, "usr/lib").glob("python3.[0-9]*")).name.removeprefix("python")
    packages = target / "usr/lib/python3/dist-packages"
    packages.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-warn-conflicts"]
    pip += ["--only-binary", ":all:", "--python-version", version, "--target", str(packages), "--upgrade"]
    subprocess.run([*pip, "pytest>=8,<9", *requires], check=True)
    write(target / "opt/miniconda3/bin/activate", "conda() { :; }\n")
    write(target / "usr/local/bin/python", '#!/bin/sh\nexec python3 "$@"\n')
    write(target / "usr/local/bin/pytest", '#!/bin/sh\nexec python3 -m pytest "$@"\n')
    return target


def with_checkout(image: Path, tree: Path, target: Path) -> Path:
    subprocess.run(["cp", "-al", str(image), str(target)], check=True)
    shutil.copytree(tree, target / "testbed", symlinks=True)
    source = target / "testbed" / sdists.source_root(tree)
    write(target / "usr/lib/python3/dist-packages/testbed.pth", f"/{source.relative_to(target)}\n")
    return target


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def write_lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
