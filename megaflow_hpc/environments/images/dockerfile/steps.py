"""Data classes for the steps of a Dockerfile, which the parser passes to the builder.

Paths in the image are absolute, or relative to the base image's working directory if no ``WORKDIR`` precedes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megaflow_hpc.environments.images.dockerfile.words import Text

DEFAULT_SHELL = ("/bin/sh", "-c")


@dataclass
class RunStep:
    """A ``RUN`` instruction. ``exports`` are variables that are set only while it runs, such as ``ARG`` variables."""

    argv: list[str]
    workdir: str
    user: str | None
    exports: dict[str, str]
    line: int
    mounts: list[Mount] = field(default_factory=list)


@dataclass
class Mount:
    """A ``RUN --mount``: an empty directory, or the files of ``copy``, mounted at ``target`` during the command."""

    kind: str
    """``bind``, ``cache`` or ``tmpfs``."""
    target: str
    copy: Copy | None = None
    owner: str = ""
    mode: str = ""
    writable: bool = False
    """True if a bind mount has the option ``rw``."""


@dataclass
class Copy:
    """``COPY`` or ``ADD``. Its source is the context, the stage or image ``origin``, or here-documents."""

    sources: list[str]
    target: str
    into: bool
    """True if ``target`` is a directory, even if it does not exist yet."""
    line: int
    origin: str | None = None
    owner: str = ""
    mode: str = ""
    extract: bool = False
    exclude: tuple[str, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    """Maps file names to contents of here-documents."""


@dataclass
class Env:
    """An ``ENV`` instruction, as a shell line that exports variables for the following steps."""

    text: str


@dataclass
class Workdir:
    """A ``WORKDIR`` instruction. A missing directory is created with ``user`` as its owner."""

    path: str
    line: int
    user: str | None = None


Step = RunStep | Copy | Env | Workdir


@dataclass
class Stage:
    """The part of a Dockerfile from one ``FROM`` to the next. Starts with the steps of its parent stage, if any."""

    name: str
    base: str
    steps: list[Step] = field(default_factory=list)
    variables: dict[str, Text] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    shell: tuple[str, ...] = DEFAULT_SHELL
    args: dict[str, Text] = field(default_factory=dict)
    """``ARG`` variables that no later ``ENV`` overrides."""
    entrypoint: tuple[str, ...] | None = None
    """The last ``ENTRYPOINT``, or ``None`` to keep the base image's."""
    command: tuple[str, ...] | None = None
    """The last ``CMD``, or ``None`` to keep the base image's."""
    ports: tuple[str, ...] = ()
    """Ports of ``EXPOSE``, such as ``80/tcp``, except those that depend on unknown variables."""

    @property
    def exports(self) -> list[str]:
        """Shell lines that set the image's variables, in order."""
        return [step.text for step in self.steps if isinstance(step, Env)]


def copies(stage: Stage) -> list[Copy]:
    """Returns every copy in a stage, including those for mounts."""
    every: list[Copy] = []
    for step in stage.steps:
        if isinstance(step, Copy):
            every.append(step)
        elif isinstance(step, RunStep):
            every += [mount.copy for mount in step.mounts if mount.copy]
    return every
