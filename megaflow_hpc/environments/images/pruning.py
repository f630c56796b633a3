"""Removes images from a store, together with the layers that only these images used.

Other unused layers are kept for a day, because a build or pull in progress may need them. While a build is running, the
layers of removed images are kept for a day as well.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.environments.images.atomic_files import abandoned
from megaflow_hpc.environments.images.layered import SUFFIX, LayeredImage, is_layered, read_layered
from megaflow_hpc.environments.images.layers.blob import LayerFacts
from megaflow_hpc.environments.images.store import ImageStore, StoredImage
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import remove_tree

DAY_S = 86400.0
"""Seconds for which unused layers are kept, unless only the removed images used them."""


@dataclass(frozen=True)
class Pruned:
    """Result of :func:`prune`: digests of the removed images and layers, and paths of killed builds' leftover files."""

    images: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """Digests of images that are old enough to remove but serve as the base of other images."""
    freed_bytes: int = 0


def prune(
    store: ImageStore,
    named: Sequence[StoredImage] = (),
    older_s: float | None = None,
    *,
    dry_run: bool = False,
) -> Pruned:
    """Removes images from the first store, and the layers that are no longer used.

    Args:
        named: Images to remove.
        older_s: Also remove images older than this many seconds. ``None`` means only the named images.
        dry_run: Report the images and layers without removing them.

    Raises:
        ConfigError: A named image is the base of an image that is kept.
        SandboxError: An image cannot be read, so its layers are unknown.
    """
    with nullcontext() if dry_run or not (store.root / "work").is_dir() else store.changing():
        old = []
        if older_s is not None:
            before = time.time() - older_s
            old = [image for image in store.images() if image.created_at < before and _own(store, image)]
        chosen = {image.digest: image for image in (*named, *old)}
        needed = dependants(store, chosen)
        for image in named:
            if above := needed.get(image.digest):
                shown = ", ".join(digest[:12] for digest in above[:3])
                raise ConfigError(
                    f"{image.digest[:12]}: the base of {len(above)} images of {store.root} ({shown}"
                    f"{', …' if len(above) > 3 else ''}); remove them too"
                )
        kept = sorted(digest for digest in chosen if digest in needed)
        removed = {digest: image for digest, image in chosen.items() if digest not in needed}
        layers = _unused(store, removed)
        leftovers = tuple(str(path) for path in store.leftovers())
        if dry_run:
            files = [Path(image.path) for image in removed.values()]
            files += [store.root / "layers" / layer.digest for layer in layers]
            freed = sum(file.lstat().st_size for file in files)
        else:
            freed = sum(store.remove(digest) for digest in removed)
            freed += sum(store.layers.remove(layer.digest) for layer in layers)
            store.layers.tidy(DAY_S)
    for path in () if dry_run else leftovers:
        remove_tree(Path(path))
    return Pruned(tuple(removed), tuple(layer.digest for layer in layers), leftovers, tuple(kept), freed)


def dependants(store: ImageStore, without: Collection[str] = ()) -> dict[str, list[str]]:
    """Returns, for each stored base, the digests of the first store's images that are built on it."""
    images_by_base: dict[str, list[str]] = {}
    for digest, image in _documents(store, without):
        if image.base is not None and image.base.digest:
            images_by_base.setdefault(image.base.digest, []).append(digest)
    return images_by_base


def own_bytes(store: ImageStore) -> Mapping[str, tuple[int, int]]:
    """Returns for each image digest two sizes in bytes: of the files that only this image uses, and of shared files."""
    images = {image.digest: image for image in reversed(list(store.images()))}
    layered = {digest: read_layered(image.path) for digest, image in images.items() if is_layered(image.path)}
    users = Counter(layer.digest for image in layered.values() for layer in image.layers)
    sizes = {digest: (image.bytes, 0) for digest, image in images.items()}
    for digest, document in layered.items():
        own = sum(layer.bytes for layer in document.layers if users[layer.digest] == 1)
        shared = sum(layer.bytes for layer in document.layers) - own
        base = document.base
        if base is not None:
            shared += images[base.digest].bytes if base.digest in images else base.bytes
        sizes[digest] = (own, shared)
    return sizes


def _documents(store: ImageStore, without: Collection[str]) -> Iterator[tuple[str, LayeredImage]]:
    for path in sorted((store.root / "sha256").glob(f"*{SUFFIX}")):
        if path.stem not in without:
            yield path.stem, read_layered(path)


def _own(store: ImageStore, image: StoredImage) -> bool:
    return Path(image.path).is_relative_to(store.root)


def _unused(store: ImageStore, removed: Mapping[str, StoredImage]) -> list[LayerFacts]:
    """Returns the layers of the first store that no remaining image uses and that pruning may remove now."""
    used = {layer.digest for _, image in _documents(store, removed) for layer in image.layers}
    prunable: set[str] = set()
    if all(abandoned(path) for path in (store.root / "work").glob("*.*/")):
        for image in removed.values():
            if is_layered(image.path):
                prunable |= {layer.digest for layer in read_layered(image.path).layers}
    before = time.time() - DAY_S
    return [
        layer
        for layer in store.layers.layers()
        if layer.digest not in used
        and os.path.lexists(store.root / "layers" / layer.digest)
        and (layer.digest in prunable or (store.root / "layers" / f"{layer.digest}.json").stat().st_mtime < before)
    ]
