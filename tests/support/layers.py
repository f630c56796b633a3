"""Layers and layered images, built entry by entry."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaflow_hpc.environments.images.layered import Base, LayeredImage
from megaflow_hpc.environments.images.layers.blob import Attributes, LayerFacts, Packer
from megaflow_hpc.environments.images.layers.unpacking import unpack
from megaflow_hpc.environments.images.store import ImageStore

Entries = Mapping[str, str | bytes | None]
"""Name → content of an entry. ``None`` deletes the name. A name ending with ``/`` is a directory; the content
``opaque`` hides the directory's lower content. Content that begins with ``->`` is a link's target."""

OPAQUE = "opaque"


def pack(target: Path, entries: Entries, mode: int = 0o755) -> LayerFacts:
    """Write a layer's blob to ``target``."""
    with Packer(target) as packer:
        for name, content in entries.items():
            if content is None:
                packer.whiteout(name)
            elif name.endswith("/"):
                packer.directory(name.rstrip("/"), Attributes(0o755))
                if content == OPAQUE:
                    packer.opaque(name.rstrip("/"))
            elif isinstance(content, str) and content.startswith("->"):
                packer.link(name, content.removeprefix("->"), Attributes(0o777))
            else:
                data = content.encode() if isinstance(content, str) else content
                with open(os.memfd_create("content"), "w+b", buffering=0) as file:
                    file.write(data)
                    file.seek(0)
                    packer.file(name, file.fileno(), Attributes(mode))
    return packer.facts()


def unpacked(chain: Sequence[Entries], place: Path) -> list[str]:
    """Return the layers as directories in ``place``, the topmost first."""
    place.mkdir()
    for number, entries in enumerate(chain):
        facts = pack(place / f"{number}.blob", entries)
        unpack(place / f"{number}.blob", facts, place / str(number))
    return [str(place / str(number)) for number in reversed(range(len(chain)))]


def add_layer(store: ImageStore, entries: Entries) -> LayerFacts:
    """Add a layer to a store."""
    store.prepare("a layer")
    with tempfile.TemporaryDirectory(dir=store.root / "work") as place:
        return store.layers.add(Path(place, "layer"), pack(Path(place, "layer"), entries))


def add_image(
    store: ImageStore, base: str | None, layers: Sequence[Entries | LayerFacts], settings: str = "", workdir: str = ""
) -> str:
    """Add an image to a store; return the path of its document.

    Args:
        base: a SIF or a directory below the layers; ``None`` for none.
        layers: the lowest first.
    """
    facts = [each if isinstance(each, LayerFacts) else add_layer(store, each) for each in layers]
    image = LayeredImage(Base.of(base) if base else None, tuple(facts), settings, workdir or None)
    store.prepare("an image")
    return store.add_layered(image, "a test").path
