"""A run directory that misbehaves as network file systems do, and pods that share it.

:class:`Faulty` lays the faults between the ledger and a real directory, for each pod its own:

* listings, leases and the existence of files are answered as they were up to ``stale_s`` ago;
* a link that was made is answered with EEXIST, as when a lost reply made the client repeat the request;
* opening fails with ESTALE; the file system is away for a moment (EIO);
* a call takes so long that a lease runs out, before or after it is carried out.

``python -m tests.ledger.faults DIRECTORY --scale 30`` is the long form: the leases of the product, pauses of a minute.
"""

from __future__ import annotations

import argparse
import errno
import json
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from queue import Empty
from typing import Any

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger import Ledger, PodIdentity, read_block, write_blocks
from megaflow_hpc.ledger.calls import Call, Names, Read, There
from megaflow_hpc.ledger.files import Files
from megaflow_hpc.ledger.rules import LEASES, Times
from megaflow_hpc.rundir import RunDir
from megaflow_hpc.trajectories.frames import pack_record
from megaflow_hpc.trajectories.journal import JournalWriter, valid_length
from megaflow_hpc.trajectories.winners import entries, index, journals
from megaflow_hpc.types import Rollout

TIMES = Times(renew_s=1.0, commit_s=3.0, lease_s=6.0)
"""A thirtieth of the product's."""
STALE_S = 1.5
PAUSE_S = 7.0
STARTS = 40
"""Starts of one element at most."""


class Faulty(Files):
    """Files with faults, drawn from a seed."""

    def __init__(self, run: RunDir, seed: int, scale: float = 1.0, faults: bool = True) -> None:
        super().__init__(run)
        self._random, self._scale, self._faults = random.Random(seed), scale, faults
        self._old: dict[Call, list[tuple[float, Any]]] = {}
        self.met = {"stale": 0, "replayed": 0, "ESTALE": 0, "EIO": 0, "pauses": 0}

    def answer(self, call: Call) -> Any:
        self._pause()
        found = super().answer(call)
        self._pause()
        return found

    def _pause(self) -> None:
        if self._faults and self._random.random() < 0.004:
            self.met["pauses"] += 1
            time.sleep(self._random.uniform(0.5, 1.0) * PAUSE_S * self._scale)

    def _fail(self) -> None:
        for name, chance in (("ESTALE", 0.02), ("EIO", 0.002)):
            if self._faults and self._random.random() < chance:
                self.met[name] += 1
                raise OSError(getattr(errno, name), "as the test has it")

    def _cached(self, call: Names | Read | There, found: Any) -> Any:
        """What is there, or what was there a moment ago."""
        now = time.monotonic()
        known = [(then, old) for then, old in self._old.get(call, []) if now - then < STALE_S * self._scale]
        self._old[call] = [*known, (now, found)]
        if not self._faults or not known or self._random.random() < 0.5:
            return found
        self.met["stale"] += known[0][1] != found
        return known[0][1]

    def _names(self, call: Names) -> tuple[str, ...]:
        self._fail()
        return self._cached(call, super()._names(call))  # type: ignore[no-any-return]

    def _there(self, call: There) -> bool:
        self._fail()
        return self._cached(call, super()._there(call))  # type: ignore[no-any-return]

    def _read(self, call: Read) -> dict[str, Any] | None:
        self._fail()
        found = super()._read(call)
        return self._cached(call, found) if call.path.startswith(LEASES) else found  # type: ignore[no-any-return]

    def _hard_link(self, private: Path, target: Path) -> None:
        super()._hard_link(private, target)
        if self._faults and self._random.random() < 0.2:
            self.met["replayed"] += 1
            raise FileExistsError(errno.EEXIST, "as the test has it")


def rollouts(count: int) -> list[Rollout]:
    return [Rollout(f"t{n:03d}", "oracle", 0, "oracle") for n in range(count)]


