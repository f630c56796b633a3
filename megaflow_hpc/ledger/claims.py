"""The ledger as one pod, or a reader, uses it: the rules carried out on the run directory.

::

    ledger/claims/<block>.<epoch>         the pod that has the block; from epoch 1 on also the seal of its predecessor,
                                          or that the predecessor itself says: done
    ledger/released/<block>.<epoch>       the pod of that epoch gave the block back: its seal, and what is left to run
    ledger/done/<block>.<epoch>.<n>       that claim ended the block: all is durable, but for n blocks handed off
    ledger/leases/<pod>.<start>           who the pod is, and a counter it renews every 30 s for all its blocks
    ledger/gone/<pod>.<start>             Slurm (or this host's process table) says that this pod is no more
    ledger/hungry/<pod>.<start>.<n>.<s>   the pod has s free slots and finds nothing to claim
    ledger/added/<token>.<n>              where the blocks go that somebody adds while the campaign runs
    ledger/open/<consumer>                somebody may add blocks: the campaign is not finished
    ledger/finished                       so many blocks are done, and those are all

:mod:`megaflow_hpc.ledger.rules` says what they mean, docs/explanation/ledger.md in whole sentences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.host.atomic import make_directory, write_atomic
from megaflow_hpc.ledger import names
from megaflow_hpc.ledger.calls import Clock, Names, Read
from megaflow_hpc.ledger.files import Files, Operation, boot_clock
from megaflow_hpc.ledger.lease import TIMES, PodIdentity, Times
from megaflow_hpc.ledger.report import Survey
from megaflow_hpc.ledger.rules import Claim, Outlook
from megaflow_hpc.ledger.survey import SurveyingRules
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import JOB_ID
from megaflow_hpc.types import Rollout

ROOMS = ("claims", "released", "done", "leases", "gone", "hungry")


@dataclass(frozen=True)
class View:
    """What one listing of the ledger shows."""

    epochs: dict[int, int]
    """Block → epoch of its latest claim."""
    done: set[int]


class Ledger:
    """The ledger of one run, for one pod or for a reader.

    Args:
        identity: the pod; a reader has none.
        clock: see :func:`~megaflow_hpc.ledger.files.boot_clock`.
        times: when a lease is renewed, fenced and expired.
        pods: how many pods may claim at the same time.
        files: carries calls out, in place of the default.
    """

    def __init__(
        self,
        run: RunDir,
        identity: PodIdentity | None = None,
        clock: Callable[[], float] = boot_clock,
        times: Times = TIMES,
        files: Files | None = None,
        pods: int = 1,
    ) -> None:
        self.run, self._marks = run, Marks(run)
        self.identity = identity
        self._files = files or Files(run, clock)
        self._rules = SurveyingRules(identity, times, pods) if identity else None

    def create(self) -> None:
        """Makes the directories; done once, when the run directory is made."""
        for room in ROOMS:
            make_directory(self.run.ledger / room)

    # --- leases ---

    def register(self) -> None:
        """Writes this pod's lease; call it before the first claim."""
        self.renew(force=True)

    def renew(self, force: bool = False) -> None:
        """Counts the lease up when it is due. Call often; it costs nothing in between."""
        self._files.carry_out(self._mine.renew(force))

    def show(self, progress: Mapping[str, Any], every_s: float) -> None:
        """Has the lease say how far the pod is, and be renewed this often, in seconds; never too seldom."""
        mine = self._mine
        mine.progress, mine.renew_s = dict(progress), min(every_s, mine.times.renew_s)

    @property
    def may_commit(self) -> bool:
        """False once the lease is so old that another pod may be about to take over."""
        return self._mine.open_at(self._files.answer(Clock()))

    @property
    def closes_at(self) -> float:
        """When :attr:`may_commit` becomes false unless the lease is renewed, in seconds of the ledger's clock."""
        return self._mine.closes_at

    def committed(self, commit: Callable[[], object]) -> bool:
        """Calls ``commit``; True if what it made durable counts: the fence was open before *and after* it."""
        return self._files.carry_out(self._mine.committed(commit))

    def leases(self) -> dict[str, dict[str, Any]]:
        """Returns identity and counter of every pod that ever registered, by ``<pod>.<start>``.

        One that names as its job what is none was written by no pod, and is left out.
        """
        found = {}
        for name in sorted(self._names(names.LEASES)):
            with contextlib.suppress(ValueError):  # being written; the next look reads it
                lease = self._files.answer(Read(f"{names.LEASES}/{name}"))
                job = lease.get("job_id") or "" if lease is not None else None
                if isinstance(job, str) and (not job or JOB_ID.fullmatch(job)):
                    found[name] = lease
        return found

    def mark_gone(self, pod_start: str) -> None:
        """Records that this start of a pod is no more; the caller has proof (Slurm, or the process table)."""
        write_atomic(self.run.path / names.GONE / pod_start, b"")

    def gone(self) -> set[str]:
        """Returns the ``<pod>.<start>`` that are marked as gone."""
        return set(self._names(names.GONE))

    # --- claims ---

    def claim(self, journal_length: Callable[[str], int]) -> Claim | None:
        """Claims one block that is free or whose holder is gone; ``None`` if there is none now.

        Args:
            journal_length: bytes of whole records in the journal of a ``<pod>.<start>``; seals a predecessor.
        """
        self._files.journal_length = journal_length
        return self._files.carry_out(self._mine.claim())

    def release(self, claim: Claim, sealed: int, left: Iterable[str]) -> None:
        """Gives a block back; does nothing once the fence is closed.

        Args:
            sealed: bytes of this pod's journal; everything committed for the block is within.
            left: ids of the rollouts that are not stored.
        """
        self._files.carry_out(self._mine.release(claim, sealed, left))

    def hand_off(self, claim: Claim, rollouts: Sequence[Rollout], token: str) -> bool:
        """Makes a new block of rollouts of a held block that were not started, for whoever claims it.

        Args:
            token: names this hand-off, unique in this pod; after an error repeat the call with the same one.

        Returns:
            False where the fence is closed: nothing was handed off.
        """
        return self._files.carry_out(self._mine.hand_off(claim, rollouts, token))

    def mark_done(self, claim: Claim) -> None:
        """Marks a block done: every rollout of it is durable. Writes the finished mark after the last block.

        Raises:
            LedgerError: the block was taken over; what this pod stored late does not count.
        """
        self._files.carry_out(self._mine.mark_done(claim))

    @property
    def seen(self) -> Outlook:
        """What the last :meth:`claim` has seen; it changes with the next."""
        return self._mine.seen

    @property
    def free(self) -> list[int]:
        """After :meth:`claim`: the free blocks that it saw and left. Others may have claimed some meanwhile."""
        return self._mine.free

    def prefer(self, blocks: Iterable[int]) -> None:
        """Claims these blocks before others from now on, where they are free."""
        self._mine.preferred = tuple(blocks)

    # --- requests for work ---

    def request_work(self, slots: int) -> None:
        """Tells other pods that this one has so many free slots and finds nothing to claim; 0 withdraws that."""
        self._files.carry_out(self._mine.sharing.request_work(slots))

    def work_requests(self) -> dict[str, int]:
        """Returns the slots that other pods ask to be filled, by request."""
        surveyed = self._mine.surveyed
        return self._files.carry_out(self._mine.sharing.work_requests(surveyed.requests if surveyed else None))

    # --- for all ---

    def survey(self) -> Operation[Survey]:
        """Returns the operation, to be carried out a part at a time, that finds out what may be claimed, and who asks.

        Pods whose lease has run out are marked as gone by it. When it has ended, :attr:`surveyed_leases` is new.
        """
        return Operation(self._files, self._mine.survey())

    @property
    def surveyed_leases(self) -> dict[str, dict[str, Any]]:
        """What each lease said at the last survey, by ``<pod>.<start>``."""
        return self._mine.leases

    @property
    def surveyed_live(self) -> set[str]:
        """Every ``<pod>.<start>`` that had neither ended nor was gone at the last survey."""
        return self._mine.live

    def follow(self, survey: Survey | None) -> None:
        """Relies on what another pod found out not long ago; ``None``: looks itself again."""
        self._mine.surveyed, self._mine.watched = survey, survey is not None

    # --- reading ---

    @property
    def finished(self) -> bool:
        """Whether every block is done."""
        return self._marks.finished

    def added(self) -> set[str]:
        """Returns the records of batches that were added to the plan, by name; they never change."""
        return {name for name in self._names(names.ADDED) if name.endswith(".0")}

    def rollouts_added(self, record: str) -> int:
        """Returns how many rollouts a record of :meth:`added` is about; 0 of one that was damaged."""
        with contextlib.suppress(ValueError):
            said = (self._files.answer(Read(f"{names.ADDED}/{record}")) or {}).get("rollouts")
            if isinstance(said, int) and 0 <= said < 1 << 53:
                return said
        return 0

    def view(self) -> View:
        """Lists which blocks are claimed, and which are done but for what they handed off."""
        return View(names.latest(self._names(names.CLAIMS)), set(names.done_blocks(self._names(names.DONE))))

    def seals(self) -> dict[tuple[int, int], tuple[str, int]]:
        """Returns (block, epoch) → (``<pod>.<start>`` of it, valid bytes of its journal), for superseded epochs.

        Raises:
            LedgerError: a claim that is listed cannot be read.
        """
        claimed = names.pairs(self._names(names.CLAIMS)) - names.ends(self._names(names.DONE))
        return self._seals(sorted((block, epoch) for block, epoch in claimed if epoch))

    def earlier(self, claim: Claim) -> list[tuple[int, str, int]]:
        """Returns the epochs of a block before this claim: number, ``<pod>.<start>``, bytes of its journal that count.

        Raises:
            LedgerError: a claim of them is not there.
        """
        found = self._seals((claim.block, epoch) for epoch in range(1, claim.epoch + 1))
        return [(epoch, owner, sealed) for (_, epoch), (owner, sealed) in found.items()]

    def _seals(self, claims: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[str, int]]:
        read = []
        for block, epoch in claims:
            content = self._files.answer(Read(names.claim_path(block, epoch)))
            if content is None:
                raise LedgerError(f"{names.claim_path(block, epoch)}: not there; was it removed?")
            read.append((block, epoch, content))
        return names.seals(read)

    def _names(self, room: str) -> tuple[str, ...]:
        return self._files.answer(Names(room))

    @property
    def _mine(self) -> SurveyingRules:
        if self._rules is None:
            raise LedgerError("this ledger was opened for reading; give it a pod identity to claim")
        return self._rules
