"""Slurm: one pure script builder, submission through submitit, batched accounting, site discovery.

Called by ``cli`` and ``campaign`` only.
"""
