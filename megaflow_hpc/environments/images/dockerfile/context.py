"""Build context of a Dockerfile: the files available to ``COPY`` and ``ADD``, minus those in ``.dockerignore``.

:func:`lay_out` resolves the patterns, exclusions and archives of one instruction on the host, so the image needs no
tools for it. The build then only moves the copied items into place. A context is untrusted. Every path component is
resolved inside it, and the amount copied is limited. ``ADD`` recognises archives by their content. Archives are
untrusted too: :class:`~megaflow_hpc.environments.images.layers.unpacking.LayerWriter` writes them without following
links.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import lzma
import os
import posixpath
import re
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from e2b_dockerfile_utils import PatternMatcher

from megaflow_hpc.environments.images.layers.unpacking import LayerWriter
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import opened_below, reopen
from megaflow_hpc.host.tar import Member, Parts, RefusedMember, TarReader, plain

Excluded = Callable[[str], bool]
CopiedFiles = dict[tuple[int, int], Path]
"""Maps (device, inode) of a hard-linked file to its first copy."""

MAX_PATTERN_CHARACTERS = 2**16
MAX_WAYS = 100_000
"""Maximum number of matching steps (:func:`ways`) for a pattern and a path. They take about a second."""
_CHUNK = 1 << 20


class LinkOut(ConfigError):
    """Raised if a link leads out of the build context."""


class Context:
    """A build context directory, without the files that its ``.dockerignore`` excludes."""

    def __init__(self, root: Path, dockerfile: Path | None = None) -> None:
        self.root = root
        self.ignored: Excluded = lambda name: False
        """Returns whether ``.dockerignore`` excludes a path."""
        names = [".dockerignore"] if dockerfile is None else [f"{dockerfile.name}.dockerignore", ".dockerignore"]
        for name in names:
            status = self._status(name, follow=True)
            if status and stat.S_ISREG(status.st_mode):
                self.ignored = patterns(self._lines(name), str(root / name))
                break

    # --- lookup ---------------------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, name: str, *, follow: bool = False) -> Iterator[tuple[int, str, os.stat_result]]:
        """Yields an ``O_PATH`` descriptor of the file ``name``, its resolved path, and its ``stat`` result.

        Raises:
            ConfigError: The file is missing, or a link leads out of the context.
        """
        with ExitStack() as stack:
            try:
                root = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, root)
                descriptor, real = stack.enter_context(opened_below(root, name, follow=follow))
            except OSError as error:
                if error.errno == errno.EXDEV:
                    raise LinkOut(f"{name}: a link out of the build context; copy the file into {self.root}") from None
                raise ConfigError(
                    f"{name}: no such file in {self.root} ({error.strerror}); add it, or correct the line"
                ) from None
            yield descriptor, real, os.fstat(descriptor)

    def _status(self, name: str, *, follow: bool = False) -> os.stat_result | None:
        """Returns the ``stat`` result of a file, or ``None`` if it is missing. Raises :class:`LinkOut` if a link leads
        out of the context."""
        try:
            with self.opened(name, follow=follow) as (_, _, status):
                return status
        except LinkOut:
            raise
        except ConfigError:
            return None

    def _is_directory(self, name: str) -> bool:
        status = self._status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def _list(self, name: str) -> list[os.DirEntry[str]]:
        with self.opened(name) as (descriptor, _, _):
            directory = _reopen(descriptor, name, os.O_DIRECTORY)
            try:
                with os.scandir(directory) as entries:
                    return list(entries)
            finally:
                os.close(directory)

    def _lines(self, name: str) -> list[str]:
        with self.opened(name, follow=True) as (descriptor, _, _):
            with open(_reopen(descriptor, name), encoding="utf-8-sig", errors="surrogateescape") as file:
                return file.read(MAX_PATTERN_CHARACTERS + 1).splitlines()

    def find(self, source: str) -> list[str]:
        """Returns the paths that match a source of ``COPY``, relative to the context. Wildcards do not match ``/``.

        A pattern may match no paths.

        Raises:
            ConfigError: The source is missing or outside the context.
        """
        path = posixpath.normpath(source.lstrip("/") or ".")
        if path == ".." or path.startswith("../"):
            raise ConfigError(f"{source}: outside of the build context; put the file into {self.root}")
        is_pattern = any(character in path for character in "*?[")
        names = self._matching(path) if is_pattern else [path]
        if not is_pattern and self._status(path) is None:
            names = []
        included = [name for name in names if name == "." or not self.ignored(name) or self._has_exceptions(name)]
        if not included and not is_pattern:
            ignored = " that .dockerignore does not exclude" if names else ""
            raise ConfigError(f"{source}: no such file in {self.root}{ignored}; add it, or correct the line")
        for name in included:
            self._status(name, follow=True)  # raises if a link leads out
        return included

    def _matching(self, pattern: str) -> list[str]:
        pattern = re.sub(r"(\\.)|\*+", lambda match: match[1] or "*", pattern)  # ** is equivalent to * here
        matches = patterns([f"./{pattern}"])  # ./ prevents a leading # or ! from being special
        depth = pattern.count("/") + 1
        return sorted(name for name in self._names(depth) if matches(name))

    def _names(self, depth: int) -> Iterator[str]:
        """Yields all paths in the context with at most ``depth`` components."""
        bounds = DockerfileBounds()
        waiting = [(depth, ".")]
        while waiting:
            left, directory = waiting.pop()
            for entry in self._list(directory):
                bounds.count()
                path = posixpath.normpath(posixpath.join(directory, entry.name))
                yield path
                if left > 1 and entry.is_dir(follow_symlinks=False):
                    waiting.append((left - 1, path))

    def _has_exceptions(self, name: str) -> bool:
        """Returns whether an exception (``!…``) includes any file of an ignored directory."""
        return self._is_directory(name) and any(True for _ in self.files(name))

    def files(self, name: str, excluded: Excluded | None = None) -> Iterator[str]:
        """Yields all paths below the directory ``name``, relative to the context.

        A directory comes before its contents. If ``name`` is a file, yields only ``name``. Ignored and ``excluded``
        paths are left out.

        Raises:
            ConfigError: There are more entries than one instruction may copy.
        """

        def is_excluded(path: str) -> bool:
            return self.ignored(path) or bool(excluded and excluded(path))

        if not self._is_directory(name):
            if not is_excluded(name):
                yield name
            return
        bounds = DockerfileBounds()
        top = posixpath.normpath(name)
        waiting = [top]
        while waiting:
            directory = waiting.pop()
            if directory != top and not is_excluded(directory):
                yield directory
            subdirectories = []
            for entry in sorted(self._list(directory), key=lambda entry: entry.name):
                bounds.count()
                path = posixpath.normpath(posixpath.join(directory, entry.name))
                if entry.is_dir(follow_symlinks=False):
                    subdirectories.append(path)
                elif not is_excluded(path):
                    yield path
            waiting += reversed(subdirectories)

    def feed(self, update: Callable[[bytes], None], names: Sequence[str]) -> None:
        """Passes the names, modes and contents of all files at or below ``names`` to a hash's ``update`` method."""
        bounds = DockerfileBounds()
        for name in names:
            with self.opened(name, follow=True) as (_, real, _):
                pass
            for file in dict.fromkeys([posixpath.normpath(name), *self.files(real)]):
                with self.opened(file) as (descriptor, _, status):
                    update(f"\0{file}\0{status.st_mode:o}\0".encode("utf-8", "surrogateescape"))
                    if stat.S_ISLNK(status.st_mode):
                        update(os.readlink("", dir_fd=descriptor).encode("utf-8", "surrogateescape"))
                    elif stat.S_ISREG(status.st_mode):
                        bounds.take(status.st_size)
                        with open(_reopen(descriptor, file), "rb") as content:
                            update(hashlib.file_digest(content, "sha256").digest())

    # --- copying ------------------------------------------------------------------------------------------------

    def copy(self, name: str, target: Path, bounds: DockerfileBounds, copied: CopiedFiles) -> os.stat_result:
        """Copies a file or link with its mode and times, or creates a directory.

        Returns the ``stat`` result of the original.

        Args:
            copied: Copies of hard-linked files so far. Updated by this call.

        Raises:
            ConfigError: The file is unreadable or a special file, or it exceeds ``bounds``.
        """
        bounds.count()
        with self.opened(name) as (descriptor, _, status):
            if stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink("", dir_fd=descriptor), target)
                os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
                return status
            if stat.S_ISDIR(status.st_mode):
                target.mkdir(exist_ok=True)
            elif stat.S_ISREG(status.st_mode):
                if status.st_nlink > 1:
                    first = copied.setdefault((status.st_dev, status.st_ino), target)
                    if first != target:
                        os.link(first, target)
                        return status
                with open(_reopen(descriptor, name), "rb", 0) as source, open(target, "xb", 0) as copy:
                    while chunk := source.read(_CHUNK):
                        bounds.take(len(chunk))
                        copy.write(chunk)
            else:
                raise ConfigError(f"{name}: neither a file nor a directory; it cannot be copied into an image")
        target.chmod(stat.S_IMODE(status.st_mode) | (0o700 if stat.S_ISDIR(status.st_mode) else 0))
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        return status


