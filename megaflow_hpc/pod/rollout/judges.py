"""Opens the campaign's judges for the verification of one rollout, and records what they were asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.tasks.judging import Judge
from megaflow_hpc.trajectory import Recording, Trajectory, path_to
from megaflow_hpc.types import Artifact

JUDGE_FILE = "judge.json"
"""Artifact with the calls of judges: model, messages, numbers of tokens."""
MAX_JUDGE_BYTES = 1 << 20
"""Maximum size of the artifact. Without room for the messages, only the numbers are stored."""


class Judges:
    """The judges of one rollout.

    Args:
        gateway: the gateway that serves the rollout.
        rollout: id of the rollout.
        models: names of the campaign's judges; empty if it has none.
    """

    def __init__(self, gateway: ModelGateway, rollout: str, models: Sequence[str]) -> None:
        self._gateway, self._session, self.models = gateway, f"{rollout}#judge", tuple(models)
        self._recordings: list[Recording] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Judge]:
        """Yields access to the judges, which ends with the context.

        Raises:
            ModelServiceError: the judges' engines were down, whatever was raised inside the context.
        """
        endpoint = await self._gateway.open(self._session, self.models[0], judging=True)
        error: Exception | None = None
        try:
            try:
                yield Judge(endpoint, self.models)
            except Exception as raised:
                error = raised
            if outage := await self._gateway.outage(self._session):
                raise ModelServiceError(f"judge: {outage}") from error
            if error is not None:
                raise error
        finally:
            self._recordings.append(await self._gateway.close(self._session))

    def artifacts(self) -> list[Artifact]:
        """Returns the artifact with all calls; empty if there was none."""
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


def conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Returns the conversation that ends with a rollout's last recorded call, or else what its agent reported."""
    last = next((turn.message for turn in reversed(trajectory.turns) if turn.message >= 0), -1)
    if last < 0:
        return list(trajectory.messages)
    return [trajectory.messages[node] for node in path_to(trajectory.parents, last)]
