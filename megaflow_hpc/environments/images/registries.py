"""Registry addresses, such as ``docker://debian:12``, and the site's registry mirrors.

With the mirror ``docker.io=registry.site.edu/dockerhub``, ``docker://debian:12`` is fetched from
``docker://registry.site.edu/dockerhub/library/debian:12``. A mirror that begins with ``http://`` is contacted without
TLS. The store records the image under the requested address.
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
        mirrors: Registry → mirror.
        air_gapped: Never fetch. Images missing from the store are errors.
    """

    mirrors: Mapping[str, str] = field(default_factory=dict)
    air_gapped: bool = False

    def address(self, source: str) -> tuple[str, bool]:
        """Returns the mirrored address of ``source``, and whether the mirror uses HTTP without TLS."""
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
        """Resolves a ``docker://`` address, through its mirror, to a repository and a tag or digest."""
        address, plain = self.address(source)
        return Reference.parse(*split_name(address.partition("://")[2]), plain=plain)

    def failed(self, source: str, error: SiteError) -> SiteError:
        """Adds remedies for sites without registry access to the error of a failed pull."""
        address, _ = self.address(source)
        through = f" (for {source})" if address != source else ""
        return SiteError(
            f"{error}{through}\n  where registries are out of reach: name a mirror (environment.mirrors, --mirror), or "
            f"fetch it elsewhere and bring it here ({docs('how-to/images.md')})"
        )

    def check(self, source: str) -> None:
        """Raises :class:`SiteError` if the site is air-gapped, so that ``source`` cannot be fetched."""
        if self.air_gapped:
            raise SiteError(
                f"{source}: not in the image store, and nothing may be fetched here "
                "(environment.air_gapped or --air-gapped); where there is a network: "
                f"megaflow-hpc images build CAMPAIGN --manifest FILE ({docs('how-to/images.md')})"
            )

    def check_definition(self, path: Path) -> None:
        """Raises :class:`SiteError` if the site is air-gapped and a definition file needs a remote base."""
        for bootstrap in _BOOTSTRAP.findall(path.read_text(encoding="utf-8", errors="replace")):
            if bootstrap.lower() not in _LOCAL:
                self.check(f"{path} (Bootstrap: {bootstrap})")


def is_remote(source: str) -> bool:
    """Returns whether an image source is a registry address."""
    return source.startswith(SCHEMES)


def split_name(name: str) -> tuple[str, str]:
    """Splits ``debian:12`` into ``docker.io`` and ``library/debian:12``.

    The first component is a host if it contains a dot or a colon, or is ``localhost``.
    """
    first, slash, rest = name.partition("/")
    has_host = slash and ("." in first or ":" in first or first == "localhost")
    if not has_host:
        return "docker.io", name if slash else f"library/{name}"
    if first in ("docker.io", "index.docker.io", "registry-1.docker.io"):
        return "docker.io", rest if "/" in rest else f"library/{rest}"
    return first, rest
