"""What a task wants kept of its sandbox: copied out when the agent is done, bounded, carried to a separate verifier.

``/logs/artifacts`` is always looked for, as in Harbor; the task's own ``artifacts`` come after it. Collecting is best
effort: the sandbox is as the agent left it, and a file that is not there is the agent's affair.
"""

from __future__ import annotations

import asyncio
import fnmatch
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.tasks.harbor.data import DeclaredArtifact, HarborData
from megaflow_hpc.types import Artifact, Task

PUBLISHED = "/logs/artifacts"
COLLECT_S = 120.0
DOWNLOAD_S = 240.0
"""For all artifacts of a task: the programs that read them are the agent's by now."""

CARRIED_SHARE = 0.9
"""Of a separate verifier's ``disk_mb``: what an agent left must not be all that the tests may write."""

MAX_FILE = 1 << 20
MAX_BYTES = 8 << 20
MAX_FILES = 200
"""What a trajectory keeps; what is carried to a verifier is bounded by what one download of the sandbox may be."""


@dataclass
class Collected:
    """One artifact on the host. ``path`` is ``None`` where there is none."""

    source: str
    """Absolute path in the sandbox."""
    name: str
    """Where it is kept: the task's ``destination``, else the source."""
    path: Path | None = None
    error: str = ""


def entries_of(task: Task) -> list[DeclaredArtifact]:
    """Everything to collect, sources absolute."""
    declared = [
        DeclaredArtifact(
            os.path.normpath(os.path.join(task.workdir or "/", entry.source)), entry.destination, entry.exclude
        )
        for entry in HarborData.of(task).artifacts
    ]
    published = [] if any(entry.source == PUBLISHED for entry in declared) else [DeclaredArtifact(PUBLISHED)]
    return [*published, *declared]


async def run_hooks(task: Task, sandbox: ApptainerSandbox) -> None:
    """Runs the task's ``[[verifier.collect]]`` commands, which write what is to be collected; failures are ignored.

    Each runs as its own user, if it names one, else as the agent did.
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
    """Copies the task's artifacts into ``folder``, which must not exist. What goes wrong with one is its error.

    Raises:
        SandboxError: the sandbox was lost, or has used up what it may.
    """
    entries = entries_of(task)
    lacking = [await sandbox.lacks(entry.source) for entry in entries]
    budget = sandbox.download_budget()
    deadline = asyncio.get_running_loop().time() + DOWNLOAD_S
    sources = [entry.source for entry in entries]
    # A directory that is empty counts as missing: /logs/artifacts is made for every task.
    test = (
        'for p in "$@"; do if [ -d "$p" ]; then set -- "$p"/*; [ -e "$1" ]; else [ -e "$p" ]; fi && echo 1 || echo 0; '
        "done"
    )
    there: list[str] = []
    if not all(lacking):
        seen = await sandbox.exec(["/bin/sh", "-c", test, "sh", *sources], cwd="/", timeout_s=COLLECT_S)
        there = seen.stdout.split()
    found: list[Collected] = []
    for number, entry in enumerate(entries):
        source = sources[number]
        kept = Collected(source, entry.destination or source.strip("/") or "root")
        if there[number : number + 1] != ["1"]:
            if entry.destination or source != PUBLISHED:
                found.append(kept)
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
            kept.error = f"the artifacts were not read within {DOWNLOAD_S:g} s"
        except Exception as error:  # whatever the agent's programs sent is no reason to go without a verdict
            kept.error = str(error) or repr(error)
        found.append(kept)
    return found


async def carry(collected: Sequence[Collected], sandbox: ApptainerSandbox) -> list[str]:
    """Puts artifacts into another sandbox, each where it was in the first.

    Returns:
        Why some are not there: what an agent left may be too large for that sandbox, and it is judged without. If the
        sandbox itself was lost, whoever uses it next learns that.
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
    """Bytes on disk of a file or a tree; at least a block for each entry."""
    return sum(max(4096, os.lstat(file).st_blocks * 512) for file in (path, *path.rglob("*")))


def to_artifacts(collected: Sequence[Collected], prefix: str = "") -> list[Artifact]:
    """A trajectory's artifacts, with ``artifacts/manifest.json`` that says what was left out and why."""
    found: list[Artifact] = []
    manifest: list[dict[str, Any]] = []
    left = MAX_BYTES
    for item in collected:
        kept: list[str] = []
        omitted: list[str] = []
        for file in _files(item.path):
            name = f"{prefix}artifacts/{item.name}"
            if item.path is not None and file != item.path:
                name += f"/{file.relative_to(item.path)}"
            size = file.stat().st_size
            if size > min(MAX_FILE, left) or len(found) >= MAX_FILES:
                omitted.append(name)
                continue
            found.append(Artifact(name, file.read_bytes()))
            left -= size
            kept.append(name)
        entry: dict[str, Any] = {"source": item.source, "kept": len(kept), "error": item.error}
        if omitted:
            entry["too_large_or_too_many"] = omitted[:MAX_FILES]
        manifest.append(entry)
    if manifest:
        found.append(Artifact(f"{prefix}artifacts/manifest.json", json.dumps(manifest, indent=1).encode()))
    return found


def _files(path: Path | None) -> list[Path]:
    """The regular files below ``path``, or itself; links are not followed."""
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
        if any(fnmatch.fnmatch(relative, p) or fnmatch.fnmatch(file.name, p) for p in patterns) and os.path.lexists(
            file
        ):
            remove_tree(file)
