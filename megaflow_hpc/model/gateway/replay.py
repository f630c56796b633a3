"""Serves model calls from a recorded campaign instead of an engine, token by token.

``model: {engine: replay, path: RUN}`` starts no server: the gateway itself responds. A call is identified by its
rollout and the digest of its conversation, which is recorded with every call. So calls may arrive in any order and
concurrently, as with sub-agents. A call that was not recorded ends the rollout with an error that states the number of
calls served so far. With ``args: {diverged: answer}``, such a call gets the next recorded answer instead, so that the
rollout continues.

The recording of a replayed rollout equals the original: prompts, sampled ids, log-probabilities and weight versions.
Times are those of the replay.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any, Protocol

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.gateway.recorder import SampledTokens
from megaflow_hpc.trajectory import CALLS_FILE, Recording, TokenSequence, Trajectory
from megaflow_hpc.types import Artifact


class Recordings(Protocol):
    """A store of earlier rollouts."""

    def trajectory(self, rollout_id: str) -> Trajectory | None:
        """Returns the recorded rollout with this id, or ``None`` if it does not exist."""


@dataclass
class _Call:
    asked: str
    """Digest of the conversation."""
    sample: SampledTokens
    speaker: tuple[str, str] = ("", "")
    """Role and policy that answered the call."""
    used: bool = False


def calls_artifact(recording: Recording) -> Artifact:
    """Returns the artifact needed to replay a rollout. The number of sampled tokens bounds its size."""
    lines = (json.dumps(call, ensure_ascii=False, separators=(",", ":")) + "\n" for call in recording.calls)
    return Artifact(CALLS_FILE, "".join(lines).encode("utf-8", "backslashreplace"))


def calls_of(trajectory: Trajectory) -> list[_Call]:
    """Returns the recorded calls of a rollout.

    Token ids, log-probabilities and weight versions come from the token columns, answers from the messages, and request
    digests from an artifact.

    Raises:
        ModelServiceError: Calls are missing from the artifact.
    """
    artifacts = [artifact for artifact in trajectory.artifacts if artifact.name == CALLS_FILE]
    lines = [line for artifact in artifacts for line in artifact.data.split(b"\n") if line]
    calls = []
    for number, turn in enumerate(trajectory.turns):
        try:
            call = json.loads(lines[number])
            if turn.message >= 0:
                message = trajectory.messages[turn.message]
            else:
                message = {"role": "assistant", "content": call["text"]}
        except (IndexError, KeyError, ValueError):
            raise ModelServiceError(
                f"replay: rollout {trajectory.id}: only {number} of {len(trajectory.turns)} calls were recorded "
                "completely; leave the rollout out"
            ) from None
        sequence = trajectory.sequences[turn.sequence] if turn.sequence >= 0 else TokenSequence("")
        part = slice(turn.token_start, turn.token_end)
        prompt, tokens = sequence.tokens[: turn.token_start], list(sequence.tokens[part])
        sample = SampledTokens(
            prompt=prompt,
            images=[span for span in sequence.images if span.end <= turn.token_start],
            tokens=tokens,
            logprobs=list(sequence.logprobs[part]),
            text=message.get("content") or "",
            finish_reason=turn.finish_reason,
            weight_spans=_spans(sequence.weight_versions[part]),
            server=turn.server,
            message=message,
            request_id=call.get("id", ""),
            free=all(sequence.loss_mask[part]),
            counted=None if prompt or tokens else 0,  # the engine reported no tokens
        )
        calls.append(_Call(call.get("asked", ""), sample, (turn.role, turn.policy)))
    return calls


def _spans(versions: array[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for end, version in enumerate(versions, 1):
        if spans and spans[-1][0] == version:
            spans.pop()
        spans.append((version, end))
    return spans


@dataclass
class Replay:
    """Recorded answers of one policy.

    Args:
        recordings: Store of the policy's rollouts.
        policy: The policy's name in the recorded campaign. Empty if the name is unchanged.
        answer_diverged: Serve the next recorded answer to a call that was not recorded, instead of an error.
    """

    recordings: Recordings
    policy: str = ""
    answer_diverged: bool = False
    _open: dict[str, list[_Call]] = field(default_factory=dict)
    """Calls of each session, by session. Each attempt of a rollout is a new session and starts from the beginning."""

    def begin(self, token: str, rollout_id: str) -> None:
        """Loads the recorded calls of a rollout for a session.

        Raises:
            ModelServiceError: The rollout or one of its calls was not recorded.
        """
        task, arm, sample = rollout_id.rsplit("/", 2)
        policy, plus, scaffold = arm.partition("+")
        name = f"{task}/{self.policy or policy}{plus}{scaffold}/{sample}"
        trajectory = self.recordings.trajectory(name)
        if trajectory is None:
            raise ModelServiceError(f"replay: rollout {name} was not recorded")
        self._open[token] = calls_of(trajectory)

    def end(self, token: str) -> None:
        """Forgets a session and its calls."""
        self._open.pop(token, None)

    def answer(self, token: str, rollout_id: str, asked: str, speaker: tuple[str, str] = ("", "")) -> SampledTokens:
        """Returns the recorded answer to a conversation. Each recorded call is served only once. If several models got
        the same conversation, the answer of the same role or policy is preferred.

        Args:
            token: Name of the session.
            rollout_id: ``<task>/<policy>/<sample>``.
            asked: Digest of the conversation.
            speaker: Role and policy that the call requests.

        Raises:
            ModelServiceError: The rollout or the conversation was not recorded.
        """
        if token not in self._open:
            self.begin(token, rollout_id)
        calls = self._open[token]
        unused = [call for call in calls if not call.used]
        matching = unused if self.answer_diverged else []
        matching = [call for call in unused if call.asked == asked] or matching
        if not matching:
            raise ModelServiceError(
                f"replay: rollout {rollout_id} made a call that was not recorded, after "
                f"{len(calls) - len(unused)} of its {len(calls)} calls; something other than the model differs "
                "(args: {diverged: answer} continues with the next recorded answer)"
            )
        call = max(matching, key=lambda call: _likeness(call.speaker, speaker))  # ties: the first
        call.used = True
        return call.sample


def _likeness(one: tuple[str, str], other: tuple[str, str]) -> tuple[bool, ...]:
    return tuple(mine == theirs for mine, theirs in zip(one, other, strict=True))


def body_of(sample: SampledTokens, chat: bool, model: str) -> dict[str, Any]:
    """Formats a sample as an engine's response, which is a chat completion or a plain completion."""
    counts = {"prompt_tokens": len(sample.prompt), "completion_tokens": len(sample.tokens)}
    choice: dict[str, Any] = {"index": 0, "finish_reason": sample.finish_reason, "logprobs": None}
    choice |= {"message": dict(sample.message or {})} if chat else {"text": sample.text}
    return {
        "id": sample.request_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": {**counts, "total_tokens": sum(counts.values())},
    }
