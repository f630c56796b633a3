"""Pulls images of registries into a store: layer by layer, each once whatever images share it.

What a registry has without layers, as ``oras://`` and ``library://``, Apptainer fetches as one SIF.
"""

from __future__ import annotations

import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megaflow_hpc.environments.images.apptainer_build import SIF_OPTIONS, build
from megaflow_hpc.environments.images.atomic_files import locked
from megaflow_hpc.environments.images.layer_store import LayerStore
from megaflow_hpc.environments.images.layered import LayeredImage
from megaflow_hpc.environments.images.registries import Registries
from megaflow_hpc.environments.images.registry.image import RemoteImage, fetch
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import find_apptainer

SPARE = 1 << 30
"""Bytes that a pull leaves free."""
REPORT_INTERVAL_S = 2.0

Say = Callable[[str], None]


def pull(
    registries: Registries,
    source: str,
    target: Path,
    layers: LayerStore,
    say: Say,
    stopped: threading.Event | None = None,
) -> LayeredImage | None:
    """Fetches an image.

    Args:
        source: an address, as ``docker://debian:12``.
        target: where a SIF is written; its directory is in the store.
        layers: takes the layers that it lacks.
        say: gets a line at the beginning of a fetch, and some while it goes on.
        stopped: ends it once it is set.

    Returns:
        An image whose layers are in ``layers``; ``None`` for one that is at ``target``.

    Raises:
        SiteError: there is no way out, no room, or the registry does not give it.
    """
    registries.check(source)
    try:
        if source.startswith("docker://"):
            return _pull_layers(registries, source, layers, _Progress(source, layers.root, say, stopped))
        _Progress(source, target.parent, say)(0, 0)
        address, options = registries.address(source)
        build(find_apptainer(), target, address, *SIF_OPTIONS, *options, stopped=stopped)
    except SiteError as error:
        raise registries.failed(source, error) from error
    return None


def _pull_layers(registries: Registries, source: str, layers: LayerStore, progress: _Progress) -> LayeredImage:
    def take(digest: str, pieces: Iterable[bytes]) -> None:
        with locked(layers.root / "work" / f"layer-{digest}.lock"):  # another pull may be at it
            if layers.find(digest) is None:
                layers.take(digest, pieces)

    image = fetch(
        registries.reference(source),
        lambda digest: layers.find(digest) is not None,
        take,
        progress,
    )
    return layered(image, layers)


def layered(image: RemoteImage, layers: LayerStore) -> LayeredImage:
    """Returns the image that sandboxes start from; all its layers are in ``layers``."""
    facts = []
    for layer in image.layers:
        if (found := layers.find(layer.digest)) is None:
            raise SiteError(f"{layer.digest}: its layer was removed while its image was pulled; pull it again")
        if found.inodes:  # instructions of Dockerfiles that change no file may leave a layer all the same
            facts.append(found)
    workdir = image.workdir if image.workdir.startswith("/") and "\0" not in image.workdir else None
    user = "" if image.user in ("root", "0") else image.user
    return LayeredImage(None, tuple(facts), exports(image.env), workdir, user)


def exports(env: Sequence[str]) -> str:
    """Returns lines of shell that set variables given as ``NAME=value``; without those that a shell cannot have."""
    pairs = (entry.partition("=") for entry in env)
    return "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, _, value in pairs
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
    )


class _Progress:
    """Says how far a pull is, and that there is room for it."""

    def __init__(self, source: str, place: Path, say: Say, stopped: threading.Event | None = None) -> None:
        self._stopped = stopped
        self.source, self.place, self.say = source, place, say
        self._start = self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if self._stopped and self._stopped.is_set():
            raise SiteError(f"{self.source}: interrupted")
        now = time.monotonic()
        if done == 0:
            free = shutil.disk_usage(self.place).free
            if free < total + SPARE:
                raise SiteError(
                    f"{self.source}: {total >> 20} MiB to fetch, and only {free >> 20} MiB free at {self.place}; set "
                    "MEGAFLOW_IMAGE_STORE to a larger place"
                )
            self.say(f"{self.source}: {total / 1e6:.1f} MB to fetch" if total else f"{self.source}: fetching")
        elif now - self._said >= REPORT_INTERVAL_S:
            self._said = now
            left = (total - done) * (now - self._start) / done
            self.say(f"{self.source}: {done / 1e6:.1f} of {total / 1e6:.1f} MB, {left:.0f} s left")
