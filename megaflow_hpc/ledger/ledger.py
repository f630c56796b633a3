"""Executes the ledger's protocol on the run directory, for a pod or a reader.

::

    ledger/claims/<block>.<epoch>         the pod that holds the block. From epoch 1 on, also the seals of all
                                          earlier epochs, or the word *done* if the previous holder finished the block
    ledger/released/<block>.<epoch>       the pod of that epoch released the block: its seal, and the rollouts left
    ledger/done/<block>.<epoch>           the claim ended the block: all its results are durable
    ledger/leases/<pod>.<start>           the pod's identity, progress, and a counter renewed for all its blocks
    ledger/gone/<pod>.<start>             Slurm (or this host's process table) reports that this pod is gone
    ledger/ended/<n>                      totals of ended pods whose leases were removed
    ledger/added/<token>.<n>              numbers of the blocks that are added while the campaign runs
    ledger/open/<consumer>                lease of a consumer that may add blocks, so the campaign is not finished
    ledger/finished                       all n blocks are done

:mod:`megaflow_hpc.ledger.rules` implements the protocol. docs/explanation/ledger.md explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.host.atomic import make_directory, write_atomic
from megaflow_hpc.ledger import names
from megaflow_hpc.ledger.accounts import Facts, accounts, add_facts, read_record, recent
from megaflow_hpc.ledger.calls import Clock, Names, Read, Steps
from megaflow_hpc.ledger.coordinator import Pruning, Surveyed, survey
from megaflow_hpc.ledger.files import Files, Operation, boot_clock
from megaflow_hpc.ledger.leader import Survey
from megaflow_hpc.ledger.lease import TIMES, PodIdentity, Times
from megaflow_hpc.ledger.rules import Claim, LedgerRules, Outlook
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import JOB_ID, array_of

DIRECTORIES = ("claims", "released", "done", "leases", "gone", "ended")
MAX_LOOKS = 5
"""Maximum number of attempts to read a listed claim. An attempt fails only if a later claim has just replaced it."""
Seals = dict[tuple[int, int], tuple[str, int]]
"""Valid part of the journals of superseded claims. Maps (block, epoch) to the ``<pod>.<start>`` that held the block and
the number of valid bytes in its journal."""


class Ledger:
    """The ledger of one run, for one pod or for a reader.

    Args:
        identity: The pod. ``None`` for a reader.
        clock: A monotonic clock in seconds that includes suspended time.
        times: Lease intervals and timeouts.
        files: Implementation of the file-system calls, for tests. The default uses the run directory.
        pods: Number of pods that may claim concurrently.
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
        self._pruning: Pruning | None = None

    def create(self) -> None:
        """Creates the ledger's directories. Called once, when the run directory is created."""
        for directory in DIRECTORIES:
            make_directory(self.run.ledger / directory)

    # --- leases ---

    def register(self) -> None:
        """Writes this pod's lease. Call it before the first claim."""
        self.renew(force=True)

    def renew(self, force: bool = False) -> None:
        """Renews the lease if it is due, or always with ``force``. Call it frequently."""
        self._files.carry_out(self._rules.renew(force))

    def show(self, progress: Mapping[str, Any], every_s: float) -> None:
        """Sets the progress to publish in this pod's lease. Renews the lease at least every ``every_s`` seconds."""
        rules = self._rules
        rules.progress = dict(progress)
        rules.renew_s = min(every_s, rules.times.renew_s)

    @property
    def may_commit(self) -> bool:
        """True while this pod may commit results. False once its lease is so old that another pod may soon take
        over."""
        return self._rules.open_at(self._files.answer(Clock()))

    @property
    def superseded(self) -> bool:
        """True if a later start of this array element has a lease."""
        return self._rules.superseded

    @property
    def closes_at(self) -> float:
        """Time on the ledger's clock at which :attr:`may_commit` becomes false unless the lease is renewed."""
        return self._rules.closes_at

    def committed(self, commit: Callable[[], object]) -> bool:
        """Calls ``commit``, which makes results durable. Returns whether they are valid.

        They are valid if the pod may commit before the call *and* still may after the results became durable.
        """
        return self._files.carry_out(self._rules.committed(commit))

    def leases(self) -> dict[str, dict[str, Any]]:
        """Returns the lease of every pod's latest start, by ``<pod>.<start>``.

        The lease of an ended pod is removed a few minutes after its end, but :meth:`accounts` still includes the pod.
        Leases with an invalid job id are skipped, because they were not written by a pod.
        """
        leases = {}
        for name in sorted(names.newest_starts(self._names(names.LEASES))):
            content = self._read(f"{names.LEASES}/{name}")
            if content is not None:
                job = content.get("job_id") or ""
                if isinstance(job, str) and (not job or JOB_ID.fullmatch(job)):
                    leases[name] = content
        return leases

    def accounts(self, leases: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Facts]:
        """Returns the core-seconds and other totals of every start in the history of the run.

        Args:
            leases: Result of :meth:`leases`. ``None`` reads the leases.
        """
        # Read the record first, so that a lease that is removed in the meantime is not missed.
        _, record = self._files.carry_out(read_record())
        return accounts(self.leases() if leases is None else leases, record)

    def arrays(self) -> set[str]:
        """Returns the ids of the job arrays of all pods that ever started. Reads no leases, because callers poll it."""
        _, record = self._files.carry_out(read_record())
        ended = add_facts([record, *recent(record).values()])
        return {*ended.get("arrays", ()), *filter(None, map(array_of, self.pods()))}

    def pods(self) -> set[str]:
        """Returns the pods that have a lease. These pods are running, ended recently, or still hold a block."""
        return {name.rpartition(".")[0] for name in self._names(names.LEASES)}

    def mark_gone(self, pod_start: str) -> None:
        """Marks a start of a pod as gone. The caller must have proof from Slurm or the process table."""
        write_atomic(self.run.path / names.GONE / pod_start, b"")

    def gone(self) -> set[str]:
        """Returns the names ``<pod>.<start>`` that are marked as gone."""
        return set(self._names(names.GONE))

    # --- claims ---

    def claim(self, journal_length: Callable[[str], int]) -> Claim | None:
        """Claims a block that is free or whose holder is gone. Returns ``None`` if no block is available now.

        Args:
            journal_length: Takes a ``<pod>.<start>`` and returns the number of bytes in complete records of its
                journal. Called to seal a predecessor's journal.
        """
        self._files.journal_length = journal_length
        return self._files.carry_out(self._rules.claim())

    def release(self, claim: Claim, sealed: int, left: Iterable[str]) -> None:
        """Releases a block so that other pods can claim it. Does nothing if the fence is closed.

        Args:
            sealed: Number of leading bytes of this pod's journal that contain everything committed for the block.
            left: Ids of the block's rollouts that are not stored.
        """
        self._files.carry_out(self._rules.release(claim, sealed, left))

    def mark_done(self, claim: Claim) -> None:
        """Marks a block done once all its rollouts are durable. Writes the finished mark after the last block.

        Raises:
            LedgerError: Another pod took over the block. Results stored after the takeover are not valid.
        """
        self._files.carry_out(self._rules.mark_done(claim))

    def leave(self) -> None:
        """Removes this pod's private files. Called when the pod ends. The coordinator removes the private files of
        killed pods."""
        self._files.remove_private()

    @property
    def seen(self) -> Outlook:
        """State of the campaign at the last :meth:`claim`."""
        return self._rules.seen

    @property
    def free(self) -> list[int]:
        """Blocks that were still free after the last :meth:`claim`. Other pods may have claimed some of them since."""
        return self._rules.free

    def prefer(self, blocks: Iterable[int]) -> None:
        """Makes :meth:`claim` try these blocks first, in this order, if they are free."""
        self._rules.preferred = tuple(blocks)

    # --- for all pods ---

    def survey(self) -> Operation[Surveyed]:
        """Returns an operation that surveys the ledger for all pods and marks pods with expired leases as gone."""
        return Operation(self._files, survey(self._rules))

    def prune(self) -> Operation[None]:
        """Returns an operation that removes unneeded files. Run it after a survey."""
        if self._pruning is None:
            self._pruning = Pruning(self._rules)
        return Operation(self._files, self._pruning.look())

    def follow(self, survey: Survey | None) -> None:
        """Makes this pod rely on another pod's survey. ``None`` makes it scan the ledger itself."""
        self._rules.surveyed = survey

    # --- reading ---

    @property
    def finished(self) -> bool:
        """True if every block is done and no consumer may add blocks."""
        return self._marks.finished

    def added(self) -> set[str]:
        """Lists the records of all batches added after planning. Each batch has one such record, which never
        changes."""
        return {name for name in self._names(names.ADDED) if name.endswith(".0")}

    def rollouts_added(self, record: str) -> int:
        """Returns the number of rollouts in a batch, given a name from :meth:`added`. Returns 0 if the record is
        damaged."""
        content = self._read(f"{names.ADDED}/{record}") or {}
        rollouts = content.get("rollouts")
        return rollouts if isinstance(rollouts, int) and 0 <= rollouts < 1 << 53 else 0

    def done(self) -> set[int]:
        """Returns the blocks whose rollouts are all durable."""
        return names.done_blocks(self._names(names.DONE))

    def seals(self) -> Seals:
        """Returns the seals of all superseded epochs.

        Raises:
            LedgerError: A claim is listed but cannot be read.
        """
        return self._files.carry_out(all_seals())

    def _names(self, directory: str) -> tuple[str, ...]:
        return self._files.answer(Names(directory))

    def _read(self, path: str) -> dict[str, Any] | None:
        """Reads a JSON file. Returns ``None`` if it is missing, damaged or being written, so that the next poll
        retries."""
        try:
            return self._files.answer(Read(path))
        except ValueError:
            return None

    @property
    def _rules(self) -> LedgerRules:
        if self._pod_rules is None:
            raise LedgerError("this ledger was opened for reading; give it a pod identity to claim")
        return self._pod_rules


def all_seals() -> Steps[Seals]:
    """Returns the seals of all superseded epochs, from the latest claim of each block.

    Raises:
        LedgerError: A claim is listed but cannot be read.
    """
    listed = names.latest((yield Names(names.CLAIMS)))
    ended = names.pairs((yield Names(names.DONE)))
    pending = set()
    for block, epoch in listed.items():
        never_taken_over = epoch == 0 or (epoch == 1 and (block, 1) in ended)
        if not never_taken_over:  # otherwise, its claims contain no seals
            pending.add(block)
    seals: Seals = {}
    for _ in range(MAX_LOOKS):
        for block in sorted(pending):
            content = yield Read(names.claim_path(block, listed[block]))
            if content is not None:
                pending.remove(block)
                for epoch, seal in enumerate(names.seals_in(content)):
                    seals[block, epoch] = seal.owner, seal.sealed
        if not pending:
            return seals
        again = names.latest((yield Names(names.CLAIMS)))
        listed |= {block: max(listed[block], again.get(block, 0)) for block in pending}
    path = names.claim_path(min(pending), listed[min(pending)])
    raise LedgerError(f"{path}: missing; was it removed?")
