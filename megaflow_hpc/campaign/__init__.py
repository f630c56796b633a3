"""Campaigns from their file to their end: planned, submitted or run locally, scaled, followed, resumed and gathered.

The input is a validated campaign file (``facade``, ``plan``) or a run directory (``run``). The output is a run
directory, Slurm jobs (``jobs``, ``autoscaler``) or local processes (``local``), and a status. The CLI and users of the
Python interface call this package. Each pod runs one of its modules, ``autoscaler``, as a process of its own.
"""
