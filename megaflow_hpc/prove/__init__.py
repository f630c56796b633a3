"""``megaflow-hpc prove``: tries on a real site what no test elsewhere can, and reports what failed with its remedy.

:mod:`.node` runs on compute nodes and tests their file system, network and sandboxes. :mod:`.trials` runs small
campaigns with planned accidents: a killed worker, the end of a walltime, a preemption. :mod:`.report` writes the
result.
"""
