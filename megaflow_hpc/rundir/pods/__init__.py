"""Evaluate pod events: running rollouts, outcomes, and summaries that save readers most of an event file.

The inputs are events of one or more pods. The outputs are the places where rollouts run, counts, and
``RUN/events/<pod>.<start>.summary``. Rank 0 writes its own pod's summary. ``monitor``, and pods that take over blocks,
read the summaries. This package imports only ``rundir``.
"""
