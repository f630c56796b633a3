"""Records a rollout's model calls as token sequences.

A call is a prompt (token ids) and the tokens sampled after it. If the prompt extends a recorded sequence, that sequence
grows: first by the new part of the prompt (not sampled), then by the sampled tokens. Otherwise a new sequence starts.
This happens for a second conversation of the rollout, for instance, or after the history was edited.

::

    call 1   [ prompt 1 ][ sampled 1 ]                             sequence 0, turn 0
    call 2   [ prompt 1 ][ sampled 1 ][ observation ][ sampled 2 ] sequence 0, turn 1
    call 3   [ summary ][ sampled 3 ]                              sequence 1, turn 2

An image appears in a prompt as a run of placeholder tokens, and all images of the same size have the same run. A
sequence therefore also records the image of each run. A prompt extends the sequence only if the same images are at the
same positions.

Invariants: a sampled token has a log-probability and the engine's weight version. Every other token has NaN and -1.
``loss_mask`` is 1 exactly for tokens that the policy sampled freely (:attr:`SampledTokens.free`). Tokens are stored as
the engine reported them. Text is never tokenised again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from megaflow_hpc.model.engine_api import RoutedExperts
from megaflow_hpc.model.gateway.canonical import conversation_digest, same_message
from megaflow_hpc.model.gateway.conversations import AskedPrompt, Conversations
from megaflow_hpc.trajectory import (
    UNROUTED,
    Image,
    ImageSpan,
    Recording,
    TokenSequence,
    Turn,
    image_records,
    images_of,
)


class Prompt(NamedTuple):
    """Token ids of a prompt, and the spans of its images."""

    tokens: array[int]
    images: Sequence[ImageSpan] = ()

    def images_before(self, end: int) -> list[ImageSpan]:
        """Returns the spans that start before token ``end``."""
        return [span for span in self.images if span.start < end]


@dataclass
class SampledTokens:
    """One sampled answer: the token ids, including the stop token, with a log-probability for each."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    text: str = ""
    finish_reason: str = ""
    weight_version: int = 0
    weight_spans: Sequence[tuple[int, int]] = ()
    """(weight version, end index) of each run of tokens. Empty if a single version sampled all of them."""
    server: str = ""
    message: Mapping[str, Any] | None = None
    """The answer as an OpenAI message, or ``None`` for plain completions."""
    request_id: str = ""
    images: Sequence[ImageSpan] = ()
    """Image spans in ``prompt``."""
    rendered: Prompt | None = None
    """The prompt as the engine rendered it from the messages, if known. The engine sampled from ``prompt``, which may
    differ."""
    stopped: bool = False
    """True if the last token ended the turn, false if a limit ended it."""
    policy: str = ""
    """Policy that answered. Empty for the rollout's own policy."""
    role: str = ""
    """Role that the agent called. Empty if the agents do not form a team. Each role has its own sequences."""
    free: bool = True
    """True if the tokens were sampled with the policy's own settings and without constraints."""
    experts: RoutedExperts | None = None
    """Experts for the prompt and the sampled tokens, if the engine reports them."""
    counted: int | None = None
    """Number of sampled tokens if the engine reports no ids. ``None`` if the ids are in ``tokens``."""
    counted_prompt: int = 0
    """Number of prompt tokens, if ``counted`` is set."""


@dataclass
class Tip:
    """End of a sequence. If a conversation comes back as text, it continues here with the sampled ids."""

    rendered: array[int]
    """Prompt of the last turn, as the engine rendered it."""
    messages: int
    """Number of messages in the prompt."""
    answer: Mapping[str, Any]
    end: int
    """Index of the token after the answer, counted in the whole sequence."""
    stop: int | None
    """The token that ended the turn, or ``None`` if a limit ended it."""
    start: int = 0
    """Index of the answer's first token in the whole sequence."""
    images: list[ImageSpan] = field(default_factory=list)
    """Image spans in ``rendered``."""


