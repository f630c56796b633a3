"""Answers model calls from a recorded campaign in the place of an engine, token by token.

``model: {engine: replay, path: RUN}``. No server is started: the gateway answers by itself. A call is identified by its
rollout and a digest of its conversation, kept with every recorded call, so calls may come in any order and at once, as
sub-agents make them. A call that was not recorded ends the rollout with the number of calls that were alike;
``args: {diverged: answer}`` gives it the next recorded answer instead, to see what follows.

The recording of a replayed rollout equals the first: prompts, sampled ids, log-probabilities and weight versions. Times
are those of the replay.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any, Protocol

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.gateway.recorder import SampledTokens
from megaflow_hpc.trajectory import Recording, TokenSequence, Trajectory
from megaflow_hpc.types import Artifact

ARTIFACT = "calls.jsonl"
"""Name of the artifact with one line of JSON per turn: :attr:`~megaflow_hpc.trajectory.Recording.calls`."""
_OLD_ARTIFACT = "engine.jsonl"
"""Its name in older recordings, whose lines also have the sampled ids, and end at 8 MiB."""


class Recordings(Protocol):
    """A store of earlier rollouts."""

    def trajectory(self, rollout_id: str) -> Trajectory | None:
        """Returns a recorded rollout, if there is one of this id."""


@dataclass
class _Call:
    asked: str
    sample: SampledTokens
    used: bool = False


def calls_artifact(recording: Recording) -> Artifact:
    """The artifact by which a rollout can be replayed; its size is bounded by the tokens that were sampled."""
    lines = (json.dumps(call, ensure_ascii=False, separators=(",", ":")) + "\n" for call in recording.calls)
    return Artifact(ARTIFACT, "".join(lines).encode("utf-8", "backslashreplace"))


def calls_of(trajectory: Trajectory) -> list[_Call]:
    """Returns the recorded calls of a rollout.

    Ids, log-probabilities and weight versions come from the token columns, answers from the messages, and digests of
    the requests from an artifact. Older recordings have the answers in the artifact too.

    Raises:
        ModelServiceError: the artifact lacks calls, as in older recordings of long rollouts.
    """
    kept = (ARTIFACT, _OLD_ARTIFACT)
    lines = [line for a in trajectory.artifacts if a.name in kept for line in a.data.split(b"\n") if line]
    found = []
    for number, turn in enumerate(trajectory.turns):
        try:
            call = json.loads(lines[number])
            message = trajectory.messages[turn.message] if turn.message >= 0 else call.get("message")
            message = message or {"role": "assistant", "content": call["text"]}
        except (IndexError, KeyError, ValueError):
            raise ModelServiceError(
                f"replay: of rollout {trajectory.id} {number} of {len(trajectory.turns)} calls were kept whole; the "
                "others cannot be answered (older recordings end at 8 MiB): leave the rollout out"
            ) from None
        sequence = trajectory.sequences[turn.sequence] if turn.sequence >= 0 else TokenSequence("")
        part = slice(turn.token_start, turn.token_end)
        sample = SampledTokens(
            prompt=sequence.tokens[: turn.token_start],
            tokens=list(sequence.tokens[part]),
            logprobs=list(sequence.logprobs[part]),
            text=message.get("content") or "",
            finish_reason=turn.finish_reason,
            weight_spans=_spans(sequence.weight_versions[part]),
            server=turn.server,
            message=message,
            request_id=call.get("id", ""),
            free=all(sequence.loss_mask[part]),
        )
        found.append(_Call(call.get("asked", ""), sample))
    return found


def _spans(versions: array[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for place, version in enumerate(versions, 1):
        if spans and spans[-1][0] == version:
            spans.pop()
        spans.append((version, place))
    return spans


@dataclass
class Replay:
    """The recorded answers of one policy.

    Args:
        recordings: where its rollouts are read.
        policy: its name in the recorded campaign; empty if it is the same.
        answer_diverged: whether a call that was not recorded gets the next recorded answer, instead of an error.
    """

    recordings: Recordings
    policy: str = ""
    answer_diverged: bool = False
    _open: dict[str, list[_Call]] = field(default_factory=dict)
    """Calls by session, so that a rollout that is tried again starts anew."""

    def begin(self, token: str, rollout_id: str) -> None:
        """Reads the recorded calls of a rollout for a session.

        Raises:
            ModelServiceError: the rollout, or all of its calls, is not among the recorded.
        """
        task, policy, sample = rollout_id.rsplit("/", 2)
        name = f"{task}/{self.policy or policy}/{sample}"
        trajectory = self.recordings.trajectory(name)
        if trajectory is None:
            raise ModelServiceError(f"replay: rollout {name} is not among the recorded ones")
        self._open[token] = calls_of(trajectory)

    def end(self, token: str) -> None:
        """Ends a session."""
        self._open.pop(token, None)

    def answer(self, token: str, rollout_id: str, asked: str) -> SampledTokens:
        """Returns the recorded answer to a conversation, each call's once.

        Args:
            token: names the session.
            rollout_id: ``<task>/<policy>/<sample>``.
            asked: the conversation's digest.

        Raises:
            ModelServiceError: the rollout is not recorded, or the conversation was not asked in it.
        """
        if token not in self._open:
            self.begin(token, rollout_id)
        calls = self._open[token]
        call = next((c for c in calls if not c.used and c.asked == asked), None)
        if call is None and self.answer_diverged:
            call = next((c for c in calls if not c.used), None)
        if call is None:
            done = sum(c.used for c in calls)
            raise ModelServiceError(
                f"replay: rollout {rollout_id} asks what was not asked in the recording, after {done} of its "
                f"{len(calls)} calls: something but the model differs (args: {{diverged: answer}} goes on with the "
                "next recorded answer)"
            )
        call.used = True
        return call.sample


def body_of(sample: SampledTokens, chat: bool, model: str) -> dict[str, Any]:
    """Returns a sample as the body of an engine's answer, a chat completion or a plain one."""
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
