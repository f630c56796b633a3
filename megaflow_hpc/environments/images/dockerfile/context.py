"""The build context of a Dockerfile: what ``COPY`` and ``ADD`` take from it, as ``.dockerignore`` lets them.

:func:`lay_out` makes of one such instruction a directory of finished items, so that the build only has to put them in
their place: here are patterns, exclusions and archives dealt with, on the host, whatever tools the image lacks.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from e2b_dockerfile_utils import PatternMatcher

from megaflow_hpc.errors import ConfigError

Excluded = Callable[[str], bool]

MAX_PATTERN_CHARACTERS = 2**16
_MAX_WAYS = 100_000  # about a second for one path


class Context:
    """A directory, less what its ``.dockerignore`` names."""

    def __init__(self, root: Path, dockerfile: Path | None = None) -> None:
        self.root = root
        own = dockerfile.with_name(dockerfile.name + ".dockerignore") if dockerfile else None
        path = own if own and own.is_file() else root / ".dockerignore"
        self.ignored = patterns(_lines(path), str(path))

    def find(self, source: str, exclude: Sequence[str] = ()) -> list[str]:
        """Paths relative to the context that a source names; wildcards do not cross ``/``, as in Docker.

        Raises:
            ConfigError: outside of the context, or nothing there.
        """
        clean = posixpath.normpath(source.lstrip("/") or ".")
        if clean == ".." or clean.startswith("../"):
            raise ConfigError(f"{source}: outside of the build context; put the file into {self.root}")
        if any(character in clean for character in "*?["):
            matches = patterns([f"./{clean}"])  # so that neither `#` nor `!` at the beginning is special
            depth = clean.count("/") + 1
            names = sorted(name for name in self._names(depth) if matches(name))
        else:
            names = [clean] if os.path.lexists(self.root / clean) else []
        excluded = patterns(exclude)
        found = [name for name in names if name == "." or not (self.ignored(name) and not self._holds(name))]
        found = [name for name in found if not excluded(name)]
        if not found:
            ignored = " that .dockerignore lets through" if names else ""
            raise ConfigError(f"{source}: no such file in {self.root}{ignored}; add it, or correct the line")
        return found

    def _names(self, depth: int, below: str = "") -> Iterator[str]:
        for name in os.listdir(self.root / below):
            path = posixpath.join(below, name)
            yield path
            if depth > 1 and (self.root / path).is_dir() and not (self.root / path).is_symlink():
                yield from self._names(depth - 1, path)

    def _holds(self, name: str) -> bool:
        """Whether an ignored directory holds something that an exception (``!…``) lets through."""
        return (self.root / name).is_dir() and any(True for _ in self.files(name))

    def files(self, name: str, excluded: Excluded | None = None) -> Iterator[str]:
        """Files and links at or below ``name``, relative to the context; directories too if they stay empty."""
        path = self.root / name
        if path.is_symlink() or not path.is_dir():
            if not self.ignored(name) and not (excluded and excluded(name)):
                yield name
            return
        for directory, names, files in os.walk(path):
            names.sort()
            relative = os.path.relpath(directory, self.root)
            links = [each for each in names if os.path.islink(os.path.join(directory, each))]
            if not names and not files and relative != "." and not self.ignored(relative):
                yield relative
            for each in sorted([*files, *links]):
                inner = posixpath.normpath(posixpath.join(relative, each))
                if not self.ignored(inner) and not (excluded and excluded(inner)):
                    yield inner

    def update(self, digest: hashlib._Hash, names: Sequence[str]) -> None:
        """Feeds names, modes and contents of what is at or below ``names`` to a digest."""
        for name in names:
            for file in self.files(name):
                path = self.root / file
                found = path.lstat()
                digest.update(f"\0{file}\0{found.st_mode:o}\0".encode("utf-8", "surrogateescape"))
                if stat.S_ISLNK(found.st_mode):
                    digest.update(os.readlink(path).encode("utf-8", "surrogateescape"))
                elif stat.S_ISREG(found.st_mode):
                    with open(path, "rb") as content:
                        digest.update(hashlib.file_digest(content, "sha256").digest())


def lay_out(
    context: Context,
    names: Sequence[str],
    target: Path,
    *,
    extract: bool = False,
    parents: bool = False,
    exclude: Sequence[str] = (),
) -> None:
    """Copies what ``names`` hold to ``target/<number>/<name>``, archives unpacked where ``extract``."""
    excluded = patterns(exclude)
    for number, name in enumerate(names):
        place = target / str(number)
        place.mkdir(parents=True)
        source = context.root / name
        if source.is_symlink():  # what it points at is copied, under its own name
            real = source.resolve()
            if not real.is_relative_to(context.root.resolve()):
                raise ConfigError(f"{name}: a link out of the build context; copy the file into {context.root}")
            name = str(real.relative_to(context.root.resolve()))
            source, label = context.root / name, source.name
        else:
            label = source.resolve().name if name == "." else source.name
        if parents:
            item = place / "parents" / name
            item.parent.mkdir(parents=True)
        else:
            item = place / label
        if extract and source.is_file() and is_archive(source):
            item.mkdir()
            _extract(source, item)
        elif source.is_dir():
            item.mkdir(exist_ok=True)
            shutil.copystat(source, item)
            for file in context.files(name, excluded):
                _copy(context.root / file, item / os.path.relpath(context.root / file, source), source, item)
        elif source.is_file():
            shutil.copy2(source, item)
        else:
            raise ConfigError(f"{name}: neither a file nor a directory; it cannot be copied into an image")


def _copy(source: Path, target: Path, top: Path, top_target: Path) -> None:
    missing = [parent for parent in target.parents if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir()
        shutil.copystat(top / parent.relative_to(top_target), parent)
    mode = source.lstat().st_mode
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISDIR(mode):
        target.mkdir(exist_ok=True)
        shutil.copystat(source, target)
    elif stat.S_ISREG(mode):
        shutil.copy2(source, target)
    else:
        raise ConfigError(f"{source}: neither a file nor a directory; it cannot be copied into an image")


def is_archive(path: Path) -> bool:
    """Whether ``ADD`` unpacks it: a tar archive, plain or compressed, known by its content."""
    with open(path, "rb") as file:
        if file.read(4) == b"\x28\xb5\x2f\xfd":
            raise ConfigError(
                f"{path}: archives compressed with zstd are not unpacked here; use gzip, or COPY and RUN tar"
            )
    return tarfile.is_tarfile(path)


def _extract(archive: Path, target: Path) -> None:
    # The host's tar strips what leads out of the target, and makes links last; archives of tasks may be hostile.
    argv = ["tar", "-x", "--no-same-owner", "-f", str(archive), "-C", str(target)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["tar said nothing"])[0]
        raise ConfigError(f"{archive}: cannot be unpacked ({why}); ADD takes whole tar archives")


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
    wild = [pattern for pattern in matcher.patterns if pattern.count("*") > 2]

    def excluded(path: str) -> bool:
        for pattern in wild:
            if _ways(pattern, path) > _MAX_WAYS:
                raise ConfigError(f"{where or 'pattern'}: {pattern!r} has too many wildcards for {path!r}; write fewer")
        return matcher.matches(path)

    return excluded


def _ways(pattern: str, path: str) -> int:
    """Upper bound of the ways to divide ``path`` among the wildcards of ``pattern``, as a backtracking search may."""
    ways = 1
    for wildcard, following in re.findall(r"(\*\*/|\*\*\Z|\*)(?=(.?))", pattern):
        if wildcard == "**/":
            ways *= 1 + path.count("/")
        elif following:
            ways *= 1 + (len(path) if following in "*?[\\" else path.count(following))
    return ways


def _lines(path: Path) -> list[str]:
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            return file.read(MAX_PATTERN_CHARACTERS + 1).splitlines()
    except OSError:
        return []
