"""A program that reads and packs the files of an image while it is built, and :func:`run_tree`, which runs it.

It runs as uid 0 of the namespace that owns the files::

    copy ROOT TARGET SOURCE…    copies each SOURCE of the image to TARGET/<number>/<its name>
    place FILE ITEMS            writes a layer of ITEMS; standard input says where they go, and over which layers
    layer FILE UPPER [marks]    writes a layer of an overlay's upper directory; marks: files mark what is deleted
    lay TARGET LAYER…           puts a base or layers, the lowest first, over the tree at TARGET, which may be missing
    pack ROOT FILE              packs the image into a squashfs

A step of a Dockerfile may have made the files. So no file is opened by its path. Links are resolved as a process in the
image would resolve them, and files are only written to directories that are not links.
"""

from __future__ import annotations

import errno
import json
import os
import posixpath
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.builds.placing import Placement, Placer
from megaflow_hpc.environments.images.layers import merging
from megaflow_hpc.environments.images.layers.blob import LayerFacts
from megaflow_hpc.environments.images.layers.packing import Packer, pack_tree
from megaflow_hpc.environments.images.layers.view import LayerView, Tree
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host import beneath, child
from megaflow_hpc.host.apptainer import last_line
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.tar import RefusedMember

OURS = (".megaflow", ".megaflow-build", ".megaflow-placing", "dev")
"""Directories at the top in which the build's own were mounted."""
POINTS = (("dev", "full"), ("etc", "hosts"))
"""On which it mounted; on the second only where a step writes to a copy."""

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
            why = child.cp(inside, item, "-H", "-T", pass_fds=(found,))
        if why:
            raise OSError(errno.EIO, why, source)


def place(file: str, items: str) -> None:
    """Writes a layer of items that are put in place; prints its facts."""
    said = json.load(sys.stdin)
    how = Placement(**said["how"] | {"owner": tuple(said["how"]["owner"]) if said["how"]["owner"] else None})
    with Packer(Path(file)) as packer:
        Placer(packer, LayerView([Tree(layer) for layer in said["layers"]])).place(Path(items), how)
    _print(packer)


def layer(file: str, upper: str, marks: str = "") -> None:
    """Writes a layer of an overlay's upper directory, without what the build itself mounted there; prints its facts,
    and names of ``localhost`` if these are in it."""
    top = os.open(upper, _DIRECTORY)
    for place in POINTS if marks else POINTS[:1]:
        _remove_point(top, *place)
    changed = _changed(top, *POINTS[1])
    for name in OURS:
        with suppress(OSError):  # there is none, or the image has something there itself
            os.rmdir(name, dir_fd=top)
    with Packer(Path(file)) as packer:
        pack_tree(packer, top, marks=bool(marks))
    _print(packer)
    if changed:
        print(changed)


def _changed(top: int, directory: str, name: str) -> str:
    """The path of what lies there, empty if there is nothing."""
    with suppress(OSError):
        place = os.open(directory, _DIRECTORY, dir_fd=top)
        try:
            os.stat(name, dir_fd=place, follow_symlinks=False)
            return f"{directory}/{name}"
        finally:
            os.close(place)
    return ""


def _remove_point(top: int, directory: str, name: str) -> None:
    with suppress(OSError):  # there is none
        place = os.open(directory, _DIRECTORY, dir_fd=top)
        try:
            found = os.stat(name, dir_fd=place, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                os.rmdir(name, dir_fd=place)
            elif stat.S_ISREG(found.st_mode) and not found.st_size:
                os.unlink(name, dir_fd=place)
        finally:
            os.close(place)


def _print(packer: Packer) -> None:
    print(json.dumps(asdict(packer.facts())))


def lay(target: str, *layers: str) -> None:
    """Puts copies of layers over a tree; where there is none, the first is a base, and copied."""
    if not os.path.lexists(target):
        _copy(os.path.realpath(layers[0]), target)
        layers = layers[1:]
    for each in layers:
        _copy(os.path.realpath(each), f"{target}.layer")
        merging.put_over(f"{target}.layer", target)
        remove_tree(f"{target}.layer")


def _copy(source: str, target: str) -> None:
    if why := child.cp(source, target):
        raise OSError(errno.EIO, why, source)


def pack(root: str, file: str) -> None:
    """Becomes the program that packs an image."""
    os.execvp("mksquashfs", ["mksquashfs", root, file, *_SQUASHFS])


async def run_tree(prefix: Sequence[str], *words: str, said: Any = None) -> str:
    """Runs one verb of the program and returns what it printed. The program ends if this task is cancelled.

    Args:
        prefix: argv prefix that enters its namespaces.
        said: sent to its standard input as JSON.

    Raises:
        SiteError: it failed; carries the last line of its errors.
    """
    stdin = b"" if said is None else json.dumps(said).encode()
    status, printed, errors = await child.run([*prefix, *child.argv_of(sys.modules[__name__]), *words], stdin)
    if status:
        raise SiteError(last_line(errors.decode("utf-8", "replace")))
    return printed.decode()


def facts_of(printed: str) -> LayerFacts:
    """Parses the facts of a layer that the program has written."""
    return LayerFacts(**json.loads(printed))


def main() -> None:
    """Entry point of the process."""
    verb, *arguments = sys.argv[1:]
    verbs: dict[str, Callable[..., None]] = {
        "copy": copy,
        "place": place,
        "layer": layer,
        "lay": lay,
        "pack": pack,
    }
    os.umask(0o022)
    try:
        verbs[verb](*arguments)
    except (ConfigError, RefusedMember) as error:
        sys.exit(f"{error}")
    except OSError as error:
        sys.exit(f"{error.filename or arguments[0]}: {error.strerror}")
