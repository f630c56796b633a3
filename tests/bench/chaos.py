"""One seed of chaos: a campaign of real sandboxes and a model service on a lab, faults at drawn instants, the check.

Each rollout works in its sandbox for some seconds (hashing, writing, two model calls through its gateway) and leaves
what its test expects. A *strike* counts as inside rollouts when such work was seen running, as a process in a sandbox,
at the instant of the kill. Afterwards every planned rollout must be in ``trajectories.h5``, rebuilt from the journals,
exactly once, and nothing of the run may be left: no process, no mount, no file outside its directory. The seed also
draws the way of submission: from Python, by hand with ``--export=NONE``, or from inside an allocation; and
whether the site has a WaitTime. In every tenth seed slurmctld is away for ten minutes; in every third the coordinator
is killed while it surveys a ledger with many old starts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import h5py

from megaflow_hpc.campaign.run import Run
from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.private import POD_DIRECTORY, sweep_directories, sweep_shared_memory
from megaflow_hpc.ledger import read_blocks
from tests.bench.chaos_campaign import WAYS, submit, write_campaign
from tests.bench.faults import AWAY_S, COORDINATOR, KINDS, Faults, current_lab, limit_requests
from tests.bench.figures import Figure, median
from tests.support.labs import Lab
from tests.support.processes import environment, processes
from tests.support.waiting import eventually

INSIDE = 0.8
"""Share of strikes that wait for work in sandboxes; the others may hit a start, an end or nothing."""
DEADLINE_S = 1200.0
"""A campaign that is not done by then is cancelled, and what it lacks is counted as lost."""
LONG_AWAY = 10
"""In each seed that this number divides, slurmctld goes away for :data:`LONG_AWAY_S`."""
LONG_AWAY_S = 600.0
AWAY = "slurmctld away"
SURVEYED = 3
"""In each seed that leaves 1 when divided by this number, the first fault is :data:`COORDINATOR`."""
WAIT_S = 15
"""WaitTime of the site in every second seed: after the first task has ended, srun would kill the others."""
LEAVE_S = 200.0
"""What jobs may take to leave: a world in which a rank dies as it starts ends after two minutes."""


@dataclass
class Strike:
    """One fault that was dealt out."""

    kind: str
    hit: str
    after_s: float
    """Since the campaign was submitted."""
    working: int
    """Rollouts seen at work in their sandboxes at that instant."""

    def __str__(self) -> str:
        return f"{self.after_s:6.1f} s  {self.kind}: {self.hit}; {self.working} rollouts at work"


@dataclass
class Verdict:
    """What is left of a campaign when all is over."""

    seed: int
    way: str = WAYS[0]
    wait_s: int = 0
    """The site's WaitTime."""
    strikes: list[Strike] = field(default_factory=list)
    planned: int = 0
    lost: list[str] = field(default_factory=list)
    double: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Stored, and not completed with reward 1."""
    left: list[str] = field(default_factory=list)
    resumed: int = 0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Nothing was lost, stored twice or left."""
        return not (self.lost or self.double or self.left)


def check(run: Run) -> tuple[int, list[str], list[str], list[str]]:
    """Planned rollouts, and the ids lost, doubled, and not solved: by plain h5py, from a file made anew."""
    planned = {rollout.id for block in read_blocks(run.dir) for rollout in block.rollouts}
    run.gather(rebuild=True)
    with h5py.File(run.dir.trajectories) as file:
        table = file["trajectories"]
        ids = [value.decode() for value in table["id"][:]]
        solved = {i for i, reward in zip(ids, table["reward"][:], strict=True) if reward == 1}
    counts = Counter(ids)
    double = [i for i, count in counts.items() if count > 1 or i not in planned]
    return len(planned), sorted(planned - set(ids)), sorted(double), sorted(set(ids) & planned - solved)


def at_work(mark: str) -> int:
    """Sandboxes in which a rollout's program runs now."""
    return sum(mark in words and Path(words[0]).name.startswith("python") for _, words in processes())


def remains(run: Run, scratch: Path, mark: str, since: float) -> list[str]:
    """What is left of a run outside its own directory."""
    found = []
    for pid, words in processes():
        variables = environment(pid) if pid != os.getpid() else {}
        if pid != os.getpid() and (str(run.path) in words or mark in words or variables.get("CHAOS") == mark):
            found.append(f"process {pid}: {' '.join(words)[:120]}")
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    found += [f"mount {line.split()[1]}" for line in mounts if str(scratch) in line]
    for owners in scratch.glob("*/owners/*"):
        found.append(f"scratch {owners}")
    found += [f"pod directory {path}" for path in scratch.glob(f"{POD_DIRECTORY}.*")]
    for path in Path("/dev/shm").glob("mpich*"):
        if path.stat().st_uid == os.getuid() and path.stat().st_mtime >= since:
            found.append(f"shared memory {path}")
    found += [f"endpoint {path}" for path in run.dir.endpoints.glob("*.json") if "failed" not in path.name]
    return found


