"""``python -m megaflow_hpc``: equivalent to the ``megaflow-hpc`` command."""

import sys

from megaflow_hpc.cli import main

if __name__ == "__main__":
    sys.exit(main())
