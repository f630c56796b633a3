"""Decides which rollout starts where and when: queue, slots, causes of failure, groups, estimates and stragglers.

Pure: work and events come in, decisions go out. There is no clock, no file and no message. Rank 0
(:mod:`megaflow_hpc.pod.master`) calls it. Every process that reports a failure names one of the causes.
"""
