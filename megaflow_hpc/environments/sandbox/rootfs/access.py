"""How a sandbox gets at its image: which of three ways is cheapest here, decided by numbers.

=======  ====================================================  =========================  ==================
form     the image is                                          a start costs              it takes
=======  ====================================================  =========================  ==================
tree     unpacked to scratch, once per node                    least                      bytes and inodes
mount    one squashfs mounted for all sandboxes of a job       a little more              nothing, or a copy
direct   the SIF itself, mounted by each sandbox for itself    most, and a process each   nothing
=======  ====================================================  =========================  ==================

Unpacking is paid once and saves something at every start, so it depends on how often the image will be used; it needs
room in bytes and inodes. Where scratch is memory, what is unpacked is charged to the job.

Over the image lies an overlay, the kernel's or by FUSE. Where neither can be had (an old kernel, scratch on a network
file system, containers that only root's rights start), an image is unpacked and every sandbox gets a copy of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megaflow_hpc.environments.images.cache import parts
from megaflow_hpc.environments.images.cache.cache import ImageCache, Lease
from megaflow_hpc.environments.images.cache.shelf import Room
from megaflow_hpc.environments.images.image_file import ImageFacts
from megaflow_hpc.environments.images.layered import is_layered
from megaflow_hpc.environments.images.layers.view import Tree, View
from megaflow_hpc.environments.sandbox.argv import exec_argv, namespace_root, namespace_user
from megaflow_hpc.environments.sandbox.probe import Site
from megaflow_hpc.environments.sandbox.rootfs import overlay
from megaflow_hpc.environments.sandbox.rootfs.mounts import Mounted, mount
from megaflow_hpc.environments.sandbox.scratch import Kind
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import ConfigError, SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR

Form = Literal["tree", "mount", "direct"]
Writes = Literal["overlay", "copy"]

START_S = {"tree": 0.05, "mount": 0.06, "direct": 0.20}
"""Seconds to start one sandbox, as ``tests.bench.modes`` measures them; only their differences count."""
UNPACK_BYTES_PER_S = 150e6
UNPACK_INODES_PER_S = 20_000
READ_SHARE = 0.02
"""Share of a sandbox's work by which files are slower through squashfs; small, but paid as long as it runs."""
WORK_S = 10.0
"""Seconds of file work in one sandbox, for :data:`READ_SHARE`."""
LIKE_A_LOST_IMAGE = (124, 126, 127, 128 + signal.SIGBUS, 128 + signal.SIGKILL)
"""Exit codes of commands whose program, directory or pages went away, and of others."""
MANY = 1000.0
"""Starts of an image nobody announced."""
MEMORY_SHARE = 0.25
"""Largest share of scratch in memory that unpacked images may take."""


def choose(
    size: Room,
    room: Room,
    expected_starts: float,
    *,
    scratch: Kind = "disk",
    can_mount: bool,
    can_direct: bool,
) -> tuple[Form, str]:
    """Returns the form to use an image in, and why, in words for a log.

    Args:
        size: of the image when unpacked.
        room: what is left for images on scratch.
        expected_starts: sandboxes of this image still to come on this node.
        can_mount: FUSE is open to users, and squashfuse is there.
        can_direct: Apptainer can mount a SIF itself, by FUSE or by its setuid starter.
    """
    usable = int(room.bytes * (MEMORY_SHARE if scratch == "memory" else 1.0))
    fits = size <= Room(usable, room.inodes)
    other: Form | None = "mount" if can_mount else "direct" if can_direct else None
    if other is None:
        return "tree", "images cannot be mounted here" + ("" if fits else "; scratch is short of room all the same")
    if not fits:
        where = "memory" if scratch == "memory" else "scratch"
        return other, f"{size.bytes >> 20} MiB in {size.inodes} files are more than {where} has room for"
    cost = size.bytes / UNPACK_BYTES_PER_S + size.inodes / UNPACK_INODES_PER_S
    saving = expected_starts * (START_S[other] - START_S["tree"] + READ_SHARE * WORK_S)
    if saving > cost:
        return "tree", f"unpacking takes {cost:.1f} s and saves {saving:.1f} s in {expected_starts:g} starts"
    return other, f"unpacking would take {cost:.1f} s and save {saving:.1f} s in {expected_starts:g} starts"


@dataclass(frozen=True)
class CommandLine:
    """How Apptainer starts a container over a writable layer."""

    prefix: Sequence[str]
    """Argv prefix that changes what it runs as and where."""
    argv: list[str]
    mounted: overlay.Overlay | None = None
    """What the prefix mounts of directories of this node; ``None``: nothing, or something else."""


