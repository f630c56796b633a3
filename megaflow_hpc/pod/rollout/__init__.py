"""One rollout, and the process that runs many. A worker rank starts ``runner``, which gets rollouts as messages and
runs each by ``rollout``: sandbox, agent, verdict, trajectory. ``services`` is what they share, ``suspension`` keeps
those that an allocation's end cuts short in files of the form of ``partial``, ``recordings`` finds what replay agents
answer from. It knows neither MPI nor Slurm; only the worker rank talks to it, over a socket.
"""
