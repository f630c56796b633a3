"""Lists the files of a layer blob or of a SIF's squashfs without unpacking it.

A listing takes about 200 bytes of memory per file.
"""

from __future__ import annotations

import calendar
import os
import re
import stat
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
from megaflow_hpc.environments.images.layers.view import HIDDEN, ViewEntry, read_regular
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.tar import RefusedMember, plain

_Node: TypeAlias = dict[str, Union[ViewEntry, "_Node"]]
_SELF = ""
"""Key of a directory's own entry within its node."""
_KINDS = {"-": stat.S_IFREG, "d": stat.S_IFDIR, "l": stat.S_IFLNK, "p": stat.S_IFIFO, "s": stat.S_IFSOCK}
_MEMBERS = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "symlink": stat.S_IFLNK, "fifo": stat.S_IFIFO}
_IMPLICIT = ViewEntry(stat.S_IFDIR, Attributes(0o755))
"""Entry for a directory that the layer itself does not list."""
_LINE = re.compile(r"(\S)(\S{9}) (\d+)/(\d+) +(?:\d+|\d+, *\d+) (\S+ \S+) squashfs-root(.*)", re.DOTALL)


class LayerListing:
    """A layer as a tree of entries. Implements :class:`.view.Layer`.

    Args:
        reader: Called as ``reader(path, limit)`` to read a file's content from the layer itself.
    """

    def __init__(self, reader: Callable[[str, int], bytes]) -> None:
        self._root: _Node = {_SELF: _IMPLICIT}
        self._reader = reader

    def add(self, path: str, entry: ViewEntry) -> None:
        """Adds an entry. Unlisted parents become directories."""
        node = self._root
        parts = [part for part in path.split("/") if part]
        for part in parts[:-1]:
            child = node.get(part)
            if not isinstance(child, dict):
                child = node[part] = {_SELF: _IMPLICIT}
            node = child
        if not parts:
            node[_SELF] = entry
        elif entry.is_directory:
            previous = node.get(parts[-1])
            content = previous if isinstance(previous, dict) else {}
            node[parts[-1]] = content | {_SELF: entry}
        else:
            node[parts[-1]] = entry

    def entry(self, path: str) -> ViewEntry | None:
        """See :class:`.view.Layer`."""
        node = self._at(path)
        if isinstance(node, dict):
            own = node[_SELF]
            assert isinstance(own, ViewEntry)
            return own
        return node

    def names(self, path: str) -> Iterator[str]:
        """See :class:`.view.Layer`."""
        node = self._at(path)
        if isinstance(node, dict):
            yield from (name for name in node if name != _SELF)

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
    """Lists a layer blob. Raises :class:`SandboxError` if it is not a layer."""
    listing = LayerListing(lambda path, limit: _read_blob(blob, path, limit))
    opaque = []
    with open(blob, "rb", buffering=0) as file:
        try:
            for member in LayerStream.of_file(file).members():
                parts = [os.fsdecode(part) for part in plain(member.name)]
                path = "/".join(parts)
                attributes = Attributes(member.mode, member.uid, member.gid, member.mtime)
                if parts and parts[-1] == OPAQUE_MARK:
                    opaque.append("/".join(parts[:-1]))
                elif parts and parts[-1].startswith(DELETED):
                    listing.add("/".join([*parts[:-1], parts[-1].removeprefix(DELETED)]), HIDDEN)
                elif member.kind == "hardlink":
                    target = listing.entry("/".join(os.fsdecode(part) for part in plain(member.target)))
                    listing.add(path, target or ViewEntry(stat.S_IFREG, attributes))
                elif member.kind in _MEMBERS:
                    listing.add(path, ViewEntry(_MEMBERS[member.kind], attributes, os.fsdecode(member.target)))
        except RefusedMember as error:
            raise SandboxError(f"{os.fspath(blob)}: not a layer of an image: {error}") from error
    for path in opaque:
        directory = listing.entry(path) or _IMPLICIT
        listing.add(path, ViewEntry(stat.S_IFDIR, directory.attributes, opaque=True))
    return listing


def _read_blob(blob: str | os.PathLike[str], path: str, limit: int) -> bytes:
    with suppress(OSError, RefusedMember), open(blob, "rb", buffering=0) as file:
        reader = LayerStream.of_file(file).members()
        for member in reader:
            if member.kind == "file" and b"/".join(plain(member.name)) == os.fsencode(path):
                return b"".join(reader.content())[:limit] if member.size <= limit else b""
    return b""


def of_sif(image: str) -> LayerListing:
    """Lists a SIF's files with ``unsquashfs``.

    Raises:
        SandboxError: The file is not a SIF or cannot be listed.
        SiteError: ``unsquashfs`` is missing.
    """
    partition = sif.system_partition(image)
    listing = LayerListing(lambda path, limit: _read_sif(image, partition, path, limit))
    done = sif.run_unsquashfs(partition, ["-lln", os.path.abspath(image)])
    if done.returncode:
        raise SandboxError(f"{image}: its files cannot be listed: {done.stderr.decode('utf-8', 'replace')[-300:]}")
    for line in os.fsdecode(done.stdout).split("\n"):
        if match := _LINE.fullmatch(line):
            letter, bits, uid, gid, moment, path = match.groups()
            target = ""
            if letter == "l":
                path, _, target = path.partition(" -> ")
            kind = _KINDS.get(letter, stat.S_IFREG)
            listing.add(path, ViewEntry(kind, Attributes(_mode(bits), int(uid), int(gid), _seconds(moment)), target))
    return listing


def _seconds(moment: str) -> int:
    """Parses a time from a listing, which is in UTC and lacks seconds."""
    try:
        return max(0, calendar.timegm(time.strptime(moment, "%Y-%m-%d %H:%M")))
    except ValueError:
        return 0


def _mode(bits: str) -> int:
    mode = 0
    for number, letter in enumerate(bits):
        if letter in "rwxst":
            mode |= 0o400 >> number
    for number, letters, bit in ((2, "sS", stat.S_ISUID), (5, "sS", stat.S_ISGID), (8, "tT", stat.S_ISVTX)):
        if bits[number] in letters:
            mode |= bit
    return mode


def _read_sif(image: str, partition: sif.SifPartition, path: str, limit: int) -> bytes:
    directory = Path(tempfile.mkdtemp(prefix="megaflow-"))
    try:
        options = ["-n", "-q", "-no-xattrs", "-d", str(directory / "out")]
        sif.run_unsquashfs(partition, [*options, os.path.abspath(image), path])
        return read_regular(directory / "out" / path, limit)
    finally:
        remove_tree(directory, ignore_errors=True)
