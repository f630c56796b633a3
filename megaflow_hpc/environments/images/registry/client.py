"""Reads manifests and blobs over HTTP, following the pull workflow of the OCI Distribution Specification 1.1.

Registries are untrusted: response sizes are limited, and contents are verified against their digests. Credentials are
not sent to other hosts after a redirect. Interrupted blob downloads are resumed.
"""

from __future__ import annotations

import functools
import hashlib
import http.client
import json
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from megaflow_hpc.environments.images.registry.credentials import Credentials, find_credentials
from megaflow_hpc.errors import ConfigError, SiteError

TIMEOUT_S = 60.0
"""Socket timeout in seconds for requests to a registry."""
MAX_TRIES = 5
"""Give up after this many consecutive attempts that each transferred less than :data:`PROGRESS_BYTES`."""
PROGRESS_BYTES = 1 << 20
FIRST_PAUSE_S = 0.25
"""Seconds to wait before the second attempt. The pause doubles with each further attempt."""
MIN_BYTES_PER_S = 20_000
"""Minimum average download rate of a blob. Slower downloads are aborted after the first :data:`GRACE_S` seconds."""
GRACE_S = 300.0
MAX_REDIRECTS = 5
MAX_TOKEN_BYTES = 1 << 20
_CHUNK = 1 << 18
_BUSY = (429, 500, 502, 503, 504)
"""HTTP status codes that cause a retry."""
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem")

DIGEST = r"sha256:[0-9a-f]{64}"
"""Pattern of a digest. Registries currently use only SHA-256."""
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"(?=.{{1,255}}\Z){_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SERVED_BY = {"docker.io": "registry-1.docker.io"}

T = TypeVar("T")


@dataclass(frozen=True)
class Reference:
    """Reference to an image in a registry.

    Args:
        host: The registry, such as ``docker.io`` or ``127.0.0.1:5000``.
        repository: Repository name, such as ``library/debian``.
        version: A tag, or a digest: ``sha256:`` and 64 hexadecimal digits.
        plain: Use HTTP without TLS.
    """

    host: str
    repository: str
    version: str = "latest"
    plain: bool = False

    @classmethod
    def parse(cls, host: str, path: str, *, plain: bool = False) -> Reference:
        """Parses ``library/debian:12`` or ``library/debian@sha256:…``. A digest takes precedence over a tag.

        The name comes from a task and becomes part of a URL, so it must follow the specification's grammar.

        Raises:
            ConfigError: The name is invalid.
        """
        name, at, digest = path.partition("@")
        repository, colon, tag = name.partition(":")
        checks = [
            (host, _HOST, "a registry's host"),
            (repository, _REPOSITORY, "a repository's name: lower-case letters, digits, and . _ - / between them"),
        ]
        if colon:
            checks.append((tag, _TAG, "a tag: letters, digits, . _ -"))
        if at:
            checks.append((digest, re.compile(DIGEST), "a digest: sha256: and 64 hexadecimal digits"))
        for text, pattern, form in checks:
            if not pattern.fullmatch(text):
                raise ConfigError(f"docker://{host}/{path}: {text!r} is not {form}")
        return cls(host, repository, digest if at else tag or "latest", plain)

    @property
    def url(self) -> str:
        """URL of the repository."""
        return f"{'http' if self.plain else 'https'}://{_SERVED_BY.get(self.host, self.host)}/v2/{self.repository}"

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}{'@' if ':' in self.version else ':'}{self.version}"


class _Interrupted(Exception):
    """Raised if an attempt failed but a retry may succeed."""


