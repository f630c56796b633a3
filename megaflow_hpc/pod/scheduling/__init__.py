"""Decides which rollout starts where and when, and what happens when a rollout ends.

This subpackage contains the queue, the worker slots, the failure causes, the groups and the estimates. It is pure: work
and events come in, decisions go out. It uses no clock, no files and no messages. Rank 0
(:mod:`megaflow_hpc.pod.master`) calls it.
"""
