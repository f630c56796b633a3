"""The build context of a Dockerfile: what ``COPY`` and ``ADD`` take from it, as ``.dockerignore`` lets them.

:func:`lay_out` makes of one such instruction a directory of finished items, so that the build only has to put them in
their place: here are patterns, exclusions and archives dealt with, on the host, whatever tools the image lacks. A
context is somebody else's: every component of every path is resolved within it, and what is taken is bounded.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from e2b_dockerfile_utils import PatternMatcher

from megaflow_hpc.environments.images.dockerfile.archive import Known, is_archive, unpack
from megaflow_hpc.environments.images.dockerfile.bounds import DockerfileBounds
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host import beneath

Excluded = Callable[[str], bool]
Linked = dict[tuple[int, int], Path]
"""Device and number of a file → the first of its copies."""

MAX_PATTERN_CHARACTERS = 2**16
MAX_WAYS = 100_000
"""Most :func:`ways` in which a pattern is tried on one path: about a second's worth."""
_CHUNK = 1 << 20


class LinkOut(ConfigError):
    """A link of the context leads out of it."""


class Context:
    """A directory, less what its ``.dockerignore`` names."""

    def __init__(self, root: Path, dockerfile: Path | None = None) -> None:
        self.root = root
        self.ignored: Excluded = lambda name: False
        """Whether ``.dockerignore`` leaves a path out."""
        own = Context(dockerfile.parent) if dockerfile and dockerfile.parent != root else self
        for context, name in ((own, f"{dockerfile.name}.dockerignore" if dockerfile else ""), (self, ".dockerignore")):
            found = context._status(name, follow=True) if name else None
            if found and stat.S_ISREG(found.st_mode):
                self.ignored = patterns(context._lines(name), str(context.root / name))
                break

    # --- looking ------------------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, name: str, *, follow: bool = False) -> Iterator[tuple[int, str, os.stat_result]]:
        """Yields an ``O_PATH`` descriptor of what lies at ``name``, its path without links, and its status.

        Raises:
            ConfigError: a link in it leads out of the context, or nothing is there.
        """
        with ExitStack() as stack:
            try:
                root = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, root)
                place, real = stack.enter_context(beneath.opened(root, name, follow=follow))
            except OSError as error:
                if error.errno == errno.EXDEV:
                    raise LinkOut(f"{name}: a link out of the build context; copy the file into {self.root}") from None
                raise ConfigError(
                    f"{name}: no such file in {self.root} ({error.strerror}); add it, or correct the line"
                ) from None
            yield place, real, os.fstat(place)

    def _status(self, name: str, *, follow: bool = False) -> os.stat_result | None:
        """The status of what lies at ``name``, ``None`` if nothing does; :class:`LinkOut` if it leads out."""
        try:
            with self.opened(name, follow=follow) as (_, _, found):
                return found
        except LinkOut:
            raise
        except ConfigError:
            return None

    def _is_directory(self, name: str) -> bool:
        found = self._status(name)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def _listed(self, name: str) -> list[os.DirEntry[str]]:
        with self.opened(name) as (place, _, _):
            directory = _reopened(place, name, os.O_DIRECTORY)
            try:
                with os.scandir(directory) as entries:
                    return list(entries)
            finally:
                os.close(directory)

    def _lines(self, name: str) -> list[str]:
        with self.opened(name, follow=True) as (place, _, _):
            with open(_reopened(place, name), encoding="utf-8-sig", errors="surrogateescape") as file:
                return file.read(MAX_PATTERN_CHARACTERS + 1).splitlines()

    def find(self, source: str) -> list[str]:
        """Paths relative to the context that a source names; wildcards do not cross ``/``, and may find nothing.

        Raises:
            ConfigError: outside of the context, or not there.
        """
        clean = posixpath.normpath(source.lstrip("/") or ".")
        if clean == ".." or clean.startswith("../"):
            raise ConfigError(f"{source}: outside of the build context; put the file into {self.root}")
        wild = any(character in clean for character in "*?[")
        if wild:
            clean = re.sub(r"(\\.)|\*+", lambda found: found[1] or "*", clean)  # ** is no more than * here
            matches = patterns([f"./{clean}"])  # so that neither `#` nor `!` at the beginning is special
            depth = clean.count("/") + 1
            names = sorted(name for name in self._names(depth) if matches(name))
        else:
            names = [clean] if self._status(clean) else []
        found = [name for name in names if name == "." or not (self.ignored(name) and not self._holds(name))]
        if not found and not wild:
            ignored = " that .dockerignore lets through" if names else ""
            raise ConfigError(f"{source}: no such file in {self.root}{ignored}; add it, or correct the line")
        for name in found:
            self._status(name, follow=True)
        return found

    def _names(self, depth: int) -> Iterator[str]:
        bounds = DockerfileBounds()
        waiting = [(depth, ".")]
        while waiting:
            left, below = waiting.pop()
            for entry in self._listed(below):
                bounds.count()
                path = posixpath.normpath(posixpath.join(below, entry.name))
                yield path
                if left > 1 and entry.is_dir(follow_symlinks=False):
                    waiting.append((left - 1, path))

    def _holds(self, name: str) -> bool:
        """Whether an ignored directory holds something that an exception (``!…``) lets through."""
        return self._is_directory(name) and any(True for _ in self.files(name))

    def files(self, name: str, excluded: Excluded | None = None) -> Iterator[str]:
        """What is at or below ``name``, relative to the context; a directory that is not left out before what is in it.

        A directory that ``name`` itself names is not among them.

        Raises:
            ConfigError: more entries than a build may take.
        """

        def left_out(path: str) -> bool:
            return self.ignored(path) or bool(excluded and excluded(path))

        if not self._is_directory(name):
            if not left_out(name):
                yield name
            return
        bounds = DockerfileBounds()
        top = posixpath.normpath(name)
        waiting = [top]
        while waiting:
            directory = waiting.pop()
            if directory != top and not left_out(directory):
                yield directory
            below = []
            for entry in sorted(self._listed(directory), key=lambda entry: entry.name):
                bounds.count()
                path = posixpath.normpath(posixpath.join(directory, entry.name))
                if entry.is_dir(follow_symlinks=False):
                    below.append(path)
                elif not left_out(path):
                    yield path
            waiting += reversed(below)

    def feed(self, update: Callable[[bytes], None], names: Sequence[str]) -> None:
        """Feeds names, modes and contents of what is at or below ``names`` to the ``update`` of digests."""
        bounds = DockerfileBounds()
        for name in names:
            with self.opened(name, follow=True) as (_, real, _):
                pass
            for file in dict.fromkeys([posixpath.normpath(name), *self.files(real)]):
                with self.opened(file) as (place, _, found):
                    update(f"\0{file}\0{found.st_mode:o}\0".encode("utf-8", "surrogateescape"))
                    if stat.S_ISLNK(found.st_mode):
                        update(os.readlink("", dir_fd=place).encode("utf-8", "surrogateescape"))
                    elif stat.S_ISREG(found.st_mode):
                        bounds.take(found.st_size)
                        with open(_reopened(place, file), "rb") as content:
                            update(hashlib.file_digest(content, "sha256").digest())

    # --- copying ------------------------------------------------------------------------------------------------

    def copy(self, name: str, target: Path, bounds: DockerfileBounds, linked: Linked) -> os.stat_result:
        """Copies one file, or one link as a link, with its mode and times; makes a directory. Returns its status.

        Args:
            linked: files of several names that were copied before.

        Raises:
            ConfigError: it is something else, or more than a build may take.
        """
        bounds.count()
        with self.opened(name) as (place, _, found):
            if stat.S_ISLNK(found.st_mode):
                os.symlink(os.readlink("", dir_fd=place), target)
                os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)
                return found
            if stat.S_ISDIR(found.st_mode):
                target.mkdir(exist_ok=True)
            elif stat.S_ISREG(found.st_mode):
                other = linked.setdefault((found.st_dev, found.st_ino), target) if found.st_nlink > 1 else target
                if other != target:
                    os.link(other, target)
                    return found
                with open(_reopened(place, name), "rb", 0) as source, open(target, "xb", 0) as copied:
                    while chunk := source.read(_CHUNK):
                        bounds.take(len(chunk))
                        copied.write(chunk)
            else:
                raise ConfigError(f"{name}: neither a file nor a directory; it cannot be copied into an image")
        target.chmod(stat.S_IMODE(found.st_mode) | (0o700 if stat.S_ISDIR(found.st_mode) else 0))
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
        return found


