"""Image names of tasks → image files: what a campaign maps, built or fetched into the store if it is not there.

The key of an image is a hash of what goes into it: a definition file and the files it copies, an address, or a
Dockerfile with what it copies and its bases. A mapping that names a SIF file or a directory is used where it lies.

What a task or a Dockerfile says is a name and nothing else: only the mapping makes an address or a path of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from megaflow_hpc.environments.images.apptainer_build import build
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile, Dockerfiles, context_digest
from megaflow_hpc.environments.images.layer_store import LayerStore
from megaflow_hpc.environments.images.layered import LayeredImage, is_layered
from megaflow_hpc.environments.images.making import Making, Watch, make_all
from megaflow_hpc.environments.images.pull import SIF_OPTIONS, pull
from megaflow_hpc.environments.images.registries import Registries, is_remote
from megaflow_hpc.environments.images.store import ImageStore, digest_in
from megaflow_hpc.errors import ConfigError, MegaflowError, SiteError
from megaflow_hpc.host.apptainer import find_apptainer

BUILD_OPTIONS = ("--fakeroot", *SIF_OPTIONS)
"""Fast compression: an image is packed once and unpacked on every node; readable by every squashfs there is."""

BUILD_S = 3600.0
"""Longest build of a Dockerfile that states no time."""

MOST_BUILD_S = 6 * 3600.0
"""Longest build, whatever a task states."""

KEY_LENGTH = 32
_NOT_BUILT = "not-built-"


def is_built(path: Path) -> bool:
    """Whether a path that was resolved without building is an image's; else it stands for one that is to be made."""
    return not path.name.startswith(_NOT_BUILT)


@dataclass(frozen=True)
class ImageRequest:
    """An image that a task wants."""

    name: str
    """As the task names it."""
    base: str = ""
    """Image name that is mapped instead, and its Dockerfile starts from; empty: ``name`` itself."""
    dockerfile: Path | None = None
    """To be built onto ``base``."""
    timeout_s: float = BUILD_S
    """Longest build."""
    path: str = ""
    """The task's directory or file, for messages."""


@dataclass(frozen=True)
class ImageMapping:
    """Image names of tasks → sources, as in ``environment.images`` of a campaign."""

    names: Mapping[str, str]
    base_dir: Path
    """Directory that relative paths are relative to."""
    where: str = "environment.images"
    """The mapping as messages call it."""


class DockerfileBuilder(Protocol):
    """Makes an image of a Dockerfile: :class:`megaflow_hpc.environments.builds.builder.Builder`."""

    def build(
        self,
        dockerfile: Dockerfile,
        images: Mapping[str, str],
        layers: LayerStore,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> LayeredImage:
        """Builds an image whose layers are in ``layers`` then.

        Args:
            images: a file or a directory for each of ``dockerfile.bases``.
            say: gets one line for each step that has to be made.

        Raises:
            ConfigError: a source that cannot be copied.
            SiteError: a step that failed, or took too long.
        """
        ...

    def stop(self) -> None:
        """Ends the builds under way, in whatever threads; the builder builds nothing more."""


def match_name(name: str, mapping: Mapping[str, str]) -> str | None:
    """What ``mapping`` gives for an image name: its own entry, else that of the longest pattern.

    A pattern has one ``*``, which stands for any text; in what it is mapped to, ``*`` is that text again:
    ``"swebench/*": docker://swebench/*`` or ``"swebench/sweb.eval.x86_64.*:latest": images/*.sif``. The text comes from
    a task: in a path it may name nothing beside or above what the pattern leads to, and no variable.

    Raises:
        ConfigError: it would.
    """
    if name in mapping:
        return _path(mapping[name])
    for pattern in sorted((key for key in mapping if key.count("*") == 1), key=len, reverse=True):
        head, tail = pattern.split("*")
        if len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail):
            text, source = name[len(head) : len(name) - len(tail)], mapping[pattern]
            if "*" in source and not is_remote(source) and not _FILE_NAME.fullmatch(text):
                raise ConfigError(
                    f"image {name!r}: {text!r} in {source!r}, which {pattern!r} is mapped to, leads elsewhere; map "
                    "this name by itself"
                )
            return _path(source).replace("*", text)
    return None


_FILE_NAME = re.compile(r"(?!~)(?!.*(^|/)\.{0,2}(/|$))[^\0$]+", re.DOTALL)
"""A relative path without ``..`` or a variable."""


def _path(source: str) -> str:
    return source if is_remote(source) else os.path.expanduser(os.path.expandvars(source))


