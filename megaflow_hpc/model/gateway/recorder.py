"""Records a rollout's model calls as token sequences.

A call is a prompt (token ids) and the tokens sampled after it. If the prompt extends a recorded sequence, that sequence
grows: first by the new part of the prompt (not sampled), then by the sampled tokens. Otherwise a new sequence starts,
as for a second conversation of the rollout or an edited history.

::

    call 1   [ prompt 1 ][ sampled 1 ]                             sequence 0, turn 0
    call 2   [ prompt 1 ][ sampled 1 ][ observation ][ sampled 2 ] sequence 0, turn 1
    call 3   [ summary ][ sampled 3 ]                              sequence 1, turn 2

Invariants: a sampled token has a log-probability and the engine's weight version; every other token has NaN and -1.
``loss_mask`` is 1 for exactly the tokens that the policy sampled freely (:attr:`Sample.free`). Tokens are stored as the
engine reported them; nothing is tokenised again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from megaflow_hpc.model.gateway.conversations import AskedPrompt, Conversations
from megaflow_hpc.model.gateway.meaning import digest, same_message
from megaflow_hpc.trajectory import Recording, TokenSequence, Turn


@dataclass
class SampledTokens:
    """One answer of an engine: the ids as sampled, stop token included, with a log-probability for each."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    text: str = ""
    finish_reason: str = ""
    weight_version: int = 0
    weight_spans: Sequence[tuple[int, int]] = ()
    """Version and end index of each run of tokens, where they are not all of ``weight_version``."""
    server: str = ""
    message: Mapping[str, Any] | None = None
    """The answer as an OpenAI message; ``None`` for plain completions."""
    request_id: str = ""
    rendered: Sequence[int] | None = None
    """The prompt as the engine rendered it from the messages, if known; ``prompt`` is what it sampled from."""
    stopped: bool = False
    """Whether the last token ended the turn, rather than a limit."""
    policy: str = ""
    """Policy that answered; empty: the rollout's own."""
    free: bool = True
    """True if the tokens were sampled under the policy's own settings, with nothing that constrained them."""


@dataclass
class Tip:
    """The end of a sequence, from which a conversation that comes back as text goes on by its sampled ids."""

    rendered: array[int]
    messages: int
    """Number of messages that were sent."""
    answer: Mapping[str, Any]
    end: int
    """Tokens of the sequence up to the end of the answer."""
    stop: int | None
    """The token that ended the turn; ``None`` if a limit ended it."""
    start: int = 0
    """Number of tokens in the sequence before the answer."""


