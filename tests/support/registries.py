"""Debian's registry on the loopback, images to push to it, and a proxy that counts requests and can misbehave."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import json
import ssl
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import zstandard

from megaflow_hpc.host.address import free_port
from tests.support.waiting import until

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
COMPRESSED: Mapping[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    "gzip": lambda data: gzip.compress(data, 1, mtime=0),
    "zstd": lambda data: zstandard.compress(data, 1),
}


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def noise(name: str, size: int = 100_000) -> bytes:
    """Return bytes that do not compress; always the same for one name."""
    return hashlib.shake_128(name.encode()).digest(size)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer to push: its blob and the archive in the blob."""

    archive: bytes = field(repr=False)
    compression: str = "gzip"

    @cached_property
    def blob(self) -> bytes:
        return COMPRESSED[self.compression](self.archive)

    @cached_property
    def digest(self) -> str:
        """The blob's digest in hexadecimal."""
        return hashlib.sha256(self.blob).hexdigest()

    @cached_property
    def archive_digest(self) -> str:
        return digest_of(self.archive)


def layer(files: Mapping[str, bytes], compression: str = "gzip") -> Layer:
    """Return a layer of these files. The same files give the same layer."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(content), 0o644, 1
            archive.addfile(entry, io.BytesIO(content))
    return Layer(plain.getvalue(), compression)


def tree_layer(tree: Path, compression: str = "gzip") -> Layer:
    """Return a layer of a directory's files."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        archive.add(tree, ".")
    return Layer(plain.getvalue(), compression)


@dataclass
class Registry:
    """A running registry. ``authorization`` is the header with which tests push."""

    address: str
    authorization: str = ""

    def call(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        host, _, port = self.address.partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        try:
            words = {name.replace("_", "-"): value for name, value in headers.items()}
            words |= {"Authorization": self.authorization} if self.authorization else {}
            connection.request(method, path, body, words)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            connection.close()

    def push_blob(self, repository: str, data: bytes, digest: str) -> None:
        """Push a blob unless the registry has it."""
        if self.call("HEAD", f"/v2/{repository}/blobs/{digest}")[0] != 200:
            status, headers, body = self.call("POST", f"/v2/{repository}/blobs/uploads/")
            assert status == 202, body
            location = headers["Location"].removeprefix(f"http://{self.address}")
            joined = "&" if "?" in location else "?"
            put = f"{location}{joined}digest={digest}"
            status, _, body = self.call("PUT", put, data, Content_Type="application/octet-stream")
            assert status == 201, body

    def push_manifest(self, repository: str, tag: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Push a manifest or an index; return its descriptor."""
        data = json.dumps(manifest).encode()
        media_type = manifest["mediaType"]
        status, _, body = self.call("PUT", f"/v2/{repository}/manifests/{tag}", data, Content_Type=media_type)
        assert status == 201, body
        return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}

    def push(self, repository: str, tag: str, layers: list[Layer], **config: Any) -> dict[str, Any]:
        """Push an image, the lowest layer first; return the descriptor of its manifest.

        ``config`` are entries of its configuration except ``architecture``.
        """
        architecture = config.pop("architecture", "amd64")
        for each in layers:
            self.push_blob(repository, each.blob, f"sha256:{each.digest}")
        described = {
            "architecture": architecture,
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [each.archive_digest for each in layers]},
        }
        data = json.dumps(described).encode()
        self.push_blob(repository, data, digest_of(data))
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": digest_of(data), "size": len(data)},
            "layers": [
                {
                    "mediaType": f"{LAYER}+{each.compression}".removesuffix("+"),
                    "digest": f"sha256:{each.digest}",
                    "size": len(each.blob),
                }
                for each in layers
            ],
        }
        return self.push_manifest(repository, tag, manifest)


@contextmanager
def registry_server(program: Path, folder: Path, auth: Mapping[str, Any] | None = None) -> Iterator[Registry]:
    """Run the registry on its own folder. ``auth`` has the form of the registry's configuration file."""
    registry = Registry(f"127.0.0.1:{free_port()}")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "version": "0.1",
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": registry.address},
        **({"auth": auth} if auth else {}),
    }
    (folder / "config.json").write_text(json.dumps(settings))  # JSON is also YAML
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen([str(program), "serve", str(folder / "config.json")], stdout=log, stderr=log)
    try:

        def answers() -> bool:
            assert server.poll() is None, (folder / "log").read_text()
            try:
                return registry.call("GET", "/v2/")[0] in (200, 401)
            except OSError:
                return False

        until(answers, "the registry answers", 30, 0.05)
        yield registry
    finally:
        server.kill()
        server.wait()


Answer = Callable[[BaseHTTPRequestHandler], object]


class Front:
    """Forward and record all requests to a server, except those for paths with an ending in ``rules``.

    ``asked`` has the path and ``Authorization`` of every request, in order.
    """

    def __init__(self, behind: str) -> None:
        self.behind = behind
        self.address = ""
        self.asked: list[tuple[str, str | None]] = []
        self.rules: dict[str, Answer] = {}

    def blobs(self) -> list[str]:
        """The digests, in hexadecimal, of the requested blobs."""
        return [path.rpartition("sha256:")[2] for path, _ in self.asked if "/blobs/" in path]

    def answer(self, handler: BaseHTTPRequestHandler) -> object:
        self.asked.append((handler.path, handler.headers.get("Authorization")))
        for end, rule in self.rules.items():
            if handler.path.endswith(end):
                return rule(handler)
        return self.passed_on(handler) if self.behind else says(404)(handler)

    def passed_on(self, handler: BaseHTTPRequestHandler, most: int | None = None) -> None:
        """Forward the server's answer, cut after this number of bytes of the body."""
        host, _, port = self.behind.partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        try:
            connection.request(handler.command, handler.path, headers=dict(handler.headers))
            found = connection.getresponse()
            handler.send_response(found.status)
            for name, value in found.getheaders():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(found.read()[:most])
            handler.close_connection = True
        finally:
            connection.close()


@contextmanager
def front(behind: str = "", certificate: Path | None = None) -> Iterator[Front]:
    """Run a proxy at ``address``. Without a server behind it, only its rules answer.

    ``certificate`` is a file with a key and a certificate, for TLS.
    """
    found = Front(behind)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.answer(self)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    found.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def says(status: int, body: bytes = b"", **headers: str) -> Answer:
    """Return a rule with a complete answer."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def endless(handler: BaseHTTPRequestHandler) -> None:
    """Return a rule that sends zeros until the client disconnects."""
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(bytes(1 << 16))
    except OSError:
        handler.close_connection = True
