"""Layers of a store, each stored once for all images, and the build steps that produced them.

::

    STORE/
      layers/<digest>  <digest>.json    an immutable layer blob and its sizes
      steps/<key>.json                  hash of a build step's inputs → its layer; empty if it changed no file

Layers of other stores are not copied. If an image in the user's own store needs one, it is symlinked.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from megaflow_hpc.environments.images.atomic_files import link_record, locked, read_record, work_directory, write_record
from megaflow_hpc.environments.images.layers.blob import LayerFacts, measure
from megaflow_hpc.errors import SandboxError, SiteError

_DIGEST = re.compile(r"[0-9a-f]{64}")


class LayerStore:
    """Layers in the stores ``roots``. New layers go to the first store."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self.root = roots[0]
        self.added_bytes = 0
        """Total size of the blobs added through this object."""
        self._guard = threading.Lock()

    # --- reading ------------------------------------------------------------------------------------------------

    def find(self, digest: str) -> LayerFacts | None:
        """Returns the facts of a layer, or ``None`` if no store has it."""
        located = self._locate(digest)
        return located[1] if located else None

    def path(self, digest: str) -> Path:
        """Returns the path of a layer's blob. Raises :class:`SiteError` if no store has it."""
        located = self._locate(digest)
        if located is None:
            raise SiteError(
                f"{digest}: no such layer in {', '.join(map(str, self.roots))}; build or pull its image again"
            )
        return located[0]

    def _locate(self, digest: str) -> tuple[Path, LayerFacts] | None:
        if not _DIGEST.fullmatch(digest):
            return None
        for root in self.roots:
            path = root / "layers" / digest
            record = read_record(path.with_name(f"{digest}.json"))
            with suppress(OSError, KeyError, TypeError, ValueError):
                if record and path.stat().st_size == record["bytes"]:
                    sizes = [int(record[name]) for name in ("bytes", "unpacked_bytes", "inodes")]
                    return path, LayerFacts(digest, *sizes)
        return None

    def step(self, key: str) -> LayerFacts | None:
        """Returns the layer that a build step produced, or ``None`` if the step changed no file.

        Raises:
            KeyError: The step is not recorded, or its layer no longer exists.
        """
        for root in self.roots:
            record = read_record(root / "steps" / f"{key}.json")
            if record is None:
                continue
            digest = str(record.get("layer") or "")
            if not digest:
                return None
            if facts := self.find(digest):
                return facts
        raise KeyError(key)

    def layers(self) -> Iterator[LayerFacts]:
        """Yields every layer of the first store."""
        for path in sorted((self.root / "layers").glob("*.json")):
            if facts := self.find(path.stem):
                yield facts

    # --- writing ------------------------------------------------------------------------------------------------

    @contextmanager
    def making(self, key: str) -> Iterator[Path]:
        """Locks a step and yields a directory in the store for building its layer. Removes the directory on exit."""
        with locked(self.root / "work" / f"{key}.lock"), work_directory(self.root / "work", key) as directory:
            yield directory

    def add(self, file: Path, facts: LayerFacts) -> LayerFacts:
        """Moves a finished blob into the store. ``file`` must be on the store's file system."""
        final = self.root / "layers" / facts.digest
        file.chmod(0o444)
        record = asdict(facts)
        del record["digest"]
        write_record(final.with_name(f"{facts.digest}.json"), record)
        os.rename(file, final)
        with self._guard:
            self.added_bytes += facts.bytes
        return facts

    def take(self, digest: str, pieces: Iterable[bytes]) -> LayerFacts:
        """Stores a blob that arrives in chunks, after verifying that its digest is ``digest``.

        Raises:
            SiteError: The digest differs, or the blob is not a layer. Nothing is stored.
        """
        with work_directory(self.root / "work", "take") as directory:
            file = directory / "layer"
            with open(file, "wb") as writer:
                try:
                    facts = measure(_copied(pieces, writer), digest)
                except SandboxError as error:
                    raise SiteError(str(error)) from error
                writer.flush()
                os.fsync(writer.fileno())
            return self.add(file, facts)

    def record_step(self, key: str, layer: LayerFacts | None, source: str) -> None:
        """Records the layer that a step produced, or ``None`` if it changed no file."""
        write_record(self.root / "steps" / f"{key}.json", {"layer": layer.digest if layer else "", "source": source})

    def adopt(self, digest: str) -> None:
        """Makes a layer available in the first store, as a symlink if only another store has it."""
        path = self.path(digest)
        own = self.root / "layers" / digest
        if path != own:
            link_record(own, path)

    def remove(self, digest: str) -> int:
        """Removes a layer from the first store. Returns the number of bytes freed."""
        path = self.root / "layers" / digest
        try:
            size = path.lstat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        path.with_name(f"{digest}.json").unlink(missing_ok=True)
        return size

    def tidy(self, older_s: float) -> None:
        """Removes dangling links, records older than ``older_s`` without a blob, and steps whose layer is missing."""
        directory = self.root / "layers"
        before = time.time() - older_s
        for path in directory.iterdir() if directory.is_dir() else ():
            blob = path.with_suffix("")
            with suppress(FileNotFoundError):
                is_dangling = blob.is_symlink() and not blob.exists()
                # Records are written before blobs are moved, so a recent record may not have its blob yet.
                is_abandoned = not os.path.lexists(blob) and path.stat().st_mtime < before
                if is_dangling or is_abandoned:
                    path.unlink()
        for path in (self.root / "steps").glob("*.json"):
            record = read_record(path)
            digest = str(record.get("layer") or "") if record is not None else "unreadable"
            if digest and self.find(digest) is None:
                path.unlink(missing_ok=True)


def _copied(pieces: Iterable[bytes], writer: BinaryIO) -> Iterator[bytes]:
    """Writes each piece and yields it."""
    for piece in pieces:
        writer.write(piece)
        yield piece
