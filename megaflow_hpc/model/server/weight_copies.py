"""Copies weight versions to this node. The servers of a policy pass them on, so one of them reads the shared files.

::

    shared file system ──► first server's node ──► second node ──► fourth node, fifth node
                              │                └─► third node  ──► …
                              └─► the node's other servers, as hard links

The order follows from the list of live servers alone (:func:`sources`): a server asks servers with lower numbers, so
none waits in a circle. It asks for ranges of a file (``GET /weights/<version>/<file>?offset=<n>``) with the key of the
endpoint file. The asked server answers with bytes that it has received itself, so all nodes copy at nearly the same
time. If it has not noticed the version, the question tells it.

Each file is compared with the checksum that its publisher wrote. A server that does not answer, is slow, or delivers
wrong bytes is not asked again for this version. The next one is asked, and in the end the shared file system is read.
Files that the version before had too are linked. A server without peers copies nothing.
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
"""Nodes that copy from one node."""
CHUNK = 2**22
"""Bytes of one answer. The event loop that encrypts it also serves the engine's requests."""
MAX_ANSWERS = 4
"""Answers with bytes that a server sends at a time. Further questions are answered with "not yet"."""
HOLD_S = 1.0
"""Seconds for which a question waits for new bytes."""
ANSWER_S = 10.0
"""Seconds in which an answer must be complete, so a peer that is slower than 0.4 MB/s is given up."""
PATIENCE_S = 60.0
"""Seconds without new bytes after which a peer is given up, although it answers "not yet"."""
POLL_S = 0.01
COMPLETE, RECEIVED = "X-Megaflow-Path", "X-Megaflow-Received"
"""Response headers: the path of a file whose version is complete, and the bytes of the version received so far."""


class _Answer(NamedTuple):
    data: bytes
    path: str
    """Path of the complete file on the peer's node. Empty until the version is complete there."""
    received: str
    """Changes as long as the peer receives bytes."""


