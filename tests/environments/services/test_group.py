"""Services in sandboxes of their own, reached by name: what connects, what does not, and what ends a rollout."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from megaflow_hpc.environments.sandbox import network
from megaflow_hpc.environments.sandbox.network import InsideSockets
from megaflow_hpc.environments.services.forwarding import MAX_CONNECTIONS
from megaflow_hpc.errors import SandboxError, ServiceError, UserCodeError
from megaflow_hpc.types import ExecResult, HealthCheck, Network, Service
from tests.support.dying_ranks import is_gone
from tests.support.sandboxes import Start
from tests.support.services import ask, echo_service, group_of
from tests.support.waiting import until_async

MANY = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
def ask(number):
    with socket.create_connection(("echo", 7000), timeout=60) as out:
        out.sendall(b"%d\\n" % number)
        return out.makefile().readline() == f"echo {number}\\n"
with ThreadPoolExecutor(50) as pool:
    print(sum(pool.map(ask, range(int(sys.argv[1])))))
"""

SINK = """
import socket
server = socket.create_server(("0.0.0.0", 7000))
while True:
    peer, _ = server.accept()
    size = 0
    while data := peer.recv(1 << 16):
        size += len(data)
    peer.sendall(b"%d" % size)
    peer.close()
"""

FILL = """
import socket
out = socket.create_connection(("sink", 7000), timeout=60)
for _ in range(200):
    out.sendall(b"x" * 100_000)
out.shutdown(socket.SHUT_WR)
print(out.recv(100).decode())
"""


@pytest.fixture
def by_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on nodes where only root can start containers."""
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "nsenter")


@pytest.mark.parametrize(("network", "user"), [("none", None), ("gateway", "agent"), ("host", "agent")])
async def test_a_sandbox_reaches_services_by_name_and_services_each_other(
    start: Start, network: Network, user: str | None
) -> None:
    relay = f"exec python3 -c '{ECHO_RELAY}'"
    services = (echo_service(), Service("relay", command=("sh", "-c", relay), ports=(7001,), after=("echo",)))
    async with group_of(start, *services) as group:
        sandbox = await start(network=network, user=user, services=group.reachable)
        for _ in range(2):  # in the next container too
            assert (await sandbox.exec(ask("echo", 7000, "one"))).stdout == "echo one\n"
            assert (await sandbox.exec(ask("relay", 7001, "two"))).stdout == "echo two\n"
            await sandbox.kill_processes()
        changed = await sandbox.exec("echo 1.2.3.4 echo >> /etc/hosts; rm /etc/hosts; mv /tmp/x /etc/hosts")
        assert changed.exit_code
        assert (await sandbox.exec(ask("echo", 7000, "three"))).stdout == "echo three\n"


ECHO_RELAY = """
import socket
server = socket.create_server(("127.0.0.1", 7001))
while True:
    peer, _ = server.accept()
    with peer, socket.create_connection(("echo", 7000), timeout=20) as out:
        if line := peer.makefile("rb").readline():
            out.sendall(line)
            peer.sendall(out.makefile("rb").readline())
"""


async def test_a_helper_inside_reaches_services_where_no_namespace_can_be_entered(
    start: Start, by_helper: None
) -> None:
    async with group_of(start, echo_service()) as group:
        sandbox = await start(network="none", services=group.reachable)
        asked = await sandbox.exec(["python3", "-c", MANY, "40"], timeout_s=120)
        assert asked.stdout == "40\n", asked.stderr


async def test_many_connections_and_much_data_pass(start: Start) -> None:
    sink = echo_service("sink", command=("python3", "-c", SINK), health=HealthCheck(("true",)))
    async with group_of(start, echo_service(), sink) as group:  # both serve one port, and do not see each other
        sandbox = await start(services=group.reachable)
        asked = await sandbox.exec(["python3", "-c", MANY, str(2 * MAX_CONNECTIONS)], timeout_s=120)
        assert asked.stdout == f"{2 * MAX_CONNECTIONS}\n", asked.stderr
        await asyncio.sleep(0.5)  # the sink may still be starting: nothing has checked its port
        filled = await sandbox.exec(["python3", "-c", FILL], timeout_s=120)
        assert filled.stdout == "20000000\n", filled.stderr


async def test_an_agent_cannot_take_the_place_of_a_service(start: Start) -> None:
    """The address is bound before its first command, and another option of the socket does not help."""
    bind = """
