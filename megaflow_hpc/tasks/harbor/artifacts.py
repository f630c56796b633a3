"""Collects a task's artifacts after the agent has ended, within limits, and copies them to a separate verifier.

As in Harbor, ``/logs/artifacts`` is always collected, followed by the task's own ``artifacts``. Collection is
best-effort, because the agent may leave the sandbox in any state, and files may be missing.
"""

from __future__ import annotations

import asyncio
import fnmatch
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import SandboxError, UnscoredError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.tasks.harbor.data import DeclaredArtifact, HarborData
from megaflow_hpc.types import MAX_NAME_LENGTH, Artifact, Task

PUBLISHED, MANIFEST = "/logs/artifacts", "artifacts/manifest.json"
COLLECT_S = 120.0
DOWNLOAD_TIMEOUT_S = 240.0
"""Timeout in seconds for collecting all artifacts of a task. Needed because the agent may have replaced the programs
that read them."""

CARRIED_SHARE = 0.9
"""Fraction of a separate verifier's ``disk_mb`` that artifacts may use. The rest is for the tests."""

MAX_FILE = 1 << 20
MAX_BYTES = 8 << 20
MAX_FILES = 200
"""Maximum number of artifact files in a trajectory. Does not apply to copies for a separate verifier."""


@dataclass
class Collected:
    """A collected artifact. ``path`` is its location on the host, or ``None`` if the artifact is missing."""

    source: str
    """Absolute path in the agent's sandbox."""
    name: str
    """Name in the trajectory: the artifact's ``destination``, or else its source path."""
    path: Path | None = None
    error: str = ""


def entries_of(task: Task) -> list[DeclaredArtifact]:
    """Returns the artifacts that a task declares, with absolute source paths."""
    declared = [
        DeclaredArtifact(
            os.path.normpath(os.path.join(task.workdir or "/", entry.source)), entry.destination, entry.exclude
        )
        for entry in HarborData.of(task).artifacts
    ]
    published = [] if any(entry.source == PUBLISHED for entry in declared) else [DeclaredArtifact(PUBLISHED)]
    return [*published, *declared]


async def run_hooks(task: Task, sandbox: ApptainerSandbox) -> None:
    """Runs the task's ``[[verifier.collect]]`` commands, which write artifacts. Ignores failures.

    Each command runs as its ``user`` if set, otherwise as the agent's user.
    """
    before = sandbox.spec
    for hook in HarborData.of(task).verifier.collect:
        user = hook.user or before.user
        if user != sandbox.spec.user:
            await sandbox.restart(replace(sandbox.spec, user=user))
        await sandbox.exec(hook.command, cwd=task.workdir, timeout_s=hook.timeout_s)
    if sandbox.spec.user != before.user:
        await sandbox.restart(before)


async def collect(task: Task, sandbox: ApptainerSandbox, folder: Path) -> list[Collected]:
    """Copies the task's artifacts into ``folder``, which must not exist. Records failures in each artifact's ``error``.

    Raises:
        SandboxError: The sandbox was lost or exceeded a limit.
    """
    entries = entries_of(task)
    lacking = [await sandbox.lacks(entry.source) for entry in entries]
    budget = sandbox.download_budget()
    deadline = asyncio.get_running_loop().time() + DOWNLOAD_TIMEOUT_S
    sources = [entry.source for entry in entries]
    # An empty directory counts as missing, because /logs/artifacts is created for every task.
    test = (
        'for p in "$@"; do if [ -d "$p" ]; then set -- "$p"/*; [ -e "$1" ]; else [ -e "$p" ]; fi && echo 1 || echo 0; '
        "done"
    )
    there: list[str] = []
    if not all(lacking):
        seen = await sandbox.exec(["/bin/sh", "-c", test, "sh", *sources], cwd="/", timeout_s=COLLECT_S)
        there = seen.stdout.split()
    collected: list[Collected] = []
    for number, entry in enumerate(entries):
        source = sources[number]
        kept = Collected(source, _name(entry))
        if there[number : number + 1] != ["1"]:
            if entry.destination or source != PUBLISHED:
                collected.append(kept)
                kept.error = "not there"
            continue
        target = folder / str(number)
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            async with asyncio.timeout_at(deadline):
                await sandbox.download(source, str(target), budget)
            await asyncio.to_thread(_leave_out, target, entry.exclude)
            kept.path = target
        except TimeoutError:
            kept.error = f"reading the artifacts took longer than {DOWNLOAD_TIMEOUT_S:g} s"
        except Exception as error:  # the agent must not be able to prevent a verdict
            kept.error = str(error) or repr(error)
        collected.append(kept)
    return collected


