"""``images build``, ``pull``, ``manifest`` and ``export``: what brings images into the store and out of it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
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
    from megaflow_hpc.errors import MegaflowError


def open_images(arguments: argparse.Namespace) -> Images:
    """Returns the store with the registries that a command's arguments name; it builds nothing."""
    from megaflow_hpc.environments.images.registries import Registries
    from megaflow_hpc.environments.images.resolve import Images
    from megaflow_hpc.environments.images.store import ImageStore

    mirrors = _pairs(getattr(arguments, "mirror", []), "--mirror")
    registries = Registries(mirrors, getattr(arguments, "air_gapped", False))
    images = Images(ImageStore(arguments.store, _store_of_campaign(arguments)), registries)
    images.say = note
    return images


def _store_of_campaign(arguments: argparse.Namespace) -> str | None:
    """The store that the first campaign among a command's arguments names."""
    from megaflow_hpc.config import load

    words = [getattr(arguments, name, None) or [] for name in ("source", "campaign", "image")]
    files = [word for given in words for word in ([given] if isinstance(given, str) else given)]
    campaigns = [file for file in files if file.endswith((".yaml", ".yml")) and os.path.isfile(file)]
    return load(campaigns[0]).environment.image_store if campaigns else None


def _pairs(words: Sequence[str], option: str) -> dict[str, str]:
    from megaflow_hpc.errors import ConfigError

    for word in words:
        if not all(word.partition("=")):
            raise ConfigError(f"{option} {word}: expected NAME=VALUE")
    return {name: value for name, _, value in (word.partition("=") for word in words)}


@dataclass(frozen=True)
class Wanted:
    """Images that share a mapping of names, a network of build steps and registries."""

    requests: list[ImageRequest]
    mapping: ImageMapping
    network: BuildNetwork | None
    registries: Registries


def images_of_campaign(images: Images, path: str, build: bool) -> dict[str, str]:
    """Returns the file of each image that a campaign's tasks name.

    Args:
        build: make the images that the store lacks.
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
    """Returns the memory of each build in a Slurm job; ``None`` if no job limits it."""
    from megaflow_hpc.environments.images.build_progress import at_once

    of_job = os.environ.get("SLURM_MEM_PER_NODE", "")
    if not of_job.isdigit() or int(of_job) == 0:
        return None
    return max(256, int(of_job) // at_once())


def _wanted_by_campaign(images: Images, path: str, network: BuildNetwork | None, build: bool = True) -> Wanted:
    from megaflow_hpc.config import load
    from megaflow_hpc.environments.images.mapping import ImageMapping
    from megaflow_hpc.environments.images.registries import Registries
    from megaflow_hpc.tasks.images import image_requests
    from megaflow_hpc.tasks.loading import load_tasks

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


def _wanted(images: Images, arguments: argparse.Namespace) -> list[Wanted]:
    """Returns the images of all sources: campaigns first, then Dockerfiles, then other sources."""
    from megaflow_hpc.environments.images.mapping import ImageMapping, ImageRequest

    campaigns, dockerfiles, others = _kinds(arguments.source)
    found = [_wanted_by_campaign(images, source, arguments.network) for source in campaigns]
    mapping = ImageMapping(_pairs(arguments.map, "--map"), Path.cwd(), "--map")
    found.append(Wanted(_requests(images, dockerfiles), mapping, arguments.network, images.registries))
    mapping = ImageMapping({source: source for source in others}, Path.cwd(), "images build")
    found.append(Wanted([ImageRequest(source) for source in others], mapping, arguments.network, images.registries))
    return found


def build(arguments: argparse.Namespace) -> int:
    """Runs ``images build``: makes the images of campaigns, Dockerfiles and addresses; returns the exit status.

    An image that fails does not stop the others, and makes the status 1. The error of a single image is raised.
    """
    from megaflow_hpc.environments.images.cache.manifest import manifest, write_manifest

    images = open_images(arguments)
    wanted = _wanted(images, arguments)
    if arguments.share:
        wanted = share_of(wanted, *arguments.share)
    if arguments.dry_run:
        return _say_missing(arguments, images, wanted)
    failures: dict[str, MegaflowError] = {}
    files: dict[str, str] = {}
    with ImageProgress() as watch:
        images.watch(watch)
        for part in wanted:
            files |= _resolve(images, part, True, failures)
    if len(failures) == 1 and not files:
        raise next(iter(failures.values()))
    if arguments.manifest:
        write_manifest(Path(arguments.manifest), manifest(images))
    _show_files(arguments, files, failures)
    return 1 if failures else 0


def share_of(wanted: Sequence[Wanted], number: int, shares: int) -> list[Wanted]:
    """Returns one of several equal shares of all images, counted from 1.

    A share is a run of neighbours, because neighbours often have layers in common. Every job computes the same shares,
    whatever other jobs have built by then.
    """
    total = sum(len(part.requests) for part in wanted)
    begin, end = total * (number - 1) // shares, total * number // shares
    found = []
    for part in wanted:
        count = len(part.requests)
        found.append(replace(part, requests=part.requests[max(0, begin) : max(0, end)]))
        begin, end = begin - count, end - count
    return found


def _kinds(sources: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Returns campaigns, Dockerfiles, and definition files or addresses."""
    kinds: tuple[list[str], list[str], list[str]] = ([], [], [])
    for source in sources:
        kinds[0 if source.endswith((".yaml", ".yml")) else 1 if _is_dockerfile(source) else 2].append(source)
    return kinds


