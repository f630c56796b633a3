"""``images build``, ``pull``, ``manifest`` and ``export``: what brings images into the store and out of it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import note, print_json, say, table
from megaflow_hpc.cli.progress import ImageProgress

if TYPE_CHECKING:
    from megaflow_hpc.campaign.image_batch import Recipe
    from megaflow_hpc.environments.builds.builder import BuildNetwork
    from megaflow_hpc.environments.images.mapping import ImageRequest
    from megaflow_hpc.environments.images.resolve import Images
    from megaflow_hpc.errors import MegaflowError


def open_images(arguments: argparse.Namespace) -> Images:
    """Returns the store with the registries that a command's arguments name; it builds nothing."""
    from megaflow_hpc.environments.images.registries import Registries
    from megaflow_hpc.environments.images.resolve import Images
    from megaflow_hpc.environments.images.store import ImageStore

    mirrors = _pairs(getattr(arguments, "mirror", []), "--mirror")
    registries = Registries.configured(air_gapped=getattr(arguments, "air_gapped", None), chosen=mirrors)
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


def images_of_campaign(
    images: Images,
    path: str,
    build: bool,
    network: BuildNetwork | None = None,
    failures: dict[str, MegaflowError] | None = None,
) -> dict[str, str]:
    """Returns, for each image that a campaign's tasks name, its file.

    Args:
        build: make what the store lacks.
        network: of the steps of Dockerfiles; by default as the campaign says.
        failures: as for :meth:`Images.resolve_all`.
    """
    from megaflow_hpc.environments.builds.builder import Builder
    from megaflow_hpc.environments.builds.forecast import foretelling

    recipe, requests = _wanted_by_campaign(images, path, build, network)
    images.builder = Builder(recipe.network) if build else None
    images.foretell = foretelling(images, recipe.network)
    return images.resolve_all(requests, recipe.image_mapping(), build=build, failures=failures)


def _wanted_by_campaign(
    images: Images, path: str, build: bool, network: BuildNetwork | None
) -> tuple[Recipe, list[ImageRequest]]:
    """What a campaign's tasks want; its registries are used on."""
    from megaflow_hpc.campaign.image_batch import wanted_by_campaign
    from megaflow_hpc.config import load
    from megaflow_hpc.environments.images.registries import Registries

    config = load(path)
    note(f"{path}: reading tasks")
    recipe, requests = wanted_by_campaign(config, Path(path), images, network)
    images.registries = Registries(recipe.mirrors, build and recipe.air_gapped)
    return recipe, requests


def build(arguments: argparse.Namespace) -> int:
    """Runs ``images build``: makes what campaigns, Dockerfiles and addresses name; returns the exit status.

    One image that fails does not end the others, and is status 1; the error of one alone is raised.
    """
    from megaflow_hpc.errors import ConfigError

    if arguments.dry_run:
        return _forecast(arguments)
    if arguments.slurm:
        return _build_by_jobs(arguments)
    if arguments.detach or arguments.jobs or arguments.sbatch:
        raise ConfigError("images build: --detach, --jobs and --sbatch are of builds by jobs; add --slurm")
    from megaflow_hpc.environments.builds.builder import Builder
    from megaflow_hpc.environments.builds.forecast import foretelling
    from megaflow_hpc.environments.images.cache.manifest import manifest, write_manifest
    from megaflow_hpc.environments.images.mapping import ImageMapping, ImageRequest

    images = open_images(arguments)
    campaigns, dockerfiles, others = _kinds(arguments.source)
    failures: dict[str, MegaflowError] = {}
    files: dict[str, str] = {}
    with ImageProgress() as watch:
        images.watch(watch)
        for source in campaigns:
            files |= images_of_campaign(images, source, True, arguments.network, failures)
        images.builder = Builder(arguments.network)
        images.foretell = foretelling(images, arguments.network)
        mapping = ImageMapping(_pairs(arguments.map, "--map"), Path.cwd(), "--map")
        files |= images.resolve_all(_requests(images, dockerfiles), mapping, failures=failures)
        mapping = ImageMapping({source: source for source in others}, Path.cwd(), "images build")
        files |= images.resolve_all(map(ImageRequest, others), mapping, failures=failures)
    if len(failures) == 1 and not files:
        raise next(iter(failures.values()))
    if arguments.manifest:
        write_manifest(Path(arguments.manifest), manifest(images))
    _show_files(arguments, files, failures)
    return 1 if failures else 0