class Access:
    """One sandbox's hold on its image, from :meth:`ImageAccess.acquire` to :meth:`release`."""

    def __init__(
        self,
        form: Form,
        rootfs: str,
        release: Callable[[], None],
        mounted: Mounted | None = None,
        *,
        copies: bool = False,
        namespace: Sequence[str] | None = None,
        layers: Sequence[str] = (),
        settings: str = "",
    ) -> None:
        if layers and (copies or form == "direct"):
            raise ValueError("layers need an overlay; without one an image is laid out first")
        self.form = form
        self.namespace = namespace
        """Argv prefix that enters the user namespace of the sandbox; ``None``: one of uid 0 alone."""
        self.copies = copies
        """Each sandbox writes to a copy of the image: there is no overlay here."""
        self.rootfs = rootfs
        """The image's files as the host sees them, without those of ``layers``; the SIF itself with form ``direct``."""
        self.layers = tuple(layers)
        """Directories that lie over them, the topmost first, each in the form of an overlay's upper directory."""
        self.settings = settings
        """Lines of shell that set the image's variables, beside those that the runtime finds in its files."""
        self.release = release
        self._mounted = mounted

    @property
    def image(self) -> View | None:
        """The image's files, of all layers; ``None`` where they cannot be seen from the host."""
        if not os.path.isdir(self.rootfs):
            return None
        return View([Tree(place) for place in (*self.layers, self.rootfs)])

    def command_line(
        self, apptainer: str, spec: SandboxSpec, *, layer: str, control: str, command: Sequence[str]
    ) -> CommandLine:
        """Returns how a container is started with a writable layer over the image."""
        binds = (f"{control}:{CONTROL_DIR}", *spec.binds)
        if self.copies:
            root = os.path.join(layer, "root")
            points = [f"/:/{name}" for name in overlay.MOUNT_POINTS if not os.path.lexists(os.path.join(root, name))]
            for bind in (*points, *binds):
                _bind_point(root, bind)
            argv = exec_argv(apptainer, spec, root, overlay=None, control=control, command=command)
            return CommandLine(self.namespace or namespace_root(spec) or namespace_user(spec), argv)
        merged = f"{layer}.root"
        prefix: Sequence[str] | None = None
        laid: overlay.Overlay | None = None
        if self._mounted is not None:
            prefix = self._mounted.argv_prefix(self.layers, layer, merged, spec)
        elif self.form == "tree" and (laid := overlay.lay((*self.layers, self.rootfs), layer, merged)):
            prefix = overlay.argv_prefix(laid, spec, self.namespace)
        if prefix is None and self.layers:
            raise SandboxError(f"{self.rootfs}: no overlay of layers can be mounted at {layer}; set MEGAFLOW_SCRATCH")
        if prefix is None:
            argv = exec_argv(apptainer, spec, self.rootfs, overlay=layer, control=control, command=command)
            return CommandLine(namespace_root(spec), argv)
        for bind in binds:
            _bind_point(os.path.join(layer, "upper"), bind)
        argv = exec_argv(apptainer, spec, merged, overlay=None, control=control, command=command)
        return CommandLine(prefix, argv, laid)

    def check(self, status: int | None = None) -> None:
        """Raises :class:`SandboxError` if the image went away under the sandbox.

        Args:
            status: exit code of a command, after which it need not be looked at if it tells of no such thing.
        """
        suspected = status is None or status in LIKE_A_LOST_IMAGE
        if suspected and self._mounted is not None and not self._mounted.alive():
            raise SandboxError(f"{self.rootfs}: the mount of the image has ended")


def _bind_point(root: str, bind: str) -> None:
    """Makes the place that ``SRC:DEST`` covers in a writable tree: Apptainer makes none in a writable root.

    The layer is the agent's work: nothing here follows a link in it.
    """
    source, _, rest = bind.partition(":")
    parts = [part for part in (rest.partition(":")[0] or source).split("/") if part]
    place = root
    try:
        for number, part in enumerate(parts):
            place = os.path.join(place, part)
            if os.path.islink(place):
                raise SandboxError(f"{bind}: the sandbox has a symbolic link there; nothing can be bound")
            if number == len(parts) - 1 and os.path.isfile(source):
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                os.close(os.open(place, flags, 0o644))
            elif not os.path.isdir(place):
                os.mkdir(place, 0o755)
    except OSError as error:
        raise SandboxError(
            f"{bind}: no place for it can be made in the sandbox ({place}: {error.strerror}): see that scratch is not "
            "full, and that the bind's target is a directory or a file as its source is"
        ) from error


