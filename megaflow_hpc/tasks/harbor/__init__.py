"""Harbor task directories (schema up to 1.4).

``reader`` converts a directory to a task. The task's Harbor-specific fields are defined in ``data`` and stored in
``task.metadata["harbor"]``. ``verifier`` judges the agent's work in a container that the agent cannot have tampered
with, using ``artifacts`` and ``rewards``. ``ignore`` selects the files to upload. ``format`` is the entry point, which
also handles tasks with several steps. Other packages use :mod:`megaflow_hpc.tasks.formats`.
"""
