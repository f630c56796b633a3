"""State of a campaign, read from its run directory: ``status``, ``evaluation`` of rewards, ``usage`` of cores.

Input is event files, endpoint files, flags and answers from Slurm. Output is dictionaries that the CLI prints. No
module in this package queries Slurm. Only ``live`` writes files, to request details from pods. The CLI and
``campaign`` use this package.
"""
