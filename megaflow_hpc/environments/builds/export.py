"""Makes a SIF of an image and its layers, for those who have no store: one file, the same files."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from megaflow_hpc.environments.builds.tree import run_tree
from megaflow_hpc.environments.builds.workspace import BuildWorkspace
from megaflow_hpc.environments.images.image_config import LABEL
from megaflow_hpc.environments.images.layered import LayeredImage
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host import child
from megaflow_hpc.host.apptainer import clean_environment, find_apptainer, last_line

SETTINGS = ".singularity.d/env/92-megaflow{}.sh"
"""Where Apptainer reads an image's variables, after those that its base sets (90-environment.sh)."""

_SIF_ARCHITECTURE = {"x86_64": "2", "aarch64": "4", "ppc64le": "6", "s390x": "11", "riscv64": "12"}


async def write_sif(workspace: BuildWorkspace, image: LayeredImage, target: Path) -> None:
    """Packs all files of an image into a SIF at ``target``.

    Raises:
        SiteError: a program that is needed is missing, or failed.
    """
    architecture = _SIF_ARCHITECTURE.get(platform.machine())
    if architecture is None:
        raise SiteError(f"{platform.machine()}: images cannot be made on this architecture; build them elsewhere")
    if shutil.which("mksquashfs", path=clean_environment()["PATH"]) is None:
        raise SiteError("mksquashfs: not on PATH, which images are packed with; install squashfs-tools")
    await workspace.open()
    squashfs, labels = workspace.place("squashfs"), workspace.place("labels")
    top = [await _settings(workspace, image)] if image.settings else []
    async with workspace.merged(image, top) as (prefix, root):
        await run_tree(prefix, "pack", root, str(squashfs))
    labels.mkdir()
    document = labels / "inspect-metadata.json"
    known = {LABEL: image.workdir} if image.workdir else {}
    document.write_text(json.dumps({"data": {"attributes": {"labels": known}}, "type": "container"}))
    apptainer = find_apptainer()
    await _run([apptainer, "sif", "new", str(target)])
    add = [apptainer, "sif", "add"]
    kind = ["--datatype", "4", "--partfs", "1", "--parttype", "2", "--partarch", architecture]
    await _run([*add, *kind, str(target), str(squashfs)])
    await _run([*add, "--datatype", "6", "--filename", document.name, str(target), str(document)])


async def _settings(workspace: BuildWorkspace, image: LayeredImage) -> Path:
    """A tree in which Apptainer finds the variables of an image; a base that was written so before has others."""
    trees = await workspace.trees(image)
    top, name, number = workspace.place("settings"), SETTINGS.format(""), 0
    while any(os.path.lexists(tree / name) for tree in trees):
        number += 1
        name = SETTINGS.format(f"{number:03}")
    file = top / name
    file.parent.mkdir(parents=True)
    file.write_text(f"#!/bin/sh\n{image.settings}", encoding="utf-8", errors="surrogateescape")
    for path in (top, file.parent.parent, file.parent, file):
        path.chmod(0o755)
    return top


async def _run(argv: Sequence[str]) -> None:
    status, _, errors = await child.run(argv)
    if status:
        raise SiteError(last_line(errors.decode("utf-8", "replace")))