def trial(
    seed: int,
    folder: Path,
    scratch: Path,
    image: Path,
    note: Callable[[str], None],
    tasks: int = 24,
    strikes: int = 4,
    kinds: Sequence[str] = KINDS,
) -> Verdict:
    """Runs one seed to its end.

    Args:
        folder: of this trial's own; it is removed when all is well.
        scratch: the nodes' scratch and TMPDIR; images stay in it from one trial to the next.

    Raises:
        SiteError: there is no lab.
    """
    draw, lab = random.Random(seed), current_lab()
    folder.mkdir(parents=True)
    scratch.mkdir(exist_ok=True)
    mark = f"chaos-{seed}-{secrets.token_hex(4)}"
    variables = {"CHAOS": mark, "TMPDIR": str(scratch), "MEGAFLOW_SCRATCH": str(scratch)}
    os.environ.update(variables)
    plan = draw.sample(kinds, min(strikes, len(kinds)))
    away_s = AWAY_S if seed % LONG_AWAY else LONG_AWAY_S
    if away_s == LONG_AWAY_S and plan and AWAY not in plan:
        plan[-1] = AWAY
    if seed % SURVEYED == 1 and plan:
        plan[0] = COORDINATOR
    verdict = Verdict(seed, draw.choice(WAYS), draw.choice((0, WAIT_S)))
    set_wait_time(lab, verdict.wait_s)
    since, began = time.time(), time.monotonic()
    jobs_variables = variables | {"PATH": f"{limit_requests(scratch)}:{os.environ['PATH']}"}
    run = submit(
        write_campaign(folder, image, tasks, mark, ranks=draw.choice((2, 4)), variables=jobs_variables), verdict.way
    )
    note(f"seed {seed}: submitted {verdict.way}, WaitTime {verdict.wait_s}")
    faults = Faults(lab, run, draw, away_s)
    try:
        for kind in plan:
            _await_moment(run, mark, draw)
            if run.ledger.finished:
                break
            working, after = at_work(mark), time.monotonic() - began
            try:
                hit = faults.strike(kind)
            except MegaflowError as error:  # the element left in the same moment
                note(f"seed {seed}: {kind}: {error}")
                continue
            if hit:
                verdict.strikes.append(Strike(kind, hit, after, working))
                note(f"seed {seed}: {verdict.strikes[-1]}")
        verdict.resumed = _finish(run, began + away_s)
    finally:
        faults.settle()
        _clear(run)
        set_wait_time(lab, 0)
    verdict.planned, verdict.lost, verdict.double, verdict.failed = check(run)
    verdict.left = _leave(run, scratch, mark, since)
    verdict.seconds = time.monotonic() - began
    if verdict.good:
        shutil.rmtree(folder)
    return verdict


def set_wait_time(lab: Lab, seconds: int) -> None:
    """Sets WaitTime in the lab's slurm.conf, until the lab starts anew."""
    lines = [line for line in lab.conf.read_text().splitlines() if not line.startswith("WaitTime=")]
    lab.conf.write_text("\n".join([*lines, f"WaitTime={seconds}"]) + "\n")
    lab.slurm("scontrol", "reconfigure")


def _await_moment(run: Run, mark: str, draw: random.Random) -> None:
    """Until rollouts work in their sandboxes, and a moment longer; now and then only for the moment."""
    inside, pause = draw.random() < INSIDE, draw.uniform(0, 4)
    if inside:
        eventually(lambda: at_work(mark) or run.ledger.finished or not run.pods_live(), 90)
    if not inside or at_work(mark) or run.ledger.finished:
        time.sleep(pause)


def _finish(run: Run, began: float) -> int:
    """Waits for the end; continues a campaign whose pods have all gone. Returns how often."""
    resumed = 0

    def finished() -> bool:
        nonlocal resumed
        if any(pod.unlaunched for pod in run.slurm_jobs.live_pods(5.0) or []):
            run.resume(launcher="slurm")  # releases it; Slurm holds an element that it puts where it runs still
        if not run.ledger.finished and run.slurm_jobs.live_pods(5.0) == []:
            run.resume(launcher="slurm")
            resumed += 1
        return run.ledger.finished

    eventually(finished, began + DEADLINE_S - time.monotonic(), every_s=0.5)
    return resumed


