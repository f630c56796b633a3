"""The workspace of one build: sandboxes, a user namespace and unpacked trees, created for its first step."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from megaflow_hpc.environments.builds.script import KEEP, STEPS_DIR
from megaflow_hpc.environments.builds.tree import facts_of, run_tree
from megaflow_hpc.environments.builds.trees import Hold, Trees, unpack_sif
from megaflow_hpc.environments.images.layer_store import LayerStore
from megaflow_hpc.environments.images.layered import LayeredImage
from megaflow_hpc.environments.images.layers.blob import LayerFacts
from megaflow_hpc.environments.images.layers.unpacking import unpack
from megaflow_hpc.environments.images.layers.view import LayerView
from megaflow_hpc.environments.sandbox import helper_python
from megaflow_hpc.environments.sandbox.provider import ApptainerProvider
from megaflow_hpc.environments.sandbox.rootfs import overlay
from megaflow_hpc.environments.sandbox.rootfs.rootfs import Rootfs
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import unshare
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.subordinate import all_ids, namespace

_ROOT = SandboxSpec("", nested=True)
"""Layers are mounted and read by uid 0 of the namespace."""
RESOLVER = "/etc/resolv.conf"
HOSTS = "etc/hosts"


class BuildWorkspace:
    """The workspace of one build, as an async context manager. :meth:`open` creates it."""

    def __init__(self, layers: LayerStore, trees: Trees, scratch: str | os.PathLike[str] | None) -> None:
        self._layers = layers
        self._trees = trees
        self._scratch = scratch
        self._stack = AsyncExitStack()
        self._provider: ApptainerProvider | None = None

    async def __aenter__(self) -> BuildWorkspace:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def open(self) -> None:
        """Creates provider, namespace and directories, unless they exist."""
        if self._provider is not None:
            return
        provider = self._provider = await self._stack.enter_async_context(ApptainerProvider(self._scratch))
        self._work = provider.workplace()
        self._stack.push_async_callback(asyncio.to_thread, remove_tree, self._work)
        for name in ("items", "uppers"):
            (self._work / name).mkdir()
        if not self.pretends and not helper_python.why_not():  # who is pretended must not really become another
            interpreter = await asyncio.to_thread(helper_python.prepare, provider.scratch)
            await asyncio.to_thread(helper_python.link_into, interpreter, self.items)
        self._hold: Hold = self._stack.enter_context(self._trees.holding())
        self.namespace: Sequence[str] = self._stack.enter_context(namespace())
        scratch = str(provider.scratch)
        self._copies = os.geteuid() == 0 or provider.images.writes == "copy" or not overlay.works(scratch)
        self._number = 0
        self._laid: dict[Path, list[Path]] = {}

    @property
    def items(self) -> Path:
        """Directory that the steps' sandboxes see as :data:`.script.STEPS_DIR`."""
        return self._work / "items"

    @property
    def pretends(self) -> bool:
        """Whether other uids than 0 are pretended by the host's fakeroot, if it has one: there are no others."""
        return all_ids() == unshare()

    def place(self, kind: str) -> Path:
        """Returns a new path for something of this build, which goes with it."""
        self._number += 1
        return self._work / "uppers" / f"{kind}{self._number}"

    async def trees(self, image: LayeredImage) -> list[Path]:
        """Returns the directories of an image's layers and base, the topmost first."""
        found = [await asyncio.to_thread(self._layer, layer) for layer in reversed(image.layers)]
        if image.base is not None:
            path, key = image.base.path, hashlib.sha256(os.fsencode(image.base.identity)).hexdigest()
            make = partial(_link, path) if os.path.isdir(path) else partial(unpack_sif, path, self.namespace)
            found.append(await asyncio.to_thread(self._hold.get, key, make))
        return found

    def _layer(self, layer: LayerFacts) -> Path:
        blob = self._layers.path(layer.digest)
        return self._hold.get(layer.digest, lambda target: unpack(blob, layer, target, self.namespace))

    async def start(self, image: LayeredImage, spec: SandboxSpec, view: LayerView) -> ApptainerSandbox:
        """Returns a sandbox over an image's trees, in which what Docker mounts is there too: ``/dev/full`` and names
        of ``localhost``.

        Args:
            view: of the image.
        """
        assert self._provider is not None
        lowers = await self._lowers(image)
        binds = [f"{self.items}:{STEPS_DIR}:ro", "/dev/full:/dev/full", *spec.binds]
        if spec.network == "host" and not os.path.lexists(lowers[-1] / RESOLVER.lstrip("/")):
            binds += [f"{RESOLVER}:{RESOLVER}:ro"]  # in others Apptainer puts it there by itself
        points = self._hosts(view)
        if points is not None and self._copies:
            binds += [f"{points}/{HOSTS}:/{HOSTS}:ro"]
        elif points is not None:  # below what is written: a place made for a bind would be in the step's layer
            lowers = [points, *lowers]
        spec = replace(spec, image=str(lowers[-1]), binds=tuple(binds), fakeroot=self.pretends)
        rootfs = Rootfs(
            str(lowers[-1]),
            lambda: None,
            copies=self._copies,
            namespace=self.namespace,
            layers=tuple(map(str, lowers[:-1])),
            settings=image.settings + KEEP,
        )
        return await self._provider.start(spec, rootfs=rootfs)

    def _hosts(self, view: LayerView) -> Path | None:
        """A tree of a file with names of ``localhost``; ``None`` where the image has a link or a stranger's files."""
        etc, hosts = view.entry("etc"), view.entry(HOSTS)
        if etc is None or not etc.is_directory or etc.attributes.uid or etc.attributes.gid:
            return None
        if hosts is not None and not stat.S_ISREG(hosts.kind):
            return None
        points = self.place("points")
        file = points / HOSTS
        file.parent.mkdir(parents=True)
        file.write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n")
        file.chmod(0o644)
        points.chmod(0o755)
        file.parent.chmod(etc.attributes.mode | 0o700)
        os.utime(file.parent, (etc.attributes.mtime, etc.attributes.mtime))
        return points

    async def _lowers(self, image: LayeredImage, top: Sequence[Path] = ()) -> list[Path]:
        """The trees of an image; one tree of all, where sandboxes write to copies or an overlay takes no more."""
        lowers = [*top, *await self.trees(image)]
        few = len(lowers) < overlay.MAX_LOWERS  # names of hosts are one more
        if len(lowers) == 1 or (few and not self._copies):
            return lowers
        wanted = lowers[::-1]
        # What a step wrote goes over the tree that it ran on: a chain is laid out once, not once for each step.
        begun = [laid for laid, parts in self._laid.items() if parts == wanted[: len(parts)]]
        laid = max(begun, key=lambda laid: len(self._laid[laid]), default=None)
        parts = self._laid.pop(laid) if laid else []
        if laid is None:
            laid = self.place("laid")
        if parts != wanted:
            await run_tree(self.namespace, "lay", str(laid), *map(str, wanted[len(parts) :]))
        self._laid[laid] = wanted
        return [laid]

    async def layer_of(self, sandbox: ApptainerSandbox, file: Path) -> tuple[LayerFacts, bool]:
        """Ends a sandbox, and writes what it has changed to ``file`` as a layer; says whether ``/etc/hosts`` is in
        it."""
        upper = self.place("upper")
        await sandbox.finish(upper)
        marks = "marks" if self._copies else ""
        facts, *rest = (await run_tree(self.namespace, "layer", str(file), str(upper), marks)).splitlines()
        return facts_of(facts), bool(rest)

    async def copy_out(self, image: LayeredImage, sources: Sequence[str], target: Path) -> None:
        """Copies what lies at ``sources`` of an image to ``target/<number>/<name>``, its files with their owners.

        Raises:
            SiteError: nothing is there, or it cannot be copied.
        """
        async with self.merged(image) as (prefix, root):
            await run_tree(prefix, "copy", root, str(target), *sources)

    @asynccontextmanager
    async def merged(self, image: LayeredImage, top: Sequence[Path] = ()) -> AsyncIterator[tuple[Sequence[str], str]]:
        """Yields an argv prefix of namespaces and the directory that all files of an image are in there.

        What is written there is lost.

        Args:
            top: trees over those of the image.
        """
        lowers = [str(path) for path in await self._lowers(image, top)]
        if len(lowers) == 1:
            yield self.namespace, lowers[0]
            return
        layer = self.place("view")
        layer.mkdir()
        mounted = overlay.prepare(lowers, str(layer), f"{layer}.root")
        if mounted is None:
            raise SiteError(f"{layer}: no overlay can be mounted there; set TMPDIR to another local directory")
        yield overlay.argv_prefix(mounted, _ROOT, self.namespace), mounted.merged

    async def placed(self, image: LayeredImage, items: Path, how: Mapping[str, object], file: Path) -> LayerFacts:
        """Writes a layer of items of another image, put in place over ``image`` (:mod:`.placing`)."""
        layers = [str(path) for path in await self.trees(image)]
        return facts_of(
            await run_tree(self.namespace, "place", str(file), str(items), said={"how": how, "layers": layers})
        )


def _link(path: str, target: Path) -> None:
    target.symlink_to(path)
