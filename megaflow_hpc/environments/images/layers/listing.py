"""What a layer or an image holds, listed without being unpacked: of a blob, of a SIF's squashfs.

A listing is made once for each layer and kept while its maker lives; it holds some 200 bytes for each file.
"""

from __future__ import annotations

import calendar
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias, Union

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.layers.blob import LayerStream
from megaflow_hpc.environments.images.layers.merging import DELETED, OPAQUE_MARK
from megaflow_hpc.environments.images.layers.packing import Attributes
from megaflow_hpc.environments.images.layers.view import HIDDEN, ViewEntry
from megaflow_hpc.errors import SandboxError, SiteError
from megaflow_hpc.host.apptainer import clean_environment
from megaflow_hpc.host.child import dies_with_parent
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.tar import RefusedMember, TarReader
from megaflow_hpc.host.unpack import plain

_Node: TypeAlias = dict[str, Union[ViewEntry, "_Node"]]
_SELF = ""
_KINDS = {"-": stat.S_IFREG, "d": stat.S_IFDIR, "l": stat.S_IFLNK, "p": stat.S_IFIFO, "s": stat.S_IFSOCK}
_MEMBERS = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "symlink": stat.S_IFLNK, "fifo": stat.S_IFIFO}
_IMPLICIT = ViewEntry(stat.S_IFDIR, Attributes(0o755))
_LINE = re.compile(r"(\S)(\S{9}) (\d+)/(\d+) +(?:\d+|\d+, *\d+) (\S+ \S+) squashfs-root(.*)", re.DOTALL)


class LayerListing:
    """A layer by what was noted of it; see :class:`.view.Layer`.

    Args:
        reader: reads the beginning of a file from the layer itself.
    """

    def __init__(self, reader: Callable[[str, int], bytes]) -> None:
        self._root: _Node = {_SELF: _IMPLICIT}
        self._reader = reader

    def add(self, path: str, entry: ViewEntry) -> None:
        """Notes an entry; what is above it is a directory, if nothing else is known of it."""
        node = self._root
        parts = [part for part in path.split("/") if part]
        for part in parts[:-1]:
            below = node.get(part)
            if not isinstance(below, dict):
                below = node[part] = {_SELF: _IMPLICIT}
            node = below
        if not parts:
            node[_SELF] = entry
        elif entry.is_directory:
            known = node.get(parts[-1])
            node[parts[-1]] = (known if isinstance(known, dict) else {}) | {_SELF: entry}
        else:
            node[parts[-1]] = entry

    def entry(self, path: str) -> ViewEntry | None:
        """See :class:`.view.Layer`."""
        found = self._at(path)
        if isinstance(found, dict):
            own = found[_SELF]
            assert isinstance(own, ViewEntry)
            return own
        return found

    def names(self, path: str) -> Iterator[str]:
        """See :class:`.view.Layer`."""
        found = self._at(path)
        if isinstance(found, dict):
            yield from (name for name in found if name != _SELF)

    def read(self, path: str, limit: int) -> bytes:
        """See :class:`.view.Layer`."""
        return self._reader(path, limit)

    def _at(self, path: str) -> ViewEntry | _Node | None:
        node: ViewEntry | _Node | None = self._root
        for part in path.split("/") if path else ():
            if not isinstance(node, dict):
                return None
            node = node.get(part)
        return node


