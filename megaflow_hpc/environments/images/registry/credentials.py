"""Finds registry credentials in the configuration files of other container tools.

The files are tried in this order: ``REGISTRY_AUTH_FILE``, then the files of Apptainer (``apptainer registry login``),
Podman and Skopeo, and Docker. The first file with credentials for the registry wins. All files use the same format.
They may name credential helpers, which are called.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HELPER_TIMEOUT_S = 30.0
_DOCKER_HUB = ("https://index.docker.io/v1/", "docker.io", "index.docker.io", "registry-1.docker.io")
_TOKEN_USER = "<token>"
"""User name with which a credential helper marks the secret as an identity token."""


@dataclass(frozen=True)
class Credentials:
    """Credentials for a registry. ``origin`` is the file or credential helper that provided them."""

    origin: str
    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    """Token that is exchanged for access tokens, in place of user name and password."""

    @property
    def basic(self) -> str:
        """``Authorization`` header value for HTTP basic authentication."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def _credential_files() -> Iterator[Path]:
    """Yields the files that may contain credentials, in order of precedence."""
    environ = os.environ
    home = Path(environ.get("HOME") or Path.home())
    if environ.get("REGISTRY_AUTH_FILE"):
        yield Path(environ["REGISTRY_AUTH_FILE"])
    yield Path(environ.get("APPTAINER_CONFIGDIR") or home / ".apptainer", "docker-config.json")
    if environ.get("XDG_RUNTIME_DIR"):
        yield Path(environ["XDG_RUNTIME_DIR"], "containers/auth.json")
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "containers/auth.json")
    yield Path(environ.get("DOCKER_CONFIG") or home / ".docker", "config.json")


def find_credentials(host: str, repository: str) -> Credentials | None:
    """Returns the user's credentials for a repository of the registry ``host``, or ``None``."""
    for path in _credential_files():
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        credentials = _from_file(path, content, host, repository) if isinstance(content, dict) else None
        if credentials is not None:
            return credentials
    return None


def _from_file(path: Path, content: Mapping[str, Any], host: str, repository: str) -> Credentials | None:
    entries = content.get("auths") or {}
    helpers = content.get("credHelpers") or {}
    for key in _keys(host, repository):
        if key in helpers and (credentials := _ask_helper(str(helpers[key]), key)):
            return credentials
        entry = entries.get(key)
        if isinstance(entry, dict) and (credentials := _from_entry(path, entry)):
            return credentials
    default_helper = content.get("credsStore")
    if not default_helper:
        return None
    return _ask_helper(str(default_helper), _DOCKER_HUB[0] if host == "docker.io" else host)


def _keys(host: str, repository: str) -> Iterator[str]:
    """Yields the keys under which a file may list a repository, most specific first. Podman allows paths in keys."""
    parts = repository.split("/")
    for number in range(len(parts), 0, -1):
        yield "/".join([host, *parts[:number]])
    if host == "docker.io":
        yield from _DOCKER_HUB
    yield from (host, f"https://{host}", f"https://{host}/", f"https://{host}/v1/", f"https://{host}/v2/")


def _from_entry(path: Path, entry: Mapping[str, Any]) -> Credentials | None:
    token = str(entry.get("identitytoken") or "")
    user, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if entry.get("auth"):
        try:
            user, _, password = base64.b64decode(str(entry["auth"])).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
        password = password.rstrip("\0")  # Old Docker versions pad it with NUL bytes.
    return Credentials(str(path), user, password, token) if token or user else None


def _ask_helper(name: str, key: str) -> Credentials | None:
    """Asks ``docker-credential-NAME`` for the credentials of a registry. Returns ``None`` if it has none or fails."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        return None
    program = f"docker-credential-{name}"
    try:
        done = subprocess.run(
            [program, "get"],
            input=key.encode(),
            capture_output=True,
            timeout=HELPER_TIMEOUT_S,
            start_new_session=True,
            check=False,
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if not isinstance(answer, dict) or not answer.get("Secret"):
        return None
    user, secret = str(answer.get("Username") or ""), str(answer["Secret"])
    if user == _TOKEN_USER:
        return Credentials(program, identity_token=secret)
    return Credentials(program, user, secret)
