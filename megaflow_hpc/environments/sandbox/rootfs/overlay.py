"""The overlay of an unpacked image and a writable layer, mounted by us before Apptainer starts.

Apptainer 1.4 mounts one itself, but in a user namespace without ``userxattr``: then no directory of the image that
holds others can be deleted (``rm -rf`` ends with an I/O error), since the mark that hides what was below cannot be set.
It also tries the mount out first, and each unmounting waits until the file system has written everything of everybody.
``volatile`` spares that: a layer need not outlive its node.

The names of its directories stand in the mount table, which every process inside may read, and the kernel takes them
in one page, with all other options. So it is mounted from a directory of links: ``upper``, ``work``, and 0, 1, 2 … for
the lower ones. What lies side by side in the cache has one link together, as far as the page takes the longer names: a
link takes longer to make than to follow.
"""

from __future__ import annotations

import functools
import os
import stat
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megaflow_hpc.environments.sandbox.argv import as_user, bounded
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import unshare
from megaflow_hpc.host.files import remove_tree

MOUNT = 'cd "$1" && mount -t overlay overlay -o "$2" "$3" && cd / && shift 3 || exit 1; '
MOUNT_POINTS = ("dev", "proc", "sys", "tmp", "etc")
"""Apptainer makes none in a root that it does not overlay itself."""


MAX_LOWERS = 400
"""Lower directories of one overlay: the kernel takes 500, and what names them has to fit into a page."""
_MAX_NAMES_BYTES = 3400
"""Bytes of their names; the rest of the page is for the other options."""
_MIN_NAME_BYTES = 4
"""Bytes of a link's name, which is a number, and what divides it from the next."""


class Overlay(NamedTuple):
    """What :data:`MOUNT` takes."""

    directory: str
    """To mount from."""
    options: str
    merged: str
    """Where to."""


def lay(lowers: Sequence[str], layer: str, merged: str) -> Overlay | None:
    """Makes what an overlay at ``merged`` needs, and returns how it is mounted.

    Args:
        lowers: directories of the image, the topmost first.
        layer: directory of the writable layer; ``upper`` and ``work`` are made in it, and what a volatile mount leaves
            in ``work`` goes.

    Returns:
        ``None`` where this does not work: then Apptainer's own overlay has to do.
    """
    if odd(layer, merged):
        return None
    if os.geteuid() == 0 or not works(os.path.dirname(layer)):
        return None
    prepare(lowers, layer, merged)
    return arguments(lowers, layer, merged)


def argv_prefix(mounted: Overlay, spec: SandboxSpec, namespace: Sequence[str] | None = None) -> list[str]:
    """Returns the argv prefix of a container's command line: into namespaces of its own, and there an overlay.

    Args:
        spec: says who to be from there on.
        namespace: argv prefix that enters a user namespace; default :func:`unshare`'s.
    """
    script = f'{MOUNT}{bounded(spec)}exec "$@"'
    result = [*_enter(namespace), "/bin/sh", "-c", script, "sh", *mounted]
    return result if spec.as_root else [*result, *as_user()]


def odd(*paths: str) -> bool:
    """Whether a path has a character that a bind or an overlay of Apptainer's cannot hold."""
    return any(letter in path for path in paths for letter in ',:\\"')


def prepare(lowers: Sequence[str], layer: str, merged: str) -> None:
    """Makes the directories of a writable layer and, where the image has none, those that Apptainer mounts on."""
    remove_tree(f"{layer}/work")  # a volatile mount leaves a mark there that refuses the next
    for path in (f"{layer}/upper", f"{layer}/work", merged):
        os.makedirs(path, mode=0o755, exist_ok=True)
    for name in MOUNT_POINTS:
        place = f"{layer}/upper/{name}"
        if not os.path.lexists(place) and not (_has if len(lowers) == 1 else _layers_have)(tuple(lowers), name):
            os.mkdir(place, 0o755)


def _has(lowers: Sequence[str], name: str) -> bool:
    """Whether an image has ``name`` at its top; the topmost layer that says anything of it is right."""
    for lower in lowers:
        try:
            found = os.lstat(f"{lower}/{name}")
        except OSError:
            continue
        return not (stat.S_ISCHR(found.st_mode) and found.st_rdev == 0)
    return False


_layers_have = functools.lru_cache(maxsize=4096)(_has)
"""Of an image of layers, which never change: looked up once, not in hundreds of directories at each start."""


def arguments(lowers: Sequence[str], layer: str, merged: str) -> Overlay:
    """Returns how an overlay is mounted, and makes the directory of links that it is mounted from.

    Raises:
        SandboxError: there are more of them than the kernel takes.
    """
    if len(lowers) > MAX_LOWERS:
        raise SandboxError(f"{layer}: an image of {len(lowers)} layers; an overlay takes {MAX_LOWERS}")
    links = f"{layer}.links"
    remove_tree(links)
    os.mkdir(links, 0o700)
    names, targets = _linked(lowers)
    for name, target in (targets | {"upper": f"{layer}/upper", "work": f"{layer}/work"}).items():
        os.symlink(target, f"{links}/{name}")
    options = f"lowerdir={':'.join(names)},upperdir=upper,workdir=work,userxattr,volatile"
    return Overlay(links, options, merged)


def _linked(lowers: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Names lower directories by as few links as do, in :data:`_MAX_NAMES_BYTES`, and returns the names with the links:
    name → target."""
    places = [os.path.dirname(os.path.dirname(lower)) for lower in lowers]
    together = Counter(places)
    links: dict[str, str] = {}
    names: list[str] = []
    left = _MAX_NAMES_BYTES - _MIN_NAME_BYTES * len(lowers)
    for lower, place in zip(lowers, places, strict=True):
        below = lower[len(place) :]
        beside = together[place] > 1 and len(below) <= left and not odd(below)
        if beside:
            left -= len(below)
        link = links.setdefault(place if beside else lower, str(len(links)))
        names.append(link + below if beside else link)
    return names, {link: target for target, link in links.items()}


def _enter(namespace: Sequence[str] | None = None) -> Sequence[str]:
    first = unshare() if namespace is None else (*namespace, unshare()[0])
    return (*first, "--mount", "--propagation", "private", "--")


_tried: dict[int, bool] = {}


def works(directory: str) -> bool:
    """Whether the kernel gives an ordinary user such an overlay on this directory's file system; tried out once."""
    device = os.stat(directory).st_dev
    if device not in _tried:
        _tried[device] = bool(unshare()) and _try(directory)
    return _tried[device]


def _try(directory: str) -> bool:
    with tempfile.TemporaryDirectory(dir=directory) as where:
        for name in ("lower/below/deep", "layer/upper", "layer/work", "merged"):
            os.makedirs(f"{where}/{name}")
        script = MOUNT.partition("&& cd /")[0] + '&& rm -r "$3/below" && mkdir "$3/below"'
        argv = [
            *_enter(),
            "/bin/sh",
            "-c",
            script,
            "sh",
            *arguments([f"{where}/lower"], f"{where}/layer", f"{where}/merged"),
        ]
        done = subprocess.run(argv, capture_output=True, check=False, timeout=60)
        remove_tree(f"{where}/layer")
    return done.returncode == 0
