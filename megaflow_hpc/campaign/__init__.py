"""Processes campaigns from file to results: plan, submit or run locally, scale, follow, resume and gather.

Input is a validated campaign file (``facade``, ``plan``) or a run directory (``run``). Output is a run directory, Slurm
jobs (``jobs``, ``autoscaler``) or local processes (``local``), and a status.

The CLI and users of the Python API call this package. Each pod runs ``autoscaler`` as a separate process.
"""
