"""``images``: manages the image store and a node's copies of images."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import note, print_result, table
from megaflow_hpc.cli.progress import PlanProgress
from megaflow_hpc.cli.verb import Subparsers, add_group, add_output, add_verb, output_file, share, zero_or_more
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.resources import docs

if TYPE_CHECKING:
    from megaflow_hpc.environments.builds.builder import BuildNetwork
    from megaflow_hpc.environments.images.cache.cache import ImageCache
    from megaflow_hpc.environments.images.resolve import Images
    from megaflow_hpc.environments.images.sources import ImageMapping, ImageRequest, Registries
    from megaflow_hpc.environments.images.store import ImageStore, StoredImage
    from megaflow_hpc.errors import MegaflowError

DESCRIPTION = f"""\
The store on the shared file system keeps images under the digests of their content. An image is a SIF file, or a base
and layers, which several images can share. Each node copies the images that it needs into a cache on local scratch,
once ({docs("how-to/images.md")}).
"""
STORE = (
    "directory of the store, or several, separated by colons: new images are written to the first; default: "
    "MEGAFLOW_IMAGE_STORE, else the campaign's environment.image_store or that key's default"
)


def register(subparsers: Subparsers) -> None:
    """Registers ``images`` and its subcommands."""
    verbs = add_group(
        subparsers,
        "images",
        "build, fetch, stage and list the images of tasks",
        examples=["images build campaign.yaml", "images list"],
        description=DESCRIPTION,
    )

    build = _verb(
        verbs,
        "build",
        _build,
        "build every image that a campaign, or one source, needs",
        "Builds the images that the store lacks, and prints their files. A source is a campaign file, which stands for "
        "the images of its tasks; a definition file; a Dockerfile, whose FROM is mapped with --map; or a docker:// "
        "address. If an image fails, the others are still built, and the exit status is 1.",
        [
            "images build campaign.yaml",
            "images build campaign.yaml --dry-run",
            "images build campaign.yaml --manifest images.json",
            "images build campaign.yaml --share 3/16",
            "images build containers/base.def",
            "images build tasks/one/environment/Dockerfile --map debian:12=base.sif",
        ],
    )
    build.add_argument("source", metavar="SOURCE", nargs="+", help="campaign, definition file, Dockerfile, docker://…")
    build.add_argument(
        "--map", metavar="NAME=IMAGE", action="append", default=[], help="image to use for a FROM; repeatable"
    )
    build.add_argument(
        "--network",
        choices=("none", "host"),
        help="network of the steps of a Dockerfile; default: the campaign's, else none",
    )
    build.add_argument("--dry-run", action="store_true", help="only list the images that the store lacks")
    build.add_argument("--manifest", metavar="FILE", help="write a manifest of the images, with digests, to FILE")
    build.add_argument(
        "--share",
        metavar="I/N",
        type=share,
        help="build only the I-th of N equal shares, counted from 1: one share for each element of a job array "
        "(sbatch/build_images.sbatch)",
    )
    _networked(build)

    pull = _verb(
        verbs,
        "pull",
        _pull,
        "fetch images into the store",
        "Fetches addresses (docker://, oras://, library://), through the mirrors if there are any, and adds SIF files. "
        "With --manifest, fetches every image that the manifest lists: from registries, or with --from from a "
        "directory that holds the store's files. Verifies their content.",
        [
            "images pull docker://debian:12",
            "images pull docker://python:3.12 --mirror docker.io=registry.site.edu/hub",
            "images pull --manifest images.json --from /media/carried",
        ],
    )
    pull.add_argument("source", metavar="SOURCE", nargs="*", help="an address (docker://…) or a SIF file")
    pull.add_argument("--manifest", metavar="FILE", help="a manifest written by images manifest or images build")
    pull.add_argument("--from", metavar="DIR", dest="directory", help="take the manifest's files from DIR")
    _networked(pull)

    manifest = _verb(
        verbs,
        "manifest",
        _manifest,
        "list the images that a campaign needs, and those that the store lacks",
        "Fetches and builds nothing. The manifest lists, for every image of the campaign's tasks, its source, digest, "
        "base, layers and files in the store. Images without a digest are missing. Exit status 1 if any is missing.",
        ["images manifest campaign.yaml", "images manifest campaign.yaml -o images.json"],
    )
    manifest.add_argument("campaign", metavar="CAMPAIGN", help="campaign file (YAML)")
    add_output(manifest, "write the manifest to FILE", metavar="FILE")

    export = _verb(
        verbs,
        "export",
        _export,
        "write an image to one SIF file, to share it",
        "Packs an image's base and layers into one SIF file, or copies its SIF file. Verifies each layer's digest.",
        ["images export docker://debian:12 -o debian.sif", "images export 3f2a9c0b -o out.sif --force"],
    )
    export.add_argument(
        "image", metavar="IMAGE", help="the image's source, as shown by images list, or the beginning of its digest"
    )
    add_output(export, "the file to write", required=True, metavar="FILE.sif")
    export.add_argument("--force", action="store_true", help="replace an existing file")

    stage = _verb(
        verbs,
        "stage",
        _stage,
        "unpack images into this node's cache before they are needed",
        "Run it on the nodes where the sandboxes will run, for example once per node of a job. Images are SIF files, "
        "digests of the store (or their beginnings), or a campaign file.",
        ["srun --ntasks-per-node=1 megaflow-hpc images stage campaign.yaml", "images stage 3f2a9c0b"],
    )
    stage.add_argument("image", metavar="IMAGE", nargs="+", help="a SIF file, a digest of the store, or a campaign")
    _cached(stage)

    listing = _verb(
        verbs,
        "list",
        _list,
        "list the images in the store",
        "MB is the size of an image's own files. The next column is the size of the base and layers that it shares "
        "with other images. With --staged, lists this node's cache.",
        ["images list", "images list --staged"],
    )
    listing.add_argument("--staged", action="store_true", help="list this node's copies instead")
    _cached(listing)

    prune = _verb(
        verbs,
        "prune",
        _prune,
        "remove images from the store",
        "Removes the named images and those older than --older-than days, layers that no image uses, and files that "
        "killed builders left. Keeps layers of the last day, and bases of remaining images. Runs that were planned "
        "with a removed image cannot continue.",
        ["images prune 3f2a9c0b --dry-run", "images prune --older-than 90", "images prune --staged"],
    )
    prune.add_argument("image", metavar="DIGEST", nargs="*", help="digest of an image, or its beginning")
    prune.add_argument("--older-than", metavar="DAYS", type=zero_or_more, help="remove images built longer ago")
    prune.add_argument("--staged", action="store_true", help="remove this node's unused copies instead")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    _cached(prune)


def _verb(
    verbs: Subparsers,
    name: str,
    function: Callable[[argparse.Namespace], int],
    help_: str,
    description: str,
    examples: Sequence[str],
) -> argparse.ArgumentParser:
    parser = add_verb(verbs, name, function, help_, examples=examples, description=description)
    parser.add_argument("--store", metavar="DIR", help=STORE)
    return parser


def _networked(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mirror",
        metavar="REGISTRY=MIRROR",
        action="append",
        default=[],
        help="fetch images of REGISTRY from MIRROR; repeatable",
    )
    parser.add_argument("--air-gapped", action="store_true", help="contact no registry")


def _cached(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", metavar="DIR", help="the node's cache; default: cache/ in the scratch directory")


def _images(
    store: str | None, sources: Sequence[str] = (), mirrors: Sequence[str] = (), air_gapped: bool = False
) -> Images:
    """Opens the image store. The first campaign file in ``sources`` may name another store to search."""
    from megaflow_hpc.config import load
    from megaflow_hpc.environments.images.resolve import Images
    from megaflow_hpc.environments.images.sources import Registries
    from megaflow_hpc.environments.images.store import ImageStore

    campaign = next((source for source in sources if is_campaign(source) and os.path.isfile(source)), None)
    of_campaign = load(campaign).environment.image_store if campaign else None
    images = Images(ImageStore(store, of_campaign), Registries(_pairs(mirrors, "--mirror"), air_gapped))
    images.say = note
    return images


def _pairs(words: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for word in words:
        name, _, value = word.partition("=")
        if not name or not value:
            raise ConfigError(f"{option} {word}: expected NAME=VALUE")
        pairs[name] = value
    return pairs


def is_campaign(source: str) -> bool:
    """Returns whether an argument is the name of a campaign file."""
    return source.endswith((".yaml", ".yml"))


def _megabytes(size: Any) -> str:
    return "" if size is None else f"{size / 1e6:.1f}"


# --- resolving ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """Requested images that share a name mapping, a build network and registries."""

    requests: list[ImageRequest]
    mapping: ImageMapping
    network: BuildNetwork | None
    registries: Registries


def images_of_campaign(images: Images, path: str, build: bool) -> dict[str, str]:
    """Returns the file of each image that a campaign's tasks need, by image name.

    Args:
        build: Whether to build images that are missing from the store.
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
    """Returns the memory in MB for each concurrent build in a Slurm job. ``None`` if no job limits the memory."""
    from megaflow_hpc.environments.images.build_progress import at_once

    of_job = os.environ.get("SLURM_MEM_PER_NODE", "")
    if not of_job.isdigit() or int(of_job) == 0:
        return None
    return max(256, int(of_job) // at_once())


def _wanted_by_campaign(images: Images, path: str, network: BuildNetwork | None, build: bool = True) -> Wanted:
    from megaflow_hpc.config import place_of, read
    from megaflow_hpc.environments.images.sources import ImageMapping, Registries
    from megaflow_hpc.tasks.loading import at_key, image_requests, load_tasks, summarise

    loaded = read(path)
    config = loaded.config
    environment, base = config.environment, Path(path).absolute().parent
    note(f"{path}: reading tasks")
    left_out: list[str] = []
    sources = [source.model_dump() for source in config.tasks]
    try:
        tasks = load_tasks(sources, base, images.dockerfiles, config.services, left_out)
    except ConfigError as error:
        raise at_key(place_of(loaded.node, ["tasks"], path), error) from None
    for line in summarise(left_out):
        note(f"left out: {line}")
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


def _wanted_images(
    images: Images, sources: Sequence[str], mapping: Mapping[str, str], network: BuildNetwork | None
) -> list[Wanted]:
    """Returns the images of all sources: campaigns first, then Dockerfiles, then other sources.

    Args:
        mapping: Maps names in FROM lines to images.
        network: Network access of build steps. Default: the campaign's.
    """
    from megaflow_hpc.environments.images.sources import ImageMapping, ImageRequest

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


def share_of(wanted: Sequence[Wanted], number: int, shares: int) -> list[Wanted]:
    """Returns share ``number`` of ``shares`` equal shares of all images. Shares are numbered from 1.

    A share is a contiguous range, because neighbouring images often have common layers. The shares do not depend on
    which images exist, so all jobs agree on them.
    """
    total = sum(len(part.requests) for part in wanted)
    begin, end = total * (number - 1) // shares, total * number // shares
    chosen = []
    for part in wanted:
        count = len(part.requests)
        chosen.append(replace(part, requests=part.requests[max(0, begin) : max(0, end)]))
        begin, end = begin - count, end - count
    return chosen


def _is_dockerfile(source: str) -> bool:
    name = Path(source).name
    return name == "Dockerfile" or name.startswith("Dockerfile.") or name.endswith(".Dockerfile")


def _dockerfile_request(images: Images, source: str) -> ImageRequest:
    """Returns the build request for a Dockerfile. Prints the instructions that the build will ignore."""
    from megaflow_hpc.environments.images.sources import ImageRequest

    path = Path(source).absolute()
    for line, instruction, reason in images.dockerfiles.read(path).ignored:
        if instruction != "VOLUME":  # the build reports the error
            note(f"{source}:{line}: {instruction} is left out: {reason}")
    return ImageRequest(source, dockerfile=path)


# --- verbs ----------------------------------------------------------------------------------------------------------


def _build(arguments: argparse.Namespace) -> int:
    """Builds images. Returns 1 if some could not be built. If only one image was requested, raises its error
    instead."""
    from megaflow_hpc.environments.images.cache.manifest import manifest, write_manifest

    mapping = _pairs(arguments.map, "--map")
    images = _images(arguments.store, arguments.source, arguments.mirror, arguments.air_gapped)
    wanted = _wanted_images(images, arguments.source, mapping, arguments.network)
    if arguments.share:
        wanted = share_of(wanted, *arguments.share)
    if arguments.dry_run:
        _show_missing(images, wanted, arguments.json)
        return 0
    failures: dict[str, MegaflowError] = {}
    files: dict[str, str] = {}
    with PlanProgress() as watch:
        images.say, images.show = watch.say, watch.show
        for part in wanted:
            files |= _resolve(images, part, True, failures)
    if len(failures) == 1 and not files:
        raise next(iter(failures.values()))
    if arguments.manifest:
        write_manifest(Path(arguments.manifest), manifest(images))
    _show_files(files, arguments.json, failures)
    return 1 if failures else 0


def _show_missing(images: Images, wanted: Sequence[Wanted], json: bool) -> None:
    from megaflow_hpc.environments.images.resolve import is_built

    files: dict[str, str] = {}
    for part in wanted:
        files |= _resolve(images, part, build=False)
    missing = [name for name, file in files.items() if not is_built(Path(file))]
    stored = len(files) - len(missing)
    lines = [f"images: {len(files)}, {stored} in the store, {len(missing) or 'none'} to be made"]
    lines += [f"  {name}" for name in missing]
    print_result(json, {"images": len(files), "there": stored, "missing": missing}, "\n".join(lines))


def _pull(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.environments.images.cache.manifest import fetch, read_manifest

    if not arguments.source and not arguments.manifest:
        raise ConfigError("images pull: nothing to fetch; name addresses, or a manifest with --manifest")
    images = _images(arguments.store, arguments.source, arguments.mirror, arguments.air_gapped)
    directory = Path(arguments.directory) if arguments.directory else None
    files: dict[str, str] = {}
    if arguments.manifest:
        files |= fetch(images, read_manifest(Path(arguments.manifest)), directory, note)
    for source in arguments.source:
        files[source] = _pull_source(images, source)
    _show_files(files, arguments.json)
    return 0


def _pull_source(images: Images, source: str) -> str:
    """Adds a remote image or a SIF file to the store. Returns its path in the store."""
    from megaflow_hpc.environments.images.sources import is_remote

    if is_remote(source):
        note(f"{source}: pulling, if it is not there")
        return str(images.resolve_source(source, "images pull"))
    if os.path.isfile(source):
        return images.store.add(Path(source), os.path.abspath(source)).path
    hint = "" if source.startswith(("/", ".")) else f"; did you mean docker://{source}?"
    raise ConfigError(f"{source}: neither an address (docker://…) nor a SIF file{hint}")


def _show_files(files: dict[str, str], json: bool, failures: Mapping[str, MegaflowError] | None = None) -> None:
    failed = {name: str(error) for name, error in (failures or {}).items()}
    errors = "\n".join(f"{name} failed: {message}" for name, message in failed.items())
    result = {"images": files, **({"failed": failed} if failed else {})}
    print_result(json, result, table(("image", "file"), files.items()), errors)


def _manifest(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.environments.images.cache.manifest import manifest, missing, write_manifest

    images = _images(arguments.store, [arguments.campaign])
    images_of_campaign(images, arguments.campaign, build=False)
    content = manifest(images)
    lacking = missing(content)
    if arguments.output:
        write_manifest(output_file(arguments.output), content)
    rows = []
    for row in content["images"]:
        digest = (row["digest"] or "missing")[:12]
        rows.append((row["source"], digest, len(row["layers"]) or "", _megabytes(row["bytes"])))
    total = f"{_megabytes(content['bytes'])} MB in all, shared files counted once"
    text = f"{table(('source', 'digest', 'layers', 'MB'), rows)}\n{total}"
    print_result(arguments.json, {**content, "missing": lacking}, text)
    return 1 if lacking else 0


def _export(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.environments.builds.builder import Builder

    target = Path(arguments.output).absolute()
    image = _stored_image(_images(arguments.store).store, arguments.image)
    if target.exists() and not arguments.force:
        raise ConfigError(f"{target}: exists already; name another file, or replace it with --force")
    note(f"{image.stem[:12]}: writing {target}")
    Builder().export(image, output_file(target))
    size = target.stat().st_size
    exported = {"image": str(image), "file": str(target), "bytes": size}
    print_result(arguments.json, exported, f"{target}: {_megabytes(size)} MB")
    return 0


def _stored_image(store: ImageStore, name: str) -> Path:
    """Returns the file of a stored image, given its key, source, digest or a prefix of the digest."""
    if path := store.find(name):
        return path
    digests = sorted(digest for digest, sources in store.names().items() if name in sources)
    if len(digests) > 1:
        shown = ", ".join(digest[:12] for digest in digests)
        raise ConfigError(f"{name}: {len(digests)} images have this source; name one of {shown}")
    stored = store.image(digests[0] if digests else name)
    if stored is None:
        raise ConfigError(f"{name}: no such image in {store.root}; see: megaflow-hpc images list")
    return Path(stored.path)


def _cache(directory: str | None) -> ImageCache:
    from megaflow_hpc.environments.images.cache.cache import ImageCache
    from megaflow_hpc.environments.sandbox.scratch import default_scratch
    from megaflow_hpc.host.apptainer import find_apptainer
    from megaflow_hpc.host.private import private_directory

    root = Path(directory).absolute() if directory else default_scratch() / "cache"
    return ImageCache(private_directory(root), find_apptainer())


def _stage(arguments: argparse.Namespace) -> int:
    images = _images(arguments.store, arguments.image)
    cache = _cache(arguments.cache)
    paths: list[str] = []
    for name in arguments.image:
        paths += _files_to_stage(images, name)
    staged = []
    for path in dict.fromkeys(paths):
        lease = cache.acquire(path)
        staged.append({"image": path, "path": lease.path, "layers": list(lease.layers)})
        lease.release()
    text = table(("image", "copy"), [(row["image"], row["path"]) for row in staged])
    print_result(arguments.json, {"staged": staged, "copied_bytes": cache.copied_bytes}, text)
    return 0


def _files_to_stage(images: Images, name: str) -> list[str]:
    if is_campaign(name):
        return list(images_of_campaign(images, name, build=True).values())
    if os.path.exists(name):
        return [name]
    if stored := images.store.image(name):
        return [stored.path]
    raise ConfigError(f"{name}: neither a file nor the digest of an image in {images.store.root}")


def _list(arguments: argparse.Namespace) -> int:
    if arguments.staged:
        _list_cache(_cache(arguments.cache), arguments.json)
    else:
        _list_store(_images(arguments.store).store, arguments.json)
    return 0


def _list_cache(cache: ImageCache, json: bool) -> None:
    copies = cache.list()
    lines = []
    for row in copies:
        state = "in use" if row["in_use"] else ""
        lines.append((row["name"], _megabytes(row["bytes"]), row["inodes"], state, row["image"]))
    budget = {"bytes": cache.budget.bytes, "inodes": cache.budget.inodes}
    text = table(("copy", "MB", "files", "", "made from"), lines)
    print_result(json, {"budget": budget, "copies": copies}, text)


def _list_store(store: ImageStore, json: bool) -> None:
    from megaflow_hpc.environments.images.pruning import own_bytes

    names, sizes = store.names(), own_bytes(store)
    images = {image.digest: image for image in reversed(list(store.images()))}
    rows = []
    for digest in sorted(images):
        own, shared = sizes[digest]
        row = {**vars(images[digest]), "own_bytes": own, "shared_bytes": shared}
        rows.append({**row, "sources": names.get(digest, [images[digest].source])})
    lines = []
    for row in rows:
        shared_mb = _megabytes(row["shared_bytes"]) if row["shared_bytes"] else ""
        sources = ", ".join(row["sources"])
        lines.append((row["digest"][:12], _megabytes(row["own_bytes"]), shared_mb, row["inodes"], sources))
    text = table(("digest", "MB", "shared MB", "files", "from"), lines)
    print_result(json, {"stores": list(map(str, store.roots)), "images": rows}, text)


def _prune(arguments: argparse.Namespace) -> int:
    if arguments.staged:
        _prune_cache(_cache(arguments.cache), arguments.dry_run, arguments.json)
    else:
        store = _images(arguments.store, arguments.image).store
        _prune_store(store, arguments.image, arguments.older_than, arguments.dry_run, arguments.json)
    return 0


def _prune_cache(cache: ImageCache, dry_run: bool, json: bool) -> None:
    idle = [row for row in cache.list() if not row["in_use"]]
    freed_bytes = sum(int(str(row["bytes"])) for row in idle) if dry_run else cache.clear()
    _show_removed([str(row["name"]) for row in idle], [], freed_bytes, dry_run, json)


def _prune_store(
    store: ImageStore, digests: Sequence[str], older_than_days: float | None, dry_run: bool, json: bool
) -> None:
    from megaflow_hpc.environments.images.pruning import DAY_S, prune

    if not store.writable:
        raise SiteError(f"{store.root}: not your store; only its owner removes images")
    named = [_own_image(store, digest) for digest in digests]
    older_s = None if older_than_days is None else DAY_S * older_than_days
    gone = prune(store, named, older_s, dry_run=dry_run)
    for digest in gone.kept:
        note(f"{digest[:12]}: stays, as the base of other images")
    _show_removed([*gone.images, *gone.leftovers], gone.layers, gone.freed_bytes, dry_run, json)


def _own_image(store: ImageStore, digest: str) -> StoredImage:
    image = store.image(digest)
    if image is None or not Path(image.path).is_relative_to(store.root):
        raise ConfigError(
            f"{digest}: no image of {store.root} has a digest that begins like this; see: megaflow-hpc images list"
        )
    return image


def _show_removed(removed: list[str], layers: Sequence[str], freed_bytes: int, dry_run: bool, json: bool) -> None:
    also = f", and {len(layers)} layers" if layers else ""
    verb = "would go" if dry_run else "removed"
    lines = [*removed, f"{len(removed)}{also} {verb}, {freed_bytes / 1e6:.1f} MB"]
    result = {"removed": removed, "layers": layers, "freed_bytes": freed_bytes, "dry_run": dry_run}
    print_result(json, result, "\n".join(lines))
