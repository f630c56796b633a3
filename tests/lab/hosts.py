"""A Slurm of several hosts on this machine: ``python -m tests.lab.hosts``, by root.

The suite's lab is six slurmd on one host. Here each node, and the login node, is a host as far as the kernel can tell
them apart: process ids, network, mounts, host name and IPC of its own, a ``/tmp`` and ``/dev/shm`` of its own, and an
address in a network between them, which exists for as long as this command. The run directory lies in a network file
system, which each host mounts (GlusterFS, where ``glusterfsd`` is on PATH: ``apt install glusterfs-server``), else in
a directory that all of them see. One throwaway account runs campaigns with real sandboxes and a model service, in pods
of two hosts, so that their ranks speak over sockets: undisturbed, on hosts of many networks, with a worker killed, a
whole pod killed, an element requeued, a host switched off, and a host whose network is cut. Prints a line for each
finding and ends with 1 if one is not as it should be.

    usage: python -m tests.lab.hosts [--open-mpi] [SCENE…]        all scenes by default; see SCENES

``--open-mpi``: pods by Open MPI from PyPI and ``srun --mpi=pmix``, in the place of MPICH and ``pmi2``.

Needs what launchers/setup gives (Slurm, Apptainer on PATH, ``MEGAFLOW_TEST_BASE_SIF``), readable by every user.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from megaflow_hpc.host.process import argv
from tests.bench.chaos import at_work
from tests.bench.chaos_campaign import write_campaign
from tests.lab.two_users import Findings, until
from tests.support import other_mpi
from tests.support.accounts import Account
from tests.support.host_namespaces import Host, HostsLab, Network
from tests.support.network_file_system import Shared
from tests.support.processes import environment, processes
from tests.support.waiting import eventually

USER = "mfh"
TASKS = 32
DOWN_S = 30.0
NETS = 12
CUT_S = 100.0
"""Slurm takes the host for lost after 20 s; its pods learn of it when they next reach the run directory."""


ROWS = """\
import json, sys
from megaflow_hpc import open_trajectories
with open_trajectories(sys.argv[1]) as store:
    print(json.dumps([[row.id, row.status, row.reward] for row in store]))
"""


class Site:
    """Hosts, lab, account and shared directory, and what the scenes do with them.

    Args:
        python: With the MPI by which pods run.
    """

    def __init__(self, hosts: dict[str, Host], lab: HostsLab, account: Account, shared: Shared, python: Path) -> None:
        self.python = str(python)
        self.hosts, self.lab, self.account, self.shared = hosts, lab, account, shared

    def on(self, host: str, *words: object, timeout_s: float = 300) -> tuple[int, str, str]:
        """Runs a command of the account on a host: status, what it printed, and its errors."""
        self.account.within = self.hosts[host].within
        process = self.account.start(*words)
        out, err = process.communicate(timeout=timeout_s)
        return process.returncode, out, err

    def ranks(self) -> list[tuple[int, int, str]]:
        """Pid, rank and host of each rank that runs; what a rank has forked has its words, and a higher pid."""
        found: dict[tuple[str, int], tuple[int, int, str]] = {}
        ours = set(self.account.processes())
        for pid, words in sorted(each for each in processes() if each[0] in ours):
            if "megaflow_hpc.pod" in words and words[0] == self.python and (said := environment(pid)):
                rank = int(said["SLURM_PROCID"])
                found.setdefault((said["MEGAFLOW_POD"], rank), (pid, rank, said["SLURMD_NODENAME"]))
        return list(found.values())


@contextmanager
def site(open_mpi: bool) -> Iterator[Site]:
    """The hosts, and their end."""
    folder = Path(tempfile.mkdtemp(prefix="megaflow-hosts.", dir="/srv"))
    folder.chmod(0o755)
    lab = HostsLab(str(folder / "lab"))
    account = None
    try:
        python = other_mpi.install(other_mpi.OPEN_MPI, folder / "mpi") if open_mpi else Path(sys.executable)
        with Network(folder, ["login", *lab.node_names]) as hosts:
            lab.hosts = hosts
            account = Account(USER, lab.dir, shared=False)
            shared = Shared(folder, hosts)
            print(f"     hosts: {', '.join(hosts)}; run directories in {shared.kind}", flush=True)
            lab.dir.mkdir()
            (lab.dir / "site.conf").write_text("SlurmdTimeout=20\n")
            lab.start([USER])
            try:
                yield Site(hosts, lab, account, shared, python)
            finally:
                lab.stop()
    finally:
        if account:
            account.remove()
        shutil.rmtree(folder, ignore_errors=True)


def campaign(place: Site, name: str) -> Path:
    """A campaign of two pods with two hosts each, and an engine server on a host of its own."""
    folder = place.account.home / name
    folder.mkdir()
    file = write_campaign(folder, Path(os.environ["MEGAFLOW_TEST_BASE_SIF"]), TASKS, mark=str(folder / "campaign.yaml"))
    content = yaml.safe_load(file.read_text())
    content["slurm"]["pods"] |= {"partition": "cpu", "nodes": 2, "slots_per_rank": 2}
    content["model"]["servers"] = 1
    file.write_text(yaml.safe_dump(content))
    place.account.own(folder)
    return file


def running(place: Site) -> list[str]:
    """Pods that run, as Slurm calls them."""
    return place.on("login", "squeue", "-h", "-r", "-t", "R", "-p", "cpu", "-o", "%i")[1].split()


def nothing(place: Site) -> str:
    return "nothing"


def worker(place: Site) -> str:
    """SIGKILL for a rank on another host than its rank 0."""
    pid, rank, host = random.choice([each for each in place.ranks() if each[1] >= 2])
    os.kill(pid, signal.SIGKILL)
    return f"worker rank {rank} on {host}"


def interfaces(place: Site) -> str:
    """Hosts with more networks than the one between them, as those of containers are; they are there for good."""
    for number, node in enumerate(place.lab.node_names):
        for net in range(NETS):
            place.hosts[node].run(
                f"ip link add net{net} type veth peer name end{net}; ip link set end{net} up; "
                f"ip addr add 10.232.{net}.{number + 1}/24 dev net{net}; ip link set net{net} up"
            )
    element = running(place)[0]
    place.on("login", "scontrol", "requeue", element)
    return f"{NETS} networks more on every host, {element} requeued"


def pod(place: Site) -> str:
    """SIGKILL for all of a pod, its batch shell too."""
    element = running(place)[0]
    place.on("login", "scancel", "--signal=KILL", "--full", element)
    return f"every process of {element}"


def requeue(place: Site) -> str:
    """The owner has a pod start anew."""
    element = running(place)[0]
    place.on("login", "scontrol", "requeue", element)
    return f"{element} requeued"


def power(place: Site) -> str:
    """A host is switched off, and comes back empty when Slurm has found it out."""
    host = next(host for _, rank, host in place.ranks() if rank == 0)
    place.hosts[host].switch_off()
    time.sleep(DOWN_S)
    place.hosts[host].switch_on()
    place.hosts[host].plug(place.hosts["login"])
    place.shared.mount(host)
    place.lab.start([])
    return f"{host} with a rank 0, switched off"


def cut(place: Site) -> str:
    """A host's network is cut for a while; what runs there goes on."""
    host = next(host for _, rank, host in place.ranks() if rank == 0)
    place.hosts[host].cut()
    time.sleep(CUT_S)
    place.hosts[host].join()
    return f"{host} with a rank 0, without a network for {CUT_S:.0f} s"


