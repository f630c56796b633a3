"""Which sandboxes are clones, and the templates that they are cloned of: one per image and provider.

Apptainer takes some 80 ms of processor time for a container. So it starts one for an image, the template, and further
containers over that image are its clones: processes in user, mount, pid, ipc and network namespaces of their own, with
an overlay of their own. The first container of an image is Apptainer's, since an image that is used once is started no
faster by a template.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from megaflow_hpc.environments.sandbox import helper_python
from megaflow_hpc.environments.sandbox.argv import ROOT_MAY
from megaflow_hpc.environments.sandbox.commands.launcher import launcher
from megaflow_hpc.environments.sandbox.commands.template import Clone, Template
from megaflow_hpc.environments.sandbox.rootfs.access import Access
from megaflow_hpc.environments.sandbox.rootfs.overlay import MOUNT
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import ConfigError, SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR, unshare
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity

MOST = 8
"""Templates kept of images of which no sandbox runs; each is some 12 MB."""

_KERNEL = (5, 9)
"""Linux has pidfds, openat2 and close_range from here on."""
_LONGEST_OPTIONS = 4000
"""The kernel takes a page of mount options."""
_CAPABILITIES = dict(zip(ROOT_MAY, (0, 1, 3, 4, 5, 10, 6, 7, 18), strict=True))
_HOME = f"{CONTROL_DIR}/{helper_python.NAME}"
_SCRIPT = (
    f"PYTHONHOME={_HOME} PYTHONPATH= LD_PRELOAD= exec {_HOME}/loader --library-path {_HOME}/libraries {_HOME}/python "
    f'-s -S -B {CONTROL_DIR}/cloner.py "${{PYTHONHOME+PYTHONHOME=$PYTHONHOME}}" '
    '"${PYTHONPATH+PYTHONPATH=$PYTHONPATH}" "${LD_PRELOAD+LD_PRELOAD=$LD_PRELOAD}"'
)

Start = Callable[[int, Callable[[Identity], None]], Awaitable[Clone]]
"""Takes a sandbox's standard error, and what is called with its first process before that does anything."""

_Key = tuple[str, ...]
"""The directories of an unpacked image, the topmost first."""


@dataclass
class _Kept:
    template: Template
    directory: Path
    starting: asyncio.Task[None]
    clones: int = 0


