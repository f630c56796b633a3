"""An image in the making: the files it started from and, over them, what steps have written.

A stage is one layer over its base. Where there is no overlay its files are one tree, the base's and its own.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.environments.builds import tree
from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.sandbox.rootfs import overlay
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host import child
from megaflow_hpc.host.apptainer import clean_environment, last_line
from megaflow_hpc.host.child import dies_with_parent

_ROOT = SandboxSpec("", nested=True)
"""Who mounts a layer to read it: uid 0 of its namespace."""
_SIF_ARCHITECTURE = {"x86_64": "2", "aarch64": "4", "ppc64le": "6", "s390x": "11", "riscv64": "12"}


@dataclass(frozen=True)
class Layers:
    """``base``: a directory with an image's files. ``layer``: a directory with the ``upper`` of an overlay over it.

    ``namespace``: argv prefix that joins the user namespace in which the files have their owners.
    """

    base: str
    namespace: Sequence[str]
    layer: str | None = None

    async def copy(self, sources: Sequence[str], target: Path) -> None:
        """Copies what lies at ``sources`` of the image to ``target/<number>/<name>``.

        Raises:
            SiteError: nothing is there, or it cannot be copied.
        """
        await self._run("copy", [str(target), *sources])

    async def pack(self, settings: bytes, target: Path) -> None:
        """Packs the image into a squashfs.

        Args:
            settings: lines of shell that set its variables, after those of its base.
        """
        if shutil.which("mksquashfs", path=clean_environment()["PATH"]) is None:
            raise SiteError("mksquashfs: not on PATH, which images are packed with; install squashfs-tools")
        await self._run("pack", [str(target)], settings)

    async def _run(self, verb: str, arguments: Sequence[str], stdin: bytes = b"") -> None:
        prefix, root = list(self.namespace), self.base
        if self.layer is not None:
            root = f"{self.layer}.root"
            prefix = overlay.argv_prefix([self.base], self.layer, root, _ROOT, self.namespace) or []
            if not prefix:
                raise SiteError(f"{self.layer}: no overlay can be mounted there; set TMPDIR to another local directory")
        await run([*prefix, *child.argv_of(tree), verb, root, *arguments], stdin)


async def unpack(image: str, target: Path, namespace: Sequence[str]) -> None:
    """Unpacks a SIF, its files owned by whom it says, as far as the caller has ids."""
    program = shutil.which("unsquashfs")
    if program is None:
        raise SiteError("unsquashfs: not on PATH, which images are unpacked with; install squashfs-tools")
    offset = str(sif.system_partition(image).offset)
    words = [program, "-n", "-q", "-no-xattrs", "-o", offset, "-d", str(target), image]
    await run([*namespace, *dies_with_parent(), *words], allowed=(0, 2))  # 2: a device could not be made


async def write_sif(apptainer: str, squashfs: Path, labels: dict[str, str], target: Path) -> None:
    """Makes a SIF of a squashfs and of labels, which Apptainer does not look into."""
    architecture = _SIF_ARCHITECTURE.get(platform.machine())
    if architecture is None:
        raise SiteError(f"{platform.machine()}: images cannot be made on this architecture; build them elsewhere")
    await run([apptainer, "sif", "new", str(target)])
    add = [apptainer, "sif", "add"]
    kind = ["--datatype", "4", "--partfs", "1", "--parttype", "2", "--partarch", architecture]
    await run([*add, *kind, str(target), str(squashfs)])
    file = squashfs.with_name("inspect-metadata.json")
    file.write_text(json.dumps({"data": {"attributes": {"labels": labels}}, "type": "container"}))
    await run([*add, "--datatype", "6", "--filename", file.name, str(target), str(file)])


async def run(argv: Sequence[str], stdin: bytes = b"", *, allowed: Sequence[int] = (0,)) -> None:
    """Runs a program to its end; it ends with this task, and with this process.

    Raises:
        SiteError: with the last line it said.
    """
    status, _, errors = await child.run(argv, stdin)
    if status not in allowed:
        raise SiteError(last_line(errors.decode("utf-8", "replace")))