class Images:
    """Image names → files, made and kept in a store. Building needs Apptainer, looking does not."""

    def __init__(
        self, store: ImageStore, registries: Registries | None = None, builder: DockerfileBuilder | None = None
    ) -> None:
        """
        Args:
            registries: mirrors, and whether anything may be fetched; default: what the environment says.
            builder: builds Dockerfiles; without one, they must be in the store.
        """
        self.store = store
        self.builder = builder
        self.registries = registries or Registries.configured()
        self.dockerfiles = Dockerfiles()
        self.say: Callable[[str], None] = lambda line: None
        """Gets one line for each step of a Dockerfile that is made, and the progress of what is fetched."""
        self.used: dict[str, tuple[str, Path | None]] = {}
        """Key → source and file of every image of the store that was asked for; no file where it is not there yet."""
        self.show: Callable[[Making], None] = lambda state: None
        """Gets how far :meth:`resolve_all` is, some times a second."""
        self._steps = self._sif_bytes = 0
        self._guard = threading.Lock()
        self._stopped = threading.Event()

    def watch(self, watch: Watch) -> None:
        """Has ``watch`` told what is made, and how far that is."""
        self.say, self.show = watch.say, watch.show

    def resolve_all(
        self,
        requests: Iterable[ImageRequest],
        mapping: ImageMapping,
        *,
        build: bool = True,
        failures: dict[str, MegaflowError] | None = None,
    ) -> dict[str, str]:
        """The image file of every image that is asked for, as name → absolute path.

        Every name is looked up before anything is made; then images are made side by side (making.py).

        Args:
            build: build what is not there yet; without it only the names and sources are checked.
            failures: gets the errors, by the names of the images that failed, which are left out of what is returned,
                and the others are made all the same; without it nothing more is begun after an error.

        Raises:
            ConfigError: a name that is not mapped, or mapped to nothing that exists.
            SiteError: a build that failed, with Apptainer's output; an image that is missing and may not be fetched.
        """
        wanted: dict[str, ImageRequest] = {}
        for request in requests:
            wanted.setdefault(request.name, request)
        used, found = dict(self.used), dict[str, Path]()
        for number, (name, request) in enumerate(wanted.items()):
            try:
                found[name] = self.resolve_request(request, mapping, build=False)
            except MegaflowError as error:
                if failures is None:
                    raise
                failures[name] = error
            if build:
                self.show(Making(len(wanted), number))
        if not build:
            return {name: str(path) for name, path in found.items()}
        # What is not there yet comes under another key where its base is not there either.
        self.used = used | {key: row for key, row in self.used.items() if row[1]}
        jobs = {
            name: partial(self.resolve_request, wanted[name], mapping)
            for name, path in found.items()
            if not is_built(path)
        }
        there, steps, before = len(found) - len(jobs), self._steps, self._added_bytes

        def told(made: int, failed: int, at_work: int, elapsed_s: float) -> None:
            state = Making(len(wanted), len(wanted), there, len(jobs), made, failed, at_work)
            self.show(replace(state, steps=self._steps - steps, bytes=self._added_bytes - before, elapsed_s=elapsed_s))

        if wanted:
            told(0, 0, 0, 0.0)
        made, failed = make_all(jobs, told, self.stop, keep_going=failures is not None)
        for name, failure in failed.items():
            if failures is None or not isinstance(failure, MegaflowError):
                raise failure
            failures[name] = failure
        found |= made
        return {name: str(found[name]) for name in wanted if name in made or (name in found and name not in jobs)}

    def unmapped(self, requests: Iterable[ImageRequest], mapping: ImageMapping) -> list[str]:
        """Returns what is wrong with the names that are asked for: not mapped, or mapped to nothing that exists.

        Nothing is looked up in a registry; each name is looked at once.
        """
        asked: dict[str, ImageRequest] = {}
        for request in requests:
            first = request.base or request.name
            names = self.dockerfiles.read(request.dockerfile).bases if request.dockerfile else [first]
            for name in names:
                asked.setdefault(name, request)
        found = []
        for name, request in asked.items():
            try:
                self.resolve(name, mapping, build=False, task_path=request.path)
            except ConfigError as error:
                found.append(str(error))
            except SiteError:
                continue  # it is mapped, and something else is wrong with it
        return found

    def stop(self) -> None:
        """Ends what threads of :meth:`resolve_all` are making; nothing more is made."""
        self._stopped.set()
        if self.builder is not None:
            self.builder.stop()

    @property
    def _added_bytes(self) -> int:
        return self.store.layers.added_bytes + self._sif_bytes

    def _say_step(self, line: str) -> None:
        with self._guard:
            self._steps += 1
        self.say(line)

    def resolve_request(
        self,
        request: ImageRequest,
        mapping: ImageMapping,
        *,
        build: bool = True,
    ) -> Path:
        """The file of one image: the mapped one, or its Dockerfile built onto the mapped ``FROM``."""
        if request.dockerfile is None:
            name = request.base or request.name
            return self.resolve(name, mapping, build=build, task_path=request.path)
        return self.resolve_dockerfile(
            self.dockerfiles.read(request.dockerfile),
            mapping,
            build=build,
            task_path=request.path,
            timeout_s=request.timeout_s,
        )

    def resolve_dockerfile(
        self,
        dockerfile: Dockerfile,
        mapping: ImageMapping,
        *,
        build: bool = True,
        task_path: str = "",
        timeout_s: float = BUILD_S,
    ) -> Path:
        """The image that a Dockerfile makes of the images that its ``FROM`` lines are mapped to."""
        bases = {name: self.resolve(name, mapping, build=build, task_path=task_path) for name in dockerfile.bases}
        key = context_digest(dockerfile, "\0".join(_identity(path) for path in bases.values()))

        def make(target: Path) -> LayeredImage:
            if self.builder is None:
                raise SiteError(f"{dockerfile.path}: not in the image store, and nothing here builds Dockerfiles")
            files = {name: str(path) for name, path in bases.items()}
            return self.builder.build(
                dockerfile, files, self.store.layers, min(timeout_s, MOST_BUILD_S), self._say_step
            )

        return self._made(key, str(dockerfile.path), make, build=build)

    def resolve_source(self, source: str, where: str) -> Path:
        """The image file of an address, or of a path relative to the working directory.

        Args:
            where: what messages call the place that names it.
        """
        return self.resolve(source, ImageMapping({source: source}, Path.cwd(), where))

    def resolve(
        self,
        name: str,
        mapping: ImageMapping,
        *,
        build: bool = True,
        task_path: str = "",
    ) -> Path:
        """The image file that ``mapping`` gives for ``name``."""
        where = mapping.where
        try:
            source = match_name(name, mapping.names)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if source is None:
            place = f"{task_path}/task.toml" if os.path.isdir(task_path) else task_path
            asked = f", which {place} asks for," if place else ""
            raise ConfigError(
                f"{where}: image {name!r}{asked} is not mapped; add {name!r}: followed by a SIF file, a definition "
                "file, a directory or a docker:// address"
            )
        if is_remote(source):
            if not self.store.find(source_key(source)):
                self._check(source, where, name)
            return self._made(
                source_key(source),
                source,
                lambda target: pull(self.registries, source, target, self.store.layers, self.say, self._stopped),
                build=build,
            )
        path = Path(mapping.base_dir, source).absolute()
        if path.is_dir():
            return path
        if not path.is_file():
            asked = "" if name == source else f"{name}: "
            raise ConfigError(
                f"{where}: {asked}{path}: no such file; expected a SIF, a .def file, a directory or docker://…"
            )
        if path.suffix != ".def":
            return path
        key = definition_digest(path)
        if not self.store.find(key[:KEY_LENGTH]):
            try:
                self.registries.check_definition(path)
            except SiteError as error:
                raise SiteError(f"{where}: {name}: {error}") from None
        return self._made(key, str(path), lambda target: _build_definition(target, path, self._stopped), build=build)

    def _check(self, source: str, where: str, name: str) -> None:
        try:
            self.registries.check(source)
        except SiteError as error:
            asked = "" if name == source else f"{name}: "
            raise SiteError(f"{where}: {asked}{error}") from None

    def _made(self, key: str, source: str, make: Callable[[Path], LayeredImage | None], *, build: bool) -> Path:
        """The image of ``key``, made if it is missing; with ``build`` false a file that is not there yet is named."""
        key = key[:KEY_LENGTH]
        found = self.store.find(key)
        if found is None and build:
            found = self.store.make(key, source, make)
            if not is_layered(found):
                with self._guard:
                    self._sif_bytes += found.stat().st_size
        self.used[key] = (source, found)
        return found or self.store.root / "sha256" / f"{_NOT_BUILT}{key}.sif"


