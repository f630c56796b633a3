"""Resolves image names in tasks to image files, building or fetching missing images into the store.

The key of an image is a hash of its address, definition file or Dockerfile. For a file, the hash also covers the files
that it copies and its base images. A name that is mapped to a SIF file or a directory resolves to that path.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from megaflow_hpc.environments.images import apptainer_client
from megaflow_hpc.environments.images.build_progress import BuildProgress, make_all
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile, Dockerfiles, context_digest
from megaflow_hpc.environments.images.layered import LayeredImage, is_layered, read_layered
from megaflow_hpc.environments.images.pull import pull
from megaflow_hpc.environments.images.sif import system_partition
from megaflow_hpc.environments.images.sources import (
    BUILD_S,
    ImageMapping,
    ImageRequest,
    Registries,
    is_remote,
    match_name,
)
from megaflow_hpc.environments.images.store import ImageStore, LayerStore, digest_in
from megaflow_hpc.errors import ConfigError, MegaflowError, SandboxError, SiteError
from megaflow_hpc.host.apptainer import find_apptainer

MAX_BUILD_S = 6 * 3600.0
"""Maximum build timeout in seconds that a task can set."""

KEY_LENGTH = 32
_NOT_BUILT = "not-built-"


def is_built(path: Path) -> bool:
    """Returns whether a path from :class:`Images` belongs to an existing image. With ``build=False``, a missing image
    gets a placeholder path."""
    return not path.name.startswith(_NOT_BUILT)


_REPOSITORY = re.compile(r"(?!.*\.(sif|def|tar)$)[a-z0-9]+([._/-][a-z0-9]+)*(:[\w.-]+)?")
"""Matches the name of an image in a registry, such as ``ubuntu:22.04``, but not the name of an image file."""


class DockerfileBuilder(Protocol):
    """Interface for building images from Dockerfiles. :class:`megaflow_hpc.environments.builds.builder.Builder`
    implements it."""

    def build(
        self,
        dockerfile: Dockerfile,
        images: Mapping[str, str],
        layers: LayerStore,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> LayeredImage:
        """See :meth:`megaflow_hpc.environments.builds.builder.Builder.build`."""
        ...

    def stop(self) -> None:
        """Cancels the running builds of all threads and refuses new ones."""


class Images:
    """Resolves image names to files in a store. Only building requires Apptainer.

    Args:
        registries: Mirrors, and whether fetching is allowed. Default: no mirrors, fetching allowed.
        builder: Builds Dockerfiles. Without it, their images must already be in the store.
    """

    def __init__(
        self, store: ImageStore, registries: Registries | None = None, builder: DockerfileBuilder | None = None
    ) -> None:
        self.store = store
        self.builder = builder
        self.registries = registries or Registries()
        self.dockerfiles = Dockerfiles()
        self.say: Callable[[str], None] = lambda line: None
        """Callback for one line per executed Dockerfile step, and for download progress. Called from several
        threads."""
        self.show: Callable[[BuildProgress], None] = lambda state: None
        """Callback for the progress of :meth:`resolve_all`, called several times a second."""
        self.used: dict[str, tuple[str, Path | None]] = {}
        """Maps the key of each store image requested so far to its source and file. The file is ``None`` if it is
        missing."""
        self._steps = self._sif_bytes = 0
        self._guard = threading.Lock()
        self._stopped = threading.Event()

    def resolve_all(
        self,
        requests: Iterable[ImageRequest],
        mapping: ImageMapping,
        *,
        build: bool = True,
        failures: dict[str, MegaflowError] | None = None,
    ) -> dict[str, str]:
        """Resolves all requested images. Returns a map from image names to absolute paths.

        First looks up all names, then builds and pulls the missing images in parallel (build_progress.py).

        Args:
            build: Build and pull missing images. Otherwise only check names and sources.
            failures: Collects the errors of failed images, by name. The result omits failed images, and all other
                images are still made. If ``None``, the first error is raised.

        Raises:
            ConfigError: A name is not mapped, or is mapped to a missing file.
            SiteError: A build failed, or an image is missing and the site is air-gapped.
        """
        wanted: dict[str, ImageRequest] = {}
        for request in requests:
            wanted.setdefault(request.name, request)
        used_before = dict(self.used)
        paths: dict[str, Path] = {}
        for number, (name, request) in enumerate(wanted.items()):
            try:
                paths[name] = self.resolve_request(request, mapping, build=False)
            except MegaflowError as error:
                if failures is None:
                    raise
                failures[name] = error
            if build:
                self.show(BuildProgress(len(wanted), number))
        if build:
            # The key of a Dockerfile's image depends on its base, so drop keys computed while the base was missing.
            self.used = used_before | {key: row for key, row in self.used.items() if row[1]}
            paths = self._make_missing(wanted, paths, mapping, failures)
        return {name: str(paths[name]) for name in wanted if name in paths}

    def _make_missing(
        self,
        wanted: Mapping[str, ImageRequest],
        paths: Mapping[str, Path],
        mapping: ImageMapping,
        failures: dict[str, MegaflowError] | None,
    ) -> dict[str, Path]:
        """Builds or pulls the missing images. Returns the paths of all images that did not fail."""
        ready = {name: path for name, path in paths.items() if is_built(path)}
        jobs = {name: partial(self.resolve_request, wanted[name], mapping) for name in paths if name not in ready}
        steps_before, bytes_before = self._steps, self._added_bytes

        def report(made: int, failed: int, at_work: int, elapsed_s: float) -> None:
            state = BuildProgress(len(wanted), len(wanted), len(ready), len(jobs), made, failed, at_work)
            steps, added = self._steps - steps_before, self._added_bytes - bytes_before
            self.show(replace(state, steps=steps, bytes=added, elapsed_s=elapsed_s))

        if wanted:
            report(0, 0, 0, 0.0)
        made, failed = make_all(jobs, report, self.stop, keep_going=failures is not None)
        for name, failure in failed.items():
            if failures is None or not isinstance(failure, MegaflowError):
                raise failure
            failures[name] = failure
        return ready | made

    def unmapped(self, requests: Iterable[ImageRequest], mapping: ImageMapping) -> list[str]:
        """Returns an error for each name that is not mapped or is mapped to a missing file.

        Does not contact registries.
        """
        requested_by: dict[str, ImageRequest] = {}
        for request in requests:
            if request.dockerfile:
                names = self.dockerfiles.read(request.dockerfile).bases
            else:
                names = [request.base or request.name]
            for name in names:
                requested_by.setdefault(name, request)
        errors = []
        for name, request in requested_by.items():
            try:
                self.resolve(name, mapping, build=False, task_path=request.path)
            except ConfigError as error:
                errors.append(str(error))
            except SiteError:
                continue  # The name is mapped. The image has some other problem.
        return errors

    def stop(self) -> None:
        """Cancels all builds and pulls of :meth:`resolve_all`, and refuses new ones."""
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

    def resolve_request(self, request: ImageRequest, mapping: ImageMapping, *, build: bool = True) -> Path:
        """Returns the file of one image: a mapped file, or an image built from the request's Dockerfile."""
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
        above: tuple[Path, ...] = (),
    ) -> Path:
        """Returns the image built from a Dockerfile. Its ``FROM`` images are resolved through ``mapping``.

        Args:
            above: Dockerfiles of images that are built on top of this one.

        Raises:
            ConfigError: The Dockerfile is based on itself.
        """
        if dockerfile.path in above:
            raise ConfigError(
                f"{mapping.where}: {dockerfile.path}: its FROM is mapped to itself; map it to another image"
            )
        above = (*above, dockerfile.path)
        bases = {
            name: self.resolve(name, mapping, build=build, task_path=task_path, above=above)
            for name in dockerfile.bases
        }
        key = context_digest(dockerfile, "\0".join(map(_base_key, bases.values())))

        def make(target: Path) -> LayeredImage:
            if self.builder is None:
                raise SiteError(f"{dockerfile.path}: not in the image store, and Dockerfiles cannot be built here")
            # The image records its base, and may be used after a link to the base is gone.
            files = {name: str(path.resolve() if path.is_symlink() else path) for name, path in bases.items()}
            return self.builder.build(dockerfile, files, self.store.layers, min(timeout_s, MAX_BUILD_S), self._say_step)

        return self._find_or_make(key, str(dockerfile.path), make, build=build)

    def resolve_source(self, source: str, where: str) -> Path:
        """Resolves an address, or a path relative to the working directory, to an image file.

        Args:
            where: Origin of the source, used in messages.
        """
        return self.resolve(source, ImageMapping({source: source}, Path.cwd(), where))

    def resolve(
        self,
        name: str,
        mapping: ImageMapping,
        *,
        build: bool = True,
        task_path: str = "",
        above: tuple[Path, ...] = (),
    ) -> Path:
        """Resolves ``name`` to an image file through ``mapping``.

        Args:
            above: Dockerfiles of images that are built on top of this one.

        Raises:
            ConfigError: The name is not mapped, or is mapped to a missing file.
            SiteError: The image is missing and cannot be built or fetched.
        """
        where = mapping.where
        try:
            source = match_name(name, mapping.names)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if source is None:
            requester = f"{task_path}/task.toml" if os.path.isdir(task_path) else task_path
            requested = f", which {requester} needs," if requester else ""
            raise ConfigError(
                f"{where}: image {name!r}{requested} is not mapped; add {name!r}: followed by a SIF file, a definition "
                "file, a Dockerfile, a directory or a docker:// address"
            )
        if is_remote(source):
            return self._find_or_make(
                source_key(source),
                source,
                lambda target: pull(self.registries, source, target, self.store.layers, self.say, self._stopped),
                lambda: self.registries.check(source),
                where if name == source else f"{where}: {name}",
                build=build,
            )
        path = Path(mapping.base_dir, source).absolute()
        prefix = "" if name == source else f"{name}: "
        if path.is_dir():
            return path
        if not path.is_file():
            raise ConfigError(
                f"{where}: {prefix}{path}: no such file; expected a SIF, a .def file, a Dockerfile, a directory "
                "or docker://…"
                + (f"; did you mean docker://{source}?" if _REPOSITORY.fullmatch(source) else "")
                + ("; it names a variable that is not set: export it first" if "$" in source else "")
            )
        if path.name.startswith("Dockerfile"):
            return self.resolve_dockerfile(
                self.dockerfiles.read(path), mapping, build=build, task_path=task_path, above=above
            )
        if path.suffix != ".def":
            try:
                if is_layered(path):
                    read_layered(path)
                else:
                    system_partition(path)
            except SandboxError as error:
                raise ConfigError(f"{where}: {prefix}{error}") from None
            return path
        return self._find_or_make(
            definition_digest(path),
            str(path),
            lambda target: _build_definition(target, path, self._stopped),
            lambda: self.registries.check_definition(path),
            f"{where}: {name}",
            build=build,
        )

    def _find_or_make(
        self,
        key: str,
        source: str,
        make: Callable[[Path], LayeredImage | None],
        check: Callable[[], None] = lambda: None,
        where: str = "",
        *,
        build: bool,
    ) -> Path:
        """Returns the image for ``key``. Makes a missing image, or returns a placeholder path if ``build`` is false.

        Args:
            check: Raises :class:`SiteError` if a missing image must not be fetched.
            where: Prefix for that error.
        """
        key = key[:KEY_LENGTH]
        path = self.store.find(key)
        if path is None:
            try:
                check()
            except SiteError as error:
                raise SiteError(f"{where}: {error}") from None
            if build:
                path = self.store.make(key, source, make)
                if not is_layered(path):
                    with self._guard:
                        self._sif_bytes += path.stat().st_size
        self.used[key] = (source, path)
        return path or self.store.root / "sha256" / f"{_NOT_BUILT}{key}.sif"


