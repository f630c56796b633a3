"""Evaluates pod events. Tracks running rollouts and outcomes, and writes summaries so that readers can skip most
events.

The input is the events of one or more pods. The output is where each rollout runs, counts, and the files
``RUN/events/<pod>.<start>.summary`` and ``.condensed``. Rank 0 writes the files of its own pod. The ``monitor`` command
and pods that take over blocks read them. This package imports only ``rundir``.
"""
