"""Everything about this machine: processes, file trees, Apptainer, mpiexec, addresses, cleanup after killed pods.

Functions take pids, paths and command lines, and return plain values. Every room may import this one. It imports only
the package's errors, and knows no campaigns, sandboxes or engines. Tasks such as finding a process's descendants,
killing by identity, removing a tree or finding a program are implemented only here.
"""
