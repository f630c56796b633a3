"""Run each target on its known inputs, its seeds, and up to a hundred hostile inputs, always the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fuzz import servers
from tests.fuzz.inputs import explore
from tests.fuzz.targets import TARGETS

EXPLORE = """
import sys
from tests.fuzz.inputs import explore
from tests.fuzz.targets import TARGETS
target = TARGETS[sys.argv[1]]
explore(target, target.examples, derandomize=True)
"""


@pytest.fixture(autouse=True)
def stopped_servers() -> Iterator[None]:
    yield
    servers.stop_all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Possible nested set")  # pathspec compiles what a task wrote
@pytest.mark.timeout(240)  # an input may never end
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_bytes_are_refused_or_read(name: str) -> None:
    if name.startswith("hdf5"):  # forked readers have a memory limit, which a test process may exceed already
        done = subprocess.run([sys.executable, "-c", EXPLORE, name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-5000:]
    else:
        explore(TARGETS[name], TARGETS[name].examples, derandomize=True)
