"""Fetches an image from a registry: the manifest for this platform, its configuration, and the missing layers.

Manifests and configurations follow the OCI Image Specification 1.1 or Docker's Image Manifest Version 2, Schema 2. The
two formats differ only in their media types.
"""

from __future__ import annotations

import platform
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from megaflow_hpc.environments.images.registry.client import DIGEST, Reference, RegistryClient
from megaflow_hpc.errors import SiteError

MAX_MANIFEST_BYTES = 4 << 20
"""Maximum size of a manifest or configuration in bytes. Other clients use the same limit."""
MAX_LAYERS = 1000
PARALLEL_LAYERS = 3

_OCI, _DOCKER = "application/vnd.oci.image.", "application/vnd.docker.distribution."
_MANIFESTS = (
    f"{_OCI}manifest.v1+json",
    f"{_DOCKER}manifest.v2+json",
    f"{_OCI}index.v1+json",
    f"{_DOCKER}manifest.list.v2+json",
)
_LAYERS = (
    f"{_OCI}layer.v1.tar",
    f"{_OCI}layer.v1.tar+gzip",
    f"{_OCI}layer.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
)
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
    """An image manifest (``config``, ``layers``) or an index of manifests (``manifests``)."""

    media_type: str = ""
    config: _Descriptor | None = None
    layers: list[_Descriptor] | None = None
    manifests: list[_Descriptor] | None = None


