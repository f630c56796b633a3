"""JSON lines of trajectories, to be imported."""

from __future__ import annotations

import contextlib
import gzip
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from megaflow_hpc.trajectories import open_trajectories
from megaflow_hpc.trajectories.exports import export
from megaflow_hpc.trajectories.exports.import_jsonl import import_jsonl
from megaflow_hpc.trajectories.maintenance.validate import validate
from tests.security.fuzz.reading import everything
from tests.security.fuzz.target import Broken, Feed, Target
from tests.support.samples import commit, run_dir, trajectory


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
    """JSON lines to be imported."""
    return [Target("import", _imported, _exported, form="json", count=40)]
