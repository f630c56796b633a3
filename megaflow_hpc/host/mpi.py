"""The MPI launcher of this machine."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from megaflow_hpc.errors import SiteError


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
