"""The MPI of this machine: its launcher, what mpi4py's library is, and what srun must speak for it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.address import interface_towards

PMI2, PMIX = ("pmi2", "cray_shasta"), ("pmix", "pmix_v5", "pmix_v4", "pmix_v3")
"""Types of ``srun --mpi``: MPICH and Intel MPI speak pmi2 without further libraries, Open MPI speaks pmix alone."""
LIBRARY_S = 20.0
LIBRARY = """\
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


def find_mpiexec() -> str:
    """Returns the mpiexec that belongs to this interpreter's MPI, else the one on PATH.

    Raises:
        SiteError: there is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found:
        raise SiteError(
            "mpiexec: not found; pip install mpich beside megaflow-hpc, load an MPI module, or run with --ranks 1"
        )
    return found


def mpiexec(ranks: int) -> list[str]:
    """Returns the words that start so many ranks on this machine, however many cores it has.

    Raises:
        SiteError: there is no mpiexec.
    """
    more = ["--oversubscribe"] if mpi_library().startswith("Open MPI") else []
    return [find_mpiexec(), *more, "-n", str(ranks)]


@functools.cache
def mpi_library() -> str:
    """Returns the first words of what mpi4py's MPI says of itself; empty where it says nothing.

    Asked of a child, which does not start MPI: loading a library can hang or end a process.
    """
    try:
        asked = [sys.executable, "-c", LIBRARY]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=LIBRARY_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    said = done.stdout.strip() if done.returncode == 0 else ""
    return " ".join(re.split(r"[\s,]+", said)[:4])


def mpi_order(library: str) -> tuple[str, ...]:
    """Returns the types of ``srun --mpi`` in the order in which they are worth trying with this MPI."""
    return (*PMIX, *PMI2) if library.startswith("Open MPI") else (*PMI2[:1], *PMIX, *PMI2[1:])


def network_variables(library: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns what MPI's network is set to before MPI starts in a step of several nodes; empty where MPI decides.

    With UCX, MPICH tells the other nodes 4 KB of its memory, of which its address is a part, in pieces of 1,022 digits
    and a key for each; Slurm's pmi2 reads 1,024 bytes of a line, and the start hangs wherever a piece is full. With
    libfabric it tells 16 bytes. Of its providers ``sockets`` lets the other ranks go on when one is killed; in ``tcp``
    rank 0 waits for ever. Of several interfaces libfabric takes one that may lead nowhere (a bridge of
    containers), so it is told the one by which this node reaches the step's ``srun``.

    Args:
        library: All that MPI says of itself. One made without UCX or without libfabric has no choice.
        environ: This rank's variables. A network that they choose stays.
    """
    device = re.search(r"MPICH Device:\s*(.*)", library)
    over_pmi2 = environ.get("MEGAFLOW_MPI") == "pmi2" and int(environ.get("SLURM_STEP_NUM_NODES", "1")) > 1
    chosen = "MPIR_CVAR_CH4_NETMOD" in environ or "FI_PROVIDER" in environ
    if chosen or not over_pmi2 or not device or not {"ucx", "ofi"} <= set(re.findall(r"\w+", device[1])):
        return {}
    found = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "sockets"}
    interface = interface_towards(environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
    return found | ({"FI_SOCKETS_IFACE": interface} if interface and "FI_SOCKETS_IFACE" not in environ else {})
