"""Sandboxes: containers over a read-only image, with a writable layer, resource limits and optional network access.

A :class:`~.provider.ApptainerProvider` starts an :class:`~.sandbox.ApptainerSandbox` from a
:class:`~.spec.SandboxSpec`. The sandbox runs commands, copies files and takes snapshots. ``commands`` runs the commands
in the container, ``limits`` enforces the limits of the spec, and ``rootfs`` builds the root file system. Rollouts,
verifiers and the janitor import :mod:`megaflow_hpc.environments`, ``provider``, ``spec``, ``snapshot``, ``probe`` and
``scratch``.
"""
