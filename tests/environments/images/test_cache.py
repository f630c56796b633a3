"""The image cache of a node: copies are made once, checked, kept within a budget, and not removed while in use."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.environments.images.cache import cache as cache_module
from megaflow_hpc.environments.images.cache.cache import ImageCache, Prefetcher
from megaflow_hpc.environments.images.image_file import ImageFacts
from megaflow_hpc.environments.images.sif import system_partition, unpacked_bytes
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import ConfigError, SandboxError
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity
from tests.support.processes import proceed, start_python
from tests.support.small_images import SmallImages

MB = 1_000_000


@pytest.fixture
def images(small_images: SmallImages, tmp_path: Path) -> list[str]:
    """Six images of one megabyte each, in a store."""
    return small_images.fill(ImageStore(tmp_path / "store"), 6)


def here(cache: ImageCache, images: list[str]) -> list[int]:
    """The numbers of ``images`` that have a copy."""
    names = {str(row["name"]) for row in cache.list()}
    return [number for number, image in enumerate(images) if f"{Path(image).stem[:40]}-tree" in names]


def test_an_image_is_read_once_and_its_copies_are_what_it_holds(
    images: list[str], open_cache: Callable[..., ImageCache]
) -> None:
    cache = open_cache()
    first, second = cache.acquire(images[0]), cache.acquire(images[0])
    assert first.path == second.path != images[0]
    assert cache.copied_bytes == os.path.getsize(images[0])
    assert Path(first.path, "etc", "number").read_text().strip() == "0"


def test_the_real_image_unpacks_to_what_its_header_says(base_sif: Path, rootfs: str, tmp_path: Path) -> None:
    partition, tree = system_partition(base_sif), Path(rootfs)
    assert ImageCache(tmp_path / "cache", find_apptainer()).facts(str(base_sif)).inodes == partition.inodes > 1000
    assert (tree / "usr/bin/python3").exists()
    assert (tree / ".singularity.d").is_dir()
    found = sum(len(names) + len(files) for _, names, files in os.walk(tree)) + 1
    assert abs(found - partition.inodes) <= 0.01 * found  # hard links share an inode
    on_disk = int(subprocess.run(["du", "-s", "-B1", tree], capture_output=True, check=True).stdout.split()[0])
    assert abs(unpacked_bytes(base_sif, partition) - on_disk) < 0.1 * on_disk


def test_a_changed_image_is_refused_by_its_digest(images: list[str], open_cache: Callable[..., ImageCache]) -> None:
    path = Path(images[0])
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"changed")
    with pytest.raises(SandboxError, match=r"has the digest [0-9a-f]{64}, not the one in its name.*images prune"):
        open_cache().acquire(images[0])
    assert here(open_cache(), images) == []


def test_an_image_that_is_replaced_once_its_digest_was_compared_is_not_used(
    images: list[str], open_cache: Callable[..., ImageCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of a store can replace a file at any time, and keep its size and mtime."""
    cache, compare = open_cache(), cache_module.read_checked
    before = os.stat(images[0])

    def compare_and_replace(facts: ImageFacts, *rest: Any) -> None:
        compare(facts, *rest)
        os.replace(images[1], images[0])
        os.truncate(images[0], before.st_size)
        os.utime(images[0], ns=(before.st_atime_ns, before.st_mtime_ns))

    os.chmod(images[1], 0o644)
    monkeypatch.setattr(cache_module, "read_checked", compare_and_replace)
    found = cache.acquire(images[0])
    assert Path(found.path, "etc", "number").read_text().strip() == "0"
    assert sorted(os.listdir(Path(found.path).parent)) == ["entry.json", "rootfs"]


def test_a_truncated_image_is_refused_by_its_header(images: list[str], open_cache: Callable[..., ImageCache]) -> None:
    path = Path(images[0])
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(SandboxError, match="cut short"):
        open_cache().acquire(images[0])
    with pytest.raises(SandboxError, match="no such image on this node"):
        open_cache().acquire(str(path.parent / "none.sif"))
    (path.parent / "text.sif").write_text("x" * 200)
    with pytest.raises(SandboxError, match="not a SIF file"):
        open_cache().acquire(str(path.parent / "text.sif"))


def test_the_least_recently_used_goes_first_and_what_is_in_use_stays(
    images: list[str], open_cache: Callable[..., ImageCache]
) -> None:
    cache = open_cache(budget_mb=3.5)
    held = cache.acquire(images[0])
    for number in (1, 2):
        cache.acquire(images[number]).release()
    again = cache.acquire(images[1])  # used later than 2
    again.release()
    cache.acquire(images[3]).release()
    assert here(cache, images) == [0, 1, 3]
    cache.acquire(images[4]).release()
    assert here(cache, images) == [0, 3, 4]
    assert Path(held.path).exists()
    held.release()
    cache.acquire(images[5]).release()
    assert here(cache, images) == [0, 4, 5]  # the one released last is removed last


