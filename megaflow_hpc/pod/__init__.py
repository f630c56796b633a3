"""Pods: MPI worlds that run rollouts.

``srun`` or ``mpiexec`` starts the ranks of a pod as ``python -m megaflow_hpc.pod RUN``. Rank 0
(:mod:`megaflow_hpc.pod.master`) claims blocks of rollouts, schedules the rollouts (:mod:`megaflow_hpc.pod.scheduling`)
and writes the journal. The other ranks run the rollouts (:mod:`megaflow_hpc.pod.rollout`).

Each worker rank consists of two processes. The rank's own process only forwards messages between MPI and a socket. Its
child process, the *runner*, runs the gateway, the agents and the sandboxes. The runner starts before MPI is
initialised, so that sandboxes inherit no MPI state. When either process ends, the other ends too.
"""
