"""The state of a campaign, read from its run directory: ``status``, ``evaluation`` of rewards, ``usage`` of cores.

Event files, endpoint files, marks and Slurm's answers come in. Dictionaries that the CLI prints come out. Nothing here
asks Slurm, and only ``live`` writes, to ask pods for details. The CLI and ``campaign`` call it.
"""
