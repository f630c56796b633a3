"""Harbor tasks from real bugs, for ``tasks build``: a file of bugs comes in (``tasks``), source distributions of the
buggy and the fixed release are fetched and compared (``sdists``, by ``fetch`` in a child process), and task
directories and the image that they share (``image``) go out. Only the command line calls it.
"""