class ImageAccess:
    """Gives sandboxes of one process their images in the form that is cheapest on this node.

    Args:
        images: the node's copies.
        site: what the node can do, asked for when it is first needed.
        scratch: where mounts are kept.
        kind: what scratch is.
    """

    def __init__(self, images: ImageCache, site: Callable[[], Site], scratch: Path, kind: Kind) -> None:
        self.images = images
        self._site = site
        self._scratch = scratch
        self._kind = kind
        self._expected: dict[str, float] = {}
        self._forms: dict[str, Form] = {}
        self._writes: Writes | None = None

    def expect(self, image: str, starts: float) -> None:
        """Notes how many sandboxes of ``image`` this node will start; images nobody announced count as :data:`MANY`."""
        self._expected[image] = starts

    @property
    def writes(self) -> Writes:
        """How sandboxes write: ``MEGAFLOW_LAYER`` (overlay, copy), else by overlay where one can be had."""
        if self._writes is None:
            named = os.environ.get("MEGAFLOW_LAYER", "auto")
            if named not in ("overlay", "copy", "auto"):
                raise ConfigError(f"MEGAFLOW_LAYER={named}: expected overlay, copy or auto")
            if named != "auto":
                self._writes = named  # type: ignore[assignment]
            elif self._kind == "network":
                self._writes = "copy"
            elif os.geteuid() != 0 and overlay.works(str(self._scratch)):
                self._writes = "overlay"
            else:
                self._writes = "copy" if self._site().overlay else "overlay"
        return self._writes  # type: ignore[return-value]

    def form(self, image: str) -> Form:
        """The form for an image, decided once: ``MEGAFLOW_IMAGE_FORM`` (tree, mount, direct), else by cost.

        Images of layers over one base have one form, that of the base; their layers are unpacked in any.
        """
        known = self._forms.get(image)
        if known is None:
            known = self._forms[image] = self._decide(image)
        return known

    def _decide(self, image: str) -> Form:
        if self.writes == "copy":
            return "tree"
        named = os.environ.get("MEGAFLOW_IMAGE_FORM", "auto")
        if named not in ("tree", "mount", "direct", "auto"):
            raise ConfigError(f"MEGAFLOW_IMAGE_FORM={named}: expected tree, mount, direct or auto")
        if named == "tree" or os.path.isdir(image):
            return "tree"
        facts = self.images.facts(image)
        if facts.is_layered:
            if facts.base is None or named == "direct" or not self._stacks(facts):
                return "tree"
            form = self.form(facts.base.path)
            return "tree" if form == "direct" else form
        if named != "auto":
            return named  # type: ignore[return-value]
        site = self._site()
        form, _ = choose(
            Room(facts.unpacked_bytes, facts.inodes),
            self.images.room(),
            self._starts(image),
            scratch=self._kind,
            can_mount=not site.mount,
            can_direct=not site.mount or site.setuid,
        )
        return form

    def _starts(self, image: str) -> float:
        """How many sandboxes of an image, or of images over it, this node will start."""
        over = [starts for other, starts in self._expected.items() if other == image or self._base_of(other) == image]
        return sum(over) if over else MANY

    def _base_of(self, image: str) -> str | None:
        if not is_layered(image):
            return None
        with suppress(SandboxError):  # whoever starts one will hear of it
            base = self.images.facts(image).base
            return base.path if base else None
        return None

    def _stacks(self, facts: ImageFacts) -> bool:
        """Whether an overlay can be had of an image's layers; without one they are laid out as one tree."""
        if len(facts.layers) >= overlay.MOST_LOWERS or overlay.odd(str(self._scratch)):
            return False
        return self.writes == "overlay" and os.geteuid() != 0 and overlay.works(str(self._scratch))

    def copied_form(self, image: str) -> parts.Form:
        """Returns what of an image is brought to this node before a sandbox uses it."""
        form = self.form(image)
        if form == "tree":
            stacked = os.path.isdir(image) or self._stacks(self.images.facts(image))
            return "tree" if stacked else "whole"
        return ("sif" if self._kind == "disk" else "direct") if form == "mount" else form

    def ready(self, image: str) -> Access | None:
        """Returns an image that is unpacked here already, else ``None``; never waits."""
        if self._forms.get(image, "tree" if os.path.isdir(image) else None) != "tree":
            return None
        lease = self.images.ready(image, self.copied_form(image))
        return self._access("tree", image, lease) if lease else None

    def acquire(self, image: str) -> Access:
        """Returns the image in its form; blocks while it is staged or mounted."""
        form = "tree" if os.path.isdir(image) else self.form(image)
        if form == "tree" or form == "direct":
            return self._access(form, image, self.images.acquire(image, self.copied_form(image)))
        facts = self.images.facts(image)
        base = facts.base or facts
        copy = Room(base.bytes, 4) <= self.images.room() and self._kind == "disk"
        lease = self.images.acquire(image, "sif" if copy else "direct")
        try:
            mounted = mount(lease.path, base.squashfs_offset, base.key, self._scratch)
        except BaseException:
            lease.release()
            raise
        return self._access("mount", image, lease, mounted)

    def _access(self, form: Form, image: str, lease: Lease, mounted: Mounted | None = None) -> Access:
        def release() -> None:
            if mounted is not None:
                mounted.release()
            lease.release()

        settings = "" if os.path.isdir(image) else self.images.facts(image).settings
        place = mounted.path if mounted is not None else lease.path
        copies = self.writes == "copy"
        return Access(form, place, release, mounted, copies=copies, layers=lease.layers, settings=settings)
