"""Images: what is copied when a node runs far more images than it has room for.

Small but real images (Apptainer built the first; the others differ in content and digest) lie in a store. Ranks, one
process each, lease them in the order in which the scheduler of a pod starts their rollouts, and stage ahead in that
order, into one cache that may take a tenth of all. A perfect order reads every image once. The rollouts themselves are
simulated: each holds its image for some milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.cache.cache import ImageCache
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.pod.scheduling.scheduler import Scheduler, Work
from megaflow_hpc.types import Rollout
from tests.bench.arguments import above_zero, add_count
from tests.bench.command import main
from tests.bench.figures import Figure, quantile
from tests.support.places import ROOT
from tests.support.small_images import SmallImages

GOAL = 1.1
AHEAD = 16
"""Images that a rank knows before their rollouts start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_count(parser, "--images", 500, "distinct images")
    add_count(parser, "--samples", 16, "rollouts of each image")
    add_count(parser, "--ranks", 4, "processes that share the node")
    add_count(parser, "--slots", 8, "rollouts at a time in each of them")
    add_count(parser, "--kilobytes", 400, "size of an image, in kB")
    parser.add_argument(
        "--budget", type=above_zero, default=0.1, metavar="SHARE", help="room, as a share of all images (%(default)s)"
    )
    parser.add_argument(
        "--hold", type=above_zero, default=0.02, metavar="S", help="mean seconds of a rollout (%(default)s)"
    )


def run(arguments: argparse.Namespace, note: Callable[[str], None]) -> list[Figure]:
    """Makes small images, runs the ranks of a node over them, and measures what was copied."""
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-", ignore_cleanup_errors=True) as name:
        root = Path(name)
        note(f"making {arguments.images} images of {arguments.kilobytes} kB")
        (root / "template").mkdir()
        images = SmallImages(root / "template", 1000 * arguments.kilobytes).fill(
            ImageStore(root / "store"), arguments.images
        )
        note(f"{arguments.images} images × {arguments.samples} samples in {arguments.ranks} × {arguments.slots} slots")
        return Node(arguments, images, root / "cache").run()


class Node:
    """The ranks of one node, driven by the scheduler of a pod."""

    def __init__(self, arguments: argparse.Namespace, images: list[str], cache: Path) -> None:
        self.arguments = arguments
        self.images = images
        looking = ImageCache(cache, find_apptainer())
        facts = [looking.facts(image) for image in images]
        self.sizes = [each.unpacked_bytes for each in facts]
        self.perfect = sum(each.bytes for each in facts)
        self.budget = int(arguments.budget * sum(self.sizes))
        self.cache = cache
        self.answers: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self.ranks = [self._start(rank) for rank in range(arguments.ranks)]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        words = [self.cache, self.budget, self.arguments.slots]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.image_rank", *map(str, words)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

        def listen(lines: Iterable[str]) -> None:
            for line in lines:
                self.answers.put((rank, json.loads(line)))
            self.answers.put((rank, {"ended": True}))

        assert process.stdout
        threading.Thread(target=listen, args=(process.stdout,), daemon=True).start()
        return process

    def _tell(self, rank: int, message: dict[str, Any]) -> None:
        pipe = self.ranks[rank].stdin
        assert pipe
        pipe.write(json.dumps(message) + "\n")

    def run(self) -> list[Figure]:
        """Runs every rollout in the scheduler's order and returns the figures."""
        arguments = self.arguments
        scheduler = Scheduler()
        for rank in range(arguments.ranks):
            scheduler.workers.join(rank, arguments.slots)
        # In the order of a plan: task by task, all samples of a task together.
        rollouts = [
            Rollout(f"t{i}", "p", sample, "nop") for i in range(len(self.images)) for sample in range(arguments.samples)
        ]
        scheduler.add(Work(rollout, 0, 0) for rollout in rollouts)
        chance = random.Random(0)
        waits: list[float] = []
        here, done, peak, first, unfinished = 0, 0, 0, -1, [arguments.samples] * len(self.images)
        began = time.monotonic()
        while done < len(rollouts):
            while (decision := scheduler.next()) is not None:
                rank, work = decision
                image = int(work.rollout.task_id[1:])
                hold = chance.expovariate(1 / arguments.hold)
                self._tell(rank, {"id": work.rollout.id, "image": self.images[image], "hold_s": hold})
            # The running and the next images, as rank 0 knows them.
            oldest = next(i for i, left in enumerate(unfinished) if left)
            if oldest > first:
                first = oldest
                for rank in range(arguments.ranks):
                    self._tell(rank, {"order": self.images[first : first + AHEAD]})
            rank, answer = self.answers.get(timeout=600)
            if "error" in answer or "ended" in answer:
                raise SiteError(f"rank {rank}: {answer.get('error', 'it ended')}")
            scheduler.workers.finish(rank, answer["id"])
            done += 1
            unfinished[int(answer["id"].split("/")[0][1:])] -= 1
            here += answer["here"]
            waits.append(answer["waited_s"])
            if done % 50 == 0:
                peak = max(peak, _bytes_below(self.cache))
        took = time.monotonic() - began
        copied = self._finish()
        name = f"{len(self.images)} images × {arguments.samples}, room for {arguments.budget:g}, simulated rollouts"
        count = len(rollouts)
        return [
            Figure(
                f"bytes copied over those of a perfect order ({name})",
                "×",
                copied / self.perfect,
                1,
                goal=GOAL,
                simulated=True,
            ),
            Figure(
                "most bytes on scratch over the budget", "×", peak / self.budget, count // 50, goal=1.0, simulated=True
            ),
            Figure("starts that found their image here", "%", 100 * here / count, count, simulated=True),
            Figure("wait for an image, 99th percentile", "ms", 1000 * quantile(waits, 0.99), count, simulated=True),
            Figure("rollouts per second", "1/s", count / took, count, better="higher", simulated=True),
        ]

    def _finish(self) -> int:
        for process in self.ranks:
            assert process.stdin
            process.stdin.close()
        copied, ended = 0, 0
        while ended < len(self.ranks):
            _, answer = self.answers.get(timeout=60)
            copied += answer.get("copied_bytes", 0)
            ended += "ended" in answer
        for process in self.ranks:
            process.wait()
        return int(copied)


def _bytes_below(path: Path) -> int:
    """Disk space of the copies of a cache, unfinished ones included."""
    total = 0
    for room in ("images", "work"):
        for directory, _, files in os.walk(path / room):
            for file in files:
                try:
                    total += os.lstat(os.path.join(directory, file)).st_blocks * 512
                except OSError:
                    continue  # just removed
    return total


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
