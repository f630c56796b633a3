"""Diagnoses a site's Slurm installation: finds what fails, and why. ``doctor`` prints the results."""

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

UNAVAILABLE_STATES = ("down", "drain", "fail", "unk", "maint", "inval", "reboot")
"""Prefixes of sinfo's long state names, for nodes that accept no jobs."""


@dataclass(frozen=True)
class AbsentNodes:
    """Number of nodes in a partition that accept no jobs, and the most frequent reason."""

    count: int
    reason: str


def absent_nodes() -> dict[str, AbsentNodes]:
    """Returns the partitions that have unavailable nodes, including unresponsive ones, by name.

    Raises:
        SiteError: Slurm does not respond.
    """
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for line in site.ask("sinfo", "-h", "-N", "-o", "%R|%T|%E").splitlines():
        name, state, reason = line.split("|", 2)
        silent = state.endswith("*")
        if silent or state.startswith(UNAVAILABLE_STATES):
            state_text = f"{state.rstrip('*~#!%$@^-')}{', silent' if silent else ''}"
            reasons[name][state_text if reason in ("", "none") else f"{state_text}: {reason}"] += 1
    return {name: AbsentNodes(counts.total(), counts.most_common(1)[0][0]) for name, counts in reasons.items()}


def why_no_accounting() -> str | None:
    """Explains why ``sacct`` does not work. Empty if it works, ``None`` if the site has no accounting.

    Raises:
        SiteError: The controller does not respond.
    """
    settings = site.configuration()
    if "slurmdbd" not in settings.get("AccountingStorageType", "") or not shutil.which("sacct"):
        return None
    try:
        site.ask("sacct", "-n", "-X", "-S", "now-1minutes")
    except SiteError as error:
        host = f"{settings.get('AccountingStorageHost', '?')}:{settings.get('AccountingStoragePort', '?')}"
        return f"slurmdbd at {host} does not answer ({error})"
    return ""


def why_no_pmi(plugin: str) -> str:
    """Explains why MPI ranks started with ``srun --mpi=PLUGIN`` cannot connect to each other. Empty if no reason is
    known.

    Detects only certain failures. ``doctor --job`` runs a real test.
    """
    library = mpi_library()
    if plugin == "cray_shasta" and library and "cray" not in library.lower():
        return f"srun offers neither pmi2 nor pmix but cray_shasta, which {library} does not support"
    return ""


@dataclass(frozen=True)
class MpiProbe:
    """Result of a job step with two MPI ranks. ``why_not`` explains a failure, and is empty if the ranks connected."""

    why_not: str = ""
    library: str = ""
    asks: bool = False
    """True if Slurm commands work inside a job step."""
    outlives: bool = False
    """True if rank 0 survives when the other rank is killed."""


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
"""Source of the program that each rank runs in :func:`try_world`. If a launcher kills all ranks after one dies, it does
so within milliseconds, so the program waits three seconds."""


def try_world(plugin: str) -> MpiProbe:
    """Starts two ranks with ``srun --mpi=PLUGIN``, as a pod would, and kills one of them."""
    step = ["srun", f"--mpi={plugin}", "-n2", "-N1", "--kill-on-bad-exit=0", "--no-kill", "--wait=0"]
    command = [*step, "--time=2", "--mem-per-cpu=200M", sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=site.COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return MpiProbe(
            f"two ranks did not finish within {site.COMMAND_TIMEOUT_S:.0f} s; they may have waited for CPUs"
        )
    ranks = [line for line in done.stdout.splitlines() if line.startswith("ranks ")]
    if [line for line in ranks if line.startswith("ranks 1 ")]:
        return MpiProbe("worlds of one rank each")
    if len(ranks) != 2:
        message = done.stderr.strip() or "no message"
        return MpiProbe(f"srun ended with {done.returncode}: {cause(message.splitlines())}")
    return MpiProbe("", ranks[0].removeprefix("ranks 2 "), "asked 0" in done.stdout, "outlived" in done.stdout)
