"""Runs the program beside a build that reads and writes what steps have made (:mod:`.tree`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megaflow_hpc.environments.builds import tree
from megaflow_hpc.environments.images.layers.blob import LayerFacts
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host import child
from megaflow_hpc.host.apptainer import last_line


async def run_tree(prefix: Sequence[str], *words: str, said: Any = None) -> str:
    """Runs one verb of the program, and returns what it printed; it ends with this task.

    Args:
        prefix: argv prefix of the namespaces it runs in.
        said: goes to its standard input as JSON.

    Raises:
        SiteError: with the last line of its errors.
    """
    stdin = b"" if said is None else json.dumps(said).encode()
    status, printed, errors = await child.run([*prefix, *child.argv_of(tree), *words], stdin)
    if status:
        raise SiteError(last_line(errors.decode("utf-8", "replace")))
    return printed.decode()


def facts_of(printed: str) -> LayerFacts:
    """Returns the facts of the layer that the program has written, as it printed them."""
    return LayerFacts(**json.loads(printed))
