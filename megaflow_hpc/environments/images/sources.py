"""Maps the image names of tasks to addresses or paths, and addresses to the site's registry mirrors.

A task or Dockerfile only names its image. The campaign maps the name to a path or an address, such as
``docker://debian:12``.

With the mirror ``docker.io=registry.site.edu/dockerhub``, ``docker://debian:12`` is fetched from
``docker://registry.site.edu/dockerhub/library/debian:12``. A mirror that begins with ``http://`` is contacted without
TLS. The store records the image under the requested address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.environments.images.registry.client import Reference
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.resources import docs

SCHEMES = ("docker://", "oras://", "library://")
_BOOTSTRAP = re.compile(r"^\s*Bootstrap:\s*(\S+)", re.IGNORECASE | re.MULTILINE)
_LOCAL = ("localimage", "scratch", "oci", "oci-archive", "docker-archive", "docker-daemon")


@dataclass(frozen=True)
class Registries:
    """The site's access to registries.

    Args:
        mirrors: Maps registry hosts to mirrors.
        air_gapped: Never fetch images. An image missing from the store is an error.
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
        """Returns an error for a failed pull. It adds remedies for sites without access to the registry."""
        address, _ = self.address(source)
        through = f" (for {source})" if address != source else ""
        return SiteError(
            f"{error}{through}\n  where registries are out of reach: map the image to a SIF file that is here "
            "(environment.images), name a mirror (environment.mirrors, --mirror), or fetch it elsewhere and bring it "
            f"here ({docs('how-to/images.md')})"
        )

    def check(self, source: str) -> None:
        """Raises :class:`SiteError` if the site is air-gapped. The message names ``source``."""
        if self.air_gapped:
            raise SiteError(
                f"{source}: not in the image store, and nothing may be fetched here "
                "(environment.air_gapped or --air-gapped); where there is a network: "
                f"megaflow-hpc images build CAMPAIGN --manifest FILE ({docs('how-to/images.md')})"
            )

    def check_definition(self, path: Path) -> None:
        """Raises :class:`SiteError` if the site is air-gapped and a definition file has a remote base image."""
        for bootstrap in _BOOTSTRAP.findall(path.read_text(encoding="utf-8", errors="replace")):
            if bootstrap.lower() not in _LOCAL:
                self.check(f"{path} (Bootstrap: {bootstrap})")


def is_remote(source: str) -> bool:
    """Returns whether an image source is a registry address."""
    return source.startswith(SCHEMES)


def split_name(name: str) -> tuple[str, str]:
    """Splits an image name into registry and path, such as ``debian:12`` into ``docker.io`` and ``library/debian:12``.

    The first component is a host if it contains a dot or a colon, or is ``localhost``.
    """
    first, slash, rest = name.partition("/")
    has_host = slash and ("." in first or ":" in first or first == "localhost")
    if not has_host:
        return "docker.io", name if slash else f"library/{name}"
    if first in ("docker.io", "index.docker.io", "registry-1.docker.io"):
        return "docker.io", rest if "/" in rest else f"library/{rest}"
    return first, rest


BUILD_S = 3600.0
"""Default timeout in seconds for building a Dockerfile."""


@dataclass(frozen=True)
class ImageRequest:
    """An image that a task needs."""

    name: str
    """Image name that the task uses."""
    base: str = ""
    """Name to look up instead of ``name``. Empty means ``name`` itself."""
    dockerfile: Path | None = None
    """Dockerfile to build. ``None`` if the image is looked up by name."""
    timeout_s: float = BUILD_S
    """Timeout in seconds for the build."""
    path: str = ""
    """Directory or file of the task, used in messages."""


@dataclass(frozen=True)
class ImageMapping:
    """Maps image names to sources, as in ``environment.images`` of a campaign."""

    names: Mapping[str, str]
    base_dir: Path
    """Directory against which relative paths in the mapping are resolved."""
    where: str = "environment.images"
    """Name of the mapping, used in messages."""


def match_name(name: str, mapping: Mapping[str, str]) -> str | None:
    """Returns the source of an image name, from an exact entry or else from the longest matching pattern.

    A pattern contains one ``*``, which matches any text. The matched text replaces ``*`` in the source, as in
    ``"swebench/*": docker://swebench/*`` or ``"swebench/sweb.eval.x86_64.*:latest": images/*.sif``. The text comes from
    a task. If the source is a path, the text must therefore not contain ``..`` or a variable. Returns ``None`` if
    nothing matches.

    Raises:
        ConfigError: The matched text is not allowed in a path.
    """
    if name in mapping:
        return _path(mapping[name])
    for pattern in sorted((key for key in mapping if key.count("*") == 1), key=len, reverse=True):
        head, tail = pattern.split("*")
        if len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail):
            text = name[len(head) : len(name) - len(tail)]
            source = mapping[pattern]
            if "*" in source and not is_remote(source) and not _FILE_NAME.fullmatch(text):
                raise ConfigError(
                    f"image {name!r}: {text!r} in {source!r}, which {pattern!r} is mapped to, leads elsewhere; map "
                    "this name by itself"
                )
            return _path(source).replace("*", text)
    return None


_FILE_NAME = re.compile(r"(?!~)(?!.*(^|/)\.{0,2}(/|$))[^\0$]+", re.DOTALL)
"""Matches a relative path without ``..`` and without variables."""


def _path(source: str) -> str:
    return source if is_remote(source) else os.path.expanduser(os.path.expandvars(source))
