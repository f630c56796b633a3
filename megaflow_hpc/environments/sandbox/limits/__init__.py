"""Limits of a sandbox: memory, processors, processes, disk and time.

A :class:`~.watchdog.Watchdog` gets a spec and the first process of each container. It reports a
:class:`~.watchdog.Breach` and kills the command that caused it. ``usage`` reads what is used. ``cgroups`` makes the
kernel hold the same bounds if the site delegates a group. The provider owns the only watchdog; sandboxes register.
"""