def _reopened(place: int, name: str, flags: int = 0) -> int:
    try:
        return beneath.reopen(place, os.O_RDONLY | flags)
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
    parents: bool = False,
    exclude: Sequence[str] = (),
) -> Known:
    """Copies what ``names`` hold to ``target/<number>/<name>``, archives unpacked where ``extract``; returns what these
    say of their files.

    Args:
        exclude: patterns of what is left out of a directory, relative to it; with ``parents`` to the context.

    Raises:
        ConfigError: a link leads out of the context, or what a name holds is more than a build may take.
    """
    excluded = patterns(exclude)
    bounds, known = DockerfileBounds(), Known()
    for number, name in enumerate(names):
        place = target / str(number)
        place.mkdir(parents=True)
        with context.opened(name, follow=True) as (_, real, found):  # what a link leads to, under the link's name
            pass
        item = place / (context.root.resolve().name if name == "." else posixpath.basename(name))
        if parents:
            item = place / "parents" / real
            item.parent.mkdir(parents=True)
        if stat.S_ISDIR(found.st_mode):
            _copy_directory(context, real, item, bounds, excluded if parents else _below(real, excluded))
        else:
            context.copy(real, item, bounds, {})
            if extract and is_archive(item):
                packed = item.rename(place.with_name(f"{number}.archive"))
                item.mkdir()
                known |= unpack(packed, item, bounds)
                packed.unlink()
    return known


