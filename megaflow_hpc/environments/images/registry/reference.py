"""Where an image is: a registry's host, a repository in it, and a tag or a digest.

Names come from tasks, so what goes into a URL is matched against the grammar of the distribution specification.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megaflow_hpc.errors import ConfigError

DIGEST = r"sha256:[0-9a-f]{64}"
"""The one form of digest that registries use today."""

_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"(?=.{{1,255}}\Z){_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SERVED_BY = {"docker.io": "registry-1.docker.io"}


@dataclass(frozen=True)
class Reference:
    """An image of a registry.

    Args:
        host: the registry, as ``docker.io`` or ``127.0.0.1:5000``.
        repository: as ``library/debian``.
        version: a tag, or ``sha256:`` and 64 hexadecimal digits.
        plain: the registry does not speak TLS.
    """

    host: str
    repository: str
    version: str = "latest"
    plain: bool = False

    @classmethod
    def parse(cls, host: str, path: str, *, plain: bool = False) -> Reference:
        """Reads ``path``, as ``library/debian:12`` or ``library/debian@sha256:…``; of tag and digest the digest counts.

        Raises:
            ConfigError: it is not a name of an image.
        """
        name, at, digest = path.partition("@")
        repository, colon, tag = name.partition(":")
        for text, pattern, form in (
            (host, _HOST, "a registry's host"),
            (repository, _REPOSITORY, "a repository's name: lower-case letters, digits, and . _ - / between them"),
            (tag if colon else "latest", _TAG, "a tag: letters, digits, . _ -"),
            (digest if at else f"sha256:{0:064}", re.compile(DIGEST), "a digest: sha256: and 64 hexadecimal digits"),
        ):
            if not pattern.fullmatch(text):
                raise ConfigError(f"docker://{host}/{path}: {text!r} is not {form}")
        return cls(host, repository, digest if at else tag or "latest", plain)

    @property
    def url(self) -> str:
        """Root of the repository's own addresses."""
        return f"{'http' if self.plain else 'https'}://{_SERVED_BY.get(self.host, self.host)}/v2/{self.repository}"

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}{'@' if ':' in self.version else ':'}{self.version}"
