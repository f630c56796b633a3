"""Layered images in the node's cache: each layer is copied once and checked, and room for all layers is reserved at
once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc.environments.images.cache.cache import ImageCache
from megaflow_hpc.environments.images.image_file import working_directory
from megaflow_hpc.environments.images.layered import layer_path, read_layered
from megaflow_hpc.environments.images.layers.view import LayerView, Tree
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import SandboxError
from tests.support.layers import OPAQUE, Entries, add_image, add_layer
from tests.support.processes import proceed, start_python
from tests.support.small_images import SmallImages

MB = 1_000_000
KILLS = int(os.environ.get("MEGAFLOW_STAGING_KILLS", "12"))
ENVIRONMENT: Entries = {"etc/": "", "etc/environment": "e", "lib/": "", "lib/old": "x", "lib/one": "1", "gone": "x"}
INSTANCE: Entries = {"etc/": "", "etc/number": None, "lib/": OPAQUE, "lib/new": "n", "gone": None}
WHOLE = {"etc", "etc/environment", "lib", "lib/new"}
"""The visible paths of the two layers over a base with ``etc/number``."""


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


@pytest.fixture
def bases(small_images: SmallImages, store: ImageStore) -> list[str]:
    return small_images.fill(store, 3)


def seen(*directories: str) -> set[str]:
    """The paths below etc, lib and gone that an overlay of these directories shows."""
    view = LayerView([Tree(directory) for directory in directories])
    found = {f"{name}/{below}" for name in ("etc", "lib") for below in view.names(name)}
    return found | {name for name in ("etc", "lib", "gone") if view.entry(name)}


def nothing_is_left(cache: Path) -> None:
    assert os.listdir(cache / "work") == []
    for user in (cache / "users").iterdir():
        state = json.loads(user.read_bytes())
        assert (state["uses"], state["makes"], state["waits_since_ns"]) == ([], {}, None)


def test_an_image_is_its_base_and_its_layers_and_others_share_them(
    bases: list[str], store: ImageStore, open_cache: Callable[..., ImageCache], tmp_path: Path
) -> None:
    environment = add_layer(store, ENVIRONMENT)
    first = add_image(store, bases[0], [environment, INSTANCE], workdir="/app")
    second = add_image(store, bases[0], [environment, {"b": "2"}])
    cache = open_cache()
    lease = cache.acquire(first)
    copied = sum(layer.bytes for layer in read_layered(first).layers) + os.path.getsize(bases[0])
    assert cache.copied_bytes == copied
    assert len(lease.layers) == 2
    assert seen(*lease.layers, lease.path) >= WHOLE
    assert "etc/number" not in seen(*lease.layers, lease.path)
    assert {"etc/number", "etc/environment", "gone", "lib/old"} <= seen(*lease.layers[1:], lease.path)
    other = cache.acquire(second)
    assert (other.path, other.layers[-1]) == (lease.path, lease.layers[-1])
    assert cache.copied_bytes == copied + read_layered(second).layers[-1].bytes
    again = cache.ready(first)
    assert again
    assert (again.path, again.layers) == (lease.path, lease.layers)
    again.release()
    lease.release()
    other.release()
    open_cache().acquire(second).release()  # a new cache object reads nothing
    assert open_cache().copied_bytes == 0
    assert (working_directory(first), working_directory(second)) == ("/app", None)
    assert {str(row["name"]).rpartition("-")[2] for row in cache.list()} == {"layer", "tree"}
    cache.clear()
    nothing_is_left(tmp_path / "cache")


def test_layers_lie_over_a_directory_and_over_nothing(
    store: ImageStore, open_cache: Callable[..., ImageCache], tmp_path: Path
) -> None:
    (tmp_path / "base" / "etc").mkdir(parents=True)
    (tmp_path / "base" / "etc" / "number").touch()
    cache = open_cache()
    over = cache.acquire(add_image(store, str(tmp_path / "base"), [ENVIRONMENT, INSTANCE]))
    assert (over.path, len(over.layers)) == (str(tmp_path / "base"), 2)
    alone = cache.acquire(add_image(store, None, [ENVIRONMENT, INSTANCE]))
    assert (alone.path, len(alone.layers)) == (over.layers[-1], 1)
    for lease in (over, alone):
        assert seen(*lease.layers, lease.path) == WHOLE
    with pytest.raises(SandboxError, match="without a base and without layers"):
        cache.acquire(add_image(store, None, []))


@pytest.mark.parametrize("base", ["sif", "directory", "none"])
def test_an_image_is_laid_out_as_an_overlay_would_show_it(
    bases: list[str], store: ImageStore, open_cache: Callable[..., ImageCache], base: str, tmp_path: Path
) -> None:
    (tmp_path / "base" / "etc").mkdir(parents=True)
    (tmp_path / "base" / "etc" / "number").touch()
    below = {"sif": bases[0], "directory": str(tmp_path / "base"), "none": None}[base]
    new: Entries = {"lib/": OPAQUE, "lib/one": "again", "etc": None, "link": "->lib/one"}
    image = add_image(store, below, [ENVIRONMENT, INSTANCE, {"etc/": "", "etc/above": ""}, new])
    cache = open_cache()
    stacked, whole = cache.acquire(image), cache.acquire(image, flat=True)
    assert whole.layers == ()
    assert seen(whole.path) == seen(*stacked.layers, stacked.path) == {"lib", "lib/one"}
    assert Path(whole.path, "lib", "one").read_text() == "again"
    assert os.readlink(Path(whole.path, "link")) == "lib/one"
    if below is not None:
        assert (tmp_path / "base" / "etc" / "number").exists()
    assert os.stat(whole.path).st_mode & 0o777 == os.stat(stacked.path).st_mode & 0o777 | 0o700
    assert {Path(image).stem[:40] + "-tree"} <= {row["name"] for row in cache.list()}


def test_a_layer_that_comes_twice_is_one(store: ImageStore, open_cache: Callable[..., ImageCache]) -> None:
    twice = add_layer(store, {"etc/": "", "etc/twice": "t"})
    image = add_image(store, None, [twice, {"etc/": "", "etc/twice": None}, twice])
    lease = open_cache().acquire(image)
    assert len(lease.layers) == 1
    assert seen(*lease.layers, lease.path) == {"etc", "etc/twice"}


def test_a_damaged_or_missing_layer_and_a_changed_base_are_named(
    bases: list[str], store: ImageStore, open_cache: Callable[..., ImageCache], tmp_path: Path
) -> None:
    big = add_layer(store, {"big": os.urandom(1 << 19)})
    for damaged in (add_layer(store, {"small": "s"}), big):
        image = add_image(store, bases[0], [damaged])
        blob = layer_path(image, damaged.digest)
        blob.chmod(0o644)
        whole = blob.read_bytes()
        blob.write_bytes(whole[:-8] + b"12345678")
        for flat in (False, True):
            with pytest.raises(SandboxError, match=f"{damaged.digest}: "):
                open_cache().acquire(image, flat=flat)
        blob.unlink()
        with pytest.raises(SandboxError, match=f"{damaged.digest}: the layer is missing"):
            open_cache().acquire(image)
        blob.write_bytes(whole)
        open_cache().acquire(image).release()
    own = tmp_path / "own.sif"
    own.write_bytes(Path(bases[0]).read_bytes())
    over = add_image(store, str(own), [ENVIRONMENT])
    cache = open_cache()
    cache.acquire(over).release()
    with open(own, "ab") as file:
        file.write(b"more")
    with pytest.raises(SandboxError, match=rf"{over}: its base {own} was changed after it was built; build it again"):
        cache.acquire(over)
    own.unlink()
    with pytest.raises(SandboxError, match=r"its base .*own\.sif is missing"):
        cache.ready(over)
    cache.clear()
    nothing_is_left(tmp_path / "cache")


def test_what_is_staged_ahead_are_parts_and_what_is_wanted_stays(
    bases: list[str], store: ImageStore, open_cache: Callable[..., ImageCache]
) -> None:
    images = [add_image(store, bases[0], [ENVIRONMENT, {"mine": os.urandom(MB // 2) + bytes([n])}]) for n in range(4)]
    size = open_cache().facts(images[0])
    assert size.base
    cache = open_cache(budget_mb=(size.unpacked_bytes + 600_000) / MB)  # the base, and two images' layers
    assert cache.prefetch(images) == 2
    names = {row["name"] for row in cache.list()}
    assert len(names) == 4
    assert cache.prefetch(images[1:]) == 2
    assert len({row["name"] for row in cache.list()} & names) == 3
    lease = cache.acquire(images[3])  # a waiting sandbox replaces what is wanted last, but not its own base
    assert cache.copied_bytes == size.base.bytes + sum(
        {layer.digest: layer.bytes for image in images for layer in read_layered(image).layers}.values()
    )
    lease.release()


RANK = """
import json, random, sys, time
from pathlib import Path
from megaflow_hpc.environments.images.cache.cache import ImageCache
root, budget, seed, rounds, *images = sys.argv[1:]
cache = ImageCache(Path(root), "apptainer", budget_bytes=int(budget), budget_inodes=10**6)
chance = random.Random(int(seed))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(rounds)):
    lease = cache.acquire(chance.choice(images), timeout_s=120)
    for place in (lease.path, *lease.layers):
        assert Path(place).exists(), place
    time.sleep(chance.random() / 200)
    lease.release()
