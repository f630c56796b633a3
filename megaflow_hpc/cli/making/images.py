"""``images``: the store of task images, and their copies on a node."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megaflow_hpc.cli.making import images_make
from megaflow_hpc.cli.making.images_make import megabytes
from megaflow_hpc.cli.output import note, print_json, say, table
from megaflow_hpc.cli.values import share, zero_or_more
from megaflow_hpc.cli.verb import Subparsers, add_group, add_output, add_verb
from megaflow_hpc.resources import docs

if TYPE_CHECKING:
    from megaflow_hpc.environments.images.cache.cache import ImageCache

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
        images_make.build,
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
        images_make.pull,
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
        images_make.manifest,
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
        images_make.export,
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


def _cache(arguments: argparse.Namespace) -> ImageCache:
    from megaflow_hpc.environments.images.cache.cache import ImageCache
    from megaflow_hpc.environments.sandbox.scratch import default_scratch
    from megaflow_hpc.host.apptainer import find_apptainer
    from megaflow_hpc.host.private import private_directory

    root = Path(arguments.cache).absolute() if arguments.cache else default_scratch() / "cache"
    return ImageCache(private_directory(root), find_apptainer())


def _stage(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.errors import ConfigError

    images = images_make.open_images(arguments)
    cache = _cache(arguments)
    paths: list[str] = []
    for name in arguments.image:
        if name.endswith((".yaml", ".yml")):
            paths += images_make.images_of_campaign(images, name, build=True).values()
        elif os.path.exists(name):
            paths.append(name)
        elif stored := images.store.image(name):
            paths.append(stored.path)
        else:
            raise ConfigError(f"{name}: neither a file nor the digest of an image in {images.store.root}")
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


def _list(arguments: argparse.Namespace) -> int:
    if arguments.staged:
        cache = _cache(arguments)
        copies = cache.list()
        if arguments.json:
            budget = {"bytes": cache.budget.bytes, "inodes": cache.budget.inodes}
            print_json({"budget": budget, "copies": copies})
        else:
            lines = [
                (
                    row["name"],
                    megabytes(row["bytes"]),
                    row["inodes"],
                    "in use" if row["in_use"] else "",
                    row["image"],
                )
                for row in copies
            ]
            say(table(("copy", "MB", "files", "", "made from"), lines))
        return 0
    from megaflow_hpc.environments.images.pruning import own_bytes

    store = images_make.open_images(arguments).store
    names, sizes = store.names(), own_bytes(store)
    images = {image.digest: image for image in reversed(list(store.images()))}
    found = []
    for digest in sorted(images):
        own, shared = sizes[digest]
        row = {**vars(images[digest]), "own_bytes": own, "shared_bytes": shared}
        found.append({**row, "sources": names.get(digest, [images[digest].source])})
    if arguments.json:
        print_json({"stores": list(map(str, store.roots)), "images": found})
    else:
        rows = [
            (
                row["digest"][:12],
                megabytes(row["own_bytes"]),
                megabytes(row["shared_bytes"]) if row["shared_bytes"] else "",
                row["inodes"],
                ", ".join(row["sources"]),
            )
            for row in found
        ]
        say(table(("digest", "MB", "shared MB", "files", "from"), rows))
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.environments.images.pruning import DAY_S, prune
    from megaflow_hpc.errors import ConfigError, SiteError

    if arguments.staged:
        cache = _cache(arguments)
        idle = [row for row in cache.list() if not row["in_use"]]
        freed = sum(int(str(row["bytes"])) for row in idle) if arguments.dry_run else cache.clear()
        return _pruned(arguments, [str(row["name"]) for row in idle], freed)
    store = images_make.open_images(arguments).store
    if not store.writable:
        raise SiteError(f"{store.root}: not your store; only its owner removes images")
    named = []
    for digest in arguments.image:
        image = store.image(digest)
        if image is None or not Path(image.path).is_relative_to(store.root):
            raise ConfigError(
                f"{digest}: no image of {store.root} has a digest that begins so; see: megaflow-hpc images list"
            )
        named.append(image)
    older_s = None if arguments.older_than is None else DAY_S * arguments.older_than
    gone = prune(store, named, older_s, dry_run=arguments.dry_run)
    for digest in gone.kept:
        note(f"{digest[:12]}: stays, as the base of other images")
    return _pruned(arguments, [*gone.images, *gone.leftovers], gone.freed_bytes, gone.layers)


def _pruned(arguments: argparse.Namespace, removed: list[str], freed: int, layers: Sequence[str] = ()) -> int:
    if arguments.json:
        found = {"removed": removed, "layers": layers, "freed_bytes": freed, "dry_run": arguments.dry_run}
        print_json(found)
    else:
        also = f", and {len(layers)} layers" if layers else ""
        verb = "would go" if arguments.dry_run else "removed"
        say("\n".join([*removed, f"{len(removed)}{also} {verb}, {freed / 1e6:.1f} MB"]))
    return 0
