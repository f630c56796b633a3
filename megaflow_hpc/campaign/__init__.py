"""Campaigns from their file to their end: planned, queued or started here, scaled, followed, resumed and gathered.

In comes a validated campaign file (``facade``, ``plan``) or a run directory (``run``); out come a run directory, jobs
on Slurm (``jobs``, ``autoscaler``) or local processes (``local``), and a status. The CLI and users of the Python
interface call this room; pods run one of its modules, ``autoscaler``, beside them.
"""
