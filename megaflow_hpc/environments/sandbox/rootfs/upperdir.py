"""Edits a sandbox's writable layer from the host while no process runs in it.

The overlay's upper directory stores the agent's changes and belongs to the user who runs the campaign. Before tests
run, the directory is renamed, and a new one gets the changes that the tests may see (:func:`sift`, :func:`keep_only`).
All other files then revert to the image's versions. The agent controls the contents of the layer, so no function in
this module follows symlinks in it.

``image`` is a view of all layers of the image (images/layers/view.py).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from megaflow_hpc.environments.images.layers.merging import DELETED, OPAQUE_MARK, is_opaque, move, open_to_owner
from megaflow_hpc.environments.images.layers.view import LayerView
from megaflow_hpc.host.files import remove_tree

RUNTIME = (".singularity.d", ".exec", ".run", ".shell", ".test", "environment", "singularity")
"""Files of an image that the container runtime reads at start, such as scripts that set variables."""

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt", *RUNTIME)
"""Directories from which programs, libraries and settings are loaded."""

PROGRAM_DIRS = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin")
"""Directories that always count as program directories, even if ``PATH`` does not list them."""


@dataclass(frozen=True)
class KeepRules:
    """Rules that select which of an agent's changes the tests see. Paths are relative to the root directory."""

    kept: Sequence[str] = ()
    """Keep every change at or below these paths."""
    additions: bool = True
    """Also keep new files and directories outside the system directories. New programs are kept unless the image has a
    program of the same name."""
    everywhere: bool = False
    """Also keep every change outside the system directories, because the task has no work directory."""
    programs: Sequence[str] = PROGRAM_DIRS
    """Directories on ``PATH``."""
    loaded: Sequence[str] = ()
    """Other files and directories from which programs load code (``PYTHONPATH`` and similar)."""
    home: str = "root"
    """The home directory. Dotfiles in it count as settings."""

    def is_system(self, path: str) -> bool:
        """Returns whether programs may load code or settings from ``path``."""
        parts = path.split("/")
        hidden = f"{self.home}/." if self.home else "."
        if parts[0] in SYSTEM or path.startswith(hidden):
            return True
        prefixes = [os.path.dirname(name) for name in self.programs if os.path.basename(name) in ("bin", "sbin")]
        return any(_at_or_below(path, name) for name in (*self.programs, *self.loaded, *prefixes) if name)

    def within(self, image: LayerView) -> KeepRules:
        """Returns the rules with each path that is a symlink in the image supplemented by its target."""

        def both(paths: Sequence[str]) -> list[str]:
            targets = [_resolved(image, path) for path in paths]
            return sorted({*paths, *filter(None, targets)})

        home = _resolved(image, self.home)
        kept, programs, loaded = both(self.kept), both(self.programs), both(self.loaded)
        return KeepRules(kept, self.additions, self.everywhere, programs, loaded, home)

    def leads(self, path: str) -> bool:
        """Returns whether the rules name ``path`` or a path below it. The entries of such a directory must be
        classified one by one."""
        borders = (*self.programs, *self.loaded, self.home)
        return path in borders or any(name.startswith(f"{path}/") for name in (*self.kept, *borders))


@dataclass
class Sifted:
    """The paths that an agent changed in a writable layer, classified by :class:`KeepRules`."""

    kept: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    misleading: list[str] = field(default_factory=list)
    """Paths that could mislead tests.

    The agent changed or deleted these files of the image in system directories, or added programs that shadow the
    image's programs.
    """

    def drop(self, path: str, *, misleads: bool) -> None:
        """Adds a dropped path. ``misleads`` also records it as misleading."""
        self.dropped.append(path)
        if misleads:
            self.misleading.append(path)


def sift(upper: Path, image: LayerView, rules: KeepRules) -> Sifted:
    """Classifies the changed paths of a writable layer as kept or dropped."""
    sifted = Sifted()
    rules = rules.within(image)
    names: set[str] | None = None
    waiting = [""]
    while waiting:
        parent = waiting.pop()
        open_to_owner(upper / parent)
        for name in sorted(os.listdir(upper / parent)):
            entry = f"{parent}/{name}".lstrip("/")
            path = f"{parent}/{name.removeprefix(DELETED)}".lstrip("/")
            if name == OPAQUE_MARK or entry in rules.kept:
                continue
            original = image.entry(path)
            is_directory, is_system = _is_directory(upper / entry), rules.is_system(path)
            is_remade = is_directory and is_system and is_opaque(str(upper / entry))
            if rules.leads(path):
                if is_directory and (original is None or original.is_directory):
                    waiting.append(entry)
                    if original and is_remade:
                        sifted.misleading.append(path)
                else:
                    sifted.drop(path, misleads=bool(original and is_system))
            elif rules.everywhere and not is_system:
                sifted.kept.append(entry)
            elif original and original.is_directory and is_directory and not is_remade:
                waiting.append(entry)
            elif original or entry != path:
                sifted.drop(path, misleads=bool(original and is_system))
            elif rules.additions and not is_system:
                sifted.kept.append(entry)
            elif parent in rules.programs and not is_directory:
                if names is None:
                    names = _program_names(image, rules)
                if name in names:
                    sifted.drop(path, misleads=True)
                elif rules.additions:
                    sifted.kept.append(path)
                else:
                    sifted.dropped.append(path)
            else:
                sifted.dropped.append(path)
    sifted.kept = [*(path for path in rules.kept if not os.path.islink(upper / path)), *sifted.kept]
    return sifted


