"""Builds killed at any instant: the store holds nothing half, and the next build goes on from what is whole."""

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
from megaflow_hpc.environments.sandbox.janitor import sweep
from megaflow_hpc.host.files import remove_tree

KILLS = int(os.environ.get("MEGAFLOW_BUILD_KILLS", "6"))
"""In the suite; the figure in docs/how-to/images.md is of 100."""

BUILD = """
import sys
from pathlib import Path
from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.resolve import ImageMapping, Images
from megaflow_hpc.environments.images.store import ImageStore
store, scratch, base, *files = sys.argv[1:]
images = Images(ImageStore(store), builder=Builder(scratch=scratch))
for file in files:
    print(images.resolve_dockerfile(Dockerfile.read(Path(file)), ImageMapping({"base": base}, Path("/"))), flush=True)
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
    killed = done = 0
    while killed < KILLS:
        building = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            building.wait(chance.uniform(0.1, 1.6))
        except subprocess.TimeoutExpired:
            building.send_signal(signal.SIGKILL)
            killed += 1
        said = building.communicate()[1]
        assert building.returncode in (0, -signal.SIGKILL), said.decode()
        _whole(store)
        if building.returncode == 0:
            done += 1
            remove_tree(store.root)  # so that there is something to kill
    finished = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    images = [Path(line) for line in finished.stdout.splitlines()]
    assert len(set(images)) == 3, (seed, done)
    shared = [{layer.digest for layer in read_layered(image).layers} for image in images]
    assert len(shared[0] & shared[1] & shared[2]) >= 2
    _whole(store)
    assert store.leftovers() == []
    sweep(scratch)
    assert [path for path in (scratch / "owners").glob("*") if path.is_dir()] == []


def _whole(store: ImageStore) -> None:
    """Whatever bears a digest has it, and whatever names a layer names one that is there."""
    if not store.root.is_dir():
        return
    for path in (store.root / "layers").glob("*"):
        if not path.suffix and not path.name.startswith("."):
            assert measure(path).digest == path.name
    for path in (store.root / "sha256").glob("*.image"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
        for layer in read_layered(path).layers:
            assert measure(layer_path(path, layer.digest)) == layer
