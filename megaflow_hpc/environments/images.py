"""Image names of tasks → image files: a content-addressed store of SIFs on the shared file system.

::

    STORE/  <key>.sif  <key>.lock  <key>.partial-<host>-<pid>/

A key is a hash of what goes in: a definition file and the files it copies, a ``docker://`` address, or a Dockerfile
with its context and base. Who asks first builds, others wait on the lock; a SIF appears by rename, whole.
A mapping that names a SIF file or an unpacked directory is used where it lies.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaflow_hpc.environments import apptainer as runtime
from megaflow_hpc.environments.dockerfile import Dockerfile, context_digest
from megaflow_hpc.environments.files import remove_tree
from megaflow_hpc.environments.harbor_verifier import verifier_environments
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.types import Task

BUILD_OPTIONS = ("--fakeroot", "--mksquashfs-args", "-comp gzip -Xcompression-level 1")
"""Fast compression: an image is packed once and unpacked on every node; readable by every squashfs there is."""

BUILD_S = 3600.0

REMOTE = ("docker://", "oras://", "library://")


def default_store() -> Path:
    """``MEGAFLOW_IMAGE_STORE``, else ``~/.megaflow-hpc/images``."""
    return Path(os.environ.get("MEGAFLOW_IMAGE_STORE") or Path.home() / ".megaflow-hpc" / "images")


def resolve_images(
    tasks: Sequence[Task],
    mapping: Mapping[str, str],
    base_dir: str | os.PathLike[str],
    *,
    build: bool = True,
    where: str = "environment.images",
    store: str | os.PathLike[str] | None = None,
) -> dict[str, str]:
    """The image file of every image that ``tasks`` name, as ``task.image`` → absolute path.

    Args:
        mapping: ``environment.images`` of the campaign; relative paths are relative to ``base_dir``.
        build: build what is not there yet; without it only the names and sources are checked.
        where: how messages call the mapping.

    Raises:
        ConfigError: a name that is not mapped, or mapped to nothing that exists.
        SiteError: a build that failed, with Apptainer's output.
    """
    images = ImageStore(store)
    resolved: dict[str, str] = {}
    judges = [judge for task in tasks for judge in verifier_environments(task)]
    for task in (*tasks, *judges):
        if task.image not in resolved:
            resolved[task.image] = str(images.resolve_task(task, mapping, Path(base_dir), build=build, where=where))
    return resolved


def match_name(name: str, mapping: Mapping[str, str]) -> str | None:
    """What ``mapping`` gives for an image name: its own entry, else that of the longest pattern.

    A pattern has one ``*``, which stands for any text; in what it is mapped to, ``*`` is that text again:
    ``"swebench/*": docker://swebench/*`` or ``"swebench/sweb.eval.x86_64.*:latest": images/*.sif``.
    """
    if name in mapping:
        return mapping[name]
    for pattern in sorted((key for key in mapping if key.count("*") == 1), key=len, reverse=True):
        head, tail = pattern.split("*")
        if len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail):
            return mapping[pattern].replace("*", name[len(head) : len(name) - len(tail)])
    return None


class ImageStore:
    """SIF files under ``root``; building needs :mod:`apptainer`, looking does not."""

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root).absolute() if root else default_store()

    def resolve_task(
        self,
        task: Task,
        mapping: Mapping[str, str],
        base_dir: Path,
        *,
        build: bool = True,
        where: str = "environment.images",
    ) -> Path:
        """The image of one task: its own mapped, or its Dockerfile built onto the mapped ``FROM``."""
        harbor = task.metadata.get("harbor", {})
        name = str(harbor.get("from") or task.image)
        base = self.resolve(name, mapping, base_dir, build=build, where=where, task_path=task.path)
        if "dockerfile" not in harbor:
            return base
        dockerfile = Dockerfile.read(Path(harbor["dockerfile"]))
        key = context_digest(dockerfile, _identity(base))

        def make(target: Path) -> None:
            definition = target.parent / "definition"
            definition.write_text(dockerfile.definition(str(base)))
            try:
                limit_s = harbor.get("build_timeout_s", BUILD_S)
                runtime.build(runtime.find_apptainer(), target, str(definition), *BUILD_OPTIONS, timeout_s=limit_s)
            except SiteError as error:
                raise SiteError(f"{dockerfile.path}: {error}") from error

        return self._made(key, make, build=build)

    def resolve(
        self,
        name: str,
        mapping: Mapping[str, str],
        base_dir: Path,
        *,
        build: bool = True,
        where: str = "environment.images",
        task_path: str = "",
    ) -> Path:
        """The image file that ``mapping`` gives for ``name``.

        A name that is itself the path of an image is taken without a mapping, if absolute.
        """
        source = match_name(name, mapping)
        if source is None and name.startswith("/") and os.path.exists(name):
            source = name
        if source is None:
            asked = f", which a task of {task_path} asks for," if task_path else ""
            raise ConfigError(
                f"{where}: image {name!r}{asked} is not mapped; add {name!r}: followed by a SIF file, a definition "
                "file, a directory or a docker:// address"
            )
        if source.startswith(REMOTE):
            key = hashlib.sha256(f"remote\0{source}".encode()).hexdigest()
            return self._made(key, lambda target: _pull(target, source), build=build)
        path = Path(base_dir, os.path.expanduser(os.path.expandvars(source))).absolute()
        if path.is_dir():
            return path
        if not path.is_file():
            raise ConfigError(
                f"{where}: {name}: {path}: no such file; expected a SIF, a .def file, a directory or docker://…"
            )
        if path.suffix != ".def":
            return path
        key = definition_digest(path)
        return self._made(key, lambda target: _build_definition(target, path), build=build)

    def list(self) -> list[dict[str, Any]]:
        """``path`` and ``bytes`` of every SIF in the store."""
        if not self.root.is_dir():
            return []
        return [{"path": str(path), "bytes": path.stat().st_size} for path in sorted(self.root.glob("*.sif"))]

    def _made(self, key: str, make: Callable[[Path], None], *, build: bool) -> Path:
        """The SIF of ``key``, made by ``make(target)`` if it is missing; one maker at a time."""
        final = self.root / f"{key[:32]}.sif"
        if final.is_file() or not build:
            return final
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.root / f"{key[:32]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if final.is_file():
                return final
            partial = self.root / f"{key[:32]}.partial-{socket.gethostname()}-{os.getpid()}"
            remove_tree(partial)
            partial.mkdir(mode=0o700)
            try:
                make(partial / "image.sif")
                os.rename(partial / "image.sif", final)
            finally:
                remove_tree(partial)
        finally:
            os.close(descriptor)
        return final


def definition_digest(path: Path) -> str:
    """SHA-256 of a definition file, of the local image it starts from and of the files it copies in."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    digest = hashlib.sha256(b"definition\0" + text.encode("utf-8", "surrogateescape"))
    local = re.search(
        r"^\s*Bootstrap:\s*(localimage|oci-archive|docker-archive)\s*$", text, re.IGNORECASE | re.MULTILINE
    )
    start = re.search(r"^\s*From:\s*(\S+)", text, re.IGNORECASE | re.MULTILINE)
    if local and start:
        digest.update(_identity(path.parent / start[1]).encode())
    section = ""
    for line in text.splitlines():
        if line.startswith("%"):
            section = line.split()[0]
        elif section == "%files" and line.strip() and not line.lstrip().startswith("#"):
            source = path.parent / line.split()[0]
            for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
                if file.is_file():
                    digest.update(
                        f"\0{file.relative_to(path.parent) if file.is_relative_to(path.parent) else file}\0".encode()
                    )
                    digest.update(file.read_bytes())
    return digest.hexdigest()


def _identity(path: Path) -> str:
    """What stands for a base image in a key: its name if that is a content key, else path, size and time of change."""
    try:
        found = path.stat()
    except OSError:
        return path.name
    if re.fullmatch(r"[0-9a-f]{32}\.sif", path.name):
        return path.name
    return f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}"


def _build_definition(target: Path, definition: Path) -> None:
    # Relative paths in a definition are relative to it.
    runtime.build(runtime.find_apptainer(), target, str(definition), *BUILD_OPTIONS, cwd=definition.parent)


def _pull(target: Path, source: str) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < 1 << 30:
        raise SiteError(
            f"{source}: only {free >> 20} MiB free at {target.parent}; set MEGAFLOW_IMAGE_STORE to a larger place"
        )
    runtime.build(runtime.find_apptainer(), target, source)
