"""Hundreds of small distinct images: real SIF files that Apptainer can run and unpack.

``apptainer build`` builds one. The others are copies with one uncompressed part of the file data overwritten, so their
content and digest differ while header, inodes and tables stay valid.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from functools import partial
from pathlib import Path

from megaflow_hpc.environments.images.apptainer_client import build
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.host.apptainer import find_apptainer

_LINE = 64


def digest_of(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class SmallImages:
    """Make images that are about ``size`` bytes larger than ``base``. Each has its number in ``/etc/number``.

    Args:
        base: an unpacked image whose programs they contain. Without it they can only be copied, not run.
    """

    def __init__(self, workplace: Path, size: int, base: str | os.PathLike[str] | None = None) -> None:
        tree = workplace / "tree"
        if base is not None:
            shutil.copytree(base, tree, symlinks=True)
        for name in ("etc", "dev", "proc", "sys", "tmp"):
            (tree / name).mkdir(parents=True, exist_ok=True)
        self._marker = os.urandom(_LINE)
        (tree / "etc" / "number").write_bytes(self._marker)
        (tree / "etc" / "filler").write_bytes(os.urandom(max(size - 40_000, 4096)))
        self.template = workplace / "template.sif"
        options = ("--mksquashfs-args", "-noD -noF -comp gzip")
        build(find_apptainer(), self.template, str(tree), *options)
        self._bytes = self.template.read_bytes()
        self._place = self._bytes.index(self._marker)

    def write(self, number: int, target: Path) -> None:
        """Write image ``number`` to ``target``; the same bytes at every call."""
        line = f"{number}".ljust(_LINE - 1).encode() + b"\n"
        with open(target, "wb") as file:
            file.write(self._bytes)
            file.seek(self._place)
            file.write(line)

    def fill(self, store: ImageStore, count: int) -> list[str]:
        """Publish images 0 to ``count`` - 1 in a store; return their paths."""
        return [
            str(store.make(f"small{number}", f"small image {number}", partial(self.write, number)))
            for number in range(count)
        ]
