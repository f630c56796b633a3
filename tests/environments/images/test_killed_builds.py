"""Builds and pulls that are killed at any time leave a consistent store, and the next one continues."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow_hpc.environments.images.layered import layer_path, read_layered
from megaflow_hpc.environments.images.layers.blob import measure
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.environments.sandbox.scratch import sweep
from megaflow_hpc.host.files import remove_tree
from tests.support.registries import Registry, layer, noise

KILLS = int(os.environ.get("MEGAFLOW_BUILD_KILLS", "6"))
"""Kills in a run of the suite. The figures in docs/how-to/images.md are from 100."""

BUILD = """
import sys
from pathlib import Path
from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.sources import ImageMapping
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.store import ImageStore
store, scratch, base, *files = sys.argv[1:]
images = Images(ImageStore(store), builder=Builder(scratch=scratch))
for file in files:
    print(images.resolve_dockerfile(Dockerfile(Path(file)), ImageMapping({"base": base}, Path("/"))), flush=True)
"""


@pytest.mark.slow
def test_a_build_killed_at_any_instant_leaves_nothing_half(busybox_rootfs: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("MEGAFLOW_SEED", "7"))
    chance = random.Random(seed)
    store, scratch = ImageStore(tmp_path / "store"), tmp_path / "scratch"
    scratch.mkdir(mode=0o700)
    files = []
    for number in range(3):
        context = tmp_path / f"context{number}"
        (context / "tree").mkdir(parents=True)
        (context / "tree" / "own").write_bytes(os.urandom(200_000))
        (context / "Dockerfile").write_text(
            "FROM base AS one\nRUN head -c 300000 /dev/urandom > /shared\n"
            "FROM base\nWORKDIR /w\nCOPY --from=one /shared .\nCOPY tree /w/\nENV A=1\n"
            f"RUN cp own copy && rm own && echo {number} > number\n"
        )
        files.append(str(context / "Dockerfile"))
    argv = [sys.executable, "-c", BUILD, str(store.root), str(scratch), busybox_rootfs, *files]
    images = _killed_at_any_instant(argv, store, chance, 1.6)
    assert len(set(images)) == 3, seed
    shared = [{layer.digest for layer in read_layered(image).layers} for image in images]
    assert len(shared[0] & shared[1] & shared[2]) >= 2
    sweep(scratch)
    assert [path for path in (scratch / "owners").glob("*") if path.is_dir()] == []


PULL = """
import sys
from megaflow_hpc.environments.images.sources import Registries
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.store import ImageStore
store, mirror, *names = sys.argv[1:]
for name in names:
    images = Images(ImageStore(store), Registries({"lab.org": mirror}))
    print(images.resolve_source(f"docker://lab.org/{name}:1", "test"), flush=True)
"""


@pytest.mark.slow
def test_a_pull_killed_at_any_instant_leaves_nothing_half(registry: Registry, tmp_path: Path) -> None:
    """The images share layers and come from a real registry."""
    seed = int(os.environ.get("MEGAFLOW_SEED", "7"))
    store = ImageStore(tmp_path / "store")
    shared = [layer({f"shared{number}": noise(f"shared {number}", 4_000_000)}, "") for number in range(3)]
    sizes = {each.digest: len(each.blob) for each in shared}
    names = []
    for number in range(4):
        own = layer({f"own{number}": noise(f"own {number}", 1_000_000)}, "gzip")
        sizes[own.digest] = len(own.blob)
        registry.push(f"killed{number}", "1", [*shared[: number + 1], own], WorkingDir="/w")
        names.append(f"killed{number}")
    argv = [sys.executable, "-c", PULL, str(store.root), f"http://{registry.address}", *names]
    images = _killed_at_any_instant(argv, store, random.Random(seed), 0.9)
    assert len(set(images)) == 4, seed
    left = {path.name: path.stat().st_size for path in (store.root / "layers").iterdir() if path.suffix != ".json"}
    assert left == sizes


def _killed_at_any_instant(argv: list[str], store: ImageStore, chance: random.Random, longest_s: float) -> list[Path]:
    """Kills a program :data:`KILLS` times, then runs it to its end. Returns the images that it prints."""
    killed = 0
    while killed < KILLS:
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            process.wait(chance.uniform(0.1, longest_s))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            killed += 1
        said = process.communicate()[1]
        assert process.returncode in (0, -signal.SIGKILL), said.decode()
        _whole(store)
        if process.returncode == 0:
            remove_tree(store.root)  # so that the next run has work
    finished = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    _whole(store)
    assert list((store.root / "work").iterdir()) == []
    for room, ending in (("sha256", ".image"), ("layers", ""), ("names", ""), ("steps", "")):
        for note in (store.root / room).iterdir():
            assert note.suffix in (".json", ending), note
            assert room in ("names", "steps") or note.with_suffix(ending).exists()
    return [Path(line) for line in finished.stdout.splitlines()]


def _whole(store: ImageStore) -> None:
    """Checks every digest, and that every named layer exists."""
    if not store.root.is_dir():
        return
    for path in (store.root / "layers").glob("*"):
        if not path.suffix and not path.name.startswith("."):
            measure([path.read_bytes()], path.name)
    for path in (store.root / "sha256").glob("*.image"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
        for each in read_layered(path).layers:
            assert measure([layer_path(path, each.digest).read_bytes()], each.digest) == each
