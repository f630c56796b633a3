"""Gather: one self-contained ``RUN/trajectories.h5`` from the journals of a run.

The journals are read twice: once to decide the winners, once to copy them in commit order. The file is written under a
temporary name in the same directory, made durable and published by rename, so a reader sees the old file or the new
one, and a gather that was killed is simply run again. It may run while the campaign does.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Any

from megaflow_hpc import __version__
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir import RunDir
from megaflow_hpc.trajectories.hdf5 import recorded_sources
from megaflow_hpc.trajectories.winners import Seals, fingerprint, index, seals_of
from megaflow_hpc.trajectories.writer import TrajectoryWriter, fsync


def gather(run: RunDir | str | os.PathLike[str], seals: Seals | None = None, *, rebuild: bool = False) -> Path:
    """Writes ``RUN/trajectories.h5`` unless it already holds everything the journals do.

    Args:
        run: the run directory.
        seals: (block, epoch) → (``<pod>.<start>``, bytes that count); by default what the ledger says.
        rebuild: write it anew in any case.

    Returns:
        The path of the file.

    Raises:
        ConfigError: a journal is foreign or newer, or journals that the present file was made from are gone.
        OSError: no space left, or a read-only directory; the present file stays as it was.
    """
    run = run if isinstance(run, RunDir) else RunDir(run)
    seals = seals_of(run) if seals is None else seals
    now = fingerprint(run, seals)  # before the journals are read: what is appended meanwhile makes the file stale
    before = recorded_sources(run.trajectories)
    if before is not None:
        gone = sorted(set(before.get("journals", {})) - set(now["journals"]))
        kept = {name: size for name, size in before.get("journals", {}).items() if name not in gone}
        if gone and (rebuild or kept != now["journals"]):
            raise ConfigError(
                f"{run.trajectories}: was made from journals that are gone ({', '.join(gone)}) and cannot be made anew "
                f"without loss; restore them to {run.journal}, or move the file away to gather what is left"
            )
        if gone or (before == now and not rebuild):
            return run.trajectories
    _write(run, seals, now)
    return run.trajectories


def _write(run: RunDir, seals: Seals, sources: dict[str, Any]) -> None:
    found = index(run, seals)
    target = run.trajectories
    temporary = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        writer = TrajectoryWriter(temporary, campaign_name(run), f"megaflow-hpc {__version__}", sources)
        try:
            for entry in found.winners:
                writer.append(found.load(entry))
        except BaseException:
            writer.abandon()
            raise
        writer.close()
        os.chmod(temporary, 0o600)
        fsync(temporary)
        os.replace(temporary, target)
        fsync(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def campaign_name(run: RunDir) -> str:
    """The name in the resolved campaign of ``run.json``; the directory's name where there is none."""
    if not run.run_json.exists():
        return run.path.name
    content = run.read_run()
    campaign = content.get("campaign")
    name = campaign.get("name") if isinstance(campaign, dict) else campaign or content.get("name")
    return str(name or run.path.name)