def _reopen(descriptor: int, name: str, flags: int = 0) -> int:
    try:
        return reopen(descriptor, os.O_RDONLY | flags)
    except OSError as error:
        raise ConfigError(
            f"{name}: cannot be read ({error.strerror}); make it readable, or name it in .dockerignore"
        ) from None


def lay_out(
    context: Context,
    names: Sequence[str],
    target: Path,
    *,
    extract: bool = False,
    exclude: Sequence[str] = (),
) -> ArchivedAttributes:
    """Copies each of the context's ``names`` to ``target/<number>/<name>``.

    Args:
        extract: Unpack archives.
        exclude: Patterns of files to leave out, relative to the copied directory.

    Returns:
        The attributes of files unpacked from archives.

    Raises:
        ConfigError: A link leads out of the context, an archive cannot be unpacked, or the files exceed the limits of
            an instruction.
    """
    excluded = patterns(exclude)
    bounds, archived = DockerfileBounds(), ArchivedAttributes()
    for number, name in enumerate(names):
        directory = target / str(number)
        directory.mkdir(parents=True)
        with context.opened(name, follow=True) as (_, real, status):  # Follow a link, but keep its name for the copy.
            pass
        item = directory / (context.root.resolve().name if name == "." else posixpath.basename(name))
        if stat.S_ISDIR(status.st_mode):
            _copy_directory(context, real, item, bounds, excluded)
            continue
        context.copy(real, item, bounds, {})
        if extract and is_archive(item):
            packed = item.rename(directory.with_name(f"{number}.archive"))
            item.mkdir()
            archived |= unpack(packed, item, bounds)
            packed.unlink()
    return archived


