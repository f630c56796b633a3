"""Builds images from Dockerfiles on this node, and exports images as SIF files.

::

    SCRATCH/megaflow-<uid>/owners/<pid>-<start>/    removed at the end, or by the janitor if this process is killed
      b…/trees/<key>        unpacked bases and layers for ``RUN`` steps (:class:`~.workspace.Trees`)
      w…/items/<n>/<i>/…    files of a step's mounts, read-only in its sandbox (script.STEPS_DIR)
      w…/uppers/…           files that a step has written

Dockerfiles come from tasks, so their text and steps are untrusted. Like an agent's commands, steps run in a sandbox
with its own PID namespace, root file system and limits. They also have a timeout. They have network access only if the
user allows it. The host process copies files from the build context (``context.py``). It never opens a path that a step
could have changed.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from megaflow_hpc.environments.builds.stages import StageBuilds
from megaflow_hpc.environments.builds.tree import run_tree
from megaflow_hpc.environments.builds.workspace import BuildWorkspace, Listings, Trees
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.image_file import LABEL, ImageFiles, read_checked, working_directory
from megaflow_hpc.environments.images.layered import Base, LayeredImage, is_layered, read_layered
from megaflow_hpc.environments.images.store import LayerStore, digest_in
from megaflow_hpc.environments.sandbox.scratch import default_scratch, workplace
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import ConfigError, SandboxError, SiteError
from megaflow_hpc.host import child
from megaflow_hpc.host.apptainer import clean_environment, find_apptainer, last_line, proxy_variables, unshare
from megaflow_hpc.host.files import remove_tree

SETTINGS = ".singularity.d/env/92-megaflow{}.sh"
"""Name pattern of the script that sets an image's variables. Apptainer sources it after the base's
90-environment.sh."""

_SIF_ARCHITECTURE = {"x86_64": "2", "aarch64": "4", "ppc64le": "6", "s390x": "11", "riscv64": "12"}

MAX_PROCESSES = 8192
"""Maximum number of processes and threads per step."""
BuildNetwork = Literal["none", "host"]
T = TypeVar("T")


class Builder:
    """Builds Dockerfiles on this node. Implements :class:`.resolve.DockerfileBuilder`.

    Args:
        network: Network of the steps: ``"none"`` or ``"host"``. ``None`` means that the user has not chosen, and acts
            like ``"none"``.
        memory_mb: Memory limit per step. Default: half of the machine's memory.
        disk_mb: Maximum total size of the files that a step writes.
        scratch: Local directory for temporary files. Default: the scratch directory of sandboxes.
    """

    def __init__(
        self,
        network: BuildNetwork | None = None,
        *,
        memory_mb: int | None = None,
        disk_mb: int = 50_000,
        scratch: str | os.PathLike[str] | None = None,
    ) -> None:
        self.network = network
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2_000_000
        self._memory_mb, self._disk_mb = memory_mb or half, disk_mb
        self._scratch = scratch
        self._guard = threading.Lock()
        self._trees: Trees | None = None
        self._listings: Listings | None = None
        self._layers: LayerStore | None = None
        self._running: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = {}
        self._stopped = False

    def build(
        self,
        dockerfile: Dockerfile,
        images: Mapping[str, str],
        layers: LayerStore,
        timeout_s: float,
        say: Callable[[str], None] = lambda line: None,
    ) -> LayeredImage:
        """Builds the image of a Dockerfile and adds its layers to ``layers``. Thread-safe.

        Args:
            images: Maps each name in ``dockerfile.bases`` to an image file or directory.
            timeout_s: Cancel the build after this many seconds.
            say: Called with a progress message for each executed step.

        Raises:
            ConfigError: A source cannot be copied.
            SiteError: A step failed or timed out. The message includes its last output. Layers of completed steps are
                kept.
        """
        if os.geteuid() != 0 and not unshare():
            raise SiteError(
                f"{dockerfile.path}: building needs user namespaces, which users cannot create on this machine; build "
                "the image elsewhere and map its name"
            )
        return self._run(self._build(dockerfile, images, layers, timeout_s, say))

    def stop(self) -> None:
        """Cancels running builds in all threads and refuses new ones."""
        with self._guard:
            self._stopped = True
            for task, loop in self._running.items():
                loop.call_soon_threadsafe(task.cancel)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in another thread, because the caller's thread may already be running an event loop."""

        async def main() -> T:
            task = asyncio.ensure_future(work)
            with self._guard:
                self._running[task] = asyncio.get_running_loop()
                if self._stopped:
                    task.cancel()
            try:
                return await task
            finally:
                with self._guard:
                    del self._running[task]

        with ThreadPoolExecutor(1, "build") as pool:
            result = pool.submit(asyncio.run, main())
            try:
                return result.result()
            except BaseException:
                if not result.done():  # The caller was interrupted.
                    self.stop()
                raise

    def _shared(self, layers: LayerStore) -> tuple[Trees, Listings]:
        with self._guard:
            if self._listings is None or self._layers is not layers:
                self._layers, self._listings = layers, Listings(layers)
            if self._trees is None:
                directory = workplace(Path(self._scratch) if self._scratch else default_scratch(), "b")
                weakref.finalize(self, _remove_workplace, directory)
                self._trees = Trees(directory)
            return self._trees, self._listings

    async def _build(
        self,
        dockerfile: Dockerfile,
        images: Mapping[str, str],
        layers: LayerStore,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> LayeredImage:
        trees, listings = self._shared(layers)
        try:
            async with asyncio.timeout(timeout_s) as timer, BuildWorkspace(layers, trees, self._scratch) as workspace:
                bases = {name: image_of(path) for name, path in images.items()}
                build = StageBuilds(dockerfile, bases, layers, listings, workspace, self._spec(), say)
                return await build.build()
        except TimeoutError:
            if not timer.expired():
                raise
            raise SiteError(f"{dockerfile.path}: the build took more than {timeout_s:g} s and was cancelled") from None
        except ConfigError:
            raise
        except (SiteError, SandboxError, OSError) as error:
            message = str(error)
            if not message.startswith(f"{dockerfile.path}:"):
                message = f"{dockerfile.path}: {message}"
            raise SiteError(message) from error

    def _spec(self) -> SandboxSpec:
        return SandboxSpec(
            image="",
            env=proxy_variables() if self.network == "host" else {},
            network=self.network or "none",
            memory_mb=self._memory_mb,
            disk_mb=self._disk_mb,
            processes=MAX_PROCESSES,
        )

    # --- exporting ------------------------------------------------------------------------------------------------

    def export(self, image: str | os.PathLike[str], target: Path) -> None:
        """Writes a stored image to ``target`` as a SIF, atomically.

        Raises:
            SandboxError: The image cannot be read, or its digest is wrong.
            SiteError: The image cannot be packed.
        """
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            if is_layered(image):
                layered = read_layered(image)
                if layered.base is not None:
                    layered.base.check(str(image))
                layers = LayerStore([Path(image).absolute().parent.parent])
                self._run(self._export(layered, layers, unfinished))
            else:
                read_checked(ImageFiles().facts(str(image)), unfinished)
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)

    async def _export(self, image: LayeredImage, layers: LayerStore, target: Path) -> None:
        async with BuildWorkspace(layers, self._shared(layers)[0], self._scratch) as workspace:
            await _write_sif(workspace, image, target)


