"""Journals, also in several parts as earlier versions wrote them, and digests of the files gathered from them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import h5py

from megaflow_hpc.trajectories import JournalWriter
from tests.support.samples import trajectory


def record(block: int, epoch: int, t):
    """The record that a pod appends for trajectory ``t``."""
    return {"kind": "trajectory", "block": block, "epoch": epoch, "trajectory": t.to_record()}


class PartedWriter:
    """Writes a journal in several parts, as earlier versions did; its offsets count over all parts."""

    def __init__(self, path: Path, rotate_bytes: int) -> None:
        self.path = path
        self._rotate_bytes = rotate_bytes
        self._part = 0
        self._base = 0
        self._journal = JournalWriter(path)

    def __enter__(self) -> PartedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def length(self) -> int:
        return self._base + self._journal.length

    @property
    def committed(self) -> int:
        return self._base + self._journal.committed

    def append(self, each) -> int:
        return self._base + self._journal.append(each)

    def commit(self) -> int:
        if self._journal.commit() >= self._rotate_bytes:
            self.close()
            self._base += self._journal.committed
            self._part += 1
            self._journal = JournalWriter(self.path.with_name(f"{self.path.stem}+{self._part:04d}.journal"))
            self._journal.append({"kind": "part", "number": self._part, "base": self._base})
            self._journal.commit()
        return self.committed

    def close(self) -> None:
        self._journal.close()


def write_parts(run, pod: str, numbers, rotate_bytes: int = 40_000) -> list[int]:
    """Writes one journal in several parts. Returns the offset behind each record, counted over all parts."""
    ends = []
    with PartedWriter(run.journal_file(pod, "0"), rotate_bytes) as journal:
        for n in numbers:
            ends.append(journal.append(record(n // 10, 0, trajectory(n))))
            journal.commit()
    return ends


def write_between(run, pods: int, count: int, group: int = 5) -> None:
    """Writes a journal for each pod. The rollouts of the pods alternate in time."""
    journals = [JournalWriter(run.journal_file(f"pod-{pod}", "0")) for pod in range(pods)]
    for n in range(count):
        journals[n % pods].append(record(n % 7, 0, trajectory(n)))
        if n % (pods * group) >= pods * (group - 1):
            journals[n % pods].commit()
    for journal in journals:
        journal.close()


def digests(path) -> dict[str, str]:
    """SHA-256 of every column."""
    found = {}
    with h5py.File(path) as file:

        def collect(name, item):
            if isinstance(item, h5py.Dataset):
                text = h5py.check_string_dtype(item.dtype)
                values = b"\0".join(item[:].tolist()) if text and text.length is None else item[:].tobytes()
                found[name] = hashlib.sha256(values).hexdigest()

        file.visititems(collect)
    return found
