"""Runs aider. ``launchers/agents.sh aider`` copies this file into the toolbox, next to aider and a Python for it."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Runs aider with the arguments of this process, and returns the exit status."""
    from aider.main import main as aider
    from aider.repomap import RepoMap

    # Inside the repository, as aider has it, it would be part of the task's patch.
    RepoMap.TAGS_CACHE_DIR = os.path.expanduser("~/.aider.tags.cache")
    return int(aider() or 0)


if __name__ == "__main__":
    sys.exit(main())
