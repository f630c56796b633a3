"""Copies weight versions to this node. A policy's servers copy from each other, so only one of them reads the shared
file system.

::

    shared file system ──► first server's node ──► second node ──► fourth node, fifth node
                              │                └─► third node  ──► …
                              └─► the node's other servers, as hard links

The list of live servers determines who copies from whom (:func:`sources`). A server requests files only from servers
with lower numbers, so there is no cycle. It requests parts of a file (``GET /weights/<version>/<file>?offset=<n>``)
with the key in the peer's endpoint file. A peer replies with the bytes that it has received so far, so all nodes copy
at nearly the same time. If a peer has not noticed the requested version yet, the request makes it start copying that
version.

Each file is compared with the checksum that its publisher wrote. If a peer fails, is slow or sends wrong bytes, the
server stops using it for this version and tries the next peer. The shared file system is the last resort. A server
without peers copies nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import http.client
import logging
import os
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from aiohttp import web

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.host.files import open_regular, remove_tree
from megaflow_hpc.host.mounts import mount_of
from megaflow_hpc.host.process import node_name
from megaflow_hpc.rundir import weights
from megaflow_hpc.rundir.endpoints import Endpoint
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import Checksum, Version, checksum, read_checksums

ROOT = "/weights/"
FAN_OUT = 2
"""Maximum number of nodes that copy from the same node."""
CHUNK = 2**22
"""Maximum size of a reply in bytes. Replies are small because the event loop that encrypts them also forwards requests
to the engine."""
MAX_REPLIES = 4
"""Maximum number of concurrent replies with content. Further requests get an empty reply and are retried by their
servers."""
HOLD_S = 1.0
"""Maximum seconds that a request waits for new bytes. Then it gets an empty reply."""
REPLY_TIMEOUT_S = 10.0
"""Timeout in seconds for a complete reply. A peer slower than 0.4 MB/s exceeds it."""
STALL_TIMEOUT_S = 60.0
"""The server stops using a peer after this many seconds without new bytes, even if the peer still replies."""
POLL_INTERVAL_S = 0.01
COMPLETE, RECEIVED = "X-Megaflow-Path", "X-Megaflow-Received"
"""Response headers: the file's path once the version is complete, and the number of bytes of the version received so
far."""


class _Reply(NamedTuple):
    data: bytes
    path: str
    """Path of the file on the peer's node. Empty until the peer's copy of the version is complete."""
    received: str
    """Number of bytes of the version that the peer has received. It changes as long as the peer makes progress."""


def sources(servers: Sequence[Endpoint], own: Endpoint) -> list[Endpoint]:
    """Returns the servers from which a server copies files, in order of preference.

    The list is empty for the server that reads the shared file system. The first servers of the nodes form a tree in
    which each server has up to :data:`FAN_OUT` children. A node's other servers copy from the first server of that
    node. If a source fails, the source's own sources are tried next.

    Args:
        servers: Live servers of the policy.
        own: The server that copies. Only its name and node are used.
    """
    others = [server for server in servers if server.server != own.server]
    heads: dict[str, Endpoint] = {}
    for server in sorted([own, *others], key=lambda server: number_of(server.server)):
        heads.setdefault(server.node, server)
    tree, position = list(heads.values()), list(heads).index(own.node)
    path = [] if tree[position].server == own.server else [tree[position]]
    while position:
        position = (position - 1) // FAN_OUT
        path.append(tree[position])
    return path


def number_of(server: str) -> int:
    """Returns the number in a server's name, ``<policy>.<n>``."""
    return int(server.rpartition(".")[2])


LOG = logging.getLogger(__name__)


class PeerError(Exception):
    """A peer cannot provide a file."""