def test_the_budget_counts_files_too(images: list[str], open_cache: Callable[..., ImageCache]) -> None:
    files = open_cache().facts(images[0]).inodes + 64
    cache = open_cache(inodes=2 * files + files // 2)
    for number in range(4):
        cache.acquire(images[number]).release()
    assert here(cache, images) == [2, 3]


def test_who_finds_no_room_waits_until_something_is_given_back(
    images: list[str], open_cache: Callable[..., ImageCache]
) -> None:
    cache = open_cache(budget_mb=2.2)
    held = [cache.acquire(images[0]), cache.acquire(images[1])]
    with pytest.raises(
        SandboxError, match=r"not staged within 0\.1 s: everything in .* is in use; raise MEGAFLOW_CACHE_GB"
    ):
        cache.acquire(images[2], timeout_s=0.1)
    assert here(cache, images) == [0, 1]
    found: list[str] = []
    waiter = threading.Thread(target=lambda: found.append(cache.acquire(images[2], timeout_s=60).path))
    waiter.start()
    held[0].release()
    waiter.join(60)
    assert found
    assert here(cache, images) == [1, 2]


def test_an_image_beyond_the_budget_is_refused_at_once(
    images: list[str], open_cache: Callable[..., ImageCache], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SandboxError, match=r"the cache may take 0\.0005 GB .*MEGAFLOW_SCRATCH"):
        open_cache(budget_mb=0.5).acquire(images[0])
    monkeypatch.setenv("MEGAFLOW_CACHE_GB", "lots")
    with pytest.raises(ConfigError, match="MEGAFLOW_CACHE_GB=lots: expected a number above 0"):
        ImageCache(tmp_path / "cache", find_apptainer())


def test_staging_ahead_goes_in_order_and_takes_nothing_from_itself(
    images: list[str], open_cache: Callable[..., ImageCache]
) -> None:
    cache = open_cache(budget_mb=3.5)
    assert cache.prefetch(images) == 3
    assert here(cache, images) == [0, 1, 2]
    lease = cache.acquire(images[0])
    assert cache.prefetch(images) == 3  # the first is in use, the others are wanted
    lease.release()
    assert cache.prefetch(images[1:]) == 3
    assert here(cache, images) == [1, 2, 3]
    cache.acquire(images[5]).release()  # an image that is needed now replaces the one that is wanted last
    assert here(cache, images) == [1, 2, 5]
    assert cache.copied_bytes == 5 * os.path.getsize(images[0])


RANK = """
import sys, time
from pathlib import Path
from megaflow_hpc.environments.images.cache.cache import ImageCache
cache = ImageCache(Path(sys.argv[1]), "apptainer", budget_bytes=10**9, budget_inodes=10**6)
print("ready", flush=True)
sys.stdin.readline()
lease = cache.acquire(sys.argv[2])
print(cache.copied_bytes, lease.path, flush=True)
sys.stdin.readline()
"""


def test_of_many_ranks_one_stages_and_the_others_wait_for_it(
    images: list[str], open_cache: Callable[..., ImageCache], tmp_path: Path
) -> None:
    ranks = [start_python(RANK, tmp_path / "cache", images[0]) for _ in range(4)]
    for rank in ranks:
        proceed(rank)
    answers = [rank.stdout.readline().split() for rank in ranks if rank.stdout]
    assert sorted(int(copied) for copied, _ in answers)[:3] == [0, 0, 0]
    assert sum(int(copied) for copied, _ in answers) == os.path.getsize(images[0])
    assert len({path for _, path in answers}) == 1
    cache = open_cache(budget_mb=1)
    assert [row["in_use"] for row in cache.list()] == [True]
    assert cache.clear() == 0
    ranks[0].kill()
    for rank in ranks[1:]:
        proceed(rank)
    for rank in ranks:
        rank.wait()
    assert [row["in_use"] for row in cache.list()] == [False]  # neither the killed rank nor the others hold it
    assert cache.clear() > 0
    for room in ("images", "work"):
        assert os.listdir(tmp_path / "cache" / room) == [], room


SLOW = """
import os, sys, time
from pathlib import Path
from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.cache.cache import ImageCache
real = sif.unpack
def slow(path, target, partition):
    real(path, target, partition)
    print("unpacking", flush=True)
    time.sleep(600)
sif.unpack = slow
cache = ImageCache(Path(sys.argv[1]), "apptainer", budget_bytes=10**9, budget_inodes=10**6)
print("ready", flush=True)
cache.acquire(sys.argv[2])
"""


def test_a_killed_stager_blocks_nobody_and_leaves_nothing(
    images: list[str], open_cache: Callable[..., ImageCache], tmp_path: Path
) -> None:
    stager = start_python(SLOW, tmp_path / "cache", images[0])
    assert stager.stdout
    assert stager.stdout.readline() == "unpacking\n"
    found: list[str] = []
    cache = open_cache()
    waiter = threading.Thread(target=lambda: found.append(cache.acquire(images[0]).path))
    waiter.start()
    time.sleep(0.05)
    assert cache.ready(images[0]) is None
    assert not found
    stager.send_signal(signal.SIGKILL)
    stager.wait()
    waiter.join(60)
    assert Path(found[0], "etc", "number").read_text().strip() == "0"
    (tmp_path / "cache" / "users" / "1-1.abcd").write_text("of a process that is gone")
    (tmp_path / "cache" / "work" / "1-1.abcd").write_text("half")
    open_cache()
    assert os.listdir(tmp_path / "cache" / "work") == []
    own = Identity.of(os.getpid())
    assert {name.partition(".")[0] for name in os.listdir(tmp_path / "cache" / "users")} <= {str(own)}


def test_leases_of_one_process_count_together(images: list[str], open_cache: Callable[..., ImageCache]) -> None:
    one, other = open_cache(budget_mb=1.5), open_cache(budget_mb=1.5)
    first, second = one.acquire(images[0]), other.acquire(images[0])
    first.release()
    first.release()
    assert one.clear() == 0
    ready = one.ready(images[0])
    assert ready
    assert ready.path == second.path
    ready.release()
    second.release()
    assert one.ready(images[1]) is None
    assert one.clear() > 0


def test_an_unpacked_image_is_used_where_it_lies(tmp_path: Path, open_cache: Callable[..., ImageCache]) -> None:
    shutil.copytree(Path(__file__).parent, tmp_path / "image")
    lease = open_cache().acquire(str(tmp_path / "image"))
    assert lease.path == str(tmp_path / "image")
    lease.release()


def test_the_order_named_last_is_staged_in_the_background(
    images: list[str], open_cache: Callable[..., ImageCache]
) -> None:
    cache = open_cache(budget_mb=2.5)
    ahead = Prefetcher(cache, lambda _: False)
    for order in (images[:2], images[2:4], images[4:]):
        ahead.order(order)
    deadline = time.monotonic() + 60
    while here(cache, images) != [4, 5] and time.monotonic() < deadline:
        time.sleep(0.01)
    ahead.close()
    assert here(cache, images) == [4, 5]
    ahead.order(images[:1])  # closed: nothing more happens
    assert here(cache, images) == [4, 5]


WANTS = """
import sys, time
from pathlib import Path
from megaflow_hpc.environments.images.cache.cache import ImageCache
from megaflow_hpc.environments.images.store import ImageStore
print("ready", flush=True)
cache = ImageCache(Path(sys.argv[1]), "apptainer", budget_bytes=2_500_000, budget_inodes=10**6)
store = ImageStore(Path(sys.argv[2]).parents[1])
cache.prefetch([str(store.find("small0")), str(store.find("small1"))])
print("announced", flush=True)
time.sleep(600)
"""


def test_a_provider_stages_ahead_what_sandboxes_will_need(images: list[str], tmp_path: Path) -> None:
    async def main() -> list[bool]:
        async with ApptainerProvider(tmp_path / "scratch", tmp_path / "cache") as provider:
            provider.prefetch(images[:2])
            deadline = time.monotonic() + 60
            found = [False, False]
            while not all(found) and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
                accesses = [provider.images.images.ready(image) for image in images[:2]]
                found = [access is not None for access in accesses]
                for access in accesses:
                    if access:
                        access.release()
            return found

    assert asyncio.run(main()) == [True, True]
    remove_tree(tmp_path / "cache")


def test_what_another_rank_wants_next_is_not_removed_for_what_is_staged_ahead(
    images: list[str], open_cache: Callable[..., ImageCache], tmp_path: Path
) -> None:
    other = start_python(WANTS, tmp_path / "cache", images[1])
    cache = open_cache(budget_mb=2.5)
    assert other.stdout
    assert other.stdout.readline() == "announced\n"
    assert here(cache, images) == [0, 1]
    assert cache.prefetch(images[2:]) == 0
    cache.acquire(images[2]).release()  # a waiting sandbox replaces the image that is wanted last
    assert here(cache, images) == [0, 2]
    other.kill()
    other.wait()
    assert cache.prefetch(images[3:]) == 2  # a dead process wants nothing
    assert here(cache, images) == [3, 4]
