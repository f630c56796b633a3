"""Access to the campaign's judges while one rollout is verified. The calls to judges are stored as an artifact."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.tasks.judging import Judge
from megaflow_hpc.trajectories.reading.conversations import conversations, main
from megaflow_hpc.trajectory import Recording, Trajectory, linked, path_to
from megaflow_hpc.types import Artifact

JUDGE_FILE = "judge.json"
"""Name of the artifact that lists all calls to judges, with model, messages and token counts."""
MAX_JUDGE_BYTES = 1 << 20
"""Maximum size of the artifact in bytes. A larger artifact is stored without the messages."""


class Judges:
    """The campaign's judges, as used to verify one rollout.

    Args:
        gateway: The gateway that serves the rollout.
        rollout: Id of the rollout.
        models: Names of the campaign's judges. Empty if the campaign has none.
    """

    def __init__(self, gateway: ModelGateway, rollout: str, models: Sequence[str]) -> None:
        self._gateway, self._session, self.models = gateway, f"{rollout}#judge", tuple(models)
        self._recordings: list[Recording] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Judge]:
        """Context manager that gives access to the judges.

        Raises:
            ModelServiceError: The judges' engines were down. Replaces any error raised inside the block.
        """
        judge = Judge(await self._gateway.open(self._session, self.models[0], judging=True), self.models)
        error: Exception | None = None
        try:
            try:
                yield judge
            except Exception as raised:
                error = raised
            if outage := judge.unanswered or await self._gateway.outage(self._session):
                raise ModelServiceError(f"judge: {outage.removeprefix('judge: ')}") from error
            if error is not None:
                raise error
        finally:
            self._recordings.append(await self._gateway.close(self._session))

    def artifacts(self) -> list[Artifact]:
        """Returns a list with the artifact that contains all calls. Empty if no judge was called."""
        calls = [call for recording in self._recordings for call in _calls(recording)]
        if not calls:
            return []
        text = json.dumps(calls)
        if len(text) > MAX_JUDGE_BYTES:
            text = json.dumps([{**call, "messages": None} for call in calls])
        return [Artifact(JUDGE_FILE, text.encode())]


def _calls(recording: Recording) -> list[dict[str, Any]]:
    return [
        {
            "model": turn.policy,
            "messages": [recording.messages[node] for node in path_to(recording.parents, turn.message)],
            "prompt_tokens": turn.token_start,
            "sampled_tokens": turn.token_end - turn.token_start,
        }
        for turn in recording.turns
    ]


def by_role(trajectory: Trajectory) -> dict[str, list[dict[str, Any]]]:
    """Returns the conversation of each role's latest call; empty without a team."""
    parents = linked(trajectory.parents, len(trajectory.messages))
    latest = {turn.role: turn.message for turn in trajectory.turns if turn.role and turn.message >= 0}
    return {role: [trajectory.messages[node] for node in path_to(parents, end)] for role, end in latest.items()}


def conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Returns the messages of a rollout's main conversation, which is the conversation of its policy with the most
    calls."""
    parents = linked(trajectory.parents, len(trajectory.messages))
    candidates = conversations(trajectory.messages, parents, trajectory.turns)
    return candidates[main(candidates, trajectory.policy)].messages if candidates else list(trajectory.messages)
