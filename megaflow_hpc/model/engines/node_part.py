"""One node's part of an engine over several: what ``srun`` starts, ``node_part PRIVATE COMMAND…``.

It makes the server's private directory on this node too, under the same name, since the command names it, and runs the
command with its node's rank under a lifeline that hangs on standard input.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megaflow_hpc.model.engines import lifeline
from megaflow_hpc.model.engines.container import clear, furnish


def part(rank: int, command: Sequence[str]) -> list[str]:
    """The command of one node."""
    return [*command, "--node-rank", str(rank), *(["--headless"] if rank else [])]


def main(private: Path, command: Sequence[str]) -> int:
    """The engine's part on this node, until it ends or the server does."""
    rank = int(os.environ["SLURM_PROCID"])
    for name in [name for name in os.environ if name.startswith(("PMI_", "PMIX_"))]:
        del os.environ[name]
    made = False
    if rank:
        try:
            private.mkdir(mode=0o700)
            furnish(private)
            made = True
        except FileExistsError:
            found = private.lstat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o170077 != 0o040000:
                print(f"error: {private} is somebody else's, or open to others", file=sys.stderr)
                return 1
    try:
        # Slurm signals steps before the server has answered what is in flight: the server says when.
        return lifeline.main(part(rank, command), heeded=(signal.SIGHUP,))
    finally:
        if made:
            clear(private)


if __name__ == "__main__":
    os.umask(0o077)
    status = main(Path(sys.argv[1]), sys.argv[2:])
    sys.stderr.flush()
    os._exit(status)
