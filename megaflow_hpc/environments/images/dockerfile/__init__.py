"""Reads Dockerfiles, without Docker and without root.

``reader`` and ``words`` turn a file into stages of ``steps`` (``dockerfile``). ``context`` copies files of the build
context, within bounds. Lines that cannot be built faithfully are refused, with their number. ``environments/builds``
carries the steps out. Image resolution calls this room, and so do readers of tasks, for a file's last directory,
variables and user.
"""
