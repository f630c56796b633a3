"""Manifests of images: what a campaign needs, by source and digest, to be carried to where nothing can be fetched.

Made where there is a network, when everything is in the store; used beside the store's files on the other side::

    {"format": "megaflow-hpc/images", "format_version": 2,
     "images": [{"key": …, "source": "docker://debian:12", "digest": "…", "bytes": …, "files": ["layers/…", …],
                 "base": {"digest": …, "bytes": …} | {"path": …, "bytes": …} | null,
                 "layers": [{"digest": …, "bytes": …}, …]}],
     "bytes": …}

``files`` are those of the store that the image is, those that it shares with others among them: a SIF, or a document
with its layers and the SIF that these lie over. ``bytes`` below counts each file once. A base with a path lies in no
store, and is not carried: it has to be at the same path. An entry without a digest is one that the store lacked when
the manifest was written; version 1 had SIF files alone and did not name them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.layered import SUFFIX, is_layered, layer_path, read_layered
from megaflow_hpc.environments.images.registries import is_remote
from megaflow_hpc.environments.images.resolve import Images, source_key
from megaflow_hpc.environments.images.store import digest_in
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.atomic import write_json

FORMAT = "megaflow-hpc/images"
FORMAT_VERSION = 2

Say = Callable[[str], None]


def manifest(images: Images) -> dict[str, Any]:
    """Returns the manifest of everything that ``images`` was asked for."""
    rows, sizes = [], dict[Path, int]()
    for key, (source, path) in images.used.items():
        row: dict[str, Any] = {"key": key, "source": source, "digest": None, "bytes": None, "files": []}
        row |= {"base": None, "layers": []}
        if path and (digest := digest_in(path)):
            files = [path, *_parts(path)]
            own = {file: file.stat().st_size for file in files}
            row |= {"digest": digest, "bytes": sum(own.values())}
            row["files"] = [f"{file.parent.name}/{file.name}" for file in files]
            sizes |= own
            if is_layered(path):
                row |= _made_of(path)
        rows.append(row)
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "images": rows, "bytes": sum(sizes.values())}


def _made_of(path: Path) -> dict[str, Any]:
    """Base and layers of an image, with their sizes."""
    image = read_layered(path)
    base: dict[str, Any] | None = None
    if image.base and image.base.digest:
        base = {"digest": image.base.digest, "bytes": os.path.getsize(image.base.path)}
    elif image.base:
        base = {"path": image.base.path, "bytes": image.base.bytes}
    return {"base": base, "layers": [{"digest": layer.digest, "bytes": layer.bytes} for layer in image.layers]}


def _parts(path: Path) -> list[Path]:
    """The files of a store that an image is beside its own."""
    if not is_layered(path):
        return []
    image = read_layered(path)
    base = [Path(image.base.path)] if image.base and image.base.digest else []
    return [*base, *(layer_path(path, layer.digest) for layer in image.layers)]


def missing(content: dict[str, Any]) -> list[str]:
    """Returns the sources that the store lacked."""
    return [row["source"] for row in content["images"] if row["digest"] is None]


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Writes a manifest that everybody may read (0644)."""
    write_json(path, content, 0o644)


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads a manifest; raises :class:`ConfigError` for a file that is none, or of a later version."""
    try:
        content = json.loads(path.read_text())
        rows = [(row["key"], row["source"], row["digest"]) for row in content["images"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a manifest of images ({error}); write one with: megaflow-hpc images manifest CAMPAIGN"
        ) from error
    if content.get("format") != FORMAT or content.get("format_version", 0) > FORMAT_VERSION or not rows:
        raise ConfigError(f"{path}: expected {FORMAT} up to version {FORMAT_VERSION}, with images in it")
    return content


def fetch(images: Images, content: dict[str, Any], directory: Path | None, say: Say) -> dict[str, str]:
    """Brings what a manifest lists into the store: from ``directory``, which has a store's files as they lie there or
    side by side, else from registries.

    Returns:
        Source → file.

    Raises:
        SiteError: an image that is nowhere, or whose content is not the one the manifest names.
    """
    found: dict[str, str] = {}
    lacking: list[str] = []
    store = images.store
    for row in content["images"]:
        key, source, digest = str(row["key"]), str(row["source"]), row["digest"]
        known = store.find(key)
        if known is None and digest and (image := store.image(str(digest))) and store.whole(image.path):
            store.prepare(source)
            store.name(key, source, image.digest)
            known = Path(image.path)
        if known is None and directory is not None and digest:
            known = _carried(images, directory, source, str(digest), say)
            if known is not None:
                store.name(key, source, str(digest))
        if known is None and directory is None and is_remote(source):
            say(f"{source}: pulling")
            known = images.resolve_source(source, "images pull")
            assert key == source_key(source)
        if known is None:
            files = ", ".join(row.get("files") or [f"sha256/{digest}.sif"])
            lacking.append(f"  {source} ({files if digest else 'not built when the manifest was written'})")
        else:
            found[source] = str(known)
    if lacking:
        where = f"in {directory}" if directory else "in a registry"
        remedy = (
            "copy these files there from the store of where the manifest was made"
            if directory
            else "copy their files here and name the directory with --from, or build them: megaflow-hpc images build"
        )
        raise SiteError(
            f"{len(lacking)} of {len(content['images'])} images are not {where}; {remedy}\n" + "\n".join(lacking)
        )
    return found


def _carried(images: Images, directory: Path, source: str, digest: str, say: Say) -> Path | None:
    """Takes an image out of a directory into the store; ``None`` where one of its files is not there."""
    store = images.store
    if file := _lies(directory, "sha256", f"{digest}.sif"):
        say(f"{source}: from {file}")
        return Path(store.add(file, source, digest).path)
    document = _lies(directory, "sha256", f"{digest}{SUFFIX}")
    if document is None:
        return None
    image = read_layered(document)
    say(f"{source}: from {document}")
    store.prepare(source)
    for layer in image.layers:
        if store.layers.find(layer.digest) is None:
            if (file := _lies(directory, "layers", layer.digest)) is None:
                return None
            with open(file, "rb") as reader:
                store.layers.take(layer.digest, iter(lambda: reader.read(1 << 22), b""))
    if image.base and image.base.digest:
        base = store.image(image.base.digest)
        if base is None:
            if (file := _lies(directory, "sha256", f"{image.base.digest}.sif")) is None:
                return None
            base = store.add(file, source, image.base.digest)
        image = replace(image, base=replace(image.base, path=base.path))
    return Path(store.add_layered(image, source).path)


def _lies(directory: Path, room: str, name: str) -> Path | None:
    """A store's file in a copy of the store, in one directory with all others, or in a copied room beside another."""
    for place in (directory / room, directory, directory.parent / room):
        if (place / name).is_file():
            return place / name
    return None