def of_blob(blob: str | os.PathLike[str]) -> LayerListing:
    """Lists a layer; raises :class:`SandboxError` for what is none."""
    listing = LayerListing(lambda path, limit: _read_blob(blob, path, limit))
    opaque = []
    with open(blob, "rb", buffering=0) as file:
        try:
            for member in TarReader(LayerStream(file)):  # type: ignore[arg-type]
                parts = [os.fsdecode(part) for part in plain(member.name)]
                path = "/".join(parts)
                attributes = Attributes(member.mode, member.uid, member.gid, member.mtime)
                if parts and parts[-1] == OPAQUE_MARK:
                    opaque.append("/".join(parts[:-1]))
                elif parts and parts[-1].startswith(DELETED):
                    listing.add("/".join([*parts[:-1], parts[-1].removeprefix(DELETED)]), HIDDEN)
                elif member.kind == "hardlink":
                    known = listing.entry("/".join(os.fsdecode(part) for part in plain(member.target)))
                    listing.add(path, known or ViewEntry(stat.S_IFREG, attributes))
                elif member.kind in _MEMBERS:
                    listing.add(path, ViewEntry(_MEMBERS[member.kind], attributes, os.fsdecode(member.target)))
        except RefusedMember as error:
            raise SandboxError(f"{os.fspath(blob)}: not a layer of an image: {error}") from error
    for path in opaque:
        known = listing.entry(path) or _IMPLICIT
        listing.add(path, ViewEntry(stat.S_IFDIR, known.attributes, opaque=True))
    return listing


def _read_blob(blob: str | os.PathLike[str], path: str, limit: int) -> bytes:
    with suppress(OSError, RefusedMember), open(blob, "rb", buffering=0) as file:
        reader = TarReader(LayerStream(file))  # type: ignore[arg-type]
        for member in reader:
            if member.kind == "file" and b"/".join(plain(member.name)) == os.fsencode(path):
                return b"".join(reader.content())[:limit] if member.size <= limit else b""
    return b""


def of_sif(image: str) -> LayerListing:
    """Lists a SIF's files by ``unsquashfs``.

    Raises:
        SandboxError: it is no SIF, or cannot be listed.
        SiteError: the program is missing.
    """
    program = shutil.which("unsquashfs")
    if program is None:
        raise SiteError("unsquashfs: not on PATH, which images are looked into with; install squashfs-tools")
    offset = str(sif.system_partition(image).offset)
    listing = LayerListing(lambda path, limit: _read_sif(str(program), image, offset, path, limit))
    done = subprocess.run(
        [*dies_with_parent(), program, "-o", offset, "-lln", image],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "TZ": "UTC"},
        check=False,
    )
    if done.returncode:
        raise SandboxError(f"{image}: its files cannot be listed: {done.stderr.decode('utf-8', 'replace')[-300:]}")
    for line in os.fsdecode(done.stdout).split("\n"):
        if found := _LINE.fullmatch(line):
            letter, bits, uid, gid, moment, path = found.groups()
            target = ""
            if letter == "l":
                path, _, target = path.partition(" -> ")
            kind = _KINDS.get(letter, stat.S_IFREG)
            listing.add(path, ViewEntry(kind, Attributes(_mode(bits), int(uid), int(gid), _seconds(moment)), target))
    return listing


def _seconds(moment: str) -> int:
    """Of a time to the minute, as it is listed; UTC."""
    try:
        return max(0, calendar.timegm(time.strptime(moment, "%Y-%m-%d %H:%M")))
    except ValueError:
        return 0


def _mode(bits: str) -> int:
    mode = 0
    for number, letter in enumerate(bits):
        if letter in "rwxst":
            mode |= 0o400 >> number
    special = ((2, "sS", stat.S_ISUID), (5, "sS", stat.S_ISGID), (8, "tT", stat.S_ISVTX))
    return mode | sum(bit for place, letters, bit in special if bits[place] in letters)


def _read_sif(program: str, image: str, offset: str, path: str, limit: int) -> bytes:
    place = Path(tempfile.mkdtemp(prefix="megaflow-"))
    try:
        words = [program, "-n", "-q", "-no-xattrs", "-o", offset, "-d", str(place / "out"), image, path]
        subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, env=clean_environment(), check=False)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(OSError), open(os.open(place / "out" / path, flags), "rb") as file:
            return file.read(limit)
        return b""
    finally:
        remove_tree(place, ignore_errors=True)
