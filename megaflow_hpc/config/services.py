"""Defines the section ``services`` of a campaign file."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from megaflow_hpc.config.sections import STORED, SandboxLimits, Section
from megaflow_hpc.types import HealthCheck, Limits, Service

HOST_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\Z")
"""Matches a valid host name for a service in a sandbox's ``/etc/hosts``."""
RESERVED = ("localhost", "main", "ip6-localhost", "ip6-loopback")
"""Host names that services must not use."""

READY_S = 600.0
"""Seconds within which a started service must become ready. Large search indices take minutes to load. A service whose
program ends is noticed immediately."""

Port = Annotated[int, Field(ge=1, le=65535)]
Word = Annotated[str, StringConstraints(strip_whitespace=False)]


def words_of(value: Any) -> Any:
    """Returns a command as a list of words. A string becomes a command for the shell."""
    return ("/bin/sh", "-c", value) if isinstance(value, str) else value


class ServiceConfig(Section):
    """A program that runs next to the sandboxes of each rollout and is reached by its name, which is its key."""

    per: Literal["rollout", "node", "campaign"] = "rollout"
    """Scope of the service. ``rollout``: each rollout has a service of its own. ``node``: the campaign's rollouts on a
    node share one. ``campaign``: one Slurm job serves all rollouts, and is requeued. Default: ``rollout``."""
    image: str | None = None
    """Image of the service, mapped by ``environment.images`` like the images of tasks. Default: the task's image."""
    command: tuple[Word, ...] = ()
    """Program of the service: a list of words, or a text for the shell, such as ``cd /srv && exec ./server``. Default:
    the program of the image."""
    ports: tuple[Port, ...] = ()
    """TCP ports at which sandboxes reach the service. Default: the ports of the image."""
    env: dict[str, Word] = Field(default_factory=dict)
    """Environment variables of the service."""
    user: str | None = None
    """User of the program: ``root``, or any other name for an ordinary user. Default: root."""
    after: tuple[str, ...] = ()
    """Services that must be ready before this one starts. Default: none."""
    health: tuple[Word, ...] = ()
    """Command that is run in the service's sandbox and exits with 0 if the service is ready: a list of words, or a
    text for the shell. A rollout whose services are not ready within 10 minutes is tried again. Default: every port
    must accept connections."""
    limits: SandboxLimits = SandboxLimits()
    """Limits of the service's sandbox. Default: those of ``environment.limits``."""

    _words = field_validator("command", "health", mode="before")(words_of)

    @field_validator("health", mode="before")
    @classmethod
    def _earlier_health(cls, value: Any, info: ValidationInfo) -> Any:
        return value["command"] if info.context == STORED and isinstance(value, dict) else value

    @model_validator(mode="after")
    def _of_the_tasks_image(self) -> ServiceConfig:
        if not self.image and not (self.command and self.ports):
            raise ValueError("a service without an image uses the task's, and needs command and ports; add them")
        if self.per != "rollout" and (not self.image or self.after):
            raise ValueError(f"a service per {self.per} needs an image and waits for no other; name image, not after")
        return self

    def service(self, name: str) -> Service:
        """Converts the service to the type that tasks use."""
        limits = self.limits
        return Service(
            name=name,
            image=self.image or "",
            command=self.command,
            env=dict(self.env),
            user=self.user,
            ports=tuple(dict.fromkeys(self.ports)),
            health=HealthCheck(self.health, ready_s=READY_S),
            after=self.after,
            per=self.per,
            limits=Limits(limits.memory_mb, limits.cpus, limits.disk_mb, limits.processes),
        )


def check_services(services: dict[str, ServiceConfig]) -> None:
    """Raises ValueError for an invalid host name, an unknown service in ``after``, or a dependency cycle."""
    for name in services:
        if not HOST_NAME.match(name):
            raise ValueError(f"service {name!r} must be lower-case letters, digits, dot, dash or underscore")
        if name in RESERVED:
            raise ValueError(f"service {name!r}: this name is reserved; choose another")
    if problem := order_problem({name: service.after for name, service in services.items()}):
        raise ValueError(problem)


def order_problem(after: dict[str, tuple[str, ...]]) -> str:
    """Returns the reason why services cannot be started in any order. Returns an empty string if an order exists.

    Args:
        after: For each service, the services that must be ready before it starts.
    """
    for name, others in after.items():
        for other in others:
            if other not in after:
                return f"service {name!r} waits for {other!r}, which is not a service; known here: {', '.join(after)}"
    started: set[str] = set()
    while len(started) < len(after):
        ready = {name for name, others in after.items() if name not in started and started.issuperset(others)}
        if not ready:
            return f"services {', '.join(sorted(set(after) - started))} wait for one another; remove a dependency"
        started |= ready
    return ""
