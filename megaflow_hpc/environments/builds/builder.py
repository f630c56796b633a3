"""Builds Dockerfiles: each stage in one sandbox over its base, what that wrote packed into a SIF.

::

    SCRATCH/megaflow-<uid>/owners/<pid>-<start>/w…/    removed at the end, by the janitor if this process is killed
      bases/<n>                  the files of an image that a stage starts from or copies from
      steps/<n>/<i>/item         what one copy puts in place; the sandbox sees it read-only (script.STEPS_DIR)
      stages/<n>/upper           what the n-th stage has written
      image.squashfs

The text of a Dockerfile is a task's, and so is all that its steps do. They run as an agent's commands do: with
processes, root and capabilities of a sandbox, without network unless the user gives one, under limits and a time. The
host lays out what is copied (context.py) and opens nothing by a path that a step has had a hand in.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from megaflow_hpc.environments.builds.layers import Layers, unpack, write_sif
from megaflow_hpc.environments.builds.script import STEPS_DIR, copy_text, first_text, run_text, workdir_text
from megaflow_hpc.environments.images.dockerfile.context import lay_out
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.dockerfile.steps import Copy, Env, Run, Stage
from megaflow_hpc.environments.images.image_config import LABEL, working_directory
from megaflow_hpc.environments.sandbox.provider import ApptainerProvider
from megaflow_hpc.environments.sandbox.rootfs import overlay
from megaflow_hpc.environments.sandbox.rootfs.access import Access
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import ConfigError, SandboxError, SiteError
from megaflow_hpc.host.apptainer import proxy_variables, unshare
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.subordinate import all_ids, namespace

BuildNetwork = Literal["none", "host"]

_SHOWN_LINES = 15
_SHOWN_CHARACTERS = 4000
_RESOLVER = "/etc/resolv.conf"


class Builder:
    """Builds Dockerfiles on this node; see :class:`.resolve.DockerfileBuilder`.

    Args:
        network: of the steps: none, or the host's; ``None`` is none, for who has not said so.
        memory_mb: what the processes of a step may hold; default half of the machine's.
        disk_mb: what a stage may write.
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

    def build(self, target: Path, dockerfile: Dockerfile, images: Mapping[str, str], timeout_s: float) -> None:
        """Writes the image of a Dockerfile to ``target``.

        Args:
            images: a file or a directory for each of ``dockerfile.bases``.

        Raises:
            ConfigError: a source that cannot be copied.
            SiteError: a step that failed, with what it printed at last, or took too long; nothing is left.
        """
        if os.geteuid() != 0 and not unshare():
            raise SiteError(
                f"{dockerfile.path}: building needs user namespaces, which this machine does not give users; build "
                "the image elsewhere and map its name"
            )
        _in_thread(self._within(target, dockerfile, images, timeout_s))

    async def _within(self, target: Path, dockerfile: Dockerfile, images: Mapping[str, str], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s) as timer:
                await self._build(target, dockerfile, images)
        except TimeoutError:
            if not timer.expired():
                raise
            raise SiteError(f"{dockerfile.path}: the build took more than {timeout_s:g} s, and was ended") from None
        except ConfigError:
            raise
        except (SiteError, SandboxError, OSError) as error:
            said = str(error)
            raise SiteError(said if said.startswith(f"{dockerfile.path}:") else f"{dockerfile.path}: {said}") from error

    async def _build(self, target: Path, dockerfile: Dockerfile, images: Mapping[str, str]) -> None:
        async with ApptainerProvider(self._scratch) as provider:
            work = provider.workplace()
            try:
                for name in ("bases", "steps", "stages"):
                    (work / name).mkdir()
                with namespace() as inside:
                    layers = await self._stages(provider, dockerfile, images, work, inside)
                    exports = "".join(f"{line}\n" for line in dockerfile.last.exports)
                    await layers.pack(exports.encode("utf-8", "surrogateescape"), work / "image.squashfs")
                workdir = dockerfile.workdir or working_directory(images[dockerfile.base])
                labels = {LABEL: workdir} if workdir else {}
                await write_sif(provider.apptainer, work / "image.squashfs", labels, target)
            finally:
                await asyncio.to_thread(remove_tree, work)

    async def _stages(
        self,
        provider: ApptainerProvider,
        dockerfile: Dockerfile,
        images: Mapping[str, str],
        work: Path,
        inside: Sequence[str],
    ) -> Layers:
        """Builds the stages that the last one needs, and it; returns the last one's files."""
        bases = await _bases(images, work / "bases", inside)
        stages: dict[str, Layers] = {name: Layers(str(path), inside) for name, path in bases.items()}
        for number, stage in enumerate(dockerfile.needed):
            place = work / "stages" / str(number)
            place.mkdir()
            run = _StageRun(self._spec(stage, bases), provider, dockerfile, stage, stages, work / "steps", inside)
            stages[stage.name] = await run.carry_out(bases[stage.base], place)
        return stages[dockerfile.last.name]

    def _spec(self, stage: Stage, bases: Mapping[str, Path]) -> SandboxSpec:
        base = bases[stage.base]
        binds = [f"{base.parents[1]}/steps:{STEPS_DIR}:ro"]
        if self.network == "host" and not os.path.lexists(base / _RESOLVER.lstrip("/")):
            binds += [f"{_RESOLVER}:{_RESOLVER}:ro"]  # in others Apptainer puts it there by itself
        return SandboxSpec(
            image=str(base),
            env=proxy_variables() if self.network == "host" else {},
            binds=tuple(binds),
            network=self.network or "none",
            memory_mb=self._memory_mb,
            disk_mb=self._disk_mb,
            processes=self._processes,
            fakeroot=all_ids() == unshare(),
        )


