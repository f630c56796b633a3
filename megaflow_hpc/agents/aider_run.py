"""Runs aider. ``launchers/agents.sh aider`` copies this file into the toolbox, next to aider and its Python
interpreter."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Runs aider with the arguments of this process, and returns the exit status."""
    from aider.main import main as aider
    from aider.repomap import RepoMap

    # By default, aider stores this cache in the repository, where it would become part of the task's patch.
    RepoMap.TAGS_CACHE_DIR = os.path.expanduser("~/.aider.tags.cache")
    return int(aider() or 0)


if __name__ == "__main__":
    sys.exit(main())
