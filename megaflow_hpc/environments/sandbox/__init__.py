"""A sandbox: a container over a read-only image, with a writable layer, limits and a choice of network.

A :class:`~.provider.ApptainerProvider` takes a :class:`~.spec.SandboxSpec` and returns a running
:class:`~.sandbox.ApptainerSandbox`, which runs commands, copies files and takes snapshots. ``commands`` runs the
commands in the container, ``limits`` enforces the limits of the spec, and ``rootfs`` builds the root file system.
Rollouts, verifiers and the janitor import :mod:`megaflow_hpc.environments`, ``provider``, ``spec``, ``snapshot``,
``probe`` and ``scratch``.
"""
