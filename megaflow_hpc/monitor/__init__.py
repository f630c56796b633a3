"""The state of a campaign, read from its run directory: ``status``, ``evaluation`` of rewards, ``usage`` of cores.

The input is event files, endpoint files, flags and answers from Slurm; the output is dictionaries that the CLI prints.
Nothing here queries Slurm, and only ``live`` writes, to ask pods for details. The CLI and ``campaign`` use this
package.
"""
