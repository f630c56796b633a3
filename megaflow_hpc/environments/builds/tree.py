"""Program that reads and packs an image's files during a build. :func:`run_tree` starts it.

The program runs as uid 0 of the user namespace that owns the files::

    copy ROOT TARGET SOURCE…    copies each SOURCE of the image to TARGET/<number>/<name>
    place FILE ITEMS            writes a layer of ITEMS; reads the placement and the layers below from standard input
    layer FILE UPPER [marks]    writes an overlay's upper directory as a layer; marks: whiteouts are ``.wh.`` files
    lay TARGET LAYER…           applies LAYERs, lowest first, to the tree at TARGET, or creates it from the first one
    pack ROOT FILE              packs the image into a squashfs

The files are untrusted, because steps of a Dockerfile may have written them. The program opens each file relative to an
open directory. It resolves links inside the image and never writes through a link.
"""

from __future__ import annotations

import errno
import json
import os
import posixpath
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.builds.placing import Placement, Placer
from megaflow_hpc.environments.images.layers import merging
from megaflow_hpc.environments.images.layers.blob import OPEN_DIRECTORY, LayerFacts, Packer, opened, pack_tree
from megaflow_hpc.environments.images.layers.view import LayerView, Tree
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host import child
from megaflow_hpc.host.apptainer import last_line
from megaflow_hpc.host.files import opened_below, remove_tree
from megaflow_hpc.host.tar import RefusedMember

MOUNTED_DIRECTORIES = (".megaflow", ".megaflow-build", "dev")
"""Top-level directories that the build uses as mount points."""
_DEV_FULL, _HOSTS = ("dev", "full"), ("etc", "hosts")
"""Mount points for files. ``/etc/hosts`` is part of a step's changes only if the step runs on a copy of its image."""

_SQUASHFS = ("-noappend", "-no-progress", "-no-xattrs", "-comp", "gzip", "-Xcompression-level", "1")
"""Options of ``mksquashfs``. Every squashfs version can read gzip, and level 1 is fast."""


def copy(root: str, target: str, *sources: str) -> None:
    """Copies ``sources`` of an image to ``target/<number>/<name>``. Resolves symlinks in a source path inside the
    image."""
    top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for number, source in enumerate(sources):
        directory = os.path.join(target, str(number))
        os.makedirs(directory)
        item = os.path.join(directory, posixpath.basename(posixpath.normpath(source)) or "root")
        with opened_below(top, source, as_root=True) as (descriptor, _):
            path = f"/proc/self/fd/{descriptor}"
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                path += "/."
            why = child.cp(path, item, "-H", "-T", pass_fds=(descriptor,))
        if why:
            raise OSError(errno.EIO, why, source)


def place(file: str, items: str) -> None:
    """Writes copied items to a layer and prints the layer's facts as JSON."""
    request = json.load(sys.stdin)
    how = request["how"]
    if how["owner"]:
        how["owner"] = tuple(how["owner"])
    with Packer(Path(file)) as packer:
        Placer(packer, LayerView([Tree(layer) for layer in request["layers"]])).place(Path(items), Placement(**how))
    _print(packer)


def layer(file: str, upper: str, marks: str = "") -> None:
    """Writes an overlay's upper directory as a layer, without the build's mount points.

    Prints the layer's facts as JSON, and ``etc/hosts`` on a second line if the step has changed that file.
    """
    top = os.open(upper, OPEN_DIRECTORY)
    _remove_mount_point(top, *_DEV_FULL)
    if marks:
        _remove_mount_point(top, *_HOSTS)
    changed_hosts = _exists(top, *_HOSTS)
    for name in MOUNTED_DIRECTORIES:
        with suppress(OSError):  # Missing, or the image has files there.
            os.rmdir(name, dir_fd=top)
    with Packer(Path(file)) as packer:
        pack_tree(packer, top, marks=bool(marks))
    _print(packer)
    if changed_hosts:
        print("/".join(_HOSTS))


@contextmanager
def _status(top: int, directory: str, name: str) -> Iterator[tuple[int, os.stat_result]]:
    """Yields the descriptor of a directory and the status of a file in it. Raises :class:`OSError` if the file is
    missing."""
    with opened(directory, OPEN_DIRECTORY, top) as descriptor:
        yield descriptor, os.stat(name, dir_fd=descriptor, follow_symlinks=False)


def _exists(top: int, directory: str, name: str) -> bool:
    with suppress(OSError), _status(top, directory, name):
        return True
    return False


def _remove_mount_point(top: int, directory: str, name: str) -> None:
    with suppress(OSError), _status(top, directory, name) as (descriptor, status):
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(name, dir_fd=descriptor)
        elif stat.S_ISREG(status.st_mode) and not status.st_size:
            os.unlink(name, dir_fd=descriptor)


def _print(packer: Packer) -> None:
    print(json.dumps(asdict(packer.facts())))


def lay(target: str, *layers: str) -> None:
    """Copies layers into the directory ``target`` and merges them. Creates the directory if it does not exist."""
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
    """Packs an image with ``mksquashfs``, which replaces this process."""
    os.execvp("mksquashfs", ["mksquashfs", root, file, *_SQUASHFS])


async def run_tree(prefix: Sequence[str], *words: str, request: Any = None) -> str:
    """Runs one verb of this program in a child process and returns its output. Cancelling the task kills the child.

    Args:
        prefix: Argv prefix that enters the child's namespaces.
        request: JSON value for the child's standard input. ``None`` means empty input.

    Raises:
        SiteError: The program failed. The message is the last line of its standard error.
    """
    stdin = b"" if request is None else json.dumps(request).encode()
    status, output, errors = await child.run([*prefix, *child.argv_of(sys.modules[__name__]), *words], stdin)
    if status:
        raise SiteError(last_line(errors.decode("utf-8", "replace")))
    return output.decode()


def facts_of(output: str) -> LayerFacts:
    """Parses a layer's facts from the program's output."""
    return LayerFacts(**json.loads(output))


def main() -> None:
    """Runs the verb given on the command line."""
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
