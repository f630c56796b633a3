"""One sandbox: a container over a read-only image, with a writable layer, limits and a network of its choice.

A :class:`~.provider.ApptainerProvider` gets a :class:`~.spec.SandboxSpec` and hands out a running
:class:`~.sandbox.ApptainerSandbox`, which executes commands, takes and gives files, and can be snapshot. Within it
``commands`` runs commands in the container, ``limits`` holds it to its spec, ``rootfs`` makes its root of image and
layer. Rollouts, verifiers and the janitor come in by :mod:`megaflow_hpc.environments` and by ``provider``, ``spec``,
``snapshot``, ``probe`` and ``janitor``.
"""
