"""Runs a single rollout, and the process that runs many of them concurrently.

A worker rank starts ``runner``, which receives rollouts as messages and runs each with ``rollout``: sandbox, agent,
verdict, trajectory. ``services`` holds what the rollouts share. ``preemption`` suspends rollouts when an allocation
ends, and ``checkpoint`` defines the format in which they are saved. This subpackage knows neither MPI nor Slurm. Only
the worker rank communicates with it, over a socket.
"""
