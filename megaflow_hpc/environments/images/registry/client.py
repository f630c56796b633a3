"""The reading half of the distribution protocol (OCI Distribution Specification 1.1): manifests and blobs over HTTP.

A registry is not trusted: what it sends is bounded, is what its digest says or an error, and a redirection to another
host carries no credentials. Connections break: a blob goes on where it stopped.
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
from typing import TypeVar

from megaflow_hpc.environments.images.registry.credentials import Credentials, find_credentials
from megaflow_hpc.environments.images.registry.reference import Reference
from megaflow_hpc.errors import SiteError

TIMEOUT_S = 60.0
"""Longest silence of a registry."""
TRIES = 5
"""In a row that bring less than :data:`PROGRESS` bytes."""
PROGRESS = 1 << 20
FIRST_PAUSE_S = 0.25
"""Before the second try; each further pause is twice as long."""
SLOWEST = 20_000
"""Bytes a second below which a blob is given up, after :data:`GRACE_S`."""
GRACE_S = 300.0
REDIRECTS = 5
MAX_TOKEN_BYTES = 1 << 20
_CHUNK = 1 << 18
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem")

T = TypeVar("T")


class _Interrupted(Exception):
    """A try that may succeed when it is repeated."""


class RegistryClient:
    """Reads one repository. Several threads may, each its own blob."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self._authorization: str | None = None
        self._answered = False
        trusted = _trusted(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        self._opener = urllib.request.build_opener(_NoRedirection, urllib.request.HTTPSHandler(context=trusted))

    def manifest(self, version: str, accept: str, most: int) -> tuple[bytes, str]:
        """Returns a manifest's bytes and its media type.

        Args:
            version: tag or digest; of a digest, the content is compared with it.
            accept: media types, separated by commas.
            most: bytes that it may have.

        Raises:
            SiteError: the registry does not give it, or gives something else.
        """

        def read() -> tuple[bytes, str]:
            with closing(self._get(f"manifests/{version}", {"Accept": accept})) as response:
                return self._read(response, most, f"manifest {version}"), response.headers.get_content_type()

        data, media_type = self._patiently(read)
        if ":" in version:
            self._compare(version, hashlib.sha256(data).hexdigest(), "manifest")
        return data, media_type

    def small_blob(self, digest: str, size: int) -> bytes:
        """Returns a blob of ``size`` bytes, after its content was compared with its digest."""
        data = b"".join(self.blob(digest, size))
        self._compare(digest, hashlib.sha256(data).hexdigest(), "blob")
        return data

    def blob(self, digest: str, size: int) -> Iterator[bytes]:
        """Yields what the registry gives for a blob, in pieces. Whoever keeps them compares them with the digest.

        Raises:
            SiteError: not to be had, or shorter or longer than ``size``.
        """
        done = tries = before = 0
        until = time.monotonic() + GRACE_S + size / SLOWEST
        while done < size:
            try:
                for chunk in self._part(digest, done, size):
                    done += len(chunk)
                    if time.monotonic() > until:
                        raise SiteError(f"{self.reference}: {digest}: {done} of {size} bytes came; it is too slow")
                    yield chunk
            except _Interrupted as error:
                tries = 1 if done - before >= PROGRESS else tries + 1
                before = done
                if tries >= TRIES:
                    raise SiteError(
                        f"{self.reference}: {digest}: {error}; {done} of {size} bytes came, given up after {tries} "
                        "tries"
                    ) from None
                time.sleep(FIRST_PAUSE_S * 2 ** (tries - 1))

    def _part(self, digest: str, done: int, size: int) -> Iterator[bytes]:
        """A blob from byte ``done`` on, by one request."""
        headers = {"Range": f"bytes={done}-"} if done else {}
        with closing(self._get(f"blobs/{digest}", headers)) as response:
            length = response.headers.get("Content-Length")
            skip = 0
            if response.status == 206:
                expected = f"bytes {done}-"
                if not response.headers.get("Content-Range", "").startswith(expected):
                    raise SiteError(f"{self.reference}: {digest}: asked for {expected}…, it sent another part")
            else:
                skip = done  # it does not know ranges
            if length and length.isdigit() and int(length) > size - done + skip:
                raise SiteError(f"{self.reference}: {digest}: {length} bytes; its manifest says {size}")
            while True:
                try:
                    chunk = response.read(_CHUNK)
                except (OSError, http.client.HTTPException) as error:
                    raise _Interrupted(f"the connection broke ({_said(error)})") from None
                if not chunk:
                    break
                rest, skip = chunk[skip:], max(0, skip - len(chunk))
                if len(rest) > size - done:
                    raise SiteError(f"{self.reference}: {digest}: longer than the {size} bytes that its manifest says")
                if rest:
                    done += len(rest)
                    yield rest
            if done < size:
                raise _Interrupted("the connection ended early")

    # --- one request ----------------------------------------------------------------------------------------------

    def _patiently(self, read: Callable[[], T]) -> T:
        for tries in range(1, TRIES + 1):
            try:
                return read()
            except _Interrupted as error:
                if tries == TRIES:
                    raise SiteError(f"{self.reference}: {error}; given up after {tries} tries") from None
                time.sleep(FIRST_PAUSE_S * 2 ** (tries - 1))
        raise AssertionError

    def _get(self, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """The answer to a GET below the repository, with credentials if it asks for them."""
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
            said = _errors(response)
            status = f"{response.status}{f' ({said})' if said else ''}"
            if response.status in (429, 500, 502, 503, 504):
                raise _Interrupted(f"the registry answers {status}")
            if response.status == 404:
                raise SiteError(f"{self.reference}: the registry does not have it: {path}: {status}")
            if response.status in (401, 403):
                raise SiteError(f"{self.reference}: refused, or not there: {status}; {self._login()}")
            raise SiteError(f"{self.reference}: {path}: the registry answers {status}")

    def _follow(self, url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """Follows redirections. Only the registry itself gets credentials."""
        for _ in range(REDIRECTS + 1):
            own = _origin(url) == _origin(self.reference.url)
            with_credentials = {"Authorization": self._authorization} if own and self._authorization else {}
            response = self._open(urllib.request.Request(url, headers={**headers, **with_credentials}))
            if response.status not in (301, 302, 303, 307, 308):
                return response
            url = urllib.parse.urljoin(url, response.headers.get("Location", ""))
            response.close()
            self._check_scheme(url, "redirects")
        raise SiteError(f"{self.reference}: more than {REDIRECTS} redirections")

    def _open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        request.add_header("User-Agent", "megaflow-hpc")
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            response = error  # type: ignore[assignment]  # it is read like one
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            host = urllib.parse.urlsplit(request.full_url).netloc.rpartition("@")[2]
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise SiteError(
                    f"{self.reference}: {host}: {_said(reason)}; where the site has a certificate authority of its "
                    "own, name its bundle in SSL_CERT_FILE"
                ) from None
            if isinstance(reason, socket.gaierror | ConnectionRefusedError) and not self._answered:
                raise SiteError(f"{self.reference}: {host} cannot be reached: {_said(reason)}") from None
            raise _Interrupted(f"{host} cannot be reached ({_said(reason)})") from None
        self._answered = True
        return response

    def _read(self, response: http.client.HTTPResponse, most: int, what: str) -> bytes:
        data, until = bytearray(), time.monotonic() + GRACE_S
        try:
            while len(data) <= most and (chunk := response.read1(_CHUNK)):
                data += chunk
                if time.monotonic() > until:
                    raise SiteError(f"{self.reference}: {what} did not come within {GRACE_S:g} s")
        except (OSError, http.client.HTTPException) as error:
            raise _Interrupted(f"the connection broke ({_said(error)})") from None
        if len(data) > most:
            raise SiteError(f"{self.reference}: {what} has more than {most} bytes")
        length = response.headers.get("Content-Length", "")
        if length.isdigit() and len(data) < int(length):
            raise _Interrupted("the connection ended early")
        return bytes(data)

    def _compare(self, digest: str, found: str, what: str) -> None:
        if digest != f"sha256:{found}":
            raise SiteError(f"{self.reference}: asked for {what} {digest}, the registry sent sha256:{found}")

    # --- who asks ---------------------------------------------------------------------------------------------------

    def _authorize(self, challenges: list[str]) -> str:
        """The ``Authorization`` header that answers ``WWW-Authenticate``: a token of the server it names, or user and
        password."""
        known = find_credentials(self.reference.host, self.reference.repository)
        named = {scheme.lower(): rest for scheme, _, rest in (challenge.partition(" ") for challenge in challenges)}
        if "bearer" in named:
            return "Bearer " + self._patiently(lambda: self._token(_parameters(named["bearer"]), known))
        if "basic" in named and known and known.user:
            return known.basic
        raise SiteError(f"{self.reference}: the registry wants a login; {self._login()}")

    def _token(self, parameters: Mapping[str, str], known: Credentials | None) -> str:
        realm = parameters.get("realm", "")
        self._check_scheme(realm, "takes its tokens from")
        fields = {"scope": parameters.get("scope") or f"repository:{self.reference.repository}:pull"}
        fields |= {"service": parameters["service"]} if "service" in parameters else {}
        if known and known.identity_token:
            fields |= {"grant_type": "refresh_token", "client_id": "megaflow-hpc"}
            fields |= {"refresh_token": known.identity_token}
            request = urllib.request.Request(realm, urllib.parse.urlencode(fields).encode())
        else:
            headers = {"Authorization": known.basic} if known else {}
            joined = "&" if urllib.parse.urlsplit(realm).query else "?"
            request = urllib.request.Request(realm + joined + urllib.parse.urlencode(fields), headers=headers)
        with closing(self._open(request)) as response:
            if response.status in (429, 500, 502, 503, 504):
                raise _Interrupted(f"{_host(realm)} answers {response.status}")
            data = (
                self._read(response, MAX_TOKEN_BYTES, "the answer of its token server")
                if response.status == 200
                else b""
            )
            try:
                answer = json.loads(data or b"{}")
                token = answer.get("token") or answer.get("access_token")
            except (ValueError, AttributeError, RecursionError):
                token = None
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            who = f"with the credentials of {known.origin}" if known else "without credentials"
            raise SiteError(
                f"{self.reference}: {_host(realm)} gives no token {who} ({response.status}); {self._login()}"
            )
        return token

    def _login(self) -> str:
        return f"to log in: apptainer registry login --username NAME docker://{self.reference.host}"

    def _check_scheme(self, url: str, does: str) -> None:
        """Who is asked by TLS cannot lead to where there is none."""
        scheme = urllib.parse.urlsplit(url).scheme
        if scheme != "https" and not (scheme == "http" and self.reference.plain):
            raise SiteError(f"{self.reference}: the registry {does} {url[:200]!r}, which is not https")


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """The client follows them itself."""

    def redirect_request(self, *_: object) -> None:
        return None


@functools.cache
def _trusted(file: str | None, directory: str | None) -> ssl.SSLContext:
    """The machine's certificate authorities, or those of ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``, which take 0.1 s to
    read. A Python that was built elsewhere looks for the machine's in the wrong place."""
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


def _parameters(text: str) -> dict[str, str]:
    """``realm="https://…",service=x`` of a challenge."""
    found = re.findall(r'([A-Za-z_]+)\s*=\s*(?:"([^"]*)"|([^\s",]+))', text)
    return {name.lower(): quoted or bare for name, quoted, bare in found}


def _said(error: object) -> str:
    return str(error) or type(error).__name__


def _errors(response: http.client.HTTPResponse) -> str:
    """What a registry says was wrong, fit for a terminal."""
    try:
        answer = json.loads(response.read(1 << 16))
        said = "; ".join(f"{error.get('code')}: {error.get('message')}" for error in answer["errors"][:3])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    return re.sub(r"[^\x20-\x7e]", "?", said)[:300]