def _remove_workplace(directory: Path) -> None:
    remove_tree(directory, ignore_errors=True)
    with suppress(OSError):  # Not empty if this process has other files there.
        directory.parent.rmdir()


def image_of(path: str) -> LayeredImage:
    """Loads an image file or directory as a base image for builds."""
    if is_layered(path):
        return read_layered(path)
    return LayeredImage(Base.of(path, digest_in(path)), workdir=working_directory(path))


async def _write_sif(workspace: BuildWorkspace, image: LayeredImage, target: Path) -> None:
    """Packs all files of an image into a SIF at ``target``.

    Raises:
        SiteError: A required program is missing or failed, or this architecture is not supported.
    """
    architecture = _SIF_ARCHITECTURE.get(platform.machine())
    if architecture is None:
        raise SiteError(f"{platform.machine()}: images cannot be built on this architecture; build them elsewhere")
    if shutil.which("mksquashfs", path=clean_environment()["PATH"]) is None:
        raise SiteError("mksquashfs: not on PATH, but needed to pack images; install squashfs-tools")
    await workspace.open()
    squashfs, labels = workspace.new_path("squashfs"), workspace.new_path("labels")
    top = [await _settings_tree(workspace, image)] if image.settings else []
    async with workspace.merged(image, top) as (prefix, root):
        await run_tree(prefix, "pack", root, str(squashfs))
    labels.mkdir()
    document = labels / "inspect-metadata.json"
    values = {LABEL: image.workdir} if image.workdir else {}
    document.write_text(json.dumps({"data": {"attributes": {"labels": values}}, "type": "container"}))
    apptainer = find_apptainer()
    await _run_program([apptainer, "sif", "new", str(target)])
    add = [apptainer, "sif", "add"]
    kind = ["--datatype", "4", "--partfs", "1", "--parttype", "2", "--partarch", architecture]
    await _run_program([*add, *kind, str(target), str(squashfs)])
    await _run_program([*add, "--datatype", "6", "--filename", document.name, str(target), str(document)])


async def _settings_tree(workspace: BuildWorkspace, image: LayeredImage) -> Path:
    """Creates a tree with a single file that sets the image's environment variables. Picks a file name that the image
    does not use."""
    trees = await workspace.trees(image)
    top, name, number = workspace.new_path("settings"), SETTINGS.format(""), 0
    while any(os.path.lexists(tree / name) for tree in trees):
        number += 1
        name = SETTINGS.format(f"{number:03}")
    file = top / name
    file.parent.mkdir(parents=True)
    file.write_text(f"#!/bin/sh\n{image.settings}", encoding="utf-8", errors="surrogateescape")
    for path in (top, file.parent.parent, file.parent, file):
        path.chmod(0o755)
    return top


async def _run_program(argv: Sequence[str]) -> None:
    status, _, errors = await child.run(argv)
    if status:
        raise SiteError(last_line(errors.decode("utf-8", "replace")))
