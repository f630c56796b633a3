"""A pod: one MPI world. Rank 0 (:mod:`megaflow_hpc.pod.master`) claims blocks, schedules rollouts
(:mod:`megaflow_hpc.pod.scheduling`) and writes the journal; the other ranks run them (:mod:`megaflow_hpc.pod.rollout`).
``python -m megaflow_hpc.pod RUN`` is what ``srun`` and ``mpiexec`` start. Each worker rank is two processes: the rank
itself, which only moves messages between MPI and a socket, and its *runner*, started before MPI is, which owns gateway,
agents and sandboxes. If one ends, so does the other; nothing of MPI is inherited by anything that runs in a sandbox.
"""