def source_key(source: str) -> str:
    """The key of what an address gives, wherever it is fetched from."""
    return hashlib.sha256(f"remote\0{source}".encode()).hexdigest()[:KEY_LENGTH]


def definition_digest(path: Path) -> str:
    """SHA-256 of a definition file, of the local image it starts from and of the files it copies in."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    digest = hashlib.sha256(b"definition\0" + text.encode("utf-8", "surrogateescape"))
    local = re.search(
        r"^\s*Bootstrap:\s*(localimage|oci-archive|docker-archive)\s*$", text, re.IGNORECASE | re.MULTILINE
    )
    start = re.search(r"^\s*From:\s*(\S+)", text, re.IGNORECASE | re.MULTILINE)
    if local and start:
        digest.update(_identity(path.parent / start[1]).encode())
    section = ""
    for line in text.splitlines():
        if line.startswith("%"):
            section = line.split()[0]
        elif section == "%files" and line.strip() and not line.lstrip().startswith("#"):
            source = path.parent / line.split()[0]
            for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
                if file.is_file():
                    digest.update(
                        f"\0{file.relative_to(path.parent) if file.is_relative_to(path.parent) else file}\0".encode()
                    )
                    digest.update(file.read_bytes())
    return digest.hexdigest()


def _identity(path: Path) -> str:
    """What stands for a base image in a key: the digest in its name, else path, size and time of change."""
    try:
        found = path.stat()
    except OSError:
        return path.name
    return digest_in(path) or f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}"


def _build_definition(target: Path, definition: Path, stopped: threading.Event) -> None:
    # Relative paths in a definition are relative to it.
    build(find_apptainer(), target, str(definition), *BUILD_OPTIONS, cwd=definition.parent, stopped=stopped)
