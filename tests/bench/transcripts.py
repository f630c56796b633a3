"""Transcripts to measure the store with: as long, as repetitive and as noisy as those of coding agents.

The text is real: the Python sources of the interpreter's own standard library, cut into pieces of about four characters
as a tokenizer would. Ids are spread over a vocabulary of 152,000 with frequent pieces low, as byte-pair merges leave
them. A rollout is a system prompt (the same for all), a task, then turns: what the model wrote (short spans of code, a
part of them copied from files it has read) and what the sandbox answered (stretches of three files, which come again).
About a quarter of the tokens is sampled. A log-probability is ``-log(1 + exp(-g))`` in float32 with g normal (5, 4):
most tokens nearly certain, a tail of surprises, and every mantissa noise. Messages hold the text of the very tokens.
"""

from __future__ import annotations

import re
import sysconfig
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectory import Attempt, TokenSequence, Trajectory, Turn
from megaflow_hpc.types import Artifact

VOCABULARY = 152_000
_PIECE = re.compile(r" ?[A-Za-z]{1,8}|\d{1,3}| ?[^\sA-Za-z\d]{1,3}|\s+")
_FILES = 200
_SAMPLED = 0.25
"""Part of a rollout that the model wrote."""

Ids = NDArray[np.int32]


class Transcripts:
    """Draws rollouts; the same for the same standard library."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_FILES]
        texts = [_PIECE.findall(path.read_text("utf-8", "replace")) for path in paths]
        ranked = [piece for piece, _ in Counter(piece for text in texts for piece in text).most_common()]
        spread = np.arange(len(ranked)) * 5 * draw.uniform(0.3, 1.5, len(ranked)) + draw.integers(0, 300, len(ranked))
        numbers = np.minimum(spread.astype(np.int32), VOCABULARY - 1)
        number_of = dict(zip(ranked, numbers.tolist(), strict=True))
        kept = [text for text in texts if len(text) > 2000]
        self._pieces = [np.array(text, object) for text in kept]
        self._ids = [np.array([number_of[piece] for piece in text], np.int32) for text in kept]

    def draw(self, number: int, tokens: int = 30_000, turns: int = 40) -> Trajectory:
        """Draws rollout ``number`` with about this many tokens and model calls."""
        draw = np.random.default_rng([number, tokens, turns])
        ids: list[Ids] = []
        logprobs: list[NDArray[np.float32]] = []
        messages: list[dict[str, Any]] = []
        found: list[Turn] = []
        files = draw.integers(0, len(self._ids), 3)
        count = 0

        def add(role: str, spans: list[tuple[int, int, int]]) -> None:
            nonlocal count
            text = "".join(piece for f, a, b in spans for piece in self._pieces[f][a:b])
            messages.append({"role": role, "content": text})
            part = np.concatenate([self._ids[f][a:b] for f, a, b in spans])
            sampled = role == "assistant"
            if sampled:
                gap = draw.normal(5, 4, len(part))
                logprobs.append((-np.log1p(np.exp(-gap))).astype(np.float32))
                found.append(Turn(0, count, count + len(part), "tool_calls", 2.5, 0.3, 0.01, 0.0, "server-0"))
            else:
                logprobs.append(np.full(len(part), np.nan, np.float32))
            ids.append(part)
            count += len(part)

        def stretch(file: int, length: int) -> tuple[int, int, int]:
            size = len(self._ids[file])
            length = max(1, min(length, size))
            start = int(draw.integers(0, size - length + 1))
            return file, start, start + length

        add("system", [(0, 0, min(1500, tokens // 8))])
        add("user", [stretch(int(draw.integers(len(self._ids))), min(800, tokens // 16))])
        each = max(8.0, (tokens - count) / turns)
        for _ in range(turns):
            length, spans = max(4, int(draw.gamma(4, each * _SAMPLED / 4))), []
            while length > 0:
                file = int(files[draw.integers(3)]) if draw.random() < 0.4 else int(draw.integers(len(self._ids)))
                spans.append(stretch(file, min(length, int(draw.integers(4, 30)))))
                length -= spans[-1][2] - spans[-1][1]
            add("assistant", spans)
            add("tool", [stretch(int(files[draw.integers(3)]), int(draw.gamma(2, each * (1 - _SAMPLED) / 2)) + 1)])
        return _trajectory(number, np.concatenate(ids), np.concatenate(logprobs), messages, found)


def _trajectory(
    number: int, ids: Ids, logprobs: NDArray[np.float32], messages: list[dict[str, Any]], turns: list[Turn]
) -> Trajectory:
    mask = ~np.isnan(logprobs)
    sequence = TokenSequence(
        "default",
        array("i", ids.tobytes()),
        array("f", logprobs.tobytes()),
        array("B", mask.astype(np.uint8).tobytes()),
        array("i", np.where(mask, 3, -1).astype(np.int32).tobytes()),
    )
    task = f"repository__project-{number // 8:06d}"
    started = 1.7e9 + number
    return Trajectory(
        id=f"{task}/default/{number % 8}",
        task_id=task,
        group_id=f"{task}/default",
        policy="default",
        agent="mini-swe-agent",
        status="completed",
        sample_index=number % 8,
        node=f"node-{number % 16:03d}",
        job_id="1234567_3",
        rank=number % 32,
        reward=float(number % 3 == 0),
        rewards={"tests": float(number % 3 == 0)},
        started_at=started,
        finished_at=started + 300,
        setup_s=0.4,
        agent_s=280.0,
        verify_s=12.0,
        messages=messages,
        sequences=[sequence],
        turns=turns,
        attempts=[Attempt(0, "completed", "", "", "node-001", "1234567_3", started, started + 300)],
        artifacts=[Artifact("patch.diff", messages[-1]["content"].encode()[:4000])],
    )
