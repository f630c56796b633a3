"""The MPI of this machine: its launcher, what mpi4py's library is, and what srun must speak for it."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

from megaflow_hpc.errors import SiteError

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
