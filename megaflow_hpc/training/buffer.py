"""Collects the groups of rollouts that no training step of a policy has used yet.

The ledger's blocks list the rollouts of each group, and the journals contain the finished rollouts. The buffer only
reads both. After a restart, a process rebuilds the buffer from the ``settled`` field of the last plan, and rereads only
the waiting rollouts. A group is *complete* once each of its rollouts has finished or failed.

Damaged records are skipped. Pods mark a block as done once the records of all its rollouts are durable. If a rollout in
a done block has no readable record after a while, the record is lost and the rollout counts as failed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megaflow_hpc.config.sections import Method
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import Ledger, read_block
from megaflow_hpc.ledger.blocks import numbers
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.training.algorithms.rewards import scored, scores
from megaflow_hpc.training.algorithms.samples import Sample, SampleGroup, StoredRollout, TurnTokens
from megaflow_hpc.training.microbatch import Ordinal
from megaflow_hpc.training.plan import RecordPlace, Settled, StepPlan
from megaflow_hpc.trajectories.journal.winners import Index, RecordEntry
from megaflow_hpc.trajectories.reading.follow import MAX_CACHE_AGE_S, Follower
from megaflow_hpc.trajectories.reading.sources import experts_of
from megaflow_hpc.trajectory import Image, TokenSequence, Trajectory, Turn
from megaflow_hpc.types import VERIFIED, Rollout

logger = logging.getLogger(__name__)

TOKEN_BYTES = 13
"""Bytes that a cached token takes for its id, mask, log-probability and version."""
MAX_CACHED_TOKENS = 16 << 20
"""Maximum number of tokens to cache. Each takes :data:`TOKEN_BYTES`."""
MAX_SCORED_AT_ONCE = 64
"""Maximum number of rollouts per call of a scorer. It limits memory, because a scorer receives complete records."""
LOST_AFTER_S = MAX_CACHE_AGE_S
"""A record that is missing from a done block counts as lost after this many seconds. Until then, a file-system cache
may hide it."""
LOST = "unreadable record"
"""Error kind of a rollout whose journal record is lost."""


@dataclass
class _Collected:
    """A group of rollouts, with the samples that have arrived so far."""

    task: str
    block: int
    round: int
    expected: dict[str, tuple[int, Rollout]] = field(default_factory=dict)
    """Maps rollout ids to (block number, rollout)."""
    samples: dict[str, Sample] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrived:
    """An arrived rollout: the location of its record, and the lengths that packing needs."""

    place: RecordPlace
    lengths: tuple[int, ...]
    """Token count of each of the policy's sequences."""
    sampled: tuple[int, ...]
    """Number of sampled tokens in each of the policy's sequences."""