print(cache.copied_bytes, flush=True)
"""


def start_rank(cache: Path, budget: int, seed: int, rounds: int, images: list[str]) -> subprocess.Popen[str]:
    return start_python(RANK, cache, budget, seed, rounds, *images)


def go(ranks: list[subprocess.Popen[str]]) -> list[int]:
    for rank in ranks:
        proceed(rank)
    answers = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    return [int(answer) for answer in answers]


def test_of_many_processes_at_once_each_part_is_staged_by_one(
    bases: list[str], store: ImageStore, open_cache: Callable[..., ImageCache], tmp_path: Path
) -> None:
    images = [add_image(store, bases[0], [ENVIRONMENT, {f"{number}": "x"}]) for number in range(4)]
    copied = go([start_rank(tmp_path / "cache", 10**9, number, 20, images) for number in range(4)])
    layers = {layer.digest: layer.bytes for image in images for layer in read_layered(image).layers}
    assert sum(copied) == os.path.getsize(bases[0]) + sum(layers.values())
    cache = open_cache()
    assert len(cache.list()) == 6
    cache.clear()
    nothing_is_left(tmp_path / "cache")


def test_processes_that_have_half_of_what_they_need_do_not_wait_for_each_other(
    bases: list[str], store: ImageStore, open_cache: Callable[..., ImageCache], tmp_path: Path
) -> None:
    """There is room for one base and one layer. Each of the six images needs exactly that."""
    half = [{"half": os.urandom(MB // 2) + bytes([number])} for number in range(2)]
    layers = [add_layer(store, entries) for entries in half]
    images = [add_image(store, base, [layer]) for base in bases for layer in layers]
    need = max(open_cache().facts(image).unpacked_bytes for image in images)
    ranks = [start_rank(tmp_path / "cache", need + 10_000, number, 5, images) for number in range(4)]
    assert sum(go(ranks)) > 0
    open_cache().clear()
    nothing_is_left(tmp_path / "cache")


def test_processes_killed_at_any_instant_leave_nothing_half_and_block_nobody(
    bases: list[str], store: ImageStore, open_cache: Callable[..., ImageCache], tmp_path: Path
) -> None:
    chance = random.Random(5)
    images = [
        add_image(store, base, [ENVIRONMENT, {f"{number}": os.urandom(MB // 3)}])
        for number, base in enumerate(2 * bases)
    ]
    need = max(open_cache().facts(image).unpacked_bytes for image in images)
    for seed in range(KILLS // 2):
        ranks = [start_rank(tmp_path / "cache", 2 * need, 10 * seed + each, 1000, images) for each in range(2)]
        for rank in ranks:
            proceed(rank)
        time.sleep(chance.random() / 4)
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate()
    cache = open_cache(budget_mb=2 * need / MB)
    for image in images:
        lease = cache.acquire(image, timeout_s=60)
        number = images.index(image)
        assert len(Path(lease.layers[0], str(number)).read_bytes()) == MB // 3
        assert seen(*lease.layers, lease.path) >= {"etc", "etc/environment", "etc/number", "lib/old"}
        lease.release()
    cache.clear()
    open_cache()  # a child of a killed process may have written while the first cache was tidied
    nothing_is_left(tmp_path / "cache")
    assert [json.loads((path / "entry.json").read_bytes()) for path in (tmp_path / "cache" / "images").iterdir()] == []
