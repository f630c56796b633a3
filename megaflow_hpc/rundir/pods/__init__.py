"""What the events of a pod amount to: which rollouts run, what ended and how, and a summary to read in their place.

In come events of one pod or of many; out come places, counts and ``RUN/events/<pod>.<start>.summary``. Rank 0 writes
its own pod's summary; ``monitor`` and the pod that takes blocks over read them. It calls ``rundir`` alone.
"""
