"""Two pods and a reader share a run directory that misbehaves like a network file system.

Each process has a FUSE mount of its own, which misbehaves (:mod:`tests.ledger.passthrough`).

``python -m tests.ledger.faults DIRECTORY --scale 30`` uses the real leases, and pauses of a minute and more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple, TypeVar

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger import Ledger, PodIdentity, read_block, write_blocks
from megaflow_hpc.ledger.files import passing
from megaflow_hpc.ledger.lease import Times
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.frames import pack_record
from megaflow_hpc.trajectories.journal.winners import StoredRollouts, counts, index
from megaflow_hpc.trajectories.journal.writer import JournalWriter
from megaflow_hpc.trajectories.reading.follow import follow
from megaflow_hpc.types import Rollout
from tests.ledger.passthrough import DEVICE, KINDS, device, mounted

T = TypeVar("T")
TIMES = Times(renew_s=1.0, commit_s=3.0, lease_s=6.0)
"""A thirtieth of the real times."""
STALE_S = 1.5
PAUSE_S = 7.0
STARTS = 40
"""Most starts of one element."""


class Acknowledged(NamedTuple):
    """A result that a pod counts."""

    rollout: str
    block: int
    epoch: int
    journal: str
    end: int


def rollouts(count: int) -> list[Rollout]:
    return [Rollout(f"t{n:03d}", "oracle", 0, "oracle") for n in range(count)]


def work(path: str, name: str, seed: int, scale: float, said: Any) -> None:
    """Runs one element, which restarts whenever its pod was fenced, until the campaign is finished."""
    run = RunDir(path)
    acknowledged: list[Acknowledged] = []
    for start in range(STARTS):
        ending = "fenced"
        times = Times(*(each * scale for each in (TIMES.renew_s, TIMES.commit_s, TIMES.lease_s)))
        ledger = Ledger(run, PodIdentity(name, str(start)), times=times)
        ledger.register()
        with JournalWriter(run.journal_file(name, str(start))) as journal:
            ending = _one_start(run, ledger, journal, acknowledged, random.Random(seed))
        if ending == "done":
            break
    said.put({"ending": ending, "starts": start + 1, "acknowledged": acknowledged})


def _one_start(
    run: RunDir, ledger: Ledger, journal: JournalWriter, acknowledged: list[Acknowledged], dice: random.Random
) -> str:
    while ledger.may_commit:
        ledger.renew()
        claim = ledger.claim(StoredRollouts(run).length)
        if claim is None:
            if not (ledger.seen.unfinished or ledger.seen.unsettled):  # a second, older listing may have unsettled it
                return "done"
            time.sleep(0.2)
            continue
        todo = list(again(lambda claim=claim: read_block(run, claim.block)).rollouts)
        if claim.left is not None:
            todo = [rollout for rollout in todo if rollout.id in claim.left]
        elif claim.epoch:
            stored = {entry.id for entry in again(lambda: index(run, ledger.seals())).winners}
            todo = [rollout for rollout in todo if rollout.id not in stored]
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
    acknowledged: list[Acknowledged],
    dice: random.Random,
) -> bool:
    for number, rollout in enumerate(todo):
        if number and dice.random() < 0.1:
            ledger.release(claim, journal.committed, [each.id for each in todo[number:]])
            return False
        ledger.renew()
        named = {"id": rollout.id, "task_id": rollout.task_id, "group_id": rollout.group_id}
        by = {"policy": rollout.policy, "agent": rollout.agent}
        trajectory = {**named, "status": "completed", "attempt": 0, **by}
        record = {"kind": "trajectory", "epoch": claim.epoch, "block": claim.block, "trajectory": trajectory}
        end = journal.append(pack_record(record))
        if not ledger.committed(journal.commit):
            return False
        acknowledged.append(Acknowledged(rollout.id, claim.block, claim.epoch, journal.path.name, end))
    return True


def read(path: str, said: Any) -> None:
    """Follows the campaign as a trainer does. Reports the rollout and epoch of each result."""
    run, given = RunDir(path), []
    for row in follow(run, lambda: again(lambda: Ledger(run).finished), poll_s=0.2):
        given.append(again(lambda row=row: (row.id, row.epoch)))  # rows are read when they are looked at
    said.put({"given": given})


def again(read: Callable[[], T]) -> T:
    """Reads until the file system permits it, as a pod's I/O thread does."""
    while True:
        try:
            return read()
        except OSError as error:
            if not passing(error):
                raise
            time.sleep(0.1)


