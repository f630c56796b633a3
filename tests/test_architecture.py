"""Which rooms may import which (DOORS), and budgets that only go down."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megaflow_hpc
from tests.rooms import circles_of_levels, imported, module_graph, modules, room_graph, room_of
from tests.support.budgets import counts
from tests.support.places import ROOT

PACKAGE = Path(megaflow_hpc.__file__).parent

BUDGETS = {
    "campaign keys": 179,  # with the seven sampling parameters, which users must know
    "environment variables": 29,
    "modules": 478,
    "public class names that exist twice": 0,
    "hard phrases in 1,000 docstrings": 5,
    "thousand tokens of agents": 20,
    "thousand tokens of at the top": 9,  # with BrowserGym's actions, in screen.py
    "thousand tokens of campaign": 39,
    "thousand tokens of cli": 50,
    "thousand tokens of config": 19,  # options of sbatch are checked like other keys
    "thousand tokens of environments": 98,
    "thousand tokens of host": 13,
    "thousand tokens of integrations": 5,
    "thousand tokens of ledger": 18,
    "thousand tokens of model": 76,  # with the starters of sub-agents in the background
    "thousand tokens of monitor": 11,
    "thousand tokens of pod": 36,
    "thousand tokens of prove": 8,
    "thousand tokens of report": 26,
    "thousand tokens of rundir": 30,  # with weights for another site
    "thousand tokens of slurm": 15,
    "thousand tokens of tasks": 58,  # with LiveCodeBench, NeMo Gym's rows, R2E-Gym, Aider's six languages
    "thousand tokens of training": 74,  # with the digests of imported modules, and the ranks of a user's trainer
    "thousand tokens of trajectories": 55,
}
"""Counts that only go down. A change that lowers a count lowers its number here. Raising one needs a reason."""

EVERYBODYS = {"types", "trajectory", "errors", "texts", "resources", "screen", "host"}
"""Rooms that every room may import. They import only one another."""

DOORS: dict[str, str] = {
    "__init__": "campaign trajectories",
    "__main__": "cli",
    "types": "",
    "trajectory": "",
    "errors": "",
    "texts": "",
    "resources": "",
    "screen": "",
    "recipes": "",
    "host": "",
    # The campaign file, and all files of a run directory.
    "config": "",
    "rundir": "config",
    "rundir/pods": "rundir",
    "ledger": "rundir",
    # Sandboxes and images do not depend on tasks, agents, models or run directories.
    "environments": "environments/sandbox",
    "environments/builds": "environments/images environments/images/dockerfile "
    "environments/images/layers "
    "environments/sandbox "
    "environments/sandbox/rootfs",
    "environments/images": "environments/images/dockerfile environments/images/layers environments/images/registry",
    "environments/images/layers": "environments/images",
    "environments/images/cache": "environments/images environments/images/layers",
    "environments/images/dockerfile": "environments/images/layers",
    "environments/images/registry": "",
    "environments/sandbox": "environments/images/cache environments/sandbox/commands environments/sandbox/limits "
    "environments/sandbox/rootfs",
    "environments/sandbox/commands": "environments/sandbox",
    "environments/services": "environments/sandbox",
    "environments/sandbox/limits": "environments/sandbox environments/sandbox/commands",
    "environments/sandbox/rootfs": "environments/images/cache environments/images/layers environments/sandbox",
    # Task formats are peers. They may use sandboxes, but no pod.
    "tasks": "config environments/images environments/images/dockerfile environments/sandbox "
    "environments/sandbox/rootfs environments/services",
    "tasks/harbor": "tasks config environments/images environments/images/dockerfile environments/sandbox "
    "environments/sandbox/rootfs",
    "tasks/releases": "tasks config environments/builds environments/images environments/images/dockerfile",
    "tasks/sets": "environments/sandbox tasks tasks/releases tasks/swebench",
    "tasks/swebench": "tasks environments/images/dockerfile environments/sandbox",
    # Gateway and engine server communicate only over HTTP and the endpoint files.
    "model": "",
    "model/engines": "model",
    "model/engines/scripted": "model",
    "model/gateway": "model model/gateway/dialects rundir",
    "model/gateway/dialects": "model model/gateway",
    "model/server": "model model/engines environments/sandbox environments/services rundir ledger",
    "agents": "tasks environments/sandbox",
    # Reading trajectories needs nothing that made them. A trainer reads trajectories.
    "trajectories": "trajectories/journal trajectories/reading trajectories/maintenance",
    "trajectories/hdf5": "rundir ledger",
    "trajectories/journal": "trajectories/hdf5 rundir ledger",
    "trajectories/reading": "trajectories/hdf5 trajectories/journal rundir ledger",
    "trajectories/maintenance": "trajectories/hdf5 trajectories/journal trajectories/reading rundir ledger",
    "trajectories/exports": "trajectories/hdf5 trajectories/journal trajectories/reading",
    "training": "training/algorithms agents config rundir ledger trajectories/journal trajectories/reading",
    "training/algorithms": "training config trajectories/reading",
    "training/trainer": "training training/algorithms agents config rundir",
    # Bridges to other trainers. Nothing here imports them.
    "training/bridges": "training training/trainer rundir trajectories/exports trajectories/reading",
    "integrations": "environments environments/builds environments/images environments/images/dockerfile",
    # Rank 0 uses the ledger and the journal; a runner uses agents, sandboxes and the gateway; neither uses Slurm.
    "pod": "pod/master rundir",
    "pod/scheduling": "",
    "pod/master": "pod pod/scheduling config rundir rundir/pods ledger trajectories/journal",
    "pod/rollout": "pod agents tasks config environments environments/sandbox environments/services model/gateway "
    "rundir trajectories trajectories/reading",
    # Only the rooms below may use Slurm.
    "slurm": "config rundir",
    "monitor": "config ledger rundir rundir/pods",
    "campaign/planning": "campaign slurm config rundir ledger agents tasks tasks/harbor environments/builds "
    "environments/images environments/sandbox model/engines training trajectories/reading",
    "campaign": "campaign/planning slurm monitor config rundir ledger agents tasks model/engines "
    "training trajectories trajectories/journal trajectories/reading",
    # A site is proved by its own jobs and by campaigns.
    "prove": "agents campaign environments/sandbox rundir slurm trajectories",
    "cli": "agents campaign config environments/images environments/sandbox prove rundir slurm",
    "cli/campaigns": "cli campaign campaign/planning recipes slurm",
    "report": "config ledger monitor rundir trajectories/hdf5 trajectories/journal trajectories/reading",
    "cli/runs": "cli cli/view campaign campaign/planning config environments ledger monitor pod/rollout report rundir "
    "tasks training training/algorithms trajectories trajectories/reading",
    "cli/view": "cli campaign monitor rundir trajectories",
    "cli/files": "cli rundir trajectories trajectories/exports trajectories/maintenance",
    "cli/making": "cli config tasks tasks/harbor tasks/releases tasks/sets tasks/swebench agents "
    "environments/builds environments/images environments/images/cache environments/sandbox",
}
"""Room → rooms from which it may import, in addition to :data:`EVERYBODYS`."""

HEAVY = {
    "mpi4py": {"pod/comm.py"},
    "torch": {
        "training/bridges/trl.py",
        "training/trainer/veomni.py",
        "training/dataset.py",
        "training/trainer/loop.py",
        "training/trainer/losses.py",
        "training/trainer/layers.py",
        "training/trainer/sharding.py",
        "training/trainer/metrics.py",
        "training/trainer/checkpoint.py",
        "training/trainer/columns.py",
        "training/trainer/vision.py",
        "training/trainer/probe.py",
        "training/trainer/recipes.py",
        "training/trainer/warm_start.py",
        "training/trainer/model.py",
        "training/trainer/optimizer.py",
    },
    "vllm": set(),
}
"""Heavy libraries, and the only files that may import them."""


FILES = sorted(modules().values())


def test_scheduling_knows_only_types_and_itself_and_has_no_clock_and_no_files() -> None:
    allowed = ("megaflow_hpc.types", "megaflow_hpc.pod.scheduling")
    outside = {"asyncio", "os", "pathlib", "random", "select", "socket", "subprocess", "sys", "threading", "time"}
    modules = list((PACKAGE / "pod" / "scheduling").glob("*.py"))
    assert len(modules) > 4
    for path in modules:
        names = imported(path)
        ours = {name for name in names if name.startswith("megaflow_hpc")}
        assert all(name.startswith(allowed) for name in ours), path.name
        assert not {name.partition(".")[0] for name in names} & outside, path.name


@pytest.mark.parametrize("page", ["architecture", "where"])
def test_every_hop_of_the_walks_in_the_docs_is_there(page: str) -> None:
    """Check the files and functions that the eight walks and the page "Where is what" name."""
    text = (ROOT / "docs" / "explanation" / f"{page}.md").read_text()
    rows = re.findall(r"^\| .* \| `([\w/]+\.py)` \| (.+) \|$", text, re.MULTILINE)
    assert len(rows) > 25
    missing = []
    for file, names in rows:
        tree = ast.parse((PACKAGE / file).read_text())
        here = {getattr(node, "name", "") for node in tree.body}
        here |= {f"{c.name}.{getattr(m, 'name', '')}" for c in tree.body if isinstance(c, ast.ClassDef) for m in c.body}
        missing += [f"{file}: {name}" for name in re.findall(r"`([\w.]+)`", names) if name not in here]
    assert missing == []


def test_heavy_libraries_stay_in_their_files() -> None:
    for path in FILES:
        relative = str(path.relative_to(PACKAGE))
        for library, allowed in HEAVY.items():
            used = any(name == library or name.startswith(f"{library}.") for name in imported(path))
            assert not used or relative in allowed, f"{relative} imports {library}"


def test_no_room_reaches_through_a_wall() -> None:
    broken = []
    for module, others in sorted(module_graph().items()):
        room = room_of(module)
        allowed = {room, *EVERYBODYS, *DOORS[room].split()}
        for other in sorted(others):
            if room_of(other) not in allowed:
                broken.append(f"{module} imports {other}: {room} has no door to {room_of(other)}")
    assert broken == []


def test_every_door_is_used() -> None:
    """Remove a door that no import uses."""
    rooms = room_graph(module_graph())
    assert rooms.keys() == DOORS.keys()
    unused = {room: set(doors.split()) - rooms[room] for room, doors in DOORS.items()}
    assert {room: doors for room, doors in unused.items() if doors} == {}


def test_rooms_say_what_they_are() -> None:
    documents = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in PACKAGE.rglob("__init__.py")}
    assert [str(path) for path, text in documents.items() if len(text) < 80] == []


def test_there_is_no_import_circle() -> None:
    """Check all levels, including deferred imports and those for types; ``python -m tests.rooms`` prints the same."""
    assert circles_of_levels(module_graph()) == []


def test_no_test_imports_a_test() -> None:
    """Code that several tests share is in tests/support, so each test can be read, run and moved alone."""
    tests = ROOT / "tests"
    wrong = re.compile(r"tests(\.\w+)*\.(test_\w+|conftest)(\.|$)")
    found = [f"{path.relative_to(tests)}: {name}" for path in tests.rglob("*.py") for name in imported(path)]
    assert [line for line in found if wrong.search(line.partition(": ")[2])] == []


def test_a_runner_comes_without_the_libraries_of_files() -> None:
    """Every worker rank has a runner; h5py and numpy would cost 30 MB each and double its start time."""
    code = "import sys, megaflow_hpc.pod.rollout.runner; print({'h5py', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_a_worker_rank_comes_without_what_rank_0_and_the_runner_need() -> None:
    """A worker rank moves messages; the models of the campaign file would dominate its start time and memory."""
    code = "import sys, megaflow_hpc.pod.__main__; print({'pydantic', 'aiohttp', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_rank_0_comes_without_the_libraries_of_files() -> None:
    code = "import sys, megaflow_hpc.pod.master.assembly; print({'h5py', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_an_engines_server_comes_without_the_models_of_the_campaign_file() -> None:
    """They would double its start time."""
    code = "import sys, megaflow_hpc.model.server.__main__; print({'pydantic', 'h5py', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_import_is_light() -> None:
    """Check modules that users import and the verb ``list``, which should answer at once."""
    code = (
        "import sys, megaflow_hpc; import megaflow_hpc.types, megaflow_hpc.rundir.layout;"
        "import megaflow_hpc.campaign.overview;"
        "bad = {'mpi4py', 'h5py', 'numpy', 'torch', 'pydantic', 'aiohttp', 'submitit'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_budget_is_exceeded() -> None:
    exceeded = {name: count for name, count in counts().items() if count > BUDGETS[name]}
    assert exceeded == {}, "python -m tests.support.budgets prints the counts"
