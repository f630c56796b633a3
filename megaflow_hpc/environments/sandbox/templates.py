"""Which sandboxes are clones, and the template that they are cloned of: one per provider.

Apptainer takes some 80 ms of processor time for a container. So it starts one, the template, and containers are clones
of its process: in user, mount, pid, ipc and network namespaces of their own, with an overlay of their own.

The template sees the scratch of all sandboxes and has the host's network. So nothing of an image is in it: its root is
a tree of ours, and its one program is too. The environment that Apptainer finds in an image is learned from the first
container over it, which Apptainer starts in the usual bounds, on an empty layer, before any command: what one rollout
does is no part of another's.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from megaflow_hpc.environments.sandbox import helper_python
from megaflow_hpc.environments.sandbox.argv import ROOT_MAY, bounds, exec_argv
from megaflow_hpc.environments.sandbox.commands.launcher import launcher
from megaflow_hpc.environments.sandbox.commands.template import Clone, Template
from megaflow_hpc.environments.sandbox.rootfs.access import Access
from megaflow_hpc.environments.sandbox.rootfs.overlay import MOUNT_POINTS, Overlay
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import ConfigError, SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR, unshare
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity

_LONGEST_ENVIRONMENT = 32768
"""Bytes of an environment that a request takes."""

_KERNEL = (5, 9)
"""Linux has pidfds, openat2 and close_range from here on."""
_CAPABILITIES = dict(zip(ROOT_MAY, (0, 1, 3, 4, 5, 10, 6, 7, 18), strict=True))
_HOME = f"{CONTROL_DIR}/{helper_python.NAME}"
_PROGRAM = (f"{_HOME}/loader", "--library-path", f"{_HOME}/libraries", f"{_HOME}/python", "-s", "-S", "-B")

Start = Callable[[int, Callable[[Identity], None]], Awaitable[Clone]]
"""Takes a sandbox's standard error, and what is called with its first process before that does anything."""

_Key = tuple[str, ...]
"""The directories of an unpacked image, the topmost first."""


Lesson = asyncio.Future[tuple[str, ...] | None]
"""The environment of an image, once its first container has shown it; ``None`` if that did not come up."""


@dataclass
class _Kept:
    template: Template
    directory: Path
    starting: asyncio.Task[None]


