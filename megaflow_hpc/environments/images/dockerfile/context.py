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

from megaflow_hpc.errors import ConfigError

Excluded = Callable[[str], bool]


class Context:
    """A directory, less what its ``.dockerignore`` names."""

    def __init__(self, root: Path, dockerfile: Path | None = None) -> None:
        self.root = root
        own = dockerfile.with_name(dockerfile.name + ".dockerignore") if dockerfile else None
        lines = _lines(own) if own and own.is_file() else _lines(root / ".dockerignore")
        self.ignored = patterns(lines)

    def find(self, source: str, exclude: Sequence[str] = ()) -> list[str]:
        """Paths relative to the context that a source names; wildcards do not cross ``/``, as in Docker.

        Raises:
            ConfigError: outside of the context, or nothing there.
        """
        clean = posixpath.normpath(source.lstrip("/") or ".")
        if clean == ".." or clean.startswith("../"):
            raise ConfigError(f"{source}: outside of the build context; put the file into {self.root}")
        if any(character in clean for character in "*?["):
            pattern = re.compile(_regex(clean))
            depth = clean.count("/") + 1
            names = sorted(name for name in self._names(depth) if pattern.fullmatch(name))
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


def patterns(lines: Sequence[str]) -> Excluded:
    """The predicate of ``.dockerignore`` lines: a path is excluded with everything below it; the last line wins."""
    rules: list[tuple[bool, re.Pattern[str]]] = []
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        negated = text.startswith("!")
        clean = posixpath.normpath(text[negated:].strip().lstrip("/") or ".")
        rules.append((negated, re.compile(_regex(clean) + r"(?:/.*)?")))

    def excluded(path: str) -> bool:
        verdict = False
        for negated, rule in rules:
            if verdict == negated and rule.fullmatch(path):
                verdict = not negated
        return verdict

    return excluded


def _regex(pattern: str) -> str:
    """``*`` and ``?`` do not match ``/``; ``**`` matches any number of directories."""
    found = ""
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if pattern.startswith("**/", position):
            found, position = found + "(?:.*/)?", position + 3
        elif pattern.startswith("**", position):
            found, position = found + ".*", position + 2
        elif character == "[" and (end := pattern.find("]", position + 2)) > 0:
            found += pattern[position : end + 1]  # `^` negates, `!` does not, as in Go's filepath.Match
            position = end + 1
        elif character == "\\" and position + 1 < len(pattern):
            found, position = found + re.escape(pattern[position + 1]), position + 2
        else:
            found += {"*": "[^/]*", "?": "[^/]"}.get(character, re.escape(character))
            position += 1
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
