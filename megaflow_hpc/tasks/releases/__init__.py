"""Builds Harbor tasks from real bugs, for ``tasks build``.

``bugs`` reads a file that lists bugs. ``sdists`` downloads and compares the source distributions of the buggy and the
fixed release, using ``fetch`` in a child process. ``tasks`` writes task directories, and ``image`` builds their shared
image. Only the CLI uses this package.
"""
