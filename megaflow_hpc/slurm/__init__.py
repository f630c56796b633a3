"""Slurm: batch scripts, job arrays, submission through submitit, limits, accounting and site queries.

From a campaign file and a run directory, this package produces batch scripts, job ids, job states and limits.
``script`` renders the scripts with a pure function. All output of Slurm commands is parsed here. The CLI and
``campaign`` call this package.
"""
