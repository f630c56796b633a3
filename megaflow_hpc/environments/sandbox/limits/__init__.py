"""Enforces a sandbox's limits on memory, processors, processes, disk and time.

A :class:`~.watchdog.Watchdog` gets a spec and the first process of each container. It reports a
:class:`~.watchdog.Breach` and kills the command that caused it. ``usage`` and ``disk`` take the measurements. Each
provider has one watchdog.
"""