class Templates:
    """The template of one provider, another if it has ended, and what is known of images.

    Args:
        own: the provider's directory; a template gets one in it, as a sandbox does.
        visible: directories below which layers and unpacked images lie; a template sees no other of the host's.
        scratch: where the interpreter that templates run lies.
    """

    def __init__(self, own: Path, visible: Sequence[Path], apptainer: str, scratch: Path, timeout_s: float) -> None:
        self._own = own
        first, *others = (Path(os.path.realpath(directory)) for directory in visible)
        self._visible = [first, *(directory for directory in others if not _below(directory, [first]))]
        self._apptainer = apptainer
        self._scratch = scratch
        self._timeout_s = timeout_s
        self._environments: dict[_Key, Lesson] = {}
        self._kept: _Kept | None = None
        self._number = 0
        self._supported: bool | None = None
        self._seen: dict[_Key, bool] = {}
        """Unpacked image → whether a template sees it; looked at once, as an image may have hundreds of directories."""
        self.refused: dict[_Key, str] = {}
        """Unpacked image → why no sandbox can be cloned over it; Apptainer starts each by itself then."""

    def lesson(self, access: Access, spec: SandboxSpec, mounted: Overlay | None) -> Lesson | None:
        """Returns what is to be given to :meth:`learn` when Apptainer has started a container on an empty layer;
        ``None`` where there is nothing to learn. Others who ask for clones over the image wait for that."""
        key = _key(access)
        if way() == "apptainer" or mounted is None or key in self.refused or key in self._environments:
            return None
        if not self._possible(access, spec):
            return None
        lesson: Lesson = asyncio.get_running_loop().create_future()
        self._environments[key] = lesson
        return lesson

    def learn(self, access: Access, lesson: Lesson, init: Identity | None) -> None:
        """Reads the environment that a container began with, before it has run a command; ``None``: it has none.

        It is what its image says, as good as anything else in the image; and no larger than is sent.
        """
        try:
            if init is None:
                raise OSError("the container did not come up")
            with open(f"/proc/{init.pid}/environ", "rb") as file:
                data = file.read(_LONGEST_ENVIRONMENT + 1)
            if not init.alive():
                raise OSError("the container has ended")
        except OSError:
            self._environments.pop(_key(access), None)
            lesson.set_result(None)
            return
        if len(data) > _LONGEST_ENVIRONMENT:
            self.refused[_key(access)] = f"its environment has more than {_LONGEST_ENVIRONMENT} bytes"
            lesson.set_result(None)
            return
        lesson.set_result(tuple(entry for entry in os.fsdecode(data).split("\0") if "=" in entry[1:]))

    async def find(
        self, access: Access, spec: SandboxSpec, mounted: Overlay | None, control: str, command: Sequence[str]
    ) -> Start | None:
        """Returns how to start a container as a clone; ``None`` where Apptainer is to start it.

        Args:
            mounted: what Apptainer would start over (:meth:`.Access.command_line`).
        """
        lesson = self._environments.get(_key(access))
        if way() == "apptainer" or mounted is None or lesson is None or _key(access) in self.refused:
            return None
        if not self._possible(access, spec):
            return None
        if self._supported is None:
            self._supported = await asyncio.to_thread(supported)
        if not self._supported:
            return None
        try:
            template = await self._running()
        except (SandboxError, OSError) as error:
            self.refuse(access, error)
            return None
        environment = await asyncio.shield(lesson)
        if environment is None:
            return None
        capabilities = ",".join(str(_CAPABILITIES[name]) for name in ROOT_MAY)
        binds = (f"{control}:{CONTROL_DIR}:ro", *spec.binds)
        limits = " ".join(f"{name}={number}" for name, number in bounds(spec).items())
        words = (spec.network, *mounted, capabilities, limits, " ".join(command), str(len(binds)), *binds, *environment)
        return functools.partial(self._clone, template, words)

    async def _running(self) -> Template:
        """Returns the running template; starts one first if necessary."""
        while self._kept is not None and self._kept.starting.done() and not self._kept.template.alive:
            await self._drop()
        if self._kept is None:
            self._kept = self._begin()
        kept = self._kept
        await asyncio.shield(kept.starting)
        return kept.template

    async def _clone(
        self, template: Template, words: Sequence[str], errors: int, on_started: Callable[[Identity], None]
    ) -> Clone:
        try:
            return await template.clone(words, errors, on_started)
        except SandboxError:
            if template.alive:
                raise
        # The template ended before this process noticed; another one serves.
        return await (await self._running()).clone(words, errors, on_started)

    def refuse(self, access: Access, error: Exception, *, layer: bool = False) -> None:
        """Notes that sandboxes over an image cannot be cloned here; raises ``error`` where they are to be, by hand.

        Args:
            layer: it may be by what an agent has left in its layer, which says nothing of the image.
        """
        if way() == "clone":
            raise error
        if not layer:
            self.refused[_key(access)] = str(error)

    def _possible(self, access: Access, spec: SandboxSpec) -> bool:
        key = _key(access)
        if key not in self._seen:
            self._seen[key] = self._sees(key)
        return (
            spec.as_root
            and not spec.nested
            and not spec.fakeroot
            and access.namespace is None
            and self._seen[key]
            and self._sees(bind.split(":")[0] for bind in spec.binds)
        )

    def _sees(self, sources: Iterable[str]) -> bool:
        return all(_below(Path(os.path.realpath(source)), self._visible) for source in sources)

    def _begin(self) -> _Kept:
        self._number += 1
        directory = self._own / f"t{os.getpid()}-{id(self) & 0xFFFFFF:x}-{self._number}"
        template = Template(str(directory / "log"))
        starting = asyncio.ensure_future(self._start(template, directory))
        starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        return _Kept(template, directory, starting)

    async def _start(self, template: Template, directory: Path) -> None:
        await asyncio.to_thread(self._lay_out, directory)
        # Only our program runs in it; that makes user namespaces, and needs the host's network for those who do.
        binds = tuple(f"{visible}:{visible}" for visible in self._visible)
        root = str(directory / "root")
        spec = SandboxSpec(root, network="host", nested=True, processes=None, binds=binds)
        argv = exec_argv(
            self._apptainer,
            spec,
            root,
            overlay=None,
            control=str(directory / "control"),
            command=(*_PROGRAM, f"{CONTROL_DIR}/cloner.py"),
        )
        # Who maps uid 0 of a namespace below must have it; the clones do not.
        argv[argv.index("--add-caps") + 1] += ",CAP_SETFCAP"
        argv[argv.index("--add-caps") : argv.index("--add-caps")] = ["--env", f"PYTHONHOME={_HOME}"]

        def started(identity: Identity) -> None:
            (directory / "owner").write_text(f"{identity}\n")

        temporary = str(directory / "tmp")
        try:
            await template.start(
                argv,
                temporary=temporary,
                timeout_s=self._timeout_s,
                prefix=unshare(),  # without limits, because all clones would share them
                on_started=started,
            )
        except BaseException:
            await template.stop()
            raise

    def _lay_out(self, directory: Path) -> None:
        kit = helper_python.kit(self._scratch)
        for name in ("", "tmp", "control", "root"):
            os.mkdir(directory / name, 0o700)
        places = (*MOUNT_POINTS, CONTROL_DIR, *map(str, self._visible))
        for place in places:
            os.makedirs(directory / "root" / place.lstrip("/"), exist_ok=True)
        (directory / "root" / "etc" / "resolv.conf").touch()
        helper_python.lay(kit, directory / "control")
        program = resources.files("megaflow_hpc.environments.sandbox.commands").joinpath("cloner.py").read_bytes()
        (directory / "control" / "cloner.py").write_bytes(program)

    async def _drop(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            with suppress(SandboxError, OSError, asyncio.CancelledError):
                await kept.starting
            await kept.template.stop()
            await asyncio.to_thread(remove_tree, kept.directory, ignore_errors=True)

    async def close(self) -> None:
        """Ends the template. Idempotent."""
        await self._drop()


def way() -> str:
    """Returns how sandboxes start: ``auto``, or what ``MEGAFLOW_SANDBOX_START`` (apptainer, clone) decides by hand.

    Raises:
        ConfigError: it has another value.
    """
    named = os.environ.get("MEGAFLOW_SANDBOX_START", "auto")
    if named not in ("auto", "apptainer", "clone"):
        raise ConfigError(f"MEGAFLOW_SANDBOX_START={named}: expected apptainer, clone or auto")
    return named


@functools.cache
def supported() -> bool:
    """Whether this node's kernel, its user namespaces and this Python let sandboxes be cloned."""
    version = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    return (
        version >= _KERNEL
        and os.uname().machine in ("x86_64", "aarch64")
        and sys.version_info >= (3, 11)
        and bool(unshare())
        and os.geteuid() != 0
        and _filters()
        and not helper_python.why_not()
    )


def _filters() -> bool:
    thread = launcher(filtered=True)
    thread.call(lambda: None)  # it knows when it has begun
    return thread.refuses


def _key(access: Access) -> _Key:
    return (*access.layers, access.rootfs)


def _below(path: Path, directories: Sequence[Path]) -> bool:
    return any(path == directory or directory in path.parents for directory in directories)
