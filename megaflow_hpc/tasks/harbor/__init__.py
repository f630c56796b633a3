"""Harbor task directories (schema up to 1.4). ``reader`` turns a directory into a task, whose particulars are typed
in ``data`` and travel as ``task.metadata["harbor"]``; ``verifier`` judges what an agent left, where it cannot have
tampered, with ``artifacts`` and ``rewards``; ``steps``, ``healthcheck`` and ``solution`` do what a rollout needs
beside that. ``format`` is the door: everybody else goes through :mod:`megaflow_hpc.tasks.formats`.
"""
