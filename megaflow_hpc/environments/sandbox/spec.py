"""Describes a sandbox: the input of :meth:`ApptainerProvider.start`, and features that sandboxes must do without."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import Network

Feature = Literal["clones", "overlay", "nsenter", "program"]
WITHOUT_VARIABLE = "MEGAFLOW_SANDBOX_WITHOUT"
"""Names features to do without, separated by commas, on nodes on which detection is wrong."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Bind(NamedTuple):
    """A directory or file of the host that a sandbox sees."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True)
class SandboxSpec:
    """One sandbox. Sizes are in MB (10^6 bytes). ``None`` means unlimited."""

    image: str
    """A SIF file, or a directory that holds an unpacked image."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the image's environment. No variable of the host gets in."""
    workdir: str | None = None
    """Directory in which commands start. It is created if it is missing. Default: ``/``."""
    user: str | None = None
    """``None``, ``root`` and ``0`` mean uid 0 of a user namespace; any other name means an ordinary uid."""
    binds: tuple[str, ...] = ()
    """``SRC:DEST[:ro]``, as Apptainer takes them."""
    network: Network = "none"
    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    processes: int | None = 512
    cpu_s: float | None = None
    """CPU time limit in seconds, applied to the agent and to the verifier separately."""
    wall_s: float | None = None
    """Wall-clock limit in seconds, applied to the agent and to the verifier separately."""
    nested: bool = False
    """True lets commands create user namespaces (bubblewrap, containers). No limit counts memory file systems
    there."""
    fakeroot: bool = False
    """True lets the host's ``fakeroot`` program simulate other uids, for builds that only have uid 0."""

    def check(self) -> None:
        """Raises :class:`ConfigError` if no container can start with these values."""
        if self.network not in get_args(Network):
            raise ConfigError(f"network {self.network!r} of a sandbox: expected one of {', '.join(get_args(Network))}")
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ConfigError(f"workdir {self.workdir!r} of a sandbox: expected an absolute path")
        check_variables(self.env)

    def parsed_binds(self) -> list[Bind]:
        """Returns the parts of ``binds``."""
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
    """Raises :class:`ConfigError` for a name that no shell can export."""
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(f"environment variable {name!r} of a sandbox: expected letters, digits and _")
        if "\0" in value:
            raise ConfigError(f"environment variable {name} of a sandbox: its value has a zero byte")


def is_without(feature: Feature) -> bool:
    """Returns whether ``MEGAFLOW_SANDBOX_WITHOUT`` names a feature, so that its fallback is used.

    Raises:
        ConfigError: the variable names an unknown feature.
    """
    words = [word.strip() for word in os.environ.get(WITHOUT_VARIABLE, "").split(",")]
    features = [word for word in words if word]
    for word in features:
        if word not in get_args(Feature):
            expected = ", ".join(get_args(Feature))
            raise ConfigError(f"{WITHOUT_VARIABLE}: {word!r}: expected {expected}, separated by commas")
    return feature in features
