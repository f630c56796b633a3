"""Parses a Dockerfile into stages of steps, in file order.

:mod:`megaflow_hpc.environments.builds` executes the steps. Lines that cannot be built faithfully are rejected with
their line number. Instructions that have no meaning in a sandbox are listed in ``ignored``, with the reason.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

from megaflow_hpc.environments.images.dockerfile.context import Context
from megaflow_hpc.environments.images.dockerfile.reader import MAX_CHARACTERS, Reader
from megaflow_hpc.environments.images.dockerfile.steps import Copy, RunStep, Stage, copies
from megaflow_hpc.environments.images.dockerfile.words import is_known, literal


class Dockerfile:
    """A parsed Dockerfile. ``base``, ``environment``, ``workdir`` and ``user`` describe the end of its last stage.

    Args:
        context: The directory from which ``COPY`` and ``ADD`` read. Default: the directory of the Dockerfile.
        build_args: Values for ``ARG``.

    Raises:
        ConfigError: A line is rejected. The message names the file and the line.
    """

    def __init__(self, path: Path, context: Path | None = None, build_args: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.context = Context(context or path.parent, path)
        self.build_args = dict(build_args or {})
        reader = Reader(path, self.context, self.build_args)
        reader.read()
        self.stages = reader.stages
        self.ignored = reader.ignored
        self.unset = reader.unset

    @property
    def last(self) -> Stage:
        """The stage that becomes the image."""
        return self.stages[-1]

    @property
    def base(self) -> str:
        """Name of the image that the last stage starts from."""
        return self.last.base

    @property
    def workdir(self) -> str | None:
        """Absolute path of the last ``WORKDIR``. A relative path is resolved against ``/``, because the base is
        unknown."""
        return posixpath.normpath(posixpath.join("/", self.last.workdir)) if self.last.workdir else None

    @property
    def user(self) -> str | None:
        """The last ``USER``."""
        return self.last.user

    @property
    def environment(self) -> dict[str, str]:
        """Variables whose values depend only on this file. The built image also has those that depend on its base."""
        return {name: literal(value) for name, value in self.last.variables.items() if is_known(value)}

    @property
    def needs_build(self) -> bool:
        """Whether the file does more than set variables, a working directory and a user."""
        if not all(is_known(value) for value in self.last.variables.values()):
            return True
        return any(isinstance(step, Copy | RunStep) for step in self.last.steps)

    @property
    def needed(self) -> list[Stage]:
        """The last stage and the stages that it needs, in order. Other stages are not built, as in BuildKit."""
        wanted = {self.last.name}
        for stage in reversed(self.stages):
            if stage.name in wanted:
                wanted |= {copy.origin for copy in copies(stage) if copy.origin}
        return [stage for stage in self.stages if stage.name in wanted]

    @property
    def bases(self) -> list[str]:
        """Distinct names of the images that the build starts from or copies from. ``base`` comes first."""
        stages = {stage.name for stage in self.stages}
        names = [self.base]
        names += [stage.base for stage in self.needed]
        for stage in self.needed:
            names += [copy.origin for copy in copies(stage) if copy.origin and copy.origin not in stages]
        return list(dict.fromkeys(names))


class Dockerfiles:
    """Caches parsed Dockerfiles. Planning needs each one twice: to read its task and to resolve its image.

    Discard the cache when the files change.
    """

    def __init__(self) -> None:
        self._read: dict[Path, Dockerfile] = {}

    def read(self, path: Path) -> Dockerfile:
        """Returns the Dockerfile at ``path``, with its directory as the context.

        Raises:
            ConfigError: A line is rejected. The message names the file and the line.
        """
        if path not in self._read:
            self._read[path] = Dockerfile(path)
        return self._read[path]


def last_workdir(path: Path) -> str | None:
    """Returns the last WORKDIR of any Dockerfile, without validating its other lines.

    Returns ``None`` if there is none or if it depends on variables.
    """
    workdir: str | None = None
    with open(path, encoding="utf-8", errors="replace") as file:
        text = re.sub(r"\\\s*\n", " ", file.read(MAX_CHARACTERS))
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        value = value.strip().strip("\"'")
        if name.upper() == "FROM":
            workdir = None
        elif name.upper() == "WORKDIR" and value:
            workdir = None if "$" in value else posixpath.normpath(posixpath.join(workdir or "/", value))
    return workdir


def context_digest(dockerfile: Dockerfile, base: str = "") -> str:
    """Returns the SHA-256 of a build's inputs: the Dockerfile, its base and arguments, and the files it copies."""
    args = sorted(dockerfile.build_args.items())
    digest = hashlib.sha256(f"megaflow-dockerfile-4\0{base}\0{args}\0".encode())
    digest.update(dockerfile.path.read_bytes())
    for stage in dockerfile.needed:
        for copy in copies(stage):
            if copy.origin is None:
                dockerfile.context.feed(digest.update, copy.sources)
    return digest.hexdigest()
