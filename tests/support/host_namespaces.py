"""Simulated hosts: namespaces of this machine with a network between them, and a Slurm lab on them. Needs root.

A host has its own process ids, network, mounts, host name and IPC, its own ``/tmp`` and ``/dev/shm`` in memory, and one
address. It ends with its first process. Kernel, boot id, users and disk are this machine's.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from megaflow_hpc.host.process import Identity, children
from tests.support.places import LAUNCHERS
from tests.support.waiting import until

NET = "10.231.7"
"""Network of the hosts, which is invisible outside of them."""
FIRST = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()"
"""Program of a host's first process, which reaps orphans."""
SETUP = """\
hostname {name}
mount -t tmpfs -o mode=1777,size=6G scratch /tmp
mount -t tmpfs -o mode=1777,size=1G memory /dev/shm
mkdir /tmp/cgroup
mount --rbind /sys/fs/cgroup /tmp/cgroup
mount -t sysfs sysfs /sys
mount --move /tmp/cgroup /sys/fs/cgroup
rmdir /tmp/cgroup
mount --bind {hosts} /etc/hosts
ip link set lo up
"""


def load_lab() -> Any:
    """Imports ``launchers/lab.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location("lab", LAUNCHERS / "lab.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["lab"] = module
    if str(LAUNCHERS) not in sys.path:  # it imports lab_sites.py next to it
        sys.path.append(str(LAUNCHERS))
    spec.loader.exec_module(module)
    return module


lab = load_lab()


class Host:
    """One host. It has the mounts of the time when it was switched on, and those made inside."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.name, self.address = name, f"{NET}.{number}"
        self._hosts = folder / "hosts"
        self.first: Identity | None = None
        self._holder: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Pid of its first process on this machine."""
        assert self.first
        return self.first.pid

    @property
    def within(self) -> list[str]:
        """Argv prefix of a command that runs on the host."""
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-i", "-p", "--"]

    def switch_on(self) -> None:
        """Starts the host, without a network."""
        words = [
            "unshare",
            "-n",
            "-m",
            "-u",
            "-i",
            "-p",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--propagation",
            "private",
        ]
        self._holder = subprocess.Popen(
            [*words, "/usr/bin/python3", "-c", FIRST], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(lambda: children(self._holder.pid), f"{self.name} is on", 10)  # type: ignore[union-attr]
        self.first = Identity.of(children(self._holder.pid)[0])
        until(lambda: Path(f"/proc/{self.pid}/cmdline").read_bytes().startswith(b"/usr/bin/python3"), "its /proc", 10)
        self.run(SETUP.format(name=self.name, hosts=self._hosts))

    def run(self, script: str) -> None:
        """Runs a shell script on the host as root."""
        subprocess.run([*self.within, "bash", "-ec", script], stdin=subprocess.DEVNULL, check=True, timeout=60)

    def plug(self, switch: Host) -> None:
        """Connects the host to the host that has the bridge."""
        port = f"p{self.address.rpartition('.')[2]}"
        words = f"ip link add {port} netns {switch.pid} type veth peer name eth0 netns {self.pid}"
        subprocess.run(words.split(), check=True, timeout=60)
        switch.run(f"ip link set {port} master bridge up")
        self.run(f"ip addr add {self.address}/24 dev eth0; ip link set eth0 up")

    def cut(self) -> None:
        """Disconnects the network."""
        self.run("ip link set eth0 down")

    def join(self) -> None:
        """Reconnects the network."""
        self.run("ip link set eth0 up")

    def switch_off(self) -> None:
        """Kills every process of the host."""
        if self.first and self._holder:
            self.first.kill()
            self._holder.wait(30)


class Network:
    """A context manager that returns hosts by name. The first has the bridge."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.hosts = {name: Host(name, number, folder) for number, name in enumerate(names, 1)}
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts.values())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def __enter__(self) -> dict[str, Host]:
        switch, *others = self.hosts.values()
        switch.switch_on()
        switch.run(f"ip link add bridge type bridge; ip addr add {switch.address}/24 dev bridge; ip link set bridge up")
        for host in others:
            host.switch_on()
            host.plug(switch)
        return self.hosts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for host in self.hosts.values():
            host.switch_off()


class HostsLab(lab.Lab):  # type: ignore[name-defined]
    """A lab with each node on a host of its own, and the other daemons on the host ``login``."""

    node_names: list[str] = lab.NODES
    hosts: dict[str, Host]

    def _host(self, name: str) -> Host:
        return self.hosts.get(name, self.hosts["login"])

    def place(self, name: str) -> tuple[str, str]:
        return self._host(name).name, self._host(name).address

    def within(self, name: str) -> list[str]:
        return self._host(name).within

    def reached(self, name: str) -> bool:
        """Asks on the login node, which also runs the database."""
        address = "127.0.0.1" if name == "mariadbd" else self._host(name).address
        words = [*self.within("login"), "bash", "-c", f"</dev/tcp/{address}/{self.state['ports'][name]}"]
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=10).returncode == 0
