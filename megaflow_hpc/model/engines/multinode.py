"""Runs an engine over several nodes of its server's allocation (``model.nodes``), as one job step with a task per node.

::

    server ── lifeline ── srun ─┬─ first node: lifeline ── engine --node-rank 0, listens on the server's socket
                                └─ node k:     lifeline ── engine --node-rank k --headless

The first node is the server's own, so its proxy reaches the engine's Unix socket as usual. Each part watches the step's
standard input: end-of-file there, however the server ended, ends all parts, and the end of one part ends the step.
``srun`` starts :mod:`.node_part` on each node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.model.engines.launch import Launch


def over_nodes(launch: Launch, nodes: int, private: Path, environ: Mapping[str, str] = os.environ) -> Launch:
    """Returns the same engine as a job step of ``nodes`` tasks, one per node.

    Raises:
        ConfigError: The allocation has fewer nodes.
    """
    given = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 0)
    if given < nodes:
        raise ConfigError(
            f"model.nodes: {nodes}: this server runs on {given or 'no'} nodes of Slurm; submit the campaign there, or "
            f"by hand: sbatch --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 …"
        )
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none", "--overlap"]
    srun += ["--kill-on-bad-exit=1", "--input=all", "--export=ALL"]
    if environ.get("SLURM_CPUS_PER_TASK"):  # sbatch's own is not handed down to steps
        srun.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    return replace(
        launch,
        command=[*srun, sys.executable, "-m", "megaflow_hpc.model.engines.node_part", str(private), *launch.command],
    )
