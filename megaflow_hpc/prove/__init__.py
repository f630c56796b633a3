"""``megaflow-hpc prove``: tests everything that depends on a real site, and reports each failure with a remedy.

:mod:`.node` runs on compute nodes and tests their file system, network and sandboxes. :mod:`.trials` runs small
campaigns with planned faults: a killed worker, the end of a walltime, a preemption. :mod:`.report` writes the
result.
"""
