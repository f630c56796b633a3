"""Makes Harbor tasks from real bugs, for ``tasks build``.

``tasks`` reads a file of bugs. ``sdists`` fetches and compares the source distributions of the buggy and the fixed
release, by ``fetch`` in a child process. The result is task directories and the image that they share (``image``). Only
the command line calls this package.
"""
