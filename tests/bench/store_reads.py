"""Opens a generated campaign file, and draws random batches from it, in new processes.

The file is written as the store writes any: real token columns, stretches of drawn transcripts under ids of their own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure, median

Note = Callable[[str], None]

BATCH = 1024


def reads(arguments: argparse.Namespace, transcripts: Any, room: Path, note: Note) -> list[Figure]:
    """Generates a campaign file, then measures opening it and drawing random batches from it."""
    from megaflow_hpc.trajectories.hdf5.schema import TOKEN_CHUNK

    count, each = arguments.generated, arguments.generated_tokens
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        room = arguments.keep
    path = room / "generated.h5"
    path.unlink(missing_ok=True)
    note(f"generating {count} rows of {each} tokens")
    began = time.perf_counter()
    generate(path, transcripts, count, each)
    seconds = time.perf_counter() - began
    size = path.stat().st_size
    note(f"{size / 1e9:.2f} GB in {seconds:.0f} s; reading in new processes")
    opened = [in_new_process(_READER, path, "open")[0] for _ in range(5)]
    batches = [pair for _ in range(2) for pair in in_new_process(_READER, path, "batch")]
    whole = count >= 1_000_000
    rows = min(BATCH, count)
    figures = [
        Figure(f"generated file, {count} rows of {each} tokens", "GB", size / 1e9, count),
        median(f"open {count} trajectories, in a new process", "s", [s for s, _ in opened], 1.0 if whole else None),
        median(
            f"random batch of {rows} trajectories of {each} tokens, warm",
            "ms",
            [1000 * wall for wall, _ in batches],
            150.0 if each == 4096 and rows == BATCH else None,
        ),
        median(
            f"its CPU time; chunks of {TOKEN_CHUNK} tokens",
            "ms",
            [1000 * cpu for _, cpu in batches],
        ),
    ]
    if arguments.peers:
        from tests.bench import store_peers

        figures = store_peers.beside_batches(figures, path, room, note)
    return figures


def generate(path: Path, transcripts: Any, count: int, each: int) -> None:
    """Writes a file of ``count`` rows of ``each`` tokens: stretches of drawn transcripts, under ids of their own."""
    from dataclasses import replace

    import numpy as np

    from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
    from megaflow_hpc.trajectory import TokenSequence

    drawn = [transcripts.draw(n, max(30_000, 2 * each), 40) for n in range(24)]
    columns = ("tokens", "logprobs", "loss_mask", "weight_versions")
    draw = np.random.default_rng(0)
    writer = TrajectoryWriter(path, "generated")
    for number in range(count):
        source = drawn[int(draw.integers(len(drawn)))]
        whole = source.sequences[0]
        first = int(draw.integers(0, len(whole.tokens) - each + 1))
        parts = [getattr(whole, name)[first : first + each] for name in columns]
        task = f"repository__project-{number // 8:06d}"
        writer.append(
            replace(
                source,
                id=f"{task}/default/{number % 8}",
                task_id=task,
                group_id=f"{task}/default",
                sample_index=number % 8,
                reward=float(draw.integers(2)),
                sequences=[TokenSequence("default", *parts)],
                messages=_cut(source.messages[1:4], 4 * each),
                turns=[],
                artifacts=[],
            )
        )
    writer.close()


def _cut(messages: list[dict[str, Any]], characters: int) -> list[dict[str, Any]]:
    """Messages with about as much text as the tokens."""
    each = characters // len(messages)
    return [{**message, "content": message["content"][:each]} for message in messages]


_READER = """
import json, sys, time
began, cpu = time.perf_counter(), time.process_time()
from megaflow_hpc import open_trajectories
import numpy, h5py
loaded, its_cpu = time.perf_counter(), time.process_time()
with open_trajectories(sys.argv[1]) as store:
    count = len(store)
    store[count - 1].reward
    opened = time.perf_counter()
    if sys.argv[2] == "open":
        print(json.dumps([[opened - loaded, time.process_time() - its_cpu]]))
        sys.exit()
    draw = numpy.random.default_rng(int(sys.argv[3]))
    seconds = []
    for _ in range(6):
        rows = draw.choice(count, min(1024, count), replace=False)
        began, cpu = time.perf_counter(), time.process_time()
        batch = store.batch(rows.tolist())
        seconds.append([time.perf_counter() - began, time.process_time() - cpu])
        assert batch["tokens"].size
    print(json.dumps(seconds[1:]))
"""


def in_new_process(program: str, path: Path, what: str) -> list[list[float]]:
    """Runs ``program`` in a new process. Returns the (wall, CPU) seconds of each repetition, as it measured them.

    Leaves out the first batch, which warms up.
    """
    command = [sys.executable, "-c", program, str(path), what, str(time.monotonic_ns() % 2**31)]
    found: list[list[float]] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found
