"""What it would take to have images: what would be made and fetched, and what store and nodes would hold of it.

Nothing is built. Steps are followed by their keys: one that several Dockerfiles share counts once, and so does a layer
that several images have. What a ``RUN``, a definition file, or a copy from another image makes is not known before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.environments.builds.builder import image_of
from megaflow_hpc.environments.builds.stages import absolute, step_key
from megaflow_hpc.environments.images.cache.cache import ImageCache
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.dockerfile.steps import Copy, Env, Workdir
from megaflow_hpc.environments.images.image_file import ImageFiles
from megaflow_hpc.environments.images.layered import Base, LayeredImage
from megaflow_hpc.environments.images.layers.blob import BLOCK, LayerFacts
from megaflow_hpc.environments.images.mapping import ImageMapping, ImageRequest, match_name
from megaflow_hpc.environments.images.pull import as_image
from megaflow_hpc.environments.images.resolve import Images, is_built
from megaflow_hpc.environments.sandbox.scratch import default_scratch
from megaflow_hpc.errors import MegaflowError

_HEADERS = 128
"""Bytes of a small archive beside its files, compressed."""


@dataclass
class Forecast:
    """What having images takes. Sizes are those that can be known, so at least these."""

    images: int = 0
    there: int = 0
    """In the store, or files that are used where they lie."""
    layers_made: int = 0
    """Steps of Dockerfiles that were not made before."""
    layers_fetched: int = 0
    store_bytes: int = 0
    """That the store would gain."""
    store_inodes: int = 0
    node_bytes: int = 0
    """Of all images on a node that has none of them: each base and layer once, unpacked."""
    node_inodes: int = 0
    unknown: list[str] = field(default_factory=list)
    """What cannot be known before it is made: lines of Dockerfiles, definition files, addresses."""

    @property
    def to_make(self) -> int:
        """Images that the store lacks."""
        return self.images - self.there

    def lines(self) -> list[str]:
        """Returns what it takes in words."""
        least = "at least " if self.unknown else ""
        return [
            f"layers: {self.layers_made} to be made, {self.layers_fetched} to be fetched",
            f"store: {least}{_size(self.store_bytes)}, {self.store_inodes} files more",
            f"node: {least}{_size(self.node_bytes)}, {self.node_inodes} files, beyond what this one has",
        ]


class Forecaster:
    """Adds up what images take.

    Args:
        images: the store, and who asks registries.
        staged: names of the copies that the node has; what they hold is not counted.
    """

    def __init__(self, images: Images, staged: Iterable[str] = ()) -> None:
        self.forecast = Forecast()
        self._images = images
        self._staged = {name.rpartition("-")[0] for name in staged}
        self._files = ImageFiles()
        self._names: set[str] = set()
        self._seen: set[str] = set()
        """Parts, steps and sources that were counted."""

    def add(self, requests: Iterable[ImageRequest], mapping: ImageMapping, network: str | None = None) -> None:
        """Counts images.

        Args:
            network: of the steps of Dockerfiles.

        Raises:
            ConfigError: a name that is not mapped, a source that cannot be copied.
        """
        self._network = network or "none"
        for request in requests:
            if request.name not in self._names:
                self._names.add(request.name)
                self._add(request, mapping)

    def _add(self, request: ImageRequest, mapping: ImageMapping) -> None:
        path = self._images.resolve_request(request, mapping, build=False)
        self.forecast.images += 1
        if is_built(path):
            self.forecast.there += 1
            self._on_node(image_of(str(path)) if not path.is_dir() else LayeredImage(None))
        elif request.dockerfile is None:
            self._on_node(self._lacking(request.base or request.name, path, mapping))
        else:
            image = self._built(self._images.dockerfiles.read(request.dockerfile), mapping)
            self._gained("document", request.name, len(image.document()), 3)
            self._on_node(image)

    # --- what is not there --------------------------------------------------------------------------------------

    def _lacking(self, name: str, path: Path, mapping: ImageMapping) -> LayeredImage:
        """What an address or a definition file gives, as far as can be known."""
        source = match_name(name, mapping.names) or name
        unknown = LayeredImage(Base(str(path), path.stem))
        if source in self._seen:
            return unknown
        looks = self._images.looks
        if remote := looks and looks.look(self._images.registries, source):
            self._gained("document", source, 0, 3)
            layers = []
            for layer in remote.layers:
                known = self._images.store.layers.find(layer.digest)
                if known is None and self._gained("layer", layer.digest, layer.bytes, 2):
                    self.forecast.layers_fetched += 1
                layers.append(known or LayerFacts(layer.digest, layer.bytes, layer.bytes, 1))
            return as_image(remote, layers)
        self._seen.add(source)
        self.forecast.unknown.append(source)
        return unknown

    def _built(self, dockerfile: Dockerfile, mapping: ImageMapping) -> LayeredImage:
        images: dict[str, LayeredImage] = {}
        for name in dockerfile.bases:
            path = self._images.resolve(name, mapping, build=False)
            images[name] = image_of(str(path)) if is_built(path) else self._lacking(name, path, mapping)
        for stage in dockerfile.needed:
            image, exports = images[stage.base], list[str]()
            for step in stage.steps:
                if isinstance(step, Env):
                    exports.append(step.text)
                    continue
                step = absolute(step, image.workdir or "/", image.user)
                key = step_key(dockerfile, images, self._network, image, step, exports)
                made = self._images.store.layers.step(key)
                layer = made[0] if made else self._made(dockerfile, step, key)
                image = image.over([layer] if layer else [])
            images[stage.name] = image
        return images[dockerfile.last.name]

    def _made(self, dockerfile: Dockerfile, step: object, key: str) -> LayerFacts:
        """Stands for the layer of a step that is to be made."""
        size, inodes = 0, 1
        if isinstance(step, Copy) and step.origin is None and not step.extract:
            size, inodes = _size_of(dockerfile, step)
        if self._gained("step", key, size + _HEADERS, 3):
            self.forecast.layers_made += 1
            if not isinstance(step, Workdir) and not (isinstance(step, Copy) and step.origin is None):
                self.forecast.unknown.append(f"{dockerfile.path}:{getattr(step, 'line', 0)}")
        return LayerFacts(key, size, math.ceil(size / BLOCK) * BLOCK, inodes)

    def _gained(self, kind: str, name: str, size: int, inodes: int) -> bool:
        if f"{kind} {name}" in self._seen:
            return False
        self._seen.add(f"{kind} {name}")
        self.forecast.store_bytes += size
        self.forecast.store_inodes += inodes
        return True

    # --- nodes --------------------------------------------------------------------------------------------------

    def _on_node(self, image: LayeredImage) -> None:
        for layer in image.layers:
            self._unpacked(layer.digest, layer.unpacked_bytes, layer.inodes)
        if image.base is not None and Path(image.base.path).is_file():
            facts = self._files.facts(image.base.path)
            self._unpacked(facts.key, facts.unpacked_bytes, facts.inodes)

    def _unpacked(self, key: str, size: int, inodes: int) -> None:
        if f"node {key}" in self._seen or key[:40] in self._staged:
            return
        self._seen.add(f"node {key}")
        self.forecast.node_bytes += size
        self.forecast.node_inodes += inodes


def forecaster(images: Images) -> Forecaster:
    """Returns a forecaster that does not count what this node's cache has."""
    cache = default_scratch() / "cache"
    return Forecaster(images, [str(row["name"]) for row in ImageCache(cache, "").list()] if cache.is_dir() else [])