def _copy_directory(context: Context, top: str, item: Path, bounds: DockerfileBounds, excluded: Excluded) -> None:
    copied: CopiedFiles = {}
    directories: dict[str, os.stat_result] = {}
    directories[top] = context.copy(top, item, bounds, copied)
    for path in context.files(top, lambda path: excluded(posixpath.relpath(path, top))):
        # Create an excluded directory anyway if something in it is included.
        missing = [path]
        while (parent := posixpath.dirname(missing[-1]) or ".") not in directories:
            missing.append(parent)
        for each in reversed(missing):
            status = context.copy(each, item / os.path.relpath(each, top), bounds, copied)
            if stat.S_ISDIR(status.st_mode):
                directories[each] = status
    for name, status in directories.items():  # Adding entries has changed their times.
        directory = item / os.path.relpath(name, top)
        os.utime(directory, ns=(status.st_atime_ns, status.st_mtime_ns))
        directory.chmod(stat.S_IMODE(status.st_mode) | 0o500)  # The build must be able to read it.


def patterns(lines: Sequence[str], where: str = "") -> Excluded:
    """Compiles ``.dockerignore`` lines to a predicate for excluded paths. The last matching line wins.

    A match also excludes everything below the matching path.

    Args:
        where: File named in error messages.

    Raises:
        ConfigError: A line is invalid, or there are too many. The predicate raises this error for a path that would
            take too long to match.
    """
    if sum(len(line) + 1 for line in lines) > MAX_PATTERN_CHARACTERS:
        raise ConfigError(f"{where or 'patterns'}: more than {MAX_PATTERN_CHARACTERS} characters; write fewer patterns")
    try:
        matcher = PatternMatcher(list(lines))
    except ValueError as error:
        number = next(
            n for n, line in enumerate(lines, 1) if str(error).startswith(f"Invalid ignore pattern '{line}': ")
        )
        prefix = f"{where}:{number}: " if where else ""
        raise ConfigError(f"{prefix}{error}; correct it, or write \\ before a character that means itself") from None
    check = bounded_ways(matcher.patterns, where or "pattern")

    def excluded(path: str) -> bool:
        check(path)
        return matcher.matches(path)

    return excluded


def bounded_ways(patterns: Iterable[str], where: str) -> Callable[[str], None]:
    """Returns a function that raises :class:`ConfigError`, naming ``where``, for paths that would take too long to
    match."""
    wild = [pattern for pattern in patterns if pattern.count("*") > 2]

    def check(path: str) -> None:
        for pattern in wild:
            if ways(pattern, path) > MAX_WAYS:
                raise ConfigError(f"{where}: {pattern!r} has too many wildcards for {path!r}; write fewer")

    return check


