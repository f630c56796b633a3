"""Fuzzing: every reader of somebody else's bytes is given bytes that nobody would write.

The contract of each target: on **any** bytes it gives a value or raises one of the package's own errors
(:mod:`megaflow_hpc.errors`), within time and memory that the input's size explains. A server answers 4xx or closes the
connection, lives on, answers the next valid request and logs no traceback. What a writer writes, its reader gives back.

::

    python -m tests.security.fuzz --minutes 60                # all targets in turn; coverage-guided where atheris is
    python -m tests.security.fuzz dockerfile --minutes 5      # one of them
    pytest tests/security/fuzz                                # a short run of each, the same every time; what was found

:mod:`.mutation` makes inputs of the targets' valid seeds; :mod:`.child` feeds them to one target in a process of its
own, under limits; :mod:`.watch` starts that process, sees it hang or die, and keeps what was found.
:mod:`.found` holds each input that was a fault once.
"""