def _is_dockerfile(source: str) -> bool:
    name = Path(source).name
    return name == "Dockerfile" or name.startswith("Dockerfile.") or name.endswith(".Dockerfile")


def _requests(images: Images, dockerfiles: Sequence[str]) -> list[ImageRequest]:
    """Returns the images of Dockerfiles; prints the instructions that are ignored."""
    from megaflow_hpc.environments.images.mapping import ImageRequest

    requests = []
    for source in dockerfiles:
        path = Path(source).absolute()
        for line, instruction, reason in images.dockerfiles.read(path).ignored:
            if instruction == "VOLUME":
                continue  # building says it
            note(f"{source}:{line}: {instruction} is left out: {reason}")
        requests.append(ImageRequest(source, dockerfile=path))
    return requests


def _say_missing(arguments: argparse.Namespace, images: Images, wanted: Sequence[Wanted]) -> int:
    """Prints the images that the store lacks; makes nothing."""
    from megaflow_hpc.environments.images.resolve import is_built

    files: dict[str, str] = {}
    for part in wanted:
        files |= _resolve(images, part, build=False)
    missing = [name for name, file in files.items() if not is_built(Path(file))]
    if arguments.json:
        print_json({"images": len(files), "there": len(files) - len(missing), "missing": missing})
        return 0
    say(f"images: {len(files)}, {len(files) - len(missing)} in the store, {len(missing) or 'none'} to be made")
    for name in missing:
        say(f"  {name}")
    return 0


def pull(arguments: argparse.Namespace) -> int:
    """Runs ``images pull``: fetches images into the store; returns the exit status."""
    from megaflow_hpc.environments.images.cache.manifest import fetch, read_manifest
    from megaflow_hpc.environments.images.registries import is_remote
    from megaflow_hpc.errors import ConfigError

    if not arguments.source and not arguments.manifest:
        raise ConfigError("images pull: nothing to fetch; name addresses, or a manifest with --manifest")
    images = open_images(arguments)
    files: dict[str, str] = {}
    if arguments.manifest:
        directory = Path(arguments.directory) if arguments.directory else None
        files |= fetch(images, read_manifest(Path(arguments.manifest)), directory, note)
    for source in arguments.source:
        if is_remote(source):
            note(f"{source}: pulling, if it is not there")
            files[source] = str(images.resolve_source(source, "images pull"))
        elif os.path.isfile(source):
            files[source] = images.store.add(Path(source), os.path.abspath(source)).path
        else:
            hint = "" if source.startswith(("/", ".")) else f"; did you mean docker://{source}?"
            raise ConfigError(f"{source}: neither an address (docker://…) nor a SIF file{hint}")
    return _show_files(arguments, files)


def _show_files(
    arguments: argparse.Namespace, files: dict[str, str], failures: dict[str, MegaflowError] | None = None
) -> int:
    failed = {name: str(error) for name, error in (failures or {}).items()}
    if arguments.json:
        print_json({"images": files, **({"failed": failed} if failed else {})})
    else:
        say(table(("image", "file"), files.items()))
        for name, error in failed.items():
            note(f"{name} failed: {error}")
    return 0


def manifest(arguments: argparse.Namespace) -> int:
    """Runs ``images manifest``: lists what a campaign needs; returns the exit status, 1 if the store lacks an image."""
    from megaflow_hpc.environments.images.cache.manifest import manifest, missing, write_manifest

    images = open_images(arguments)
    images_of_campaign(images, arguments.campaign, build=False)
    content = manifest(images)
    lacking = missing(content)
    if arguments.output:
        write_manifest(Path(arguments.output), content)
    if arguments.json:
        print_json({**content, "missing": lacking})
    else:
        rows = [
            (row["source"], (row["digest"] or "missing")[:12], len(row["layers"]) or "", megabytes(row["bytes"]))
            for row in content["images"]
        ]
        say(table(("source", "digest", "layers", "MB"), rows))
        say(f"{megabytes(content['bytes'])} MB in all, what is shared counted once")
    return 1 if lacking else 0


def export(arguments: argparse.Namespace) -> int:
    """Runs ``images export``: writes an image of the store to a SIF; returns the exit status."""
    from megaflow_hpc.environments.builds.builder import Builder
    from megaflow_hpc.errors import ConfigError

    store = open_images(arguments).store
    image = store.find(arguments.image)
    if image is None:
        found = sorted(digest for digest, sources in store.names().items() if arguments.image in sources)
        if len(found) > 1:
            shown = ", ".join(digest[:12] for digest in found)
            raise ConfigError(f"{arguments.image}: {len(found)} images were made of it; name one of {shown}")
        stored = store.image(found[0] if found else arguments.image)
        if stored is None:
            raise ConfigError(f"{arguments.image}: no such image in {store.root}; see: megaflow-hpc images list")
        image = Path(stored.path)
    target = Path(arguments.output).absolute()
    if target.exists() and not arguments.force:
        raise ConfigError(f"{target}: is there already; name another file, or replace it with --force")
    note(f"{image.stem[:12]}: writing {target}")
    Builder().export(image, target)
    if arguments.json:
        print_json({"image": str(image), "file": str(target), "bytes": target.stat().st_size})
    else:
        say(f"{target}: {megabytes(target.stat().st_size)} MB")
    return 0


def megabytes(size: Any) -> str:
    """Returns a size in bytes as a table shows it."""
    return "" if size is None else f"{size / 1e6:.1f}"