class _Peer:
    """A connection to another server's proxy, used by a single thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, url = endpoint, urlsplit(endpoint.url)
        self._connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=REPLY_TIMEOUT_S)
        if endpoint.tls_fingerprint:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint is compared instead
            self._connection = http.client.HTTPSConnection(
                url.hostname or "", url.port, timeout=REPLY_TIMEOUT_S, context=context
            )

    def close(self) -> None:
        self._connection.close()

    def request(self, version: int, name: str, offset: int) -> _Reply:
        """Requests a file's bytes, starting at ``offset``. The reply may be empty.

        Raises:
            PeerError: The peer does not reply, is slow, or does not have the version.
        """
        path = f"{ROOT}{version}/{quote(name)}?offset={offset}"
        try:
            if self._connection.sock is None:
                self._connect()
            until = time.monotonic() + REPLY_TIMEOUT_S
            self._connection.request("GET", path, headers={"Authorization": f"Bearer {self.endpoint.key}"})
            response = self._connection.getresponse()
            data = bytearray()
            while len(data) <= CHUNK and (part := response.read1(CHUNK)):
                data += part
                if time.monotonic() > until:
                    raise PeerError(f"{self.endpoint.server} is slow")
            response.close()  # read1 leaves it open, which would prevent the connection from being reused
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"{self.endpoint.server}: {type(error).__name__}") from error
        if response.status not in (200, 204) or len(data) > CHUNK:
            raise PeerError(f"{self.endpoint.server}: HTTP {response.status}")
        return _Reply(bytes(data), unquote(response.headers.get(COMPLETE, "")), response.headers.get(RECEIVED, ""))

    def _connect(self) -> None:
        """Connects and checks the certificate. The key is sent only after that."""
        self._connection.connect()
        if isinstance(self._connection.sock, ssl.SSLSocket):
            digest = hashlib.sha256(self._connection.sock.getpeercert(binary_form=True) or b"").hexdigest()
            if not hmac.compare_digest(digest, self.endpoint.tls_fingerprint):
                self.close()
                raise PeerError(f"{self.endpoint.server}: its certificate does not match its endpoint file")


@dataclass
class _File:
    expected: Checksum
    received: int = 0
    """Number of bytes written to the copy. Only the copying thread changes it."""


@dataclass
class _Copy:
    """A copy of one weight version on this node."""

    version: Version
    folder: Path
    files: dict[str, _File]
    peers: list[_Peer]
    done: Future[bool] = field(default_factory=Future)
    """Result: True if the copy is complete, False if the disk failed."""

    @property
    def complete(self) -> bool:
        return self.done.done() and self.done.exception() is None and self.done.result()


class WeightCopies:
    """One server's copies of weight versions on its node's local disk.

    Args:
        run: The campaign's run directory.
        server: Name of this server.
        policy: Policy that this server serves.
        list_servers: Returns the live servers of the policy. May raise OSError.
    """

    def __init__(self, run: RunDir, server: str, policy: str, list_servers: Callable[[], Sequence[Endpoint]]) -> None:
        self._run, self._policy, self._list_servers = run, policy, list_servers
        self._own = Endpoint(server=server, policy=policy, url="", node=node_name())
        self.scratch = Path()
        """Node-local directory of this server."""
        self.shared_bytes = 0
        """Bytes read from the shared file system."""
        self.peer_bytes = 0
        """Bytes received from other servers."""
        self._copies: dict[int, _Copy] = {}
        self._lock = threading.Lock()
        self._replies = 0
        self._closed = False

    def close(self) -> None:
        """Tells the copying threads to stop. Does not wait for them."""
        self._closed = True

    def begin(self, version: Version, requested: bool = False) -> None:
        """Starts to copy a version in the background if the policy has other servers. Idempotent.

        Args:
            requested: True if another server has requested the version.
        """
        with self._lock, contextlib.suppress(OSError, ValueError):  # unreadable: the engine will report it
            if version.version in self._copies or not version.path:
                return
            servers = self._list_servers()
            if not requested and all(server.server == self._own.server for server in servers):
                return
            files = {name: _File(expected) for name, expected in read_checksums(Path(version.path)).items()}
            if not files or not self._fits(sum(file.expected.size for file in files.values())):
                return
            peers = [_Peer(peer) for peer in sources(servers, self._own)]
            copy = _Copy(version, self.scratch / f"copy-{version.version}", files, peers)
            self._copies[version.version] = copy
            threading.Thread(target=self._copy, args=(copy,), name="weights", daemon=True).start()

    def local(self, version: Version) -> Path:
        """Waits for the copy and returns its directory, or the published directory if there is no copy.

        Raises:
            ModelServiceError: The published files differ from their checksums.
        """
        self.begin(version)
        copy = self._copies.get(version.version)
        return copy.folder if copy is not None and copy.done.result() else Path(version.path)

    def keep(self, numbers: set[int]) -> None:
        """Removes all copies except those of the given versions and those still being written."""
        with self._lock:
            old = [n for n, copy in self._copies.items() if n not in numbers and copy.done.done()]
            folders = [self._copies.pop(number).folder for number in old]
        for folder in folders:
            remove_tree(folder, ignore_errors=True)

    # --- copying ---

    def _fits(self, size: int) -> bool:
        """Returns whether the scratch directory has space for two versions. If the directory is in memory, also checks
        the available memory."""
        free = shutil.disk_usage(self.scratch).free
        if mount_of(self.scratch).type in ("tmpfs", "ramfs"):
            available = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split(maxsplit=1)[0]
            free = min(free, int(available) * 1024)
        return free >= 2 * size

    def _copy(self, copy: _Copy) -> None:
        """Copies all files of a version, in the order of their names."""
        try:
            copy.folder.mkdir(mode=0o700)
            for name in sorted(copy.files):
                (copy.folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._receive(copy, name)
            copy.done.set_result(True)
        except OSError:  # such as a full disk: the engine reads the published files
            copy.done.set_result(False)
        except BaseException as error:
            copy.done.set_exception(error)
        finally:
            for peer in copy.peers:
                peer.close()

    def _receive(self, copy: _Copy, name: str) -> None:
        """Copies one file from peers or, if they fail, from the shared file system.

        Raises:
            ModelServiceError: The published file differs from its checksum.
        """
        file, path = copy.files[name], copy.folder / name
        while True:
            used: list[_Peer] = []
            file.received = 0
            digest = self._link(copy, name, used) or self._write(copy, name, used)
            path.chmod(0o400)
            if digest == file.expected.sha256:
                return
            path.unlink()
            if not used:
                raise ModelServiceError(f"{copy.version.path}/{name}: its SHA-256 differs from the published checksum")
            for peer in used:
                self._drop(copy, peer)

    def _link(self, copy: _Copy, name: str, used: list[_Peer]) -> str:
        """Hard-links the file to a copy on the same node. Returns its SHA-256, or an empty string if that fails."""
        file, path = copy.files[name], copy.folder / name
        while copy.peers and copy.peers[0].endpoint.node == self._own.node:
            peer = copy.peers[0]
            reply = self._poll(copy, name, file.expected.size)
            if reply:
                try:
                    os.link(reply.path, path)
                    file.received = path.stat().st_size
                    used.append(peer)
                    return checksum(path).sha256
                except OSError:  # a different file system, or a private /tmp
                    path.unlink(missing_ok=True)
                    return ""
        return ""

    def _write(self, copy: _Copy, name: str, used: list[_Peer]) -> str:
        """Writes one file and returns its SHA-256. If a peer fails, the next peer continues at the same offset."""
        file, digest, published = copy.files[name], hashlib.sha256(), None
        with open(copy.folder / name, "wb", buffering=0) as to, contextlib.ExitStack() as stack:
            while file.received < file.expected.size:
                if copy.peers:
                    peer = copy.peers[0]
                    reply = self._poll(copy, name, file.received)
                    if reply is None:
                        continue
                    data = reply.data
                    self.peer_bytes += len(data)
                    if peer not in used:
                        used.append(peer)
                else:
                    self._check_open()
                    published = published or stack.enter_context(open_regular(Path(copy.version.path) / name))
                    published.seek(file.received)
                    data = published.read(min(CHUNK, file.expected.size - file.received))
                    self.shared_bytes += len(data)
                    if not data:
                        break
                to.write(data)
                digest.update(data)
                file.received += len(data)
        return digest.hexdigest()

    def _poll(self, copy: _Copy, name: str, offset: int) -> _Reply | None:
        """Polls the first peer until it sends bytes from ``offset`` on, or the path of the complete file.

        If the peer fails, stops using the peer for this copy and returns ``None``.
        """
        peer, progress, changed = copy.peers[0], "", time.monotonic()
        try:
            while True:
                self._check_open()
                reply = peer.request(copy.version.version, name, offset)
                if reply.data or reply.path:
                    return reply
                if reply.received != progress:
                    progress, changed = reply.received, time.monotonic()
                if time.monotonic() - changed > STALL_TIMEOUT_S:
                    raise PeerError(f"{peer.endpoint.server} receives no bytes")
        except PeerError as error:
            LOG.warning("weights %s: %s", copy.version.version, error)
            self._drop(copy, peer)
            return None

    def _check_open(self) -> None:
        if self._closed:
            raise OSError("the server is exiting")

    @staticmethod
    def _drop(copy: _Copy, peer: _Peer) -> None:
        peer.close()
        if peer in copy.peers:
            copy.peers.remove(peer)

    # --- replying ---

    async def reply(self, request: web.BaseRequest, serving: int) -> web.StreamResponse:
        """Replies to another server's request for a part of a file. The caller has checked the key.

        Args:
            serving: Version of the weights being served.
        """
        number, _, name = unquote(request.path.removeprefix(ROOT)).partition("/")
        offset = request.query.get("offset", "0")
        if not (number.isascii() and number.isdecimal() and offset.isascii() and offset.isdecimal()):
            return web.Response(status=400)
        copy = self._copies.get(int(number))
        if copy is None and int(number) > serving:
            await asyncio.to_thread(self._begin_requested, int(number))
            copy = self._copies.get(int(number))
        file = copy.files.get(name) if copy else None
        if copy is None or file is None:
            return web.Response(status=404)
        until, start = time.monotonic() + HOLD_S, int(offset)
        while file.received <= start and not copy.done.done() and time.monotonic() < until:
            await asyncio.sleep(POLL_INTERVAL_S)
        if copy.done.done() and not copy.complete:
            return web.Response(status=404)
        headers = {RECEIVED: str(sum(part.received for part in copy.files.values()))}
        if copy.done.done():
            headers[COMPLETE] = quote(str(copy.folder / name))
        elif self._replies >= MAX_REPLIES or file.received <= start:
            return web.Response(status=204, headers=headers)
        self._replies += 1
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                data = await asyncio.to_thread(_read, copy.folder / name, start, file.received)
                response = web.Response(body=data, headers=headers)
                await response.prepare(request)
                await response.write_eof()
                return response
        except OSError:  # removed or rewritten in the meantime, or the peer reads too slowly (TimeoutError)
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=404)
        finally:
            self._replies -= 1

    def _begin_requested(self, number: int) -> None:
        with contextlib.suppress(OSError):
            version = weights.version(self._run, number)
            if version is not None and version.policy == self._policy:
                self.begin(version, requested=True)


def _read(path: Path, start: int, end: int) -> bytes:
    with open_regular(path) as file:
        file.seek(start)
        return file.read(max(0, min(CHUNK, end - start)))
