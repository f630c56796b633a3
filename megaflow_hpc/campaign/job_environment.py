"""Writes the shell environment that every job of a run sources, including jobs submitted by hand."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.config.slurm import TRAINER_REQUEUES
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.address import LOOPBACKS
from megaflow_hpc.host.apptainer import find_apptainer


def trainer_python() -> str:
    """Returns the Python interpreter of trainers, in which torch is installed.

    It is ``MEGAFLOW_TRAINER_PYTHON`` or, by default, the interpreter of the engine's environment.
    """
    chosen = os.environ.get("MEGAFLOW_TRAINER_PYTHON") or os.environ.get("MEGAFLOW_ENGINE_VENV") or sys.executable
    path = Path(chosen).expanduser().absolute()
    return str(path / "bin" / "python" if path.is_dir() else path)


def _by_role(config: CampaignConfig) -> list[str]:
    """Returns shell lines that run the ``setup`` of the job's own section. The scripts set ``role`` before they source
    these lines."""
    slurm = config.slurm
    roles = [("pods", slurm.pods.setup), ("servers", slurm.servers.setup), ("trainer", slurm.trainer.setup)]
    lines = []
    for role, setup in roles:
        if setup:
            lines += [f'case "${{role:-}}" in {role})', *setup, ";; esac"]
    return lines


def site_environment(setup: Sequence[str]) -> list[str]:
    """Returns shell lines that start every job: paths known to this process, followed by the user's ``setup``.

    ``setup`` comes last, so that it can select an interpreter and directories for nodes of another architecture.
    """
    # Servers and workers hold keys in memory, so core dumps are off. To debug, raise the soft limit in `setup`.
    lines = ["ulimit -S -c 0"]
    for name in ("MEGAFLOW_ENGINE_VENV", "MEGAFLOW_SCRATCH", "MEGAFLOW_APPTAINER", "MEGAFLOW_AGENTS"):
        if name in os.environ:
            lines.append(f"export {name}={shlex.quote(os.environ[name])}")
    lines += [f"export MEGAFLOW_PYTHON={shlex.quote(sys.executable)}", *setup]
    # Same as address.unproxied, but in shell, because `setup` may set proxies.
    lines.append(f'no_proxy="{",".join(LOOPBACKS)},${{no_proxy:-${{NO_PROXY:-}}}}"')
    lines.append('export no_proxy="${no_proxy%,}" NO_PROXY="${no_proxy%,}"')
    with contextlib.suppress(SiteError):  # compute nodes may have Apptainer even if this machine does not
        lines.append(f'export PATH="$PATH:"{shlex.quote(os.path.dirname(find_apptainer()))}')
    return lines


def environment_script(config: CampaignConfig, mpi: str, window_s: int = 0) -> str:
    """Returns the content of ``env.sh``, which every job of a run sources.

    Args:
        mpi: Types for ``srun --mpi``, separated by spaces, in the order in which pods try them.
        window_s: Seconds over which pods spread their drains. 0 if they may all drain at once.
    """
    lines = ["# Sourced by every job of this run."]
    if config.training:
        lines.append("unset MEGAFLOW_TRAINER_PYTHON")
        if os.environ.get("MEGAFLOW_TRAINER_PYTHON"):
            lines.append(f"export MEGAFLOW_TRAINER_PYTHON={shlex.quote(trainer_python())}")
    lines += [
        *site_environment([*config.slurm.setup, *_by_role(config)]),
        f'export MEGAFLOW_MPI="${{MEGAFLOW_MPI:-{mpi}}}"',
        f'export MEGAFLOW_REQUEUES="${{MEGAFLOW_REQUEUES:-{config.slurm.requeues}}}"',
        f"megaflow_lead_s={config.slurm.lead_s} megaflow_window_s={window_s}",
        "export PYTHONUNBUFFERED=1",
    ]
    if config.training:
        lines += [
            # Same as trainer_python(), but in shell, because `setup` may choose another interpreter.
            'MEGAFLOW_TRAINER_PYTHON="${MEGAFLOW_TRAINER_PYTHON:-${MEGAFLOW_ENGINE_VENV:-$MEGAFLOW_PYTHON}}"',
            '[ ! -d "$MEGAFLOW_TRAINER_PYTHON" ] || MEGAFLOW_TRAINER_PYTHON="$MEGAFLOW_TRAINER_PYTHON/bin/python"',
            "export MEGAFLOW_TRAINER_PYTHON",
            f"export MEGAFLOW_TRAINER_REQUEUES={TRAINER_REQUEUES}",
            f"export MEGAFLOW_TRAINER_SHARE={config.slurm.trainer.share}",
        ]
    if config.run_share == "group":
        lines.append("[ ! -f /dev/stdout ] || chmod g+r /dev/stdout")  # logs follow the user's umask
    counts = [policy.model.servers for policy in config.policies().values() if policy.model and not config.is_pool]
    if any(count.min < count.max for count in counts):
        lines.append("export MEGAFLOW_ELASTIC=1")
    return "\n".join(lines) + "\n"
