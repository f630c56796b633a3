"""Lists what a node's cache needs of an image: its trees, or one flat tree of all of them.

====================  ==========================================  ====================================
copy                  contents                                    made from
====================  ==========================================  ====================================
``<key>-tree``        ``rootfs/``, the image's files              a SIF, or a base and all its layers
``<digest>-layer``    ``rootfs/``, an overlay's upper directory   a layer's blob
====================  ==========================================  ====================================

Images share the copies of their common layers. A base or layer with a digest is compared with it while it is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.apptainer_build import build
from megaflow_hpc.environments.images.cache.shelf import Room
from megaflow_hpc.environments.images.image_file import ImageFacts, read_checked, stamp
from megaflow_hpc.environments.images.layered import layer_path
from megaflow_hpc.environments.images.layers.blob import BLOCK, LayerFacts
from megaflow_hpc.environments.images.layers.merging import put_over
from megaflow_hpc.environments.images.layers.unpacking import unpack
from megaflow_hpc.errors import SandboxError, SiteError
from megaflow_hpc.host import apptainer as runtime
from megaflow_hpc.host import child
from megaflow_hpc.host.files import remove_tree

MARGIN_INODES = 64
_LAYER_INODES = 8
"""Of a layer's copy, beside its files: its directory, its size, its lock and its marks."""


@dataclass(frozen=True)
class Part:
    """One copy. ``make(directory)`` writes it to ``directory/rootfs`` and returns the bytes that it has read."""

    name: str
    source: str
    """What it is made of, as the log names it."""
    size: Room
    make: Callable[[Path], int]


@dataclass(frozen=True)
class Plan:
    """The trees of one image."""

    image: str
    bottom: Part | str
    """A copy, or the path of a directory that is used without a copy."""
    layers: tuple[Part, ...] = ()
    """Over it, the topmost first."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All copies, the bottom first."""
        return (*((self.bottom,) if isinstance(self.bottom, Part) else ()), *reversed(self.layers))


def plan(facts: ImageFacts, apptainer: str, *, flat: bool = False) -> Plan:
    """Returns the trees that have to be on this node for an image.

    Args:
        flat: lay an image of layers out as one tree, for nodes that cannot stack them by an overlay.
    """
    if not facts.is_layered:
        return Plan(facts.path, _base(facts, apptainer))
    if flat:
        return Plan(facts.path, _laid_out(facts, apptainer))
    layers = tuple(_layer(facts, layer) for layer in reversed(facts.layers))
    if facts.base is None:
        return Plan(facts.path, layers[-1], layers[:-1])
    return Plan(facts.path, _base(facts.base, apptainer), layers)


def _base(facts: ImageFacts, apptainer: str) -> Part | str:
    if os.path.isdir(facts.path):
        return facts.path
    size = Room(facts.unpacked_bytes, facts.inodes + MARGIN_INODES)
    return Part(f"{facts.key}-tree", facts.path, size, lambda at: _unpack_sif(facts, at / "rootfs", apptainer))


def _layer(facts: ImageFacts, layer: LayerFacts) -> Part:
    blob = str(layer_path(facts.path, layer.digest))
    size = Room(layer.unpacked_bytes, layer.inodes + _LAYER_INODES)
    return Part(f"{layer.digest[:40]}-layer", blob, size, lambda at: _unpack_layer(blob, layer, at / "rootfs"))


def _laid_out(facts: ImageFacts, apptainer: str) -> Part:
    bytes_, inodes = facts.unpacked_bytes, facts.inodes
    if facts.base is not None and os.path.isdir(facts.base.path):
        found = _measure(facts.base.path)
        bytes_, inodes = bytes_ + found.bytes, inodes + found.inodes
    size = Room(bytes_, inodes + MARGIN_INODES)
    return Part(f"{facts.key}-tree", facts.path, size, lambda at: _lay_out(facts, at, apptainer))


def _unpack_sif(facts: ImageFacts, target: Path, apptainer: str) -> int:
    before = stamp(facts.path)
    source = Path(facts.path)
    if facts.digest:  # check and unpack a private copy, because the store's owner may change the file in between
        source = target.with_name("image.sif")
        read_checked(facts, source)
    try:
        if not sif.unpack(source, target, sif.system_partition(source)):
            build(apptainer, target, str(source), "--sandbox", "--fix-perms", timeout_s=1800)
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


def _lay_out(facts: ImageFacts, place: Path, apptainer: str) -> int:
    """The base's files, and each layer's put over them: an overlay's view, without one."""
    root, above = place / "rootfs", place / "layer"
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
    inside = runtime.unshare() if os.geteuid() else ()  # it reads the owner's files whatever their modes say
    if why := child.cp(source, target, prefix=inside):
        raise SandboxError(f"{source}: cannot be copied: {why}")


def _measure(directory: str) -> Room:
    bytes_ = inodes = 0
    for place, directories, files in os.walk(directory):
        for name in (*directories, *files):
            found = os.lstat(os.path.join(place, name))
            bytes_ += max(BLOCK, found.st_blocks * 512)
            inodes += 1
    return Room(bytes_, inodes)