@dataclass
class Recorder:
    """Records the calls of one rollout. Not thread-safe: use it only from the gateway's event loop."""

    policy: str
    recording: Recording = field(default_factory=Recording)
    sampled: int = 0
    """Number of tokens sampled so far."""
    calls: int = 0
    """Number of answers recorded so far."""
    tips: dict[int, Tip] = field(default_factory=dict, repr=False)
    """End of each sequence, by the sequence's number."""
    conversations: Conversations = field(init=False, repr=False)
    _roles: list[str] = field(init=False, repr=False)
    """Role of each sequence."""
    _answered_at: float = field(default=0.0, repr=False)
    """Time at which the latest answer was recorded. 0 once another request has arrived."""
    _operations: int = field(default=0, repr=False)
    """Number of sandbox operations in progress."""
    _operations_began: float = field(default=0.0, repr=False)
    _operating_turn: Turn | None = field(default=None, repr=False)
    """Turn that started the sandbox operations in progress."""

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.recording)
        roles = {turn.sequence: turn.role for turn in self.recording.turns}
        self._roles = [roles.get(number, "") for number in range(len(self.recording.sequences))]

    def request_arrived(self) -> None:
        """Adds the agent's time since the latest answer to that answer's turn (``agent_s``). Excludes sandbox time."""
        if self.recording.turns and self._answered_at:
            turn, now = self.recording.turns[-1], time.monotonic()
            in_progress_s = now - self._operations_began if self._operations and turn is self._operating_turn else 0.0
            turn.agent_s += max(0.0, now - self._answered_at - turn.sandbox_s - in_progress_s)
            self._answered_at = 0.0

    @contextmanager
    def in_sandbox(self) -> Iterator[None]:
        """Adds the time inside the context to the latest turn's ``sandbox_s``. Concurrent operations count once."""
        if not self._operations:
            self._operations_began = time.monotonic()
            self._operating_turn = self.recording.turns[-1] if self.recording.turns else None
        self._operations += 1
        try:
            yield
        finally:
            self._operations -= 1
            if not self._operations and self._operating_turn:
                self._operating_turn.sandbox_s += time.monotonic() - self._operations_began

    def find(
        self, prompt: Sequence[int], policy: str = "", role: str = "", images: Sequence[ImageSpan] = ()
    ) -> int | None:
        """Returns the index of the longest sequence of this policy and role that ``prompt`` extends.

        Returns ``None`` if it extends no sequence. The prompt must show the sequence's images at the same positions.
        """
        candidate, policy = Prompt(_as_array(prompt), images), policy or self.policy
        best, best_length = None, -1
        for number, sequence in enumerate(self.recording.sequences):
            tokens, length = sequence.tokens, len(sequence.tokens)
            if sequence.policy != policy or self._roles[number] != role or not best_length < length <= len(prompt):
                continue
            if candidate.images_before(length) != sequence.images:
                continue
            if not length or (candidate.tokens[length - 1] == tokens[-1] and candidate.tokens[:length] == tokens):
                best, best_length = number, length
        return best

    def routed(self, prompt: Sequence[int], policy: str = "", role: str = "", images: Sequence[ImageSpan] = ()) -> int:
        """Returns the number of tokens at the start of ``prompt`` for which experts are recorded."""
        number = self.find(prompt, policy, role, images)
        sequence = number is not None and self.recording.sequences[number]
        return len(sequence.tokens) - 1 if sequence and sequence.experts else 0

    def add(
        self,
        sample: SampledTokens,
        messages: Sequence[Mapping[str, Any]] = (),
        asked: str | None = None,
        *,
        model_s: float = 0.0,
        wait_s: float = 0.0,
        images: Mapping[str, Image] | None = None,
    ) -> Turn:
        """Stores one answer and returns its turn.

        Args:
            sample: The answer as the engine reported it. If it has no token ids (``counted``), its turn is in no
                sequence.
            messages: The conversation that was sent, in OpenAI form, without the answer. Pass the value that
                :meth:`restore` returned when the call arrived, or it is computed again.
            asked: Digest of the conversation, if already computed.
            model_s: Seconds from the request to the engine's response.
            wait_s: Seconds spent waiting for a server and on failed attempts.
            images: The images in the messages, by SHA-256.

        Raises:
            ValueError: The numbers of tokens and log-probabilities differ.
        """
        if len(sample.tokens) != len(sample.logprobs):
            raise ValueError(f"{len(sample.tokens)} sampled tokens, {len(sample.logprobs)} log-probabilities")
        policy = sample.policy or self.policy
        number, start, end = (-1, 0, 0) if sample.counted is not None else self._add_tokens(sample, policy)
        turn = Turn(
            sequence=number,
            token_start=start,
            token_end=end,
            finish_reason=sample.finish_reason,
            model_s=model_s,
            wait_s=wait_s,
            server=sample.server,
            policy=policy,
            role=sample.role,
        )
        self.recording.turns.append(turn)
        self.calls += 1
        self.sampled += len(sample.tokens) if sample.counted is None else sample.counted
        self.recording.images.update(images or {})
        if sample.rendered is not None and sample.message is not None:
            stop = sample.tokens[-1] if sample.stopped else None
            rendered, shown = array("i", sample.rendered.tokens), list(sample.rendered.images)
            self.tips[number] = Tip(rendered, len(messages), sample.message, end, stop, start, shown)
        conversation = messages if isinstance(messages, AskedPrompt) else self.restore(messages, policy)
        turn.started_by = conversation.started_by
        turn.message = self.conversations.add(conversation, sample.message, len(self.recording.turns) - 1)
        call: dict[str, Any] = {"id": sample.request_id}
        call["asked"] = conversation_digest(list(messages)) if asked is None else asked
        if sample.message is None:
            call["text"] = sample.text
        if sample.counted is not None:
            call["tokens"] = [sample.counted_prompt, sample.counted]
        self.recording.calls.append(call)
        self._answered_at = time.monotonic()
        return turn

    def _add_tokens(self, sample: SampledTokens, policy: str) -> tuple[int, int, int]:
        """Appends prompt and sampled tokens to a sequence. Returns its number, and the start and end of the answer."""
        prompt = _as_array(sample.prompt)
        number = self.find(prompt, policy, sample.role, sample.images)
        if number is None:
            number = len(self.recording.sequences)
            self.recording.sequences.append(TokenSequence(policy=policy))
            self._roles.append(sample.role)
        sequence = self.recording.sequences[number]
        previous_length = len(sequence.tokens)
        sequence.images += [span for span in sample.images if span.start >= previous_length]
        _extend(sequence, prompt[len(sequence.tokens) :], None, -1)
        start, done = len(sequence.tokens), 0
        for version, end in sample.weight_spans or [(sample.weight_version, len(sample.tokens))]:
            _extend(sequence, sample.tokens[done:end], sample.logprobs[done:end], version, sample.free)
            done = end
        _add_experts(sequence, sample.experts, previous_length)
        return number, start, len(sequence.tokens)

    def count(self, protocol: str, degraded: bool = False, free: bool = True) -> None:
        """Counts a call in :attr:`~megaflow_hpc.trajectory.Recording.protocols` by how it was recorded.

        Args:
            protocol: ``text``, ``plain``, ``split`` or ``replay``.
            degraded: True if the server reported less than its protocol promises.
            free: True if the call's tokens were not constrained (:attr:`SampledTokens.free`).
        """
        self.recording.constrained += not free
        self.recording.protocols[protocol] = self.recording.protocols.get(protocol, 0) + 1
        self.recording.inexact += degraded or protocol == "text"

    def tip(
        self, rendered: Prompt, messages: Sequence[Mapping[str, Any]], policy: str = "", role: str = ""
    ) -> tuple[TokenSequence, Tip] | None:
        """Returns the sequence and tip of the latest turn that this conversation continues. Returns ``None`` if it
        continues no turn.

        The prompt must be the same, and the answer unchanged.
        """

        def continues(tip: Tip) -> bool:
            length = len(tip.rendered)
            return rendered.tokens[:length] == tip.rendered and rendered.images_before(length) == tip.images

        return next(self._answered(messages, policy, role, continues), None)

    def answered(
        self, messages: Sequence[Mapping[str, Any]], policy: str = "", role: str = "", most: int = 1
    ) -> list[tuple[TokenSequence, Tip]]:
        """Returns (sequence, tip) of up to ``most`` turns whose answers are part of this conversation, latest first."""
        return list(islice(self._answered(messages, policy, role, lambda tip: True), most))

    def _answered(
        self, messages: Sequence[Mapping[str, Any]], policy: str, role: str, wanted: Callable[[Tip], bool]
    ) -> Iterator[tuple[TokenSequence, Tip]]:
        for number, tip in reversed(self.tips.items()):
            sequence = self.recording.sequences[number]
            if (sequence.policy, self._roles[number]) != (policy or self.policy, role):
                continue
            if len(messages) <= tip.messages or not wanted(tip):
                continue
            if same_message(messages[tip.messages], tip.answer):
                yield sequence, tip

    def restore(self, messages: Sequence[Mapping[str, Any]], policy: str = "") -> AskedPrompt:
        """Returns a call's conversation, with the policy's earlier answers restored as the engine generated them.

        See :mod:`~megaflow_hpc.model.gateway.conversations`.
        """
        return self.conversations.find(messages, policy or self.policy)

    def finish(self) -> Recording:
        """Adds the agent's time after the last turn and returns the recording."""
        self.request_arrived()
        return self.recording

    def state(self) -> dict[str, Any]:
        """Returns the recorder's state, from which :meth:`resumed` continues in another process. msgpack can encode
        it."""
        recording = self.finish()
        return {
            "policy": self.policy,
            "recording": {
                **vars(recording),
                "sequences": [sequence.to_record() for sequence in recording.sequences],
                "turns": [dict(vars(turn)) for turn in recording.turns],
                "images": image_records(recording.images),
            },
            "sampled": self.sampled,
            "calls": self.calls,
            "tips": [[number, {**vars(tip), "rendered": tip.rendered.tobytes()}] for number, tip in self.tips.items()],
        }

    @classmethod
    def resumed(cls, state: Mapping[str, Any]) -> Recorder:
        """Creates a recorder that continues from a :meth:`state`."""
        record = state["recording"]
        sequences = [TokenSequence.from_record(sequence) for sequence in record["sequences"]]
        turns = [Turn(**turn) for turn in record["turns"]]
        images = images_of(record["images"])
        recording = Recording(**{**record, "sequences": sequences, "turns": turns, "images": images})
        tips = {}
        for number, tip in state["tips"]:
            spans = [ImageSpan(*span) for span in tip["images"]]
            tips[number] = Tip(**{**tip, "rendered": array("i", tip["rendered"]), "images": spans})
        return cls(state["policy"], recording, state["sampled"], state["calls"], tips)


