"""The ledger, as one pod or a reader uses it: the rules carried out on the run directory.

::

    ledger/claims/<block>.<epoch>         the pod that has the block; from epoch 1 on also the seal of its predecessor,
                                          or the word *done* of the predecessor itself
    ledger/released/<block>.<epoch>       the pod of that epoch gave the block back: its seal, and what is left to run
    ledger/done/<block>.<epoch>.<n>       that claim ended the block: all is durable, except n blocks handed off
    ledger/leases/<pod>.<start>           the pod's identity, progress, and a counter that it renews for all its blocks
    ledger/gone/<pod>.<start>             Slurm (or this host's process table) says that this pod is gone
    ledger/hungry/<pod>.<start>.<n>.<s>   the pod has s free slots and finds nothing to claim
    ledger/added/<token>.<n>              places of the blocks that are added while the campaign runs
    ledger/open/<consumer>                the lease of a consumer, who may add blocks: the campaign is not finished
    ledger/finished                       n blocks are done, and those are all

:mod:`megaflow_hpc.ledger.rules` holds the rules, docs/explanation/ledger.md explains them.
"""

from __future__ import annotations

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
from megaflow_hpc.ledger.rules import Claim, LedgerRules, Outlook
from megaflow_hpc.ledger.survey import Surveyed, survey
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import JOB_ID
from megaflow_hpc.types import Rollout

DIRECTORIES = ("claims", "released", "done", "leases", "gone", "hungry")


@dataclass(frozen=True)
class LedgerView:
    """One listing of the ledger."""

    epochs: dict[int, int]
    """Block → epoch of its latest claim."""
    done: set[int]