class _Settings(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    exposed_ports: dict[str, Any] | None = None


class _RootFiles(msgspec.Struct):
    diff_ids: list[Digest] | None = None


class _Configuration(msgspec.Struct):
    architecture: str = ""
    os: str = ""
    config: _Settings | None = None
    rootfs: _RootFiles | None = None


@dataclass(frozen=True)
class RemoteLayer:
    """A layer in a registry: hexadecimal SHA-256 and size of its blob."""

    digest: str
    bytes: int


@dataclass(frozen=True)
class RemoteImage:
    """Layers and settings of an image in a registry.

    Args:
        layers: The layers, lowest first.
        env: Variables as ``NAME=value``.
        workdir: Working directory of commands. Empty if the image specifies none.
        user: User that runs commands. Empty means root.
        entrypoint: Program of the image.
        command: Arguments of the program, or the program if there is no entry point.
        ports: Ports that the program serves, such as ``80/tcp``.
    """

    layers: tuple[RemoteLayer, ...]
    env: tuple[str, ...] = ()
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()


TakeLayer = Callable[[str, Iterable[bytes]], None]
"""Callback that receives a layer's digest and chunks. It must discard the layer if iterating over the chunks raises."""
Report = Callable[[int, int], None]
"""Callback that receives the number of bytes fetched and the total. It may raise to cancel.

The first call, with 0, comes before any layer is requested.
"""


def fetch(
    reference: Reference, have: Callable[[str], bool], take: TakeLayer, report: Report = lambda done, total: None
) -> RemoteImage:
    """Fetches an image's description, and passes each layer for which ``have(digest)`` is false to ``take``.

    ``take`` and ``report`` are called from several threads. Each digest is passed to ``take`` once. The bytes are
    requested only when ``take`` iterates over them.

    Raises:
        SiteError: The image is not available, or not for this platform.
    """
    client = RegistryClient(reference)
    image = _describe(client)
    distinct = {layer.digest: layer for layer in image.layers}
    missing = [layer for layer in distinct.values() if not have(layer.digest)]
    if missing:
        _fetch_layers(client, missing, take, report)
    return image


def _fetch_layers(client: RegistryClient, layers: list[RemoteLayer], take: TakeLayer, report: Report) -> None:
    total = sum(layer.bytes for layer in layers)
    report(0, total)
    waiting, failed = deque(layers), list[BaseException]()
    done = 0
    lock = threading.Lock()

    def counted(chunks: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal done
        for chunk in chunks:
            if failed:
                raise SiteError("another layer failed")
            with lock:
                done += len(chunk)
                report(done, total)
            yield chunk

    def work() -> None:
        while waiting and not failed:
            try:
                layer = waiting.popleft()
                take(layer.digest, counted(client.blob(f"sha256:{layer.digest}", layer.bytes)))
            except IndexError:
                return
            except BaseException as error:
                failed.append(error)

    if len(layers) == 1:
        work()
    else:
        # Daemon threads, so that an interrupted program does not wait for a registry.
        threads = [threading.Thread(target=work, name=f"layers {n}", daemon=True) for n in range(PARALLEL_LAYERS)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:
            failed.append(error)
            raise
    if failed:
        raise failed[0]


def _describe(client: RegistryClient) -> RemoteImage:
    reference = client.reference
    manifest = _manifest(client, reference.version)
    if manifest.manifests is not None:
        manifest = _manifest(client, _for_this_machine(reference, manifest.manifests).digest)
    if manifest.config is None or manifest.layers is None:
        raise SiteError(f"{reference}: its manifest lists no layers")
    if len(manifest.layers) > MAX_LAYERS:
        raise SiteError(f"{reference}: {len(manifest.layers)} layers; at most {MAX_LAYERS} are supported")
    for layer in manifest.layers:
        if layer.media_type not in _LAYERS:
            raise SiteError(f"{reference}: {layer.media_type[:200]!r} is not a layer of a container image")
    configuration = _configuration(client, manifest.config)
    archives = (configuration.rootfs and configuration.rootfs.diff_ids) or []
    if len(archives) != len(manifest.layers):
        raise SiteError(f"{reference}: {len(manifest.layers)} layers, but its configuration lists {len(archives)}")
    settings = configuration.config or _Settings()
    return RemoteImage(
        tuple(RemoteLayer(layer.digest.removeprefix("sha256:"), layer.size) for layer in manifest.layers),
        tuple(entry for entry in settings.env or [] if "=" in entry and "\0" not in entry),
        settings.working_dir or "",
        settings.user or "",
        tuple(settings.entrypoint or ()),
        tuple(settings.cmd or ()),
        tuple(settings.exposed_ports or ()),
    )


def _manifest(client: RegistryClient, version: str) -> _Manifest:
    data, media_type = client.manifest(version, ", ".join(_MANIFESTS), MAX_MANIFEST_BYTES)
    manifest = _decoded(data, _Manifest, f"{client.reference}: its manifest")
    kind = manifest.media_type or media_type
    if kind.startswith("application/vnd.") and kind not in _MANIFESTS:
        raise SiteError(
            f"{client.reference}: {kind[:200]!r} is not a manifest of a container image (those that Docker made before "
            "1.10 must be pushed again)"
        )
    return manifest


def _configuration(client: RegistryClient, descriptor: _Descriptor) -> _Configuration:
    what = f"{client.reference}: its configuration"
    if descriptor.size > MAX_MANIFEST_BYTES:
        raise SiteError(f"{what} has {descriptor.size} bytes, at most {MAX_MANIFEST_BYTES} are supported")
    configuration = _decoded(client.small_blob(descriptor.digest, descriptor.size), _Configuration, what)
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    if (configuration.os or "linux", configuration.architecture or wanted) != ("linux", wanted):
        kind = f"{configuration.os}/{configuration.architecture}"
        raise SiteError(f"{client.reference}: an image for {kind[:100]!r}, but this machine is linux/{wanted}")
    return configuration


def _for_this_machine(reference: Reference, manifests: list[_Descriptor]) -> _Descriptor:
    """Selects the manifest for this machine's platform from an index. Prefers the most general variant."""
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    fitting: list[tuple[str, _Descriptor]] = []
    platforms: set[str] = set()
    for manifest in manifests:
        if manifest.platform is None:
            continue
        name = f"{manifest.platform.os}/{manifest.platform.architecture}"
        if name == f"linux/{wanted}":
            fitting.append((manifest.platform.variant, manifest))
        elif name != "unknown/unknown":  # used for build attestations
            platforms.add(name)
    if not fitting:
        listed = ", ".join(sorted(platforms))[:300] or "none"
        raise SiteError(f"{reference}: no image for linux/{wanted}; there are {listed}")
    return min(fitting, key=lambda each: each[0])[1]


T = TypeVar("T")


def _decoded(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SiteError(f"{what} cannot be read: {error}") from None