def source_key(source: str) -> str:
    """Returns the key of an image address. It does not depend on mirrors."""
    return hashlib.sha256(f"remote\0{source}".encode()).hexdigest()[:KEY_LENGTH]


def definition_digest(path: Path) -> str:
    """Returns the SHA-256 of a definition file, its local base image and the files that it copies."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    digest = hashlib.sha256(b"definition\0" + text.encode("utf-8", "surrogateescape"))
    flags = re.IGNORECASE | re.MULTILINE
    local = re.search(r"^\s*Bootstrap:\s*(localimage|oci-archive|docker-archive)\s*$", text, flags)
    base = re.search(r"^\s*From:\s*(\S+)", text, flags)
    if local and base:
        digest.update(_base_key(path.parent / base[1]).encode())
    section = ""
    for line in text.splitlines():
        if line.startswith("%"):
            section = line.split()[0]
        elif section == "%files" and line.strip() and not line.lstrip().startswith("#"):
            source = path.parent / line.split()[0]
            files = sorted(source.rglob("*")) if source.is_dir() else [source]
            for file in files:
                if file.is_file():
                    name = file.relative_to(path.parent) if file.is_relative_to(path.parent) else file
                    digest.update(f"\0{name}\0".encode())
                    digest.update(file.read_bytes())
    return digest.hexdigest()


def _base_key(path: Path) -> str:
    """Returns the text that identifies a base image in a key: the digest in its name, or path, size and mtime."""
    try:
        status = path.stat()
    except OSError:
        return path.name
    return digest_in(path) or f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"


def _build_definition(target: Path, definition: Path, stopped: threading.Event) -> None:
    """Builds a SIF at ``target`` from a definition file. Setting ``stopped`` cancels the build."""
    # Relative paths in a definition file are resolved against its directory.
    options = ("--fakeroot", *apptainer_client.SIF_OPTIONS)
    apptainer_client.build(find_apptainer(), target, str(definition), *options, cwd=definition.parent, stopped=stopped)
