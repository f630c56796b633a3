"""Manifests of images: what a campaign needs, by source and digest, to be carried to where nothing can be fetched.

Made where there is a network, when everything is in the store; used beside the SIF files on the other side::

    {"format": "megaflow-hpc/images", "format_version": 1,
     "images": [{"key": …, "source": "docker://debian:12", "digest": "…", "bytes": …}]}

An entry without a digest is one that the store lacked when the manifest was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.registries import is_remote
from megaflow_hpc.environments.images.resolve import Images, source_key
from megaflow_hpc.environments.images.store import digest_in
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.atomic import write_json

FORMAT = "megaflow-hpc/images"
FORMAT_VERSION = 1

Say = Callable[[str], None]


def manifest(images: Images) -> dict[str, Any]:
    """Returns the manifest of everything that ``images`` was asked for."""
    rows = []
    for key, (source, path) in images.used.items():
        digest = digest_in(path) if path else None
        size = path.stat().st_size if path else None
        rows.append({"key": key, "source": source, "digest": digest, "bytes": size})
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "images": rows}


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
    """Brings what a manifest lists into the store: from ``directory`` of ``<digest>.sif``, else from registries.

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
        if known is None and digest and (image := store.image(str(digest))):
            store.name(key, source, image.digest)
            known = Path(image.path)
        carried = directory / f"{digest}.sif" if directory and digest else None
        if known is None and carried is not None and carried.is_file():
            say(f"{source}: from {carried}")
            known = Path(store.add(carried, source, str(digest)).path)
            store.name(key, source, str(digest))
        if known is None and directory is None and is_remote(source):
            say(f"{source}: pulling")
            known = images.resolve_source(source, "images pull")
            assert key == source_key(source)
        if known is None:
            lacking.append(f"  {source} {f'({digest}.sif)' if digest else '(not built when the manifest was written)'}")
        else:
            found[source] = str(known)
    if lacking:
        where = f"in {directory}" if directory else "in a registry"
        remedy = (
            "copy these files there from STORE/sha256 of where the manifest was made"
            if directory
            else "copy their files here and name the directory with --from, or build them: megaflow-hpc images build"
        )
        raise SiteError(
            f"{len(lacking)} of {len(content['images'])} images are not {where}; {remedy}\n" + "\n".join(lacking)
        )
    return found
