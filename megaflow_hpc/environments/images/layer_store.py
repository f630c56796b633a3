"""The layers of a store, each once whatever images share it, and which step made which.

::

    STORE/
      layers/<digest>  <digest>.json    a layer's blob, never changed once there, and its sizes
      steps/<key>.json                  a step, by what goes into it → its layer; without one, it changes no file

A layer that another store has is not copied: where an image of one's own store needs it, a symbolic link leads there.
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

from megaflow_hpc.environments.images.atomic_files import link_record, locked, read_record, workplace, write_record
from megaflow_hpc.environments.images.layers.blob import MAX_LAYER_BYTES, LayerFacts, measure
from megaflow_hpc.errors import SandboxError, SiteError

_DIGEST = re.compile(r"[0-9a-f]{64}")


class LayerStore:
    """The layers of ``roots``, the first of which is written to."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self.root = roots[0]
        self.added_bytes = 0
        """Of blobs that were taken in here."""
        self._guard = threading.Lock()

    # --- reading ------------------------------------------------------------------------------------------------

    def find(self, digest: str) -> LayerFacts | None:
        """Returns the facts of a layer that some store has."""
        return self._found(digest)[1]

    def path(self, digest: str) -> Path:
        """Returns where a layer's blob is; raises :class:`SiteError` if no store has it."""
        path, _ = self._found(digest)
        if path is None:
            raise SiteError(
                f"{digest}: no such layer in {', '.join(map(str, self.roots))}; build or pull its image again"
            )
        return path

    def _found(self, digest: str) -> tuple[Path | None, LayerFacts | None]:
        if not _DIGEST.fullmatch(digest):
            return None, None
        for root in self.roots:
            path = root / "layers" / digest
            note = read_record(path.with_name(f"{digest}.json"))
            with suppress(OSError, KeyError, TypeError, ValueError):
                if note and path.stat().st_size == note["bytes"]:
                    facts = LayerFacts(digest, *(int(note[name]) for name in ("bytes", "unpacked_bytes", "inodes")))
                    return path, facts
        return None, None

    def step(self, key: str) -> tuple[LayerFacts | None] | None:
        """Returns the layer that a step has made before, ``(None,)`` if it changed nothing, ``None`` if it was not."""
        for root in self.roots:
            if note := read_record(root / "steps" / f"{key}.json"):
                digest = str(note.get("layer") or "")
                facts = self.find(digest) if digest else None
                if facts is not None or not digest:
                    return (facts,)
        return None

    def layers(self) -> Iterator[LayerFacts]:
        """Yields every layer of the store that is written to."""
        for path in sorted((self.root / "layers").glob("*.json")):
            if facts := self._found(path.stem)[1]:
                yield facts

    # --- writing ------------------------------------------------------------------------------------------------

    @contextmanager
    def making(self, key: str) -> Iterator[Path]:
        """Holds a step's lock and yields a directory of the store to make its layer in; removes it at the end."""
        with locked(self.root / "work" / f"{key}.lock"), workplace(self.root / "work", key) as place:
            yield place

    def add(self, file: Path, facts: LayerFacts) -> LayerFacts:
        """Takes a finished blob, a file on the store's own file system, in; it is moved."""
        final = self.root / "layers" / facts.digest
        file.chmod(0o444)
        note = {name: value for name, value in asdict(facts).items() if name != "digest"}
        write_record(final.with_name(f"{facts.digest}.json"), note)
        os.rename(file, final)
        with self._guard:
            self.added_bytes += facts.bytes
        return facts

    def take(self, digest: str, pieces: Iterable[bytes]) -> LayerFacts:
        """Writes a blob that arrives in pieces, and takes it in if it is the one of ``digest``.

        Raises:
            SiteError: it is not, or is no layer; nothing is left.
        """
        with workplace(self.root / "work", "take") as place:
            file = place / "layer"
            with open(file, "wb") as writer:
                try:
                    facts = measure(_Kept(pieces, writer), digest)  # type: ignore[arg-type]
                except SandboxError as error:
                    raise SiteError(str(error)) from error
                writer.flush()
                os.fsync(writer.fileno())
            return self.add(file, facts)

    def note_step(self, key: str, layer: LayerFacts | None, source: str) -> None:
        """Records which layer a step made; ``None``: it changed nothing."""
        write_record(self.root / "steps" / f"{key}.json", {"layer": layer.digest if layer else "", "source": source})

    def adopt(self, digest: str) -> None:
        """Has a layer in the store that is written to, by a link where another store has it."""
        path = self.path(digest)
        own = self.root / "layers" / digest
        if path != own:
            link_record(own, path)

    def remove(self, digest: str) -> int:
        """Takes a layer out of the store that is written to; returns the bytes that were freed."""
        path = self.root / "layers" / digest
        try:
            found = path.lstat()
            path.unlink()
        except FileNotFoundError:
            return 0
        path.with_name(f"{digest}.json").unlink(missing_ok=True)
        return found.st_size

    def tidy(self, older_s: float) -> None:
        """Removes links that lead nowhere, and notes that were written before a layer which never came."""
        before = time.time() - older_s
        for path in (self.root / "layers").iterdir() if (self.root / "layers").is_dir() else ():
            blob = path.with_suffix("")
            with suppress(FileNotFoundError):
                if (blob.is_symlink() and not blob.exists()) or (
                    not os.path.lexists(blob) and path.stat().st_mtime < before
                ):
                    path.unlink()

    def forget_steps(self) -> int:
        """Removes the notes of steps whose layers are gone; returns how many."""
        count = 0
        for path in (self.root / "steps").glob("*.json"):
            note = read_record(path) or {"layer": "?"}
            if note.get("layer") and not self.find(str(note["layer"])):
                path.unlink(missing_ok=True)
                count += 1
        return count


class _Kept:
    """Pieces of a blob to be read one after the other, each written down as it is."""

    def __init__(self, pieces: Iterable[bytes], writer: BinaryIO) -> None:
        self._pieces = filter(None, pieces)
        self._writer = writer
        self._left = MAX_LAYER_BYTES

    def read(self, size: int) -> bytes:
        """Returns the next piece, however long; nothing at the end."""
        piece = next(self._pieces, b"")
        self._left -= len(piece)
        if self._left < 0:
            raise SiteError(f"more than {MAX_LAYER_BYTES} bytes in one layer")
        self._writer.write(piece)
        return piece
