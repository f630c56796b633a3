"""The gateway of a worker rank: one HTTP server on loopback that answers every rollout's model calls and records them.

The runner opens and closes rollouts, and passes on the list of engine servers. An agent sends requests in any of the
dialects and gets answers in the same dialect. The gateway routes each call to a server, tries it elsewhere if that
server fails, and records it as token sequences with log-probabilities and weight versions. Closing a rollout returns
its ``Recording``. A recorded campaign may answer instead of the engines. The gateway uses no files and no Slurm.
"""
