"""The gateway of a worker rank: one HTTP server on loopback that serves and records every rollout's model calls.

The runner opens and closes rollouts, and passes the list of engine servers to the gateway. An agent sends requests in
any of the dialects and gets responses in the same dialect. The gateway routes each call to a server, and retries it
elsewhere if that server fails. It records calls as token sequences with log-probabilities and weight versions. Closing
a rollout returns its ``Recording``. A recorded campaign can answer instead of engines. The gateway uses neither files
nor Slurm.
"""
