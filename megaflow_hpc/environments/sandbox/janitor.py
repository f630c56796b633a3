"""Cleans up after killed owners of sandboxes: kills their containers' processes and removes their scratch directories.

In nearly all cases the kernel kills a sandbox's processes together with its owner. The janitor kills the rest. It never
touches a directory of a living owner.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from megaflow_hpc.environments.images.cache import index
from megaflow_hpc.environments.sandbox.processes import namespace_init
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.private import is_private
from megaflow_hpc.host.process import Identity, descendants


def sweep(scratch: str | os.PathLike[str]) -> dict[str, int]:
    """Removes the directories of dead owners from ``SCRATCH/owners``, and their unfinished copies from the image cache.

    Files in these directories name the processes to kill. Directories that other users may have written to are
    therefore left alone.

    Returns:
        The numbers of ``owners``, ``sandboxes`` and ``processes`` that were removed or killed, and of directories that
        could not be removed (``left``).

    Raises:
        SiteError: ``scratch`` belongs to another user, or other users may write to it.
    """
    counts = {"owners": 0, "sandboxes": 0, "processes": 0, "left": 0}
    if not os.path.lexists(scratch):
        return counts
    if not is_private(scratch):
        raise SiteError(f"{scratch}: not a directory of this user's alone; others may have put something there")
    cache = Path(scratch) / "cache"
    if is_private(cache):
        with suppress(OSError):
            index.tidy(cache)
    if not is_private(Path(scratch) / "owners"):
        return counts
    try:
        owners = [entry for entry in os.scandir(Path(scratch) / "owners") if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return counts
    for entry in owners:
        owner = Identity.parse(entry.name)
        if owner is None or owner.alive():
            continue
        try:
            sandboxes = list(Path(entry.path).iterdir())
        except OSError:  # another janitor was faster
            continue
        counts["owners"] += 1
        for sandbox in sandboxes:
            counts["sandboxes"] += 1
            counts["processes"] += _end(sandbox)
        try:
            remove_tree(entry.path)
        except OSError:
            counts["left"] += int(os.path.exists(entry.path))
    return counts


def _end(sandbox: Path) -> int:
    """Kills the container of a sandbox's directory. Returns the number of its processes."""
    try:
        identity = Identity.parse((sandbox / "owner").read_text(errors="replace").strip())
    except OSError:
        return 0
    if identity is None or not identity.alive():
        return 0
    count = 1 + sum(1 for _ in descendants(identity.pid))
    init = namespace_init(identity.pid)  # None if this is PID 1 itself; killing it kills all others
    first = Identity.of(init) if init is not None else None
    if first is not None:
        first.kill()
    identity.kill()
    return count
