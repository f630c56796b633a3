#!/usr/bin/env python3
"""A Slurm cluster of one's own on one machine, for an ordinary user: launchers/lab is its front.

A lab is a directory; nothing outside it is touched, so several live side by side::

    DIR/
      lab.json            unique id, ports, and pid + start time of every daemon
      slurm.conf …        written anew at every start from nothing
      site.conf           lines of one's own for slurm.conf, where there is one: MaxArraySize=5
      job_submit.lua      of a variant that has one
      munge/ db/ state/   key and socket, MariaDB, slurmctld's state
      spool/<node>/       one slurmd each
      tmp/<node>/         its directory of temporary files, as Slurm's plugin for PMIx uses it
      plugins/            Slurm's plugin for PMIx, where it would not find the library by itself
      gpu/                links to /dev/null that stand for GPUs
      logs/

Nodes cpu1-4 and gpu1-2 (two "GPUs" each) claim more cores than the machine has; memory is bookkeeping. Partitions: cpu
(default), gpu, and preempt over the same nodes as cpu, whose jobs are requeued when a job in cpu needs the room.
Accounting, associations and QOS limits are real.

An ordinary user's lab has that user's jobs only. ``start --users a,b`` by root makes one whose daemons are root's and
whose jobs are of the named users: they may pass its directory, read slurm.conf and ask munge; keys stay closed.

``start --beside OTHER`` makes a second cluster at the accounting and the munge of another lab, which must run: commands
of each reach the other with ``-M``, as at a site with several.

``start --site NAME`` makes a variant that has one trait of real sites (lab_sites.py). A lab keeps its variant until it
is started with another one.

Only the standard library: it must run where nothing is installed yet.
"""

from __future__ import annotations

import argparse
import difflib
import fcntl
import json
import os
import pwd
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from lab_sites import SITES, Site, table

CPU_NODES = [f"cpu{i}" for i in range(1, 5)]
GPU_NODES = [f"gpu{i}" for i in range(1, 3)]
NODES = CPU_NODES + GPU_NODES
GPUS = 2
SOCKET_PATH_MAX = 107  # sun_path, without its final zero
DAEMONS = ["munged", "mariadbd", "slurmdbd", "slurmctld", *(f"slurmd-{node}" for node in NODES)]  # in starting order
PUBLIC = ("slurm.conf", "gres.conf", "cgroup.conf")  # what every user of a Slurm reads
COMMON = ("munged", "mariadbd", "slurmdbd")  # what several clusters of a site have in common
STOP_S = 20.0
USER = pwd.getpwuid(os.getuid()).pw_name


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def die(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(1)


def wait_for(condition: Callable[[], Any], timeout_s: float, interval_s: float = 0.2) -> Any:
    """The condition's first true value, or its last false one when time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value or time.monotonic() > deadline:
            return value
        time.sleep(interval_s)


# --- processes: a pid alone names nobody, pid and start time do -------------------------------------------------------


def start_time(pid: int) -> str | None:
    """Boot and clock tick at which ``pid`` started (proc(5), field 22); None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{boot}/{fields[19]}"


def alive(daemon: dict[str, Any] | None) -> bool:
    return bool(daemon) and start_time(daemon["pid"]) == daemon["start"]  # type: ignore[index]


def send(pid: int, start: str, signum: int) -> None:
    """Signals exactly the process that started then: the descriptor pins it before the check."""
    try:
        descriptor = os.pidfd_open(pid)
    except (ProcessLookupError, PermissionError):
        return
    try:
        if start_time(pid) == start:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, signum)
    finally:
        os.close(descriptor)


def end(processes: list[tuple[int, str]], timeout_s: float = STOP_S) -> None:
    """SIGTERM, then SIGKILL to those that stay."""
    for signum, patience in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 5.0)):
        for pid, start in processes:
            send(pid, start, signum)
        if wait_for(lambda: all(start_time(pid) != start for pid, start in processes), patience, 0.05):
            return


