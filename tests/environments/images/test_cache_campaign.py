"""Prefetching in a real campaign: images are unpacked before their rollouts start, in order, and once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow_hpc import open_trajectories
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.ledger.blocks import split
from megaflow_hpc.pod.master.loop import AHEAD_BLOCKS
from megaflow_hpc.types import Rollout
from tests.support.small_images import SmallImages

COUNT = 16
WORKERS = 2
TASKS = """
import pathlib, time

class Number:
    # Its image has its number; the first to run wait until what comes next is staged.
    workdir = "/w"
    instruction = "Write the image's number into answer."

    def __init__(self, number):
        self.number, self.image = number, f"small{number}"

    @classmethod
    def instances(cls):
        return {f"n{number:02}": {"number": number} for number in range(COUNT)}

    def solve(self, sandbox):
        deadline = time.monotonic() + 300
        while len(list(pathlib.Path(COPIES).glob("*/entry.json"))) < KNOWN and time.monotonic() < deadline:
            time.sleep(0.05)
        sandbox.exec("cat /etc/number > answer")

    def score(self, sandbox):
        return float(sandbox.exec("cat answer").stdout.strip() == str(self.number))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_campaign_stages_images_before_their_rollouts_ask_in_order_and_once(
    small_rootfs: str, tmp_path: Path
) -> None:
    made = SmallImages(tmp_path, 4096, base=small_rootfs)
    paths = made.fill(ImageStore(tmp_path / "store"), COUNT)
    cache = tmp_path / f"megaflow-{os.getuid()}" / "cache"
    # The pod knows the block that it has claimed when its first rollouts run.
    known = len(next(split([Rollout(f"n{number:02}", "oracle", 0, "oracle") for number in range(COUNT)], pods=1)))
    # So few rollouts are left that it also prefetches for some unclaimed blocks.
    foreseen = known + AHEAD_BLOCKS
    settings = f"COUNT, KNOWN, COPIES = {COUNT}, {foreseen}, {str(cache / 'images')!r}\n"
    (tmp_path / "image_numbers.py").write_text(settings + TASKS)
    images = ", ".join(f"small{number}: {path}" for number, path in enumerate(paths))
    campaign = tmp_path / "campaign.yaml"
    campaign.write_text(
        f"name: staged\ntasks: image_numbers:Number\nagent: oracle\n"
        f"environment: {{network: none, images: {{{images}}}}}\n"
        "slurm: {pods: {slots_per_rank: 1}}\n"
    )
    command = [sys.executable, "-m", "megaflow_hpc", "run", str(campaign), "--launcher", "local", "--json"]
    command += ["--ranks", str(1 + WORKERS)]
    env = {**os.environ, "MEGAFLOW_SCRATCH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    with open_trajectories(json.loads(done.stdout)["run"]) as store:
        rows = sorted(((row.started_at, row.task_id, row.rank, row.reward) for row in store), key=lambda row: row[1])
    assert [(task, reward) for _, task, _, reward in rows] == [(f"n{number:02}", 1.0) for number in range(COUNT)]
    assert len({rank for _, _, rank, _ in rows}) == WORKERS

    entries = [json.loads(path.read_bytes()) for path in (cache / "images").glob("*/entry.json")]
    remove_tree(cache.parent)
    assert sorted(entry["image"] for entry in entries) == sorted(paths)
    numbers = {path: number for number, path in enumerate(paths)}
    ahead = {numbers[entry["image"]]: entry["made_at"] for entry in entries if entry["ahead"]}
    # The images of the first rollouts could not be prefetched. Those of the next were.
    assert known > WORKERS
    assert set(ahead) >= set(range(WORKERS, known))
    assert len(set(ahead) - set(range(known))) >= AHEAD_BLOCKS
    started = {int(task[1:]): at for at, task, _, _ in rows}
    assert all(ahead[number] <= started[number] for number in range(WORKERS, known))
