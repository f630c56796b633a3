"""Decides which rollout starts where and when, and what follows when a rollout ends.

This subpackage holds the queue, the slots, the failure causes, the groups and the estimates. It is pure: work and
events come in, decisions go out, without a clock, files or messages. Rank 0 (:mod:`megaflow_hpc.pod.master`) calls it.
Modules that report a failure import the cause names from here.
"""
