"""What of a site's Slurm does not work just now, each with its cause; ``doctor`` prints it."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass

from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.mpi import mpi_library
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