SCENES: dict[str, Callable[[Site], str]] = {
    "undisturbed": nothing,
    "interfaces": interfaces,
    "worker": worker,
    "pod": pod,
    "requeue": requeue,
    "power": power,
    "cut": cut,
}


def scene(say: Findings, place: Site, name: str) -> None:
    """One campaign, struck as its scene says, and the check of it."""
    run, began = place.shared.path / name, time.monotonic()
    megaflow = (place.python, "-m", "megaflow_hpc")
    file = campaign(place, name)
    status, _, err = place.on("login", *megaflow, "submit", file, "--run-dir", run)
    if status:
        say.say(f"{name}: submitted", False, err[-600:])
        return

    def told() -> dict[str, Any]:
        status, out, _ = place.on("login", *megaflow, "status", run, "--json")
        return dict(json.loads(out)) if status == 0 and out else {}

    until(
        lambda: at_work(str(file)) and len({host for _, _, host in place.ranks()}) > 1,
        f"{name}: sandboxes work for ranks on several hosts",
    )
    hosts = Counter(host for _, _, host in place.ranks())
    say.say(f"{name}: ranks on several hosts", len(hosts) > 1, dict(hosts))
    print(f"     {name}: {time.monotonic() - began:.0f} s: {SCENES[name](place)}", flush=True)
    resumed = 0

    def ended() -> bool:
        nonlocal resumed
        if (state := told().get("state")) == "stopped" and resumed < 3:
            resumed += 1
            place.on("login", *megaflow, "resume", run)
        return state == "finished"

    until(ended, f"{name}: the campaign ends", 600)
    place.on("login", *megaflow, "gather", run, "--wait", "--rebuild")
    _, out, err = place.on("login", place.python, "-c", ROWS, run)
    found = json.loads(out or "[]")
    solved = sum(status == "completed" and reward == 1 for _, status, reward in found)
    once = sorted(each[0] for each in found) == sorted(f"work{n:02d}/default/0" for n in range(TASKS))
    starts = sorted(name for name in place.on("login", "ls", run / "events")[1].split() if "_" in name)
    starts = [name.removesuffix(".jsonl") for name in starts if name.endswith(".jsonl")]
    seen = f"{len(found)} rollouts, {solved} solved, starts {' '.join(starts)}, resumed {resumed} times"
    seen += f", {time.monotonic() - began:.0f} s"
    say.say(f"{name}: every rollout once", once, f"{seen} {err[-300:]}")
    until(lambda: not place.on("login", "squeue", "-h")[1], f"{name}: every job has left")
    # An earlier start's srun waits for ranks on the host that was cut, until Slurm finds that it knows the job no more.
    eventually(lambda: not place.account.processes(), 240, every_s=1)
    left_over = {pid: " ".join(map(os.fsdecode, argv(pid)))[-160:] for pid in place.account.processes()}
    say.say(f"{name}: no process is left", not left_over, left_over or "")
    for host in place.lab.node_names:  # as the next pod there would
        place.on(host, *megaflow, "janitor")
    words = ("find", "/tmp", "/dev/shm", "(", "-name", "mpich*", "-o", "-name", "megaflow-pod.*", ")")
    left = {host: out for host in place.hosts if (out := place.on(host, *words)[1])}
    say.say(f"{name}: no directory of a pod and no shared memory is left", not left, left or "")


def main() -> int:
    if os.getuid() != 0:
        print("error: only root makes hosts, and a lab on them", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was made is removed
    say = Findings()
    open_mpi = "--open-mpi" in sys.argv
    names = [name for name in sys.argv[1:] if name != "--open-mpi"]
    with site(open_mpi) as place:
        for name in names or SCENES:
            scene(say, place, name)
    print(f"{say.bad} findings are not as they should be" if say.bad else "all is as it should be")
    return bool(say.bad)


if __name__ == "__main__":
    raise SystemExit(main())
