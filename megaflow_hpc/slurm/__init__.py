"""Slurm: batch scripts, job arrays, submission through submitit, limits, accounting and site queries.

The inputs are a campaign file and a run directory. The outputs are script texts (``script`` is a pure function), job
ids, job states and limits. All output of Slurm commands is parsed in this package. The CLI and ``campaign`` call it.
"""
