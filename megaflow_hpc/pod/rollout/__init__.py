"""Rollouts on a worker rank: the runner process and the attempts that it runs.

A worker rank starts ``runner``. The runner receives rollouts as messages and runs each one through ``rollout``, which
produces a trajectory: sandbox, agent, verdict. ``services`` contains the services that rollouts share. ``preemption``
saves rollouts when an allocation ends. This subpackage uses neither MPI nor Slurm, and communicates only with the
worker rank, over a socket.
"""