class Buffer:
    """Holds the groups of one policy until a step settles them. A step settles a group by training on it or dropping
    it.

    Args:
        run: the run directory.
        sequences: reads the trained policy's sequences.
        owners: policies whose rollouts contain the policy's tokens. ``None`` means all policies, for a model that other
            policies' agents call too.
        ordinal: converts a campaign-wide weight version to its index among the policy's versions.
        settled: state of the buffer after an earlier plan.
        held_out: ids of evaluation tasks, whose rollouts are ignored.
        score: function that scores rollouts as they arrive, before their groups are complete.
    """

    def __init__(
        self,
        run: RunDir,
        sequences: Sequences,
        owners: frozenset[str] | None,
        ordinal: Ordinal,
        settled: Settled,
        held_out: frozenset[str] = frozenset(),
        score: Method | None = None,
    ) -> None:
        self._held_out, self._score = held_out, score
        self._unscored: list[tuple[Sample, Arrived]] = []
        """Rollouts that have been read, but that the scorer has not scored yet."""
        self._run, self._sequences, self._owners, self._ordinal = run, sequences, owners, ordinal
        self._follower = Follower(run, cursor=settled.cursor or None)
        self._unread: deque[RecordEntry] = deque()
        """Journal entries to process. The follower that read them has already moved its cursor past them."""
        self._groups: dict[str, _Collected] = {}
        self._group_of: dict[str, str] = {}
        """Maps rollout ids to their unsettled group."""
        self._blocks: dict[int, set[str]] = {}
        """Maps block numbers to the block's unsettled groups. A block without unsettled groups stays until all earlier
        blocks are settled."""
        self._groups_in: dict[int, frozenset[str]] = {}
        """Maps block numbers to all of the policy's groups in the block."""
        self._first_block, self._settled = settled.first_block, set(settled.groups)
        self.arrived: dict[str, Arrived] = {}
        self._done: set[int] = set()
        """Blocks that were done at the last check."""
        self._done_read_at = -math.inf
        self._missing: dict[str, float] = {}
        """Maps the id of a rollout in a done block to the monotonic time at which its record was first missing."""
        self._read_new_blocks()
        for place in settled.waiting:
            self._add(place)

    def poll(self) -> int:
        """Reads the rollouts that finished since the last call and returns their number.

        Raises:
            OSError: the run directory is unavailable. The next call continues.
            ConfigError: the scorer raised an exception or returned an invalid result.
        """
        done = self._done_blocks()  # listed before polling, so that the poll covers their records
        self._unread.extend(self._follower.entries())
        if self._unread:
            self._read_new_blocks()
        added = 0
        while self._unread:
            entry = self._unread[0]
            if entry.id in self._group_of:  # not another policy's, and its group is not settled
                added += self._add(RecordPlace(entry.journal, entry.start, entry.epoch))
            self._unread.popleft()
        self._score_arrivals()
        return added + self._give_up_lost(done)

    @property
    def journals(self) -> int:
        """Number of journal files that each call of :meth:`poll` checks for new records."""
        return len(self._follower.cursor["journals"])

    def complete(self) -> list[SampleGroup]:
        """Returns the complete groups in block order."""
        return [
            SampleGroup(name, group.task, tuple(sorted(group.samples.values(), key=lambda sample: sample.index)))
            for name, group in self._groups.items()
            if len(group.samples) == len(group.expected)
        ]

    def rounds_under_way(self) -> set[int]:
        """Returns the round numbers of the incomplete groups in the blocks read so far. Groups requested together share
        a round."""
        return {group.round for group in self._groups.values() if len(group.samples) < len(group.expected)}

    @property
    def open_groups(self) -> int:
        """Number of unsettled groups, complete or not."""
        self._read_new_blocks()
        return len(self._groups)

    def settle(self, groups: Iterable[str]) -> None:
        """Removes groups, given their ids, because a plan has trained on them or dropped them."""
        for name in groups:
            group = self._groups.pop(name)
            self._settled.add(name)
            self._blocks[group.block].discard(name)
            for rollout in group.expected:
                del self._group_of[rollout]
                self.arrived.pop(rollout, None)
        while self._first_block in self._blocks and not self._blocks[self._first_block]:
            del self._blocks[self._first_block]
            self._settled -= self._groups_in.pop(self._first_block)
            self._first_block += 1

    def read_groups(self, plan: StepPlan) -> list[tuple[SampleGroup, dict[str, Arrived]]]:
        """Rereads the groups that an earlier plan used for the first time. Skips damaged records."""
        by_group: dict[str, dict[str, tuple[Sample, Arrived]]] = {}
        for rollout in plan.rollouts:
            read = None if rollout.replayed else self.read(rollout.place, rollout.scores)
            if read is not None:
                by_group.setdefault(rollout.group, {})[rollout.id] = read
        groups = []
        for name, own in by_group.items():
            samples = tuple(sample for sample, _ in own.values())
            arrived = {rollout: arrival for rollout, (_, arrival) in own.items()}
            groups.append((SampleGroup(name, samples[0].task, samples), arrived))
        return groups

    @property
    def settled(self) -> Settled:
        """Returns the state from which a later process can rebuild the buffer."""
        waiting = [
            self.arrived[rollout].place
            for group in self._groups.values()
            for rollout in group.samples
            if rollout in self.arrived  # otherwise its record is lost
        ]
        cursor = self._follower.cursor
        # A failure in a settled group is final, so a later success of that rollout is ignored.
        cursor["failed"] = [rollout for rollout in cursor["failed"] if rollout in self._group_of]
        return Settled(
            cursor=cursor,
            waiting=waiting,
            first_block=self._first_block,
            groups=sorted(self._settled),
        )

    def _read_new_blocks(self) -> None:
        for number in numbers(self._run):
            if number < self._first_block or number in self._blocks:
                continue
            ours = [
                rollout
                for rollout in read_block(self._run, number).rollouts
                if rollout.task_id not in self._held_out and (self._owners is None or rollout.policy in self._owners)
            ]
            for rollout in ours:
                name = rollout.group_id
                if name not in self._settled:
                    group = self._groups.setdefault(name, _Collected(rollout.task_id, number, rollout.round))
                    group.expected[rollout.id] = number, rollout
                    self._group_of[rollout.id] = name
            self._groups_in[number] = frozenset(rollout.group_id for rollout in ours)
            self._blocks[number] = {
                name for name in self._groups_in[number] if name in self._groups and self._groups[name].block == number
            }

    def _done_blocks(self) -> set[int]:
        """Returns the numbers of done blocks. Rereads them at intervals, and only while rollouts are missing."""
        now = time.monotonic()
        if now - self._done_read_at >= LOST_AFTER_S / 4 and any(map(_lacking, self._groups.values())):
            self._done, self._done_read_at = Ledger(self._run).done(), now
        return self._done

    def _give_up_lost(self, done: set[int]) -> int:
        """Marks the rollouts whose records are lost as failed. Returns their number."""
        now, before = time.monotonic(), self._missing
        missing = [
            (rollout, name, group)
            for name, group in self._groups.items()
            for block, rollout in _lacking(group)
            if block in done
        ]
        self._missing = {rollout.id: before.get(rollout.id, now) for rollout, *_ in missing}
        lost = [entry for entry in missing if now - self._missing[entry[0].id] >= LOST_AFTER_S]
        for rollout, name, group in lost:
            logger.warning("%s: rollout %s has no readable record; it counts as failed", self._run, rollout.id)
            group.samples[rollout.id] = Sample(
                id=rollout.id,
                task=rollout.task_id,
                group=name,
                agent=rollout.agent,
                index=rollout.sample_index,
                status="failed",
                error_kind=LOST,
            )
        return len(lost)

    def read(self, place: RecordPlace, scores: Mapping[str, float] = {}) -> tuple[Sample, Arrived] | None:
        """Reads a rollout, or returns ``None`` if its record is damaged.

        Args:
            scores: the rollout's rewards from a scorer; empty if it has none.
        """
        try:
            sample, arrived = read_sample(self._sequences, place, self._ordinal)
        except DamagedRecord as error:
            logger.warning("%s; skipped", error)
            return None
        return (scored(sample, scores) if scores else sample), arrived

    def _add(self, place: RecordPlace) -> bool:
        read = self.read(place)
        if read is None or read[0].id not in self._group_of:
            return False
        if self._score and read[0].status in VERIFIED and read[0].tokens:
            self._unscored.append(read)
        else:
            self._take(*read)
        return True

    def _take(self, sample: Sample, arrived: Arrived) -> None:
        self.arrived[sample.id] = arrived
        self._groups[self._group_of[sample.id]].samples[sample.id] = sample

    def _score_arrivals(self) -> None:
        """Calls the scorer with the rollouts that have arrived and are not scored yet."""
        while self._unscored and self._score:
            waiting, stored = self._unscored[:MAX_SCORED_AT_ONCE], []
            for sample, arrived in waiting:
                try:
                    stored.append(StoredRollout(sample, self._sequences.read(arrived.place)[0]))
                except DamagedRecord as error:
                    logger.warning("%s; skipped", error)
            rewards = scores(self._score, stored) if stored else {}
            del self._unscored[: len(waiting)]
            for sample, arrived in waiting:
                if sample.id in rewards:
                    self._take(scored(sample, rewards[sample.id]), arrived)


