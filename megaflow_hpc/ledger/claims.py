"""Claims, leases, seals and marks.

::

    ledger/claims/<block>.<epoch>     hard link of a private file; its content names the pod and seals the predecessor
    ledger/released/<block>.<epoch>   the pod of that epoch gave the block back
    ledger/done/<block>               every rollout of the block is durable
    ledger/leases/<pod>.<start>       who the pod is, and a counter it renews every 30 s for all its blocks
    ledger/gone/<pod>.<start>         Slurm (or this host's process table) says that this pod is no more
    ledger/finished                   every block is done

*Claim.* A private file is linked to ``claims/<block>.<epoch>``; success is read from its link count, not from the
return code, because NFS may replay the request. *Epoch.* A block released, or whose pod is gone, is claimed with
epoch + 1, and that claim records how much of the predecessor's journal counts: its *seal*. Records of the predecessor
behind the seal are void for every reader. *Lease.* An observer declares a pod gone when its counter did not change for
:data:`LEASE_S` of the observer's own monotonic clock.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger.blocks import numbers
from megaflow_hpc.rundir import RunDir, write_atomic, write_json

RENEW_S = 30.0
LEASE_S = 180.0
COMMIT_S = 90.0
"""A pod that could not renew for this long commits nothing more."""


@dataclass(frozen=True)
class PodIdentity:
    """One start of one pod. ``start`` differs between starts of the same element; together they are unique in a run."""

    pod: str
    start: str
    job_id: str = ""
    """``<array job>_<element>`` under Slurm, empty elsewhere."""
    host: str = ""
    pid: int = 0
    pid_start: int = 0
    """Field 22 of /proc/PID/stat of rank 0: with host and pid it names one process for ever."""

    @property
    def name(self) -> str:
        return f"{self.pod}.{self.start}"


@dataclass(frozen=True)
class Claim:
    """The right of one pod to commit the rollouts of one block."""

    block: int
    epoch: int


@dataclass
class _View:
    """One listing of the ledger."""

    epochs: dict[int, int] = field(default_factory=dict)
    released: set[tuple[int, int]] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


class Ledger:
    """The ledger as one pod (or, without identity, a reader) sees it."""

    def __init__(
        self, run: RunDir, identity: PodIdentity | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run = run
        self.identity = identity
        self._clock = clock
        self._root = run.ledger
        self._counter = 0
        self._renewed = clock()
        self._leases: dict[str, tuple[int, float]] = {}
        self._seen_alive: set[str] = set()
        self.unsettled = False
        """After :meth:`claim`: some block is held by a pod that was neither seen to renew nor is known to be gone."""
        self._owners: dict[tuple[int, int], str] = {}

    # --- paths ---

    def _room(self, name: str) -> Path:
        return self._root / name

    def _claim_path(self, block: int, epoch: int) -> Path:
        return self._room("claims") / f"{block:06d}.{epoch}"

    @property
    def finished_mark(self) -> Path:
        return self._root / "finished"

    def create(self) -> None:
        """Makes the rooms; done once, when the run directory is made."""
        for room in ("claims", "released", "done", "leases", "gone"):
            self._room(room).mkdir(mode=0o700, exist_ok=True)

    # --- leases ---

    def register(self) -> None:
        """Writes this pod's lease; before its first claim."""
        self._require_identity()
        self.renew(force=True)

    def renew(self, force: bool = False) -> None:
        """Counts the lease up when it is due. Call often; it costs nothing in between.

        A lease that is too old stays so: somebody may be taking over.
        """
        now = self._clock()
        if self._counter and not self.may_commit:
            return
        if not force and now - self._renewed < RENEW_S:
            return
        identity = self._require_identity()
        self._counter += 1
        path = self._room("leases") / identity.name
        content = (json.dumps({**asdict(identity), "counter": self._counter}) + "\n").encode()
        if self._counter == 1:
            write_atomic(path, content)
        else:
            # In place, padded to never shrink: one open, no directory change. A torn read is read again.
            with open(path, "r+b") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        self._renewed = now

    @property
    def may_commit(self) -> bool:
        """False once the lease is so old that another pod may be about to take over."""
        return self._clock() - self._renewed < COMMIT_S

    def leases(self) -> dict[str, dict[str, Any]]:
        """Every pod that ever registered, by ``<pod>.<start>``: identity and counter."""
        found = {}
        for path in sorted(self._room("leases").iterdir()):
            if path.name.startswith("."):
                continue
            try:
                found[path.name] = json.loads(path.read_text())
            except (OSError, ValueError):
                continue  # being written; the next look reads it
        return found

    def mark_gone(self, pod_start: str) -> None:
        """Records that this start of a pod is no more; the caller has proof (Slurm, or the process table)."""
        write_atomic(self._room("gone") / pod_start, b"")

    def gone(self) -> set[str]:
        return {path.name for path in self._room("gone").iterdir() if not path.name.startswith(".")}

    def _is_gone(self, owner: str, leases: Mapping[str, Mapping[str, Any]], gone: set[str]) -> bool:
        identity = self._require_identity()
        if owner == identity.name:
            return False
        if owner in gone:
            return True
        pod, _, _ = owner.rpartition(".")
        if pod == identity.pod:
            return True  # an earlier start of this very element: Slurm started us, so it ended
        counter = int(leases.get(owner, {}).get("counter", -1))
        seen, since = self._leases.get(owner, (None, 0.0))
        if seen != counter:
            self._leases[owner] = (counter, self._clock())
            if seen is not None:
                self._seen_alive.add(owner)
            return False
        return self._clock() - since > LEASE_S

    # --- claims ---

    def view(self) -> _View:
        view = _View()
        for path in self._room("claims").iterdir():
            if not path.name.startswith("."):
                block, epoch = path.name.split(".")
                view.epochs[int(block)] = max(int(epoch), view.epochs.get(int(block), -1))
        for path in self._room("released").iterdir():
            if not path.name.startswith("."):
                block, epoch = path.name.split(".")
                view.released.add((int(block), int(epoch)))
        view.done = {int(path.name) for path in self._room("done").iterdir() if not path.name.startswith(".")}
        return view

    def owner(self, block: int, epoch: int) -> str:
        """``<pod>.<start>`` of a claim."""
        if (block, epoch) not in self._owners:
            self._owners[block, epoch] = self._read_claim(block, epoch)["owner"]
        return self._owners[block, epoch]

    def _read_claim(self, block: int, epoch: int) -> dict[str, Any]:
        path = self._claim_path(block, epoch)
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise LedgerError(f"{path}: cannot be read as a claim: {error}") from error

    def claim(self, journal_length: Callable[[str], int]) -> Claim | None:
        """Claims one block that is free, or ``None`` if there is none now.

        Args:
            journal_length: valid bytes of the journal of a ``<pod>.<start>``; seals a predecessor.
        """
        view = self.view()
        leases: dict[str, dict[str, Any]] | None = None
        gone: set[str] = set()
        self.unsettled = False
        for block in numbers(self.run):
            if block in view.done:
                continue
            epoch = view.epochs.get(block)
            if epoch is None:
                claim = self._take(block, 0, None, 0)
            else:
                owner = self.owner(block, epoch)
                if (block, epoch) not in view.released:
                    if leases is None:
                        leases, gone = self.leases(), self.gone()
                    if not self._is_gone(owner, leases, gone):
                        self.unsettled |= owner != self._require_identity().name and owner not in self._seen_alive
                        continue
                claim = self._take(block, epoch + 1, owner, journal_length(owner))
            if claim:
                return claim
        return None

    def _take(self, block: int, epoch: int, predecessor: str | None, sealed: int) -> Claim | None:
        identity = self._require_identity()
        private = self._room("claims") / f".{identity.name}.{secrets.token_hex(4)}"
        target = self._claim_path(block, epoch)
        content = {"owner": identity.name, "predecessor": predecessor, "sealed": sealed}
        with open(private, "x") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            try:
                os.link(private, target)
            except OSError:
                pass  # lost, or a replayed request that did succeed: the link count knows
            won = os.stat(private).st_nlink == 2
        finally:
            private.unlink()
        return Claim(block, epoch) if won else None

    def release(self, claim: Claim) -> None:
        """Gives a block back; everything committed for it must be durable."""
        write_atomic(self._room("released") / f"{claim.block:06d}.{claim.epoch}", b"")

    def mark_done(self, claim: Claim) -> None:
        """Every rollout of the block is durable. Writes the finished mark after the last block.

        Raises:
            LedgerError: the block was taken over; what this pod stored late does not count.
        """
        if self.view().epochs.get(claim.block) != claim.epoch:
            raise LedgerError(
                f"block {claim.block} was taken over from epoch {claim.epoch}; this pod was too slow to renew"
            )
        write_atomic(self._room("done") / f"{claim.block:06d}", b"")
        if set(numbers(self.run)) <= self.view().done:
            write_json(self.finished_mark, {"by": self._require_identity().name})

    @property
    def finished(self) -> bool:
        return self.finished_mark.exists()

    def reopen(self) -> None:
        """Blocks were added: the campaign is no longer finished."""
        self.finished_mark.unlink(missing_ok=True)

    def seals(self) -> dict[tuple[int, int], tuple[str, int]]:
        """(block, epoch) → (``<pod>.<start>`` of that epoch, valid bytes of its journal), for superseded epochs."""
        found = {}
        for path in self._room("claims").iterdir():
            if path.name.startswith("."):
                continue
            block, epoch = (int(part) for part in path.name.split("."))
            if epoch:
                claim = self._read_claim(block, epoch)
                found[block, epoch - 1] = (str(claim["predecessor"]), int(claim["sealed"]))
        return found

    def _require_identity(self) -> PodIdentity:
        if self.identity is None:
            raise LedgerError("this ledger was opened for reading; give it a pod identity to claim")
        return self.identity
