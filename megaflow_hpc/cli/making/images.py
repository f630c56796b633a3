"""``images``: manages the store of task images and their copies on a node."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megaflow_hpc.cli.making import images_make
from megaflow_hpc.cli.making.images_make import is_campaign, megabytes
from megaflow_hpc.cli.output import note, print_json, say, table
from megaflow_hpc.cli.values import share, zero_or_more
from megaflow_hpc.cli.verb import Subparsers, add_group, add_output, add_verb
from megaflow_hpc.resources import docs

if TYPE_CHECKING:
    from megaflow_hpc.environments.images.cache.cache import ImageCache
    from megaflow_hpc.environments.images.resolve import Images
    from megaflow_hpc.environments.images.store import ImageStore, StoredImage

DESCRIPTION = f"""\
Images are kept in a store on the shared file system, each under the digest of its content: as SIF files, or as a base
and layers that they share. Nodes copy what they need from there, once each, into a cache on local scratch
({docs("how-to/images.md")}).
"""
STORE = (
    "default: MEGAFLOW_IMAGE_STORE, else the campaign's environment.image_store, else a place of the site with room, "
    "else ~/.megaflow-hpc/images; several separated by colons, the first is written to"
)


def register(subparsers: Subparsers) -> None:
    """Adds ``images`` and its verbs."""
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
        "Builds what is not in the store yet, and prints the files. A source is a campaign file, whose tasks say what "
        "they need; a definition file; a Dockerfile, whose FROM is mapped with --map; or a docker:// address. One "
        "image that fails does not end the others; exit status 1 if any did.",
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
    build.add_argument("--map", metavar="NAME=IMAGE", action="append", default=[], help="image for a FROM; repeatable")
    build.add_argument(
        "--network", choices=("none", "host"), help="of a Dockerfile's steps; default: the campaign's, else none"
    )
    build.add_argument("--dry-run", action="store_true", help="only list the images that the store lacks")
    build.add_argument("--manifest", metavar="FILE", help="write what was needed, with digests, to FILE")
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
        "Fetches addresses (docker://, oras://, library://) through the mirrors, if any, and takes SIF files in. With "
        "--manifest, everything that it lists: from registries, or with --from from a directory with the store's files "
        "that it names, whose content is checked.",
        [
            "images pull docker://debian:12",
            "images pull docker://python:3.12 --mirror docker.io=registry.site.edu/hub",
            "images pull --manifest images.json --from /media/carried",
        ],
    )
    pull.add_argument("source", metavar="SOURCE", nargs="*", help="an address (docker://…) or a SIF")
    pull.add_argument("--manifest", metavar="FILE", help="what to fetch, as images manifest or build wrote it")
    pull.add_argument("--from", metavar="DIR", dest="directory", help="take the manifest's files from DIR")
    _networked(pull)

    manifest = _verb(
        verbs,
        "manifest",
        _manifest,
        "say what a campaign needs and what of it the store lacks",
        "Fetches and builds nothing. The manifest lists source and digest of every image of the store that the "
        "campaign's tasks use, its base and its layers, and the store's files that it is; entries without a digest are "
        "not there yet. Exit status 1 if there are any.",
        ["images manifest campaign.yaml", "images manifest campaign.yaml -o images.json"],
    )
    manifest.add_argument("campaign", metavar="CAMPAIGN", help="campaign file (YAML)")
    add_output(manifest, "write it to FILE", metavar="FILE")

    export = _verb(
        verbs,
        "export",
        _export,
        "write an image to a SIF file, for others",
        "Packs base and layers into one SIF, or copies the SIF that the image is. The content of layers is compared "
        "with their digests.",
        ["images export docker://debian:12 -o debian.sif", "images export 3f2a9c0b -o out.sif --force"],
    )
    export.add_argument(
        "image", metavar="IMAGE", help="what it was made from, as images list says; its digest, or its beginning"
    )
    add_output(export, "the file to write", required=True, metavar="FILE.sif")
    export.add_argument("--force", action="store_true", help="replace a file that is there")

    stage = _verb(
        verbs,
        "stage",
        _stage,
        "unpack images into this node's cache ahead of their use",
        "Run it where the sandboxes will run, such as once per node of a job. Images are SIF files, digests (or "
        "their beginnings) of the store, or a campaign file.",
        ["srun --ntasks-per-node=1 megaflow-hpc images stage campaign.yaml", "images stage 3f2a9c0b"],
    )
    stage.add_argument("image", metavar="IMAGE", nargs="+", help="a SIF, a digest of the store, or a campaign file")
    _cached(stage)

    listing = _verb(
        verbs,
        "list",
        _list,
        "list what the store holds",
        "MB are those that an image alone has; what its base and layers that others have too take stands beside. With "
        "--staged: what this node's cache holds.",
        ["images list", "images list --staged"],
    )
    listing.add_argument("--staged", action="store_true", help="this node's copies instead")
    _cached(listing)

    prune = _verb(
        verbs,
        "prune",
        _prune,
        "remove images from the store",
        "Removes the named images (digests or their beginnings), those older than --older-than days, the layers that "
        "no image has any more, and what killed builders left; without either, only the last two. Layers that no image "
        "had before stay for a day: a build may need them. The base of images that stay is not removed. Runs that were "
        "planned with a removed image cannot go on.",
        ["images prune 3f2a9c0b --dry-run", "images prune --older-than 90", "images prune --staged"],
    )
    prune.add_argument("image", metavar="DIGEST", nargs="*", help="digest of an image, or its beginning")
    prune.add_argument("--older-than", metavar="DAYS", type=zero_or_more, help="images that were made longer ago")
    prune.add_argument("--staged", action="store_true", help="this node's copies that nobody uses, instead")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
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
    parser.add_argument("--air-gapped", action="store_true", help="fetch nothing")


def _cached(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", metavar="DIR", help="the node's cache; default: below the scratch directory")


def _images(
    store: str | None,
    names: Sequence[str] = (),
    mirrors: Sequence[str] = (),
    air_gapped: bool = False,
) -> Images:
    """Opens the image store for a command, with its registries but without a builder.

    If ``names`` contains a campaign file, the first one may specify another store to search.
    """
    from megaflow_hpc.config import load
    from megaflow_hpc.environments.images.resolve import Images
    from megaflow_hpc.environments.images.sources import Registries
    from megaflow_hpc.environments.images.store import ImageStore

    registries = Registries(_pairs(mirrors, "--mirror"), air_gapped)
    campaign = next((name for name in names if is_campaign(name) and os.path.isfile(name)), None)
    of_campaign = load(campaign).environment.image_store if campaign else None
    images = Images(ImageStore(store, of_campaign), registries)
    images.say = note
    return images


def _pairs(words: Sequence[str], option: str) -> dict[str, str]:
    from megaflow_hpc.errors import ConfigError

    pairs = {}
    for word in words:
        name, _, value = word.partition("=")
        if not name or not value:
            raise ConfigError(f"{option} {word}: expected NAME=VALUE")
        pairs[name] = value
    return pairs


def _optional_path(name: str | None) -> Path | None:
    return Path(name) if name else None


def _build(arguments: argparse.Namespace) -> int:
    mapping = _pairs(arguments.map, "--map")
    images = _images(arguments.store, arguments.source, arguments.mirror, arguments.air_gapped)
    wanted = images_make.wanted_images(images, arguments.source, mapping, arguments.network)
    if arguments.share:
        wanted = images_make.share_of(wanted, *arguments.share)
    if arguments.dry_run:
        images_make.show_missing(images, wanted, arguments.json)
        return 0
    return images_make.build(images, wanted, _optional_path(arguments.manifest), arguments.json)


def _pull(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.errors import ConfigError

    if not arguments.source and not arguments.manifest:
        raise ConfigError("images pull: nothing to fetch; name addresses, or a manifest with --manifest")
    images = _images(arguments.store, arguments.source, arguments.mirror, arguments.air_gapped)
    manifest, directory = _optional_path(arguments.manifest), _optional_path(arguments.directory)
    return images_make.pull(images, arguments.source, manifest, directory, arguments.json)


def _manifest(arguments: argparse.Namespace) -> int:
    images = _images(arguments.store, [arguments.campaign])
    return images_make.manifest(images, arguments.campaign, _optional_path(arguments.output), arguments.json)


def _export(arguments: argparse.Namespace) -> int:
    store = _images(arguments.store).store
    target = Path(arguments.output).absolute()
    return images_make.export(store, arguments.image, target, arguments.force, arguments.json)


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
    if arguments.json:
        print_json({"staged": staged, "copied_bytes": cache.copied_bytes})
    else:
        say(table(("image", "copy"), [(row["image"], row["path"]) for row in staged]))
    return 0


def _files_to_stage(images: Images, name: str) -> list[str]:
    from megaflow_hpc.errors import ConfigError

    if is_campaign(name):
        return list(images_make.images_of_campaign(images, name, build=True).values())
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
    if json:
        budget = {"bytes": cache.budget.bytes, "inodes": cache.budget.inodes}
        print_json({"budget": budget, "copies": copies})
        return
    lines = []
    for row in copies:
        state = "in use" if row["in_use"] else ""
        lines.append((row["name"], megabytes(row["bytes"]), row["inodes"], state, row["image"]))
    say(table(("copy", "MB", "files", "", "made from"), lines))


def _list_store(store: ImageStore, json: bool) -> None:
    from megaflow_hpc.environments.images.pruning import own_bytes

    names, sizes = store.names(), own_bytes(store)
    images = {image.digest: image for image in reversed(list(store.images()))}
    rows = []
    for digest in sorted(images):
        own, shared = sizes[digest]
        row = {**vars(images[digest]), "own_bytes": own, "shared_bytes": shared}
        rows.append({**row, "sources": names.get(digest, [images[digest].source])})
    if json:
        print_json({"stores": list(map(str, store.roots)), "images": rows})
        return
    lines = []
    for row in rows:
        shared_mb = megabytes(row["shared_bytes"]) if row["shared_bytes"] else ""
        sources = ", ".join(row["sources"])
        lines.append((row["digest"][:12], megabytes(row["own_bytes"]), shared_mb, row["inodes"], sources))
    say(table(("digest", "MB", "shared MB", "files", "from"), lines))


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
    from megaflow_hpc.errors import SiteError

    if not store.writable:
        raise SiteError(f"{store.root}: not your store; only its owner removes images")
    named = [_own_image(store, digest) for digest in digests]
    older_s = None if older_than_days is None else DAY_S * older_than_days
    gone = prune(store, named, older_s, dry_run=dry_run)
    for digest in gone.kept:
        note(f"{digest[:12]}: stays, as the base of other images")
    _show_removed([*gone.images, *gone.leftovers], gone.layers, gone.freed_bytes, dry_run, json)


def _own_image(store: ImageStore, digest: str) -> StoredImage:
    from megaflow_hpc.errors import ConfigError

    image = store.image(digest)
    if image is None or not Path(image.path).is_relative_to(store.root):
        raise ConfigError(
            f"{digest}: no image of {store.root} has a digest that begins so; see: megaflow-hpc images list"
        )
    return image


def _show_removed(removed: list[str], layers: Sequence[str], freed_bytes: int, dry_run: bool, json: bool) -> None:
    if json:
        print_json({"removed": removed, "layers": layers, "freed_bytes": freed_bytes, "dry_run": dry_run})
        return
    also = f", and {len(layers)} layers" if layers else ""
    verb = "would go" if dry_run else "removed"
    say("\n".join([*removed, f"{len(removed)}{also} {verb}, {freed_bytes / 1e6:.1f} MB"]))
