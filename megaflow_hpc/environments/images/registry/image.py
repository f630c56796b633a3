"""One image of a registry: the manifest for this machine, its configuration, and its layers, of which only those that
are lacking are fetched.

Manifests and configurations are those of the OCI Image Specification 1.1 and of Docker's Image Manifest Version 2,
Schema 2, which differ in their media types alone.
"""

from __future__ import annotations

import hashlib
import platform
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from megaflow_hpc.environments.images.registry.client import RegistryClient
from megaflow_hpc.environments.images.registry.reference import DIGEST, Reference
from megaflow_hpc.errors import SiteError

MAX_MANIFEST_BYTES = 4 << 20
"""Bytes of a manifest or a configuration: what other clients allow, too."""
MAX_LAYERS = 1000
AT_ONCE = 3
"""Layers that are fetched side by side."""

_OCI, _DOCKER = "application/vnd.oci.image.", "application/vnd.docker.distribution."
_MANIFESTS = (f"{_OCI}manifest.v1+json", f"{_DOCKER}manifest.v2+json")
_INDEXES = (f"{_OCI}index.v1+json", f"{_DOCKER}manifest.list.v2+json")
_LAYERS = {
    f"{_OCI}layer.v1.tar": "",
    f"{_OCI}layer.v1.tar+gzip": "gzip",
    f"{_OCI}layer.v1.tar+zstd": "zstd",
    "application/vnd.docker.image.rootfs.diff.tar": "",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd": "zstd",
}
"""Media type → compression."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}

Digest = Annotated[str, msgspec.Meta(pattern=rf"\A{DIGEST}\Z")]
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class _Platform(msgspec.Struct):
    architecture: str = ""
    os: str = ""
    variant: str = ""


class _Descriptor(msgspec.Struct, rename="camel"):
    digest: Digest
    size: Size
    media_type: str = ""
    platform: _Platform | None = None


class _Manifest(msgspec.Struct, rename="camel"):
    """A manifest (``config``, ``layers``), or an index of them (``manifests``)."""

    media_type: str = ""
    config: _Descriptor | None = None
    layers: list[_Descriptor] | None = None
    manifests: list[_Descriptor] | None = None


class _Settings(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None


class _RootFiles(msgspec.Struct):
    diff_ids: list[Digest] | None = None


class _Configuration(msgspec.Struct):
    architecture: str = ""
    os: str = ""
    config: _Settings | None = None
    rootfs: _RootFiles | None = None


@dataclass(frozen=True)
class RemoteLayer:
    """A layer as the registry keeps it: SHA-256 in hexadecimal and bytes of the blob; ``gzip``, ``zstd`` or nothing;
    SHA-256 of the tar archive in it."""

    digest: str
    bytes: int
    compression: str
    tar_digest: str


@dataclass(frozen=True)
class RemoteImage:
    """What an image of a registry is made of.

    Args:
        digest: SHA-256 of the manifest for this machine.
        layers: the lowest first.
        env: ``NAME=value``.
        workdir: where its maker meant commands to start; empty: nowhere in particular.
        user: whom commands were meant to run as; empty: root.
    """

    digest: str
    layers: tuple[RemoteLayer, ...]
    env: tuple[str, ...] = ()
    workdir: str = ""
    user: str = ""


Take = Callable[[str, Iterable[bytes]], None]
"""Gets a layer's digest and its bytes; what they raise means that nothing of it counts."""
Told = Callable[[int, int], None]
"""Gets how many bytes came, of how many that are lacking; first 0, before any is asked for. May raise."""


def fetch(
    reference: Reference, have: Callable[[str], bool], take: Take, told: Told = lambda done, total: None
) -> RemoteImage:
    """Returns an image after every layer of it that ``have(digest)`` lacks was given to ``take``.

    ``take`` and ``told`` are called from several threads, ``take`` once for a digest; one that finds that it has the
    layer after all leaves the bytes alone, and they are not asked for.

    Raises:
        SiteError: the registry does not give it, or it is not an image for this machine.
    """
    client = RegistryClient(reference)
    image = _describe(client)
    lacking = [layer for layer in {layer.digest: layer for layer in image.layers}.values() if not have(layer.digest)]
    if lacking:
        total = sum(layer.bytes for layer in lacking)
        told(0, total)
        _fetch_layers(client, lacking, take, _Counter(total, told))
    return image


class _Counter:
    """Counts what came, over all threads; ``stopped`` ends them."""

    def __init__(self, total: int, told: Told) -> None:
        self.total, self.told = total, told
        self.stopped = False
        self._done = 0
        self._lock = threading.Lock()

    def counted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            if self.stopped:
                raise SiteError("another layer failed")
            with self._lock:
                self._done += len(chunk)
                self.told(self._done, self.total)
            yield chunk


