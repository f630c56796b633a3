"""A batch of images that jobs build, each element of an array a share: its directory in the store, and one element.

::

    STORE/work/batch-<8 hex digits>/
      batch.json           the images that were lacking, and how each is built
      env.sh               what the jobs source first
      results/<n>.json     how image n ended
      logs/                one file per element

Neighbours of the batch, which often share layers, lie in one share. A layer or an image that two elements need is made
by one of them, since the store locks what is made by its key.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from megaflow_hpc.environments.builds.builder import Builder, BuildNetwork
from megaflow_hpc.environments.images.mapping import BUILD_S, ImageMapping, ImageRequest, match_name
from megaflow_hpc.environments.images.registries import Registries, is_remote
from megaflow_hpc.environments.images.resolve import Images, is_built
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import ConfigError, MegaflowError, SiteError
from megaflow_hpc.host.atomic import make_directory, write_json
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.texts import printable

if TYPE_CHECKING:
    from megaflow_hpc.config import CampaignConfig

ERROR_CHARACTERS = 2000
"""Of an error, its end."""


class Recipe(msgspec.Struct, frozen=True):
    """What the images of one source have in common."""

    mapping: dict[str, str]
    base_dir: str
    where: str
    network: BuildNetwork | None = None
    mirrors: dict[str, str] = {}
    air_gapped: bool = False

    def image_mapping(self) -> ImageMapping:
        """Returns the mapping of names to sources."""
        return ImageMapping(self.mapping, Path(self.base_dir), self.where)

    def images(self, store: ImageStore, memory_mb: int | None = None) -> Images:
        """Returns the store with the registries of this recipe, and its builder."""
        builder = Builder(self.network, memory_mb=memory_mb)
        return Images(store, Registries(self.mirrors, self.air_gapped), builder)

    def asking(self, store: ImageStore) -> Images:
        """Returns what looks images up and builds none; beside them what a store without any would call them."""
        images = Images(store, Registries(self.mirrors, self.air_gapped))
        images.beside = Images(_Nothing(store.root), Registries({}))
        return images


class Wanted(msgspec.Struct, frozen=True):
    """One image to be built."""

    name: str
    recipe: Recipe
    base: str = ""
    dockerfile: str = ""
    timeout_s: float = BUILD_S
    path: str = ""

    @classmethod
    def of(cls, request: ImageRequest, recipe: Recipe) -> Wanted:
        """Returns what a request wants."""
        dockerfile = str(request.dockerfile or "")
        return cls(request.name, recipe, request.base, dockerfile, request.timeout_s, request.path)

    @property
    def request(self) -> ImageRequest:
        """As the store is asked for it."""
        dockerfile = Path(self.dockerfile) if self.dockerfile else None
        return ImageRequest(self.name, self.base, dockerfile, self.timeout_s, self.path)


class Result(msgspec.Struct, frozen=True):
    """How one image ended."""

    file: str = ""
    """Empty where it failed."""
    error: str = ""
    seconds: float = 0.0
    node: str = ""


class _Content(msgspec.Struct):
    elements: int
    targets: list[str]
    recipes: list[Recipe]
    images: list[tuple[int, str, str, str, float, str]]


@dataclass(frozen=True)
class Batch:
    """Images that one array builds."""

    run: RunDir
    elements: int
    wanted: Sequence[Wanted]
    targets: Sequence[str] = field(default=())
    """Of each image, as of :func:`asked_for`: two of one name are one image."""

    def write(self, environment: Sequence[str]) -> None:
        """Makes the directory; the store's ``work`` is there."""
        make_directory(self.run.path)
        make_directory(self.run.path / "results")
        make_directory(self.run.logs)
        recipes = list({id(one.recipe): one.recipe for one in self.wanted}.values())
        images = [
            (recipes.index(one.recipe), one.name, one.base, one.dockerfile, one.timeout_s, one.path)
            for one in self.wanted
        ]
        content = _Content(self.elements, list(self.targets), recipes, images)
        self.run.env_sh.write_text("\n".join(["# Sourced by every job of this batch.", *environment]) + "\n")
        write_json(self.run.path / "batch.json", msgspec.to_builtins(content))

    @classmethod
    def read(cls, path: Path) -> Batch:
        """Returns the batch of a directory.

        Raises:
            SiteError: it cannot be read.
        """
        try:
            content = msgspec.json.decode(read_regular(path / "batch.json"), type=_Content)
        except (OSError, ValueError) as error:
            raise SiteError(f"{path}: no batch of images ({error}); run images build again") from None
        wanted = [
            Wanted(name, content.recipes[recipe], base, dockerfile, timeout_s, task)
            for recipe, name, base, dockerfile, timeout_s, task in content.images
        ]
        return cls(RunDir(path), content.elements, wanted, content.targets)

    def share(self, element: int) -> range:
        """Returns the numbers of the images that an element builds."""
        count = len(self.wanted)
        return range(count * element // self.elements, count * (element + 1) // self.elements)

    def element_of(self, number: int) -> int:
        """Returns the element that builds an image."""
        return next(element for element in range(self.elements) if number in self.share(element))

    def results(self) -> dict[int, Result]:
        """Returns what has ended, by number."""
        found = {}
        for entry in os.scandir(self.run.path / "results"):
            if entry.name.endswith(".json") and not entry.name.startswith("."):
                found[int(entry.name.removesuffix(".json"))] = self._result(Path(entry.path))
        return found

    @staticmethod
    def _result(path: Path) -> Result:
        return msgspec.json.decode(read_regular(path), type=Result)

    def record(self, number: int, result: Result) -> None:
        """Writes down how an image ended."""
        write_json(self.run.path / "results" / f"{number}.json", msgspec.to_builtins(result))


def wanted_by_campaign(
    config: CampaignConfig, path: Path, images: Images, network: BuildNetwork | None = None
) -> tuple[Recipe, list[ImageRequest]]:
    """Returns the images that a campaign's tasks want, and what they have in common.

    Args:
        images: Its mirrors come before the campaign's.
        network: Of the steps of Dockerfiles. Default: as the campaign says.
    """
    from megaflow_hpc.tasks.images import image_requests
    from megaflow_hpc.tasks.loading import load_tasks

    environment, ours, base = config.environment, images.registries, path.absolute().parent
    recipe = Recipe(
        environment.images,
        str(base),
        "environment.images",
        network or environment.network_of_builds,
        {**environment.mirrors, **ours.mirrors},
        ours.air_gapped or environment.air_gapped,
    )
    tasks = load_tasks([source.model_dump() for source in config.tasks], base, images.dockerfiles)
    return recipe, image_requests(tasks)


def wanted_by_name(source: str, mapping: dict[str, str], images: Images, network: BuildNetwork | None = None) -> Wanted:
    """Returns the image of a Dockerfile, a definition file or an address, relative to the working directory.

    Args:
        mapping: Of the names that a Dockerfile starts from.
    """
    registries = images.registries
    dockerfile = is_dockerfile(source)
    recipe = Recipe(
        mapping if dockerfile else {source: source},
        str(Path.cwd()),
        "--map" if dockerfile else "images build",
        network,
        dict(registries.mirrors),
        registries.air_gapped,
    )
    return Wanted(source, recipe, dockerfile=str(Path(source).absolute()) if dockerfile else "")


class _Nothing(ImageStore):
    """A store as if it had no image."""

    def find(self, key: str) -> Path | None:
        return None


def asked_for(wanted: Wanted, images: Images) -> str:
    """Returns what is asked for as one name: a digest of contents and sources.

    It stays the same when what an image starts from is fetched or built meanwhile, which the image's key in the store
    does not.

    Args:
        images: As of :meth:`Recipe.asking`; it was looked up in them.
    """
    request = wanted.request
    if request.dockerfile is not None:
        return images.keys_beside[request.dockerfile]
    assert images.beside is not None
    return images.beside.resolve_request(request, wanted.recipe.image_mapping(), build=False).name


def is_dockerfile(source: str) -> bool:
    """Whether a path is that of a Dockerfile, by its name."""
    name = Path(source).name
    return name == "Dockerfile" or name.startswith("Dockerfile.") or name.endswith(".Dockerfile")


def build(images: Images, wanted: Wanted) -> Result:
    """Builds one image, unless the store has it."""
    began, file, error = time.monotonic(), "", ""
    try:
        file = str(images.resolve_request(wanted.request, wanted.recipe.image_mapping()))
    except (ConfigError, SiteError, OSError) as failure:
        error = (str(failure) or type(failure).__name__) + _remedy(images, wanted)
        error = error[-ERROR_CHARACTERS:]
    return Result(file, error, round(time.monotonic() - began, 3), socket.gethostname())


def _remedy(images: Images, wanted: Wanted) -> str:
    """What to do where what comes from a registry is what is lacking."""
    request, mapping = wanted.request, wanted.recipe.image_mapping()
    first = request.base or request.name
    with suppress(MegaflowError):
        names = images.dockerfiles.read(request.dockerfile).bases if request.dockerfile else [first]
        remote = [name for name in names if is_remote(match_name(name, mapping.names) or "")]
        if any(not is_built(images.resolve(name, mapping, build=False)) for name in remote):
            return "; if nodes have no way out, set slurm.builds.fetch: here"
    return ""


def main(argv: Sequence[str]) -> int:
    """Builds the share of one element; returns 0 unless the batch cannot be read.

    An image that fails is a result, which whoever waits reads: Slurm is not to call the element failed for it.
    """
    RunDir(argv[0]).check_ours()
    batch = Batch.read(Path(argv[0]))
    at_once = int(os.environ.get("SLURM_CPUS_PER_TASK") or 1)
    memory = os.environ.get("SLURM_MEM_PER_NODE", "")
    memory_mb = max(256, int(memory) // at_once) if memory.isdigit() and int(memory) else None
    store, ended = ImageStore(), batch.results()
    stores: dict[int, Images] = {}  # one for each recipe: what its builder has unpacked serves all its images
    for wanted in batch.wanted:
        if id(wanted.recipe) not in stores:
            stores[id(wanted.recipe)] = wanted.recipe.images(store, memory_mb=memory_mb)
            stores[id(wanted.recipe)].say = _say

    def one(number: int) -> None:
        wanted = batch.wanted[number]
        result = build(stores[id(wanted.recipe)], wanted)
        batch.record(number, result)
        _say(f"{wanted.name}: {f'failed: {result.error}' if result.error else result.file} ({result.seconds:.1f} s)")

    with ThreadPoolExecutor(at_once) as pool:
        for future in [pool.submit(one, number) for number in batch.share(int(argv[1])) if number not in ended]:
            future.result()
    return 0


def _say(line: str) -> None:
    print(printable(line), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
