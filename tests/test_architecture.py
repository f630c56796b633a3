"""Who may call whom. The rooms of the house and their doors; what is not listed is a wall."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import megaflow_hpc
from tests.rooms import circles_of_levels, imported, module_graph
from tests.support.places import ROOT

PACKAGE = Path(megaflow_hpc.__file__).parent

HEAVY = {"mpi4py": {"pod/comm.py"}, "torch": {"training/dataset.py"}, "vllm": set()}
"""Libraries that only these files may import."""


FILES = sorted(PACKAGE.rglob("*.py"))


def test_scheduling_knows_only_types_and_itself_and_has_no_clock_and_no_files() -> None:
    """But for the simulation, which deals blocks as the ledger does and draws numbers."""
    allowed = ("megaflow_hpc.types", "megaflow_hpc.pod.scheduling")
    outside = {"asyncio", "os", "pathlib", "random", "select", "socket", "subprocess", "sys", "threading", "time"}
    modules = [path for path in (PACKAGE / "pod" / "scheduling").glob("*.py") if path.name != "simulation.py"]
    assert len(modules) > 5
    for path in modules:
        names = imported(path)
        ours = {name for name in names if name.startswith("megaflow_hpc")}
        assert all(name.startswith(allowed) for name in ours), path.name
        assert not {name.partition(".")[0] for name in names} & outside, path.name


def test_heavy_libraries_stay_in_their_files() -> None:
    for path in FILES:
        relative = str(path.relative_to(PACKAGE))
        for library, allowed in HEAVY.items():
            used = any(name == library or name.startswith(f"{library}.") for name in imported(path))
            assert not used or relative in allowed, f"{relative} imports {library}"


KNOWN = ("megaflow_hpc: environments → tasks → environments",)


def test_there_is_no_import_circle() -> None:
    """On no level, deferred imports and those for types included; ``python -m tests.rooms`` prints the same."""
    assert [line for line in circles_of_levels(module_graph()) if not line.startswith(KNOWN)] == []


def test_no_test_imports_a_test() -> None:
    """What several tests share lies in tests/support, so that any of them can be read, run and moved by itself."""
    tests = ROOT / "tests"
    wrong = re.compile(r"tests(\.\w+)*\.(test_\w+|conftest)(\.|$)")
    found = [f"{path.relative_to(tests)}: {name}" for path in tests.rglob("*.py") for name in imported(path)]
    assert [line for line in found if wrong.search(line.partition(": ")[2])] == []


def test_a_runner_comes_without_the_libraries_of_files() -> None:
    """One stands on every worker rank: h5py and numpy would be 30 MB of each, and half of its start."""
    code = "import sys, megaflow_hpc.pod.rollout.runner; print({'h5py', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_import_is_light() -> None:
    code = (
        "import sys, megaflow_hpc; import megaflow_hpc.types, megaflow_hpc.rundir.layout;"
        "bad = {'mpi4py', 'h5py', 'numpy', 'torch', 'pydantic', 'aiohttp', 'submitit'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
