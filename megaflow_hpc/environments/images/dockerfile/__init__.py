"""Parses Dockerfiles, without Docker and without root.

``dockerfile`` and ``words`` parse a file into stages of ``steps``. ``context`` copies files of the build context within
limits. Lines that cannot be built as in Docker are rejected with their line number. ``environments/builds`` executes
the steps. Image resolution calls this package. Task readers call it too, for the final working directory, variables and
user of a file.
"""
