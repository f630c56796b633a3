"""This installation: its version, files shipped with the package, installed extras, and links to the documentation.

In a checkout, the shipped files are next to the package. In a wheel, they are inside it (``force-include`` in
``pyproject.toml``)::

    CHECKOUT/sbatch/sandbox_pods.sbatch        site-packages/megaflow_hpc/carried/sbatch/sandbox_pods.sbatch
    CHECKOUT/containers/task-base.def          …/carried/containers/task-base.def
    CHECKOUT/launchers/agents.sh               …/carried/launchers/agents.sh

Planning, submitting and reading need only the core install. Running rollouts needs more packages. If a package is
missing, the user learns which extra to install before anything is queued.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError, SiteError

__version__ = "0.1.0"
"""The package's version, as in ``pyproject.toml``."""
PROJECT = "https://github.com/megaflow-hpc/megaflow_hpc"
"""The project's URL, as in ``pyproject.toml``."""
RUNNING = ("aiohttp", "cryptography", "mpi4py")
"""Packages that pods and model servers need in addition to the core install."""
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
"""Maps each module to the extra in ``pyproject.toml`` that installs it."""

INSTALL = 'pip install "megaflow-hpc[mpi]"'
"""Command that installs everything a first campaign and its report need. The README, the documentation and error
messages quote it."""

_PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """Returns the absolute path of a file or directory shipped with the package.

    Args:
        name: The path in a checkout: ``sbatch``, ``containers/task-base.def``, ``launchers/agents.sh``.

    Raises:
        SiteError: This installation lacks the file.
    """
    for base in (_PACKAGE / "carried", _PACKAGE.parent):
        if (base / name).exists():
            return base / name
    raise SiteError(f"{name}: missing from the package's files in {_PACKAGE}; reinstall megaflow-hpc")


def docs(page: str) -> str:
    """Returns the URL of a documentation page, such as ``docs("how-to/images.md")``."""
    return f"{PROJECT}/blob/main/docs/{page}"


def is_installed(module: str) -> bool:
    """Returns whether this interpreter can import a module. Ignores namespace packages, because any directory on
    ``sys.path`` counts as one."""
    return getattr(importlib.util.find_spec(module), "origin", None) is not None


def require_running(what: str) -> None:
    """Raises :class:`SiteError` if this interpreter cannot run rollouts. Jobs use the same interpreter.

    Args:
        what: The requested action, such as ``run``, or a campaign's name. The error message starts with it.
    """
    missing = [name for name in RUNNING if not is_installed(name)]
    if missing:
        raise SiteError(
            f"{what}: {sys.executable} lacks {', '.join(missing)}; rollouts need them: "
            f'{INSTALL}, or "megaflow-hpc[run]" with an MPI that the site provides'
        )


def missing_package(error: ModuleNotFoundError) -> SiteError | None:
    """Returns the error to report for a failed import, or ``None`` if no extra installs the module."""
    name = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(name)
    if extra is None:
        return None
    return SiteError(f"{name}: not installed for {sys.executable}; {install(extra)}")


def imported(module: str) -> Any:
    """Imports and returns a module of an optional package.

    Raises:
        ConfigError: The package is not installed. The message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        command = install(EXTRAS[package]) if package in EXTRAS else f"pip install {package}"
        raise ConfigError(f"{package}: not installed; {command}") from None


def install(extra: str) -> str:
    """Returns the command that installs an extra."""
    return f'pip install "megaflow-hpc[{extra}]"'
