"""Rank 0 of a pod: claims blocks, starts their rollouts on the workers, and stores the results.

:mod:`~megaflow_hpc.pod.master.loop` makes the decisions and never waits for a disk. Only
:class:`~megaflow_hpc.pod.master.run_io.RunIoThread` accesses the run directory. The rank's entry point calls
:func:`~megaflow_hpc.pod.master.assembly.lead`. Benchmarks and tests build a ``Master`` directly from a
:class:`~megaflow_hpc.pod.master.pod.Pod`.
"""