def foretell(images: Images, wanted: Iterable[tuple[ImageRequest, ImageMapping, str | None]]) -> None:
    """Has ``images.say`` told what the making of images will take, as far as it can be known: it ends nothing.

    Args:
        wanted: each with its mapping, and the network of the steps of its Dockerfile.
    """
    with suppress(MegaflowError, OSError):
        counting = forecaster(images)
        for request, mapping, network in wanted:
            try:
                counting.add([request], mapping, network)
            except (MegaflowError, OSError):  # who makes it will hear of it
                counting.forecast.unknown.append(request.name)
        for line in counting.forecast.lines():
            images.say(line)


def foretelling(images: Images, network: str | None) -> Callable[[Sequence[ImageRequest], ImageMapping], None]:
    """Returns what calls :func:`foretell` for images of one mapping, whose steps have ``network``."""
    return lambda requests, mapping: foretell(images, [(request, mapping, network) for request in requests])


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _size_of(dockerfile: Dockerfile, copy: Copy) -> tuple[int, int]:
    """Bytes and number of what is copied from a context."""
    size, inodes = sum(len(text.encode("utf-8", "surrogateescape")) for text in copy.texts.values()), len(copy.texts)
    for source in copy.sources:
        for name in dockerfile.context.find(source):
            with dockerfile.context.opened(name, follow=True) as (_, real, _):
                pass
            for file in dict.fromkeys([real, *dockerfile.context.files(real)]):
                with dockerfile.context.opened(file) as (_, _, found):
                    inodes += 1
                    size += found.st_size if found.st_mode & 0o170000 == 0o100000 else 0
    return size, max(inodes, 1)
