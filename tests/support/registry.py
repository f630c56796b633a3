"""A registry on the loopback: the reading half of the OCI distribution protocol, with one image of one layer."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Registry:
    """``name:tag`` answers with the files of ``tree``; ``asked`` are the paths of all requests."""

    def __init__(self, tree: Path, name: str, tag: str) -> None:
        self.name, self.asked = name, list[str]()
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w") as archive:
            archive.add(tree, ".")
        layer = gzip.compress(plain.getvalue(), 1)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["FROM_REGISTRY=yes", "PATH=/usr/bin:/bin"], "Cmd": ["/bin/sh"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(plain.getvalue())]},
        }
        self.blobs = {_digest(data): data for data in (layer, json.dumps(config).encode())}
        described = [{"digest": digest, "size": len(data)} for digest, data in self.blobs.items()]
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **described[1]},
                "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", **described[0]}],
            }
        ).encode()
        self.manifests = {tag: manifest, _digest(manifest): manifest}

    def answer(self, path: str) -> tuple[str, bytes] | None:
        self.asked.append(path)
        if path == "/v2/":
            return "application/json", b"{}"
        for kind, found, media in (
            ("manifests", self.manifests, MANIFEST),
            ("blobs", self.blobs, "application/octet-stream"),
        ):
            prefix = f"/v2/{self.name}/{kind}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in found:
                return media, found[path.removeprefix(prefix)]
        return None


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@contextmanager
def serving(registry: Registry) -> Iterator[str]:
    """``127.0.0.1:PORT`` where it answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = registry.answer(self.path)
            self.send_response(200 if found else 404)
            media, body = found or ("application/json", b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')
            self.send_header("Content-Type", media)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Content-Digest", _digest(body))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
