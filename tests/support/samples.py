"""Sample trajectories, and run directories that contain them."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, write_run
from megaflow_hpc.trajectories import JournalWriter
from megaflow_hpc.trajectory import UNROUTED, Attempt, TokenSequence, Trajectory, Turn
from megaflow_hpc.types import Artifact


def sequence(draw: random.Random, policy: str = "default") -> tuple[TokenSequence, list[tuple[int, int]]]:
    """Draws a sequence of prompts and answers. Returns it with the spans of the answers."""
    found = TokenSequence(policy)
    spans = []
    for _ in range(draw.randint(1, 3)):
        prompt, answer = draw.randint(1, 40), draw.randint(1, 20)
        found.tokens.extend(draw.randrange(2**31) for _ in range(prompt + answer))
        found.logprobs.extend([math.nan] * prompt + [-10 * draw.random() for _ in range(answer)])
        found.loss_mask.extend([0] * prompt + [1] * answer)
        found.weight_versions.extend([-1] * prompt + [3] * answer)
        spans.append((len(found.tokens) - answer, len(found.tokens)))
    return found, spans


def add_experts(one: TokenSequence, draw: random.Random, width: int) -> None:
    """Adds the experts of three layers, two for each token, of ``width`` bytes. Those of the last token are unknown."""
    one.expert_layers, one.experts_per_token = 3, 2
    row = 3 * 2 * width
    one.experts.frombytes(draw.randbytes(row * (len(one.tokens) - 1)) + UNROUTED * row)


def trajectory(number: int, task: str = "task", status: str = "completed", **changes: Any) -> Trajectory:
    """Returns trajectory ``number``, the same at each call. ``changes`` are fields to set."""
    draw = random.Random(number)
    sequences, turns = [], []
    for place in range(number % 3):
        one, spans = sequence(draw)
        if number % 4 == 2:
            add_experts(one, random.Random(number), 1 + number // 8 % 2)
        sequences.append(one)
        turns += [Turn(place, a, b, "stop", draw.random(), 0.5, 0.25, 0.125, f"server-{place}") for a, b in spans]
    messages = [{"role": "user", "content": f"Ünïcode {'x' * number} 🦔"}, {"role": "assistant", "content": None}]
    messages = changes.get("messages", messages)
    parents = list(range(-1, len(messages) - 1))
    answers = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    for turn, answer in zip(turns, answers, strict=False):
        turn.policy, turn.message = "default", answer
    for turn in turns[1:] if len(sequences) > 1 and "messages" not in changes else ():
        # A conversation of its own, then more that continue the first.
        turn.policy, turn.message, turn.started_by = "default", len(messages) + 1, 0 if len(messages) == 2 else -1
        messages += [{"role": "user", "content": "…"}, {"role": "assistant", "content": f"number {turn.message}"}]
        parents += [-1 if turn.started_by == 0 else 1, turn.message - 1]
    fields = {
        "id": f"{task}/default/{number}",
        "task_id": task,
        "group_id": f"{task}/default",
        "policy": "default",
        "agent": "mini-swe-agent",
        "status": status,
        "sample_index": number,
        "node": "node-1",
        "job_id": "17_3",
        "reward": float(number % 2) if status in ("completed", "truncated") else None,
        "rewards": {"tests": 0.5} if number % 2 else {},
        "started_at": 1.7e9 + number,
        "finished_at": 1.7e9 + number + 0.25,
        "messages": messages,
        "parents": parents,
        "sequences": sequences,
        "turns": turns,
        "attempts": [Attempt(0, status, "", "", "node-1", "17_3", 1.0, 2.0)],
        "artifacts": [Artifact("patch.diff", draw.randbytes(number))] if number % 4 == 1 else [],
        **changes,
    }
    return Trajectory(**fields)


def run_dir(path: Path, name: str = "sample") -> RunDir:
    """Creates a run directory without rollouts."""
    run = RunDir(path)
    run.create()
    write_run(run, RunRecord(campaign={"name": name}))
    return run


def commit(run: RunDir, pod: str, *items: tuple[int, int, Trajectory], start: str = "0") -> list[int]:
    """Writes one journal of (block, epoch, trajectory); returns the offset behind each."""
    with JournalWriter(run.journal_file(pod, start)) as journal:
        return [
            journal.append({"kind": "trajectory", "block": block, "epoch": epoch, "trajectory": t.to_record()})
            for block, epoch, t in items
        ]
