"""Who may call whom. The rooms of the house and their doors; what is not listed is a wall."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import megaflow_hpc

PACKAGE = Path(megaflow_hpc.__file__).parent
BASE = {"types", "errors", "rundir", "config", "process", "__init__"}
"""Modules every room may use."""

DOORS = {
    "types": set(),
    "errors": set(),
    "process": set(),
    "rundir": {"errors"},
    "config": {"types", "errors"},
    "__init__": {"campaign", "trajectories"},
    "__main__": {"cli"},
    "ledger": BASE,
    "slurm": BASE,
    "weights": BASE,
    "pool": BASE,
    "model": BASE | {"budget", "weights", "ledger", "pool"},
    "agents": BASE | {"environments"},
    "environments": BASE,
    "trajectories": BASE | {"ledger"},
    "training": BASE | {"trajectories", "ledger", "weights"},
    "monitor": BASE | {"trajectories"},
    "pod": BASE | {"budget", "pool", "ledger", "agents", "environments", "model", "trajectories"},
    "budget": BASE,
    "local": BASE,
    "provenance": BASE | {"environments", "model", "trajectories"},
    "plan": BASE | {"trajectories", "pool", "ledger", "agents", "environments", "provenance"},
    "fleet": BASE | {"ledger", "slurm"},
    "elastic": BASE | {"ledger", "fleet", "model", "monitor", "run"},
    "run": BASE | {"budget", "ledger", "slurm", "monitor", "plan", "local", "fleet", "elastic", "trajectories"},
    "campaign": BASE | {"slurm", "plan", "fleet", "run"},
    "integrations": BASE | {"environments"},
    "bench": None,
    "cli": None,
}
"""Room → rooms it may import; ``None``: any."""

HEAVY = {"mpi4py": {"pod/comm.py"}, "torch": {"model/tiny.py", "model/gemma.py", "training/dataset.py"}, "vllm": set()}
"""Libraries that only these files may import."""


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> set[str]:
    """Dotted names a file imports, those inside functions and under TYPE_CHECKING included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_no_room_reaches_through_a_wall() -> None:
    broken = []
    for path in FILES:
        room = room_of(path)
        allowed = DOORS[room]
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "megaflow_hpc" or allowed is None:
                continue
            other = parts[1] if len(parts) > 1 and parts[1] in DOORS else "__init__"
            if other != room and other not in allowed:
                broken.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not broken


def test_the_scheduler_and_all_it_is_made_of_know_only_types() -> None:
    pure = ("scheduler", "lanes", "work", "failures")
    known = ("megaflow_hpc.types", *(f"megaflow_hpc.pod.{name}" for name in pure))
    for module in pure:
        names = {n for n in imports(PACKAGE / "pod" / f"{module}.py") if n.startswith("megaflow_hpc")}
        assert all(name.startswith(known) for name in names), module


def test_heavy_libraries_stay_in_their_files() -> None:
    for path in FILES:
        relative = str(path.relative_to(PACKAGE))
        for library, allowed in HEAVY.items():
            used = any(name == library or name.startswith(f"{library}.") for name in imports(path))
            assert not used or relative in allowed, f"{relative} imports {library}"


def test_there_is_no_import_circle() -> None:
    modules = {".".join(["megaflow_hpc", *p.relative_to(PACKAGE).with_suffix("").parts]): p for p in FILES}
    graph = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        top: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.Import):
                top |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(modules)
                top |= submodules if len(submodules) == len(node.names) else submodules | {node.module}
        targets = {m for name in top for m in (name, f"{name}.__init__") if m in modules}
        graph[module] = targets - {module}
    # A package's own __init__ collects its modules; they do not import it back.
    tuple(TopologicalSorter(graph).static_order())


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
