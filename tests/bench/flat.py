"""How long one task a slot takes with few slots and with many, and how busy slots are, on a Slurm of one's own.

Rollouts sleep in real sandboxes, so that a small machine holds many of them and what is added is the orchestrator's:
starting sandboxes, verifying, storing. One pod of 32 slots runs 1, 8 and 32 tasks; the makespan is that of the
rollouts, from the first start to the last end, by what ``trajectories.h5`` says. Then every slot gets several tasks,
and is busy while a rollout of it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import yaml

from megaflow_hpc.campaign.facade import Campaign
from tests.bench.figures import Figure
from tests.support.harbor_tasks import write_solved_task

SLOTS = 32
COUNTS = (1, 8, SLOTS)
SLEEP_S = 60
EACH = 4
"""Tasks a slot gets where the question is how busy it is."""
Note = Callable[[str], None]
Span = tuple[float, float]


def measure(folder: Path, image: Path, note: Note, arguments: argparse.Namespace) -> list[Figure]:
    """Makespans of few and of many sleeping rollouts, and how busy the slots are; it takes no arguments."""
    makespans = []
    for count in COUNTS:
        spans = _run(folder / f"flat-{count}", image, count)
        makespans.append(max(end for _, end in spans) - min(start for start, _ in spans))
        note(f"{count} rollouts of {SLEEP_S} s on as many slots: {makespans[-1]:.2f} s")
    spans = _run(folder / "busy", image, EACH * SLOTS)
    shared = busy(spans, SLOTS)
    note(f"{len(spans)} rollouts on {SLOTS} slots: {shared:.2%} busy until the last one was started")
    counts = ", ".join(map(str, COUNTS))
    name = f"longest over shortest makespan of {counts} tasks of {SLEEP_S} s on as many slots, on Slurm"
    return [
        Figure(name, "ratio", max(makespans) / min(makespans), len(COUNTS), goal=1.05),
        Figure(f"{SLOTS} slots busy while tasks remain, on Slurm", "%", 100 * shared, len(spans), None, 98, "higher"),
    ]


def busy(spans: Sequence[Span], slots: int) -> float:
    """Share of slots in which a rollout ran, from the first start to the last: then no task remained."""
    first, last = min(start for start, _ in spans), max(start for start, _ in spans)
    if last <= first:
        return 1.0
    ran = sum(min(end, last) - start for start, end in spans)
    return ran / (slots * (last - first))


def _run(folder: Path, image: Path, tasks: int) -> list[Span]:
    """(start, end) of each rollout, seconds UTC."""
    for number in range(tasks):
        write_solved_task(folder / "tasks", f"sleep{number:03d}", f"sleep {SLEEP_S}; echo 42 > answer")
    campaign = {
        "name": "flat",
        "tasks": "tasks/*",
        "agent": "oracle",
        "environment": {"network": "none", "images": {"base": str(image)}},
        "slurm": {"pods": {"partition": "cpu", "ranks_per_node": 2, "slots_per_rank": SLOTS, "mem": "4G", "time": 60}},
    }
    path = folder / "campaign.yaml"
    path.write_text(yaml.safe_dump(campaign))
    run = Campaign.from_yaml(path).submit()
    result = run.wait(timeout_s=3600)
    assert result["rollouts"]["completed"] == tasks, result["rollouts"]
    with h5py.File(run.dir.trajectories) as file:
        table = file["trajectories"]
        return list(zip(table["started_at"][:].tolist(), table["finished_at"][:].tolist(), strict=True))
