"""``python -m megaflow_hpc.model.server RUN``: one element of the engine array (:mod:`.server`)."""

import sys

from megaflow_hpc.model.server.server import main

if __name__ == "__main__":
    sys.exit(main())
