"""Gives access to the campaign's judges while one rollout is verified. Stores the calls to judges as an artifact."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from megaflow_hpc.config.model import TokenPrice
from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.rundir.budget import ModelUse, Used, total_use
from megaflow_hpc.tasks.judging import Judge
from megaflow_hpc.trajectories.reading.conversations import conversations, main, tokens_of_calls
from megaflow_hpc.trajectory import Recording, Trajectory, linked, path_to, with_images
from megaflow_hpc.types import Artifact

JUDGE_FILE = "judge.json"
"""Name of the artifact that lists all calls to judges, with model, messages and token counts."""
MAX_JUDGE_BYTES = 1 << 20
"""Maximum size of the artifact in bytes. A larger artifact is stored without the messages."""


class Judges:
    """Access to the campaign's judges for the verification of one rollout.

    Args:
        gateway: The gateway that serves the rollout.
        rollout: Id of the rollout.
        models: Names of the campaign's judges. Empty if the campaign has none.
        prices: Token price of each judge that has a price, by name.
        reward_models: The reward models among ``models``.
    """

    def __init__(
        self,
        gateway: ModelGateway,
        rollout: str,
        models: Sequence[str],
        prices: Mapping[str, TokenPrice] | None = None,
        reward_models: Sequence[str] = (),
    ) -> None:
        self._gateway, self._session, self.models = gateway, f"{rollout}#judge", tuple(models)
        self._prices, self._reward_models = prices or {}, tuple(reward_models)
        self._recordings: list[Recording] = []

    @asynccontextmanager
    async def open(self, listener: socket.socket | None = None) -> AsyncIterator[Judge]:
        """Context manager that gives access to the judges.

        Args:
            listener: An additional socket, which listens in a sandbox.

        Raises:
            ModelServiceError: The judges' engines were down. Replaces any error raised inside the block.
        """
        in_words = [model for model in self.models if model not in self._reward_models]
        first = (in_words or self.models)[0]
        endpoint = await self._gateway.open(self._session, first, listener, judging=True)
        judge = Judge(endpoint, in_words, self._reward_models)
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

    def calls(self) -> list[dict[str, Any]]:
        """Returns all calls, each with its model, messages, token counts, and cost in US dollars if the judge has a
        price."""
        return [call for recording in self._recordings for call in self._calls(recording)]

    def artifacts(self) -> list[Artifact]:
        """Returns an artifact with all calls, as a list of length 1. Returns an empty list if no judge was called."""
        calls = self.calls()
        if not calls:
            return []
        text = json.dumps(calls)
        if len(text) > MAX_JUDGE_BYTES:
            text = json.dumps([{**call, "messages": None} for call in calls])
        return [Artifact(JUDGE_FILE, text.encode())]

    def _calls(self, recording: Recording) -> Iterator[dict[str, Any]]:
        for turn, call in zip(recording.turns, recording.calls, strict=True):
            prompt, sampled = call.get("tokens") or (turn.token_start, turn.token_end - turn.token_start)
            price = self._prices.get(turn.policy)
            yield {
                "model": turn.policy,
                "messages": [recording.messages[node] for node in path_to(recording.parents, turn.message)],
                "prompt_tokens": prompt,
                "sampled_tokens": sampled,
                **({"usd": price.of(prompt, sampled)} if price else {}),
            }


def used(trajectory: Trajectory, judges: Judges, metered: Mapping[str, TokenPrice | None]) -> Used:
    """Returns the token usage of the judges, and of the metered models that the rollout itself called.

    Args:
        metered: Token price of each metered model, or ``None`` if it has no price.
    """
    own = []
    counts = tokens_of_calls(trajectory)
    for turn, (prompt, sampled) in zip(trajectory.turns, counts, strict=True):
        if turn.policy in metered:
            price = metered[turn.policy]
            usd = price.of(prompt, sampled) if price else None
            own.append({turn.policy: ModelUse(1, prompt, sampled, usd)})
    return total_use([*own, *map(use_of, judges.calls())])


def use_of(call: Mapping[str, Any]) -> Used:
    """Returns the token usage of one call to a judge."""
    return {call["model"]: ModelUse(1, call["prompt_tokens"], call["sampled_tokens"], call.get("usd"))}


def by_role(trajectory: Trajectory) -> dict[str, list[dict[str, Any]]]:
    """Returns the conversation of each role's latest call, with its images. Returns an empty mapping without a team."""
    parents = linked(trajectory.parents, len(trajectory.messages))
    latest = {turn.role: turn.message for turn in trajectory.turns if turn.role and turn.message >= 0}
    paths = {role: [trajectory.messages[node] for node in path_to(parents, end)] for role, end in latest.items()}
    return {role: with_images(messages, trajectory.images) for role, messages in paths.items()}


def conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Returns the messages of a rollout's main conversation. Among the conversations of its policy, this is the one
    with the most calls. Images are ``data:`` URLs, which judges accept.
    """
    parents = linked(trajectory.parents, len(trajectory.messages))
    candidates = conversations(trajectory.messages, parents, trajectory.turns)
    messages = candidates[main(candidates, trajectory.policy)].messages if candidates else trajectory.messages
    return with_images(messages, trajectory.images)