def lineage(pid: int) -> set[int]:
    """``pid`` and the processes it descends from."""
    found = set()
    while pid > 1:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def marked(*marks: str) -> list[tuple[int, str]]:
    """Our processes with one of ``marks`` in their environment, except this one and those it was started from."""
    found, ours = [], lineage(os.getpid())
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in ours:
            start = start_time(int(entry))
            with suppress(OSError):
                variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                if start and any(mark.encode() in variables for mark in marks):
                    found.append((int(entry), start))
    return found


def program(name: str, *others: str) -> str:
    for candidate in (name, *others):
        path = shutil.which(candidate)
        if path:
            return path
    die(f"{name} is not on PATH: run launchers/setup, or install Slurm, munge and MariaDB")


class Lab:
    """One lab directory and what runs in it."""

    def __init__(self, directory: str) -> None:
        self.dir = Path(directory).absolute()
        self.conf = self.dir / "slurm.conf"
        self.record = self.dir / "lab.json"
        try:
            self.state: dict[str, Any] = json.loads(self.record.read_text())
        except (OSError, ValueError):
            self.state = {}
        self.state.setdefault("id", secrets.token_hex(4))
        self.state.setdefault("ports", {})
        self.state.setdefault("daemons", {})
        self.daemons: dict[str, dict[str, Any]] = self.state["daemons"]
        self.users: list[str] = self.state.setdefault("users", [])
        """Whose jobs a lab of root's runs; empty: only those of whom it belongs to."""
        self.site = SITES[self.state.setdefault("site", "plain")]
        self.cluster = f"lab{self.state['id']}"
        beside = self.state.setdefault("beside", "")
        self.other = Lab(beside) if beside else None
        """The lab whose accounting and munge this one uses."""
        self.own = [name for name in DAEMONS if not self.other or name not in COMMON]
        # A deep directory leaves no room for socket names: then they live in /tmp, under the lab's unguessable id.
        deepest = str(self.dir / "db" / "mariadb.sock.lock")
        self.sockets = self.dir / "sockets" if len(deepest) <= SOCKET_PATH_MAX else Path(f"/tmp/{self.cluster}")
        self.munge = (self.other or self).sockets / "munge"
        self.slurmd_program = Path(shutil.which("slurmd") or "/usr/sbin/slurmd").resolve()

    def save(self) -> None:
        temporary = self.record.with_suffix(".new")
        temporary.write_text(json.dumps(self.state, indent=1) + "\n")
        os.replace(temporary, self.record)

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.dir.mkdir(parents=True, exist_ok=True)
        os.chmod(self.dir, self.passable)
        with open(self.dir / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.__init__(str(self.dir))  # type: ignore[misc]  # what another lab command has changed meanwhile
            yield

    def command(self, *words: str, timeout_s: float = 20.0) -> tuple[int, str]:
        """A Slurm command against this lab: status and what it printed."""
        try:
            done = subprocess.run(
                [*self.within("slurmctld"), program(words[0]), *words[1:]],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return 124, f"{words[0]} gave no answer in {timeout_s:.0f} s"
        return done.returncode, (done.stdout + done.stderr).strip()

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ")}
        return {**kept, "SLURM_CONF": str(self.conf)}

    # --- places: all on this host; a lab of several (tests/lab/hosts.py) says otherwise -------------------------------

    def place(self, name: str) -> tuple[str, str]:
        """Name and address of the host on which a node or daemon is, as the others reach it."""
        return socket.gethostname().split(".")[0], "127.0.0.1"

    def within(self, name: str) -> list[str]:
        """What a command that shall run on the host of a node or daemon begins with."""
        return []

    def reached(self, name: str) -> bool:
        """Whether a node or daemon takes connections."""
        return answers(self.state["ports"][name])

    @property
    def passable(self) -> int:
        """Mode of a directory through which the lab's users must get to what is theirs."""
        return 0o711 if self.users else 0o700

    # --- configuration ------------------------------------------------------------------------------------------------

    def configure(self) -> None:
        """Free ports and all files. Only while no daemon runs."""
        of_nodes = [f"{folder}/{node}" for folder in ("spool", "tmp") for node in NODES]
        for name in ("munge", "db", "state", "gpu", "logs", "plugins", *of_nodes):
            (self.dir / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.sockets.mkdir(mode=0o700, exist_ok=True)
        passed = ("spool", "tmp", "plugins", *(f"tmp/{node}" for node in NODES))
        for folder in (self.sockets, *(self.dir / name for name in passed)):
            folder.chmod(self.passable)
        if self.users:  # whose commands list it
            (self.dir / "plugins").chmod(0o755)
        if self.sockets.stat().st_uid != os.getuid():
            die(f"{self.sockets} belongs to someone else: use a lab directory with a shorter path")
        key = self.dir / "munge" / "key"
        if not key.exists():
            self.write("munge/key.new", secrets.token_bytes(128))
            os.replace(self.dir / "munge" / "key.new", key)
        for number in range(max([GPUS, *(count for _, count in self.site.gpus)])):
            # slurmd sets CUDA_VISIBLE_DEVICES only for device files whose names end in their number.
            device = self.dir / "gpu" / f"nvidia{number}"
            device.unlink(missing_ok=True)
            device.symlink_to("/dev/null")
        listeners = ["slurmctld", "slurmdbd", "mariadbd", *NODES]
        self.state["ports"] = dict(zip(listeners, free_ports(len(listeners)), strict=True))
        password = secrets.token_hex(16)
        self.write("slurm.conf", self.site.edit(self.slurm_conf()) + self.site.conf + self.site_conf())
        self.write("gres.conf", "".join(self.gres_line(node) for node in GPU_NODES))
        for name, text in [pair for site in SITES.values() for pair in site.files.items()]:
            path = self.dir / name  # of another variant, but not the user's own
            if path.is_file() and path.read_text() == text:
                path.unlink()
        for name, text in self.site.files.items():
            self.write(name, text)
        if self.site.stepd:
            self.make_stepd()
        # Earlier versions know no such word; a file of a later one may be there.
        self.write("cgroup.conf", "CgroupPlugin=disabled\n" if self.version() >= (24, 5) else "")
        self.write("slurmdbd.conf", self.slurmdbd_conf(password))
        # Run by MariaDB itself at every start, so that no client and no root password are needed.
        self.write(
            "db.sql",
            "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"
            f"CREATE OR REPLACE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
            "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';\n",
        )
        self.save()

    def write(self, name: str, content: str | bytes) -> None:
        path = self.dir / name
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if self.users and name in PUBLIC:
                os.fchmod(descriptor, 0o644)
            file.write(content.encode() if isinstance(content, str) else content)

    def version(self) -> tuple[int, int]:
        """``slurm-wlm 22.05.8`` → (22, 5)."""
        output = subprocess.run([self.slurmd_program, "-V"], capture_output=True, text=True).stdout
        numbers = output.split()[-1].split(".") if output else ["0", "0"]
        return int(numbers[0]), int(numbers[1])

    def prefix(self) -> Path | None:
        """Where the packages lie when they were unpacked and not installed; None for the system's own."""
        usr = self.slurmd_program.parents[1]
        return None if usr == Path("/usr") else usr

    def slurm_conf(self) -> str:
        ports, (controller, controller_address) = self.state["ports"], self.place("slurmctld")
        theirs, plugins = next((self.prefix() or Path("/usr")).glob("lib/*/slurm-wlm"), None), ""
        if theirs and self.make_pmix_plugin(theirs):
            plugins = f"PluginDir={self.dir}/plugins:{theirs}\n"
        elif theirs and self.prefix():
            plugins = f"PluginDir={theirs}\n"
        nodes = ""
        for node in NODES:
            size = f"RealMemory=8192 Gres={self.gres(node)}" if node in GPU_NODES else "RealMemory=4096"
            host, address = self.place(node)
            nodes += f"NodeName={node} NodeHostname={host} NodeAddr={address} Port={ports[node]} CPUs=8 {size}\n"
        return f"""# Written by launchers/lab; a change here is lost when the lab starts from nothing.
ClusterName={self.cluster}
SlurmctldHost={controller}({controller_address})
SlurmUser={USER}
SlurmdUser={USER}
SlurmctldPort={ports["slurmctld"]}
AuthType=auth/munge
CredType=cred/munge
# cred_expire is how long a requeued job waits before it starts again: 120 s by default, an age in a test.
AuthInfo=socket={self.munge},cred_expire=5
{plugins}StateSaveLocation={self.dir}/state
SlurmdSpoolDir={self.dir}/spool/%n
TmpFS={self.dir}/tmp/%n
SlurmctldLogFile={self.dir}/logs/slurmctld.log
SlurmdLogFile={self.dir}/logs/slurmd-%n.log
SlurmctldPidFile={self.dir}/state/slurmctld.pid
SlurmdPidFile={self.dir}/spool/%n/slurmd.pid
# No cgroups, no prolog, no root: what an ordinary user may have anywhere.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=60
KillWait=10
UnkillableStepTimeout=30
MaxArraySize=201
MaxJobCount=2000
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=450
# A job is looked at in the second in which it is queued, not in the third: there are never many.
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={self.place("slurmdbd")[1]}
AccountingStoragePort={(self.other or self).state["ports"]["slurmdbd"]}
# What the page calls a password is, under munge, the socket.
AccountingStoragePass={self.munge}
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
GresTypes=gpu
{nodes}PartitionName=DEFAULT MaxTime=08:00:00 DefaultTime=01:00:00 State=UP
PartitionName=cpu Nodes={",".join(CPU_NODES)} Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=gpu Nodes={",".join(GPU_NODES)} PriorityTier=10 PreemptMode=OFF
PartitionName=preempt Nodes={",".join(CPU_NODES)} PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
"""

    def gres(self, node: str) -> str:
        """Returns the ``Gres`` of a GPU node: ``gpu:2``, or ``gpu:a100:4`` if GPUs have types."""
        if not self.site.gpus:
            return f"gpu:{GPUS}"
        kind, count = self.site.gpus[GPU_NODES.index(node)]
        return f"gpu:{kind}:{count}"

    def gres_line(self, node: str) -> str:
        """Returns the line of gres.conf for a node."""
        _, *kind, count = self.gres(node).split(":")
        typed = f" Type={kind[0]}" if kind else ""
        files = f"{self.dir}/gpu/nvidia[0-{int(count) - 1}]"
        return f"NodeName={node} Name=gpu{typed} File={files} Flags=nvidia_gpu_env\n"

    def stepd_program(self) -> Path:
        """Returns the path of Slurm's own slurmstepd."""
        usr = self.prefix()
        return usr.parent / "bin" / "slurmstepd" if usr else Path(program("slurmstepd"))

    def make_stepd(self) -> None:
        """Copies slurmstepd to another file name, which the kernel uses as the name of its processes.

        Slurm's plugins check the first argument instead, which stays the same.
        """
        copy, start = self.dir / "plugins" / self.site.stepd, self.dir / "plugins" / "start-stepd"
        for path, content in (
            (copy, self.stepd_program().resolve().read_bytes()),
            (start, f'#!/bin/bash\nexec -a slurmstepd {shlex.quote(str(copy))} "$@"\n'.encode()),
        ):
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            path.chmod(0o755)

    def why_no_site(self, site: Site) -> str:
        """Returns why this machine's Slurm cannot run a variant. Empty if it can."""
        if self.version() < site.since:
            needed, found = (".".join(f"{number:02d}" for number in each) for each in (site.since, self.version()))
            return f"it needs Slurm {needed} or later, and {self.slurmd_program} is {found}"
        folder = next((self.prefix() or Path("/usr")).glob("lib/*/slurm-wlm"), None)
        if site.plugin and folder and not (folder / site.plugin).exists():
            return f"{folder} has no {site.plugin}: install Slurm's plugins (Debian: slurm-wlm-basic-plugins)"
        return ""

    def make_pmix_plugin(self, theirs: Path) -> bool:
        """Makes a plugin for PMIx that finds its library, where that of the packages in ``theirs`` does not.

        Debian's opens one path, which only the package for developers provides (with compilers and more). So a copy of
        the library gets that path for a name, and a copy of the plugin loads it: what is opened later is there already.
        """
        plugin = next(theirs.glob("mpi_pmix_v*.so"), None)
        library = next(theirs.parent.glob("pmix*/lib/libpmix.so.*.*"), None)
        if not plugin or not library or not shutil.which("patchelf"):
            return False
        opened = Path("/usr/lib") / theirs.parent.name / library.parent.relative_to(theirs.parent) / "libpmix.so"
        if opened.exists() or str(opened.parent).encode() not in plugin.read_bytes():
            return False
        ours = self.dir / "plugins"
        for source, copy, *words in (
            (library, "libpmix.so", "--set-soname", str(opened)),
            (plugin, plugin.name, "--add-needed", str(ours / "libpmix.so")),
        ):
            shutil.copyfile(source, ours / copy)
            (ours / copy).chmod(0o644)
            subprocess.run(["patchelf", *words, str(ours / copy)], check=True, stdin=subprocess.DEVNULL)
        (ours / "mpi_pmix.so").unlink(missing_ok=True)
        (ours / "mpi_pmix.so").symlink_to(plugin.name)
        return True

    def site_conf(self) -> str:
        """What the lab's user wants otherwise; Slurm takes the later of two values."""
        path = self.dir / "site.conf"
        return path.read_text() if path.exists() else ""

    def slurmdbd_conf(self, password: str) -> str:
        ports, usr = self.state["ports"], self.prefix()
        plugins = f"PluginDir={next(usr.glob('lib/*/slurm-wlm'))}\n" if usr else ""
        return f"""AuthType=auth/munge
AuthInfo=socket={self.sockets}/munge
DbdHost=localhost
DbdAddr={self.place("slurmdbd")[1]}
DbdPort={ports["slurmdbd"]}
SlurmUser={USER}
LogFile={self.dir}/logs/slurmdbd.log
PidFile={self.dir}/state/slurmdbd.pid
{plugins}StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={ports["mariadbd"]}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
"""

    # --- daemons ------------------------------------------------------------------------------------------------------

    def command_line(self, name: str) -> list[str]:
        munge = self.dir / "munge"
        if name == "munged":
            # --force: a socket directory closed to others is what we want, and munged's reason to refuse.
            return [
                program("munged"), "--foreground", "--force", "--num-threads=2", f"--socket={self.munge}",
                *(f"--{file}-file={munge}/{file}" for file in ("key", "pid", "log", "seed")),
            ]  # fmt: skip
        if name == "mariadbd":
            return [
                program("mariadbd", "mysqld"), *self.mariadb_options(), f"--user={USER}",
                f"--socket={self.sockets}/mariadb.sock",
                "--bind-address=127.0.0.1", f"--port={self.state['ports']['mariadbd']}", "--skip-name-resolve",
                f"--pid-file={self.dir}/db/mariadb.pid", f"--init-file={self.dir}/db.sql", "--skip-log-bin",
                "--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900", "--max-allowed-packet=16M",
                "--performance-schema=OFF", "--max-connections=40",
            ]  # fmt: skip
        if name == "slurmdbd":
            return [program("slurmdbd"), "-D"]
        if name == "slurmctld":
            return [program("slurmctld"), "-D"]
        # Under its right name: Slurm's plugins ask what program they are in, and a slurmstepd-wlm crashes.
        stepd = ["-d", str(self.stepd_program())] if self.prefix() else []
        if self.site.stepd:
            stepd = ["-d", str(self.dir / "plugins" / "start-stepd")]
        return [program("slurmd"), "-D", "-N", name.partition("-")[2], *stepd]

    def mariadb_options(self) -> list[str]:
        usr = self.prefix()
        options = ["--no-defaults", f"--datadir={self.dir}/db/data"]
        return [*options, f"--basedir={usr}", f"--lc-messages-dir={usr}/share/mysql"] if usr else options

    def launch(self, name: str) -> None:
        """Starts one daemon, in its own session, with nothing inherited but its log, and writes down who it is."""
        # The mark finds a daemon, or a job step's slurmstepd, whose pid was never written down.
        environment = {**self.environment(), "MEGAFLOW_LAB_ID": self.state["id"]}
        if name.startswith("slurmd-"):  # PMIx counts the ranks of the node that bears the host's name
            environment["PMIX_HOSTNAME"] = name.partition("-")[2]
        with open(self.dir / "logs" / f"{name}.out", "ab") as output:
            process = subprocess.Popen(
                [*self.within(name.removeprefix("slurmd-")), *self.command_line(name)],
                env=environment,
                cwd=self.dir,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.daemons[name] = {"pid": process.pid, "start": start_time(process.pid)}
        self.save()

    def missing(self) -> list[str]:
        return [name for name in self.own if not alive(self.daemons.get(name))]

    def ready(self, name: str) -> bool:
        """Does a freshly launched daemon do its work?"""
        if name == "munged":
            return self.munge.is_socket() and self.munge_answers()
        if name in ("mariadbd", "slurmdbd"):
            return self.reached(name)
        if name == "slurmctld":
            return self.command("scontrol", "ping")[1].find("is UP") >= 0
        return self.reached(name.partition("-")[2])

    def munge_answers(self) -> bool:
        return self.command("munge", "-n", "-S", str(self.munge))[0] == 0

    def bring_up(self) -> None:
        """Starts what does not run, in order. Raises RuntimeError when a daemon will not come up."""
        missing = self.missing()
        # Daemons have children of their own (slurmscriptd): those are no strays while their parent lives.
        known = {self.daemons[name]["pid"] for name in self.own if name not in missing}
        strays = [p for p in marked(f"MEGAFLOW_LAB_ID={self.state['id']}") if not known & lineage(p[0])]
        if len(missing) == len(self.own):
            end(strays)
            self.daemons.clear()
            self.configure()
            if not self.other:
                self.create_database()
        else:
            # A slurmstepd outlives its slurmd, which finds it again; a daemon nobody wrote down would hold its port.
            end([(pid, start) for pid, start in strays if not is_stepd(pid, self.site.stepd)])
        for group in (["munged", "mariadbd"], ["slurmdbd"], ["slurmctld"], [f"slurmd-{node}" for node in NODES]):
            launched = [name for name in group if name in missing]
            if group == ["slurmctld"]:
                self.register()  # before slurmctld: it makes its job table only in a cluster that is known
            for name in launched:
                say(f"starting {name}")
                self.launch(name)
            for name in launched:
                wait_for(lambda name=name: self.ready(name) or not alive(self.daemons[name]), 60)  # type: ignore[misc]
                if not (alive(self.daemons[name]) and self.ready(name)):
                    raise RuntimeError(f"{name} did not start:\n{self.log_tail(name)}")
        if not wait_for(self.healthy, 45, 0.3):
            raise RuntimeError(f"the nodes do not come up:\n{self.command('sinfo', '-lN')[1]}")

    def create_database(self) -> None:
        data = self.dir / "db" / "data"
        if data.exists():
            return
        say("creating the accounting database")
        temporary, usr = self.dir / "db" / "data.new", self.prefix()
        shutil.rmtree(temporary, ignore_errors=True)
        words = [
            program("mariadb-install-db", "mysql_install_db"), "--no-defaults", f"--datadir={temporary}",
            f"--user={USER}", "--skip-test-db",
            "--auth-root-authentication-method=socket", f"--auth-root-socket-user={USER}",
        ]  # fmt: skip
        if usr:
            words += [f"--basedir={usr}", f"--lc-messages-dir={usr}/share/mysql"]
        with open(self.dir / "logs" / "mariadb-install-db.out", "wb") as output:
            status = subprocess.call(
                words, env=self.environment(), cwd=self.dir, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        if status:
            raise RuntimeError(f"MariaDB could not be set up:\n{self.log_tail('mariadb-install-db')}")
        os.replace(temporary, data)
        self.state["registered"] = False

    def register(self) -> None:
        """Cluster, account, user and QOS; a repetition changes nothing."""
        if self.state.get("registered"):
            return
        for words in (
            f"add cluster {self.cluster}",
            "add account lab Description=lab Organization=lab",
            # A QOS as sites have them: short jobs, few of them. Nothing is limited by default.
            "add qos short MaxWall=00:30:00 MaxJobsPerUser=4 MaxSubmitJobsPerUser=12",
            f"add user {USER} Account=lab AdminLevel=Admin QOS=normal,short DefaultQOS=normal",
            *(f"add user {user} Account=lab QOS=normal,short DefaultQOS=normal" for user in self.users),
        ):
            status, output = self.command("sacctmgr", "-i", *words.split())
            if status and "Nothing new added" not in output and "already exist" not in output:
                raise RuntimeError(f"sacctmgr {words}: {output}\n{self.log_tail('slurmdbd')}")
        self.state["registered"] = True
        self.save()

    def log_tail(self, name: str) -> str:
        lines: list[str] = []
        for path in (self.dir / "logs" / f"{name}.log", self.dir / "logs" / f"{name}.out"):
            with suppress(OSError):
                lines += path.read_text(errors="replace").splitlines()[-12:]
        return "\n".join(lines) + f"\n(logs in {self.dir}/logs)"

    def nodes(self) -> dict[str, str]:
        status, output = self.command("sinfo", "-h", "-N", "-o", "%N %T")
        return {} if status else dict(line.split() for line in output.splitlines() if len(line.split()) == 2)

    def healthy(self) -> bool:
        """All daemons are those we started, slurmctld and slurmdbd answer, every node can run jobs."""
        if self.missing():
            return False
        nodes = self.nodes()
        # An asterisk is a node that does not answer; a drained one is somebody's will and none of our business.
        states = [nodes.get(node, "down") for node in NODES]
        bad = [state for state in states if state.endswith("*") or state.startswith(("down", "unk"))]
        return not bad and self.command("sacctmgr", "-n", "show", "cluster")[0] == 0

    # --- verbs --------------------------------------------------------------------------------------------------------

    def start(self, users: list[str], beside: str = "", site: str = "") -> None:
        """Starts the lab, or repairs it.

        ``users``: of a lab of root's; those it was made for if empty. ``beside``: whose accounting it shares.
        ``site``: the variant; that of its last start if empty.
        """
        if site and (why := self.why_no_site(SITES[site])):
            die(f"--site {site}: {why}")
        with self.locked():
            if site and site != self.state["site"]:
                if len(self.missing()) < len(self.own):
                    die(f"the lab in {self.dir} runs as --site {self.state['site']}: stop it first")
                self.state["site"] = site
                self.save()
                self.__init__(str(self.dir))  # type: ignore[misc]
            if beside and not self.state["beside"]:
                self.state["beside"] = beside
                self.save()
                self.__init__(str(self.dir))  # type: ignore[misc]
            if self.other and not self.other.healthy():
                die(f"the lab in {self.other.dir}, whose accounting this one uses, does not run: start it first")
            if users and users != self.users:
                if len(self.missing()) < len(self.own):
                    die(f"the lab in {self.dir} runs for {', '.join(self.users) or USER}: stop it first")
                self.state["users"] = self.users = users
                self.state["registered"] = False
                os.chmod(self.dir, self.passable)
            if self.healthy():
                say(f"the lab in {self.dir} is up")
                return
            running = len(self.own) - len(self.missing())
            say(f"{'repairing' if running else 'starting'} the lab in {self.dir}")
            problem = None
            # First mend what is broken; then from nothing, on other ports: another process may have taken ours.
            for _ in range(3):
                try:
                    with ports_lock():
                        self.bring_up()
                    trait = "" if self.state["site"] == "plain" else f"; site {self.state['site']}"
                    say(f"the lab is up: 4 CPU nodes, 2 GPU nodes; partitions cpu, gpu, preempt{trait}")
                    return
                except RuntimeError as error:
                    problem = error
                    say(f"starting over: {str(error).splitlines()[0]}")
                    self.halt()
            die(f"the lab in {self.dir} does not start: {problem}")

    def stop(self) -> None:
        if not self.record.exists():
            say(f"no lab in {self.dir}")
            return
        with self.locked():
            self.halt()
            if not str(self.sockets).startswith(str(self.dir)):
                shutil.rmtree(self.sockets, ignore_errors=True)
        say(f"the lab in {self.dir} is stopped")

    def halt(self) -> None:
        """Jobs first, then the daemons in the reverse of their order, then what escaped from a job."""
        if alive(self.daemons.get("slurmctld")):
            for user in self.users or [USER]:
                self.command("scancel", f"--user={user}")
            wait_for(lambda: self.command("squeue", "-h", "-o", "%A")[1] == "", 15, 0.5)
        mine = {name: (d["pid"], d["start"]) for name, d in self.daemons.items()}
        for group in (("slurmd-",), ("slurmctld",), ("slurmdbd",), ("mariadbd",), ("munged",)):
            end([mine[name] for name in mine if name.startswith(group)])
        end(marked(f"MEGAFLOW_LAB_ID={self.state['id']}", f"SLURM_CLUSTER_NAME={self.cluster}"), 5)
        self.daemons.clear()
        self.save()

    def status(self) -> dict[str, Any]:
        missing = self.missing()
        stopped = len(missing) == len(self.own)
        state = "stopped" if stopped else "running" if self.healthy() else "broken"
        nobody = {"pid": None, "start": None}
        return {
            "dir": str(self.dir),
            "state": state,
            "site": self.state["site"],
            "slurm_conf": str(self.conf),
            "daemons": {name: {**self.daemons.get(name, nobody), "alive": name not in missing} for name in self.own},
            "nodes": {} if stopped else self.nodes(),
            "ports": self.state["ports"],
        }


def is_stepd(pid: int, other_name: str = "") -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() in ("slurmstepd", other_name or "slurmstepd")
    except OSError:
        return False


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> list[int]:
    """Below the ephemeral range, so that no outgoing connection takes one between now and the daemon's start."""
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 2000):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    die(f"no {count} free ports between 20000 and 32000")


@contextmanager
def ports_lock() -> Iterator[None]:
    """One lab of a user starts at a time, so that two do not choose the same ports."""
    path = Path.home() / ".cache" / "megaflow-lab.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="launchers/lab",
        description="A single-machine Slurm cluster of one's own.",
        epilog=f"variants, each with one trait of real sites (start --site NAME):\n{table()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=["start", "stop", "status", "env", "sites"])
    parser.add_argument("--dir", default=os.environ.get("MEGAFLOW_LAB_DIR"), help="the lab's directory")
    parser.add_argument("--json", action="store_true", help="status and sites as JSON")
    parser.add_argument("--users", default="", help="start, by root: whose jobs it runs, as a,b")
    parser.add_argument("--beside", default="", metavar="DIR", help="start: a second cluster at that lab's accounting")
    parser.add_argument("--site", default="", metavar="NAME", help="start: a variant; default: that of its last start")
    arguments = parser.parse_args()
    if arguments.site and arguments.site not in SITES:
        close = difflib.get_close_matches(arguments.site, SITES, 1)
        die(f"--site {arguments.site}: " + (f"did you mean {close[0]}? " if close else "")
            + f"there are: {', '.join(SITES)}")  # fmt: skip
    if arguments.verb == "sites":
        print(json.dumps({name: site.about for name, site in SITES.items()}) if arguments.json else table())
        return
    if not arguments.dir:
        die("no lab directory: give --dir or set MEGAFLOW_LAB_DIR")
    users = [user for user in arguments.users.split(",") if user]
    lab = Lab(arguments.dir)
    if users and os.getuid() != 0:
        die("--users: only root's slurmds can start jobs of others; leave it out")
    if os.getuid() == 0 and not (users or lab.users):
        die("the lab runs as an ordinary user: use launchers/lab, which changes to one, or name --users")
    os.umask(0o077)
    if arguments.verb == "start":
        lab.start(users, os.path.abspath(arguments.beside) if arguments.beside else "", arguments.site)
    elif arguments.verb == "stop":
        lab.stop()
    elif arguments.verb == "env":
        print(f"export SLURM_CONF={shlex.quote(str(lab.conf))}")
        print(f"export MEGAFLOW_LAB_DIR={shlex.quote(str(lab.dir))}")
        print(f"export PATH={shlex.quote(os.environ['PATH'])}")
    else:
        report = lab.status()
        if arguments.json:
            print(json.dumps(report))
        else:
            trait = "" if report["site"] == "plain" else f" (site {report['site']})"
            print(f"{report['dir']}: {report['state']}{trait}")
            for name, daemon in report["daemons"].items():
                print(f"  {name:14} {'pid ' + str(daemon['pid']) if daemon['alive'] else 'not running'}")
            for name, condition in report["nodes"].items():
                print(f"  node {name:9} {condition}")
        raise SystemExit({"running": 0, "broken": 1, "stopped": 3}[report["state"]])


if __name__ == "__main__":
    main()
