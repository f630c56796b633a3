"""A pod: one MPI world. Rank 0 claims blocks, schedules rollouts and writes the journal; the other ranks run them.

``python -m megaflow_hpc.pod RUN`` is what ``srun`` and ``mpiexec`` start. Each worker rank is two processes: the rank
itself, which only moves messages between MPI and a socket, and its *runner* (:mod:`megaflow_hpc.pod.rollout.runner`),
started before MPI is, which owns gateway, agents and sandboxes. A crash of the one ends the other; nothing of MPI is
inherited by anything that runs in a sandbox.
"""