class RegistryClient:
    """Client for one repository. Several threads may read blobs at the same time."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self._authorization: str | None = None
        self._answered = False
        tls = _tls_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        self._opener = urllib.request.build_opener(_NoRedirection, urllib.request.HTTPSHandler(context=tls))

    def manifest(self, version: str, accept: str, max_bytes: int) -> tuple[bytes, str]:
        """Returns a manifest's bytes and its media type.

        Args:
            version: A tag or digest. If it is a digest, the content is verified.
            accept: Acceptable media types, separated by commas.

        Raises:
            SiteError: The registry does not return the manifest, its digest differs, or it exceeds ``max_bytes``.
        """

        def read() -> tuple[bytes, str]:
            with closing(self._get(f"manifests/{version}", {"Accept": accept})) as response:
                return self._read(response, max_bytes, f"manifest {version}"), response.headers.get_content_type()

        data, media_type = self._retry(read)
        if ":" in version:
            self._check_digest(version, data, "manifest")
        return data, media_type

    def small_blob(self, digest: str, size: int) -> bytes:
        """Returns a blob of ``size`` bytes. Raises :class:`SiteError` if its digest differs."""
        data = b"".join(self.blob(digest, size))
        self._check_digest(digest, data, "blob")
        return data

    def blob(self, digest: str, size: int) -> Iterator[bytes]:
        """Yields a blob in chunks and resumes interrupted downloads. The caller must verify the digest.

        Raises:
            SiteError: The blob is not available, its size is not ``size``, or the download is too slow.
        """
        done = tries = before = 0
        deadline = time.monotonic() + GRACE_S + size / MIN_BYTES_PER_S
        while done < size:
            try:
                for chunk in self._blob_from(digest, done, size):
                    done += len(chunk)
                    if time.monotonic() > deadline:
                        raise SiteError(
                            f"{self.reference}: {digest}: {done} of {size} bytes received; the download is too slow"
                        )
                    yield chunk
            except _Interrupted as error:
                tries = 1 if done - before >= PROGRESS_BYTES else tries + 1
                before = done
                if tries >= MAX_TRIES:
                    raise SiteError(
                        f"{self.reference}: {digest}: {error}; {done} of {size} bytes received, gave up after {tries} "
                        "tries"
                    ) from None
                time.sleep(FIRST_PAUSE_S * 2 ** (tries - 1))

    def _blob_from(self, digest: str, start: int, size: int) -> Iterator[bytes]:
        """Yields the rest of a blob from byte ``start``, with a single request."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        with closing(self._get(f"blobs/{digest}", headers)) as response:
            skip = 0
            if response.status == 206:
                if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                    raise SiteError(f"{self.reference}: {digest}: requested bytes {start}-…, but it sent another part")
            else:  # The server does not support ranges and sends the whole blob.
                skip = start
            length = response.headers.get("Content-Length")
            if length and length.isdigit() and int(length) > size - start + skip:
                raise SiteError(f"{self.reference}: {digest}: {length} bytes; its manifest says {size}")
            left = size - start
            while True:
                try:
                    chunk = response.read(_CHUNK)
                except (OSError, http.client.HTTPException) as error:
                    raise _Interrupted(f"the connection broke ({_reason(error)})") from None
                if not chunk:
                    break
                skipped = min(skip, len(chunk))
                skip -= skipped
                rest = chunk[skipped:]
                left -= len(rest)
                if left < 0:
                    raise SiteError(f"{self.reference}: {digest}: longer than the {size} bytes that its manifest says")
                if rest:
                    yield rest
            if left:
                raise _Interrupted("the connection ended early")

    # --- requests -------------------------------------------------------------------------------------------------

    def _retry(self, read: Callable[[], T]) -> T:
        for tries in range(1, MAX_TRIES + 1):
            try:
                return read()
            except _Interrupted as error:
                if tries == MAX_TRIES:
                    raise SiteError(f"{self.reference}: {error}; gave up after {tries} tries") from None
                time.sleep(FIRST_PAUSE_S * 2 ** (tries - 1))
        raise AssertionError

    def _get(self, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Sends a GET request below the repository URL, authenticating if the registry requires it."""
        url = f"{self.reference.url}/{path}"
        response = self._follow(url, headers)
        if response.status == 401:
            challenges = response.headers.get_all("WWW-Authenticate") or []
            response.close()
            self._authorization = self._authorize(challenges)
            response = self._follow(url, headers)
        if response.status in (200, 206):
            return response
        with closing(response):
            errors = _errors(response)
            status = f"{response.status} ({errors})" if errors else f"{response.status}"
            if response.status in _BUSY:
                raise _Interrupted(f"the registry answers {status}")
            if response.status == 404:
                raise SiteError(f"{self.reference}: not found in the registry: {path}: {status}")
            if response.status in (401, 403):
                raise SiteError(f"{self.reference}: access denied, or not found: {status}; {self._login()}")
            raise SiteError(f"{self.reference}: {path}: the registry answers {status}")

    def _follow(self, url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Sends a GET request and follows redirects. Only the registry itself receives credentials."""
        for _ in range(MAX_REDIRECTS + 1):
            request = urllib.request.Request(url, headers=dict(headers))
            if self._authorization and _origin(url) == _origin(self.reference.url):
                request.add_header("Authorization", self._authorization)
            response = self._open(request)
            if response.status not in (301, 302, 303, 307, 308):
                return response
            url = urllib.parse.urljoin(url, response.headers.get("Location", ""))
            response.close()
            self._check_scheme(url, "redirects")
        raise SiteError(f"{self.reference}: more than {MAX_REDIRECTS} redirections")

    def _open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        request.add_header("User-Agent", "megaflow-hpc")
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            response = error  # type: ignore[assignment]  # It has the same methods.
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            host = urllib.parse.urlsplit(request.full_url).netloc.rpartition("@")[2]
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise SiteError(
                    f"{self.reference}: {host}: {_reason(reason)}; where the site has a certificate authority of its "
                    "own, name its bundle in SSL_CERT_FILE"
                ) from None
            if isinstance(reason, socket.gaierror | ConnectionRefusedError) and not self._answered:
                raise SiteError(f"{self.reference}: {host} cannot be reached: {_reason(reason)}") from None
            raise _Interrupted(f"{host} cannot be reached ({_reason(reason)})") from None
        self._answered = True
        return response

    def _read(self, response: http.client.HTTPResponse, max_bytes: int, what: str) -> bytes:
        data, deadline = bytearray(), time.monotonic() + GRACE_S
        try:
            while len(data) <= max_bytes and (chunk := response.read1(_CHUNK)):
                data += chunk
                if time.monotonic() > deadline:
                    raise SiteError(f"{self.reference}: {what} did not arrive within {GRACE_S:g} s")
        except (OSError, http.client.HTTPException) as error:
            raise _Interrupted(f"the connection broke ({_reason(error)})") from None
        if len(data) > max_bytes:
            raise SiteError(f"{self.reference}: {what} has more than {max_bytes} bytes")
        length = response.headers.get("Content-Length", "")
        if length.isdigit() and len(data) < int(length):
            raise _Interrupted("the connection ended early")
        return bytes(data)

    def _check_digest(self, digest: str, data: bytes, what: str) -> None:
        actual = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if digest != actual:
            raise SiteError(f"{self.reference}: requested {what} {digest}, but the registry sent {actual}")

    # --- authorization ----------------------------------------------------------------------------------------------

    def _authorize(self, challenges: list[str]) -> str:
        """Returns an ``Authorization`` header for the challenges of a response's ``WWW-Authenticate`` headers.

        The header contains a token from the challenge's token server, or user name and password.
        """
        credentials = find_credentials(self.reference.host, self.reference.repository)
        schemes = {}
        for challenge in challenges:
            scheme, _, rest = challenge.partition(" ")
            schemes[scheme.lower()] = rest
        if "bearer" in schemes:
            parameters = _parameters(schemes["bearer"])
            return "Bearer " + self._retry(lambda: self._token(parameters, credentials))
        if "basic" in schemes and credentials and credentials.user:
            return credentials.basic
        raise SiteError(f"{self.reference}: the registry requires a login; {self._login()}")

    def _token(self, parameters: Mapping[str, str], credentials: Credentials | None) -> str:
        realm = parameters.get("realm", "")
        self._check_scheme(realm, "takes its tokens from")
        fields = {"scope": parameters.get("scope") or f"repository:{self.reference.repository}:pull"}
        if "service" in parameters:
            fields["service"] = parameters["service"]
        if credentials and credentials.identity_token:
            fields |= {"grant_type": "refresh_token", "client_id": "megaflow-hpc"}
            fields |= {"refresh_token": credentials.identity_token}
            request = urllib.request.Request(realm, urllib.parse.urlencode(fields).encode())
        else:
            separator = "&" if urllib.parse.urlsplit(realm).query else "?"
            request = urllib.request.Request(realm + separator + urllib.parse.urlencode(fields))
            if credentials:
                request.add_header("Authorization", credentials.basic)
        data = b"{}"
        with closing(self._open(request)) as response:
            if response.status in _BUSY:
                raise _Interrupted(f"{_host(realm)} answers {response.status}")
            if response.status == 200:
                data = self._read(response, MAX_TOKEN_BYTES, "the answer of its token server")
        try:
            answer = json.loads(data)
            token = answer.get("token") or answer.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            who = f"with the credentials of {credentials.origin}" if credentials else "without credentials"
            raise SiteError(
                f"{self.reference}: {_host(realm)} issued no token {who} ({response.status}); {self._login()}"
            )
        return token

    def _login(self) -> str:
        return f"to log in: apptainer registry login --username NAME docker://{self.reference.host}"

    def _check_scheme(self, url: str, does: str) -> None:
        """Raises :class:`SiteError` for a URL without TLS, unless the registry itself is used without TLS."""
        scheme = urllib.parse.urlsplit(url).scheme
        if scheme != "https" and not (scheme == "http" and self.reference.plain):
            raise SiteError(f"{self.reference}: the registry {does} {url[:200]!r}, which is not https")


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Disables urllib's redirects, because the client follows redirects itself."""

    def redirect_request(self, *_: object) -> None:
        return None


@functools.cache
def _tls_context(file: str | None, directory: str | None) -> ssl.SSLContext:
    """Returns a context that trusts ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``, or else the system's CA certificates.

    The context is cached, because loading certificates takes 0.1 s. A Python built on another system may not find this
    system's certificates.
    """
    context = ssl.create_default_context()
    if not file and not directory and not context.get_ca_certs():
        for bundle in _BUNDLES:
            if os.path.exists(bundle):
                context.load_verify_locations(bundle)
                break
    return context


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).hostname or "?"


def _parameters(challenge: str) -> dict[str, str]:
    """Parses the parameters of an authentication challenge, such as ``realm="https://…",service=x``."""
    pairs = re.findall(r'([A-Za-z_]+)\s*=\s*(?:"([^"]*)"|([^\s",]+))', challenge)
    return {name.lower(): quoted or bare for name, quoted, bare in pairs}


def _reason(error: object) -> str:
    return str(error) or type(error).__name__


def _errors(response: http.client.HTTPResponse) -> str:
    """Returns the error messages of a registry's response, reduced to printable ASCII."""
    try:
        answer = json.loads(response.read(1 << 16))
        text = "; ".join(f"{error.get('code')}: {error.get('message')}" for error in answer["errors"][:3])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    return re.sub(r"[^\x20-\x7e]", "?", text)[:300]
