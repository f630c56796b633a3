"""Root file systems of sandboxes: an image's trees in the node's cache, under a writable layer.

Every image is a list of trees, topmost first: unpacked layers over an unpacked SIF or a directory. The kernel stacks
them as the lower directories of an overlay. If no overlay can be mounted, the image is unpacked as one tree, and every
sandbox gets a copy of it. Possible reasons are an old kernel, scratch on a network file system, or containers that only
root can start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megaflow_hpc.environments.images.cache.cache import ImageCache, ImageLease
from megaflow_hpc.environments.images.layers.view import LayerView, Tree
from megaflow_hpc.environments.sandbox.launcher import exec_argv, namespace_root, namespace_user
from megaflow_hpc.environments.sandbox.rootfs import overlay
from megaflow_hpc.environments.sandbox.scratch import Kind
from megaflow_hpc.environments.sandbox.spec import Bind, SandboxSpec, is_without
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR

Writes = Literal["overlay", "copy"]


@dataclass(frozen=True)
class CommandLine:
    """The command line that starts a container over a writable layer."""

    prefix: Sequence[str]
    """Argv prefix that changes the user and mounts the overlay."""
    argv: list[str]
    mounted: overlay.Overlay | None = None
    """The overlay that the prefix mounts. ``None`` if Apptainer mounts it or the sandbox is a copy."""


@dataclass(frozen=True)
class Rootfs:
    """An image used by a sandbox. The node's cache keeps it until ``release`` is called."""

    base: str
    """Path of the bottom directory tree, over which ``layers`` are stacked."""
    release: Callable[[], None]
    copies: bool = False
    """True if each sandbox writes to a copy of the image, which must be a single tree."""
    namespace: Sequence[str] | None = None
    """Argv prefix that enters the sandbox's user namespace. If ``None``, a namespace that maps only uid 0 is used."""
    layers: Sequence[str] = ()
    """Paths of the trees over ``base``, topmost first, each in the form of an overlay's upper directory."""
    settings: str = ""
    """Shell lines that set the image's variables. Apptainer adds the variables defined in ``base``."""

    @property
    def image(self) -> LayerView:
        """Merged view of the image's files from all trees."""
        return LayerView([Tree(path) for path in (*self.layers, self.base)])

    def command_line(
        self, apptainer: str, spec: SandboxSpec, *, layer: str, control: str, command: Sequence[str]
    ) -> CommandLine:
        """Returns the command line that starts a container with a writable layer over the image."""
        binds = [Bind(control, CONTROL_DIR, True), *spec.parsed_binds()]
        if self.copies:
            root = os.path.join(layer, "root")
            for name in overlay.MOUNT_POINTS:
                if not os.path.lexists(os.path.join(root, name)):
                    os.mkdir(os.path.join(root, name), 0o755)
            _make_bind_targets(root, binds)
            argv = exec_argv(apptainer, spec, root, overlay=None, control=control, command=command)
            return CommandLine(self.namespace or namespace_root(spec) or namespace_user(spec), argv)
        merged = f"{layer}.root"
        mounted = overlay.prepare((*self.layers, self.base), layer, merged)
        if mounted is None:
            if self.layers:
                raise SandboxError(f"{self.base}: no overlay of layers can be mounted at {layer}; set MEGAFLOW_SCRATCH")
            argv = exec_argv(apptainer, spec, self.base, overlay=layer, control=control, command=command)
            return CommandLine(namespace_root(spec), argv)
        _make_bind_targets(os.path.join(layer, "upper"), binds)
        argv = exec_argv(apptainer, spec, merged, overlay=None, control=control, command=command)
        return CommandLine(overlay.argv_prefix(mounted, spec, self.namespace), argv, mounted)


def _make_bind_targets(root: str, binds: Sequence[Bind]) -> None:
    """Creates the targets of binds in a writable tree, because Apptainer does not create them in a writable root.

    The agent controls the tree, so symlinks in it are never followed.
    """
    for source, target, _ in binds:
        parts = [part for part in target.split("/") if part]
        path = root
        try:
            for number, part in enumerate(parts):
                path = os.path.join(path, part)
                if os.path.islink(path):
                    raise SandboxError(
                        f"{source}:{target}: the target is a symbolic link in the sandbox; nothing can be bound there"
                    )
                if number == len(parts) - 1 and os.path.isfile(source):
                    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    os.close(os.open(path, flags, 0o644))
                elif not os.path.isdir(path):
                    os.mkdir(path, 0o755)
        except OSError as error:
            raise SandboxError(
                f"{source}:{target}: the target cannot be created in the sandbox ({path}: {error.strerror}); check "
                "that scratch is not full, and that source and target are both files or both directories"
            ) from error


class RootfsFactory:
    """Creates the root file systems of one process's sandboxes.

    Args:
        images: The node's image cache.
        why_no_overlay: Returns why Apptainer cannot mount an overlay on scratch, or an empty string if it can. Slow.
        scratch: Directory of writable layers.
        storage: Kind of storage of the scratch directory.
    """

    def __init__(self, images: ImageCache, why_no_overlay: Callable[[], str], scratch: Path, storage: Kind) -> None:
        self.images = images
        self._why_no_overlay = why_no_overlay
        self._scratch = scratch
        self._storage = storage
        self._writes: Writes | None = None
        self._flat: dict[str, bool] = {}

    @property
    def writes(self) -> Writes:
        """Storage for sandboxes' writes: an overlay if one can be mounted on scratch, otherwise a copy of the image."""
        if self._writes is None:
            self._writes = self._decide_writes()
        return self._writes

    def _decide_writes(self) -> Writes:
        if is_without("overlay") or self._storage == "network":
            return "copy"
        if os.geteuid() != 0 and overlay.works(str(self._scratch)):
            return "overlay"
        return "copy" if self._why_no_overlay() else "overlay"

    def is_flat(self, image: str) -> bool:
        """Returns whether this node unpacks an image as a single tree, because an overlay cannot stack its layers."""
        if os.path.isdir(image):
            return False
        if image not in self._flat:
            self._flat[image] = not self._can_stack(len(self.images.facts(image).layers))
        return self._flat[image]

    def _can_stack(self, layers: int) -> bool:
        scratch = str(self._scratch)
        if layers >= overlay.MAX_LOWERS or overlay.has_reserved_character(scratch):
            return False
        return self.writes == "overlay" and os.geteuid() != 0 and overlay.works(scratch)

    def ready(self, image: str) -> Rootfs | None:
        """Returns the root file system of a cached image, or ``None``. Never blocks. Always ``None`` for the first use
        of an image."""
        if not os.path.isdir(image) and image not in self._flat:
            return None
        lease = self.images.ready(image, flat=self.is_flat(image))
        return self._rootfs(image, lease) if lease else None

    def acquire(self, image: str) -> Rootfs:
        """Returns the root file system of an image, unpacking the image first if it is not in the cache. Blocks."""
        return self._rootfs(image, self.images.acquire(image, flat=self.is_flat(image)))

    def _rootfs(self, image: str, lease: ImageLease) -> Rootfs:
        settings = "" if os.path.isdir(image) else self.images.facts(image).settings
        copies = self.writes == "copy"
        return Rootfs(lease.path, lease.release, copies=copies, layers=lease.layers, settings=settings)
