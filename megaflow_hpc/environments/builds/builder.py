"""Builds Dockerfiles on this node: every step a layer over those before it.

::

    SCRATCH/megaflow-<uid>/owners/<pid>-<start>/    removed at the end, by the janitor if this process is killed
      b…/trees/<key>        bases and layers, unpacked for steps that run (trees.py)
      w…/items/<n>/<i>/…    what a mount of a step brings; its sandbox sees it read-only (script.STEPS_DIR)
      w…/uppers/…           what a step has written

The text of a Dockerfile is a task's, and so is all that its steps do. They run as an agent's commands do: with
processes, root and capabilities of a sandbox, without network unless the user gives one, under limits and a time. The
host lays out what is copied (context.py) and opens nothing by a path that a step has had a hand in.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from megaflow_hpc.environments.builds.export import write_sif
from megaflow_hpc.environments.builds.listings import Listings
from megaflow_hpc.environments.builds.stages import StageBuilds
from megaflow_hpc.environments.builds.trees import Trees
from megaflow_hpc.environments.builds.workspace import BuildWorkspace
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.image_config import working_directory
from megaflow_hpc.environments.images.image_file import ImageFiles, read_checked
from megaflow_hpc.environments.images.layer_store import LayerStore
from megaflow_hpc.environments.images.layered import Base, LayeredImage, is_layered, read_layered
from megaflow_hpc.environments.images.store import digest_in
from megaflow_hpc.environments.sandbox.scratch import default_scratch, workplace
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import ConfigError, SandboxError, SiteError
from megaflow_hpc.host.apptainer import proxy_variables, unshare
from megaflow_hpc.host.files import remove_tree

BuildNetwork = Literal["none", "host"]
T = TypeVar("T")


class Builder:
    """Builds Dockerfiles on this node; see :class:`.resolve.DockerfileBuilder`.

    Args:
        network: of the steps: none, or the host's; ``None`` is none, for who has not said so.
        memory_mb: what the processes of a step may hold; default half of the machine's.
        disk_mb: what a step may write.
        processes: and threads, of a step.
        scratch: local directory; default as for sandboxes.
    """

    def __init__(
        self,
        network: BuildNetwork | None = None,
        *,
        memory_mb: int | None = None,
        disk_mb: int = 50_000,
        processes: int = 8192,
        scratch: str | os.PathLike[str] | None = None,
    ) -> None:
        self.network = network
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2_000_000
        self._memory_mb, self._disk_mb, self._processes = memory_mb or half, disk_mb, processes
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
        """Builds the image of a Dockerfile; its layers are in ``layers`` then. Threads may build several at once.

        Args:
            images: a file or a directory for each of ``dockerfile.bases``.
            say: gets one line for each step that has to be made.

        Raises:
            ConfigError: a source that cannot be copied.
            SiteError: a step that failed, with what it printed at last, or took too long; what was made before is kept.
        """
        if os.geteuid() != 0 and not unshare():
            raise SiteError(
                f"{dockerfile.path}: building needs user namespaces, which this machine does not give users; build "
                "the image elsewhere and map its name"
            )
        return _in_thread(self._stoppable(self._within(dockerfile, images, layers, timeout_s, say)))

    def stop(self) -> None:
        """Ends the builds under way, in whatever threads; the builder builds nothing more."""
        with self._guard:
            self._stopped = True
            for task, loop in self._running.items():
                loop.call_soon_threadsafe(task.cancel)

    async def _stoppable(self, work: Coroutine[Any, Any, T]) -> T:
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

    def _ready(self, layers: LayerStore) -> tuple[Trees, Listings]:
        with self._guard:
            if self._listings is None or self._layers is not layers:
                self._layers, self._listings = layers, Listings(layers)
            if self._trees is None:
                place = workplace(Path(self._scratch) if self._scratch else default_scratch(), "b")
                weakref.finalize(self, _discard, place)
                self._trees = Trees(place)
            return self._trees, self._listings

    async def _within(
        self,
        dockerfile: Dockerfile,
        images: Mapping[str, str],
        layers: LayerStore,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> LayeredImage:
        trees, listings = self._ready(layers)
        try:
            async with asyncio.timeout(timeout_s) as timer, BuildWorkspace(layers, trees, self._scratch) as workspace:
                bases = {name: image_of(path) for name, path in images.items()}
                build = StageBuilds(dockerfile, bases, layers, listings, workspace, self._spec(), say)
                return await build.build()
        except TimeoutError:
            if not timer.expired():
                raise
            raise SiteError(f"{dockerfile.path}: the build took more than {timeout_s:g} s, and was ended") from None
        except ConfigError:
            raise
        except (SiteError, SandboxError, OSError) as error:
            said = str(error)
            raise SiteError(said if said.startswith(f"{dockerfile.path}:") else f"{dockerfile.path}: {said}") from error

    def export(self, image: str | os.PathLike[str], target: Path) -> None:
        """Writes an image of a store, a SIF or layers, to ``target`` as a SIF, which appears whole.

        Raises:
            SandboxError: it cannot be read, or its content is not as its digest says.
            SiteError: it cannot be packed.
        """
        half = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            if is_layered(image):
                layered = read_layered(image)
                if layered.base is not None:
                    layered.base.check(str(image))
                layers = LayerStore([Path(image).absolute().parent.parent])
                _in_thread(self._export(layered, layers, half))
            else:
                read_checked(ImageFiles().facts(str(image)), half)
            os.replace(half, target)
        finally:
            half.unlink(missing_ok=True)

    async def _export(self, image: LayeredImage, layers: LayerStore, target: Path) -> None:
        async with BuildWorkspace(layers, self._ready(layers)[0], self._scratch) as workspace:
            await write_sif(workspace, image, target)

    def _spec(self) -> SandboxSpec:
        return SandboxSpec(
            image="",
            env=proxy_variables() if self.network == "host" else {},
            network=self.network or "none",
            memory_mb=self._memory_mb,
            disk_mb=self._disk_mb,
            processes=self._processes,
        )


def _discard(place: Path) -> None:
    remove_tree(place, ignore_errors=True)
    with suppress(OSError):  # something else of this process is there
        place.parent.rmdir()


def image_of(path: str) -> LayeredImage:
    """Returns what a file or a directory is to whom builds on it."""
    if is_layered(path):
        return read_layered(path)
    return LayeredImage(Base.of(path, digest_in(path)), workdir=working_directory(path))


def _in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in a thread with a loop of its own: the caller's may run one already."""
    done: Future[T] = Future()
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def main() -> T:
        task = asyncio.ensure_future(work)
        started.append((asyncio.get_running_loop(), task))
        return await task

    def run() -> None:
        try:
            done.set_result(asyncio.run(main()))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="build")
    thread.start()
    try:
        return done.result()
    except BaseException:
        if not done.done() and started:
            loop, task = started[0]
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()
