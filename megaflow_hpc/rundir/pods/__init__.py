"""Evaluation of pod events: running rollouts, outcomes, and summaries that save readers most of an event file.

The inputs are events of one or more pods. The outputs are the ranks that run each rollout, counts, and the files
``RUN/events/<pod>.<start>.summary`` and ``.condensed``. Rank 0 writes the files of its own pod. ``monitor`` reads them,
and so do pods that take over blocks. This package imports only ``rundir``.
"""
