"""An engine over several nodes of its server's allocation (``model.nodes``): one step, a part of the engine on each.

::

    server ── lifeline ── srun ─┬─ first node: lifeline ── engine --node-rank 0, listens on the server's socket
                                └─ node k:     lifeline ── engine --node-rank k --headless

The first node is the server's own, so its proxy reaches the engine's Unix socket as that of any other. Each part hangs
on the step's standard input: end-of-file there, however the server ended, ends all of them, and the end of one part
ends the step. What ``srun`` starts on each node is :mod:`.node_part`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.model.engines.launch import Launch


def spread(launch: Launch, nodes: int, private: Path, environ: Mapping[str, str] = os.environ) -> Launch:
    """The same engine as a step of ``nodes`` tasks, one on each node of the allocation.

    Raises:
        ConfigError: This is not an allocation of so many nodes.
    """
    given = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 0)
    if given < nodes:
        raise ConfigError(
            f"model.nodes: {nodes}: this server runs on {given or 'no'} nodes of Slurm; submit the campaign there, or "
            f"by hand: sbatch --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 …"
        )
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none", "--overlap"]
    words += ["--kill-on-bad-exit=1", "--input=all", "--export=ALL"]
    if environ.get("SLURM_CPUS_PER_TASK"):  # sbatch's own is not handed down to steps
        words.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    return replace(
        launch,
        command=[*words, sys.executable, "-m", "megaflow_hpc.model.engines.node_part", str(private), *launch.command],
    )
