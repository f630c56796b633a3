"""Ranks that die or freeze inside a message, under real MPI over each transport, and a loop that hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.host.mpi import mpi_library
from megaflow_hpc.ledger import Ledger, PodIdentity
from megaflow_hpc.trajectories.journal.winners import index
from megaflow_hpc.types import Rollout
from tests.support import processes
from tests.support.dying_ranks import SHELL
from tests.support.waiting import until
from tests.support.world import HASTY, configure, events, launcher, prepare

SIZES = [1000, 100_000, 4_000_000]
"""Bytes: small messages are sent at once, large ones wait for the receiver."""
INTEL_MOST = 200_000
"""With AVX-512 under mpiexec it hangs from 400,000 on; by srun, and with other processors, from 4,000,000."""
WAYS = {
    "copied by the kernel": {"MPIR_CVAR_CH4_CMA_ENABLE": "1", "OMPI_MCA_smsc": "cma", "I_MPI_FABRICS": "shm"},
    "shared memory": {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "OMPI_MCA_smsc": "^cma", "I_MPI_FABRICS": "shm:ofi"},
    "network": {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "OMPI_MCA_btl": "tcp,self", "I_MPI_FABRICS": "ofi"},
}
"""Variables for MPICH (with UCX), Open MPI and Intel MPI. Each library ignores those of the others."""
ENDED = ("Socket closed", "OFI poll failed", "Job step aborted")
"""Messages of libraries that end all ranks when one of another host is lost. Then the pod is requeued."""


def is_mpich() -> bool:
    return mpi_library().startswith("MPICH")


def start(ranks: int, module: str, place: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of several ranks, of which any may die. Rank 0's end, or two minutes, end all."""
    command = [*launcher(ranks), "sh", "-c", SHELL, sys.executable, "-m", module, str(place), *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=os.environ | environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            until(lambda: (place / "over").exists() or process.poll() is not None, "rank 0 ends", 120)
            for file in place.rglob("*.pid"):  # srun waits for one that is frozen, too
                processes.kill(int(file.read_text()))
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_is_gone_inside_a_large_message_holds_up_nobody_else(tmp_path: Path, way: str, how: str) -> None:
    # In Intel MPI's shared memory nothing more comes from anyone behind a larger one: a pod then starts anew.
    sizes = [size for size in SIZES if size <= INTEL_MOST or not mpi_library().startswith("Intel")]
    done = start(len(sizes) + 2, "tests.support.dying_ranks", tmp_path, how, *map(str, sizes), **WAYS[way])
    if way == "network" and not is_mpich() and not (tmp_path / "report.json").exists():
        assert any(said in done.stderr for said in ENDED), done.stderr
        return
    assert (tmp_path / "report.json").exists(), done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    came = {int(rank): what for rank, what in report["came"].items()}
    assert came.pop(report["last"]) == sizes, "in the order in which they were sent"
    for rank, what in came.items():
        assert what in ([], ["left"], [sizes[rank - 1]], [sizes[rank - 1], "left"]), f"rank {rank}: whole or not at all"


def test_a_rank_that_sends_what_is_no_message_is_lost_and_nobody_else(tmp_path: Path) -> None:
    done = start(3, "tests.support.dying_ranks", tmp_path, "garble", "1000")
    assert (tmp_path / "report.json").exists(), done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["came"] == {"1": ["left"], "2": [1000]}


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.parametrize("way", WAYS)
def test_a_campaign_goes_on_without_a_worker_that_is_gone_inside_its_result(tmp_path: Path, way: str, how: str) -> None:
    if (way, how) == ("network", "killed") and mpi_library().startswith("Intel"):
        pytest.skip("rank 0 tries to connect to it for ever, and loses its lease (docs/limits.md, a lost worker)")
    tasks = [f"{how}_2000000", *(f"ok_{n}" for n in range(50))]
    run = prepare(tmp_path / "run", [Rollout(task, "p", 0, "a") for task in tasks], lost_s=8.0, hangs_s=20.0)
    done = start(3, "tests.support.world", run.path, **WAYS[way])
    ended = run.report / "state"
    whole = ended.exists() and (is_mpich() or ended.read_text() == "done")
    if not whole and (way == "network" or not is_mpich()):  # the loss may end rank 0, or the pod, too
        configure(run, start="1")
        for file in (ended, run.path / "over"):
            file.unlink(missing_ok=True)
        done = start(3, "tests.support.world", run.path, **WAYS[way])
    if way != "network":  # over which the message may have left before
        lost = [event["rank"] for event in events(run, "worker") if event["state"] == "lost"]
        assert lost == [1] or not is_mpich()
    assert (run.report / "state").exists(), done.stderr
    assert (run.report / "state").read_text() == "done"
    counted = Counter(entry.id for entry in index(run, Ledger(run).seals()).winners)
    assert counted == Counter(f"{task}/p/0" for task in tasks)


def test_a_pod_whose_loop_hangs_lets_others_take_over_and_ends(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", [Rollout("hangs_0", "p", 0, "a")], hangs=True)
    start(3, "tests.support.world", run.path)
    assert not (run.report / "state").exists()
    last = events(run, "pod")[-1]
    assert last["state"] == "lost"
    assert "loop has not turned" in last["why"]
    heir = Ledger(run, PodIdentity("heir", "0"), times=HASTY)
    heir.register()
    claims: list[Any] = []

    def takes_over() -> bool:
        heir.renew()
        claims.append(heir.claim(lambda owner: 0))
        return claims[-1] is not None

    until(takes_over, "the block is taken over", 60)
    assert (claims[-1].block, claims[-1].epoch) == (0, 1)
