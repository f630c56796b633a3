"""Journals in several parts, their shards, and digests of the files that are gathered from either."""

from __future__ import annotations

import hashlib

import h5py

from megaflow_hpc.trajectories import JournalWriter
from megaflow_hpc.trajectories.journal.shards import write_shard
from megaflow_hpc.trajectories.journal.winners import journals
from megaflow_hpc.trajectories.journal.writer import parts
from tests.support.samples import trajectory


def record(block: int, epoch: int, t):
    """The record that a pod appends for trajectory ``t``."""
    return {"kind": "trajectory", "block": block, "epoch": epoch, "trajectory": t.to_record()}


def write_parts(run, pod: str, numbers, rotate_bytes: int = 40_000) -> list[int]:
    """One journal in several parts; returns the logical offset behind each record."""
    ends = []
    with JournalWriter(run.journal_file(pod, "0"), rotate_bytes) as journal:
        for n in numbers:
            ends.append(journal.append(record(n // 10, 0, trajectory(n))))
            journal.commit()
    return ends


def write_between(run, pods: int, count: int, rotate_bytes: int = 20_000, group: int = 5) -> None:
    """A journal of each pod, in several parts; the rollouts of the pods lie between one another in time."""
    journals = [JournalWriter(run.journal_file(f"pod-{pod}", "0"), rotate_bytes) for pod in range(pods)]
    for n in range(count):
        journals[n % pods].append(record(n % 7, 0, trajectory(n)))
        if n % (pods * group) >= pods * (group - 1):
            journals[n % pods].commit()
    for journal in journals:
        journal.close()


def write_shards(run) -> None:
    """Shards of all parts but the last of each journal."""
    for pod in {path.name.partition("+")[0].removesuffix(".journal") for path in journals(run)}:
        for part in parts(run.journal / f"{pod}.journal")[:-1]:
            write_shard(run, part)


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
