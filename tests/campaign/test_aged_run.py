"""A run of three pods after 200 starts of each: numbers are right, and a look costs what it cost after eight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc.campaign.edits import lost_journals
from megaflow_hpc.campaign.overview import glances
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.names import latest
from megaflow_hpc.report.cost import _of_reports
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.event_reader import list_pods
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import gather, open_trajectories
from tests.bench import aged
from tests.support.operations import counted

PODS, EARLY, STARTS = 3, 8, 200


class Recorded(aged.Aged):
    """Keeps every start, to compare what it did with what files say."""

    def start(self) -> list[aged.Start]:
        started = super().start()
        self.__dict__.setdefault("all", []).extend(started)
        return started

    @property
    def stored(self) -> int:
        return sum(start.stored for start in self.__dict__["all"])

    @property
    def core_s(self) -> float:
        return sum(start.core_s for start in self.__dict__["all"])


def looks(run: RunDir) -> dict[str, Callable[[], object]]:
    """Returns what a user or a program looks at, each in a new process."""
    return {
        "status": lambda: Run(run).status(),
        "list": lambda: glances([run.path]),
        "jobs": lambda: Run(run).job_ids("pods"),
        "budget": lambda: CampaignBudget(run, {"core_hours": 1.0}).exceeded(Ledger(run).accounts()),
        "cost": lambda: _of_reports(run),
        "unstarted": lambda: Run(run).status()["unstarted"],
    }


def costs(run: RunDir) -> dict[str, int]:
    """Returns the file system operations of each look."""
    found = {}
    for name, look in looks(run).items():
        with counted(run.path, whole=True) as operations:
            look()
        found[name] = operations.total()
    return found


def others(run: RunDir) -> int:
    """Returns the number of files that are not results, blocks or histories of open blocks."""
    sizes = {top: count for top, (count, _) in aged.files_of(run).items()}
    done, claims = Ledger(run).done(), list((run.ledger / "claims").iterdir())
    sizes["ledger/claims"] = sum(path.name[0] == "." or int(path.name[:6]) not in done for path in claims)
    return sum(count for top, count in sizes.items() if top not in ("journal", "tasks", "ledger/done", "partial"))


def check_numbers(world: Recorded) -> None:
    """Compares status, list, limits and costs with what the starts did."""
    run, ledger, starts = world.run, Ledger(world.run), len(world.__dict__["all"])
    facts = ledger.accounts().values()
    assert sum(each["starts"] for each in facts) == starts
    assert sum(each["stored"] for each in facts) == world.stored, "also what killed starts stored last"
    assert sum(each["core_s"] for each in facts) == pytest.approx(world.core_s)
    status, (glance,) = Run(run).status(), glances([run.path])
    assert status["rollouts"]["completed"] == glance.done == world.stored
    assert sum(row["stored"] for row in status["pods"]) == world.stored
    assert sum(row["starts"] for row in status["pods"]) == starts
    arrays = sorted({start.name.partition("_")[0] for start in world.__dict__["all"]})
    assert Run(run).job_ids("pods") == arrays == sorted({array for each in facts for array in each["arrays"]})
    used_h = world.core_s / 3600
    for limit, exceeded in ((used_h - 0.01, True), (used_h + 0.01, False)):
        assert bool(CampaignBudget(run, {"core_hours": limit}).exceeded(ledger.accounts())) is exceeded
    assert _of_reports(run).core_hours == pytest.approx(used_h, rel=1e-3)
    assert lost_journals(run, ledger) == []


@pytest.mark.slow
def test_numbers_and_costs_after_200_starts_are_those_after_eight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aged.packs, "LISTING_AGE_S", 0.0)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # no machine loses its power here
    monkeypatch.setattr(aged, "KILLED", 0.1)
    world = Recorded(RunDir(tmp_path / "run"), PODS, STARTS // 24 + 1, 1)
    world.create()
    world.add_day(0)
    early: dict[str, int] = {}
    files = 0
    for number in range(STARTS):
        if number % 24 == 0:
            world.add_day(number // 24 + 1)
        world.walltime(number + 1)
        if number + 1 == EARLY:
            check_numbers(world)
            early, files = costs(world.run), others(world.run)
    check_numbers(world)
    late, late_files = costs(world.run), others(world.run)
    state = Run(world.run).status()["state"]
    assert state == glances([world.run.path])[0].state
    assert state in ("unknown", "stopped"), "there is no Slurm, or it does not have these jobs"
    print(f"operations after {EARLY} starts {early}, after {STARTS} {late}; files {files}, {late_files}")
    for look, cost in late.items():
        assert cost <= early[look] * 1.2 + 5, look
    assert late_files <= files * 1.2 + 10
    private = [path.name for path in (world.run.ledger / "claims").iterdir() if path.name[0] == "."]
    assert len(private) <= 2 * PODS
    # All pods are lost while they hold blocks, and a later start before it has taken them back.
    for pod in world.start():
        pod.kill()
    world.starts += 1
    late_start = aged.Start(world, 0)
    late_start.kill()
    world.__dict__["all"].append(late_start)
    claims = [path.name for path in (world.run.ledger / "claims").iterdir() if path.name[0] != "."]
    held = latest(claims).keys() - Ledger(world.run).done()
    world.resubmit()
    heirs = [start for start in world.start() if start.block]
    taken = {start.block.claim.block for start in heirs if start.block}
    while (claimed := heirs[0].blocks.claim()) is not None:
        taken.add(claimed.claim.block)
    assert held <= taken, "they need not wait until leases expire"
    for pod in world.__dict__["all"][-PODS:]:
        pod.end(1.0)
    check_numbers(world)
    for number in range(2):
        world.walltime(STARTS + number)
    replaced = {pod: files for pod, files in list_pods(world.run.events).items() if pod.startswith("900_")}
    assert len(replaced) == PODS
    assert not any(files.starts for files in replaced.values()), "pods of a replaced array keep one file each"
    check_numbers(world)
    gather(world.run.path)
    with open_trajectories(world.run.path) as store:
        assert len(store) == world.stored
    world.run.trajectories.unlink()
    largest = max(world.run.journal.glob("*.pack"), key=lambda path: path.stat().st_size)
    lost = len(aged.packs.read_table(largest))
    largest.unlink()
    aged.packs._catalogs.clear()
    (warning,) = lost_journals(world.run, Ledger(world.run))
    assert f"journals of {lost} pods are missing" in warning
