"""Journals, and digests of the files gathered from them."""

from __future__ import annotations

import hashlib

import h5py

from megaflow_hpc.trajectories import JournalWriter
from tests.support.samples import trajectory


def record(block: int, epoch: int, t):
    """The record that a pod appends for trajectory ``t``."""
    return {"kind": "trajectory", "block": block, "epoch": epoch, "trajectory": t.to_record()}


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
