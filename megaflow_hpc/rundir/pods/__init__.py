"""Evaluate the events of pods: running rollouts, outcomes, and summaries that save reading whole event files.

The inputs are events of one or many pods. The outputs are places, counts and ``RUN/events/<pod>.<start>.summary``. Rank
0 writes its own pod's summary. ``monitor`` and a pod that takes over blocks read the summaries. It calls only
``rundir``.
"""
