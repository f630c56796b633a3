"""Harbor task directories (schema up to 1.4).

``reader`` converts a directory to a task. Its Harbor-specific fields are defined in ``data`` and stored in
``task.metadata["harbor"]``. ``verifier`` judges the agent's work in a container that the agent cannot have tampered
with, using ``artifacts`` and ``rewards``. ``steps`` runs tasks with several steps, and ``ignore`` selects the files
that are uploaded. ``format`` is the entry point; other packages use :mod:`megaflow_hpc.tasks.formats`.
"""