def work(path: str, name: str, seed: int, scale: float, injected: bool, said: Any) -> None:
    """One element: starts anew whenever its pod was fenced, until the campaign is finished."""
    run, acknowledged, met = RunDir(path), [], []
    for start in range(STARTS):
        ending = "fenced"
        files = Faulty(run, seed * 1000 + start, scale, injected)
        times = Times(*(each * scale for each in (TIMES.renew_s, TIMES.commit_s, TIMES.lease_s)))
        ledger = Ledger(run, PodIdentity(name, str(start)), times=times, files=files)
        ledger.register()
        with JournalWriter(run.journal_file(name, str(start))) as journal:
            ending = _one_start(run, ledger, journal, acknowledged, random.Random(seed))
        met.append(files.met)
        if ending == "done":
            break
    said.put({"ending": ending, "acknowledged": acknowledged, "met": met, "starts": start + 1})


def _one_start(
    run: RunDir, ledger: Ledger, journal: JournalWriter, acknowledged: list[tuple[str, str, int]], dice: random.Random
) -> str:
    while ledger.may_commit:
        ledger.renew()
        claim = ledger.claim(lambda owner: valid_length(run.journal / f"{owner}.journal"))
        if claim is None:
            if not ledger.unfinished:
                return "done"
            time.sleep(0.2)
            continue
        todo = list(read_block(run, claim.block).rollouts)
        if claim.left is not None:
            todo = [rollout for rollout in todo if rollout.id in claim.left]
        elif claim.epoch:
            stored = {entry.id for entry in index(run, ledger.seals()).winners}
            todo = [rollout for rollout in todo if rollout.id not in stored]
        todo = [rollout for rollout in todo if rollout.id not in claim.without]
        if len(todo) > 2 and dice.random() < 0.5 and ledger.give(claim, todo[-1:], f"gift.{claim.block}"):
            todo.pop()
        try:
            if not _carry_out(ledger, journal, claim, todo, acknowledged, dice):
                continue
            ledger.mark_done(claim)
        except LedgerError:
            return "fenced"
    return "fenced"


def _carry_out(
    ledger: Ledger,
    journal: JournalWriter,
    claim: Any,
    todo: list[Rollout],
    acknowledged: list[Any],
    dice: random.Random,
) -> bool:
    for number, rollout in enumerate(todo):
        if number and dice.random() < 0.1:
            ledger.release(claim, journal.committed, [each.id for each in todo[number:]])
            return False
        ledger.renew()
        trajectory = {"id": rollout.id, "status": "completed", "attempt": 0}
        record = {"kind": "trajectory", "epoch": claim.epoch, "block": claim.block, "trajectory": trajectory}
        end = journal.append(pack_record(record))
        if not ledger.committed(journal.commit):
            return False
        acknowledged.append((rollout.id, journal.path.name, end))
    return True


def campaign(
    paths: list[Path], real: Path, seed: int, count: int = 40, scale: float = 1.0, injected: bool = True
) -> Any:
    """Two elements on one run directory, each by its own path; what they said, after it has been checked.

    Raises:
        AssertionError: a rollout is missing, or something acknowledged does not count.
    """
    run = RunDir(real)
    run.create()
    Ledger(run).create()
    write_blocks(run, rollouts(count), size=4)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    pods = [
        context.Process(target=work, args=(str(path), f"{n}_0", seed + n, scale, injected, queue))
        for n, path in enumerate(paths)
    ]
    for pod in pods:
        pod.start()
    said = []
    while len(said) < len(pods):
        try:
            said.append(queue.get(timeout=1.0))
        except Empty:
            assert not any(pod.exitcode for pod in pods), "a pod failed; see its traceback"
    for pod in pods:
        pod.join()
    ledger = Ledger(run)
    seals = ledger.seals()
    assert [each["ending"] for each in said] == ["done"] * len(pods)
    assert ledger.finished
    assert sorted(entry.id for entry in index(run, seals).winners) == [rollout.id for rollout in rollouts(count)]
    valid = {(e.id, path.name, e.start) for path in journals(run) for e in entries(path, seals)[0]}
    starts = {(rollout, name) for rollout, name, _ in valid}
    assert {(rollout, name) for each in said for rollout, name, _ in each["acknowledged"]} <= starts
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--mount", type=Path, nargs=2, help="two ways to it that misbehave by themselves")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    paths = arguments.mount or [arguments.directory] * 2
    said = campaign(paths, arguments.directory, arguments.seed, scale=arguments.scale, injected=not arguments.mount)
    json.dump([{**each, "acknowledged": len(each["acknowledged"])} for each in said], sys.stdout, indent=1)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