def keep_only(upper: Path, aside: Path, paths: Iterable[str], image: LayerView | None = None) -> list[str]:
    """Renames the layer to ``aside`` and moves only ``paths`` back to a new layer. Returns the paths that were moved.

    Moving preserves whiteouts and times. Paths behind a symlink of the agent stay in ``aside``. Parent directories get
    their mode from the image, if they exist there.
    """
    open_to_owner(upper)
    os.rename(upper, aside)
    upper.mkdir(mode=0o755)
    taken: list[str] = []
    for path in dict.fromkeys(path.strip("/") for path in paths):
        parts = PurePosixPath(path).parts
        if not parts or any(_at_or_below(path, other) for other in taken):
            continue
        if _move(aside, upper, parts, image):
            taken.append(path)
    return taken


def put_back(upper: Path, aside: Path, taken: Sequence[str]) -> None:
    """Undoes :func:`keep_only`. Preserves later changes to the kept paths."""
    for path in taken:
        parts = PurePosixPath(path).parts
        revert(aside, path)
        _move(upper, aside, parts)
    remove_tree(upper)
    os.rename(aside, upper)


def restore(upper: Path, image: LayerView, kept: Sequence[str]) -> None:
    """Restores the image's programs, libraries and settings in a layer. Keeps other additions of the agent."""
    for path in sift(upper, image, KeepRules(kept)).misleading:
        revert(upper, path)


def mend(upper: Path, image: LayerView, workdir: str | None) -> None:
    """Restores the image's system directories, so that a container starts even if the agent broke them."""
    broken = upper.with_name("broken")
    work = (workdir or "/").strip("/")
    rules = KeepRules([work] if work else [], everywhere=not work)
    keep = [path for path in sift(upper, image, rules).kept if path != work or _is_directory(upper / path)]
    keep_only(upper, broken, keep, image)
    remove_tree(broken)
    if work and _is_directory(upper / work):
        open_to_owner(upper / work)


def revert(upper: Path, path: str) -> bool:
    """Removes the layer's change at ``path``, which is relative to the root. Returns whether there was one."""
    target = _reachable(upper, path)
    return target is not None and _remove(target)


def make_way(upper: Path, path: str) -> None:
    """Prepares ``path`` as a mount point. Removes the layer's changes at ``path``, and parents that are not
    directories."""
    parts = PurePosixPath(path).parts
    for depth in range(1, len(parts)):
        parent = upper.joinpath(*parts[:depth])
        if _is_directory(parent):
            open_to_owner(parent)
        else:
            _remove(parent)
    revert(upper, path)


def set_aside(upper: Path, path: str, aside: Path) -> bool:
    """Moves the layer's files at ``path`` to ``aside``, exposing the image's files. Returns ``False`` if there are
    none."""
    target = _reachable(upper, path.strip("/"))
    if target is None or not os.path.lexists(target):
        return False
    os.rename(target, aside)
    return True


def replace(upper: Path, path: str, aside: Path) -> None:
    """Undoes :func:`set_aside`. Replaces the layer's files at ``path`` and makes its parents real directories."""
    make_way(upper, path.strip("/"))
    target = upper / path.strip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(aside, target)


def _move(source: Path, target: Path, parts: Sequence[str], image: LayerView | None = None) -> bool:
    """Moves one path to another layer. Returns ``False`` if it is missing or behind a symlink."""
    old, new = source, target
    for depth, part in enumerate(parts[:-1], 1):
        old, new = old / part, new / part
        if not _is_directory(old):
            return False
        if not os.path.lexists(new):
            new.mkdir()
            below = image.entry("/".join(parts[:depth])) if image else None
            mode = below.attributes.mode if below and below.is_directory else os.lstat(old).st_mode
            os.chmod(new, stat.S_IMODE(mode) | 0o700)
    old, new = old / parts[-1], new / parts[-1]
    if not os.path.lexists(old):
        return False
    move(str(old), str(new))
    return True


def _program_names(image: LayerView, rules: KeepRules) -> set[str]:
    return {name for directory in rules.programs for name in image.names(_resolved(image, directory))}


def _resolved(image: LayerView, directory: str) -> str:
    try:
        return image.resolve(directory)
    except OSError:  # symlink loop
        return directory


def _at_or_below(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}/")


def _reachable(upper: Path, path: str) -> Path | None:
    """Returns the path in a layer, or ``None`` if a parent is missing or a symlink."""
    *parents, name = PurePosixPath(path).parts
    for part in parents:
        upper /= part
        if not _is_directory(upper):
            return None
    return upper / name


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _remove(path: Path) -> bool:
    """Removes a path and its whiteout. Returns whether either existed."""
    existing = [each for each in (path, path.with_name(DELETED + path.name)) if os.path.lexists(each)]
    for each in existing:
        remove_tree(each)
    return bool(existing)
