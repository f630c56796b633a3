"""What comes with the package besides its modules, wherever it is installed, and where its documentation is.

A checkout has these files beside the package; a wheel carries them inside it (``pyproject.toml``, force-include)::

    CHECKOUT/sbatch/sandbox_pods.sbatch        site-packages/megaflow_hpc/carried/sbatch/sandbox_pods.sbatch
    CHECKOUT/containers/task-base.def          …/carried/containers/task-base.def
    CHECKOUT/launchers/agents.sh               …/carried/launchers/agents.sh
"""

from __future__ import annotations

from pathlib import Path

from megaflow_hpc.errors import SiteError

PROJECT = "https://github.com/megaflow-hpc/megaflow_hpc"
"""The project's address; ``pyproject.toml`` states the same."""

_PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """Returns the absolute path of a carried file or directory.

    Args:
        name: as in a checkout: ``sbatch``, ``containers/task-base.def``, ``launchers/agents.sh``.

    Raises:
        SiteError: this installation has none.
    """
    for base in (_PACKAGE / "carried", _PACKAGE.parent):
        if (base / name).exists():
            return base / name
    raise SiteError(f"{name}: not among the files of the package in {_PACKAGE}; install megaflow-hpc anew")


def docs(page: str) -> str:
    """Returns the address of a page of the documentation, as ``docs("how-to/images.md")``."""
    return f"{PROJECT}/blob/main/docs/{page}"
