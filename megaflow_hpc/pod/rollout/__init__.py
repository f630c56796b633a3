"""One rollout, and the process that runs many.

A worker rank starts ``runner``, which gets rollouts as messages and runs each with ``rollout``: sandbox, agent,
verdict, trajectory. ``services`` holds what the rollouts share. ``preemption`` suspends rollouts when an allocation
ends, and ``checkpoint`` is the form in which they are kept. The room knows neither MPI nor Slurm. Only the worker rank
talks to it, over a socket.
"""
