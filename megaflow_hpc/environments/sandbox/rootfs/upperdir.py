"""A sandbox's writable layer, edited from the host while nothing runs in it.

What an agent changed lies in the overlay's upper directory, which belongs to the user who runs the campaign. So a
change is undone by removing it there, whatever the agent made of the programs inside: the image's own file shows
again. The tree is the agent's work: nothing here follows a link in it.

The image is a view of all its layers (images/layers/view.py), so that a program is the image's own whichever of them it
comes from; ``None`` where its files cannot be seen from the host.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from megaflow_hpc.environments.images.layers.merging import DELETED, OPAQUE_MARK, open_to_owner, show_through
from megaflow_hpc.environments.images.layers.view import View
from megaflow_hpc.host.files import remove_tree

RUNTIME = (".singularity.d", ".exec", ".run", ".shell", ".test", "environment", "singularity")
"""What the container runtime reads of an image before anything of ours runs: scripts that set variables, for one."""

PRELOAD = "etc/ld.so.preload"
PROGRAM_DIRS = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin", "etc/alternatives")
_NAMES = """
sh bash dash ash busybox [ awk basename cat chmod chown cmp comm cp cut date dd diff dirname du echo env expr false find
gawk getopt grep egrep fgrep head hostname id kill ln ls mawk md5sum mkdir mktemp mv nl nproc od paste printenv printf
ps pwd readlink realpath rm rmdir sed seq setsid sha1sum sha256sum sha512sum sleep sort stat su sudo sync tail tar tee
test timeout touch tr true uname uniq wc which xargs yes
"""
PROGRAMS = frozenset(_NAMES.split())
"""The shells, and what test scripts are made of."""

LIBRARY_DIRS = ("lib", "lib64", "usr/lib", "usr/lib64")
LIBRARIES = (
    *("ld-linux", "ld64.so", "ld-2", "ld.so", "ld-musl", "libc.so", "libc-2", "libc.musl", "libm.so", "libdl.so"),
    *("libpthread.so", "librt.so", "libtinfo.so", "libselinux.so", "libpcre2-8.so", "libacl.so", "libattr.so"),
)
"""How the names of those files begin that every one of these programs is made of when it starts."""

_PREFERRED = ("glibc-hwcaps", "tls", "haswell", "x86_64", "avx512_1")
"""Directories beside the libraries in which the loader looks first, if the processor suits."""
CACHE = "etc/ld.so.cache"
_LARGEST_CACHE = 16 << 20


def revert(upper: Path, path: str) -> bool:
    """Undoes whatever the layer has at ``path``, relative to the root; ``True`` if there was anything."""
    *parents, name = PurePosixPath(path).parts
    place = upper
    for part in parents:
        place /= part
        if not _is_directory(place):
            return False
    return _remove(place / name)


def make_way(upper: Path, path: str) -> None:
    """Makes ``path`` a place that binds may cover: its parents real directories of the layer or of the image."""
    parts = PurePosixPath(path).parts
    for depth in range(1, len(parts)):
        place = upper.joinpath(*parts[:depth])
        if _is_directory(place):
            open_to_owner(place)
        else:
            _remove(place)
    revert(upper, path)


def restore_programs(upper: Path, image: View | None) -> list[str]:
    """Gives a layer the image's own shells, basic tools, loader and C library back; returns what had been changed.

    Where the image's files cannot be seen, every file of these names counts as one of the image's.
    """
    open_to_owner(upper)
    changed = [name for name in RUNTIME if revert(upper, name)]
    if revert(upper, PRELOAD):
        changed.append(PRELOAD)
    for directory in PROGRAM_DIRS:
        for entry in _changes(upper, image, directory, changed):
            name = entry.removeprefix(DELETED)
            if name in PROGRAMS and _has(image, name, PROGRAM_DIRS):
                changed += _undo(upper, image, directory, entry)
    platforms: set[str] = set()
    for directory in LIBRARY_DIRS:
        platforms |= _restore_libraries(upper, image, directory, changed)
    known = sorted(name for name in platforms if _has(image, name, LIBRARY_DIRS))
    for directory in _below(LIBRARY_DIRS, known):
        _restore_libraries(upper, image, directory, changed)
    if _cache_leads_elsewhere(upper, image):
        revert(upper, CACHE)
        changed.append(CACHE)
    return changed


def _restore_libraries(upper: Path, image: View | None, directory: str, changed: list[str]) -> set[str]:
    """Returns the names there that may be directories of one platform's libraries, such as x86_64-linux-gnu."""
    entries = _changes(upper, image, directory, changed)
    for entry in entries:
        if entry.removeprefix(DELETED).startswith(LIBRARIES):
            changed += _undo(upper, image, directory, entry)
        elif entry in _PREFERRED:
            changed += _revert_libraries(upper, f"{directory}/{entry}")
    return {name for name in (entry.removeprefix(DELETED) for entry in entries) if _is_platform(name)}


def false_programs(upper: Path, image: View | None, search_path: str) -> list[str]:
    """Returns what the layer has under the names of the image's basic tools in further directories of a ``PATH``."""
    found: list[str] = []
    for directory in dict.fromkeys(
        os.path.normpath(word).strip("/") for word in search_path.split(":") if word[:1] == "/"
    ):
        parts = PurePosixPath(directory).parts
        if directory in PROGRAM_DIRS or not parts:
            continue
        if all(_is_directory(upper.joinpath(*parts[: depth + 1])) for depth in range(len(parts))):
            names = PROGRAMS.intersection(os.listdir(upper / directory))
            found += [f"{directory}/{name}" for name in sorted(names) if _has(image, name, PROGRAM_DIRS)]
    return found


def _revert_libraries(upper: Path, directory: str) -> list[str]:
    """Reverts copies of the basic libraries for better processors, which the loader prefers; returns their paths."""
    found: list[str] = []
    waiting = [directory] if _is_directory(upper / directory) else []
    while waiting:
        place = waiting.pop()
        with suppress(OSError):  # deeper than a path may be long: the loader cannot open it either
            open_to_owner(upper / place)  # root in the sandbox needs no rights to read what we could not
            for entry in os.scandir(upper / place):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{place}/{entry.name}")
                elif entry.name.startswith(LIBRARIES):
                    found.append(f"{place}/{entry.name}")
    return [path for path in found if revert(upper, path)]


def _cache_leads_elsewhere(upper: Path, image: View | None) -> bool:
    """Whether the loader's cache, as the agent left it, has one of the basic libraries outside of the system's."""
    if not _is_directory(upper / "etc"):
        return False
    try:
        descriptor = os.open(upper / CACHE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return os.path.lexists(upper / CACHE)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return True
        data = file.read(_LARGEST_CACHE + 1)
    libraries = [image.names(_resolved(image, directory)) for directory in LIBRARY_DIRS] if image else []
    platforms = {name for names in libraries for name in names if _is_platform(name)}
    places = {f"/{place}" for place in (*LIBRARY_DIRS, *_below(LIBRARY_DIRS, platforms))}
    names = (os.path.split(os.fsdecode(found[1])) for found in re.finditer(rb"(/[^\0]+)\0", data))
    elsewhere = any(name.startswith(LIBRARIES) and place not in places for place, name in names)
    return elsewhere or len(data) > _LARGEST_CACHE


def mend(upper: Path, image: View | None, workdir: str | None) -> None:
    """Makes a container start again, whatever the last one did: its shell, its directories, its work directory."""
    restore_programs(upper, image)
    place = upper
    for part in PurePosixPath((workdir or "/").strip("/")).parts:
        place /= part
        if _is_directory(place):
            open_to_owner(place)
        else:
            _remove(place)


def keep_only(upper: Path, aside: Path, paths: Iterable[str]) -> list[str]:
    """Sets the whole layer aside and takes back only what it has at ``paths``; returns those taken.

    Moved, not copied: deletions (overlay's whiteouts) and times stay as they are. A link is not taken, nor
    what lies behind one: the agent made it lead elsewhere.
    """
    open_to_owner(upper)
    os.rename(upper, aside)
    upper.mkdir(mode=0o755)
    taken: list[str] = []
    for path in dict.fromkeys(path.strip("/") for path in paths):
        parts = PurePosixPath(path).parts
        if not parts or any(PurePosixPath(path).is_relative_to(other) for other in taken):
            continue
        if _move(aside, upper, parts):
            taken.append(path)
    return taken


def put_back(upper: Path, aside: Path, taken: Sequence[str]) -> None:
    """Undoes :func:`keep_only`: the layer is the agent's again, with what happened at the kept paths since."""
    for path in taken:
        parts = PurePosixPath(path).parts
        revert(aside, path)
        _move(upper, aside, parts)
    remove_tree(upper)
    os.rename(aside, upper)


def set_aside(upper: Path, path: str, aside: Path) -> bool:
    """Moves what the layer has at ``path`` to ``aside``, so that the image's own shows; ``False`` if it has nothing."""
    *parents, name = PurePosixPath(path.strip("/")).parts
    place = upper
    for part in parents:
        place /= part
        if not _is_directory(place):
            return False
    if not os.path.lexists(place / name):
        return False
    os.rename(place / name, aside)
    return True


def replace(upper: Path, path: str, aside: Path) -> None:
    """Undoes :func:`set_aside`: whatever the layer has at ``path`` now is gone, and what leads there is directories."""
    make_way(upper, path.strip("/"))
    place = upper / path.strip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    os.rename(aside, place)


def _move(source: Path, target: Path, parts: Sequence[str]) -> bool:
    here, there = source, target
    for part in parts[:-1]:
        here, there = here / part, there / part
        if not _is_directory(here):
            return False
        there.mkdir(exist_ok=True)
        os.chmod(there, stat.S_IMODE(os.lstat(here).st_mode) | 0o700)
    here, there = here / parts[-1], there / parts[-1]
    if not os.path.lexists(here) or here.is_symlink():
        return False
    os.rename(here, there)
    return True


def _changes(upper: Path, image: View | None, directory: str, changed: list[str]) -> list[str]:
    """What the layer has in a directory of the image, after the directory itself is the image's again."""
    place = upper
    for part in PurePosixPath(directory).parts:
        place /= part
        path = str(place.relative_to(upper))
        below = image.entry(path) if image else None
        if not os.path.lexists(place):
            if _remove(place):
                changed.append(path)
            return []
        if _is_directory(place) and not (below and below.is_link):
            _show_through(place)
        elif below:
            _remove(place)
            changed.append(path)
            return []
        else:
            return []
    return sorted(os.listdir(place))


def _undo(upper: Path, image: View | None, directory: str, entry: str) -> list[str]:
    """What the agent added is left, unless it comes before the image's own of the same name."""
    name = entry.removeprefix(DELETED)
    hijacks = directory.startswith("usr/local/")
    if image is None or hijacks or image.entry(f"{directory}/{name}"):
        _remove(upper / directory / entry)
        return [f"{directory}/{name}"]
    return []


def _has(image: View | None, name: str, directories: Iterable[str]) -> bool:
    """Whether an image has ``name`` in one of the directories, which may be links; true of one that cannot be seen."""
    return image is None or any(image.entry(f"{_resolved(image, directory)}/{name}") for directory in directories)


def _resolved(image: View, directory: str) -> str:
    try:
        return image.resolve(directory)
    except OSError:  # links in a circle
        return directory


def _is_platform(name: str) -> bool:
    return name.count("-") >= 2


def _below(directories: Iterable[str], names: Iterable[str]) -> list[str]:
    return [f"{directory}/{name}" for directory in directories for name in sorted(names)]


def _show_through(directory: Path) -> None:
    """A directory that was made anew hides the image's; without its mark both are seen."""
    show_through(directory)
    revert(directory, OPAQUE_MARK)
    open_to_owner(directory)


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _remove(path: Path) -> bool:
    """Removes what is there, and what marks it as deleted; whether there was either."""
    found = [place for place in (path, path.with_name(DELETED + path.name)) if os.path.lexists(place)]
    for place in found:
        remove_tree(place)
    return bool(found)
