"""Image names of tasks → image files: what a campaign maps, built or fetched into the store if it is not there.

The key of an image is a hash of what goes into it: a definition file and the files it copies, an address, or a
Dockerfile with what it copies and its bases. A mapping that names a SIF file or a directory is used where it lies.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from megaflow_hpc.environments.images.build_progress import BuildProgress, BuildWatch, make_all
from megaflow_hpc.environments.images.definition_file import build_definition, definition_digest, identity
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile, Dockerfiles, context_digest
from megaflow_hpc.environments.images.layer_store import LayerStore
from megaflow_hpc.environments.images.layered import LayeredImage, is_layered
from megaflow_hpc.environments.images.mapping import BUILD_S, ImageMapping, ImageRequest, match_name
from megaflow_hpc.environments.images.pull import pull
from megaflow_hpc.environments.images.registries import Registries, is_remote
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import ConfigError, MegaflowError, SiteError

MAX_BUILD_S = 6 * 3600.0
"""Longest build, whatever a task states."""

KEY_LENGTH = 32
_NOT_BUILT = "not-built-"


def is_built(path: Path) -> bool:
    """Whether a path that was resolved without building is an image's; else it stands for one that is to be made."""
    return not path.name.startswith(_NOT_BUILT)


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
        self.registries = registries or Registries()
        self.dockerfiles = Dockerfiles()
        self.say: Callable[[str], None] = lambda line: None
        """Gets one line for each step of a Dockerfile that is made, and the progress of what is fetched."""
        self.used: dict[str, tuple[str, Path | None]] = {}
        """Key → source and file of every image of the store that was asked for; no file where it is not there yet."""
        self.show: Callable[[BuildProgress], None] = lambda state: None
        """Gets how far :meth:`resolve_all` is, some times a second."""
        self._steps = self._sif_bytes = 0
        self._guard = threading.Lock()
        self._stopped = threading.Event()

    def watch(self, watch: BuildWatch) -> None:
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

        Every name is looked up before anything is made; then images are made in parallel (build_progress.py).

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
                self.show(BuildProgress(len(wanted), number))
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
            state = BuildProgress(len(wanted), len(wanted), there, len(jobs), made, failed, at_work)
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
        key = context_digest(dockerfile, "\0".join(map(identity, bases.values())))

        def make(target: Path) -> LayeredImage:
            if self.builder is None:
                raise SiteError(f"{dockerfile.path}: not in the image store, and nothing here builds Dockerfiles")
            files = {name: str(path) for name, path in bases.items()}
            return self.builder.build(dockerfile, files, self.store.layers, min(timeout_s, MAX_BUILD_S), self._say_step)

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
            return self._made(
                source_key(source),
                source,
                lambda target: pull(self.registries, source, target, self.store.layers, self.say, self._stopped),
                lambda: self.registries.check(source),
                where if name == source else f"{where}: {name}",
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
        return self._made(
            definition_digest(path),
            str(path),
            lambda target: build_definition(target, path, self._stopped),
            lambda: self.registries.check_definition(path),
            f"{where}: {name}",
            build=build,
        )

    def _made(
        self,
        key: str,
        source: str,
        make: Callable[[Path], LayeredImage | None],
        check: Callable[[], None] = lambda: None,
        where: str = "",
        *,
        build: bool,
    ) -> Path:
        """The image of ``key``, made if it is missing, which ``check`` may forbid, as is said with ``where``; with
        ``build`` false a file that is not there yet is named."""
        key = key[:KEY_LENGTH]
        found = self.store.find(key)
        if found is None:
            try:
                check()
            except SiteError as error:
                raise SiteError(f"{where}: {error}") from None
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
