"""The state of a campaign, read from its run directory: ``status``, ``evaluation`` of rewards, ``usage`` of cores.

In come event files, endpoint files and marks, and Slurm's answers where a caller has them; out come dictionaries that
the CLI prints. Nothing here asks Slurm or writes a file. The CLI and ``campaign`` call it.
"""
