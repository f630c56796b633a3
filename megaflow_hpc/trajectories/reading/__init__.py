"""Reading a campaign's trajectories, while it runs or from its file: rows, selections, batches, advantages.

A run directory or a ``trajectories.h5`` comes in; :func:`~megaflow_hpc.trajectories.reading.store.open_trajectories`
gives a store of lazy rows, numpy columns and packed batches, and ``follow`` yields rollouts as they become durable.
Journals and files implement one ``Source``. Users, exports, trainers and verbs call it; it writes nothing.
"""
