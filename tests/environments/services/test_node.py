"""Services that the processes of a node share: one runs them, and another takes over when it ends."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.environments.sandbox.scratch import sweep
from megaflow_hpc.environments.services import remote
from megaflow_hpc.environments.services.node import MAX_STARTS, NodeServices
from megaflow_hpc.environments.services.remote import RemoteService
from megaflow_hpc.environments.services.running import PlannedService
from megaflow_hpc.errors import ConfigError, ServiceError
from megaflow_hpc.host.locks import lock_file
from megaflow_hpc.types import HealthCheck, Service
from tests.support.services import echo_service
from tests.support.waiting import until_async


@asynccontextmanager
async def process(scratch: Path) -> AsyncIterator[NodeServices]:
    """One of the node's processes, as far as its services go."""
    async with ApptainerProvider(scratch) as provider:
        services = NodeServices(provider, "campaign")
        try:
            yield services
        finally:
            await services.close()


def planned(rootfs: str, service: Service) -> PlannedService:
    return PlannedService(service, SandboxSpec(rootfs, network="gateway"))


async def ask(service: RemoteService) -> bytes:
    connection = await service.dial(7000)
    with connection:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, b"hello\n")
        return await loop.sock_recv(connection, 100)


async def test_one_process_runs_a_service_and_another_takes_over(
    scratch: Path, rootfs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CHECK_S", 0.1)
    echo = planned(rootfs, echo_service())
    async with process(scratch) as second, process(scratch) as first:
        first.prepare(echo)
        await until_async(lambda: first.address("echo"), "the first runs it", 60)
        second.prepare(echo)
        users = [RemoteService("echo", (7000,), services) for services in (first, second)]
        for user in users:
            await user.begin()
            assert await ask(user) == b"echo hello\n"
        assert len(first._provider._sandboxes) == 1
        assert not second._provider._sandboxes
        address = first.address("echo")
        await first.close()
        assert await asyncio.wait_for(users[1].ended(), 60)
        await until_async(lambda: second.address("echo") not in (None, address), "the second has taken over", 60)
        assert await users[1].problem() == "it was restarted"
        again = RemoteService("echo", (7000,), second)
        await again.begin()
        assert await ask(again) == b"echo hello\n"
    assert not list((scratch / "services" / "campaign").iterdir())


async def test_a_service_that_never_becomes_healthy_is_named_and_the_janitor_removes_what_is_left(
    scratch: Path, rootfs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaflow_hpc.environments.services.node.MAX_PAUSE_S", 0.1)
    sick = planned(rootfs, echo_service(command=("sh", "-c", "echo no disk; exit 3"), health=HealthCheck(ready_s=5)))
    async with process(scratch) as services:
        services.prepare(sick)
        with pytest.raises(ServiceError, match=r"service echo: .*exit code 3 before it was healthy.*no disk"):
            await RemoteService("echo", (7000,), services).begin()
        sweep(scratch)
        assert services.failed("echo"), "its process lives"
    left = scratch / "services" / "gone"
    left.mkdir(mode=0o700)
    (left / "echo.lock").touch()
    (left / "echo.json").write_text("{")
    sweep(scratch)
    assert not left.exists()


class NoSandboxes:
    """Starts no sandbox. At first, the janitor removes the directory meanwhile."""

    starts = 0

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch

    async def start(self, spec: SandboxSpec) -> ApptainerSandbox:
        self.starts += 1
        if self.starts <= MAX_STARTS:
            shutil.rmtree(self.scratch / "services" / "campaign")
        raise ConfigError("no such image")


async def test_the_process_that_runs_a_service_tries_again_whatever_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaflow_hpc.environments.services.node.MAX_PAUSE_S", 0.1)
    monkeypatch.setattr(remote, "WAIT_S", 10.0)
    services = NodeServices(cast(ApptainerProvider, NoSandboxes(tmp_path)), "campaign")
    services.prepare(planned("none", echo_service()))
    with pytest.raises(ServiceError, match="service echo: no such image"):
        await RemoteService("echo", (7000,), services).begin()
    await services.close()


def test_the_janitor_keeps_no_lock_of_a_directory_that_is_in_use(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    directory = tmp_path / "services" / "campaign"
    directory.mkdir(parents=True)
    directory.parent.chmod(0o700)
    (directory / "a.lock").touch()
    held = lock_file(directory / "b.lock")
    sweep(tmp_path)
    os.close(lock_file(directory / "a.lock", timeout_s=0))
    os.close(held)
    sweep(tmp_path)
    assert not directory.exists()


async def test_a_failure_that_a_killed_process_left_is_forgotten(tmp_path: Path) -> None:
    class Slow(NoSandboxes):
        async def start(self, spec: SandboxSpec) -> ApptainerSandbox:
            await asyncio.sleep(3600)
            raise AssertionError

    left = tmp_path / "services" / "campaign"
    left.mkdir(parents=True)
    (left / "echo.failed").write_text("no disk")
    services = NodeServices(cast(ApptainerProvider, Slow(tmp_path)), "campaign")
    services.prepare(planned("none", echo_service()))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(RemoteService("echo", (7000,), services).begin(), 0.2)
    await services.close()
