"""Limits of a sandbox: memory, processors, processes, disk and time.

A :class:`~.watchdog.Watchdog` gets a spec and the first process of each container. It reports a
:class:`~.watchdog.Breach` and kills the command that caused it. ``usage``, ``descriptors`` and ``disk`` take the
measurements. ``cgroups`` lets the kernel enforce the same limits if the site delegates a cgroup. The provider owns the
only watchdog.
"""
