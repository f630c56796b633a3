"""Which packages of others are installed, and the extra of ours that brings the ones that are not.

Planning, submitting and reading need the core install alone. What carries rollouts out is imported by the rooms that do
so; who asks for it without having it is told the extra here, before anything is queued.
"""

from __future__ import annotations

import importlib.util
import sys

from megaflow_hpc.errors import SiteError

RUNNING = ("aiohttp", "cryptography", "mpi4py")
"""What pods and model servers import beside the core install."""

EXTRAS = {
    **dict.fromkeys(RUNNING, "mpi"),
    "minisweagent": "agents",
    "harbor": "harbor",
    "pyarrow": "export",
    "zstandard": "export",
    "jinja2": "report",
    "vl_convert": "report",
    "swebench": "swebench",
    "unidiff": "swebench",
    "peft": "train",
    "safetensors": "train",
    "torch": "train",
    "transformers": "train",
}
"""Module → the extra in ``pyproject.toml`` that brings it."""


def require_running(what: str) -> None:
    """Raises :class:`SiteError` where this interpreter, which jobs use too, cannot carry out rollouts.

    Args:
        what: what was asked for, as ``run`` or a campaign's name; the message begins with it.
    """
    missing = [name for name in RUNNING if importlib.util.find_spec(name) is None]
    if missing:
        raise SiteError(
            f"{what}: {sys.executable} lacks {', '.join(missing)}; rollouts need them: "
            'pip install "megaflow-hpc[mpi]", or "megaflow-hpc[run]" beside an MPI of the site'
        )


def missing_package(error: ModuleNotFoundError) -> SiteError | None:
    """Returns what to say of an import that failed; ``None`` where no extra of ours has the module."""
    name = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(name)
    if extra is None:
        return None
    return SiteError(f'{name}: not installed for {sys.executable}; pip install "megaflow-hpc[{extra}]"')
