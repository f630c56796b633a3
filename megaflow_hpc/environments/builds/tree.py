"""The program that reads and packs the files of an image in the making, as uid 0 of the namespace that owns them.

::

    copy ROOT TARGET SOURCE…    what lies at each SOURCE of the image → TARGET/<number>/<its name>
    pack ROOT FILE              the image → a squashfs; its further settings come by standard input

The files are whatever a step has made. They are never opened by a path: every link in one is read as a process in the
image would read it, and what is written goes into directories that are no links.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
import subprocess
import sys

from megaflow_hpc.host import beneath
from megaflow_hpc.host.child import dies_with_parent

OURS = (".megaflow", ".megaflow-build", ".megaflow-placing")
"""Directories at the top in which the build's own were mounted."""

_SETTINGS = (".singularity.d", "env")
_SETTINGS_FILE = "90-environment.sh"
_MOST_SETTINGS = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SQUASHFS = ("-noappend", "-no-progress", "-no-xattrs", "-comp", "gzip", "-Xcompression-level", "1")
"""Fast compression: an image is packed once and unpacked on every node; readable by every squashfs there is."""


def copy(root: str, target: str, *sources: str) -> None:
    """Copies what lies at ``sources`` of an image; a link at the end of a source is followed within the image."""
    top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for number, source in enumerate(sources):
        place = os.path.join(target, str(number))
        os.makedirs(place)
        item = os.path.join(place, posixpath.basename(posixpath.normpath(source)) or "root")
        with beneath.opened(top, source, as_root=True) as (found, _):
            inside = f"/proc/self/fd/{found}" + ("/." if stat.S_ISDIR(os.fstat(found).st_mode) else "")
            done = subprocess.run(
                [*dies_with_parent(), "cp", "-a", "-H", "-T", "--reflink=auto", "--", inside, item],
                pass_fds=(found,),
                stderr=subprocess.PIPE,
                check=False,
            )
        if done.returncode:
            why = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["cp failed"]
            raise OSError(errno.EIO, why[-1][:500], source)


def pack(root: str, file: str) -> None:
    """Becomes the program that packs an image, after its settings were written into it."""
    settings = sys.stdin.buffer.read()
    top = os.open(root, _DIRECTORY)
    for name in OURS:
        try:
            os.rmdir(name, dir_fd=top)
        except OSError:
            continue  # there is none, or the image has something there itself
    if settings:
        _add(top, settings)
    os.execvp("mksquashfs", ["mksquashfs", root, file, *_SQUASHFS])


def _add(place: int, settings: bytes) -> None:
    for name in _SETTINGS:
        try:
            os.mkdir(name, 0o755, dir_fd=place)
        except FileExistsError:
            pass
        place = os.open(name, _DIRECTORY, dir_fd=place)
    before = b"#!/bin/sh\n"
    try:
        with open(os.open(_SETTINGS_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place), "rb") as known:
            if stat.S_ISREG(os.fstat(known.fileno()).st_mode):
                before = known.read(_MOST_SETTINGS)
    except OSError:
        pass  # none, or a link: the image's own way to break itself
    try:
        os.unlink(_SETTINGS_FILE, dir_fd=place)
    except FileNotFoundError:
        pass
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(_SETTINGS_FILE, flags, 0o755, dir_fd=place), "wb") as written:
        written.write(before + b"\n" + settings)


def main() -> None:
    """Entry point of the process."""
    verb, *arguments = sys.argv[1:]
    try:
        if verb == "copy":
            copy(*arguments)
        else:
            pack(*arguments)
    except OSError as error:
        sys.exit(f"{error.filename or arguments[0]}: {error.strerror}")
