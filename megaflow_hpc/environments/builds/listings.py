"""What images hold, as builds look it up: listings of bases and layers, each made once and kept while there is room."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

from megaflow_hpc.environments.images.layer_store import LayerStore
from megaflow_hpc.environments.images.layered import Base, LayeredImage
from megaflow_hpc.environments.images.layers import listing
from megaflow_hpc.environments.images.layers.view import Layer, LayerView, Tree

MAX_LISTED_INODES = 1_000_000
"""Files that are kept listed: some 200 MB."""
_OF_A_BASE = 50_000


class Listings:
    """Listings of what images are made of; threads may share them."""

    def __init__(self, layers: LayerStore) -> None:
        self._layers = layers
        self._known: dict[str, tuple[Layer, int]] = {}
        """By digest or path, in the order of their last use, with their sizes in files."""
        self._guard = threading.Lock()

    def view(self, image: LayeredImage) -> LayerView:
        """Returns what an image's layers and base hold together; reads what is not known yet."""
        found: list[Layer] = []
        for layer in reversed(image.layers):
            make = partial(listing.of_blob, self._layers.path(layer.digest))
            found.append(self._get(layer.digest, make, layer.inodes))
        if image.base is not None:
            found.append(self._base(image.base))
        return LayerView(found)

    def _base(self, base: Base) -> Layer:
        if os.path.isdir(base.path):
            return Tree(base.path)
        return self._get(base.identity, partial(listing.of_sif, base.path), _OF_A_BASE)

    def _get(self, key: str, make: Callable[[], Layer], inodes: int) -> Layer:
        with self._guard:
            known = self._known.pop(key, None)
            if known is None:
                known = (make(), inodes)
            self._known[key] = known
            while len(self._known) > 1 and sum(size for _, size in self._known.values()) > MAX_LISTED_INODES:
                del self._known[next(iter(self._known))]
        return known[0]
