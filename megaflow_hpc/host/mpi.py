"""Finds the MPI launcher and mpi4py's MPI library, and selects matching types of ``srun --mpi``."""

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

PMI, PMIX, CRAY = ("pspmi", "pmi2"), ("pspmix", "pmix", "pmix_v5", "pmix_v4", "pmix_v3"), ("cray_shasta",)
"""Types of ``srun --mpi``. MPICH and Intel MPI support PMI without additional libraries. Open MPI supports only pmix.

ParaStation's psslurm, which replaces slurmd at some sites, offers PMIx as pspmix. There, every type except pspmix and
``none`` provides PMI 1.1, which some sites list as pspmi.
"""
LOAD_TIMEOUT_S = 20.0
LIBRARY_PROGRAM = """\
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


def find_mpiexec() -> str:
    """Returns the path of the mpiexec installed with this interpreter, or else of the first mpiexec on PATH.

    Raises:
        SiteError: No mpiexec was found.
    """
    bundled = Path(sys.executable).parent / "mpiexec"
    path = str(bundled) if bundled.exists() else shutil.which("mpiexec")
    if not path:
        raise SiteError(
            "mpiexec: not found; pip install mpich next to megaflow-hpc, load an MPI module, or run with --ranks 1"
        )
    return path


def mpiexec(ranks: int) -> list[str]:
    """Returns the command prefix that starts ``ranks`` ranks on this machine, regardless of its core count.

    Raises:
        SiteError: No mpiexec was found.
    """
    options = ["--oversubscribe"] if mpi_library().startswith("Open MPI") else []
    return [find_mpiexec(), *options, "-n", str(ranks)]


@functools.cache
def mpi_library() -> str:
    """Returns the name of mpi4py's MPI library, or an empty string if the library cannot be loaded.

    A child process loads it without initializing MPI, because loading can hang or crash the process.
    """
    try:
        command = [sys.executable, "-c", LIBRARY_PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    output = done.stdout.strip() if done.returncode == 0 else ""
    return " ".join(re.split(r"[\s,]+", output)[:4])


def mpi_order(library: str) -> tuple[str, ...]:
    """Returns the types of ``srun --mpi`` to try with this MPI library, in order."""
    return (*PMIX, *PMI, *CRAY) if library.startswith("Open MPI") else (*PMI, *PMIX, *CRAY)


def network_variables(library: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns environment variables with MPI's network settings for a job step on several nodes. The mapping is empty
    if MPI should use its defaults.

    With UCX, MPICH publishes 4 KB that contain its address, in chunks of 1,022 digits, each with a key. Slurm's pmi2
    and ParaStation's pspmi read at most 1,024 bytes per line, so a full chunk makes startup hang. With libfabric, MPICH
    publishes only 16 bytes. libfabric's provider ``sockets`` lets the other ranks continue if a rank is killed. With
    ``tcp``, rank 0 would wait forever. On nodes with several interfaces, libfabric may choose an unusable one, such as
    a container bridge. Therefore ``FI_SOCKETS_IFACE`` names the interface through which this node reaches the step's
    ``srun``.

    Args:
        library: Full version string of the MPI library. The mapping is empty unless the library supports both UCX and
            libfabric.
        environ: Environment of this rank. Network settings in it take precedence.
    """
    device = re.search(r"MPICH Device:\s*(.*)", library)
    # In a heterogeneous job, SLURM_STEP_NUM_NODES counts only the nodes of this component.
    several = max(int(environ.get(name, "1")) for name in ("SLURM_STEP_NUM_NODES", "SLURM_HET_SIZE")) > 1
    over_pmi = environ.get("MEGAFLOW_MPI") in PMI and several
    chosen = "MPIR_CVAR_CH4_NETMOD" in environ or "FI_PROVIDER" in environ
    if chosen or not over_pmi or not device or not {"ucx", "ofi"} <= set(re.findall(r"\w+", device[1])):
        return {}
    variables = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "sockets"}
    interface = interface_towards(environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
    if interface and "FI_SOCKETS_IFACE" not in environ:
        variables["FI_SOCKETS_IFACE"] = interface
    return variables