def _fetch_layers(client: RegistryClient, layers: list[RemoteLayer], take: Take, counter: _Counter) -> None:
    """Threads that nobody has to wait for: an interruption ends the caller at once, whatever a registry does."""
    waiting, failed = deque(layers), list[BaseException]()

    def work() -> None:
        while waiting and not counter.stopped:
            try:
                layer = waiting.popleft()
                take(layer.digest, counter.counted(client.blob(f"sha256:{layer.digest}", layer.bytes)))
            except IndexError:
                return
            except BaseException as error:
                failed.append(error)
                counter.stopped = True

    if len(layers) == 1:
        work()
    else:
        threads = [threading.Thread(target=work, name=f"layers {n}", daemon=True) for n in range(AT_ONCE)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            counter.stopped = True
            raise
    if failed:
        raise failed[0]


def _describe(client: RegistryClient) -> RemoteImage:
    reference = client.reference
    digest, manifest = _manifest(client, reference.version)
    if manifest.manifests is not None:
        chosen = _for_this_machine(reference, manifest.manifests)
        digest, manifest = _manifest(client, chosen.digest)
    if manifest.config is None or manifest.layers is None:
        raise SiteError(f"{reference}: its manifest lists no layers")
    if len(manifest.layers) > MAX_LAYERS:
        raise SiteError(f"{reference}: {len(manifest.layers)} layers; at most {MAX_LAYERS} are taken")
    for layer in manifest.layers:
        if layer.media_type not in _LAYERS:
            raise SiteError(f"{reference}: {layer.media_type[:200]!r} is no layer of a container image")
    size, what = manifest.config.size, f"{reference}: its configuration"
    if size > MAX_MANIFEST_BYTES:
        raise SiteError(f"{what} has {size} bytes, at most {MAX_MANIFEST_BYTES} are read")
    configuration = _decoded(client.small_blob(manifest.config.digest, size), _Configuration, what)
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    if (configuration.os or "linux", configuration.architecture or wanted) != ("linux", wanted):
        kind = f"{configuration.os}/{configuration.architecture}"
        raise SiteError(f"{reference}: an image for {kind[:100]!r}, and this machine is linux/{wanted}")
    archives = (configuration.rootfs and configuration.rootfs.diff_ids) or []
    if len(archives) != len(manifest.layers):
        raise SiteError(f"{reference}: {len(manifest.layers)} layers, but its configuration lists {len(archives)}")
    settings = configuration.config or _Settings()
    return RemoteImage(
        digest,
        tuple(
            RemoteLayer(_bare(layer.digest), layer.size, _LAYERS[layer.media_type], _bare(archive))
            for layer, archive in zip(manifest.layers, archives, strict=True)
        ),
        tuple(entry for entry in settings.env or [] if "=" in entry and "\0" not in entry),
        settings.working_dir or "",
        settings.user or "",
    )


def _manifest(client: RegistryClient, version: str) -> tuple[str, _Manifest]:
    data, media_type = client.manifest(version, ", ".join((*_MANIFESTS, *_INDEXES)), MAX_MANIFEST_BYTES)
    manifest = _decoded(data, _Manifest, f"{client.reference}: its manifest")
    kind = manifest.media_type or media_type
    if kind.startswith("application/vnd.") and kind not in (*_MANIFESTS, *_INDEXES):
        raise SiteError(
            f"{client.reference}: {kind[:200]!r} is no manifest of a container image (those that Docker made before "
            "1.10 have to be pushed anew)"
        )
    return hashlib.sha256(data).hexdigest(), manifest


def _for_this_machine(reference: Reference, manifests: list[_Descriptor]) -> _Descriptor:
    """The manifest of an index whose platform is this machine's; of several variants the most general one."""
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    fitting = [m for m in manifests if m.platform and (m.platform.os, m.platform.architecture) == ("linux", wanted)]
    if not fitting:
        known = {f"{m.platform.os}/{m.platform.architecture}" for m in manifests if m.platform} - {"unknown/unknown"}
        listed = ", ".join(sorted(known))[:300] or "none"
        raise SiteError(f"{reference}: no image for linux/{wanted}; there are {listed}")
    return min(fitting, key=lambda m: m.platform.variant if m.platform else "")


def _bare(digest: str) -> str:
    return digest.removeprefix("sha256:")


T = TypeVar("T")


def _decoded(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SiteError(f"{what} cannot be read: {error}") from None
