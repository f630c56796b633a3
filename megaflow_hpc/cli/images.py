"""``images``: the store of task images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megaflow_hpc.cli.output import add_json, note, print_json, table


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("images", help="build and list the images of tasks")
    verbs = parser.add_subparsers(dest="images_verb", metavar="VERB", required=True)
    build = verbs.add_parser(
        "build",
        help="build every image that a campaign, or one source, needs",
        description="Builds what is not in the store yet, and prints the files. A source is a definition file, a "
        "docker:// address, or a campaign file, whose tasks say what they need.",
        epilog="examples:\n  megaflow-hpc images build campaign.yaml\n  megaflow-hpc images build containers/base.def\n"
        "  megaflow-hpc images build docker://debian:12",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.add_argument("source", metavar="SOURCE", nargs="+")
    _common(build)
    build.set_defaults(run=_build)
    listing = verbs.add_parser("list", help="list what is in the store")
    _common(listing)
    listing.set_defaults(run=_list)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", metavar="DIR", help="default: MEGAFLOW_IMAGE_STORE, else ~/.megaflow-hpc/images")
    add_json(parser)


def _build(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.environments.images import ImageStore, resolve_images

    images: dict[str, str] = {}
    for source in arguments.source:
        if source.endswith((".yaml", ".yml")):
            from megaflow_hpc.config import load
            from megaflow_hpc.environments.tasks import load_tasks

            config = load(source)
            base = Path(source).absolute().parent
            note(f"{source}: reading tasks")
            tasks = load_tasks([task_source.model_dump() for task_source in config.tasks], base)
            images |= resolve_images(tasks, config.environment.images, base, store=arguments.store)
        else:
            note(f"{source}: building, if it is not there")
            images[source] = str(
                ImageStore(arguments.store).resolve(source, {source: source}, Path.cwd(), where="images build")
            )
    if arguments.json:
        print_json({"images": images})
    else:
        print(table(("image", "file"), images.items()))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.environments.images import ImageStore

    store = ImageStore(arguments.store)
    found = store.list()
    if arguments.json:
        print_json({"store": str(store.root), "images": found})
    else:
        print(table(("file", "MB"), [(row["path"], f"{row['bytes'] / 1e6:.0f}") for row in found]))
    return 0