def ways(pattern: str, path: str) -> int:
    """Returns an upper bound on the steps that a backtracking matcher needs to match ``path`` against ``pattern``."""
    count = 1
    for wildcard, following in re.findall(r"(\*\*/|\*\*\Z|\*)(?=(.?))", pattern):
        if wildcard == "**/":
            count *= 1 + path.count("/")
        elif following:
            count *= 1 + (len(path) if following in "*?[\\" else path.count(following))
    return count


ArchivedAttributes = dict[tuple[int, int], tuple[int, int, int]]
"""Maps (device, inode) of an unpacked file to the (mode, uid, gid) recorded in its archive."""

MAX_BYTES = 20 * 10**9
MAX_ENTRIES = 500_000
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)


class DockerfileBounds:
    """Counts down the bytes and entries that one instruction may copy. Raises :class:`ConfigError` when either is
    exhausted."""

    def __init__(self) -> None:
        self.bytes = MAX_BYTES
        self.entries = MAX_ENTRIES

    def take(self, size: int) -> None:
        """Subtracts ``size`` bytes."""
        self.bytes -= size
        if self.bytes < 0:
            raise ConfigError(f"more than {MAX_BYTES} bytes of the context in one instruction; copy less at once")

    def count(self) -> None:
        """Subtracts one file, link or directory."""
        self.entries -= 1
        if self.entries < 0:
            raise ConfigError(f"more than {MAX_ENTRIES} entries of the context in one instruction; copy less at once")


def is_archive(path: Path) -> bool:
    """Returns whether a file is a tar archive, plain or compressed, which ``ADD`` unpacks. Raises ConfigError for
    zstd."""
    with open(path, "rb") as file:
        if file.read(4) == b"\x28\xb5\x2f\xfd":
            raise ConfigError(
                f"{path.name}: archives compressed with zstd are not unpacked here; use gzip, or COPY and RUN tar"
            )
    try:
        with _decompressed(path) as content:
            block = content.read(tarfile.BLOCKSIZE)
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, *_DAMAGED):
        return False
    return True


def unpack(archive: Path, target: Path, bounds: DockerfileBounds) -> ArchivedAttributes:
    """Unpacks an archive into ``target``, with the caller as owner. Returns the attributes recorded in the archive.

    Raises:
        ConfigError: The archive cannot be unpacked, or exceeds ``bounds``.
    """
    try:
        members = _write(archive, target, bounds)
    except (RefusedMember, ConfigError, *_DAMAGED) as error:
        raise ConfigError(f"{archive.name}: cannot be unpacked: {error}; correct it, or COPY it and RUN tar") from None
    top = os.lstat(target)
    attributes: ArchivedAttributes = {(top.st_dev, top.st_ino): (0o755, 0, 0)}
    for parts, member in members.items():
        try:
            status = os.lstat(os.path.join(os.fsencode(target), *parts))
        except OSError:  # skipped, such as a device
            continue
        attributes[status.st_dev, status.st_ino] = (member.mode & 0o7777, member.uid, member.gid)
    return attributes


def _write(archive: Path, target: Path, bounds: DockerfileBounds) -> dict[Parts, Member]:
    members: dict[Parts, Member] = {}
    links: set[Parts] = set()
    with LayerWriter(target, owners=False, marks=True) as tree, _decompressed(archive) as content:
        reader = TarReader(content)
        for member in reader:
            bounds.count()
            bounds.take(member.size)
            parts = plain(member.name)
            for depth in range(1, len(parts)):
                if parts[:depth] in links:
                    raise RefusedMember(f"{member.name[:200]!r} is below a link of the archive")
            tree.add(member, reader)
            members[parts] = member
            if member.kind == "symlink":
                links.add(parts)
            else:
                links.discard(parts)
    return members


def _decompressed(path: Path) -> BinaryIO:
    """Opens a file for reading and decompresses it according to its magic bytes."""
    with open(path, "rb") as file:
        magic = file.read(6)
    if magic.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if magic.startswith(b"BZh"):
        return cast(BinaryIO, bz2.open(path, "rb"))
    if magic.startswith((b"\xfd7zXZ", b"\x5d\x00\x00")):
        return cast(BinaryIO, lzma.open(path, "rb"))
    return open(path, "rb")