def sources(servers: Sequence[Endpoint], own: Endpoint) -> list[Endpoint]:
    """Returns the servers that a server asks for files, in this order. Empty if it reads the shared file system.

    The first server of each node asks the first server of another node. These form a tree of :data:`FAN_OUT`. The
    others ask the first of their node. If a server does not answer, those that it would ask are next.

    Args:
        servers: Live servers of the policy.
        own: The server itself. Only its name and node are used.
    """
    order = sorted([own, *(s for s in servers if s.server != own.server)], key=lambda s: number_of(s.server))
    heads: dict[str, Endpoint] = {}
    for server in order:
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
    """A connection to another server's proxy, for one thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, url = endpoint, urlsplit(endpoint.url)
        self._connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=ANSWER_S)
        if endpoint.tls_fingerprint:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint is compared instead
            self._connection = http.client.HTTPSConnection(
                url.hostname or "", url.port, timeout=ANSWER_S, context=context
            )

    def close(self) -> None:
        self._connection.close()

    def ask(self, version: int, name: str, offset: int) -> _Answer:
        """Asks for the bytes of a file from ``offset``. There may be none yet.

        Raises:
            PeerError: The peer does not answer, is slow, or does not have the version.
        """
        path = f"{ROOT}{version}/{quote(name)}?offset={offset}"
        try:
            if self._connection.sock is None:
                self._connect()
            until = time.monotonic() + ANSWER_S
            self._connection.request("GET", path, headers={"Authorization": f"Bearer {self.endpoint.key}"})
            response = self._connection.getresponse()
            data = bytearray()
            while len(data) <= CHUNK and (part := response.read1(CHUNK)):
                data += part
                if time.monotonic() > until:
                    raise PeerError(f"{self.endpoint.server} is slow")
            response.close()  # read1 leaves it open, and the connection could not be used again
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"{self.endpoint.server}: {type(error).__name__}") from error
        if response.status not in (200, 204) or len(data) > CHUNK:
            raise PeerError(f"{self.endpoint.server}: HTTP {response.status}")
        return _Answer(bytes(data), unquote(response.headers.get(COMPLETE, "")), response.headers.get(RECEIVED, ""))

    def _connect(self) -> None:
        """Connects, and checks the certificate before the key is sent."""
        self._connection.connect()
        if isinstance(self._connection.sock, ssl.SSLSocket):
            digest = hashlib.sha256(self._connection.sock.getpeercert(binary_form=True) or b"").hexdigest()
            if not hmac.compare_digest(digest, self.endpoint.tls_fingerprint):
                self.close()
                raise PeerError(f"{self.endpoint.server}: another certificate than in its endpoint file")


@dataclass
class _File:
    expected: Checksum
    received: int = 0
    """Bytes in the copy. Its writer is the only thread that changes it."""


@dataclass
class _Copy:
    """One version on this node."""

    version: Version
    folder: Path
    files: dict[str, _File]
    peers: list[_Peer]
    done: Future[bool] = field(default_factory=Future)
    """True if the copy is complete, False if the disk failed."""

    @property
    def complete(self) -> bool:
        return self.done.done() and self.done.exception() is None and self.done.result()


class WeightCopies:
    """The weight versions that one server has on its node's local disk.

    Args:
        run: The campaign's run directory.
        server: Name of this server.
        policy: The policy that it serves.
        listed: Returns the live servers of the policy. Raises OSError.
    """

    def __init__(self, run: RunDir, server: str, policy: str, listed: Callable[[], Sequence[Endpoint]]) -> None:
        self._run, self._policy, self._listed = run, policy, listed
        self._own = Endpoint(server=server, policy=policy, url="", node=node_name())
        self.scratch = Path()
        """Node-local directory of this server."""
        self.shared_bytes = 0
        """Bytes read from the shared file system."""
        self.peer_bytes = 0
        """Bytes received from other servers."""
        self._copies: dict[int, _Copy] = {}
        self._lock = threading.Lock()
        self._answers = 0
        self._closed = False

    def close(self) -> None:
        """Ends copying soon."""
        self._closed = True

    def begin(self, version: Version, asked: bool = False) -> None:
        """Begins to copy a version in the background, if another server may need it. Idempotent.

        Args:
            asked: True if another server asked for it.
        """
        with self._lock, contextlib.suppress(OSError, ValueError):  # unreadable: the engine will report it
            if version.version in self._copies or not version.path:
                return
            servers = self._listed()
            if not asked and all(server.server == self._own.server for server in servers):
                return
            files = {name: _File(expected) for name, expected in read_checksums(Path(version.path)).items()}
            if not files or not self._fits(sum(file.expected.size for file in files.values())):
                return
            peers = [_Peer(peer) for peer in sources(servers, self._own)]
            copy = _Copy(version, self.scratch / f"copy-{version.version}", files, peers)
            self._copies[version.version] = copy
            threading.Thread(target=self._copy, args=(copy,), name="weights", daemon=True).start()

    def local(self, version: Version) -> Path:
        """Returns a directory with the version's files. Waits for the copy. Without a copy, it is the published one.

        Raises:
            ModelServiceError: The published files differ from their checksums.
        """
        self.begin(version)
        copy = self._copies.get(version.version)
        return copy.folder if copy is not None and copy.done.result() else Path(version.path)

    def keep(self, numbers: set[int]) -> None:
        """Removes the copies of all other versions, except those that are being written."""
        with self._lock:
            old = [n for n, copy in self._copies.items() if n not in numbers and copy.done.done()]
            folders = [self._copies.pop(number).folder for number in old]
        for folder in folders:
            remove_tree(folder, ignore_errors=True)

    # --- copying ---

    def _fits(self, size: int) -> bool:
        """Returns whether scratch has room for two versions. On a file system in memory, memory must be available."""
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
                if not self._reuse(copy, name):
                    self._receive(copy, name)
            copy.done.set_result(True)
        except OSError:  # such as a full disk: the engine reads the published files
            copy.done.set_result(False)
        except BaseException as error:
            copy.done.set_exception(error)
        finally:
            for peer in copy.peers:
                peer.close()

    def _reuse(self, copy: _Copy, name: str) -> bool:
        """Links a file that another version on this node has too, such as a tokenizer. Returns whether it has."""
        file = copy.files[name]
        for other in list(self._copies.values()):
            if other.complete and name in other.files and other.files[name].expected == file.expected:
                with contextlib.suppress(OSError):  # removed meanwhile
                    os.link(other.folder / name, copy.folder / name)
                    file.received = file.expected.size
                    return True
        return False

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
                raise ModelServiceError(f"{copy.version.path}/{name}: differs from what was published (its SHA-256)")
            for peer in used:
                self._drop(copy, peer)

    def _link(self, copy: _Copy, name: str, used: list[_Peer]) -> str:
        """Makes the file a hard link to a copy on this node. Returns its SHA-256, or an empty string without a copy."""
        file, path = copy.files[name], copy.folder / name
        while copy.peers and (peer := copy.peers[0]).endpoint.node == self._own.node:
            if answer := self._ask(copy, name, file.expected.size):
                try:
                    os.link(answer.path, path)
                    file.received = path.stat().st_size
                    used.append(peer)
                    return checksum(path).sha256
                except OSError:  # not the same file system, or other /tmp
                    path.unlink(missing_ok=True)
                    return ""
        return ""

    def _write(self, copy: _Copy, name: str, used: list[_Peer]) -> str:
        """Writes one file, from several peers if one ends meanwhile, and returns its SHA-256."""
        file, digest, published = copy.files[name], hashlib.sha256(), None
        with open(copy.folder / name, "wb", buffering=0) as to, contextlib.ExitStack() as stack:
            while file.received < file.expected.size:
                if copy.peers:
                    peer = copy.peers[0]
                    answer = self._ask(copy, name, file.received)
                    if answer is None:
                        continue
                    data = answer.data
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

    def _ask(self, copy: _Copy, name: str, offset: int) -> _Answer | None:
        """Asks the first peer until it has bytes after ``offset``, or the complete file. ``None`` if it fails; then it
        is no longer a peer of this copy."""
        peer, progress, changed = copy.peers[0], "", time.monotonic()
        try:
            while True:
                self._check_open()
                answer = peer.ask(copy.version.version, name, offset)
                if answer.data or answer.path:
                    return answer
                if answer.received != progress:
                    progress, changed = answer.received, time.monotonic()
                if time.monotonic() - changed > PATIENCE_S:
                    raise PeerError(f"{peer.endpoint.server} receives no bytes")
        except PeerError as error:
            LOG.warning("weights %s: %s", copy.version.version, error)
            self._drop(copy, peer)
            return None

    def _check_open(self) -> None:
        if self._closed:
            raise OSError("the server is leaving")

    @staticmethod
    def _drop(copy: _Copy, peer: _Peer) -> None:
        peer.close()
        if peer in copy.peers:
            copy.peers.remove(peer)

    # --- answering ---

    async def answer(self, request: web.BaseRequest, serving: int) -> web.StreamResponse:
        """Answers another server's question for a part of a file. The caller has checked the key.

        Args:
            serving: Version of the weights being served.
        """
        number, _, name = unquote(request.path.removeprefix(ROOT)).partition("/")
        offset = request.query.get("offset", "0")
        if not (number.isascii() and number.isdecimal() and offset.isascii() and offset.isdecimal()):
            return web.Response(status=400)
        copy = self._copies.get(int(number))
        if copy is None and int(number) > serving:
            await asyncio.to_thread(self._asked, int(number))
            copy = self._copies.get(int(number))
        file = copy.files.get(name) if copy else None
        if copy is None or file is None:
            return web.Response(status=404)
        until, start = time.monotonic() + HOLD_S, int(offset)
        while file.received <= start and not copy.done.done() and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
        if copy.done.done() and not copy.complete:
            return web.Response(status=404)
        headers = {RECEIVED: str(sum(part.received for part in copy.files.values()))}
        if copy.done.done():
            headers[COMPLETE] = quote(str(copy.folder / name))
        elif self._answers >= MAX_ANSWERS or file.received <= start:
            return web.Response(status=204, headers=headers)
        self._answers += 1
        try:
            async with asyncio.timeout(ANSWER_S):
                data = await asyncio.to_thread(_read, copy.folder / name, start, file.received)
                response = web.Response(body=data, headers=headers)
                await response.prepare(request)
                await response.write_eof()
                return response
        except OSError:  # removed or rewritten meanwhile, or the peer reads too slowly (TimeoutError)
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=404)
        finally:
            self._answers -= 1

    def _asked(self, number: int) -> None:
        with contextlib.suppress(OSError):
            version = weights.version(self._run, number)
            if version is not None and version.policy == self._policy:
                self.begin(version, asked=True)


def _read(path: Path, start: int, end: int) -> bytes:
    with open_regular(path) as file:
        file.seek(start)
        return file.read(max(0, min(CHUNK, end - start)))
