"""Builds tasks from real bugs. Each task is based on two releases of a package. The later release fixes a known defect.

A bug file names the releases and the tests (:mod:`~megaflow_hpc.tasks.releases.bugs`). The build downloads both source
distributions, so the file contains no package code. Each bug becomes a Harbor task directory::

    OUTPUT/<id>/
      task.toml            docker_image names the shared image; workdir /testbed
      instruction.md       the issue, as a user would report it
      environment/         the buggy release's source tree, with a git repository of one commit
      solution/            solve.sh applies fix.patch, the code that differs between the releases
      tests/               test.sh runs named_tests.py: the fixed release's tests, judged by id

All tasks share one image (image.py) with pytest and the packages that the tests import.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks import named_tests
from megaflow_hpc.tasks.releases import sdists
from megaflow_hpc.tasks.releases.bugs import Bug, BugFile
from megaflow_hpc.tasks.releases.sdists import (
    ReleasePatch,
    commit,
    difference,
    fetch,
    is_test,
    source_root,
    tree_files,
    unpack,
)

MAX_LINES = 400
"""Maximum number of changed lines in a fix. Larger differences usually contain other changes too."""
WORKDIR = "/testbed"
BUILD_FILES = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")
"""File names in ``environment/`` that Harbor treats as build instructions."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BuiltTask:
    """A task directory built from a bug."""

    id: str
    path: Path
    bug: Bug
    lines: int
    """Number of lines added or removed by the reference patch."""
    fresh: bool
    """True if this run built the directory. False if it was already up to date."""


# --- task directories -----------------------------------------------------------------------------------------------


def build_tasks(
    content: BugFile, bugs: Sequence[Bug], output: Path, cache: Path, where: Callable[[str], str], say: Progress
) -> list[BuiltTask]:
    """Builds missing or outdated task directories, and publishes each with a rename."""
    output.mkdir(parents=True, exist_ok=True)
    fingerprints = {bug.id: fingerprint(content, bug) for bug in bugs}
    stale = [bug for bug in bugs if read_stamp(output / bug.id).get("fingerprint") != fingerprints[bug.id]]
    archives = fetch((release for bug in stale for release in bug.releases), cache)
    built = []
    for bug in bugs:
        fresh = bug in stale
        if fresh:
            for release in bug.releases:
                if release not in archives:
                    raise ConfigError(
                        f"{where(bug.id)}: {release} has no source distribution in pip's index; "
                        f"list the available releases with: pip index versions {release.package}"
                    )
            buggy, fixed = (archives[release] for release in bug.releases)
            with tempfile.TemporaryDirectory(prefix=f".{bug.id}-", dir=output) as scratch:
                task = emit(content, bug, (buggy, fixed), Path(scratch), fingerprints[bug.id], where(bug.id))
                _publish(task, output / bug.id, Path(scratch) / "replaced")
        lines = int(read_stamp(output / bug.id)["patch_lines"])
        built.append(BuiltTask(bug.id, output / bug.id, bug, lines, fresh))
        say(f"{bug.id}: {bug.package} {bug.buggy} -> {bug.fixed}, {lines} lines{'' if fresh else ' (already exists)'}")
    return built


def fingerprint(content: BugFile, bug: Bug) -> str:
    """Returns a digest of all inputs of a task directory, including this code. If the digest changes, the directory is
    rebuilt."""
    code = [Path(file).read_text() for file in (__file__, sdists.__file__, named_tests.__file__)]
    made_from = [content.image, bug.model_dump(mode="json"), code]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]


