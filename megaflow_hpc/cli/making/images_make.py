"""Implements ``images build``, ``pull``, ``manifest`` and ``export``, which fill and read the store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import note, print_json, say, table
from megaflow_hpc.cli.progress import ImageProgress

if TYPE_CHECKING:
    from megaflow_hpc.environments.builds.builder import BuildNetwork
    from megaflow_hpc.environments.images.mapping import ImageMapping, ImageRequest
    from megaflow_hpc.environments.images.registries import Registries
    from megaflow_hpc.environments.images.resolve import Images
    from megaflow_hpc.environments.images.store import ImageStore
    from megaflow_hpc.errors import MegaflowError


@dataclass(frozen=True)
class Wanted:
    """Requested images that share a name mapping, a network for build steps and registries."""

    requests: list[ImageRequest]
    mapping: ImageMapping
    network: BuildNetwork | None
    registries: Registries


def images_of_campaign(images: Images, path: str, build: bool) -> dict[str, str]:
    """Returns the file of each image that a campaign's tasks need.

    Args:
        build: Build the images that the store lacks.
    """
    return _resolve(images, _wanted_by_campaign(images, path, None, build), build)


def _resolve(
    images: Images, wanted: Wanted, build: bool, failures: dict[str, MegaflowError] | None = None
) -> dict[str, str]:
    from megaflow_hpc.environments.builds.builder import Builder

    images.builder = Builder(wanted.network, memory_mb=_build_memory_mb()) if build else None
    images.registries = wanted.registries
    return images.resolve_all(wanted.requests, wanted.mapping, build=build, failures=failures)


def _build_memory_mb() -> int | None:
    """Returns the memory available to each build in a Slurm job, or ``None`` if no job limits it."""
    from megaflow_hpc.environments.images.build_progress import at_once

    of_job = os.environ.get("SLURM_MEM_PER_NODE", "")
    if not of_job.isdigit() or int(of_job) == 0:
        return None
    return max(256, int(of_job) // at_once())


def _wanted_by_campaign(images: Images, path: str, network: BuildNetwork | None, build: bool = True) -> Wanted:
    from megaflow_hpc.config import load
    from megaflow_hpc.environments.images.mapping import ImageMapping
    from megaflow_hpc.environments.images.registries import Registries
    from megaflow_hpc.tasks.loading import image_requests, load_tasks

    config = load(path)
    environment, base = config.environment, Path(path).absolute().parent
    note(f"{path}: reading tasks")
    tasks = load_tasks([source.model_dump() for source in config.tasks], base, images.dockerfiles)
    air_gapped = images.registries.air_gapped or environment.air_gapped
    requests: dict[str, ImageRequest] = {}
    for request in image_requests(tasks):
        requests.setdefault(request.name, request)
    return Wanted(
        list(requests.values()),
        ImageMapping(environment.images, base, "environment.images"),
        network or environment.network_of_builds,
        Registries({**environment.mirrors, **images.registries.mirrors}, build and air_gapped),
    )


def wanted_images(
    images: Images, sources: Sequence[str], mapping: Mapping[str, str], network: BuildNetwork | None
) -> list[Wanted]:
    """Returns the images of all sources: campaigns first, then Dockerfiles, then other sources.

    Args:
        mapping: Names of FROM lines, with their images.
        network: Network of build steps. Default: the campaign's.
    """
    from megaflow_hpc.environments.images.mapping import ImageMapping, ImageRequest

    wanted: list[Wanted] = []
    dockerfiles: list[ImageRequest] = []
    others: list[ImageRequest] = []
    for source in sources:
        if is_campaign(source):
            wanted.append(_wanted_by_campaign(images, source, network))
        elif _is_dockerfile(source):
            dockerfiles.append(_dockerfile_request(images, source))
        else:
            others.append(ImageRequest(source))
    here = Path.cwd()
    of_dockerfiles = ImageMapping(mapping, here, "--map")
    wanted.append(Wanted(dockerfiles, of_dockerfiles, network, images.registries))
    of_others = ImageMapping({other.name: other.name for other in others}, here, "images build")
    wanted.append(Wanted(others, of_others, network, images.registries))
    return wanted


def build(images: Images, wanted: Sequence[Wanted], manifest_file: Path | None, json: bool) -> int:
    """Builds images. Returns the exit status.

    If an image fails, the others are still built, and the status is 1. If there is only one image, its error is raised.
    """
    from megaflow_hpc.environments.images.cache.manifest import manifest, write_manifest

    failures: dict[str, MegaflowError] = {}
    files: dict[str, str] = {}
    with ImageProgress() as watch:
        images.say, images.show = watch.say, watch.show
        for part in wanted:
            files |= _resolve(images, part, True, failures)
    if len(failures) == 1 and not files:
        raise next(iter(failures.values()))
    if manifest_file:
        write_manifest(manifest_file, manifest(images))
    _show_files(files, json, failures)
    return 1 if failures else 0


def share_of(wanted: Sequence[Wanted], number: int, shares: int) -> list[Wanted]:
    """Returns one of several equal shares of all images, counted from 1.

    A share is a contiguous range, because neighbouring images often have layers in common. Every job computes the same
    shares, regardless of what other jobs have already built.
    """
    total = sum(len(part.requests) for part in wanted)
    begin, end = total * (number - 1) // shares, total * number // shares
    chosen = []
    for part in wanted:
        count = len(part.requests)
        chosen.append(replace(part, requests=part.requests[max(0, begin) : max(0, end)]))
        begin, end = begin - count, end - count
    return chosen


def is_campaign(source: str) -> bool:
    """Returns whether an argument names a campaign file."""
    return source.endswith((".yaml", ".yml"))


def _is_dockerfile(source: str) -> bool:
    name = Path(source).name
    return name == "Dockerfile" or name.startswith("Dockerfile.") or name.endswith(".Dockerfile")


def _dockerfile_request(images: Images, source: str) -> ImageRequest:
    """Returns the build request for a Dockerfile, and prints the instructions that will be ignored."""
    from megaflow_hpc.environments.images.mapping import ImageRequest

    path = Path(source).absolute()
    for line, instruction, reason in images.dockerfiles.read(path).ignored:
        if instruction != "VOLUME":  # the build reports the error
            note(f"{source}:{line}: {instruction} is left out: {reason}")
    return ImageRequest(source, dockerfile=path)


def show_missing(images: Images, wanted: Sequence[Wanted], json: bool) -> None:
    """Prints the images that the store lacks, without building them."""
    from megaflow_hpc.environments.images.resolve import is_built

    files: dict[str, str] = {}
    for part in wanted:
        files |= _resolve(images, part, build=False)
    missing = [name for name, file in files.items() if not is_built(Path(file))]
    stored = len(files) - len(missing)
    if json:
        print_json({"images": len(files), "there": stored, "missing": missing})
        return
    say(f"images: {len(files)}, {stored} in the store, {len(missing) or 'none'} to be made")
    for name in missing:
        say(f"  {name}")


def pull(images: Images, sources: Sequence[str], manifest_file: Path | None, directory: Path | None, json: bool) -> int:
    """Pulls images into the store. Returns the exit status.

    Args:
        directory: Directory with the manifest's files. If ``None``, images are pulled from registries.
    """
    from megaflow_hpc.environments.images.cache.manifest import fetch, read_manifest

    files: dict[str, str] = {}
    if manifest_file:
        files |= fetch(images, read_manifest(manifest_file), directory, note)
    for source in sources:
        files[source] = _pull_source(images, source)
    _show_files(files, json)
    return 0


def _pull_source(images: Images, source: str) -> str:
    """Adds a remote image or a SIF file to the store and returns its file there."""
    from megaflow_hpc.environments.images.registries import is_remote
    from megaflow_hpc.errors import ConfigError

    if is_remote(source):
        note(f"{source}: pulling, if it is not there")
        return str(images.resolve_source(source, "images pull"))
    if os.path.isfile(source):
        return images.store.add(Path(source), os.path.abspath(source)).path
    hint = "" if source.startswith(("/", ".")) else f"; did you mean docker://{source}?"
    raise ConfigError(f"{source}: neither an address (docker://…) nor a SIF file{hint}")


def _show_files(files: dict[str, str], json: bool, failures: Mapping[str, MegaflowError] | None = None) -> None:
    failed = {name: str(error) for name, error in (failures or {}).items()}
    if json:
        print_json({"images": files, **({"failed": failed} if failed else {})})
        return
    say(table(("image", "file"), files.items()))
    for name, message in failed.items():
        note(f"{name} failed: {message}")


def manifest(images: Images, campaign: str, output: Path | None, json: bool) -> int:
    """Lists the images that a campaign needs. Returns the exit status, which is 1 if the store lacks any of them."""
    from megaflow_hpc.environments.images.cache.manifest import manifest, missing, write_manifest

    images_of_campaign(images, campaign, build=False)
    content = manifest(images)
    lacking = missing(content)
    if output:
        write_manifest(output, content)
    if json:
        print_json({**content, "missing": lacking})
    else:
        rows = []
        for row in content["images"]:
            digest = (row["digest"] or "missing")[:12]
            rows.append((row["source"], digest, len(row["layers"]) or "", megabytes(row["bytes"])))
        say(table(("source", "digest", "layers", "MB"), rows))
        say(f"{megabytes(content['bytes'])} MB in all, what is shared counted once")
    return 1 if lacking else 0


def export(store: ImageStore, name: str, target: Path, force: bool, json: bool) -> int:
    """Exports an image from the store as a SIF file. Returns the exit status."""
    from megaflow_hpc.environments.builds.builder import Builder
    from megaflow_hpc.errors import ConfigError

    image = _stored_image(store, name)
    if target.exists() and not force:
        raise ConfigError(f"{target}: is there already; name another file, or replace it with --force")
    note(f"{image.stem[:12]}: writing {target}")
    Builder().export(image, target)
    size = target.stat().st_size
    if json:
        print_json({"image": str(image), "file": str(target), "bytes": size})
    else:
        say(f"{target}: {megabytes(size)} MB")
    return 0


def _stored_image(store: ImageStore, name: str) -> Path:
    """Returns the file of an image, given its key, source, digest or a prefix of the digest."""
    from megaflow_hpc.errors import ConfigError

    if path := store.find(name):
        return path
    digests = sorted(digest for digest, sources in store.names().items() if name in sources)
    if len(digests) > 1:
        shown = ", ".join(digest[:12] for digest in digests)
        raise ConfigError(f"{name}: {len(digests)} images were made of it; name one of {shown}")
    stored = store.image(digests[0] if digests else name)
    if stored is None:
        raise ConfigError(f"{name}: no such image in {store.root}; see: megaflow-hpc images list")
    return Path(stored.path)


def megabytes(size: Any) -> str:
    """Formats a size in bytes for a table."""
    return "" if size is None else f"{size / 1e6:.1f}"
