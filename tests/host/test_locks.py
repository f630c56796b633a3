"""File locks: exclusive or shared, with a timeout, on files that their holder may remove."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from megaflow_hpc.host.locks import lock_descriptor, lock_file, locked, locked_if_supported


def test_a_second_exclusive_holder_times_out_and_shared_holders_do_not(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path), pytest.raises(TimeoutError):
        lock_file(path, timeout_s=0)
    with locked(path, shared=True), locked(path, shared=True, timeout_s=0):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            lock_file(path, timeout_s=0.1)
        assert time.monotonic() - began >= 0.1
    os.close(lock_file(path, timeout_s=0))


def test_a_waiting_process_locks_the_file_that_replaced_a_removed_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = lock_file(path)
    taken: list[int] = []
    waiter = threading.Thread(target=lambda: taken.append(lock_file(path)))
    waiter.start()
    path.unlink()
    os.close(first)
    waiter.join(30)
    assert os.fstat(taken[0]).st_ino == path.stat().st_ino
    with pytest.raises(TimeoutError):
        lock_file(path, timeout_s=0)
    os.close(taken[0])


def test_a_directory_is_locked_by_its_descriptor(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    lock_descriptor(first)
    with pytest.raises(TimeoutError):
        lock_descriptor(second, timeout_s=0)
    os.close(first)
    lock_descriptor(second, timeout_s=0)
    os.close(second)


def test_a_lock_without_support_is_skipped_but_one_that_is_held_is_not(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked_if_supported(path), pytest.raises(TimeoutError), locked_if_supported(path, timeout_s=0):
        pass
    with locked_if_supported(tmp_path / "missing" / "lock"):
        assert not (tmp_path / "missing").exists()
