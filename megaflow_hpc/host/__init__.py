"""Utilities for this machine: processes, file trees, Apptainer, mpiexec, addresses, cleanup after killed pods.

Functions take pids, paths and command lines, and return plain values. Every package may import this package. It imports
only the package's errors, and does not depend on campaigns, sandboxes or engines. Operations such as listing
descendants, killing a process by identity, removing a tree or locating a program are implemented only in this package.
"""
