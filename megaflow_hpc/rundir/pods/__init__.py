"""Evaluates pod events: running rollouts, outcomes, and summaries that spare readers most of an event file.

The inputs are events of one or more pods. The outputs are the ranks on which rollouts run, counts, and
``RUN/events/<pod>.<start>.summary`` and ``.condensed``. Rank 0 writes the files of its own pod. ``monitor``, and pods
that take over blocks, read them. This package imports only ``rundir``.
"""
