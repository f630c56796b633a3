"""Determines which trees of an image a node caches: one for each layer and the base, or a single flat tree.

====================  ==========================================  ====================================
copy                  contents                                    made from
====================  ==========================================  ====================================
``<key>-tree``        ``rootfs/``, the image's files              a SIF, or a base and all its layers
``<digest>-layer``    ``rootfs/``, an overlay's upper directory   a layer's blob
====================  ==========================================  ====================================

Images share the copies of their common layers. A base or layer that has a digest is verified while it is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.apptainer_client import build
from megaflow_hpc.environments.images.cache.index import DiskUsage
from megaflow_hpc.environments.images.image_file import ImageFacts, read_checked, stamp
from megaflow_hpc.environments.images.layered import layer_path
from megaflow_hpc.environments.images.layers.blob import BLOCK, LayerFacts
from megaflow_hpc.environments.images.layers.merging import put_over
from megaflow_hpc.environments.images.layers.unpacking import unpack
from megaflow_hpc.errors import SandboxError, SiteError
from megaflow_hpc.host import apptainer as runtime
from megaflow_hpc.host import child
from megaflow_hpc.host.files import remove_tree

TREE_EXTRA_INODES = 64
LAYER_EXTRA_INODES = 8
"""Inodes that a copy needs beyond those of its files, with a margin."""


@dataclass(frozen=True)
class CachedTree:
    """One cached copy. ``make(directory)`` writes it to ``directory/rootfs`` and returns the number of bytes read."""

    name: str
    source: str
    """Path of the file that the copy is made from."""
    size: DiskUsage
    make: Callable[[Path], int]


@dataclass(frozen=True)
class ImagePlan:
    """The trees of one image: ``artifacts``, topmost first, and optionally a ``directory`` below them."""

    image: str
    artifacts: tuple[CachedTree, ...]
    directory: str | None = None
    """The base, if it is an already unpacked image. It is used in place."""

    @property
    def names(self) -> list[str]:
        return [artifact.name for artifact in self.artifacts]

    @property
    def sizes(self) -> dict[str, DiskUsage]:
        """Artifact name → size."""
        return {artifact.name: artifact.size for artifact in self.artifacts}


def plan(facts: ImageFacts, apptainer: str, *, flat: bool = False) -> ImagePlan:
    """Returns the trees that this node needs to run an image.

    Args:
        flat: Merge a layered image into one tree, for nodes that cannot stack layers with an overlay.
    """
    if not facts.is_layered:
        return ImagePlan(facts.path, (_sif_artifact(facts, apptainer),))
    if flat:
        return ImagePlan(facts.path, (_flat_artifact(facts, apptainer),))
    artifacts = [_layer_artifact(facts, layer) for layer in reversed(facts.layers)]
    if facts.base is not None and os.path.isdir(facts.base.path):
        return ImagePlan(facts.path, tuple(artifacts), facts.base.path)
    if facts.base is not None:
        artifacts.append(_sif_artifact(facts.base, apptainer))
    return ImagePlan(facts.path, tuple(artifacts))


def _sif_artifact(facts: ImageFacts, apptainer: str) -> CachedTree:
    size = DiskUsage(facts.unpacked_bytes, facts.inodes + TREE_EXTRA_INODES)
    return CachedTree(f"{facts.key}-tree", facts.path, size, lambda at: _unpack_sif(facts, at / "rootfs", apptainer))


def _layer_artifact(facts: ImageFacts, layer: LayerFacts) -> CachedTree:
    blob = str(layer_path(facts.path, layer.digest))
    size = DiskUsage(layer.unpacked_bytes, layer.inodes + LAYER_EXTRA_INODES)
    return CachedTree(f"{layer.digest[:40]}-layer", blob, size, lambda at: _unpack_layer(blob, layer, at / "rootfs"))


def _flat_artifact(facts: ImageFacts, apptainer: str) -> CachedTree:
    bytes_, inodes = facts.unpacked_bytes, facts.inodes
    if facts.base is not None and os.path.isdir(facts.base.path):
        base = _measure(facts.base.path)
        bytes_, inodes = bytes_ + base.bytes, inodes + base.inodes
    size = DiskUsage(bytes_, inodes + TREE_EXTRA_INODES)
    return CachedTree(f"{facts.key}-tree", facts.path, size, lambda at: _lay_out(facts, at, apptainer))


def _unpack_sif(facts: ImageFacts, target: Path, apptainer: str) -> int:
    before = stamp(facts.path)
    source = Path(facts.path)
    if facts.digest:  # verify and unpack a private copy, since the store's owner may change the file in between
        source = target.with_name("image.sif")
        read_checked(facts, source)
    try:
        if not sif.unpack(source, target, sif.system_partition(source)):
            build(apptainer, target, str(source), "--fix-perms", sandbox=True, timeout_s=1800)
    except SiteError as error:
        raise SandboxError(f"{facts.path}: cannot be unpacked: {error}") from error
    if facts.digest:
        source.unlink()
    elif stamp(facts.path) != before:
        raise SandboxError(f"{facts.path}: was replaced while it was being unpacked; start again")
    return facts.bytes


def _unpack_layer(blob: str, layer: LayerFacts, target: Path, *, marks: bool = False) -> int:
    try:
        os.stat(blob)
    except OSError as error:
        raise SandboxError(
            f"{blob}: the layer is not there ({error.strerror}); build or pull its image again"
        ) from None
    unpack(blob, layer, target, marks=marks)
    return layer.bytes


def _lay_out(facts: ImageFacts, directory: Path, apptainer: str) -> int:
    """Writes the base's files and merges each layer into them. The result equals what an overlay would show."""
    root, above = directory / "rootfs", directory / "layer"
    count = 0
    if facts.base is None:
        root.mkdir()
    elif os.path.isdir(facts.base.path):
        _copy_tree(facts.base.path, root)
    else:
        count = _unpack_sif(facts.base, root, apptainer)
    mode = root.stat().st_mode & 0o7777 | 0o700
    for layer in facts.layers:
        count += _unpack_layer(str(layer_path(facts.path, layer.digest)), layer, above, marks=True)
        put_over(str(above), str(root))
        remove_tree(above)
        root.chmod(mode)
    return count


def _copy_tree(source: str, target: Path) -> None:
    # Inside a user namespace, root can read all files of the user, whatever their modes.
    inside = runtime.unshare() if os.geteuid() else ()
    if why := child.cp(source, target, prefix=inside):
        raise SandboxError(f"{source}: cannot be copied: {why}")


def _measure(directory: str) -> DiskUsage:
    bytes_ = inodes = 0
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files):
            status = os.lstat(os.path.join(parent, name))
            bytes_ += max(BLOCK, status.st_blocks * 512)
            inodes += 1
    return DiskUsage(bytes_, inodes)