class _StageRun:
    """One stage: its steps, one after the other, in one sandbox."""

    def __init__(
        self,
        spec: SandboxSpec,
        provider: ApptainerProvider,
        dockerfile: Dockerfile,
        stage: Stage,
        stages: Mapping[str, Layers],
        steps: Path,
        inside: Sequence[str],
    ) -> None:
        self._spec = spec
        self._provider = provider
        self._dockerfile = dockerfile
        self._stage = stage
        self._stages = stages
        self._steps = steps
        self._inside = inside
        self._exports: list[str] = []
        self._laid = 0

    async def carry_out(self, base: Path, place: Path) -> Layers:
        """Runs the steps over ``base``; what they wrote is at ``place`` then."""
        scratch = str(self._provider.scratch)
        copies = os.geteuid() == 0 or self._provider.images.writes == "copy" or not overlay.works(scratch)
        access = Access("tree", str(base), lambda: None, copies=copies, namespace=self._inside)
        async with await self._provider.start(self._spec, access=access) as sandbox:
            await sandbox.exec(first_text(), cwd="/")  # without the programs for it, it is as it is
            for step in self._stage.steps:
                if isinstance(step, Env):
                    self._exports.append(step.text)
                elif isinstance(step, Copy):
                    number = await self._lay(step)
                    await self._run(sandbox, step.line, copy_text(step, number, self._exports))
                elif isinstance(step, Run):
                    numbers = [await self._lay(mount.copy) if mount.copy else 0 for mount in step.mounts]
                    await self._run(sandbox, step.line, run_text(step, self._exports, numbers))
                else:
                    await self._run(sandbox, step.line, workdir_text(step))
            written = place / ("root" if copies else "upper")
            await sandbox.finish(written)
        return Layers(str(written), self._inside) if copies else Layers(str(base), self._inside, str(place))

    async def _run(self, sandbox: ApptainerSandbox, line: int, text: str) -> None:
        result = await sandbox.exec(text, cwd="/")
        if result.exit_code:
            lines = [*result.stdout.splitlines()[-_SHOWN_LINES:], *result.stderr.splitlines()[-_SHOWN_LINES:]]
            lines += [f"{self._dockerfile.path.name}:{line}: exit status {result.exit_code}"]
            if self._spec.network == "none":
                lines += ["steps have no network here; environment.build_network: host gives them the host's"]
            text = "".join(each if each.isprintable() or each in "\n\t" else "?" for each in "\n".join(lines))
            shown = "\n".join(f"  {each}" for each in text[-_SHOWN_CHARACTERS:].split("\n"))
            raise SiteError(f"{self._dockerfile.path}: the build failed at line {line}\n{shown}")
        if sandbox.busy and not self._spec.fakeroot:  # whose own processes run all the time
            await sandbox.kill_processes()  # a step ends with its command, as in Docker
        for laid in os.listdir(self._steps):
            await asyncio.to_thread(remove_tree, self._steps / laid)

    async def _lay(self, copy: Copy) -> int:
        """Lays out what a copy puts in place; returns the number of its directory."""
        self._laid += 1
        place = self._steps / str(self._laid)
        try:
            if copy.origin is None:
                await asyncio.to_thread(_lay_out, self._dockerfile, copy, place)
            else:
                await self._stages[copy.origin].copy(copy.sources, place)
        except (ConfigError, OSError) as error:
            raise ConfigError(f"{self._dockerfile.path}:{copy.line}: {error}") from error
        except SiteError as error:
            raise SiteError(f"{self._dockerfile.path}:{copy.line}: --from={copy.origin}: {error}") from error
        return self._laid


async def _bases(images: Mapping[str, str], place: Path, inside: Sequence[str]) -> dict[str, Path]:
    """The files of each image, in a directory whose path has no odd characters."""
    known: dict[str, Path] = {}
    for image in dict.fromkeys(images.values()):
        path = known[image] = place / str(len(known))
        if os.path.isdir(image):
            path.symlink_to(os.path.abspath(image))
        else:
            await unpack(image, path, inside)
    return {name: known[image] for name, image in images.items()}


def _lay_out(dockerfile: Dockerfile, copy: Copy, place: Path) -> None:
    place.mkdir()
    lay_out(dockerfile.context, copy.sources, place, extract=copy.extract, parents=copy.parents, exclude=copy.exclude)
    for number, (name, content) in enumerate(copy.texts.items()):
        target = place / f"text{number}" / (name if copy.into else os.path.basename(copy.target) or name)
        target.parent.mkdir()
        target.write_text(content, encoding="utf-8", errors="surrogateescape")
        target.chmod(0o644)


def _in_thread(work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine to its end in a thread with a loop of its own: the caller's may run one already."""
    done: Future[None] = Future()
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    async def main() -> None:
        task = asyncio.ensure_future(work)
        started.append((asyncio.get_running_loop(), task))
        await task

    def run() -> None:
        try:
            done.set_result(asyncio.run(main()))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="build")
    thread.start()
    try:
        done.result()
    except BaseException:
        if not done.done() and started:
            loop, task = started[0]
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()
