"""Explores every interleaving of pods on one ledger. The rules of the ledger and of winners are the real ones. The file
system, the clock and the journals are a model.

A *state* is the files, the journals, the time and, for each process, the answers to its calls so far. From each state
every process may carry out its next call or crash, or time may advance by one unit: a process that is not chosen
meanwhile is paused. Listings and readings may be old, by as much as a cache may be. Each state is followed once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger.blocks import add
from megaflow_hpc.ledger.calls import Clock, Do, Length, Link, Names, Publish, Read, Remove, Rewrite, There, Touch
from megaflow_hpc.ledger.calls import Stored as StoredBy
from megaflow_hpc.ledger.consumers import finish
from megaflow_hpc.ledger.coordinator import Pruning
from megaflow_hpc.ledger.lease import PodIdentity, Times
from megaflow_hpc.ledger.ledger import Seals, all_seals
from megaflow_hpc.ledger.names import (
    CLAIMS,
    GONE,
    LEASES,
    RELEASED,
    TASKS,
    claim_path,
    pairs,
    seals_in,
    task_path,
)
from megaflow_hpc.ledger.rules import LedgerRules
from megaflow_hpc.rundir.marks import FINISHED, OPEN, blocks_listed
from megaflow_hpc.rundir.marks import counts as counts_all
from megaflow_hpc.trajectories.journal.winners import RecordEntry, counts, decide
from megaflow_hpc.types import Rollout

TIMES = Times(renew_s=1, commit_s=2, lease_s=4)

Program = Generator[Any, Any, str]
Adding = Callable[[Sequence[Sequence[Rollout]], str, str], Generator[Any, Any, list[int]]]
Files = frozenset[tuple[str, str]]
"""Path and content."""


@dataclass(frozen=True)
class Wait:
    """Waits until time advances."""


@dataclass(frozen=True)
class Block:
    """Reads the rollouts of a block, which never change."""

    number: int


@dataclass(frozen=True)
class Stored:
    """Reads the ids of the stored rollouts."""


@dataclass(frozen=True)
class Append:
    """Appends one record, which is durable at once."""

    rollout: str
    block: int
    epoch: int

    def __call__(self) -> None:
        """Carried out by the model."""


@dataclass(frozen=True)
class Acknowledged:
    """The pod counts its last record."""


@dataclass(frozen=True)
class Journals:
    """Reads all journals."""


@dataclass(frozen=True)
class Saw:
    """Reports what a reader returned."""

    entries: tuple[RecordEntry, ...]


@dataclass(frozen=True)
class Here:
    """Reports everything that the rest of a program depends on, so that equal paths are merged."""

    memory: str


class Broken(AssertionError):
    """An invariant does not hold."""


# --- what runs --------------------------------------------------------------------------------------------------------


def pod(
    name: str,
    make: Callable[..., LedgerRules] = LedgerRules,
    drains: bool = False,
    times: Times = TIMES,
    lingers: int = 0,
) -> Program:
    """A pod that claims, commits one rollout at a time and marks done, as the I/O thread does.

    Args:
        drains: it releases its block after one rollout.
        lingers: it releases its first block after one rollout, takes it back at once, and then waits so many units.
    """
    identity = PodIdentity(*name.split("."))
    mine = make(identity, times)
    yield from mine.renew(force=True)
    while True:
        yield Here(_memory(mine))
        yield from mine.renew()
        if not (yield from mine.may_commit()):
            return "fenced"
        claim = yield from mine.claim()
        if claim is None:
            if not (mine.seen.unfinished or mine.seen.opened or mine.seen.unsettled):
                return "done"
            yield Wait()
            continue
        content = yield Block(claim.block)
        todo = [rollout.id for rollout in (Rollout(**each) for each in content["rollouts"])]
        if claim.left is not None:
            todo = [each for each in todo if each in claim.left]
        elif claim.epoch:
            stored = yield Stored()
            todo = [each for each in todo if each not in stored]
        for count, each in enumerate(todo):
            yield Here(repr((_memory(mine), claim.block, claim.epoch, todo, count)))
            if (drains or lingers) and count:
                yield from mine.release(claim, (yield Length(identity.name)), todo[count:])
                if drains:
                    return "drained"
                break
            for _ in range(lingers if len(todo) == 1 else 0):
                yield Wait()
                yield from mine.renew()
            yield from mine.renew()
            if not (yield from mine.committed(Append(each, claim.block, claim.epoch))):
                return "fenced"
            yield Acknowledged()
        if claim not in mine.held:
            continue
        yield Here(repr((_memory(mine), claim, "done")))
        try:
            yield from mine.mark_done(claim)
        except LedgerError:
            return "taken over"


def _memory(mine: LedgerRules) -> str:
    """Returns the whole knowledge of a pod."""
    return repr(vars(mine))


def adder(name: str, token: str, number: int, size: int = 1, closes: str = "", how: Adding = add) -> Program:
    """Adds blocks of one rollout each with a token, and then removes an open lease.

    Args:
        number: names the task of the rollouts.
        closes: the consumer whose open lease is removed.
    """
    blocks = [(Rollout(f"t{number}", "p", n, "nop"),) for n in range(size)]
    placed = yield from how(blocks, token, name)
    for place, block in zip(placed, blocks, strict=True):
        content = yield Block(place)
        if [Rollout(**each) for each in content["rollouts"]] != list(block):
            raise Broken(f"{name} was told that its rollouts are in block {place}, where there is {content}")
    if closes:
        yield Remove(f"{OPEN}/{closes}")
        yield from finish(closes)
    return "added"


def reader() -> Program:
    """Reads once: journals first, then seals."""
    entries = yield Journals()
    sealed = yield from all_seals()
    valid = [entry for entry, block, end in entries if counts(sealed, block, entry.epoch, entry.journal, end)]
    yield Saw(tuple(decide(valid)[0].values()))
    return "read"


def pruner(looks: int, units: int = 1, make: Callable[..., Pruning] = Pruning, times: Times = TIMES) -> Program:
    """A coordinator that holds no block: it reads the leases, as a survey does, and removes files.

    Args:
        units: units of time between two looks.
    """
    rules = LedgerRules(PodIdentity("coordinator", "0"), times)
    pruning = make(rules)
    for look in range(looks):
        for _ in range(units if look else 0):
            yield Wait()
        for name in (yield Names(LEASES)):
            yield from rules.expired(name)
        yield from pruning.look()
        rules.forget((yield Names(LEASES)), {0, 1})
        yield Here(repr((look, vars(rules), vars(pruning)["_since"])))
    return "pruned"


# --- the world --------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """A state. A tuple, because hundreds of thousands are made."""

    time: int
    files: Files
    before: tuple[Files, ...]
    """The files at the end of the last units of time, the oldest first."""
    journals: frozenset[tuple[str, tuple[tuple[str, int, int, int], ...]]]
    """Owner → (rollout, block, epoch, time) of each record."""
    processes: tuple[tuple[str, int], ...]
    """Name, and a number that identifies all answers so far."""
    acknowledged: frozenset[tuple[str, int]] = frozenset()
    """Owner and number of a record."""
    settled: frozenset[tuple[str, str, int]] = frozenset()
    """Rollout, owner and number of its first acknowledged winner."""
    renewed: frozenset[tuple[str, int]] = frozenset()
    gone: frozenset[str] = frozenset()
    """Processes that crashed."""


@dataclass
class Model:
    """
    Args:
        programs: programs by name. Those in ``later`` begin when the process they follow has crashed.
        blocks: number of the block → number of its rollouts, of one task.
        may_crash: processes that may crash, one of them once.
        units: last unit of time.
        fixed: directories that nothing changes here, so that it does not matter when they are read.
        told: a crash is marked at once, as Slurm reports it.
        prompt: processes that are never paused: time does not advance before they wait.
        stale: units of time by which answers may be old.
        cached: only paths that begin with this may be old.
        eager: a clock is read right after the call before it, which leaves out no more dangerous behaviour.
        gone: living pods that are marked as gone from the beginning.
        deceived: a pod that is taken for gone may be alive and renew its lease. What it acknowledges then may be void;
            it runs again, and counts once when all is done.
        opened: consumers whose open lease exists from the beginning. One of them may close it.
        adds: blocks are added without an open lease, so pods may leave before.
        before: files that exist from the beginning, and their content.
    """

    programs: Mapping[str, Callable[[], Program]]
    blocks: Mapping[int, int]
    units: int = 8
    may_crash: tuple[str, ...] = ()
    later: Mapping[str, str] = field(default_factory=dict)
    fixed: tuple[str, ...] = (GONE, RELEASED, TASKS)
    told: bool = False
    prompt: tuple[str, ...] = ()
    stale: int = 1
    cached: str = ""
    eager: bool = True
    gone: tuple[str, ...] = ()
    deceived: bool = False
    opened: tuple[str, ...] = ()
    adds: bool = False
    before: Mapping[str, Any] = field(default_factory=dict)

    states: int = 0
    ends: set[str] = field(default_factory=set)
    epochs: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._histories: list[tuple[int, Any]] = [(-1, None)]
        self._numbers: dict[Any, int] = {}
        self._pending: dict[tuple[str, int], Any] = {}
        self._same: dict[tuple[str, str], int] = {}
        self._dicts: dict[Files, dict[str, str]] = {}
        self._looks: dict[tuple[Files, Names | Read | There], Any] = {}
        self._checked: set[tuple[Any, ...]] = set()
        self._best: dict[tuple[Any, ...], dict[str, RecordEntry]] = {}

    def explore(self) -> Model:
        """Explores every state.

        Raises:
            Broken: an invariant does not hold in one of them.
        """
        files = {
            task_path(number): _json({"rollouts": [vars(Rollout(f"t{number}", "p", n, "nop")) for n in range(count)]})
            for number, count in self.blocks.items()
        }
        files |= {f"{GONE}/{name}": "{}" for name in self.gone}
        files |= {path: _json(content) for path, content in self.before.items()}
        files |= {f"{OPEN}/{name}": '{"counter": 1}' for name in self.opened}
        begun = tuple((name, 0) for name in self.programs if name not in self.later)
        start = frozenset(files.items())
        first = State(0, start, (start,) * self.stale, frozenset(), begun)
        stack, met = [first], {first}
        while stack:
            state = stack.pop()
            self.states += 1
            following = list(self._following(state))
            if not following:
                self._ended(state)
            for one in following:
                if one not in met:
                    met.add(one)
                    if (told := (one.files, one.journals, one.acknowledged, one.settled)) not in self._checked:
                        self._checked.add(told)
                        self._check(one)
                    stack.append(one)
        return self

    # --- steps ---

    def _following(self, state: State) -> Iterator[State]:
        calls = {name: self._call(name, history) for name, history in state.processes if name not in state.gone}
        for place, (name, _) in enumerate(state.processes):
            call = calls.get(name, "gone")
            if isinstance(call, str | Wait):
                continue
            for world, answer in self._answers(state, name, call):
                yield self._advance(world, place, answer)
            if name in self.may_crash and not state.gone:
                crashed = state._replace(gone=frozenset({name}))
                if self.told:
                    crashed = self._write(crashed, f"{GONE}/{name}", "{}")
                heirs = tuple((heir, 0) for heir, after in self.later.items() if after == name)
                yield crashed._replace(processes=crashed.processes + heirs)
        late = any(not isinstance(calls[name], Wait | str) for name in self.prompt if name in calls)
        if state.time < self.units and not late and any(not isinstance(call, str) for call in calls.values()):
            later = state._replace(time=state.time + 1, before=(*state.before, state.files)[1:])
            for place, (name, _) in enumerate(later.processes):
                if isinstance(calls.get(name), Wait):
                    later = self._advance(later, place, None)
            yield later

    def _advance(self, state: State, place: int, answer: Any) -> State:
        name, history = state.processes[place]
        history = self._told(history, answer)
        begins = False
        while self._at_once(state, call := self._call(name, history)):
            if begins and isinstance(call, Clock):
                break  # a pause before an operation is seen by its first look at the clock
            begins = isinstance(call, Here)
            if isinstance(call, Here):
                history = self._same.setdefault((name, call.memory), self._told(history, None))
                continue
            if isinstance(call, Acknowledged):
                state = self._acknowledge(state, name)
            _, answer = next(self._answers(state, name, call))
            history = self._told(history, answer)
        processes = list(state.processes)
        processes[place] = name, history
        return state._replace(processes=tuple(processes))

    def _at_once(self, state: State, call: Any) -> bool:
        """Tells whether a call and the other processes cannot affect each other."""
        if isinstance(call, Names):
            return call.directory in (self.fixed if self.opened else (*self.fixed, OPEN))
        if isinstance(call, Read):
            # Files that every cache shows and that never change.
            oldest = (*state.before, state.files)[0]
            return call.path in self._dict(oldest) and not call.path.startswith((LEASES, FINISHED, OPEN))
        return isinstance(call, Here | Acknowledged | Block) or (self.eager and isinstance(call, Clock))

    def _acknowledge(self, state: State, name: str) -> State:
        records = dict(state.journals)[name]
        _, block, epoch, _ = records[-1]
        if claim_path(block, epoch + 1) in self._files(state) and not self.deceived:
            raise Broken(f"{name} committed for block {block} after it had been taken over, at {state.time}")
        if state.time - dict(state.renewed)[name] >= TIMES.commit_s:
            raise Broken(f"{name} committed with a lease of {state.time - dict(state.renewed)[name]} units")
        return self._settle(state._replace(acknowledged=state.acknowledged | {(name, len(records) - 1)}))

    def _told(self, history: int, answer: Any) -> int:
        key = history, repr(answer)
        if key not in self._numbers:
            self._numbers[key] = len(self._histories)
            self._histories.append((history, answer))
        return self._numbers[key]

    def _call(self, name: str, history: int) -> Any:
        """Returns the next call of a process after these answers, or a string when it has ended."""
        key = name, history
        if key not in self._pending:
            answers, number = [], history
            while number:
                number, answer = self._histories[number]
                answers.append(answer)
            program = self.programs[name]()
            try:
                call = next(program)
                for answer in reversed(answers):
                    call = program.send(answer)
            except StopIteration as stop:
                call = stop.value
            self._pending[key] = call
        return self._pending[key]

    def _files(self, state: State) -> dict[str, str]:
        return self._dict(state.files)

    def _dict(self, files: Files) -> dict[str, str]:
        if files not in self._dicts:
            self._dicts[files] = dict(files)
        return self._dicts[files]

    def _answers(self, state: State, name: str, call: Any) -> Iterator[tuple[State, Any]]:
        files = self._files(state)
        if isinstance(call, Names | Read | There):
            found = []
            path = call.directory if isinstance(call, Names) else call.path
            for seen in (state.files, *(state.before if path.startswith(self.cached) else ())):
                if (answer := self._look(seen, call)) not in found:
                    found.append(answer)
                    yield state, answer
        elif isinstance(call, Clock | Acknowledged):
            yield state, state.time
        elif isinstance(call, StoredBy):
            yield state, 0
        elif isinstance(call, Length):
            yield state, len(dict(state.journals).get(call.owner, ()))
        elif isinstance(call, Link):
            if call.path in files:
                yield state, False
            else:
                if call.path.startswith(CLAIMS) and "done" not in call.content:
                    self.epochs.add(int(call.path.rpartition(".")[2]))
                yield self._write(state, call.path, _json(call.content)), True
        elif isinstance(call, Rewrite) and call.path not in files:
            yield state, None  # the holder has the removed file open
        elif isinstance(call, Publish | Rewrite):
            written = self._write(state, call.path, _json(call.content))
            if call.path.startswith(LEASES):
                renewed = frozenset({**dict(state.renewed), name: state.time}.items())
                written = written._replace(renewed=renewed)
            yield written, None
        elif isinstance(call, Touch):
            yield self._write(state, call.path, "{}"), None
        elif isinstance(call, Remove):
            yield state._replace(files=frozenset(item for item in state.files if item[0] != call.path)), None
        elif isinstance(call, Do):
            append = call.action
            assert isinstance(append, Append)
            record = append.rollout, append.block, append.epoch, state.time
            journals = dict(state.journals)
            journals[name] = (*journals.get(name, ()), record)
            yield state._replace(journals=frozenset(journals.items())), None
        elif isinstance(call, Block):
            yield state, json.loads(files[task_path(call.number)])
        elif isinstance(call, Stored):
            yield state, tuple(sorted(self._winners(state)))
        elif isinstance(call, Journals):
            yield state, tuple(self._entries(state))
        elif isinstance(call, Saw):
            acknowledged = {(owner, number) for owner, number in state.acknowledged}
            best = self._winners(state)
            for entry in call.entries:
                if (entry.journal.removesuffix(".journal"), entry.start) in acknowledged and best[entry.id] != entry:
                    raise Broken(f"a reader gave {entry} out, and {best[entry.id]} is the result")
            yield state, None
        else:
            raise AssertionError(call)

    def _write(self, state: State, path: str, content: str) -> State:
        return state._replace(files=frozenset({**self._files(state), path: content}.items()))

    def _look(self, files: Files, call: Names | Read | There) -> Any:
        key = files, call
        if key not in self._looks:
            self._looks[key] = _look(self._dict(files), call)
        return self._looks[key]

    # --- what must hold ---

    def _entries(self, state: State) -> list[tuple[RecordEntry, int, int]]:
        return [
            (RecordEntry(rollout, "completed", epoch, 1, time, f"{owner}.journal", number, 1), block, number + 1)
            for owner, records in sorted(state.journals)
            for number, (rollout, block, epoch, time) in enumerate(records)
        ]

    def _valid(self, state: State) -> list[RecordEntry]:
        files = self._files(state)
        claimed = [(b, e) for b, e in pairs(_look(files, Names(CLAIMS))) if e]
        sealed: Seals = {}
        for block, epoch in claimed:
            for before, seal in enumerate(seals_in(json.loads(files[claim_path(block, epoch)]))):
                sealed[block, before] = seal.owner, seal.sealed
        return [
            entry
            for entry, block, end in self._entries(state)
            if counts(sealed, block, entry.epoch, entry.journal, end)
        ]

    def _winners(self, state: State) -> dict[str, RecordEntry]:
        key = state.files, state.journals
        if key not in self._best:
            self._best[key] = decide(self._valid(state))[0]
        return self._best[key]

    def _check(self, state: State) -> None:
        valid = {(entry.journal.removesuffix(".journal"), entry.start): entry for entry in self._valid(state)}
        for record in state.acknowledged:
            if record not in valid and not self.deceived:
                raise Broken(f"the acknowledged record {record} is lost at {state.time}: {sorted(state.files)}")
        best = decide(valid.values())[0]
        settled = {rollout: (owner, number) for rollout, owner, number in state.settled}
        for rollout, entry in best.items():
            record = entry.journal.removesuffix(".journal"), entry.start
            if settled.get(rollout, record) != record and not self.deceived:
                raise Broken(f"{rollout} was settled by {settled[rollout]} and is now {record}: {sorted(state.files)}")
        if finished(self._files(state)) and (missing := self._rollouts(state) - set(best)):
            raise Broken(f"finished at {state.time} without {missing}: {sorted(state.files)}")

    def _rollouts(self, state: State) -> set[str]:
        """Returns the rollouts of all blocks. Each must be in exactly one of them."""
        found: list[str] = []
        for path, content in state.files:
            if path.startswith(f"{TASKS}/"):
                found += [Rollout(**each).id for each in json.loads(content)["rollouts"]]
        if len(found) > len(set(found)):
            raise Broken(f"blocks hold a rollout twice: {sorted(state.files)}")
        return set(found)

    def _settle(self, state: State) -> State:
        best = self._winners(state)
        before = {rollout for rollout, _, _ in state.settled}
        new = {
            (entry.id, owner, number)
            for owner, number in state.acknowledged
            for entry in best.values()
            if (entry.journal, entry.start) == (f"{owner}.journal", number) and entry.id not in before
        }
        return state._replace(settled=state.settled | new)

    def _ended(self, state: State) -> None:
        said = {name: self._call(name, history) for name, history in state.processes if name not in state.gone}
        self.ends |= {how for how in said.values() if isinstance(how, str)}
        files = self._files(state)
        whole = self._rollouts(state) == set(self._winners(state)) and not _look(files, Names(OPEN))
        if "done" in said.values() and (whole or not self.adds) and not finished(files):
            raise Broken(f"a pod ended as done and left no mark: {sorted(state.files)}")


def finished(files: Mapping[str, str]) -> bool:
    """Tells whether a finished mark exists and counts."""
    said = json.loads(files[FINISHED]) if FINISHED in files else None
    return counts_all(said, blocks_listed(_look(files, Names(TASKS)))) and not _look(files, Names(OPEN))


def _look(files: Mapping[str, str], call: Names | Read | There) -> Any:
    if isinstance(call, Names):
        start = call.directory + "/"
        return tuple(sorted(path.removeprefix(start) for path in files if path.startswith(start)))
    if isinstance(call, There):
        return call.path in files
    return json.loads(files[call.path]) if call.path in files else None


def _json(content: Any) -> str:
    return json.dumps(content, sort_keys=True, default=str)
