"""A local server with the answers of the Hugging Face Hub and of a git host, and their faults."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

SHA = "0123456789abcdef0123456789abcdef01234567"


class Mirror(ThreadingHTTPServer):
    """Serves the files of one dataset at revision ``main``, which is commit :data:`SHA`."""

    daemon_threads = True

    def __init__(self, repo: str, files: Mapping[str, bytes], archives: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo, self.files, self.archives = repo, dict(files), dict(archives)
        self.requests: list[tuple[str, str | None, str | None]] = []
        """Path, ``Range`` and ``Authorization`` of each request."""
        self.break_after: list[int] = []
        """Number of bytes after which each of the next downloads breaks off."""
        self.status = 0
        """Status with which downloads are refused. 0 serves them."""
        self.wrong_digest = False
        self.per_page = 0
        """Number of entries per page of the listing. 0 lists all at once."""
        self.listing: bytes | None = None
        """Replaces the listing."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, page: int = 0) -> bytes | None:
        base = f"/api/datasets/{self.repo}"
        if path in (f"{base}/revision/main", f"{base}/revision/{SHA}"):
            return json.dumps({"id": self.repo, "sha": SHA, "gated": False}).encode()
        if path == f"{base}/tree/{SHA}":
            files = list(self.files.items())[page * self.per_page :][: self.per_page or None]
            return self.listing or json.dumps([self._entry(name, data) for name, data in files]).encode()
        resolve = f"/datasets/{self.repo}/resolve/{SHA}/"
        if path.startswith(resolve):
            return self.files.get(path[len(resolve) :])
        return self.archives.get(path)

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(b"other" if self.wrong_digest else data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "lfs": {"oid": digest, "size": len(data)}}


class _Handler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        path, page = unquote(path), int(query.partition("page=")[2] or 0)
        asked = self.headers.get("Range")
        self.server.requests.append((path, asked, self.headers.get("Authorization")))
        data, download = self.server.answer(path, page), not path.startswith("/api/")
        if data is None or (download and self.server.status):
            self.send_error(self.server.status or 404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if asked and start >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        if "/tree/" in path and 0 < (page + 1) * self.server.per_page < len(self.server.files):
            self.send_header("Link", f'<{self.server.url}{path}?recursive=true&page={page + 1}>; rel="next"')
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = len(data)
        if download and self.server.break_after:
            end = start + self.server.break_after.pop(0)
        self.wfile.write(data[start:end])
        self.close_connection = True

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def mirror(repo: str = "", files: Mapping[str, bytes] = {}, archives: Mapping[str, bytes] = {}) -> Iterator[Mirror]:
    """Runs a mirror for the body of the block."""
    with Mirror(repo, files, archives) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