import socket
for option in (None, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
    for address in (socket.gethostbyname("echo"), "0.0.0.0"):
        fake = socket.socket()
        if option:
            fake.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            fake.bind((address, 7000))
            fake.listen()
            print("bound", option, address)
        except OSError:
            pass
"""
    async with group_of(start, echo_service()) as group:
        sandbox = await start(network="gateway", services=group.reachable)
        assert (await sandbox.exec(["python3", "-c", bind])).stdout == ""
        assert (await sandbox.exec(ask("echo", 7000, "real"))).stdout == "echo real\n"


async def test_a_service_reaches_neither_the_agents_sandbox_nor_its_gateway_nor_other_rollouts(start: Start) -> None:
    scan = """
import socket, sys
for address in sys.argv[1:]:
    for port in (7000, 8123):
        try:
            socket.create_connection((address, port), timeout=1)
            print(address, port)
        except OSError:
            pass
"""
    async with group_of(start, echo_service()) as group, group_of(start, echo_service("other")) as stranger:
        sandbox = await start(network="gateway", services=group.reachable)
        (service,) = group._running.values()
        with await sandbox.listen(8123):
            addresses = ["127.0.0.1", group.addresses["echo"], stranger.addresses["other"]]
            inside = await service.sandbox.exec(["python3", "-c", scan, *addresses])
            # Every loopback address is the service's own, if nothing else listens there.
            assert inside.stdout.splitlines() == [f"{address} 7000" for address in addresses]
            asked = await service.sandbox.exec(ask(stranger.addresses["other"], 7000, "x"))
            assert asked.stdout == "echo x\n"
            agents = await sandbox.exec(["python3", "-c", scan, *addresses])
            assert set(agents.stdout.splitlines()) == {"127.0.0.1 8123", f"{addresses[1]} 7000"}


async def test_only_declared_ports_are_reached(start: Start) -> None:
    both = ("sh", "-c", f"python3 -m http.server 7002 & exec python3 -c '{ECHO_ALONE}'")
    async with group_of(start, echo_service(command=both)) as group:
        sandbox = await start(services=group.reachable)
        assert (await sandbox.exec(ask("echo", 7000, "x"))).stdout == "x\n"
        assert (await sandbox.exec(ask("echo", 7002, "x"))).exit_code == 1


ECHO_ALONE = """
import socket
server = socket.create_server(("127.0.0.1", 7000))
while True:
    peer, _ = server.accept()
    with peer:
        peer.sendall(peer.makefile("rb").readline())
"""


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"command": ("sh", "-c", "echo starting; exit 3")}, "ended with exit code 3 before it was healthy.*starting"),
        ({"command": ("no-such-program",)}, "ended with exit code 127 before it was healthy"),
        (
            {"command": ("sh", "-c", "echo deaf; sleep 600"), "health": HealthCheck(ready_s=1)},
            "not healthy after 1 s: port 7000 accepts no connection.*deaf",
        ),
        (
            {"health": HealthCheck(("sh", "-c", "echo sick; exit 4"), interval_s=0.2, ready_s=1)},
            "not healthy after 1 s: its health check ended with 4: sick",
        ),
    ],
    ids=["exits", "missing", "no port", "unhealthy"],
)
async def test_a_service_that_is_never_healthy_is_named_and_nothing_is_left(
    start: Start, fields: dict[str, object], why: str
) -> None:
    first, second = echo_service("first"), echo_service("second", 7001, **{"ports": (7000,), **fields})
    with pytest.raises(ServiceError, match=f"(?s)service second: .*{why}"):
        async with group_of(start, first, second):
            pytest.fail("it is not healthy")
    assert start._provider is not None
    assert not start._provider._sandboxes


async def test_a_limit_ends_a_service(start: Start) -> None:
    hog = "import time\nheld = b'x' * 300_000_000\ntime.sleep(60)"
    hungry = echo_service(command=("python3", "-c", hog))
    with pytest.raises(ServiceError, match=r"service echo: its program ended .*memory limit: \d+ of 100 MB"):
        async with group_of(start, hungry, memory_mb=100):
            pytest.fail("it passes its limit")


Kill = Callable[[int], Awaitable[None]]


@pytest.mark.parametrize("what", ["its program", "its sandbox"])
async def test_the_work_ends_with_a_service_that_is_killed(start: Start, what: str) -> None:
    async with group_of(start, echo_service()) as group:
        sandbox = await start(services=group.reachable)
        (service,) = group._running.values()

        async def work() -> str:
            assert (await sandbox.exec(ask("echo", 7000, "x"))).stdout == "echo x\n"
            if what == "its program":
                await service.sandbox.exec("kill -9 $(pgrep -f socketserver)")
            else:
                assert service.sandbox.pid is not None
                os.kill(service.sandbox.pid, signal.SIGKILL)
            await asyncio.sleep(30)
            return "verdict"

        with pytest.raises(ServiceError, match=r"service echo: .* while the rollout ran"):
            await group.guard(work())


@pytest.mark.parametrize("error", [None, UserCodeError("no answer")], ids=["a verdict", "an error of the task's code"])
async def test_a_service_that_is_killed_as_the_work_ends_takes_the_result_along(
    start: Start, error: Exception | None
) -> None:
    async with group_of(start, echo_service()) as group:
        (service,) = group._running.values()

        async def work() -> str:
            assert service.sandbox.pid is not None
            os.kill(pid := service.sandbox.pid, signal.SIGKILL)
            await until_async(lambda: is_gone(pid), "the end of the sandbox")
            if error:
                raise error
            return "verdict"

        with pytest.raises(ServiceError):
            await group.guard(work())


ANSWERS = """
import socket
with socket.create_connection(("localhost", 7000)) as out:
    out.sendall(b"x\\n")
    assert out.makefile().readline() == "echo x\\n"
"""


@pytest.mark.parametrize("recovers", [False, True])
async def test_a_service_that_hangs_as_the_work_ends_takes_the_result_along_unless_it_was_busy(
    start: Start, monkeypatch: pytest.MonkeyPatch, recovers: bool
) -> None:
    """A program that is stopped still accepts connections, and never answers."""
    monkeypatch.setattr("megaflow_hpc.environments.services.running.BUSY_S", 20.0 if recovers else 2.0)
    health = HealthCheck(("python3", "-c", ANSWERS), interval_s=0.2, timeout_s=1.0, ready_s=30)
    async with group_of(start, echo_service(health=health)) as group:
        (service,) = group._running.values()

        async def work() -> str:
            goes_on = "kill -CONT $server" if recovers else ":"
            stop = f"server=$(pgrep -of socketserver); kill -STOP $server; (sleep 3; {goes_on}) >/dev/null 2>&1 &"
            assert (await service.sandbox.exec(["sh", "-c", stop])).exit_code == 0
            return "verdict"

        if recovers:
            assert await group.guard(work()) == "verdict"
        else:
            with pytest.raises(ServiceError, match="service echo: it did not answer when the rollout had ended: its h"):
                await group.guard(work())


async def test_a_sandbox_that_hangs_has_no_more_time_than_a_program(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = HealthCheck(("true",), interval_s=0.01, timeout_s=0.01, ready_s=30)
    async with group_of(start, echo_service(health=health)) as group:
        (service,) = group._running.values()
        asked = list[Any]()

        async def hangs(command: Any, *, timeout_s: float) -> ExecResult:
            asked.append(command)
            await asyncio.sleep(timeout_s)
            return ExecResult(124, timed_out=True)

        with monkeypatch.context() as change:
            change.setattr("megaflow_hpc.environments.services.running.BUSY_S", 0.3)
            change.setattr(service.sandbox, "exec", hangs)
            with pytest.raises(ServiceError, match="it did not answer when the rollout had ended"):
                await service.check_alive()
        assert asked == ["true", ["true"]]


async def test_the_next_container_has_its_services_and_their_names_or_is_not_used(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group_of(start, echo_service()) as group:
        sandbox = await start(services=group.reachable)
        await sandbox.exec("mv /etc /old; mkdir /etc; ln -s /tmp/fake /etc/hosts; echo 127.0.0.1 echo > /tmp/fake")
        await sandbox.restart(replace(sandbox.spec, user=None))
        assert (await sandbox.exec(ask("echo", 7000, "x"))).stdout == "echo x\n"

        async def fails(*_: object) -> None:
            raise SandboxError("no listener")

        with monkeypatch.context() as change:
            change.setattr(InsideSockets, "listen", fails)
            with pytest.raises(SandboxError, match="no listener"):
                await sandbox.restart()
        with pytest.raises(SandboxError, match="its last start failed"):
            await sandbox.exec("true")
        await sandbox.reset()
        assert (await sandbox.exec(ask("echo", 7000, "x"))).stdout == "echo x\n"


async def test_sockets_for_a_caller_that_is_cancelled_are_closed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = network._from_outside

    def recorded(*arguments: Any) -> list[socket.socket]:
        sockets = make(*arguments)
        made.append(len(sockets))
        return sockets

    monkeypatch.setattr(network, "_from_outside", recorded)
    sandbox = await start(network="gateway")
    before = len(os.listdir("/proc/self/fd"))
    making = asyncio.create_task(sandbox.unconnected(16))
    await asyncio.sleep(0.01)
    making.cancel()
    await asyncio.wait([making])
    await until_async(lambda: made == [16], "the sockets are made")
    await until_async(lambda: len(os.listdir("/proc/self/fd")) <= before, "they are closed", 10)


async def test_the_result_and_the_error_of_the_work_are_passed_on(start: Start) -> None:
    """Also if the agent made a service unhealthy."""

    async def work(error: Exception | None) -> int:
        if error:
            raise error
        return 7

    health = HealthCheck(("test", "-e", "/data"), interval_s=0.2, ready_s=30)
    command = ("sh", "-c", 'touch /data; exec "$@"', "sh", *echo_service().command)
    async with group_of(start, echo_service(health=health, command=command)) as group:
        assert await group.guard(work(None)) == 7
        with pytest.raises(SandboxError, match="lost"):
            await group.guard(work(SandboxError("lost")))
        (service,) = group._running.values()
        assert (await service.sandbox.exec("rm /data")).exit_code == 0
        assert await group.guard(work(None)) == 7
    async with group_of(start) as empty:
        assert empty.reachable is None
        assert await empty.guard(work(None)) == 7


async def test_a_port_below_1024_works_in_a_network_of_its_own(start: Start) -> None:
    async with group_of(start, echo_service(port=80)) as group:
        sandbox = await start(network="none", services=group.reachable)
        assert (await sandbox.exec(ask("echo", 80, "x"))).stdout == "echo x\n"