def _lacking(group: _Collected) -> list[tuple[int, Rollout]]:
    """Returns the rollouts of a group that have not arrived yet, as (block number, rollout)."""
    return [expected for id, expected in group.expected.items() if id not in group.samples]


class DamagedRecord(ConfigError):
    """A rollout's record is damaged, although the run directory is readable."""


class Sequences:
    """Reads a policy's sequences from the journals, and caches recently read ones.

    A step reads each rollout several times: for the plan, for proximal log-probabilities, and in each epoch. Callers
    must not modify the returned sequences.

    Args:
        longest: maximum number of tokens in a sequence. Longer sequences are truncated. ``None`` means no maximum.
    """

    def __init__(self, run: RunDir, policy: str, longest: int | None = None) -> None:
        self._journals, self.policy, self._longest = Index(run.journal), policy, longest
        self._kept: OrderedDict[RecordPlace, tuple[list[TokenSequence], Mapping[str, Image]]] = OrderedDict()
        self._tokens = 0
        """Number of cached tokens."""

    def at(self, place: RecordPlace) -> list[TokenSequence]:
        """Returns the policy's sequences in the record at ``place``. Raises the errors of :meth:`read`."""
        if place not in self._kept:
            self.read(place)
        return self._kept[place][0]

    def images(self, place: RecordPlace) -> Mapping[str, Image]:
        """Returns the images in the record at ``place``, by SHA-256. Raises the errors of :meth:`read`."""
        self.at(place)
        return self._kept[place][1]

    def read(self, place: RecordPlace) -> tuple[Trajectory, list[TokenSequence]]:
        """Reads the record at ``place``. Returns the trajectory and the policy's sequences, which may be truncated.

        Raises:
            DamagedRecord: the rollout's record is damaged.
            ConfigError: the journal cannot be read.
        """
        try:
            trajectory = self._journals.load(RecordEntry("", "", place.epoch, 0, 0, place.journal, place.start, 0))
        except ConfigError as error:
            if isinstance(error.__cause__, OSError):  # the file system may recover, so keep the record
                raise
            raise DamagedRecord(str(error)) from None
        sequences = [s.first(self._longest) for s in trajectory.sequences if s.policy == self.policy]
        if lost := {span.image for s in sequences for span in s.images} - trajectory.images.keys():
            raise DamagedRecord(f"{place.journal}: the record at byte {place.start} lacks the image {min(lost)[:12]}…")
        self._tokens -= _tokens(*self._kept.pop(place, ([], {})))
        self._kept[place] = sequences, trajectory.images
        self._tokens += _tokens(sequences, trajectory.images)
        while self._tokens > MAX_CACHED_TOKENS and len(self._kept) > 1:
            self._tokens -= _tokens(*self._kept.popitem(last=False)[1])
        return trajectory, sequences


