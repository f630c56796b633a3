"""What a Dockerfile does to an image, step by step: plain data between its reader and who builds it.

Paths in the image are absolute or, where no ``WORKDIR`` came before, relative to the base image's directory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megaflow_hpc.environments.images.dockerfile.words import Text

DEFAULT_SHELL = ("/bin/sh", "-c")


@dataclass
class RunStep:
    """``RUN``: words, or a text for the shell. ``exports``: variables of ``ARG``, for this step alone."""

    argv: list[str]
    workdir: str
    user: str | None
    exports: dict[str, str]
    line: int
    mounts: list[Mount] = field(default_factory=list)


@dataclass
class Mount:
    """``RUN --mount``: an empty directory, or what ``copy`` brings, at ``target`` while the command runs."""

    kind: str
    """``bind``, ``cache`` or ``tmpfs``."""
    target: str
    copy: Copy | None = None
    owner: str = ""
    mode: str = ""
    writable: bool = False
    """Of a bind mount: asked for by ``rw``."""


@dataclass
class Copy:
    """``COPY`` and ``ADD``. ``sources`` lie in the context, in the stage or image ``origin``, or are here-documents."""

    sources: list[str]
    target: str
    into: bool
    line: int
    origin: str | None = None
    owner: str = ""
    mode: str = ""
    extract: bool = False
    parents: bool = False
    exclude: tuple[str, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    """File name → content, of here-documents."""


@dataclass
class Env:
    """``ENV``: a line of shell that exports a variable from here on."""

    text: str


@dataclass
class Workdir:
    """``WORKDIR``: a directory that is made where it is missing."""

    path: str
    line: int
    user: str | None = None
    """Who owns it then."""


Step = RunStep | Copy | Env | Workdir


@dataclass
class Stage:
    """What follows one ``FROM``; the steps of a stage it starts from are part of it."""

    name: str
    base: str
    steps: list[Step] = field(default_factory=list)
    variables: dict[str, Text] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    shell: tuple[str, ...] = DEFAULT_SHELL
    args: dict[str, Text] = field(default_factory=dict)
    """Of ``ARG``, where no later ``ENV`` has the name."""

    @property
    def exports(self) -> list[str]:
        """Lines that set the image's variables, in order."""
        return [step.text for step in self.steps if isinstance(step, Env)]


def copies(stage: Stage) -> list[Copy]:
    """Every copy of a stage, those of mounts included."""
    found: list[Copy] = []
    for step in stage.steps:
        if isinstance(step, Copy):
            found.append(step)
        elif isinstance(step, RunStep):
            found += [mount.copy for mount in step.mounts if mount.copy]
    return found
