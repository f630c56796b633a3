"""Finds task sets by name in ``registry.yaml``, and downloads their files. Interrupted downloads are resumed, checksums
are verified, and files appear atomically.

The Hugging Face Hub reports the size and SHA-256 of each large file. The token in ``HF_TOKEN`` is sent only to the Hub,
or to the server in ``HF_ENDPOINT`` if set. It is not sent to other mirrors, or to hosts to which a server redirects.
"""

from __future__ import annotations

import fnmatch
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct, structs

from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.atomic import fsync
from megaflow_hpc.host.locks import locked_if_supported
from megaflow_hpc.texts import parse_json

HUB = "https://huggingface.co"
TIMEOUT_S = 60.0
"""Timeout of a network operation in seconds."""
MAX_TRIES = 4
"""Maximum number of consecutive attempts without progress."""
FIRST_PAUSE_S = 0.5
"""Seconds before the second attempt. The pause doubles with each further attempt."""
MAX_ANSWER_BYTES = 64 << 20
MAX_PAGES = 1000
"""Maximum number of pages in the list of a dataset's files."""
CHUNK = 1 << 20
_NEXT_PAGE = re.compile(r'<([^<>]+)>;\s*rel="next"')
FILE = Path(__file__).with_name("registry.yaml")


class TaskSet(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A task set in the registry. A number is ``unknown`` if no page in :attr:`sources` states it."""

    title: str
    licence: str
    tasks: int | Literal["unknown"]
    bytes: int | Literal["unknown"]
    """Size of the download in bytes."""
    images: str
    image_bytes: int | Literal["unknown"]
    sources: list[str]
    """URLs from which this information was taken."""
    hub: str = ""
    """Name of the dataset on the Hugging Face Hub."""
    files: list[str] = []
    """Patterns of the dataset's files to download."""
    releases: list[str] = []
    """Files that the set's releases added, in order of release. Versions such as ``release_v2`` and ``v2_v4`` select a
    part of them."""
    needed: list[str] = []
    """Files of the selected release."""
    archive: str = ""
    """URL of a tar.gz. ``{revision}`` is replaced with the version."""
    home: str = ""
    """Web page of a set whose data is part of an image."""
    revision: str = "main"
    format: Literal[
        "",
        "swebench",
        "harbor",
        "aider-polyglot",
        "humanevalfix",
        "miniwob",
        "livecodebench",
        "nemo-gym-code",
        "r2e-gym",
    ] = ""
    unread: str = ""
    """Reason why the set cannot be imported. Empty if it can be."""
    accept: bool = False
    """True if the user must accept the licence."""
    image: str = ""
    runner: str = ""

    @property
    def page(self) -> str:
        """Web page of the set."""
        if self.hub:
            return f"https://huggingface.co/datasets/{self.hub}"
        return self.home or self.archive.partition("/archive/")[0]

    def at(self, version: str) -> tuple[TaskSet, str]:
        """Returns the set with the files of a version, and the revision that contains them.

        Raises:
            ConfigError: The release does not exist.
        """
        match = re.fullmatch(r"release_v(\d+)|v(\d+)(?:_v(\d+))?", version) if self.releases else None
        if match is None:
            return self, version or self.revision
        last = int(match[1] or match[3] or match[2])
        files = self.releases[int(match[2] or 1) - 1 : last]
        if not files or last > len(self.releases):
            newest = len(self.releases)
            raise ConfigError(f"{version}: no such release of {self.title}; the newest is release_v{newest}")
        return structs.replace(self, files=files, needed=files), self.revision


def task_sets() -> dict[str, TaskSet]:
    """Returns all task sets by name."""
    return msgspec.convert(yaml.safe_load(FILE.read_text(encoding="utf-8")), dict[str, TaskSet])


def find(name: str) -> TaskSet:
    """Returns the task set with this name.

    Raises:
        ConfigError: The name is unknown, or the set cannot be imported.
    """
    sets = task_sets()
    if name not in sets:
        near = get_close_matches(name, sets, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{name}: no task set of this name; {hint}see: megaflow-hpc tasks import --list")
    if sets[name].unread:
        raise ConfigError(f"{name}: not read: {sets[name].unread}; see {sets[name].page}")
    return sets[name]


class _Refused(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answers {status}")
        self.status = status


class _Large(msgspec.Struct):
    oid: str = ""


class _Entry(msgspec.Struct):
    """A file or directory in the Hub's list of a dataset's files."""

    type: str
    path: str
    size: int | None = None
    lfs: _Large | None = None


@dataclass(frozen=True)
class Remote:
    """A file of a task set on a server."""

    url: str
    path: str
    """Path of the file in the set."""
    size: int | None = None
    sha256: str = ""
    fixed: bool = True
    """False if the content may change, as with a branch's archive. The file is then downloaded every time."""
    hub: bool = True
    """True if the server is the Hub or ``HF_ENDPOINT``, to which the token is sent."""


@dataclass(frozen=True)
class SetSource:
    """A version of a task set, and the server from which to download it."""

    name: str
    task_set: TaskSet
    version: str
    mirror: str = ""
    """URL of a server with the same paths, to use instead of the set's own server."""

    def files(self) -> tuple[str, list[Remote]]:
        """Returns the exact revision and the files to download.

        Raises:
            ConfigError: The version does not exist, has none of the set's files, or needs an accepted licence.
            SiteError: The server does not answer.
        """
        if self.task_set.archive:
            url = self.task_set.archive.format(revision=urllib.parse.quote(self.version))
            if self.mirror:
                parts = urllib.parse.urlsplit(url)
                url = url.replace(f"{parts.scheme}://{parts.netloc}", self.mirror.rstrip("/"), 1)
            return self.version, [Remote(url, f"{self.name}.tar.gz", fixed=_is_commit(self.version), hub=False)]
        hub, repo = self.mirror.rstrip("/") or _endpoint(), self.task_set.hub
        version = urllib.parse.quote(self.version, safe="")
        info, _ = self._json(f"{hub}/api/datasets/{repo}/revision/{version}")
        revision = str(info.get("sha") or self.version) if isinstance(info, dict) else self.version
        quoted = urllib.parse.quote(revision, safe="")
        remotes = []
        for entry in self._entries(f"{hub}/api/datasets/{repo}/tree/{quoted}?recursive=true"):
            path = entry.path
            if entry.type != "file" or not any(fnmatch.fnmatchcase(path, each) for each in self.task_set.files):
                continue
            if path.startswith("/") or ".." in path.split("/") or not path.isprintable():
                raise SiteError(f"{self.name}: {hub} lists {path!r}, which is not a file of the set")
            url = f"{hub}/datasets/{repo}/resolve/{quoted}/{urllib.parse.quote(path)}"
            digest = entry.lfs.oid if entry.lfs else ""
            remotes.append(Remote(url, path, entry.size, digest, _is_commit(revision), self._gets_token))
        lacking = {*self.task_set.needed} - {remote.path for remote in remotes}
        if not remotes or lacking:
            wanted = ", ".join(sorted(lacking) or self.task_set.files)
            raise ConfigError(
                f"{self.name}@{self.version}: {repo} has no file {wanted} at this version; name another one "
                f"(NAME@VERSION, see {self.task_set.page}), or import files that you have with --from DIR"
            )
        return revision, sorted(remotes, key=lambda remote: remote.path)

    def _entries(self, url: str) -> list[_Entry]:
        """Returns all entries of a paginated list."""
        entries: list[_Entry] = []
        pages = [url]
        while len(pages) <= MAX_PAGES:
            page, link = self._json(pages[-1])
            try:
                entries += msgspec.convert(page, list[_Entry])
            except msgspec.ValidationError as error:
                raise self.explain(pages[-1], ValueError(f"not a list of files ({error})")) from None
            following = _NEXT_PAGE.search(link)
            if following is None:
                return entries
            # Use only the query of the link, so that the request and its token go to the same server.
            pages.append(f"{url.partition('?')[0]}?{urllib.parse.urlsplit(following[1]).query}")
        raise self.explain(url, ValueError(f"the list of files has more than {MAX_PAGES} pages"))

    def _json(self, url: str) -> tuple[Any, str]:
        """Returns the Hub's decoded response and its ``Link`` header."""
        try:
            with closing(_open(url, {}, hub=self._gets_token)) as response:
                return parse_json(response.read(MAX_ANSWER_BYTES)), response.headers.get("Link", "")
        except (_Refused, OSError, http.client.HTTPException, ValueError) as error:
            raise self.explain(url, error) from None

    @property
    def _gets_token(self) -> bool:
        """True unless ``mirror`` is a server to which the token must not be sent."""
        return self.mirror.rstrip("/") in ("", _endpoint())

    def explain(self, url: str, error: Exception) -> ConfigError | SiteError:
        """Converts a failed request to an error that names the request, the response and the remedy."""
        what = f"{self.name}@{self.version}"
        if isinstance(error, _Refused) and error.status in (401, 403) and not self._gets_token:
            return ConfigError(
                f"{what}: {url}: {error}; a server of --mirror does not get your HF_TOKEN: if it is your Hub, name it "
                "in HF_ENDPOINT instead"
            )
        if isinstance(error, _Refused) and error.status in (401, 403):
            return ConfigError(
                f"{what}: {url}: {error}; accept its licence at {self.task_set.page}, then set HF_TOKEN to a token of "
                "your account"
            )
        if isinstance(error, _Refused) and error.status == 404:
            return ConfigError(
                f"{what}: {url}: {error}; there is no such version; name another one (NAME@VERSION, see "
                f"{self.task_set.page})"
            )
        reason = getattr(error, "reason", None) or error
        return SiteError(f"{what}: {url}: {reason}; repeat the command, or carry the files and use --from DIR")


def _endpoint() -> str:
    """Returns the URL of the Hub."""
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def _is_commit(revision: str) -> bool:
    return re.fullmatch("[0-9a-f]{40}", revision) is not None


def _open(url: str, headers: dict[str, str], *, hub: bool) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity", **headers})
    token = os.environ.get("HF_TOKEN")
    if token and hub:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        raise _Refused(error.code) from None
    return response


def fetch(source: SetSource, remote: Remote, directory: Path, say: Callable[[str], None]) -> tuple[Path, str]:
    """Downloads a file into ``directory`` unless it is already there. Returns its path and SHA-256.

    A partial download is kept next to the file, and the next call resumes it. If the file system supports locks, only
    one of several concurrent calls downloads the file.

    Raises:
        ConfigError: The server refuses the file.
        SiteError: The download keeps failing, or the file has the wrong size or checksum.
    """
    target = directory / remote.path
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked_if_supported(target.with_name(f".{target.name}.lock")):
        if remote.fixed and target.is_file():
            digest = digest_of(target)
            if remote.sha256 in ("", digest):
                return target, digest
        say(f"downloading {remote.path}" + (f" ({remote.size:,} bytes)" if remote.size else ""))
        return target, _download(source, remote, target)


def _download(source: SetSource, remote: Remote, target: Path) -> str:
    part = target.with_name(f".{target.name}.part")
    if not remote.fixed:
        part.unlink(missing_ok=True)
    tries = most = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            complete = _continue(remote, part, before)
        except _Refused as error:
            if error.status == 416 and before:  # already complete, or a part of another file
                part.unlink()
            elif error.status < 500 and error.status != 429:
                raise source.explain(remote.url, error) from None
            failure: Exception = error
        except ValueError as error:
            raise source.explain(remote.url, error) from None
        except (OSError, http.client.HTTPException) as error:
            failure = error
        else:
            if complete:
                break
            failure = OSError("the connection ended early")
            if remote.size is not None and part.stat().st_size > remote.size:
                failure = OSError(f"expected a file of {remote.size:,} bytes, but the server sends more")
        size = part.stat().st_size if part.exists() else 0
        tries = 0 if size > max(before, most) else tries + 1
        most = max(most, size)
        if tries >= MAX_TRIES:
            raise source.explain(remote.url, failure) from None
        time.sleep(FIRST_PAUSE_S * 2**tries)
    digest = digest_of(part)
    if remote.sha256 not in ("", digest):
        part.unlink()
        raise SiteError(
            f"{source.name}@{source.version}: {remote.url}: its SHA-256 is {digest}, expected {remote.sha256}; nothing "
            "was kept; repeat the command, or use another server with --mirror"
        )
    fsync(part)
    os.replace(part, target)
    return digest


def _continue(remote: Remote, part: Path, start: int) -> bool:
    """Downloads the rest of a file. Returns whether it is complete."""
    if start and start == remote.size:
        return True
    if remote.size is not None and start > remote.size:
        start = 0
    headers = {"Range": f"bytes={start}-"} if start else {}
    with closing(_open(remote.url, headers, hub=remote.hub)) as response:
        continues = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        length = response.headers.get("Content-Length")
        size = start if continues else 0
        expected = remote.size
        if expected is None and length and length.isdigit():
            expected = size + int(length)
        with part.open("ab" if continues else "wb") as file:
            while (remote.size is None or size <= remote.size) and (chunk := response.read(CHUNK)):
                size += file.write(chunk)
    return expected is None or size == expected


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
