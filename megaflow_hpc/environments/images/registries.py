"""Images from registries: ``docker://`` and its kin, through the site's mirrors; or nothing where there is no way out.

A mirror stands for a registry: ``docker.io=registry.site.edu/dockerhub`` makes ``docker://debian:12`` come from
``docker://registry.site.edu/dockerhub/library/debian:12``. ``http://`` before a
mirror says that it speaks plain HTTP. The image is still known by the address that was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.environments.images.registry.reference import Reference
from megaflow_hpc.errors import SiteError
from megaflow_hpc.resources import docs

SCHEMES = ("docker://", "oras://", "library://")
_BOOTSTRAP = re.compile(r"^\s*Bootstrap:\s*(\S+)", re.IGNORECASE | re.MULTILINE)
_LOCAL = ("localimage", "scratch", "oci", "oci-archive", "docker-archive", "docker-daemon")


@dataclass(frozen=True)
class Registries:
    """The way to registries from here.

    Args:
        mirrors: registry → what stands for it.
        air_gapped: nothing may be fetched; what the store lacks is an error that names it.
    """

    mirrors: Mapping[str, str] = field(default_factory=dict)
    air_gapped: bool = False

    def address(self, source: str) -> tuple[str, bool]:
        """Returns the address of ``source`` at its mirror, and whether the mirror speaks plain HTTP."""
        scheme, _, name = source.partition("://")
        if scheme not in ("docker", "oras"):
            return source, False
        registry, path = split_name(name)
        mirror = self.mirrors.get(registry)
        if mirror is None:
            return source, False
        plain = mirror.startswith("http://")
        place = re.sub(r"^https?://", "", mirror).rstrip("/")
        return f"{scheme}://{place}/{path}", plain

    def reference(self, source: str) -> Reference:
        """Returns where the image of a ``docker://`` address is really fetched from."""
        address, plain = self.address(source)
        return Reference.parse(*split_name(address.partition("://")[2]), plain=plain)

    def failed(self, source: str, error: SiteError) -> SiteError:
        """Returns the error of a pull with what helps where registries cannot be reached."""
        address, _ = self.address(source)
        through = f" (for {source})" if address != source else ""
        return SiteError(
            f"{error}{through}\n  where registries are out of reach: name a mirror (environment.mirrors, --mirror), or "
            f"fetch it "
            f"elsewhere and bring it here ({docs('how-to/images.md')})"
        )

    def check(self, source: str) -> None:
        """Raises :class:`SiteError` for an image that would have to be fetched where nothing may be."""
        if self.air_gapped:
            raise SiteError(
                f"{source}: not in the image store, and nothing may be fetched here "
                "(environment.air_gapped or --air-gapped); where there is a network: "
                "megaflow-hpc images build CAMPAIGN --manifest FILE "
                f"({docs('how-to/images.md')})"
            )

    def check_definition(self, path: Path) -> None:
        """Raises :class:`SiteError` for a definition file that starts from what would have to be fetched."""
        for bootstrap in _BOOTSTRAP.findall(path.read_text(encoding="utf-8", errors="replace")):
            if bootstrap.lower() not in _LOCAL:
                self.check(f"{path} (Bootstrap: {bootstrap})")


def is_remote(source: str) -> bool:
    """Whether an image's name is a registry's address."""
    return source.startswith(SCHEMES)


def split_name(name: str) -> tuple[str, str]:
    """Splits ``debian:12`` into ``docker.io`` and ``library/debian:12``. A first part with a dot or a colon is a
    host."""
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        if first in ("index.docker.io", "registry-1.docker.io"):
            first = "docker.io"
        return first, rest if "/" in rest or first != "docker.io" else f"library/{rest}"
    return "docker.io", name if slash else f"library/{name}"
