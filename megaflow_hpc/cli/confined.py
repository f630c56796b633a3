"""Confines verbs that read another user's run or file, in a child process with resource limits."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress

from megaflow_hpc.cli.output import note
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.child import ProcessLimits, run_confined
from megaflow_hpc.host.process import user_name

ASKS_SLURM = ("status", "watch", "usage", "report")
READS = ("show", "diff", "logs", "export", "import", "validate", "compact", "anonymise", "du")
"""Verbs that read runs or files and need no network access."""
RESULTS = "trajectories.h5"
"""Name of the HDF5 file in a run directory. The file may be a symlink to another user's file."""
LIMITS = ProcessLimits(memory_bytes=8 << 30, cpu_s=3600, file_bytes=64 << 30)


def carry_out(arguments: argparse.Namespace, call: Callable[[argparse.Namespace], int]) -> int:
    """Calls ``call`` with a verb's arguments. Uses a confined child process if a path belongs to another user."""
    verb = getattr(arguments, "verb", None)
    whose = _foreign_path(arguments) if verb in (*ASKS_SLURM, *READS) else ""
    if not whose:
        return call(arguments)
    status = run_confined(lambda: call(arguments), LIMITS, network=verb in ASKS_SLURM)
    if status >= 0:
        return status
    note(
        f"megaflow-hpc: {whose}: {verb} was ended by signal {-status}; it may use at most "
        f"{LIMITS.memory_bytes >> 30} GiB of memory, {LIMITS.cpu_s} s of CPU time and {LIMITS.file_bytes >> 30} GiB "
        "for a file; if you trust the data, copy it to a directory of yours"
    )
    return ConfigError.exit_status


def _foreign_path(arguments: argparse.Namespace) -> str:
    """Describes the first path that belongs to another user. Returns an empty string if all paths belong to this
    user."""
    paths = getattr(arguments, "run_dir", None) or getattr(arguments, "file", None) or []
    for path in [paths] if isinstance(paths, str) else paths:
        for read in (path, os.path.join(path, RESULTS)):
            with suppress(OSError, TypeError, ValueError):
                owner = os.stat(read).st_uid
                if owner != os.getuid():
                    return f"{read}, which belongs to {user_name(owner)}"
    return ""
