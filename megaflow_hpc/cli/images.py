"""``images``: the store of task images, and their copies on a node."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import add_json, note, print_json, table

if TYPE_CHECKING:
    from megaflow_hpc.environments.images import Images
    from megaflow_hpc.environments.staging import ImageCache

DESCRIPTION = """\
Images are SIF files in a store on the shared file system, each under the digest of its content. Nodes copy what they
need from there, once each, into a cache on local scratch (docs/images.md).

  build     make or fetch what a campaign, a definition file, a Dockerfile or an address needs
  pull      fetch addresses, or what a manifest lists
  manifest  say what a campaign needs and what the store lacks, to be carried elsewhere
  stage     copy images into this node's cache
  list      what the store holds, or this node's cache
  prune     remove images from the store, or this node's copies
"""
STORE = (
    "default: MEGAFLOW_IMAGE_STORE, else ~/.megaflow-hpc/images; several separated by colons, the first is written to"
)


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "images",
        help="build, fetch, stage and list the images of tasks",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="images_verb", metavar="VERB", required=True)

    build = _verb(
        verbs,
        "build",
        "build every image that a campaign, or one source, needs",
        "Builds what is not in the store yet, and prints the files. A source is a campaign file, whose tasks say what "
        "they need; a definition file; a Dockerfile, whose FROM is mapped with --map; or a docker:// address.",
        "  megaflow-hpc images build campaign.yaml\n"
        "  megaflow-hpc images build campaign.yaml --manifest images.json\n"
        "  megaflow-hpc images build containers/base.def\n"
        "  megaflow-hpc images build tasks/one/environment/Dockerfile --map debian:12=base.sif",
    )
    build.add_argument("source", metavar="SOURCE", nargs="+")
    build.add_argument("--map", metavar="NAME=IMAGE", action="append", default=[], help="image for a FROM; repeatable")
    build.add_argument("--manifest", metavar="FILE", help="write what was needed, with digests, to FILE")
    _networked(build)
    build.set_defaults(run=_build)

    pull = _verb(
        verbs,
        "pull",
        "fetch images into the store",
        "Fetches addresses (docker://, oras://, library://) through the mirrors, if any, and takes SIF files in. With "
        "--manifest, everything that it lists: from registries, or with --from from a directory of <digest>.sif files, "
        "whose content is checked.",
        "  megaflow-hpc images pull docker://debian:12\n"
        "  megaflow-hpc images pull docker://python:3.12 --mirror docker.io=registry.site.edu/hub\n"
        "  megaflow-hpc images pull --manifest images.json --from /media/carried",
    )
    pull.add_argument("source", metavar="SOURCE", nargs="*")
    pull.add_argument("--manifest", metavar="FILE", help="what to fetch, as images manifest or build wrote it")
    pull.add_argument("--from", metavar="DIR", dest="directory", help="take the manifest's files from DIR")
    _networked(pull)
    pull.set_defaults(run=_pull)

    manifest = _verb(
        verbs,
        "manifest",
        "say what a campaign needs and what of it the store lacks",
        "Fetches and builds nothing. The manifest lists source and digest of every image of the store that the "
        "campaign's tasks use; entries without a digest are not there yet. Exit status 1 if there are any.",
        "  megaflow-hpc images manifest campaign.yaml\n"
        "  megaflow-hpc images manifest campaign.yaml --output images.json",
    )
    manifest.add_argument("campaign", metavar="CAMPAIGN")
    manifest.add_argument("--output", metavar="FILE", help="write it to FILE")
    manifest.set_defaults(run=_manifest)

    stage = _verb(
        verbs,
        "stage",
        "copy images into this node's cache ahead of their use",
        "Run it where the sandboxes will run, such as once per node of a job. Images are SIF files, digests (or "
        "their beginnings) of the store, or a campaign file.",
        "  srun --ntasks-per-node=1 megaflow-hpc images stage campaign.yaml\n  megaflow-hpc images stage 3f2a9c0b",
    )
    stage.add_argument("image", metavar="IMAGE", nargs="+")
    stage.add_argument("--form", choices=("tree", "sif"), default="tree", help="unpacked (default), or the file itself")
    _cached(stage)
    stage.set_defaults(run=_stage)

    listing = _verb(
        verbs,
        "list",
        "list what the store holds",
        "With --staged: what this node's cache holds.",
        "  megaflow-hpc images list",
    )
    listing.add_argument("--staged", action="store_true", help="this node's copies instead")
    _cached(listing)
    listing.set_defaults(run=_list)

    prune = _verb(
        verbs,
        "prune",
        "remove images from the store",
        "Removes the named images (digests or their beginnings), those older than --older-than days, and what killed "
        "builders left; without either, only the last. Runs that were planned with a removed image cannot go on.",
        "  megaflow-hpc images prune 3f2a9c0b --dry-run\n  megaflow-hpc images prune --older-than 90\n"
        "  megaflow-hpc images prune --staged",
    )
    prune.add_argument("image", metavar="DIGEST", nargs="*")
    prune.add_argument("--older-than", metavar="DAYS", type=float)
    prune.add_argument("--staged", action="store_true", help="this node's copies that nobody uses, instead")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    _cached(prune)
    prune.set_defaults(run=_prune)


def _verb(verbs: Any, name: str, help_: str, description: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help_,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--store", metavar="DIR", help=STORE)
    add_json(parser)
    return parser


def _networked(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mirror",
        metavar="REGISTRY=MIRROR",
        action="append",
        default=[],
        help="fetch from MIRROR what REGISTRY is asked for; repeatable; default: MEGAFLOW_IMAGE_MIRRORS",
    )
    parser.add_argument(
        "--air-gapped", action="store_true", default=None, help="fetch nothing; default: MEGAFLOW_AIR_GAPPED"
    )


def _cached(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", metavar="DIR", help="the node's cache; default: below the scratch directory")


def _images(arguments: argparse.Namespace) -> Images:
    from megaflow_hpc.environments.images import Images
    from megaflow_hpc.environments.remote import Registries
    from megaflow_hpc.environments.store import ImageStore

    mirrors = _pairs(getattr(arguments, "mirror", []), "--mirror")
    registries = Registries.configured(mirrors, getattr(arguments, "air_gapped", None))
    return Images(ImageStore(arguments.store), registries)


def _pairs(words: Sequence[str], option: str) -> dict[str, str]:
    from megaflow_hpc.errors import ConfigError

    for word in words:
        if not all(word.partition("=")):
            raise ConfigError(f"{option} {word}: expected NAME=VALUE")
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _of_campaign(images: Images, path: str, build: bool) -> dict[str, str]:
    from megaflow_hpc.config import load
    from megaflow_hpc.environments.images import resolve_all
    from megaflow_hpc.environments.remote import Registries
    from megaflow_hpc.environments.tasks import load_tasks

    config = load(path)
    environment = config.environment
    ours = images.registries
    images.registries = Registries(
        {**environment.mirrors, **ours.mirrors}, build and (ours.air_gapped or environment.air_gapped)
    )
    base = Path(path).absolute().parent
    note(f"{path}: reading tasks")
    tasks = load_tasks([source.model_dump() for source in config.tasks], base)
    return resolve_all(images, tasks, environment.images, base, build=build)


def _build(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.environments.dockerfile import Dockerfile
    from megaflow_hpc.environments.prestage import manifest, write_manifest

    images = _images(arguments)
    mapping = _pairs(arguments.map, "--map")
    files: dict[str, str] = {}
    for source in arguments.source:
        name = os.path.basename(source)
        if source.endswith((".yaml", ".yml")):
            files |= _of_campaign(images, source, build=True)
        elif name == "Dockerfile" or name.startswith("Dockerfile.") or name.endswith(".Dockerfile"):
            dockerfile = Dockerfile.read(Path(source).absolute())
            for line, instruction, reason in dockerfile.ignored:
                note(f"{source}:{line}: {instruction} is left out: {reason}")
            note(f"{source}: building, if it is not there")
            files[source] = str(images.resolve_dockerfile(dockerfile, mapping, Path.cwd(), where="--map"))
        else:
            note(f"{source}: building, if it is not there")
            files[source] = str(images.resolve(source, {source: source}, Path.cwd(), where="images build"))
    if arguments.manifest:
        write_manifest(Path(arguments.manifest), manifest(images))
    return _show_files(arguments, files)


def _pull(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.environments.prestage import fetch, read_manifest
    from megaflow_hpc.environments.remote import is_remote
    from megaflow_hpc.errors import ConfigError

    if not arguments.source and not arguments.manifest:
        raise ConfigError("images pull: nothing to fetch; name addresses, or a manifest with --manifest")
    images = _images(arguments)
    files: dict[str, str] = {}
    if arguments.manifest:
        directory = Path(arguments.directory) if arguments.directory else None
        files |= fetch(images, read_manifest(Path(arguments.manifest)), directory, note)
    for source in arguments.source:
        if is_remote(source):
            note(f"{source}: pulling, if it is not there")
            files[source] = str(images.resolve(source, {source: source}, Path.cwd(), where="images pull"))
        elif os.path.isfile(source):
            files[source] = images.store.add(Path(source), os.path.abspath(source)).path
        else:
            raise ConfigError(f"{source}: neither an address (docker://…) nor a SIF file")
    return _show_files(arguments, files)


def _show_files(arguments: argparse.Namespace, files: dict[str, str]) -> int:
    if arguments.json:
        print_json({"images": files})
    else:
        print(table(("image", "file"), files.items()))
    return 0


def _manifest(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.environments.prestage import manifest, missing, write_manifest

    images = _images(arguments)
    _of_campaign(images, arguments.campaign, build=False)
    content = manifest(images)
    lacking = missing(content)
    if arguments.output:
        write_manifest(Path(arguments.output), content)
    if arguments.json:
        print_json({**content, "missing": lacking})
    else:
        rows = [
            (row["source"], (row["digest"] or "missing")[:12], _megabytes(row["bytes"])) for row in content["images"]
        ]
        print(table(("source", "digest", "MB"), rows))
    return 1 if lacking else 0


def _cache(arguments: argparse.Namespace) -> ImageCache:
    from megaflow_hpc.environments.apptainer import find_apptainer
    from megaflow_hpc.environments.provider import default_scratch, private_directory
    from megaflow_hpc.environments.staging import ImageCache

    root = Path(arguments.cache).absolute() if arguments.cache else private_directory(default_scratch()) / "cache"
    return ImageCache(private_directory(root), find_apptainer())


def _stage(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.errors import ConfigError

    images = _images(arguments)
    cache = _cache(arguments)
    paths: list[str] = []
    for name in arguments.image:
        if name.endswith((".yaml", ".yml")):
            paths += _of_campaign(images, name, build=True).values()
        elif os.path.exists(name):
            paths.append(name)
        elif stored := images.store.image(name):
            paths.append(stored.path)
        else:
            raise ConfigError(f"{name}: neither a file nor the digest of an image in {images.store.root}")
    staged = []
    for path in dict.fromkeys(paths):
        lease = cache.acquire(path, arguments.form)
        staged.append({"image": path, "path": lease.path})
        lease.release()
    if arguments.json:
        print_json({"staged": staged, "copied_bytes": cache.copied_bytes})
    else:
        print(table(("image", "copy"), [(row["image"], row["path"]) for row in staged]))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    if arguments.staged:
        cache = _cache(arguments)
        copies = cache.list()
        if arguments.json:
            budget = {"bytes": cache.budget.bytes, "inodes": cache.budget.inodes}
            print_json({"budget": budget, "copies": copies})
        else:
            rows = [
                (row["name"], _megabytes(row["bytes"]), row["inodes"], "in use" if row["in_use"] else "")
                for row in copies
            ]
            print(table(("copy", "MB", "files", ""), rows))
        return 0
    store = _images(arguments).store
    names = store.names()
    found = [{**vars(image), "sources": names.get(image.digest, [image.source])} for image in store.images()]
    if arguments.json:
        print_json({"stores": list(map(str, store.roots)), "images": found})
    else:
        rows = [
            (row["digest"][:12], _megabytes(row["bytes"]), row["inodes"], ", ".join(row["sources"])) for row in found
        ]
        print(table(("digest", "MB", "files", "from"), rows))
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.environments.files import remove_tree
    from megaflow_hpc.errors import ConfigError, SiteError

    if arguments.staged:
        cache = _cache(arguments)
        idle = [row for row in cache.list() if not row["in_use"]]
        freed = sum(int(str(row["bytes"])) for row in idle) if arguments.dry_run else cache.clear()
        return _pruned(arguments, [str(row["name"]) for row in idle], freed)
    store = _images(arguments).store
    if not store.writable:
        raise SiteError(f"{store.root}: not your store; only its owner removes images")
    doomed = []
    for digest in arguments.image:
        image = store.image(digest)
        if image is None or not Path(image.path).is_relative_to(store.root):
            raise ConfigError(
                f"{digest}: no image of {store.root} has a digest that begins so; see: megaflow-hpc images list"
            )
        doomed.append(image)
    if arguments.older_than is not None:
        before = time.time() - 86400 * arguments.older_than
        doomed += [
            image for image in store.images() if image.created_at < before and store.root in Path(image.path).parents
        ]
    leftovers = store.leftovers() if store.root.is_dir() else []
    removed = [image.digest for image in doomed] + list(map(str, leftovers))
    if arguments.dry_run:
        return _pruned(arguments, removed, sum(image.bytes for image in doomed))
    freed = sum(store.remove(image.digest) for image in doomed)
    for path in leftovers:
        remove_tree(path)
    return _pruned(arguments, removed, freed)


def _pruned(arguments: argparse.Namespace, removed: list[str], freed: int) -> int:
    if arguments.json:
        print_json({"removed": removed, "freed_bytes": freed, "dry_run": arguments.dry_run})
    else:
        print(
            "\n".join(
                [*removed, f"{len(removed)} {'would go' if arguments.dry_run else 'removed'}, {freed / 1e6:.0f} MB"]
            )
        )
    return 0


def _megabytes(size: Any) -> str:
    return "" if size is None else f"{size / 1e6:.1f}"
