"""A training at one site whose weights are served at another, although processes are killed and copies are broken."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc.rundir import weights
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import ServerRecord, read_run, write_run
from megaflow_hpc.rundir.weight_relay import receive, send
from megaflow_hpc.rundir.weight_source import DELTA
from megaflow_hpc.training.plan import StepPlan, TrainingFiles
from tests.support.hash_trainer import START, train, trained, weights_of
from tests.support.training import Pods, training_run

FORK = multiprocessing.get_context("fork")


def repeat(step: Callable[[RunDir, Path], object], run: RunDir, directory: Path) -> None:
    """Sends or receives until the process is killed."""
    while True:
        step(run, directory)
        time.sleep(0.02)


class Mortal:
    """A process that is killed and started again a number of times, each time after some CPU time, and then lives."""

    def __init__(
        self, draw: random.Random, kills: int, longest_s: float, work: Callable[..., object], *arguments: object
    ) -> None:
        self._draw, self.kills, self._longest_s = draw, kills, longest_s
        self._work, self._arguments = work, arguments
        self._start()

    def _start(self) -> None:
        self.process = FORK.Process(target=self._work, args=self._arguments, daemon=True)
        self.process.start()
        self._cpu_s = self._draw.uniform(0, self._longest_s)

    def look(self) -> bool:
        """Kills the process if it is time. Returns whether it has ended by itself."""
        if not self.process.is_alive():
            assert self.process.exitcode == 0
            return True
        cpu_s = int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0]) / 1e9
        if self.kills and cpu_s > self._cpu_s:
            self.stop()
            self.kills -= 1
            self._start()
        return False

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def copy_badly(draw: random.Random, source: Path, target: Path) -> int:
    """Copies some files, in place and in random order: whole, the first bytes, or with a wrong bit. Returns the number
    of broken copies."""
    found = [Path(folder, name) for folder, _, names in os.walk(source) for name in names if name[0] != "."]
    files = [path.relative_to(source) for path in found]
    broken = 0
    for name in draw.sample(files, draw.randint(0, len(files))):
        try:
            data = bytearray((source / name).read_bytes())
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if draw.random() < 0.15:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                broken += 1
            if draw.random() < 0.15:
                del data[draw.randrange(len(data)) :]
                broken += 1
            with open(target / name, "wb", buffering=0) as file:
                for start in range(0, len(data), 4096):
                    file.write(data[start : start + 4096])
        except FileNotFoundError:  # the sender or the receiver has removed the version
            continue
    if draw.random() < 0.2:
        for folder in target.iterdir():
            if not (source / folder.name).exists():
                shutil.rmtree(folder, ignore_errors=True)
    return broken


@pytest.mark.slow
def test_another_site_serves_the_weights_of_a_training_bit_by_bit(tmp_path: Path) -> None:
    """Trainer, sender and receiver are killed, the transport breaks files; two servers at the other site read."""
    kills = int(os.environ.get("MEGAFLOW_KILLS", "8"))
    draw, steps = random.Random(3), max(kills, 12)
    home = training_run(
        tmp_path / "home", {"staleness": 2, "batch": 1, "steps": steps, "publish_delta": True}, tasks=5, samples=2
    )
    away = training_run(tmp_path / "away", None)
    record = read_run(away)
    record.servers = [ServerRecord("default", {})] * 2
    write_run(away, record)
    outbox, inbox = tmp_path / "outbox", tmp_path / "inbox"
    inbox.mkdir()
    pods = Pods(home)
    words = [sys.executable, "-m", "tests.support.weight_readers", away.path]
    readers = [
        subprocess.Popen([*words, str(n), f"node{n}", tmp_path / f"node{n}"], stdout=subprocess.PIPE) for n in range(2)
    ]
    served: list[dict[int, str]] = [{}, {}]

    def collect(number: int) -> None:
        for line in readers[number].stdout or ():
            if read := json.loads(line):
                served[number][read["version"]] = read["digest"]

    threads = [threading.Thread(target=collect, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    trainer = Mortal(draw, kills // 3, 0.5, train, home.path, 1, 0.05)
    sites = [
        Mortal(draw, kills, 0.1, repeat, *arguments) for arguments in ((send, home, outbox), (receive, away, inbox))
    ]
    broken, deltas = 0, set()
    try:
        while not trainer.look() or any(site.kills for site in sites):
            pods.work()
            for site in sites:
                site.look()
            broken += copy_badly(draw, outbox, inbox) if outbox.is_dir() else 0
            deltas |= {path.parent.name for path in inbox.glob(f"[0-9]*/{DELTA}")}
            time.sleep(0.01)
        for site in sites:
            site.stop()
        last = send(home, outbox)
        shutil.copytree(outbox, inbox, dirs_exist_ok=True)
        receive(away, inbox)
        newest = weights.current(away, "default")
        deadline = time.monotonic() + 30
        while not all(newest.version in seen for seen in served) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        trainer.stop()
        for site in sites:
            site.stop()
        for reader in readers:
            reader.kill()
            reader.wait()
        for thread in threads:
            thread.join()
    expected, parameters, files = {}, START, TrainingFiles(home, "default")
    for step in range(1, steps + 1):
        plan = files.read(StepPlan, step)
        assert plan is not None
        parameters = trained(parameters, plan)
        expected[f"step-{step:06d}"] = hashlib.sha256(weights_of(parameters, step)).hexdigest()
    tokens = {version.version: version.token for version in weights.newest_first(home, "default")}
    received = list(weights.newest_first(away, "default"))[::-1]
    numbers = [int(version.token.removeprefix("sent-")) for version in received]
    assert [version.version for version in received] == list(range(1, len(received) + 1))
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == last.version == len(tokens) == steps
    for seen in served:
        assert newest.version in seen
        assert seen == {version: expected[tokens[numbers[version - 1]]] for version in seen}
    assert len(received) >= 4
    assert deltas
    assert broken > 20
    kept = [path.name for path in away.weights.iterdir() if (path / "model.safetensors").exists()]
    assert len(kept) <= 3
    assert len(list(inbox.glob("[0-9]*"))) <= 2
    print(f"{len(received)} of {steps} versions received, {len(deltas)} deltas seen, {broken} copies broken")
