"""One node's part of an engine over several nodes; ``srun`` starts ``node_part PRIVATE COMMAND…`` on each.

The command names the server's private directory, so it is made on this node too, under the same name. The command runs
with its node's rank under a lifeline that watches standard input.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.model.engines import lifeline
from megaflow_hpc.model.engines.container import make_directories


def part(rank: int, command: Sequence[str]) -> list[str]:
    """Returns the command of one node; ranks above 0 serve no requests."""
    return [*command, "--node-rank", str(rank), *(["--headless"] if rank else [])]


def main(private: Path, command: Sequence[str]) -> int:
    """Runs the engine's part on this node until it or the server ends; returns its exit status."""
    rank = int(os.environ["SLURM_PROCID"])
    for name in [name for name in os.environ if name.startswith(("PMI_", "PMIX_"))]:
        del os.environ[name]
    made = False
    if rank:
        try:
            private.mkdir(mode=0o700)
            make_directories(private)
            made = True
        except FileExistsError:
            found = private.lstat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o170077 != 0o040000:
                print(f"error: {private} belongs to another user, or is open to others", file=sys.stderr)
                return 1
    try:
        # Slurm signals steps before the server has answered what is in flight; the server ends the step itself.
        return lifeline.main(part(rank, command), end_on=(signal.SIGHUP,))
    finally:
        if made:
            remove_tree(private, ignore_errors=True)


if __name__ == "__main__":
    os.umask(0o077)
    status = main(Path(sys.argv[1]), sys.argv[2:])
    sys.stderr.flush()
    os._exit(status)
