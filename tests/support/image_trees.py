"""The files of an image in any stored form, in a form that can be compared with another builder's."""

from __future__ import annotations

import hashlib
import io
import posixpath
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.layered import is_layered, layer_path, read_layered
from megaflow_hpc.host.subordinate import namespace

_KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.DIRTYPE: "directory",
    tarfile.SYMTYPE: "link",
    tarfile.FIFOTYPE: "fifo",
}


@dataclass(frozen=True)
class Entry:
    """A path of an image. ``content`` is a file's SHA-256 or a link's target; ``same`` is the first of several hard
    links."""

    kind: str
    mode: int
    owner: str
    content: str = ""
    mtime: int = 0
    same: str = ""


Tree = dict[str, Entry]


def tree_of(image: str | Path) -> Tree:
    """Return the files of an image by absolute path. The image is a SIF, a directory, or a document that names
    layers."""
    return _with_first_names(_tree_of(Path(image)))


def tree_of_archive(content: IO[bytes]) -> Tree:
    """Return the files of an image that is a single tar archive."""
    with tarfile.open(fileobj=content) as archive:
        return _with_first_names(_entries(archive))


def _tree_of(image: Path) -> Tree:
    if not is_layered(image):
        return _tree_of_files(image)
    layered = read_layered(image)
    tree = _tree_of(Path(layered.base.path)) if layered.base else {}
    for layer in layered.layers:
        with tarfile.open(layer_path(image, layer.digest)) as archive:
            _apply_layer(tree, _entries(archive, layer.digest))
    return tree


def _with_first_names(tree: Tree) -> Tree:
    names: dict[str, list[str]] = {}
    for path, entry in tree.items():
        names.setdefault(entry.same or path, []).append(path)
    for paths in names.values():
        for path in paths:
            tree[path] = replace(tree[path], same=min(paths) if len(paths) > 1 else "")
    return tree


def _entries(archive: tarfile.TarFile, label: str = "") -> Tree:
    """Yield the entries of an archive under their names there. Hard links of one file share one labelled ``same``."""
    tree: Tree = {}
    for member in archive:
        path = posixpath.normpath("/" + member.name.strip("/"))
        if member.islnk():
            other = posixpath.normpath("/" + member.linkname.strip("/"))
            tree[other] = tree[path] = replace(tree[other], same=tree[other].same or f"{label}:{other}")
            continue
        content = member.linkname if member.issym() else ""
        if member.isreg():
            file = archive.extractfile(member)
            assert file
            content = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        mode = 0o777 if member.issym() else member.mode
        kind = _KINDS.get(member.type, "other")
        tree[path] = Entry(kind, mode, f"{member.uid}:{member.gid}", content, int(member.mtime))
    tree.pop("/", None)
    return tree


def _apply_layer(tree: Tree, layer: Tree) -> None:
    """Apply an OCI layer to a tree."""
    for path in layer:
        directory, name = posixpath.split(path)
        if name == ".wh..wh..opq":
            _remove(tree, [each for each in tree if each.startswith(f"{directory.rstrip('/')}/")])
        elif name.startswith(".wh."):
            gone = posixpath.join(directory, name.removeprefix(".wh."))
            _remove(tree, [each for each in tree if each == gone or each.startswith(f"{gone}/")])
    for path, entry in layer.items():
        if posixpath.basename(path).startswith(".wh."):
            continue
        if entry.kind != "directory":
            _remove(tree, [each for each in tree if each.startswith(f"{path}/")])
        _remove(tree, [path] if path in tree else [])
        tree[path] = entry


def _remove(tree: Tree, paths: Iterable[str]) -> None:
    for path in paths:
        del tree[path]


def _tree_of_files(image: Path) -> Tree:
    with tempfile.TemporaryDirectory() as place, namespace() as inside:
        root = image
        pack = ["tar", "-C", str(root), "--numeric-owner", "--format=posix", "-cf", "-", "."]
        if not image.is_dir():
            root = Path(place, "tree")
            offset = str(sif.system_partition(str(image)).offset)
            unpack = ["unsquashfs", "-n", "-q", "-no-xattrs", "-o", offset, "-d", str(root), str(image)]
            subprocess.run([*inside, *unpack], check=False, capture_output=True)
            pack[2] = str(root)
        done = subprocess.run([*inside, *pack], capture_output=True, check=True)
        subprocess.run([*inside, "rm", "-rf", str(Path(place, "tree"))], check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        return _entries(archive)
