"""The gateway of a worker rank: one HTTP server on loopback that answers every rollout's model calls and records them.

The runner opens and closes rollouts at it and hands it the list of engine servers; an agent's request comes in, in any
of the dialects, and its answer goes out in the same. In between a call is routed to a server, tried elsewhere when that
server fails, and recorded as token sequences with log-probabilities and weight versions. Closing a rollout returns its
``Recording``. A recorded campaign may answer in place of the engines. Nothing here touches a file or Slurm.
"""