def _kinds(sources: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Campaigns, Dockerfiles, and definition files or addresses."""
    from megaflow_hpc.campaign.image_batch import is_dockerfile

    kinds: tuple[list[str], list[str], list[str]] = ([], [], [])
    for source in sources:
        kinds[0 if source.endswith((".yaml", ".yml")) else 1 if is_dockerfile(source) else 2].append(source)
    return kinds


def _requests(images: Images, dockerfiles: Sequence[str]) -> list[ImageRequest]:
    """The images of Dockerfiles; says what of these is left out."""
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


def _forecast(arguments: argparse.Namespace) -> int:
    """Says what a build would take; makes nothing."""
    from megaflow_hpc.environments.builds import forecast
    from megaflow_hpc.environments.images.mapping import ImageMapping, ImageRequest
    from megaflow_hpc.environments.images.pull import Looks

    images = open_images(arguments)
    images.looks = Looks(quick=False)
    forecaster = forecast.forecaster(images)
    campaigns, dockerfiles, others = _kinds(arguments.source)
    for source in campaigns:
        recipe, requests = _wanted_by_campaign(images, source, True, arguments.network)
        forecaster.add(requests, recipe.image_mapping(), recipe.network)
    mapping = ImageMapping(_pairs(arguments.map, "--map"), Path.cwd(), "--map")
    forecaster.add(_requests(images, dockerfiles), mapping, arguments.network)
    forecaster.add(map(ImageRequest, others), ImageMapping({name: name for name in others}, Path.cwd(), "images build"))
    found = forecaster.forecast
    if arguments.json:
        print_json({**vars(found), "to_make": found.to_make})
        return 0
    say(f"images: {found.images}, {found.there} in the store, {found.to_make or 'none'} to be made")
    say("\n".join(found.lines()))
    if found.unknown:
        say("\n".join(["not known before it is made:", *(f"  {line}" for line in found.unknown)]))
    return 0


def _build_by_jobs(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.image_batch import Wanted, wanted_by_campaign, wanted_by_name
    from megaflow_hpc.campaign.image_jobs import ImageJobs
    from megaflow_hpc.config import load
    from megaflow_hpc.config.slurm import BuildsConfig, SlurmConfig
    from megaflow_hpc.environments.images.cache.manifest import manifest, write_manifest

    images = open_images(arguments)
    mapping, slurm, wanted = _pairs(arguments.map, "--map"), None, []
    for source in arguments.source:
        if source.endswith((".yaml", ".yml")):
            note(f"{source}: reading tasks")
            config = load(source)
            slurm = slurm or config.slurm
            recipe, requests = wanted_by_campaign(config, Path(source), images, arguments.network)
            wanted += [Wanted.of(request, recipe) for request in requests]
        else:
            wanted.append(wanted_by_name(source, mapping, images, arguments.network))
    slurm = slurm or SlurmConfig()
    builds = slurm.builds.model_dump() | ({"count": arguments.jobs} if arguments.jobs else {})
    extra = builds.pop("extra") | _pairs(arguments.sbatch, "--sbatch")
    slurm = slurm.model_copy(update={"builds": BuildsConfig(**builds, extra=extra)})
    outcomes = ImageJobs(images.store, slurm, note).build(wanted, arguments.detach)
    if arguments.manifest and not arguments.detach:
        for one in wanted:
            images.resolve_request(one.request, one.recipe.image_mapping(), build=False)
        write_manifest(Path(arguments.manifest), manifest(images))
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if arguments.json:
        print_json({"images": {outcome.name: vars(outcome) for outcome in outcomes}})
    else:
        say(table(("image", "", "file"), [(made.name, made.state, made.file) for made in outcomes]))
        for outcome in failed:
            note(f"{outcome.name}: {outcome.error}")
    return 1 if failed else 0


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