def _below(top: str, excluded: Excluded) -> Excluded:
    return lambda path: excluded(posixpath.relpath(path, top))


def _copy_directory(context: Context, top: str, item: Path, bounds: DockerfileBounds, excluded: Excluded) -> None:
    linked: Linked = {}
    directories: dict[str, os.stat_result] = {}
    directories[top] = context.copy(top, item, bounds, linked)
    for path in context.files(top, excluded):
        missing = [path]
        while (parent := posixpath.dirname(missing[-1]) or ".") not in directories:
            missing.append(parent)  # it is left out, and something in it is not
        for each in reversed(missing):
            found = context.copy(each, item / os.path.relpath(each, top), bounds, linked)
            if stat.S_ISDIR(found.st_mode):
                directories[each] = found
    for name, found in directories.items():  # what was written into them has changed their times
        os.utime(place := item / os.path.relpath(name, top), ns=(found.st_atime_ns, found.st_mtime_ns))
        place.chmod(stat.S_IMODE(found.st_mode) | 0o500)  # it is read on its way into the image


def patterns(lines: Sequence[str], where: str = "") -> Excluded:
    """The predicate of ``.dockerignore`` lines: a path is excluded with everything below it; the last line wins.

    Args:
        where: file to name in errors, if any.

    Raises:
        ConfigError: a line is no pattern, or there are too many; by the predicate too, for a path that a pattern with
            many wildcards could be tried on in too many ways.
    """
    if sum(len(line) + 1 for line in lines) > MAX_PATTERN_CHARACTERS:
        raise ConfigError(f"{where or 'patterns'}: more than {MAX_PATTERN_CHARACTERS} characters; write fewer patterns")
    try:
        matcher = PatternMatcher(list(lines))
    except ValueError as error:
        number = next(
            n for n, line in enumerate(lines, 1) if str(error).startswith(f"Invalid ignore pattern '{line}': ")
        )
        place = f"{where}:{number}: " if where else ""
        raise ConfigError(f"{place}{error}; correct it, or write \\ before a character that means itself") from None
    check = bounded_ways(matcher.patterns, where or "pattern")

    def excluded(path: str) -> bool:
        check(path)
        return matcher.matches(path)

    return excluded


def bounded_ways(patterns: Iterable[str], where: str) -> Callable[[str], None]:
    """Returns a check of a path: :class:`ConfigError`, naming ``where``, if a pattern could be tried on it for long."""
    wild = [pattern for pattern in patterns if pattern.count("*") > 2]

    def check(path: str) -> None:
        for pattern in wild:
            if ways(pattern, path) > MAX_WAYS:
                raise ConfigError(f"{where}: {pattern!r} has too many wildcards for {path!r}; write fewer")

    return check


def ways(pattern: str, path: str) -> int:
    """Upper bound of the ways to divide ``path`` among the wildcards of ``pattern``, as a backtracking search may."""
    found = 1
    for wildcard, following in re.findall(r"(\*\*/|\*\*\Z|\*)(?=(.?))", pattern):
        if wildcard == "**/":
            found *= 1 + path.count("/")
        elif following:
            found *= 1 + (len(path) if following in "*?[\\" else path.count(following))
    return found
