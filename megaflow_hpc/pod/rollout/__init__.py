"""Rollouts on a worker rank: the runner process, and single attempts.

A worker rank starts ``runner``. The runner receives rollouts as messages and runs each with ``rollout``: sandbox,
agent, verdict, trajectory. ``services`` contains the services that rollouts share. ``preemption`` saves rollouts when
an allocation ends. This subpackage uses neither MPI nor Slurm. It communicates only with the worker rank, over a
socket.
"""