def read_stamp(task: Path) -> dict[str, Any]:
    """Returns the ``[metadata]`` of a task directory, or an empty dict if it is missing."""
    try:
        metadata = tomllib.loads((task / "task.toml").read_text()).get("metadata", {})
    except (OSError, ValueError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def strangers(content: BugFile, output: Path) -> list[Path]:
    """Returns the task directories in ``output`` that were built from bugs that are no longer in the file."""
    ids = {bug.id for bug in content.bugs}
    return sorted(path for path in output.glob("[!.]*") if path.name not in ids and "fingerprint" in read_stamp(path))


def _publish(task: Path, target: Path, replaced: Path) -> None:
    if target.exists():
        os.replace(target, replaced)
    os.replace(task, target)


def emit(content: BugFile, bug: Bug, archives: tuple[Path, Path], scratch: Path, stamp: str, where: str) -> Path:
    """Writes one task directory under ``scratch``."""
    buggy, fixed = (unpack(archive, scratch / archive.stem) for archive in archives)
    old_tests, new_tests = ([name for name in tree_files(tree) if is_test(name)] for tree in (buggy, fixed))
    for entry in (*bug.failing, *bug.passing):
        file = entry.split("::")[0]
        if not any(named_tests.matches(file, name) for name in new_tests):
            raise ConfigError(
                f"{where}: {entry!r}: the source distribution of {bug.releases[1]} has no test file {file}"
            )
    for name in BUILD_FILES:
        (buggy / name).unlink(missing_ok=True)
    commit(buggy, f"{bug.package} {bug.buggy}")
    patch = difference(buggy, fixed)
    check_patch(bug, patch, where)

    task = scratch / "task"
    (task / "solution").mkdir(parents=True)
    (task / "tests").mkdir()
    root = source_root(buggy)
    os.replace(buggy, task / "environment")
    (task / "task.toml").write_text(task_toml(content.image, bug, patch, root, stamp))
    (task / "instruction.md").write_text(instruction(bug))
    (task / "solution" / "fix.patch").write_bytes(patch.text)
    _script(task / "solution" / "solve.sh", SOLVE)
    _script(task / "tests" / "test.sh", TEST)
    shutil.copyfile(named_tests.__file__, task / "tests" / "named_tests.py")
    for name in new_tests:
        (task / "tests" / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(fixed / name, task / "tests" / "files" / name)
    expected = {
        "source_root": root,
        "failing": bug.failing,
        "passing": bug.passing,
        "files": new_tests,
        "stale": sorted(set(old_tests) - set(new_tests)),
    }
    (task / "tests" / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    return task


def check_patch(bug: Bug, patch: ReleasePatch, where: str) -> None:
    """Checks that a fix changes code, and is small enough for an agent to write.

    Args:
        where: ``file:line`` of the bug, for the error message.

    Raises:
        ConfigError: The fix changes no code, or more than :data:`MAX_LINES` lines.
    """
    if not patch.lines:
        raise ConfigError(
            f"{where}: no code differs between {bug.buggy} and {bug.fixed} of {bug.package}; choose other releases"
        )
    if patch.lines > MAX_LINES:
        raise ConfigError(
            f"{where}: {patch.lines} lines of code differ between {bug.buggy} and {bug.fixed} of {bug.package}, "
            f"more than {MAX_LINES}; choose releases that are closer"
        )


SOLVE = """\
#!/bin/sh
# Applies the code changes between the two releases.
set -e
here=$(cd "$(dirname "$0")" && pwd)
cd "${TESTBED:-%(workdir)s}"
git apply --whitespace=nowarn "$here/fix.patch"
"""

TEST = """\
#!/bin/sh
# Writes 1 or 0 to /logs/verifier/reward.txt, and every outcome to results.json next to it.
here=$(cd "$(dirname "$0")" && pwd)
exec python3 "$here/named_tests.py" "$here" "${TESTBED:-%(workdir)s}" "${VERIFIER_LOGS:-/logs/verifier}"
"""


def _script(path: Path, text: str) -> None:
    path.write_text(text % {"workdir": WORKDIR})
    path.chmod(0o755)


def instruction(bug: Bug) -> str:
    """Returns the instruction of a task: the issue, and the location of the source."""
    run = "python3 -m pytest -o addopts="
    return f"""\
{bug.issue.strip()}

---

The source of {bug.package} {bug.buggy} is in `{WORKDIR}`, a git repository.
Correct the package there so that the problem is gone and everything else keeps working.
`{run}` runs its tests; tests that are not in the tree will judge the result.
There is no network.
"""


def task_toml(image: str, bug: Bug, patch: ReleasePatch, root: str, stamp: str) -> str:
    """Returns the content of a ``task.toml`` in Harbor's schema 1.4.

    The task names an image and has no Dockerfile, so ``environment/`` is uploaded to ``workdir``.
    """
    path = WORKDIR if root == "." else f"{WORKDIR}/{root}"
    sections: dict[str, dict[str, Any]] = {
        "metadata": {
            "category": "bug-fix",
            "package": bug.package,
            "buggy": bug.buggy,
            "fixed": bug.fixed,
            "kind": bug.kind,
            "changelog": bug.changelog,
            "patch_lines": patch.lines,
            "patch_files": list(patch.files),
            "fingerprint": stamp,
        },
        "agent": {"timeout_sec": 900.0},
        "verifier": {"timeout_sec": 300.0},
        "environment": {
            "docker_image": image,
            "workdir": WORKDIR,
            "build_timeout_sec": 600.0,
            "cpus": 1,
            "memory_mb": 2048,
            "storage_mb": 2048,
        },
        "environment.env": {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
    }
    lines = ['schema_version = "1.4"']
    for section, values in sections.items():
        lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Formats a value as JSON, which is valid TOML for strings, numbers and lists of them."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
