"""Runs an engine across several nodes of its server's allocation (``model.nodes``), as a job step with a task per node.

::

    server ── lifeline ── srun ─┬─ first node: lifeline ── engine --node-rank 0, listens on the server's socket
                                └─ node k:     lifeline ── engine --node-rank k --headless

The server runs on the first node, so its proxy reaches the engine's Unix socket as usual. Each part watches the step's
standard input: end-of-file stops all parts, even if the server was killed. The exit of one part ends the step. ``srun``
starts ``python -m megaflow_hpc.model.engines.multinode PRIVATE COMMAND…`` on each node. The command names the server's
private directory, so the other nodes create a directory of the same name.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.model.engines import lifeline
from megaflow_hpc.model.engines.container import make_directories
from megaflow_hpc.model.engines.launch import Launch


def over_nodes(
    launch: Launch, nodes: int, private: Path, options: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Launch:
    """Wraps a launch in a job step of ``nodes`` tasks, one per node.

    Args:
        options: Additional options for srun.

    Raises:
        ConfigError: The allocation has too few nodes.
    """
    given = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 0)
    if given < nodes:
        raise ConfigError(
            f"model.nodes: {nodes}: this server runs on {given or 'no'} nodes of Slurm; submit the campaign there, or "
            f"by hand: sbatch --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 …"
        )
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none", "--overlap"]
    srun += ["--kill-on-bad-exit=1", "--wait=0", "--input=all", "--export=ALL"]
    if environ.get("SLURM_CPUS_PER_TASK"):  # job steps do not inherit this option from sbatch
        srun.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    part = [sys.executable, "-m", "megaflow_hpc.model.engines.multinode", str(private)]
    return replace(launch, command=[*srun, *options, *part, *launch.command])


def part_command(rank: int, command: Sequence[str]) -> list[str]:
    """Returns the engine command for one node. Ranks above 0 serve no requests."""
    words = [*command, "--node-rank", str(rank)]
    return [*words, "--headless"] if rank else words


def main(private: Path, command: Sequence[str]) -> int:
    """Runs the engine's part on this node until it or the server exits. Returns its exit status."""
    rank = int(os.environ["SLURM_PROCID"])
    for name in list(os.environ):
        if name.startswith(("PMI_", "PMIX_")):
            del os.environ[name]
    created = False
    if rank:
        try:
            private.mkdir(mode=0o700)
            make_directories(private)
            created = True
        except FileExistsError:
            status = private.lstat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o170077 != 0o040000:
                print(f"error: {private} belongs to another user, or is open to others", file=sys.stderr)
                return 1
    try:
        # Slurm signals the step while the server is still draining requests. The server ends the step itself.
        return lifeline.main(part_command(rank, command), end_on=(signal.SIGHUP,))
    finally:
        if created:
            remove_tree(private, ignore_errors=True)


if __name__ == "__main__":
    os.umask(0o077)
    exit_status = main(Path(sys.argv[1]), sys.argv[2:])
    sys.stderr.flush()
    os._exit(exit_status)