def campaign(paths: list[Path], real: Path, seed: int, count: int, scale: float) -> list[dict[str, Any]]:
    """Runs two elements and a reader on one run directory, each with its own path. Returns the elements' reports.

    Raises:
        AssertionError: a rollout is missing or double, an acknowledged result does not count, or the reader got a
            record that is not the result.
    """
    run = RunDir(real)
    write_blocks(run, rollouts(count), size=4)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    *pods, reader = [
        *(
            context.Process(target=work, args=(str(path), f"{n}_0", seed + n, scale, queue))
            for n, path in enumerate(paths[:2])
        ),
        context.Process(target=read, args=(str(paths[2]), queue)),
    ]
    processes = [*pods, reader]
    for process in processes:
        process.start()
    said: list[dict[str, Any]] = []
    while len(said) < len(processes):
        try:
            said.append(queue.get(timeout=1.0))
        except Empty:
            assert not any(process.exitcode for process in processes), "a process failed; see its traceback"
    for process in processes:
        process.join()
    elements = [each for each in said if "ending" in each]
    (given,) = [each["given"] for each in said if "given" in each]
    seals, wanted = Ledger(run).seals(), [rollout.id for rollout in rollouts(count)]
    found = index(run, seals)
    best = {entry.id: entry.epoch for entry in found.winners}
    assert [each["ending"] for each in elements] == ["done"] * len(pods)
    assert Ledger(run).finished
    assert sorted(entry.id for entry in found.winners) == wanted
    assert sorted(rollout for rollout, _ in given) == wanted, f"the reader was given {given}"
    counted = [record for each in elements for record in each["acknowledged"]]
    for record in counted:
        assert counts(seals, record.block, record.epoch, record.journal, record.end), f"{record} does not count"
    sure = {(record.rollout, record.epoch) for record in counted}
    for rollout, epoch in given:
        assert (rollout, epoch) not in sure or best[rollout] == epoch, f"{rollout} of {epoch} was given, not the result"
    return elements


def on_fuse(real: Path, seed: int, scale: float, count: int) -> dict[str, Any]:
    """Runs the campaign with a mount for each process. The caller needs its own user and mount namespace."""
    run = RunDir(real)
    run.create()
    Ledger(run).create()
    places = [real.parent / f"{real.name}.{name}" for name in ("first", "second", "reader")]
    with mounted(real, places, seed, STALE_S * scale, PAUSE_S * scale) as met:
        seen = attributes_are_old(real, places[0], STALE_S * scale)
        said = campaign(places, real, seed, count, scale)
        faults = {place: dict(zip(KINDS, counts, strict=True)) for place, counts in met.items()}
    return {"old attributes": seen, "faults": faults, "elements": summary(said)}


def attributes_are_old(real: Path, place: Path, stale_s: float) -> bool:
    """Tells whether a mount shows old attributes for a while. In the end it must show the current ones."""
    name = "logs/grows"
    (real / name).write_bytes(b"")
    before = os.stat(place / name).st_size
    (real / name).write_bytes(b"grown")
    seen = os.stat(place / name).st_size == before
    time.sleep(stale_s + 0.1)
    assert os.stat(place / name).st_size == len("grown")
    return seen


def summary(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**each, "acknowledged": len(each["acknowledged"])} for each in said]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="of all times; 30: those of the product")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="rollouts")
    arguments = parser.parse_args()
    real, seed, scale, count = arguments.directory.absolute(), arguments.seed, arguments.scale, arguments.count
    if "MEGAFLOW_APART" not in os.environ:
        if not device():
            sys.exit(f"error: no FUSE device that {os.getlogin()} may open: name one by {DEVICE}, or open /dev/fuse")
        again = [sys.executable, "-m", "tests.ledger.faults", *sys.argv[1:]]
        apart = ["unshare", "-Urm", "--pid", "--fork", "--kill-child", *again]  # whatever happens ends with us
        os.execvpe(apart[0], apart, {**os.environ, "MEGAFLOW_APART": "1"})
    json.dump(on_fuse(real, seed, scale, count), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
