"""Slurm: batch scripts, arrays, submission through submitit, limits, accounting and what the site has.

In come a campaign file and a run directory; out come the text of scripts (``script``, a pure function), job ids, states
and limits. Whatever a Slurm command prints is parsed here. The CLI and ``campaign`` call this room.
"""