class Ledger:
    """The ledger of one run, for one pod or for a reader.

    Args:
        identity: the pod. A reader has none.
        clock: see :func:`~megaflow_hpc.ledger.files.boot_clock`.
        times: when a lease is renewed, fenced and expired.
        files: carries calls out, in place of the default.
        pods: number of pods that may claim at the same time.
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
        self._pod_rules = LedgerRules(identity, times, pods) if identity else None

    def create(self) -> None:
        """Makes the directories. Called once, when the run directory is made."""
        for directory in DIRECTORIES:
            make_directory(self.run.ledger / directory)

    # --- leases ---

    def register(self) -> None:
        """Writes this pod's lease. Call it before the first claim."""
        self.renew(force=True)

    def renew(self, force: bool = False) -> None:
        """Renews the lease when that is due. Call it often; a call in between costs nothing."""
        self._files.carry_out(self._rules.renew(force))

    def show(self, progress: Mapping[str, Any], every_s: float) -> None:
        """Lets the lease show the pod's progress, and be renewed at least every ``every_s`` seconds."""
        rules = self._rules
        rules.progress = dict(progress)
        rules.renew_s = min(every_s, rules.times.renew_s)

    @property
    def may_commit(self) -> bool:
        """False once the lease is so old that another pod may be about to take over."""
        return self._rules.open_at(self._files.answer(Clock()))

    @property
    def closes_at(self) -> float:
        """When :attr:`may_commit` becomes false without a renewal, in seconds of the ledger's clock."""
        return self._rules.closes_at

    def committed(self, commit: Callable[[], object]) -> bool:
        """Calls ``commit``. True if what it made durable counts: the fence was open before *and after* it."""
        return self._files.carry_out(self._rules.committed(commit))

    def leases(self) -> dict[str, dict[str, Any]]:
        """Returns the lease of every pod that ever registered, by ``<pod>.<start>``.

        Leaves out a lease with an invalid job id: no pod wrote it.
        """
        leases = {}
        for name in sorted(self._names(names.LEASES)):
            content = self._read(f"{names.LEASES}/{name}")
            if content is not None:
                job = content.get("job_id") or ""
                if isinstance(job, str) and (not job or JOB_ID.fullmatch(job)):
                    leases[name] = content
        return leases

    def mark_gone(self, pod_start: str) -> None:
        """Records that this start of a pod is gone. The caller has proof (Slurm, or the process table)."""
        write_atomic(self.run.path / names.GONE / pod_start, b"")

    def gone(self) -> set[str]:
        """Returns the ``<pod>.<start>`` that are marked as gone."""
        return set(self._names(names.GONE))

    # --- claims ---

    def claim(self, journal_length: Callable[[str], int]) -> Claim | None:
        """Claims one block that is free or whose holder is gone. ``None`` if no block is available now.

        Args:
            journal_length: bytes of whole records in the journal of a ``<pod>.<start>``. Seals a predecessor.
        """
        self._files.journal_length = journal_length
        return self._files.carry_out(self._rules.claim())

    def release(self, claim: Claim, sealed: int, left: Iterable[str]) -> None:
        """Gives a block back. Does nothing once the fence is closed.

        Args:
            sealed: bytes of this pod's journal. Everything committed for the block is within.
            left: ids of the rollouts that are not stored.
        """
        self._files.carry_out(self._rules.release(claim, sealed, left))

    def hand_off(self, claim: Claim, rollouts: Sequence[Rollout], token: str) -> bool:
        """Makes a new block of rollouts of a held block that were not started. Any pod may claim it.

        Args:
            token: names this hand-off, unique in this pod. After an error repeat the call with the same token.

        Returns:
            False if the fence is closed: nothing was handed off.
        """
        return self._files.carry_out(self._rules.hand_off(claim, rollouts, token))

    def mark_done(self, claim: Claim) -> None:
        """Marks a block done: every rollout of it is durable. Writes the finished mark after the last block.

        Raises:
            LedgerError: the block was taken over. What this pod stored late does not count.
        """
        self._files.carry_out(self._rules.mark_done(claim))

    @property
    def seen(self) -> Outlook:
        """The state of the campaign, as the last :meth:`claim` has seen it."""
        return self._rules.seen

    @property
    def free(self) -> list[int]:
        """After :meth:`claim`: the free blocks that it saw and left. Other pods may have claimed some meanwhile."""
        return self._rules.free

    def prefer(self, blocks: Iterable[int]) -> None:
        """Makes :meth:`claim` try these blocks first, if they are free."""
        self._rules.preferred = tuple(blocks)

    # --- requests for work ---

    def request_work(self, slots: int) -> None:
        """Tells other pods that this pod has ``slots`` free slots and finds nothing to claim. 0 withdraws that."""
        self._files.carry_out(self._rules.hand_offs.request_work(slots))

    def work_requests(self) -> dict[str, int]:
        """Returns the slots that other pods ask to be filled, by request."""
        surveyed = self._rules.surveyed
        return self._files.carry_out(self._rules.hand_offs.work_requests(surveyed.requests if surveyed else None))

    # --- for all pods ---

    def survey(self) -> Operation[Surveyed]:
        """Returns the operation that finds out for all pods what may be claimed. It may be carried out in parts.

        It marks the pods whose lease has expired as gone.
        """
        return Operation(self._files, survey(self._rules))

    def follow(self, survey: Survey | None) -> None:
        """Relies on the survey of another pod. ``None``: this pod looks at the ledger itself again."""
        self._rules.surveyed = survey

    # --- reading ---

    @property
    def finished(self) -> bool:
        """Whether every block is done."""
        return self._marks.finished

    def added(self) -> set[str]:
        """Returns the names of the records of batches that were added to the plan. Records never change."""
        return {name for name in self._names(names.ADDED) if name.endswith(".0")}

    def rollouts_added(self, record: str) -> int:
        """Returns the number of rollouts in a record of :meth:`added`. 0 if the record is damaged."""
        content = self._read(f"{names.ADDED}/{record}") or {}
        rollouts = content.get("rollouts")
        return rollouts if isinstance(rollouts, int) and 0 <= rollouts < 1 << 53 else 0

    def view(self) -> LedgerView:
        """Lists which blocks are claimed, and which are done except for what was handed off."""
        return LedgerView(names.latest(self._names(names.CLAIMS)), set(names.done_blocks(self._names(names.DONE))))

    def seals(self) -> dict[tuple[int, int], tuple[str, int]]:
        """Returns (block, epoch) → (``<pod>.<start>`` of it, valid bytes of its journal), for superseded epochs.

        Raises:
            LedgerError: a claim is listed but cannot be read.
        """
        claimed = names.pairs(self._names(names.CLAIMS)) - names.ends(self._names(names.DONE))
        return self._seals(sorted((block, epoch) for block, epoch in claimed if epoch))

    def earlier(self, claim: Claim) -> list[tuple[int, str, int]]:
        """Returns the epochs of a block before this claim: number, ``<pod>.<start>``, bytes of its journal that count.

        Raises:
            LedgerError: one of their claims is missing.
        """
        seals = self._seals((claim.block, epoch) for epoch in range(1, claim.epoch + 1))
        return [(epoch, owner, sealed) for (_, epoch), (owner, sealed) in seals.items()]

    def _seals(self, claims: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[str, int]]:
        contents = []
        for block, epoch in claims:
            content = self._files.answer(Read(names.claim_path(block, epoch)))
            if content is None:
                raise LedgerError(f"{names.claim_path(block, epoch)}: not there; was it removed?")
            contents.append((block, epoch, content))
        return names.seals(contents)

    def _names(self, directory: str) -> tuple[str, ...]:
        return self._files.answer(Names(directory))

    def _read(self, path: str) -> dict[str, Any] | None:
        """Reads a file. ``None`` if it is missing, damaged, or being written: the next look reads it."""
        try:
            return self._files.answer(Read(path))
        except ValueError:
            return None

    @property
    def _rules(self) -> LedgerRules:
        if self._pod_rules is None:
            raise LedgerError("this ledger was opened for reading; give it a pod identity to claim")
        return self._pod_rules
