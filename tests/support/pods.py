"""The part of a pod that uses the run directory: ledger, journal, claimed blocks, I/O thread, and the loop's side."""

from __future__ import annotations

from collections.abc import Mapping

from megaflow_hpc.ledger import Ledger, PodIdentity
from megaflow_hpc.ledger.files import Files, boot_clock
from megaflow_hpc.ledger.tasks import PlannedTask
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlock, ClaimedBlocks
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.pod.master.run_io import Report, RunIo, RunIoThread
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.events import EventWriter
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.winners import StoredRollouts
from megaflow_hpc.trajectories.journal.writer import JournalWriter
from tests.support.ledgers import AnyTasks


class IoPod:
    """A registered pod whose I/O thread takes a turn when a test asks for it.

    Args:
        ahead: small blocks that are read before they are claimed.
        tasks: the campaign's tasks. Default: any task.
    """

    def __init__(
        self,
        run: RunDir,
        name: str = "a",
        *,
        files: Files | None = None,
        journal: JournalWriter | None = None,
        ahead: int = 0,
        tasks: Mapping[str, PlannedTask] | None = None,
    ) -> None:
        self.ledger = Ledger(run, PodIdentity(name, "0"), files=files)
        self.ledger.register()
        self.events = EventWriter(run.event_file(name, "0"))
        stored, tasks = StoredRollouts(run), AnyTasks() if tasks is None else tasks
        self.blocks = ClaimedBlocks(run, self.ledger, stored, tasks, ahead)
        self.journal = journal or JournalWriter(run.journal_file(name, "0"))
        endpoints, budget = Endpoints(run, {}), CampaignBudget(run, {})
        self.thread = RunIoThread(run, self.journal, self.ledger, self.blocks, self.events, endpoints, budget)
        self.io = RunIo(self.thread, files.clock if files else boot_clock)

    def turn(self) -> list[Report]:
        self.io.push()
        self.thread.turn()
        return list(self.io.collect())

    def claim(self) -> ClaimedBlock:
        claimed = self.blocks.claim()
        assert claimed is not None
        return claimed
