"""What of a site's Slurm does not work just now, each with its cause; ``doctor`` prints it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass

from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.mpi import mpi_library
from megaflow_hpc.rundir.marks import cause
from megaflow_hpc.slurm import site

AWAY = ("down", "drain", "fail", "unk", "maint", "inval", "reboot")
"""Beginnings of the states, as sinfo writes them in full, in which a node takes no job."""


@dataclass(frozen=True)
class AbsentNodes:
    """Nodes of a partition that take no job: how many, and the reason that most of them have."""

    count: int
    reason: str


def absent_nodes() -> dict[str, AbsentNodes]:
    """Returns the partitions that have nodes out of service; one that does not answer counts too.

    Raises:
        SiteError: Slurm does not answer.
    """
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for line in site.ask("sinfo", "-h", "-N", "-o", "%R|%T|%E").splitlines():
        name, state, reason = line.split("|", 2)
        silent = state.endswith("*")
        if silent or state.startswith(AWAY):
            said = f"{state.rstrip('*~#!%$@^-')}{', silent' if silent else ''}"
            reasons[name][said if reason in ("", "none") else f"{said}: {reason}"] += 1
    return {name: AbsentNodes(found.total(), found.most_common(1)[0][0]) for name, found in reasons.items()}


def why_no_accounting() -> str | None:
    """Returns why ``sacct`` does not answer; empty where it does, ``None`` where the site keeps no accounts.

    Raises:
        SiteError: the controller does not answer.
    """
    settings = site.configuration()
    if "slurmdbd" not in settings.get("AccountingStorageType", "") or not shutil.which("sacct"):
        return None
    try:
        site.ask("sacct", "-n", "-X", "-S", "now-1minutes")
    except SiteError as error:
        place = f"{settings.get('AccountingStorageHost', '?')}:{settings.get('AccountingStoragePort', '?')}"
        return f"slurmdbd at {place} does not answer ({error})"
    return ""


def why_no_pmi(plugin: str) -> str:
    """Returns why ranks of this interpreter's MPI would not find each other by ``srun --mpi=PLUGIN``; else empty.

    Only what is certain is said; ``doctor --job`` tries it.
    """
    library = mpi_library()
    if plugin == "cray_shasta" and library and "cray" not in library.lower():
        return f"srun offers neither pmi2 nor pmix but cray_shasta, which {library} does not speak"
    return ""


@dataclass(frozen=True)
class World:
    """What a step of two ranks has shown: ``why_not`` they found each other, empty where they did, and of what MPI."""

    why_not: str = ""
    library: str = ""
    asks: bool = False
    """Whether Slurm answers in a step."""
    outlives: bool = False
    """Whether rank 0 goes on when the other one is killed."""


PROBE = """\
import os, signal, subprocess, time
import mpi4py
mpi4py.rc.finalize = False
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Set_errhandler(MPI.ERRORS_RETURN)
print("ranks", world.allreduce(1), MPI.Get_library_version().splitlines()[0].strip(), flush=True)
if world.rank == 0:
    try:
        asked = subprocess.run(["squeue", "-h", "--me"], capture_output=True, timeout=20).returncode
    except (OSError, subprocess.TimeoutExpired):
        asked = 1
    print("asked", asked, flush=True)
world.Barrier()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
end = time.monotonic() + 3
while world.size > 1 and time.monotonic() < end:
    world.Iprobe()
    time.sleep(0.01)
print("outlived", flush=True)
os._exit(0)
"""
"""A rank of :func:`try_world`. A launcher that ends the others for a lost one does so within milliseconds."""


def try_world(plugin: str) -> World:
    """Starts two ranks by ``srun --mpi=PLUGIN`` as a pod's are started, and kills one."""
    step = ["srun", f"--mpi={plugin}", "-n2", "-N1", "--kill-on-bad-exit=0", "--no-kill"]
    command = [*step, "--time=2", "--mem-per-cpu=200M", sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=site.ASK_S, check=False)
    except subprocess.TimeoutExpired:
        return World(f"two ranks have not come and gone in {site.ASK_S:.0f} s, in which they may have waited for cpus")
    ranks = [line for line in done.stdout.splitlines() if line.startswith("ranks ")]
    if [line for line in ranks if line.startswith("ranks 1 ")]:
        return World("worlds of one rank each")
    if len(ranks) != 2:
        said = done.stderr.strip() or "no message"
        return World(f"srun ended with {done.returncode}: {cause(said.splitlines())}")
    return World("", ranks[0].removeprefix("ranks 2 "), "asked 0" in done.stdout, "outlived" in done.stdout)
