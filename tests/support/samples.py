"""Sample trajectories, and run directories that contain them."""

from __future__ import annotations

import hashlib
import math
import random
import struct
import zlib
from pathlib import Path
from typing import Any

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, write_run
from megaflow_hpc.trajectories import JournalWriter
from megaflow_hpc.trajectory import UNROUTED, Attempt, Image, ImageSpan, TokenSequence, Trajectory, Turn
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


def png(width: int, height: int, number: int = 0) -> bytes:
    """Returns a real PNG of grey noise, the same for the same arguments and another for each number."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    draw = random.Random(f"{width} {height} {number}")
    rows = b"".join(b"\0" + draw.randbytes(width) for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def image(width: int = 8, height: int = 6, number: int = 0) -> Image:
    """Returns a real image; see :func:`png`."""
    data = png(width, height, number)
    return Image(hashlib.sha256(data).hexdigest(), "image/png", width, height, data)


def add_images(one: Trajectory, draw: random.Random, message: int = 0) -> None:
    """Shows images in a trajectory: the sequences' first tokens and a message show some of five images."""
    choice = [image(8, 6, number) for number in range(5)]
    for sequence_ in one.sequences:
        start, first_sampled = 0, list(sequence_.loss_mask).index(1)
        while (start := start + draw.randint(0, 3)) + (length := draw.randint(1, 4)) <= first_sampled:
            shown = draw.choice(choice)
            sequence_.images.append(ImageSpan(start, length, shown.sha256))
            one.images[shown.sha256] = shown
            start += length
    shown = draw.choice(choice)
    one.images[shown.sha256] = shown
    part = {"type": "image_url", "image_url": {"url": f"sha256:{shown.sha256}"}}
    one.messages = list(one.messages)
    one.messages[message] = {**one.messages[message], "content": [{"type": "text", "text": "look"}, part]}


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
    found = Trajectory(**fields)
    if number % 5 == 4 and not changes:
        add_images(found, random.Random(number))
    return found


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
