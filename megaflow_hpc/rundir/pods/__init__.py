"""Evaluate pod events: running rollouts, outcomes, and summaries that save readers most of an event file.

The inputs are events of one or more pods. The outputs are the places where rollouts run, counts, and
``RUN/events/<pod>.<start>.summary`` and ``.condensed``. Rank 0 writes those of its own pod. ``monitor``, and pods that
take over blocks, read them. This package imports only ``rundir``.
"""