class Templates:
    """The templates of one provider.

    Args:
        own: the provider's directory; a template gets one in it, as a sandbox does.
        visible: directories below which layers and unpacked images lie; templates see no other of the host's.
        scratch: where the interpreter that templates run lies.
    """

    def __init__(self, own: Path, visible: Sequence[Path], apptainer: str, scratch: Path, timeout_s: float) -> None:
        self._own = own
        first, *others = (Path(os.path.realpath(directory)) for directory in visible)
        self._visible = [first, *(directory for directory in others if not _below(directory, [first]))]
        self._apptainer = apptainer
        self._scratch = scratch
        self._timeout_s = timeout_s
        self._starts: Counter[_Key] = Counter()
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._number = 0
        self._supported: bool | None = None
        self.refused: dict[_Key, str] = {}
        """Unpacked image → why no sandbox can be cloned over it; Apptainer starts each by itself then."""

    async def find(
        self, access: Access, spec: SandboxSpec, prefix: Sequence[str], control: str, command: Sequence[str]
    ) -> Start | None:
        """Returns how to start a container as a clone; ``None`` where Apptainer is to start it.

        Args:
            prefix: what :meth:`.Access.command_line` would have Apptainer start behind.
        """
        chosen = way()
        overlay = _overlay(prefix)
        key = _key(access)
        if chosen == "apptainer" or overlay is None or key in self.refused:
            return None
        if not self._possible(access, spec, overlay[1]):
            return None
        self._starts[key] += 1
        if self._starts[key] == 1 and chosen != "clone":
            return None
        if self._supported is None:
            self._supported = await asyncio.to_thread(supported)
        if not self._supported:
            return None
        kept = self._kept.get(key)
        if kept is not None and kept.starting.done() and not kept.template.alive:
            await self._drop(key)
            kept = self._kept.get(key)  # somebody else may have begun one meanwhile
        if kept is None:
            kept = self._begin(key, access, spec.image)
        self._kept.move_to_end(key)
        try:
            await asyncio.shield(kept.starting)
        except (SandboxError, OSError) as error:
            if chosen == "clone":
                raise
            self.refuse(access, error)
            return None
        capabilities = ",".join(str(_CAPABILITIES[name]) for name in ROOT_MAY)
        binds = (f"{control}:{CONTROL_DIR}:ro", *spec.binds)
        words = (spec.network, *overlay, capabilities, " ".join(command), *binds)
        return functools.partial(self._clone, kept, words)

    def refuse(self, access: Access, error: Exception) -> None:
        """Notes that sandboxes over an image cannot be cloned here; raises ``error`` where they are to be, by hand."""
        if way() == "clone":
            raise error
        self.refused[_key(access)] = str(error)

    def _possible(self, access: Access, spec: SandboxSpec, options: str) -> bool:
        sources = (access.rootfs, *access.layers, *(bind.split(":")[0] for bind in spec.binds))
        return (
            spec.as_root
            and not spec.nested
            and not spec.fakeroot
            and access.form == "tree"
            and len(os.fsencode(options)) < _LONGEST_OPTIONS
            and all(_below(Path(os.path.realpath(source)), self._visible) for source in sources)
        )

    async def _clone(
        self, kept: _Kept, fields: Sequence[str], errors: int, on_started: Callable[[Identity], None]
    ) -> Clone:
        def ended() -> None:
            kept.clones -= 1

        kept.clones += 1
        try:
            return await kept.template.clone(fields, errors, on_started, ended)
        except BaseException:
            ended()
            raise

    def _begin(self, key: _Key, access: Access, image: str) -> _Kept:
        self._number += 1
        directory = self._own / f"t{os.getpid()}-{id(self) & 0xFFFFFF:x}-{self._number}"
        template = Template(str(directory / "log"))
        starting = asyncio.ensure_future(self._start(template, directory, access, image))
        starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        kept = self._kept[key] = _Kept(template, directory, starting)
        return kept

    async def _start(self, template: Template, directory: Path, access: Access, image: str) -> None:
        await self._make_room()
        await asyncio.to_thread(self._lay_out, directory)
        # Nothing runs in it but the cloner, which makes user namespaces, and needs the host's network for those who do.
        binds = tuple(f"{visible}:{visible}" for visible in self._visible)
        spec = SandboxSpec(image, network="host", nested=True, processes=None, binds=binds)
        prefix, argv = access.command_line(
            self._apptainer,
            spec,
            layer=str(directory / "layer"),
            control=str(directory / "control"),
            command=("/bin/sh", "-c", _SCRIPT),
        )
        # Who maps uid 0 of a namespace below must have it; the clones do not.
        argv[argv.index("--add-caps") + 1] += ",CAP_SETFCAP"

        def started(identity: Identity) -> None:
            (directory / "owner").write_text(f"{identity}\n")

        temporary = str(directory / "tmp")
        try:
            await template.start(
                argv, temporary=temporary, timeout_s=self._timeout_s, prefix=prefix, on_started=started
            )
        except BaseException:
            await template.stop()
            raise

    def _lay_out(self, directory: Path) -> None:
        kit = helper_python.kit(self._scratch)
        for name in ("", "tmp", "layer", "control"):
            os.mkdir(directory / name, 0o700)
        helper_python.lay(kit, directory / "control")
        program = resources.files("megaflow_hpc.environments.sandbox.commands").joinpath("cloner.py").read_bytes()
        (directory / "control" / "cloner.py").write_bytes(program)

    async def _make_room(self) -> None:
        idle = [key for key, kept in self._kept.items() if kept.starting.done() and not kept.clones]
        for key in idle[: max(0, len(self._kept) - MOST)]:
            await self._drop(key)

    async def _drop(self, key: _Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            with suppress(SandboxError, OSError, asyncio.CancelledError):
                await kept.starting
            await kept.template.stop()
            await asyncio.to_thread(remove_tree, kept.directory, ignore_errors=True)

    async def close(self) -> None:
        """Ends every template. Idempotent."""
        await asyncio.gather(*map(self._drop, list(self._kept)))


def way() -> str:
    """Returns how sandboxes start: ``auto``, or what ``MEGAFLOW_START`` (apptainer, clone) decides by hand.

    Raises:
        ConfigError: it has another value.
    """
    named = os.environ.get("MEGAFLOW_START", "auto")
    if named not in ("auto", "apptainer", "clone"):
        raise ConfigError(f"MEGAFLOW_START={named}: expected apptainer, clone or auto")
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


def _overlay(prefix: Sequence[str]) -> tuple[str, str, str] | None:
    """What :data:`.overlay.MOUNT` takes in an argv prefix that does nothing but to mount an overlay; else ``None``."""
    if len(prefix) > 6 and prefix[-6] == "-c" and prefix[-5].startswith(MOUNT):
        return prefix[-3], prefix[-2], prefix[-1]
    return None


def _key(access: Access) -> tuple[str, ...]:
    return (*access.layers, access.rootfs)


def _below(path: Path, directories: Sequence[Path]) -> bool:
    return any(path == directory or directory in path.parents for directory in directories)
