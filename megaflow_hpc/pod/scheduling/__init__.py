"""Decides which rollout starts where and when, and what follows from its end.

The room holds the queue, the slots, the causes of failures, the groups and the estimates. It is pure: work and events
come in, decisions go out, without a clock, files or messages. Rank 0 (:mod:`megaflow_hpc.pod.master`) calls it. Modules
that report a failure import the names of its causes.
"""
