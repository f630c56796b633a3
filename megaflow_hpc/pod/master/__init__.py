"""Rank 0 of a pod. In come the messages of ranks (:mod:`megaflow_hpc.pod.comm`) and the blocks of the ledger; out go
rollouts to ranks, and records to the journal. :class:`~megaflow_hpc.pod.master.loop.Master` decides and never waits for
a disk; :class:`~megaflow_hpc.pod.master.run_io_thread.RunIoThread` alone touches the run directory; between the two
there are only queues. The entry point of a rank calls :func:`~megaflow_hpc.pod.master.assembly.lead`; benchmarks and
tests make a ``Master`` of a :class:`~megaflow_hpc.pod.master.pod.Pod`.
"""
