"""Pulls images from registries into a store. Layers shared by several images are pulled once.

Images from ``oras://`` and ``library://`` have no layers. Apptainer pulls each of them as a single SIF.
"""

from __future__ import annotations

import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megaflow_hpc.environments.images import apptainer_client
from megaflow_hpc.environments.images.atomic_files import locked
from megaflow_hpc.environments.images.layered import ImageStart, LayeredImage, tcp_ports
from megaflow_hpc.environments.images.registry.image import RemoteImage, fetch
from megaflow_hpc.environments.images.sources import Registries
from megaflow_hpc.environments.images.store import LayerStore
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import find_apptainer

SPARE_BYTES = 1 << 30
"""Bytes of free space that a pull must leave."""
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
    """Pulls an image from a registry or its mirror.

    Args:
        source: An address, such as ``docker://debian:12``.
        target: Path for a new SIF, in a directory of the store.
        layers: Store for the layers.
        say: Called with a message at the start of a pull, and with progress every few seconds.
        stopped: Cancel the pull as soon as this event is set.

    Returns:
        An image whose layers are in ``layers``, or ``None`` if the image is the SIF at ``target``.

    Raises:
        SiteError: The site is air-gapped, the disk is full, or the registry refuses the request.
    """
    registries.check(source)
    try:
        if source.startswith("docker://"):
            return _pull_layers(registries, source, layers, _Progress(source, layers.root, say, stopped))
        _Progress(source, target.parent, say)(0, 0)
        address, plain_http = registries.address(source)
        apptainer_client.pull(find_apptainer(), target, address, plain_http=plain_http, stopped=stopped)
    except SiteError as error:
        raise registries.failed(source, error) from error
    return None


def _pull_layers(registries: Registries, source: str, layers: LayerStore, progress: _Progress) -> LayeredImage:
    def take(digest: str, pieces: Iterable[bytes]) -> None:
        with locked(layers.root / "work" / f"layer-{digest}.lock"):  # another process may be pulling this layer
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
    """Converts a registry image to a layered image. Raises :class:`SiteError` if one of its layers is not in
    ``layers``."""
    facts = []
    for layer in image.layers:
        stored = layers.find(layer.digest)
        if stored is None:
            raise SiteError(f"{layer.digest}: its layer was removed while its image was pulled; pull it again")
        if stored.inodes:  # Some layers change no file.
            facts.append(stored)
    workdir = image.workdir if image.workdir.startswith("/") and "\0" not in image.workdir else None
    user = "" if image.user in ("root", "0") else image.user
    start = ImageStart(image.entrypoint, image.command, tcp_ports(image.ports))
    return LayeredImage(None, tuple(facts), exports(image.env), workdir, user, start)


def exports(env: Sequence[str]) -> str:
    """Returns shell lines that export ``NAME=value`` variables. Skips names that are invalid in a shell."""
    pairs = (entry.partition("=") for entry in env)
    return "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, _, value in pairs
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
    )


class _Progress:
    """Progress callback of a pull. Checks the free space at the start, and raises :class:`SiteError` when cancelled."""

    def __init__(self, source: str, directory: Path, say: Say, stopped: threading.Event | None = None) -> None:
        self._stopped = stopped
        self._source, self._directory, self._say = source, directory, say
        self._start = self._reported = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if self._stopped and self._stopped.is_set():
            raise SiteError(f"{self._source}: interrupted")
        now = time.monotonic()
        if done == 0:
            free = shutil.disk_usage(self._directory).free
            if free < total + SPARE_BYTES:
                raise SiteError(
                    f"{self._source}: {total >> 20} MiB to fetch, and only {free >> 20} MiB free at "
                    f"{self._directory}; set MEGAFLOW_IMAGE_STORE to a larger place"
                )
            self._say(f"{self._source}: {total / 1e6:.1f} MB to fetch" if total else f"{self._source}: fetching")
        elif now - self._reported >= REPORT_INTERVAL_S:
            self._reported = now
            left = (total - done) * (now - self._start) / done
            self._say(f"{self._source}: {done / 1e6:.1f} of {total / 1e6:.1f} MB, {left:.0f} s left")