def _clear(run: Run) -> None:
    """Everything that Slurm has of the run leaves: by itself if it is finished, else cancelled."""
    if not run.ledger.finished:
        run.cancel()
    eventually(lambda: not run.slurm_jobs.live(1.0), LEAVE_S, every_s=0.5)


def _leave(run: Run, scratch: Path, mark: str, since: float) -> list[str]:
    """What remains after the janitor has passed, as it does before each pod."""
    from megaflow_hpc.environments.sandbox.scratch import sweep

    left: list[str] = []

    def clean() -> bool:
        nonlocal left
        left = remains(run, scratch, mark, since)
        if not left:
            return True
        for place in scratch.glob("megaflow-[0-9]*"):
            sweep(place)
        sweep_directories(scratch)
        sweep_shared_memory()
        return False

    eventually(clean, 90, every_s=1.0)
    return left


def measure(folder: Path, image: Path, note: Callable[[str], None], arguments: argparse.Namespace) -> list[Figure]:
    """Runs ``arguments.seeds`` campaigns of ``tasks`` rollouts and ``strikes`` faults, ``first`` the first seed.

    Raises:
        MegaflowError: something was lost, stored twice or left; what is left of it stays in ``folder``.
        SiteError: there is no lab.
    """
    verdicts: list[Verdict] = []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        note(f"seed {seed}: {time.strftime('%H:%M:%S')}")
        if done := logged(arguments.log).get(seed):
            note(f"seed {seed}: is in {arguments.log}")
            verdicts.append(done)
            continue
        own, scratch = folder / f"seed-{seed}", folder / "scratch"
        verdict = trial(seed, own, scratch, image, note, arguments.tasks, arguments.strikes)
        verdicts.append(verdict)
        if arguments.log:
            with open(arguments.log, "a") as file:
                print(json.dumps(asdict(verdict)), file=file)
        said = f"{verdict.planned} rollouts, {len(verdict.lost)} lost, {len(verdict.double)} double, "
        said += f"{len(verdict.failed)} not solved, {len(verdict.left)} things left, resumed {verdict.resumed} times"
        note(f"seed {seed}: {said}, {verdict.seconds:.0f} s")
        for line in [*verdict.lost, *verdict.double, *verdict.failed, *verdict.left]:
            note(f"seed {seed}:   {line}")
    sums = figures_of(verdicts)
    note("submitted: " + ", ".join(f"{way} {count}" for way, count in Counter(v.way for v in verdicts).items()))
    note("strikes by kind: " + ", ".join(f"{kind} {count}" for kind, count in sums["kinds"].items()))
    n, strikes = sums["rollouts"], sums["strikes"]
    figures = [
        Figure(f"rollouts lost, {len(verdicts)} seeds, {strikes} faults", "rollouts", sums["lost"], n, goal=0),
        Figure("rollouts stored twice", "rollouts", sums["double"], n, goal=0),
        Figure("rollouts stored as failed or unsolved", "rollouts", sums["failed"], n),
        Figure("processes, mounts and files left", "things", sums["left"], len(verdicts), goal=0),
        Figure(
            "faults inside running rollouts", "%", 100 * sums["inside"] / max(1, strikes), strikes, None, 50, "higher"
        ),
        median("seconds a campaign", "s", [verdict.seconds for verdict in verdicts]),
    ]
    if sums["lost"] or sums["double"] or sums["left"]:
        raise MegaflowError("\n".join(f"{f.name}: {f.value:g} {f.unit}" for f in figures) + f"\nsee {folder}")
    return figures


def logged(path: str | None) -> dict[int, Verdict]:
    """The verdicts in a log of earlier seeds."""
    lines = Path(path).read_text().splitlines() if path and os.path.exists(path) else []
    verdicts = [Verdict(**json.loads(line)) for line in lines]
    for verdict in verdicts:
        verdict.strikes = [Strike(**strike) for strike in verdict.strikes]  # type: ignore[arg-type]
    return {verdict.seed: verdict for verdict in verdicts}


def figures_of(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Sums over the verdicts, and the strikes by kind."""
    strikes = [strike for verdict in verdicts for strike in verdict.strikes]
    return {
        "lost": sum(len(verdict.lost) for verdict in verdicts),
        "double": sum(len(verdict.double) for verdict in verdicts),
        "failed": sum(len(verdict.failed) for verdict in verdicts),
        "left": sum(len(verdict.left) for verdict in verdicts),
        "rollouts": sum(verdict.planned for verdict in verdicts),
        "strikes": len(strikes),
        "inside": sum(strike.working > 0 for strike in strikes),
        "kinds": dict(Counter(strike.kind for strike in strikes)),
    }
