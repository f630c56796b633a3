"""User names and passwords for registries, from where the user's other programs keep them.

The first file that knows the registry counts: ``REGISTRY_AUTH_FILE``, Apptainer's (``apptainer registry login``),
Podman's and Skopeo's, Docker's. They have one form; what they name as credential helper is asked.
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

HELPER_S = 30.0
"""Longest answer of a credential helper."""
_DOCKER_HUB = ("https://index.docker.io/v1/", "docker.io", "index.docker.io", "registry-1.docker.io")
_TOKEN_USER = "<token>"
"""The user name with which a helper says that the secret is an identity token."""


@dataclass(frozen=True)
class Credentials:
    """What a registry is told; ``origin`` is the file or the helper that gave it."""

    origin: str
    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    """Exchanged for access tokens, instead of user and password."""

    @property
    def basic(self) -> str:
        """Value of the ``Authorization`` header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def credential_files(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Returns the files in which credentials are looked for, in this order."""
    environ = os.environ if environ is None else environ
    home = Path(environ.get("HOME") or Path.home())
    named = [environ["REGISTRY_AUTH_FILE"]] if environ.get("REGISTRY_AUTH_FILE") else []
    runtime = [Path(environ["XDG_RUNTIME_DIR"], "containers/auth.json")] if environ.get("XDG_RUNTIME_DIR") else []
    return [
        *map(Path, named),
        Path(environ.get("APPTAINER_CONFIGDIR") or home / ".apptainer", "docker-config.json"),
        *runtime,
        Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "containers/auth.json"),
        Path(environ.get("DOCKER_CONFIG") or home / ".docker", "config.json"),
    ]


def find_credentials(host: str, repository: str) -> Credentials | None:
    """Returns what the user's files have for a repository of the registry ``host``."""
    for path in credential_files():
        try:
            known = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(known, dict) and (found := _of_file(path, known, host, repository)):
            return found
    return None


def _of_file(path: Path, known: Mapping[str, Any], host: str, repository: str) -> Credentials | None:
    entries, helpers = (known.get(name) or {} for name in ("auths", "credHelpers"))
    for key in _keys(host, repository):
        if key in helpers and (found := _ask(str(helpers[key]), key)):
            return found
        entry = entries.get(key)
        if isinstance(entry, dict) and (found := _of_entry(path, entry)):
            return found
    store = known.get("credsStore")
    for key in _DOCKER_HUB[:1] if host == "docker.io" else (host,):
        if store and (found := _ask(str(store), key)):
            return found
    return None


def _keys(host: str, repository: str) -> Iterator[str]:
    """Under what a registry's credentials may be kept, the closest first: Podman's files know paths, too."""
    parts = repository.split("/")
    for number in range(len(parts), 0, -1):
        yield "/".join([host, *parts[:number]])
    if host == "docker.io":
        yield from _DOCKER_HUB
    yield from (host, f"https://{host}", f"https://{host}/", f"https://{host}/v1/", f"https://{host}/v2/")


def _of_entry(path: Path, entry: Mapping[str, Any]) -> Credentials | None:
    token = str(entry.get("identitytoken") or "")
    user, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if entry.get("auth"):
        try:
            user, _, password = base64.b64decode(str(entry["auth"])).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
        password = password.rstrip("\0")  # an old Docker pads it
    return Credentials(str(path), user, password, token) if token or user else None


def _ask(name: str, key: str) -> Credentials | None:
    """What ``docker-credential-NAME`` says; the registry goes to its standard input."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        return None
    program = f"docker-credential-{name}"
    try:
        done = subprocess.run(
            [program, "get"], input=key.encode(), capture_output=True, timeout=HELPER_S, start_new_session=True
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if not isinstance(answer, dict) or not answer.get("Secret"):
        return None
    user, secret = str(answer.get("Username") or ""), str(answer["Secret"])
    return Credentials(program, identity_token=secret) if user == _TOKEN_USER else Credentials(program, user, secret)
