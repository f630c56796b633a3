"""What a sandbox may use, and that it does not use more: memory, processors, processes, disk and time.

A :class:`~.watchdog.Watchdog` gets a spec and the first process of each container; it reports a
:class:`~.watch.Breach` and kills who caused it. ``usage`` reads what is used, ``cgroups`` has the kernel hold the
same bounds where the site delegates a group. The provider owns the one watchdog; sandboxes register with it.
"""
