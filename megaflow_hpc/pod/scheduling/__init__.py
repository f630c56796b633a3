"""What starts where and when, and what follows from how it ends: queue, slots, causes of failure, groups, estimates and
stragglers. Pure: work and events come in, decisions go out; no clock, no files, no messages. Rank 0
(:mod:`megaflow_hpc.pod.master`) calls it. Causes of failure are also named by whoever reports one.
"""
