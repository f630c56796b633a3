"""Rank 0 of a pod. Claimed blocks come in, ``start`` messages for workers go out, and what comes back is stored.

:mod:`~megaflow_hpc.pod.master.loop` decides and never waits for a disk. Only
:class:`~megaflow_hpc.pod.master.run_io.RunIoThread` touches the run directory.
:func:`~megaflow_hpc.pod.master.assembly.lead` is called by the rank's entry point. Benchmarks and tests make a
``Master`` of a :class:`~megaflow_hpc.pod.master.pod.Pod`.
"""
