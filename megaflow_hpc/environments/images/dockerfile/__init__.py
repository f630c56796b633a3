"""Dockerfiles built by Apptainer, without Docker and without root. A path comes in; ``instructions``, ``reader`` and
``words`` make stages of ``steps`` of it (``dockerfile``), ``context`` lays out what is copied, and an Apptainer
definition goes out (``definition``). What cannot be built faithfully is refused with its line. Used by image
resolution, which builds, and by whoever reads tasks, for the directory, variables and user that a file ends on.
"""
