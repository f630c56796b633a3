"""A Dockerfile as stages of steps, in the file's own order.

:mod:`.reader` reads it, and :mod:`megaflow_hpc.environments.builds` carries the steps out. What cannot be
expressed faithfully is refused with its line; what means nothing in a sandbox is in ``ignored``, with the reason.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

from megaflow_hpc.environments.images.dockerfile.context import Context
from megaflow_hpc.environments.images.dockerfile.instructions import MAX_CHARACTERS
from megaflow_hpc.environments.images.dockerfile.reader import Reader
from megaflow_hpc.environments.images.dockerfile.steps import Copy, RunStep, Stage, copies
from megaflow_hpc.environments.images.dockerfile.words import is_known, literal


class Dockerfile:
    """A Dockerfile read. ``environment``, ``workdir`` and ``user`` are those at its end; ``base`` the image it ends on.

    Args:
        context: directory that ``COPY`` and ``ADD`` read; default the Dockerfile's own.
        build_args: values for ``ARG``.

    Raises:
        ConfigError: names file and line of what is refused.
    """

    def __init__(self, path: Path, context: Path | None = None, build_args: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.context = Context(context or path.parent, path)
        self.build_args = dict(build_args or {})
        reader = Reader(path, self.context, self.build_args)
        reader.read()
        self.stages = reader.stages
        self.ignored = reader.ignored
        """Line, instruction and reason of what has no meaning in a sandbox."""
        self.unset = reader.unset
        """Line and name of each variable with a default that the file does not set, and a base image might."""

    @classmethod
    def read(cls, path: Path, context: Path | None = None, build_args: Mapping[str, str] | None = None) -> Dockerfile:
        """Reads the Dockerfile at ``path``; arguments and errors are the class's."""
        return cls(path, context, build_args)

    @property
    def last(self) -> Stage:
        """The stage that becomes the image."""
        return self.stages[-1]

    @property
    def base(self) -> str:
        """Image name that the last stage starts from."""
        return self.last.base

    @property
    def workdir(self) -> str | None:
        """Absolute path of the last ``WORKDIR``; a relative one is taken from ``/``: the base is not known here."""
        return posixpath.normpath(posixpath.join("/", self.last.workdir)) if self.last.workdir else None

    @property
    def user(self) -> str | None:
        """The last ``USER``."""
        return self.last.user

    @property
    def environment(self) -> dict[str, str]:
        """Variables whose value the file alone tells; those that build on the base image's are in the built image."""
        return {name: literal(value) for name, value in self.last.variables.items() if is_known(value)}

    @property
    def needs_build(self) -> bool:
        """Whether there is more than a base image, variables, a directory and a user."""
        made = any(isinstance(step, Copy | RunStep) for step in self.last.steps)
        return made or not all(map(is_known, self.last.variables.values()))

    @property
    def needed(self) -> list[Stage]:
        """The stages that the last one copies from, in order, and itself; others are not built, as in BuildKit."""
        wanted = {self.last.name}
        for stage in reversed(self.stages):
            if stage.name in wanted:
                wanted |= {copy.origin for copy in copies(stage) if copy.origin}
        return [stage for stage in self.stages if stage.name in wanted]

    @property
    def bases(self) -> list[str]:
        """The images the build starts from or copies from, each once; ``base`` first."""
        named = {stage.name for stage in self.stages}
        others = [stage.base for stage in self.needed]
        others += [
            copy.origin for stage in self.needed for copy in copies(stage) if copy.origin and copy.origin not in named
        ]
        return list(dict.fromkeys([self.base, *others]))


class Dockerfiles:
    """Reads each Dockerfile once: planning asks for it when its task is read, and when its image is resolved.

    An object is to live no longer than the files are taken to stay as they are.
    """

    def __init__(self) -> None:
        self._read: dict[Path, Dockerfile] = {}

    def read(self, path: Path) -> Dockerfile:
        """The Dockerfile at ``path``, with its own directory as the context.

        Raises:
            ConfigError: names file and line of what is refused.
        """
        if path not in self._read:
            self._read[path] = Dockerfile.read(path)
        return self._read[path]


def last_workdir(path: Path) -> str | None:
    """The WORKDIR at the end of any Dockerfile, multi-stage or not, without judging its other lines.

    ``None`` if there is none, or if it depends on variables.
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
    """SHA-256 of what a build depends on: the Dockerfile, its base and arguments, and the files it copies."""
    args = sorted(dockerfile.build_args.items())
    digest = hashlib.sha256(f"megaflow-dockerfile-4\0{base}\0{args}\0".encode())
    digest.update(dockerfile.path.read_bytes())
    for stage in dockerfile.needed:
        for copy in copies(stage):
            if copy.origin is None:
                dockerfile.context.feed(digest.update, copy.sources)
    return digest.hexdigest()
