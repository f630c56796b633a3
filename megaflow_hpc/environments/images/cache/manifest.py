"""Writes and reads image manifests, which list a campaign's images so that they can be transferred to an air-gapped
site.

A manifest is written once all images are in a store. The other site uses it together with the store's files::

    {"format": "megaflow-hpc/images", "format_version": 2,
     "images": [{"key": …, "source": "docker://debian:12", "digest": "…", "bytes": …, "files": ["layers/…", …],
                 "base": {"digest": …, "bytes": …} | {"path": …, "bytes": …} | null,
                 "layers": [{"digest": …, "bytes": …}, …]}],
     "bytes": …}

``files`` lists the store files of the image, including shared ones: a SIF, or a document with its layers and base. The
outer ``bytes`` counts each file once. A base given by path is neither stored nor transferred. It must exist at the same
path on the other site. An image without a digest was missing when the manifest was written. Version 1 supported only
SIF files and did not list ``files``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.layered import SUFFIX, is_layered, layer_path, read_layered
from megaflow_hpc.environments.images.resolve import Images, source_key
from megaflow_hpc.environments.images.sources import is_remote
from megaflow_hpc.environments.images.store import digest_in
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.atomic import write_json

FORMAT = "megaflow-hpc/images"
FORMAT_VERSION = 2

Say = Callable[[str], None]


def manifest(images: Images) -> dict[str, Any]:
    """Creates the manifest of all images that ``images`` has resolved."""
    rows, sizes = [], dict[Path, int]()
    for key, (source, path) in images.used.items():
        row: dict[str, Any] = {"key": key, "source": source, "digest": None, "bytes": None, "files": []}
        row |= {"base": None, "layers": []}
        if path and (digest := digest_in(path)):
            own_sizes = {file: file.stat().st_size for file in _store_files(path)}
            row |= {"digest": digest, "bytes": sum(own_sizes.values())}
            row["files"] = [f"{file.parent.name}/{file.name}" for file in own_sizes]
            sizes |= own_sizes
            if is_layered(path):
                row |= _composition(path)
        rows.append(row)
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "images": rows, "bytes": sum(sizes.values())}


def _composition(path: Path) -> dict[str, Any]:
    """Returns the base and layers of an image with their sizes."""
    image = read_layered(path)
    base: dict[str, Any] | None = None
    if image.base and image.base.digest:
        base = {"digest": image.base.digest, "bytes": os.path.getsize(image.base.path)}
    elif image.base:
        base = {"path": image.base.path, "bytes": image.base.bytes}
    return {"base": base, "layers": [{"digest": layer.digest, "bytes": layer.bytes} for layer in image.layers]}


def _store_files(path: Path) -> list[Path]:
    """Returns the paths of an image's store files: a SIF, or a document with its base and layers."""
    files = [path]
    if is_layered(path):
        image = read_layered(path)
        if image.base and image.base.digest:
            files.append(Path(image.base.path))
        files += [layer_path(path, layer.digest) for layer in image.layers]
    return files


def missing(content: dict[str, Any]) -> list[str]:
    """Returns the sources of images that were missing when the manifest was written."""
    return [row["source"] for row in content["images"] if row["digest"] is None]


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Writes a manifest, readable by every user."""
    write_json(path, content, 0o644)


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads a manifest. Raises :class:`ConfigError` if it is invalid, lists no images, or has a newer version."""
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
    """Adds the images of a manifest to the store, from ``directory`` if given, else from registries.

    Args:
        directory: Directory with store files, either in the store's subdirectories or all in one directory.

    Returns:
        A map from image sources to paths in the store.

    Raises:
        SiteError: An image is not available, or its content does not match the manifest.
    """
    files: dict[str, str] = {}
    lacking: list[str] = []
    for row in content["images"]:
        source, digest = str(row["source"]), row["digest"]
        path = _fetch_image(images, str(row["key"]), source, str(digest or ""), directory, say)
        if path is not None:
            files[source] = str(path)
            continue
        names = ", ".join(row.get("files") or [f"sha256/{digest}.sif"])
        lacking.append(f"  {source} ({names if digest else 'not built when the manifest was written'})")
    if lacking:
        where = f"in {directory}" if directory else "in a registry"
        remedy = (
            "copy these files there from the store where the manifest was written"
            if directory
            else "copy their files here and name the directory with --from, or build them: megaflow-hpc images build"
        )
        raise SiteError(
            f"{len(lacking)} of {len(content['images'])} images are not {where}; {remedy}\n" + "\n".join(lacking)
        )
    return files


def _fetch_image(images: Images, key: str, source: str, digest: str, directory: Path | None, say: Say) -> Path | None:
    """Returns the image for a manifest row, adding it to the store if needed. Returns ``None`` if it is not
    available."""
    store = images.store
    if path := store.find(key):
        return path
    if digest:
        image = store.image(digest)
        if image and store.is_complete(image.path):
            store.prepare(source)
            store.name(key, source, digest)
            return Path(image.path)
    if directory is not None:
        path = _add_from(directory, images, source, digest, say) if digest else None
        if path is not None:
            store.name(key, source, digest)
        return path
    if is_remote(source):
        say(f"{source}: pulling")
        assert key == source_key(source)
        return images.resolve_source(source, "images pull")
    return None


def _add_from(directory: Path, images: Images, source: str, digest: str, say: Say) -> Path | None:
    """Adds an image from a directory to the store. Returns ``None`` if the directory lacks one of its files."""
    store = images.store
    if file := _locate(directory, "sha256", f"{digest}.sif"):
        say(f"{source}: from {file}")
        return Path(store.add(file, source, digest).path)
    document = _locate(directory, "sha256", f"{digest}{SUFFIX}")
    if document is None:
        return None
    image = read_layered(document)
    say(f"{source}: from {document}")
    store.prepare(source)
    for layer in image.layers:
        if store.layers.find(layer.digest) is None:
            file = _locate(directory, "layers", layer.digest)
            if file is None:
                return None
            with open(file, "rb") as reader:
                store.layers.take(layer.digest, iter(lambda: reader.read(1 << 22), b""))
    if image.base and image.base.digest:
        base = store.image(image.base.digest)
        if base is None:
            file = _locate(directory, "sha256", f"{image.base.digest}.sif")
            if file is None:
                return None
            base = store.add(file, source, image.base.digest)
        image = replace(image, base=replace(image.base, path=base.path))
    return Path(store.add_layered(image, source).path)


def _locate(directory: Path, subdirectory: str, name: str) -> Path | None:
    """Finds a store file in ``directory``, its ``subdirectory`` or a sibling of that name. Returns ``None`` if it is
    missing."""
    for parent in (directory / subdirectory, directory, directory.parent / subdirectory):
        if (parent / name).is_file():
            return parent / name
    return None
