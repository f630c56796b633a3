"""Defines the specification of a sandbox, and the features that can be disabled."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import Network

Feature = Literal["clones", "overlay", "nsenter", "program"]
WITHOUT_VARIABLE = "MEGAFLOW_SANDBOX_WITHOUT"
"""Environment variable with a comma-separated list of features to disable, for nodes where detection is wrong."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Bind(NamedTuple):
    """A directory or file of the host that is visible in a sandbox."""

    source: str
    target: str
    read_only: bool


Address = tuple[str, int]
"""An IPv4 address and a port."""


class Reachable(Protocol):
    """Services that a sandbox can reach by name, even if its network is otherwise isolated."""

    @property
    def hosts(self) -> Mapping[str, str]:
        """Maps host names to loopback addresses."""

    @property
    def addresses(self) -> Sequence[Address]:
        """Addresses inside the sandbox that stand for the services."""

    def serve(self, listeners: Mapping[Address, socket.socket]) -> Callable[[], None]:
        """Forwards the connections of listening sockets, and returns a function that closes them all."""


@dataclass(frozen=True)
class SandboxSpec:
    """Specification of one sandbox. Sizes are in MB (10^6 bytes). ``None`` means unlimited."""

    image: str
    """A SIF file, or a directory with an unpacked image."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the image's environment. No variables of the host are passed on."""
    workdir: str | None = None
    """Directory in which commands start. Created if it is missing. Default: ``/``."""
    user: str | None = None
    """User that runs commands. ``None``, ``root`` and ``0`` mean uid 0 of a user namespace. Any other name means an
    ordinary uid."""
    binds: tuple[str, ...] = ()
    """Host paths that the sandbox sees, each as ``SRC:DEST[:ro]`` (Apptainer's syntax)."""
    network: Network = "none"
    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    processes: int | None = 512
    cpu_s: float | None = None
    """Limit on CPU time in seconds, applied to the agent and to the verifier separately."""
    nested: bool = False
    """Allow commands to create user namespaces. In-memory file systems that they mount there count towards no limit."""
    services: Reachable | None = None
    """Services that the sandbox's commands can reach."""
    fakeroot: bool = False
    """Simulate other uids with the host's ``fakeroot`` program."""

    def check(self) -> None:
        """Raises :class:`ConfigError` if a container cannot start with these values."""
        if self.network not in get_args(Network):
            raise ConfigError(f"network {self.network!r} of a sandbox: expected one of {', '.join(get_args(Network))}")
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ConfigError(f"workdir {self.workdir!r} of a sandbox: expected an absolute path")
        check_variables(self.env)

    def parsed_binds(self) -> list[Bind]:
        """Parses ``binds``. The target of a bind defaults to its source path."""
        parsed = []
        for bind in self.binds:
            source, _, rest = bind.partition(":")
            target, _, mode = rest.partition(":")
            parsed.append(Bind(source, target or source, mode == "ro"))
        return parsed

    @property
    def as_root(self) -> bool:
        """True if commands run as uid 0."""
        return self.user in (None, "", "root", "0", "root:root", "0:0")


def check_variables(env: Mapping[str, str]) -> None:
    """Raises :class:`ConfigError` if a shell cannot export one of the variables."""
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(f"environment variable {name!r} of a sandbox: expected letters, digits and _")
        if "\0" in value:
            raise ConfigError(f"environment variable {name} of a sandbox: its value has a zero byte")


def is_without(feature: Feature) -> bool:
    """Returns whether ``MEGAFLOW_SANDBOX_WITHOUT`` disables a feature, so that its fallback is used.

    Raises:
        ConfigError: The variable names an unknown feature.
    """
    words = [word.strip() for word in os.environ.get(WITHOUT_VARIABLE, "").split(",")]
    features = [word for word in words if word]
    for word in features:
        if word not in get_args(Feature):
            expected = ", ".join(get_args(Feature))
            raise ConfigError(f"{WITHOUT_VARIABLE}: {word!r}: expected {expected}, separated by commas")
    return feature in features