def _add_experts(sequence: TokenSequence, experts: RoutedExperts | None, previous_length: int) -> None:
    """Adds the experts of a sequence's new tokens.

    An engine does not route the last token that it samples. The next call reports the experts for that token.

    Args:
        previous_length: Number of tokens in the sequence before this call.
    """
    if experts is not None and not sequence.experts:
        sequence.expert_layers, sequence.experts_per_token = experts.layers, experts.per_token
        sequence.experts.frombytes(UNROUTED * (previous_length * experts.row))
    elif not sequence.experts:
        return
    width = experts.row if experts else 0
    if previous_length:
        width = len(sequence.experts) // previous_length
    shape = (sequence.expert_layers, sequence.experts_per_token, width)
    if experts is not None and (experts.layers, experts.per_token, experts.row) == shape:
        first = max(previous_length - 1, experts.start)
        del sequence.experts[first * width :]
        sequence.experts.frombytes(UNROUTED * (first * width - len(sequence.experts)))
        sequence.experts.frombytes(experts.data[(first - experts.start) * width :])
    sequence.experts.frombytes(UNROUTED * (len(sequence.tokens) * width - len(sequence.experts)))


def _as_array(tokens: Sequence[int]) -> array[int]:
    return tokens if isinstance(tokens, array) else array("i", tokens)


def _extend(
    sequence: TokenSequence,
    tokens: Sequence[int],
    logprobs: Sequence[float] | None,
    version: int,
    free: bool = False,
) -> None:
    """Appends tokens to all four columns. ``logprobs`` is ``None`` for tokens that were not sampled."""
    count = len(tokens)
    sequence.tokens.extend(_as_array(tokens))
    sequence.logprobs.extend(array("f", [float("nan")]) * count if logprobs is None else array("f", logprobs))
    sequence.loss_mask.extend(array("B", [free]) * count)
    sequence.weight_versions.extend(array("i", [version]) * count)
