"""Adds the campaign's services to each task, checks them, and creates the specs of their sandboxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megaflow_hpc.config.sections import EnvironmentConfig
from megaflow_hpc.config.services import ServiceConfig
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.environments.services.group import ServiceGroup, Start
from megaflow_hpc.environments.services.remote import RemoteService, RemoteServices
from megaflow_hpc.environments.services.running import PlannedService
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import Service, Task

MAX_PORTS = 64
"""Maximum total number of ports of a task's services. This also limits the number of services."""


def add_services(tasks: Sequence[Task], services: Mapping[str, ServiceConfig]) -> list[Task]:
    """Returns the tasks with the campaign's services added.

    Raises:
        ConfigError: A task has a service with the same name, or has no sandbox that could reach services. Also raised
            if :func:`check_ports` rejects the services.
    """
    if not services:
        return list(tasks)
    added = tuple(section.service(name) for name, section in services.items())
    result = []
    for task in tasks:
        if not task.image:
            raise ConfigError(f"services: task {task.id} has no sandbox (image: none) that could reach them")
        if both := {service.name for service in task.services} & set(services):
            raise ConfigError(
                f"services.{sorted(both)[0]}: task {task.id} has a service of this name; rename the campaign's"
            )
        together = (*task.services, *added)
        check_ports(task.id, together)
        result.append(replace(task, services=together))
    return result


def check_ports(task_id: str, services: Sequence[Service]) -> None:
    """Checks that each service can reach the services for which it waits.

    Raises:
        ConfigError: Both services serve the same port. The waiting service's sandbox then cannot forward this port to
            the other service.
    """
    by_name = {service.name: service for service in services}
    for service in services:
        for other in service.after:
            if both := set(service.ports) & set(by_name[other].ports):
                raise ConfigError(
                    f"task {task_id}: services {service.name} and {other} both serve port {min(both)}, so "
                    f"{service.name} cannot reach {other}; give one of them another port"
                )


def check_number(task_id: str, services: Sequence[Service]) -> None:
    """Checks the total number of ports, because this process listens on every port in every sandbox.

    Raises:
        ConfigError: The services have more than :data:`MAX_PORTS` ports.
    """
    if (number := sum(len(service.ports) for service in services)) > MAX_PORTS:
        raise ConfigError(
            f"task {task_id}: its services have {number} ports, of at most {MAX_PORTS}; name the ports that sandboxes "
            "need, or leave this task out"
        )


def check_network(task: Task, environment: EnvironmentConfig) -> None:
    """Checks that the task's sandbox can listen on the ports of its services.

    Raises:
        ConfigError: The sandbox shares the node's network, where only root may listen on ports below 1024.
    """
    if environment.network_of(task) == "host":
        for service in task.services:
            if low := [port for port in service.ports if port < 1024]:
                raise ConfigError(
                    f"task {task.id}: service {service.name} serves port {low[0]}, which no user may listen at in the "
                    "node's network; use environment.network: gateway, or a port from 1024 on"
                )


def services_of(
    task: Task,
    images: Mapping[str, str],
    environment: EnvironmentConfig,
    start: Start,
    shared: Mapping[str, RemoteServices] | None = None,
) -> ServiceGroup:
    """Returns the services for one rollout of a task. They are not started yet.

    Args:
        images: Maps image names in tasks to SIF files or directories.
        environment: The campaign's ``environment`` section.
        start: Starts a sandbox.
        shared: Maps scopes to services that rollouts share. If ``None``, this rollout starts its own services.
    """
    default = environment.limits
    planned, remote = [], []
    for service in task.services:
        limits = service.limits
        spec = SandboxSpec(
            image=images[service.image or task.image],
            env=dict(service.env),
            workdir=service.workdir,
            user=service.user,
            network="gateway",
            memory_mb=limits.memory_mb or default.memory_mb,
            cpus=limits.cpus or default.cpus,
            disk_mb=limits.disk_mb or default.disk_mb,
            processes=limits.processes or default.processes or 512,
            nested=environment.nested,
        )
        planned.append(PlannedService(service, spec))
        if shared is not None and service.per in shared:
            shared[service.per].prepare(planned[-1])
            remote.append(RemoteService(service.name, service.ports, shared[service.per]))
    return ServiceGroup(planned, start, remote)
