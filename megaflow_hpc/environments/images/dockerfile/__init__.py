"""Dockerfiles read, without Docker and without root. A path comes in; ``instructions``, ``reader`` and ``words`` make
stages of ``steps`` of it (``dockerfile``), and ``context`` lays out what is copied, within ``bounds``. What cannot be
built faithfully is refused with its line. Used by ``environments/builds``, which carries the steps out, by image
resolution, and by whoever reads tasks, for the directory, variables and user that a file ends on.
"""