def _tokens(sequences: Iterable[TokenSequence], images: Mapping[str, Image]) -> int:
    """Returns the size of sequences and images in tokens. A token takes :data:`TOKEN_BYTES` bytes."""
    more = sum(len(image.data) for image in images.values()) // TOKEN_BYTES
    return more + sum(len(sequence.tokens) + len(sequence.experts) // TOKEN_BYTES for sequence in sequences)


def read_sample(sequences_of: Sequences, place: RecordPlace, ordinal: Ordinal) -> tuple[Sample, Arrived]:
    """Reads a rollout. Returns the sample for the data algorithms, and the lengths for packing. Raises the errors of
    :meth:`Sequences.read`."""
    trajectory, sequences = sequences_of.read(place)
    sampled = _sampled(sequences)
    sample = _sample(trajectory, sequences_of.policy, sequences, sampled, ordinal)
    return sample, Arrived(place, tuple(len(sequence.tokens) for sequence in sequences), sampled)


def _sampled(sequences: Sequence[TokenSequence]) -> tuple[int, ...]:
    """Returns the number of sampled tokens of each sequence."""
    return tuple(int(np.count_nonzero(np.frombuffer(s.loss_mask, np.uint8))) for s in sequences)


def stored_rollout(trajectory: Trajectory) -> StoredRollout:
    """Converts a trajectory to the form that scorers receive. Used outside of training, so versions keep their
    campaign-wide numbers."""
    sequences = [sequence for sequence in trajectory.sequences if sequence.policy == trajectory.policy]
    sample = _sample(trajectory, trajectory.policy, sequences, _sampled(sequences), lambda version: version)
    return StoredRollout(sample, trajectory)


def _sample(
    trajectory: Trajectory, policy: str, sequences: list[TokenSequence], sampled: tuple[int, ...], ordinal: Ordinal
) -> Sample:
    """Returns a rollout as a sample for the data algorithms. Turns and token counts come from the policy's sequences,
    which may be truncated."""
    versions: set[int] = set()
    for sequence in sequences:
        column = np.frombuffer(sequence.weight_versions, np.int32)
        column = column[column >= 0]
        one = len(column) and (column == column[0]).all()  # faster than ``unique``, which sorts
        versions.update((column[:1] if one else np.unique(column)).tolist())
    ordinals = [ordinal(version) for version in versions]
    return Sample(
        id=trajectory.id,
        task=trajectory.task_id,
        group=trajectory.group_id,
        agent=trajectory.agent,
        index=trajectory.sample_index,
        status=trajectory.status,
        error_kind=trajectory.error_kind,
        reward=float("nan") if trajectory.reward is None else trajectory.reward,
        rewards=dict(trajectory.rewards),
        oldest=min(ordinals, default=-1),
        newest=max(ordinals, default=-1),
        tokens=sum(sampled),
        longest=max((len(s.tokens) for s in trajectory.sequences if s.policy == policy), default=0),
        time_ns=int(trajectory.finished_at * 1e9) if math.isfinite(trajectory.finished_at) else 0,
        sequences=len(sequences),
        turns=_turns(trajectory, policy, sequences),
        roles=_roles(trajectory, policy),
        agent_s=trajectory.agent_s or 0.0,
    )


def _own(trajectory: Trajectory, policy: str) -> list[int]:
    """Returns the indices of the policy's sequences among all sequences of the trajectory."""
    return [number for number, sequence in enumerate(trajectory.sequences) if sequence.policy == policy]


def _turns(trajectory: Trajectory, policy: str, sequences: list[TokenSequence]) -> tuple[TurnTokens, ...]:
    """Returns the policy's model calls that sampled tokens. The sequences may be truncated."""
    numbers = {index: number for number, index in enumerate(_own(trajectory, policy))}
    turns = []
    for call, turn in enumerate(trajectory.turns):
        number = numbers.get(turn.sequence)
        if number is not None:
            length = len(sequences[number].tokens)
            start, end = min(turn.token_start, length), min(turn.token_end, length)
            turns.append(TurnTokens(call, number, start, end, _state(trajectory, turn)))
    return tuple(turns)


def _roles(trajectory: Trajectory, policy: str) -> tuple[str, ...]:
    """Returns the role of each of the policy's sequences. Returns an empty tuple if the agents do not form a team."""
    by_sequence = {turn.sequence: turn.role for turn in trajectory.turns}
    roles = tuple(by_sequence.get(number, "") for number in _own(trajectory, policy))
    return roles if any(roles) else ()


def _state(trajectory: Trajectory, turn: Turn) -> str:
    """Returns a digest of the last message before a model call. Returns an empty string if there is no message."""
    before = trajectory.parents[turn.message] if 0 <= turn.message < len(trajectory.parents) else -1
    if before < 0:
        return ""
    message = trajectory.messages[before]
    content = message.get("content")  # not the tool-call ids, which differ between rollouts
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    digest = hashlib.blake2b(f"{message.get('role')}\0{text}".encode("utf-8", "surrogatepass"), digest_size=8)
    return digest.hexdigest()


Routing = tuple[int, int, int]
"""Sizes of a mixture-of-experts model: number of layers, experts chosen per token, experts per layer."""


def check_experts(sequence: TokenSequence, routing: Routing) -> None:
    """Checks that a model can route a sequence's tokens to the experts that the engine chose.

    Raises:
        DamagedRecord: the number of layers or of experts per token differs, or the model lacks a recorded expert.
    """
    experts = experts_of(sequence)
    if experts is None:
        return
    layers, per_token, count = routing
    if experts.shape[1:] != (layers, per_token):
        raise DamagedRecord(
            f"its record has {experts.shape[1]} layers with {experts.shape[2]} experts for each token, but the "
            f"trainer's model has {layers} with {per_token}"
        )
    recorded = experts[(experts != np.iinfo(experts.dtype).max).any((1, 2))]
    if len(recorded) and recorded.max() >= count:
        raise DamagedRecord(f"its record names expert {recorded.max()}, but the trainer's model has {count}")
