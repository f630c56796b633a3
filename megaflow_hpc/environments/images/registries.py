"""Addresses of images in registries, such as ``docker://debian:12``, and the site's mirrors of these registries.

With the mirror ``docker.io=registry.site.edu/dockerhub``, ``docker://debian:12`` is fetched from
``docker://registry.site.edu/dockerhub/library/debian:12``. A mirror that begins with ``http://`` is contacted without
TLS. The store keeps the image under the requested address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.environments.images.registry.client import Reference
from megaflow_hpc.errors import SiteError
from megaflow_hpc.resources import docs

SCHEMES = ("docker://", "oras://", "library://")
_BOOTSTRAP = re.compile(r"^\s*Bootstrap:\s*(\S+)", re.IGNORECASE | re.MULTILINE)
_LOCAL = ("localimage", "scratch", "oci", "oci-archive", "docker-archive", "docker-daemon")


@dataclass(frozen=True)
class Registries:
    """Access to registries from this site.

    Args:
        mirrors: Registry → its mirror.
        air_gapped: Nothing may be fetched. Images that the store lacks are errors.
    """

    mirrors: Mapping[str, str] = field(default_factory=dict)
    air_gapped: bool = False

    def address(self, source: str) -> tuple[str, bool]:
        """Returns the address of ``source`` at its mirror, and whether the mirror uses HTTP without TLS."""
        scheme, _, name = source.partition("://")
        if scheme not in ("docker", "oras"):
            return source, False
        registry, path = split_name(name)
        mirror = self.mirrors.get(registry)
        if mirror is None:
            return source, False
        host = re.sub(r"^https?://", "", mirror).rstrip("/")
        return f"{scheme}://{host}/{path}", mirror.startswith("http://")

    def reference(self, source: str) -> Reference:
        """Returns the repository and version from which a ``docker://`` address is fetched."""
        address, plain = self.address(source)
        return Reference.parse(*split_name(address.partition("://")[2]), plain=plain)

    def failed(self, source: str, error: SiteError) -> SiteError:
        """Returns the error of a pull with remedies for sites without access to registries."""
        address, _ = self.address(source)
        through = f" (for {source})" if address != source else ""
        return SiteError(
            f"{error}{through}\n  where registries are out of reach: name a mirror (environment.mirrors, --mirror), or "
            f"fetch it elsewhere and bring it here ({docs('how-to/images.md')})"
        )

    def check(self, source: str) -> None:
        """Raises :class:`SiteError` if nothing may be fetched, so that ``source`` cannot be."""
        if self.air_gapped:
            raise SiteError(
                f"{source}: not in the image store, and nothing may be fetched here "
                "(environment.air_gapped or --air-gapped); where there is a network: "
                f"megaflow-hpc images build CAMPAIGN --manifest FILE ({docs('how-to/images.md')})"
            )

    def check_definition(self, path: Path) -> None:
        """Raises :class:`SiteError` if nothing may be fetched and a definition file's base is not local."""
        for bootstrap in _BOOTSTRAP.findall(path.read_text(encoding="utf-8", errors="replace")):
            if bootstrap.lower() not in _LOCAL:
                self.check(f"{path} (Bootstrap: {bootstrap})")


def is_remote(source: str) -> bool:
    """Returns whether an image's source is a registry's address."""
    return source.startswith(SCHEMES)


def split_name(name: str) -> tuple[str, str]:
    """Splits ``debian:12`` into ``docker.io`` and ``library/debian:12``.

    The first part of a name is a host if it has a dot or a colon, or is ``localhost``.
    """
    first, slash, rest = name.partition("/")
    has_host = slash and ("." in first or ":" in first or first == "localhost")
    if not has_host:
        return "docker.io", name if slash else f"library/{name}"
    if first in ("docker.io", "index.docker.io", "registry-1.docker.io"):
        return "docker.io", rest if "/" in rest else f"library/{rest}"
    return first, rest