async def carry(collected: Sequence[Collected], sandbox: ApptainerSandbox) -> list[str]:
    """Copies artifacts to the same paths in another sandbox. Skips artifacts that do not fit.

    Returns:
        One message per missing artifact, with the reason. A lost sandbox is not reported, because its next use will
        fail.
    """
    problems: list[str] = []
    left = math.inf if sandbox.spec.disk_mb is None else sandbox.spec.disk_mb * 1e6 * CARRIED_SHARE
    for item in collected:
        if item.path is None:
            continue
        left -= await asyncio.to_thread(_size, item.path)
        try:
            if left < 0:
                raise SandboxError(f"larger than {CARRIED_SHARE:.0%} of what the verifier's sandbox may write")
            if item.path.is_dir():
                await sandbox.exec(["rm", "-rf", item.source], cwd="/", timeout_s=COLLECT_S)
            await sandbox.upload(str(item.path), item.source)
        except SandboxError as error:
            problems.append(f"{item.source}: {error}")
    return problems


def _size(path: Path) -> int:
    """Returns the disk usage of a file or tree in bytes, counting at least one block per entry."""
    return sum(max(4096, os.lstat(file).st_blocks * 512) for file in (path, *path.rglob("*")))


def to_artifacts(collected: Sequence[Collected], prefix: str = "") -> list[Artifact]:
    """Converts collected files to artifacts of a trajectory. If files are omitted, ``artifacts/manifest.json`` lists
    them with the reasons."""
    artifacts: list[Artifact] = []
    manifest: list[dict[str, Any]] = []
    left = MAX_BYTES
    for item in collected:
        kept: list[str] = []
        omitted: list[str] = []
        executable: list[str] = []
        for file in _files(item.path):
            name = f"{prefix}artifacts/{item.name}"
            if item.path is not None and file != item.path:
                name += f"/{file.relative_to(item.path)}"
            size = file.stat().st_size
            if size > min(MAX_FILE, left) or len(artifacts) >= MAX_FILES or len(name) > MAX_NAME_LENGTH:
                omitted.append(name[:MAX_NAME_LENGTH])
                continue
            artifacts.append(Artifact(name, file.read_bytes()))
            left -= size
            kept.append(name)
            executable += [name] if os.access(file, os.X_OK) else []
        links = sum(file.is_symlink() for file in item.path.rglob("*")) if item.path and item.path.is_dir() else 0
        entry: dict[str, Any] = {"source": item.source, "kept": len(kept), "error": item.error}
        entry |= {"executable": executable, "links": links}
        if omitted:
            entry["too_large_or_too_many"] = omitted[:MAX_FILES]
        manifest.append(entry)
    if manifest:
        artifacts.append(Artifact(f"{prefix}{MANIFEST}", json.dumps(manifest, indent=1).encode()))
    return artifacts


async def put_back(task: Task, sandbox: ApptainerSandbox, stored: Mapping[str, bytes]) -> None:
    """Copies a stored rollout's artifacts to their original paths in a sandbox.

    Raises:
        UnscoredError: Some of the artifacts are not stored, or do not fit into the sandbox.
    """
    manifest = {entry["source"]: entry for entry in json.loads(stored.get(MANIFEST, b"[]"))}
    folder = Path(sandbox.directory + ".restored")
    restored: list[Collected] = []
    try:
        for number, declared in enumerate(entries_of(task)):
            entry = manifest.get(declared.source)
            was_missing = entry["error"] == "not there" if entry else declared.source == PUBLISHED
            if was_missing:
                continue
            if not entry or entry["error"] or entry.get("too_large_or_too_many") or entry.get("links", 1):
                raise UnscoredError(f"not all files of its artifact {declared.source} are stored")
            item = Collected(declared.source, _name(declared), folder / str(number))
            for name, data in stored.items():
                whole, _, relative = name.partition(f"artifacts/{item.name}")
                if not whole and (not relative or relative.startswith("/")) and name != MANIFEST:
                    path = folder / str(number) / relative.strip("/")
                    await asyncio.to_thread(_write, path, data, name in entry["executable"])
            restored.append(item)
        if problems := await carry(restored, sandbox):
            raise UnscoredError(f"an artifact cannot be restored: {problems[0]}")
    finally:
        await asyncio.to_thread(remove_tree, folder, ignore_errors=True)


def _write(path: Path, data: bytes, executable: bool) -> None:
    if ".." in path.parts:
        raise UnscoredError(f"{path}: leads out of its artifact")
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o755 if executable else 0o644)


def _name(entry: DeclaredArtifact) -> str:
    """Returns the name of a declared artifact in the trajectory."""
    return entry.destination or entry.source.strip("/") or "root"


def _files(path: Path | None) -> list[Path]:
    """Returns the regular files below ``path``, or ``path`` itself if it is a file. Does not follow symlinks."""
    if path is None or path.is_symlink():
        return []
    if not path.is_dir():
        return [path]
    return [file for file in sorted(path.rglob("*")) if file.is_file() and not file.is_symlink()]


def _leave_out(path: Path, patterns: Sequence[str]) -> None:
    if not patterns or not path.is_dir():
        return
    for file in sorted(path.rglob("*")):
        relative = str(file.relative_to(path))
        excluded = any(fnmatch.fnmatch(relative, p) or fnmatch.fnmatch(file.name, p) for p in patterns)
        if excluded and os.path.lexists(file):  # its directory may have been removed already
            remove_tree(file)
