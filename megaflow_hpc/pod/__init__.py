"""A pod: one MPI world. ``srun`` and ``mpiexec`` start ``python -m megaflow_hpc.pod RUN``.

Rank 0 (:mod:`megaflow_hpc.pod.master`) claims blocks, schedules rollouts (:mod:`megaflow_hpc.pod.scheduling`) and
writes the journal. The other ranks run the rollouts (:mod:`megaflow_hpc.pod.rollout`). Each worker rank is two
processes: the rank itself, which only moves messages between MPI and a socket, and its *runner*, which owns gateway,
agents and sandboxes. The runner starts before MPI is initialised, so nothing in a sandbox inherits anything of MPI. If
one of the two processes ends, so does the other.
"""
