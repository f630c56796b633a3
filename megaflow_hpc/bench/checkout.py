"""Parts of benchmarks that come with the sources alone: peers, faults and what drives a Slurm lab."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import megaflow_hpc
from megaflow_hpc.errors import ConfigError

ROOT = Path(megaflow_hpc.__file__).parents[1]


def from_checkout(module: str, option: str) -> Any:
    """Imports ``tests.bench.<module>`` of the checkout that this package is run in.

    Args:
        option: what the user asked for, as the error names it.

    Raises:
        ConfigError: the package is installed without its sources.
    """
    if not (ROOT / "tests" / "bench" / f"{module}.py").exists():
        raise ConfigError(
            f"{option}: needs the sources, and {ROOT} is no checkout of them; clone the repository, "
            "pip install -e '.[bench]' there, and run the benchmark from it"
        )
    if sys.path[0] != str(ROOT):
        sys.path.insert(0, str(ROOT))  # before any other package that calls itself tests
    return importlib.import_module(f"tests.bench.{module}")
