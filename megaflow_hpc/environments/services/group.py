"""The services of one rollout: started in order, reached by name, ended together."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import Address, SandboxSpec
from megaflow_hpc.environments.services.forwarding import MAX_CONNECTIONS, Dial, Forwarding
from megaflow_hpc.environments.services.remote import RemoteService
from megaflow_hpc.environments.services.running import PlannedService, RunningService
from megaflow_hpc.errors import ModelServiceError, SandboxError, ServiceError

T = TypeVar("T")
Start = Callable[[SandboxSpec], Awaitable[ApptainerSandbox]]


class _View:
    """One sandbox's view of a group's services. Implements :class:`.Reachable`.

    Args:
        own: Name of the service that runs in the sandbox itself, at 127.0.0.1. Empty in an agent's sandbox.
    """

    def __init__(self, group: ServiceGroup, own: str = "") -> None:
        self._group, self._own = group, own

    @property
    def hosts(self) -> Mapping[str, str]:
        own = {self._own: "127.0.0.1"} if self._own else {}
        return {**self._group.addresses, **own}

    @property
    def addresses(self) -> Sequence[Address]:
        own = next((set(service.ports) for service in self._group.services if service.name == self._own), set[int]())
        # A program that listens on all addresses needs its ports to be free on each of them.
        return [
            (self._group.addresses[service.name], port)
            for service in self._group.services
            for port in service.ports
            if service.name != self._own and port not in own
        ]

    def serve(self, listeners: Mapping[Address, socket.socket]) -> Callable[[], None]:
        names = {address: name for name, address in self._group.addresses.items()}
        dials: dict[Address, Dial] = {
            (address, port): partial(self._group.dial, names[address], port) for address, port in listeners
        }
        slots = self._group.slots if self._own else asyncio.Semaphore(MAX_CONNECTIONS)
        return Forwarding(listeners, dials, slots).close


class ServiceGroup:
    """Services of one rollout, as an async context manager that starts and stops them.

    Args:
        planned: The services.
        start: Starts a sandbox.
        remote: Services in ``planned`` that already run elsewhere. They are not started here.

    Raises:
        ServiceError: A service did not become healthy.
        SandboxError: The sandbox of a service did not start.
    """

    def __init__(
        self,
        planned: Sequence[PlannedService],
        start: Start,
        remote: Sequence[RemoteService] = (),
    ) -> None:
        self._planned = planned
        self._start = start
        self._remote = {service.name: service for service in remote}
        self.services = [each.service for each in planned]
        net = f"127.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
        self.addresses = {service.name: f"{net}.{number}" for number, service in enumerate(self.services, 1)}
        """Maps each service to its loopback address, which is the same in every sandbox of the group. Addresses are
        random, because several groups may share a network."""
        self.slots = asyncio.Semaphore(MAX_CONNECTIONS)
        """Limits the connections among the services."""
        self._running: dict[str, RunningService] = {}

    @property
    def reachable(self) -> _View | None:
        """The services as seen from the rollout's sandbox. ``None`` if there are no services."""
        return _View(self) if self.services else None

    async def dial(self, name: str, port: int) -> socket.socket:
        """Connects to a port of a service. Raises OSError or SandboxError if that fails."""
        if name in self._remote:
            return await self._remote[name].dial(port)
        service = self._running.get(name)
        if service is None:
            raise ConnectionRefusedError(f"service {name} has not started")
        return await service.dialer.connect(port)

    async def __aenter__(self) -> ServiceGroup:
        try:
            await asyncio.gather(*(service.begin() for service in self._remote.values()))
            for each in in_order(self._planned):
                service = each.service
                if service.name in self._remote:
                    continue
                spec = replace(each.spec, services=_View(self, service.name))
                running = RunningService(service, await self._start(spec))
                self._running[service.name] = running
                await running.wait_healthy()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        for service in self._remote.values():
            service.close()
        await asyncio.gather(*(service.stop() for service in self._running.values()), return_exceptions=True)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work that needs the services, and cancels it if a service ends.

        Raises:
            ServiceError: A service ended during the work, or no longer responds afterwards. The result of the work is
                discarded.
        """
        running = asyncio.ensure_future(work)
        watching = [asyncio.create_task(service.ended()) for service in self._remote.values()]
        try:
            programs = [*watching, *(service.program for service in self._running.values())]
            await asyncio.wait([running, *programs], return_when=asyncio.FIRST_COMPLETED)
            try:
                await asyncio.gather(*(service.check_alive() for service in self._running.values()))
                for service, watch in zip(self._remote.values(), watching, strict=True):
                    if why := watch.result() if watch.done() else await service.problem():
                        raise ServiceError(f"service {service.name}: {why}, while the rollout ran")
            except ServiceError:
                if running.done() and not running.cancelled():
                    error = running.exception()  # code of the task may fail because of the service
                    if isinstance(error, SandboxError | ModelServiceError):
                        raise error from None
                raise
            return await running
        finally:
            for task in watching:
                task.cancel()
            if not running.done():
                running.cancel()
                with suppress(BaseException):
                    await running


def in_order(planned: Sequence[PlannedService]) -> list[PlannedService]:
    """Sorts services so that each comes after those that it waits for. All names must exist, and there must be no
    cycle."""
    left, ordered = list(planned), list[PlannedService]()
    while left:
        started = {each.service.name for each in ordered}
        ready = next((each for each in left if started.issuperset(each.service.after)), left[0])
        left.remove(ready)
        ordered.append(ready)
    return ordered
