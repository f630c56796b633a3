"""Files of settings: a campaign's YAML, a run's own records, JSON lines to be imported."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from megaflow_hpc.config.campaign import load
from megaflow_hpc.rundir import endpoints
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles
from megaflow_hpc.rundir.events import decode
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, read_run, write_run
from megaflow_hpc.trajectories import open_trajectories
from megaflow_hpc.trajectories.exports import export
from megaflow_hpc.trajectories.exports.import_jsonl import import_jsonl
from megaflow_hpc.trajectories.maintenance.validate import validate
from tests.security.fuzz.reading import everything
from tests.security.fuzz.target import Broken, Feed, Target
from tests.support.samples import commit, run_dir, trajectory

_CAMPAIGN = b"""\
name: fix-bugs
tasks:
  - tasks/*
  - {path: more.jsonl, include: ["a*"], limit: 3, mode: overlay}
agent: {name: mini-swe-agent, max_turns: 50}
samples: 8
model: &model {path: /models/m, servers: {min: 1, max: 4}, gpus: 1, args: {max-model-len: 4096}}
environment: {images: {my-image: images/my-image.sif}, network: gateway}
slurm:
  pods: {partition: cpu, count: 8, time: 4:00:00}
  servers: {partition: gpu, time: 4:00:00, extra: {exclusive: true}}
"""

_ALIASES = b"a: &a [x]\n" + b"".join(
    b"%s: &%s [%s]\n" % (name, name, b",".join([b"*" + before] * 9))
    for before, name in [(bytes([n]), bytes([n + 1])) for n in range(ord("a"), ord("h"))]
)


@contextlib.contextmanager
def _campaign(folder: Path) -> Iterator[Feed]:
    file = folder / "campaign.yaml"

    def feed(data: bytes) -> None:
        file.write_bytes(data)
        load(file)

    yield feed


@contextlib.contextmanager
def _run(folder: Path) -> Iterator[Feed]:
    """A run's record, and the files of its servers."""
    run = run_dir(folder / "run")

    def feed(data: bytes) -> None:
        run.endpoint("default.0").write_bytes(data)
        endpoints.read(run.endpoint("default.0"), Endpoint)
        EndpointFiles(run).serving()
        EndpointFiles(run).failed()
        for line in data.split(b"\n"):
            decode(line)
        (run.path / "run.json").write_bytes(data)
        found = read_run(run)
        write_run(run, found)
        if read_run(run) != found:
            raise Broken("written again, it is another run")

    yield feed


def _records() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        run = run_dir(Path(folder) / "run")
        write_run(run, RunRecord(campaign={"name": "x"}, policies={"default": PolicyRecord(model={"engine": "vllm"})}))
        served = {"server": "default.0", "policy": "default", "url": "http://x", "weight_version": 3, "wait_s": 0.5}
        event = {"event": "pod", "t": float("nan"), "pod": "0"}
        return [(run.path / "run.json").read_bytes(), json.dumps(served).encode(), json.dumps(event).encode()]


def _exported() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        run = run_dir(Path(folder) / "run")
        commit(run, "pod", *[(0, 0, trajectory(n)) for n in (1, 2, 5)])
        with open_trajectories(run.path, seals={}) as store:
            export(store, ["jsonl"], Path(folder))
        data = Path(folder, "trajectories.jsonl").read_bytes()
    return [data, data.splitlines()[0], gzip.compress(data, mtime=0), gzip.compress(b"\n" * (1 << 22), mtime=0)]


@contextlib.contextmanager
def _imported(folder: Path) -> Iterator[Feed]:
    """Lines become a valid file, whose export is imported to the same."""
    source, target = folder / "lines.jsonl", folder / "trajectories.h5"

    def feed(data: bytes) -> None:
        source.write_bytes(data)
        target.unlink(missing_ok=True)
        count = import_jsonl(source, target)
        if problems := validate(target):
            raise Broken(f"imported, and yet {re.sub('[0-9]+', '', problems[0])[:60]}", problems)
        if not count or zlib.crc32(data) % 4:  # what follows takes as long again
            return
        with open_trajectories(target) as store:
            export(store, ["jsonl"], folder / "out")
            before = everything(store)
        import_jsonl(folder / "out" / "trajectories.jsonl", folder / "again.h5")
        with open_trajectories(folder / "again.h5") as store:
            if everything(store) != before:
                raise Broken("exported and imported, it is another campaign")

    yield feed


def targets() -> list[Target]:
    """Campaign files, records of a run, JSON lines."""
    words = (
        b"&a [*a,*a]\n",
        b"*model",
        b"<<: *model\n",
        b"!!python/object:os.system ",
        b"!!binary |\n  AAAA\n",
        b"? [a]\n: b\n",
        b"- - - ",
        b"!!set {a}\n",
        _ALIASES,
        b"2001-12-14t21:59:43.10-05:00",
        b"%YAML 9.9\n---\n",
        b"2026-99-99",
        b"!!timestamp x",
        b"!!int x",
        b"1_000",
        b"|2\n",
        b">-\n",
    )
    return [
        Target("campaign", _campaign, lambda: [_CAMPAIGN], words=words),
        Target("run", _run, _records, form="json"),
        Target("import", _imported, _exported, form="json", count=40),
    ]
