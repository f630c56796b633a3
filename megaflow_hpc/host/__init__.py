"""This machine, below everything else: processes, trees of files, Apptainer, mpiexec, addresses, leftovers of pods.

Functions take pids, paths and command lines, and return plain values. Everybody may import from here; the room imports
nothing of the package but its errors, and knows of no campaign, sandbox or engine. What is done here is done nowhere
else: who the descendants of a process are, killing by identity, removing a tree, finding a program.
"""
