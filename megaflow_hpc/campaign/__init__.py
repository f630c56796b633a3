"""Campaigns from file to results: plan, submit or run locally, scale, follow, resume and gather.

The input is a validated campaign file (``facade``, ``plan``) or a run directory (``run``). The output is a run
directory, Slurm jobs (``jobs``, ``autoscaler``) or local processes (``local``), and a status. The CLI and users of the
Python API call this package. Each pod also runs ``autoscaler`` as a separate process.
"""
