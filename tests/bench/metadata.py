"""Counts metadata operations on a run directory with strace: the load on the server of a parallel file system.

A real pod runs empty rollouts twice, few and many. The difference is the cost of rollouts, by way of their blocks. The
cost of time (the lease, and looking for work requests) is counted by repeating each call. Counted are system calls on
paths under the run directory that open, create, link, rename, remove or stat a file or directory, and that list a
directory. Calls on an open file are not counted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.mpi import find_mpiexec
from tests.bench.figures import Figure

FEW, MANY, TIMES = 1_000, 6_000, 20
SLOTS = 128
"""Of one pod, for the sum: the fewer, the more pods renew their leases per rollout."""
ROLLOUT_S = 60.0

_LINE = re.compile(r"^\S+\s+(?:\S+\s+)?(\w+)\((.*)$")


def figures(ranks: int, note: Callable[[str], None]) -> list[Figure]:
    """Operations per 1,000 rollouts, of a renewal and of a look for work, and their sum in a campaign."""
    from megaflow_hpc.ledger.lease import TIMES as LEASE
    from megaflow_hpc.pod.master.work_stealing import SELDOM_S

    strace = shutil.which("strace")
    if strace is None:
        raise SiteError("strace: not found; install it to count operations on metadata")
    note(f"one pod of {ranks} workers, {FEW} and {MANY} empty rollouts, under strace")
    few, many = (_pod(strace, count, ranks) for count in (FEW, MANY))
    per_1000 = (many - few) / (MANY - FEW) * 1000
    renewal, look = (_alone(strace, what) for what in ("renew", "hungry"))
    pod_s = 1000 * ROLLOUT_S / SLOTS
    whole = per_1000 + pod_s / LEASE.renew_s * renewal + pod_s / SELDOM_S * look
    return [
        Figure("metadata operations under RUN per 1,000 empty rollouts", "operations", round(per_1000, 1), 2),
        Figure("metadata operations of renewing a lease", "operations", renewal, TIMES),
        Figure("metadata operations of looking for hungry pods", "operations", look, TIMES),
        Figure(
            f"metadata operations under RUN per 1,000 rollouts of {ROLLOUT_S:.0f} s, {SLOTS} slots a pod, no engines",
            "operations",
            round(whole, 1),
            1,
            goal=50,
            better="lower",
        ),
    ]


def count(log: Path, root: Path) -> int:
    """Operations in a log of ``strace -f -y`` that are on ``root``."""
    found = 0
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match is None or str(root) not in line or "AT_EMPTY_PATH" in line:  # the last: of an open file
            continue
        empty = match[1] == "getdents64" and line.rstrip().endswith("= 0")  # the end of a listing: no new question
        found += not empty
    return found


def _strace(strace: str, log: Path) -> list[str]:
    return [strace, "-f", "-y", "-qq", "-e", "trace=%file,getdents64", "-e", "signal=none", "-o", str(log)]


def _pod(strace: str, rollouts: int, ranks: int) -> int:
    from tests.bench.dispatch_ranks import plan

    mpiexec = find_mpiexec()
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-") as folder:
        run, log = Path(folder) / "run", Path(folder) / "log"
        plan(run, rollouts)
        rank = [sys.executable, "-m", "tests.bench.dispatch_ranks", str(run), "256"]
        words = [mpiexec, "-n", "1", *_strace(strace, log), *rank, ":", "-n", str(ranks), *rank]
        done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
        if not (run / "ledger" / "finished").exists():
            raise SiteError(f"the pod of the benchmark ended with {done.returncode}: {done.stderr[-2000:]}")
        return count(log, run)


def _alone(strace: str, what: str) -> float:
    """Operations of one call of a ledger's method."""
    code = (
        "import sys; from megaflow_hpc.ledger import Ledger, PodIdentity\n"
        "from megaflow_hpc.rundir.layout import RunDir\n"
        "run = RunDir(sys.argv[1]); run.create(); ledger = Ledger(run, PodIdentity('a', '0')); ledger.create()\n"
        "ledger.register()\n"
        "for _ in range(int(sys.argv[2])): ledger.renew(force=True) if sys.argv[3] == 'renew' else "
        "ledger.work_requests()"
    )
    counted = []
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-") as folder:
        for times in (0, TIMES):
            run, log = Path(folder) / str(times), Path(folder) / f"{times}.log"
            words = [*_strace(strace, log), sys.executable, "-c", code, str(run), str(times), what]
            subprocess.run(words, check=True, timeout=300)
            counted.append(count(log, run))
    return (counted[1] - counted[0]) / TIMES
