"""Reads a campaign's trajectories, even while it is running: rows, selections, batches and advantages.

The input is a run directory or a ``trajectories.h5``.
:func:`~megaflow_hpc.trajectories.reading.store.open_trajectories` returns a store with lazy rows, numpy columns and
packed batches. ``follow`` yields rollouts as they become durable. Journals and files implement the same ``Source``
interface. Users, exports, trainers and CLI commands use this package. It never writes.
"""
