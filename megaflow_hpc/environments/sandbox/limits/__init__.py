"""Limits of a sandbox: memory, processors, processes, disk and time.

A :class:`~.watchdog.Watchdog` gets a spec and the first process of each container. It reports a
:class:`~.watchdog.Breach` and kills the command that caused it. ``usage``, ``descriptors`` and ``disk`` measure.
``cgroups`` makes the kernel enforce the same limits if the site delegates a group. The provider owns the only watchdog.
"""