@dataclass
class Recorder:
    """Records the calls of one rollout. Not thread-safe: lives in the gateway's event loop."""

    policy: str
    recording: Recording = field(default_factory=Recording)
    sampled: int = 0
    calls: int = 0
    tips: dict[int, Tip] = field(default_factory=dict, repr=False)
    conversations: Conversations = field(init=False, repr=False)
    _last_answer: float = field(default=0.0, repr=False)
    _operations: int = field(default=0, repr=False)
    _began: float = field(default=0.0, repr=False)
    _asked_by: Turn | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.recording)

    def request_arrived(self) -> None:
        """Adds the time since the latest answer, but what of it the sandbox took, to that turn's ``agent_s``."""
        if self.recording.turns and self._last_answer:
            turn, now = self.recording.turns[-1], time.monotonic()
            going_on = now - self._began if self._operations and turn is self._asked_by else 0.0
            turn.agent_s += max(0.0, now - self._last_answer - turn.sandbox_s - going_on)
            self._last_answer = 0.0

    @contextmanager
    def in_sandbox(self) -> Iterator[None]:
        """Counts the time that this is open as ``sandbox_s`` of the latest turn; what goes on side by side, once."""
        if not self._operations:
            self._began, self._asked_by = time.monotonic(), self.recording.turns[-1] if self.recording.turns else None
        self._operations += 1
        try:
            yield
        finally:
            self._operations -= 1
            if not self._operations and self._asked_by:
                self._asked_by.sandbox_s += time.monotonic() - self._began

    def find(self, prompt: Sequence[int], policy: str = "") -> int | None:
        """Returns the index of the policy's longest sequence that ``prompt`` extends."""
        candidate, policy = _as_array(prompt), policy or self.policy
        best, best_length = None, -1
        for number, sequence in enumerate(self.recording.sequences):
            tokens, length = sequence.tokens, len(sequence.tokens)
            if not best_length < length <= len(candidate) or sequence.policy != policy:
                continue
            if not length or (candidate[length - 1] == tokens[-1] and candidate[:length] == tokens):
                best, best_length = number, length
        return best

    def add(
        self,
        sample: SampledTokens,
        messages: Sequence[Mapping[str, Any]] = (),
        asked: str | None = None,
        *,
        model_s: float = 0.0,
        wait_s: float = 0.0,
    ) -> Turn:
        """Stores one answer and returns its turn.

        Args:
            sample: The tokens that the engine reported.
            messages: The conversation that was sent, in OpenAI form, without the answer. Pass the value that
                :meth:`restore` returned when the call arrived; otherwise it is computed again.
            asked: Digest of the conversation, if the caller has it.
            model_s: Seconds from the request to its answer at the engine.
            wait_s: Seconds spent waiting for a server and on failed attempts.

        Raises:
            ValueError: The numbers of tokens and log-probabilities differ.
        """
        if len(sample.tokens) != len(sample.logprobs):
            raise ValueError(f"{len(sample.tokens)} sampled tokens, {len(sample.logprobs)} log-probabilities")
        policy, prompt = sample.policy or self.policy, _as_array(sample.prompt)
        number = self.find(prompt, policy)
        if number is None:
            number = len(self.recording.sequences)
            self.recording.sequences.append(TokenSequence(policy=policy))
        sequence = self.recording.sequences[number]
        known = len(sequence.tokens)
        _extend(sequence, prompt[known:], None, -1)
        start = len(sequence.tokens)
        done = 0
        for version, end in sample.weight_spans or [(sample.weight_version, len(sample.tokens))]:
            _extend(sequence, sample.tokens[done:end], sample.logprobs[done:end], version, sample.free)
            done = end
        turn = Turn(
            sequence=number,
            token_start=start,
            token_end=len(sequence.tokens),
            finish_reason=sample.finish_reason,
            model_s=model_s,
            wait_s=wait_s,
            server=sample.server,
            policy=policy,
        )
        self.recording.turns.append(turn)
        self.calls += 1
        self.sampled += len(sample.tokens)
        if sample.rendered is not None and sample.message is not None:
            stop = sample.tokens[-1] if sample.stopped else None
            rendered = array("i", sample.rendered)
            self.tips[number] = Tip(rendered, len(messages), sample.message, turn.token_end, stop, start)
        self._keep(turn, sample, messages, asked)
        return turn

    def add_text(
        self,
        sample: SampledTokens,
        messages: Sequence[Mapping[str, Any]] = (),
        asked: str | None = None,
        *,
        counted: int = 0,
        model_s: float = 0.0,
        wait_s: float = 0.0,
    ) -> Turn:
        """Stores an answer whose engine reports no tokens, and returns its turn, which is in no sequence.

        Args:
            sample: What the engine reported; its token columns are empty.
            messages: The conversation that was sent, in OpenAI form, without the answer.
            counted: Tokens that the engine says it sampled.
            asked, model_s, wait_s: As of :meth:`add`.
        """
        policy = sample.policy or self.policy
        turn = Turn(-1, 0, 0, sample.finish_reason, model_s, wait_s=wait_s, server=sample.server, policy=policy)
        self.recording.turns.append(turn)
        self.calls += 1
        self.sampled += counted
        self._keep(turn, sample, messages, asked)
        return turn

    def count(self, protocol: str, degraded: bool = False, free: bool = True) -> None:
        """Counts a call by how it was recorded (:attr:`~megaflow_hpc.trajectory.Recording.protocols`).

        Args:
            protocol: ``text``, ``plain``, ``split`` or ``replay``.
            degraded: The server reported less than its protocol promises.
            free: Nothing constrained the call's tokens (:attr:`Sample.free`).
        """
        self.recording.constrained += not free
        self.recording.protocols[protocol] = self.recording.protocols.get(protocol, 0) + 1
        self.recording.inexact += degraded or protocol == "text"

    def tip(
        self, rendered: Sequence[int], messages: Sequence[Mapping[str, Any]], policy: str = ""
    ) -> tuple[TokenSequence, Tip] | None:
        """Returns the latest turn that this conversation continues: same prompt, then the sampled answer, unchanged."""
        candidate = _as_array(rendered)
        return next(self._answered(messages, policy, lambda tip: candidate[: len(tip.rendered)] == tip.rendered), None)

    def answered(
        self, messages: Sequence[Mapping[str, Any]], policy: str = "", most: int = 1
    ) -> list[tuple[TokenSequence, Tip]]:
        """Returns up to ``most`` of the latest turns whose answers are part of this conversation."""
        return list(islice(self._answered(messages, policy, lambda tip: True), most))

    def _answered(
        self, messages: Sequence[Mapping[str, Any]], policy: str, wanted: Callable[[Tip], bool]
    ) -> Iterator[tuple[TokenSequence, Tip]]:
        for number, tip in reversed(self.tips.items()):
            sequence, place = self.recording.sequences[number], tip.messages
            if sequence.policy != (policy or self.policy) or len(messages) <= place or not wanted(tip):
                continue
            if same_message(messages[place], tip.answer):
                yield sequence, tip

    def restore(self, messages: Sequence[Mapping[str, Any]], policy: str = "") -> AskedPrompt:
        """Returns a call's conversation with the policy's earlier answers restored to what the engine generated.

        See :mod:`~megaflow_hpc.model.gateway.conversations`.
        """
        return self.conversations.find(messages, policy or self.policy)

    def finish(self) -> Recording:
        """Returns the recording, with the agent's time after the last turn."""
        self.request_arrived()
        return self.recording

    def state(self) -> dict[str, Any]:
        """Returns the whole state for :meth:`resumed` in another process, as a dict that msgpack takes."""
        recording = self.finish()
        return {
            "policy": self.policy,
            "recording": {
                **vars(recording),
                "sequences": [sequence.to_record() for sequence in recording.sequences],
                "turns": [dict(vars(turn)) for turn in recording.turns],
            },
            "sampled": self.sampled,
            "calls": self.calls,
            "tips": [[number, {**vars(tip), "rendered": tip.rendered.tobytes()}] for number, tip in self.tips.items()],
        }

    @classmethod
    def resumed(cls, state: Mapping[str, Any]) -> Recorder:
        """Makes a recorder that continues from a :meth:`state`."""
        kept = state["recording"]
        sequences = [TokenSequence.from_record(record) for record in kept["sequences"]]
        turns = [Turn(**turn) for turn in kept["turns"]]
        recording = Recording(**{**kept, "sequences": sequences, "turns": turns})
        tips = {number: Tip(**{**tip, "rendered": array("i", tip["rendered"])}) for number, tip in state["tips"]}
        return cls(state["policy"], recording, state["sampled"], state["calls"], tips)

    def _keep(
        self, turn: Turn, sample: SampledTokens, messages: Sequence[Mapping[str, Any]], asked: str | None
    ) -> None:
        """Stores the messages of the latest turn, and links the turn to its answer."""
        conversation = messages if isinstance(messages, AskedPrompt) else self.restore(messages, turn.policy)
        turn.started_by = conversation.started_by
        turn.message = self.conversations.add(conversation, sample.message, len(self.recording.turns) - 1)
        call = {"id": sample.request_id, "asked": digest(list(messages)) if asked is None else asked}
        self.recording.calls.append(call if sample.message is not None else {**call, "text": sample.text})
        self._last_answer = time.monotonic()


def _as_array(tokens: Sequence[int]) -> array[int]:
    return tokens if isinstance(tokens, array) else array("i", tokens)


def _extend(
    sequence: TokenSequence,
    tokens: Sequence[int],
    logprobs: Sequence[float] | None,
    version: int,
    free: bool = False,
) -> None:
    """Appends tokens to all four columns; ``logprobs`` is ``None`` if they were not sampled."""
    count = len(tokens)
    sequence.tokens.extend(_as_array(tokens))
    sequence.logprobs.extend(array("f", [float("nan")]) * count if logprobs is None else array("f", logprobs))
    sequence.loss_mask.extend(array("B", [free]) * count)
    sequence.weight_versions.extend(array("i", [version]) * count)
