"""What a sandbox is to be: one plain dataclass, the whole input of :meth:`ApptainerProvider.start`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import Network

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class SandboxSpec:
    """One sandbox. Sizes in MB (10^6 bytes); ``None`` is unlimited, or the image's own for ``workdir`` and ``user``."""

    image: str
    """A SIF file, or a directory that holds an unpacked image."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the image's own environment; nothing of the host's gets in."""
    workdir: str | None = None
    """Where commands start; made if it is missing. Default ``/``."""
    user: str | None = None
    """``None``, ``root`` or ``0``: uid 0 of a user namespace; any other: an ordinary uid."""
    binds: tuple[str, ...] = ()
    """``SRC:DEST[:ro]``, as Apptainer takes them."""
    network: Network = "none"
    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    processes: int | None = 512
    cpu_s: float | None = None
    """Seconds of CPU time; what agent and verifier use is counted apart."""
    wall_s: float | None = None
    """Seconds from the start; agent and verifier apart."""
    nested: bool = False
    """Commands may make user namespaces of their own (bubblewrap, containers): no limit sees what they keep in memory
    file systems there."""

    fakeroot: bool = False
    """Other uids are pretended by the host's ``fakeroot`` program, if it has one: for builds where there is uid 0
    alone."""

    def check(self) -> None:
        """Raises :class:`ConfigError` for what no container could be started with."""
        if self.network not in get_args(Network):
            raise ConfigError(f"network {self.network!r} of a sandbox: expected one of {', '.join(get_args(Network))}")
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ConfigError(f"workdir {self.workdir!r} of a sandbox: expected an absolute path")
        check_variables(self.env)

    @property
    def as_root(self) -> bool:
        """Whether commands run as uid 0."""
        return self.user in (None, "", "root", "0", "root:root", "0:0")


def check_variables(env: Mapping[str, str]) -> None:
    """Raises :class:`ConfigError` on a name that no shell could export."""
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(f"environment variable {name!r} of a sandbox: expected letters, digits and _")
        if "\0" in value:
            raise ConfigError(f"environment variable {name} of a sandbox: its value holds a zero byte")
