"""An image per task, made as data sets make them: what it takes in time, in the store and on a node.

``campaign``: a local campaign of tasks whose Dockerfiles differ in what they copy, from the command to the first
finished rollout, and a second one over the same images; of ``TASKS`` tasks, 37 unless it says otherwise. ``dataset``:
500 images over 60 environments and one base, each built of its Dockerfile, staged on a node, and staged again. Run by
hand: ``python -m tests.bench.task_images campaign dataset``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.cache.cache import ImageCache
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.layered import read_layered
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.sources import ImageMapping
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.host.files import remove_tree
from tests.bench.figures import Figure
from tests.support.harbor_tasks import write_solved_task

TASKS, IMAGES, ENVIRONMENTS = int(os.environ.get("TASKS", "37")), 500, 60
MB = 1e6


def campaign(base: str, place: Path) -> list[Figure]:
    """Figures of a campaign of :data:`TASKS` tasks, each with three small files of its own."""
    for number in range(TASKS):
        task = write_solved_task(place / "tasks", f"task{number:02d}")
        toml = (task / "task.toml").read_text().replace('docker_image = "base"\n', "")
        (task / "task.toml").write_text(toml)
        for name in ("program.py", "test_program.py", "cases.json"):
            (task / "environment" / name).write_text(f"# {number} {name}\n" * 20)
        (task / "environment" / "Dockerfile").write_text(
            "FROM base\nWORKDIR /app\nCOPY program.py .\nCOPY test_program.py cases.json ./\n"
        )
    (place / "campaign.yaml").write_text(
        textwrap.dedent(
            f"""\
            name: images
            tasks: tasks/*
            agent: oracle
            run_dir: runs
            environment: {{images: {{base: {base}}}}}
            slurm: {{pods: {{slots_per_rank: 2}}}}
            """
        )
    )
    store, scratch = place / "store", place / "scratch"
    scratch.mkdir()
    environment = os.environ | {"MEGAFLOW_IMAGE_STORE": str(store), "MEGAFLOW_SCRATCH": str(scratch)}
    words = ["megaflow-hpc", "run", "campaign.yaml", "--launcher", "local", "--json", "--run-dir"]

    def run(name: str) -> float:
        began = time.time()
        done = subprocess.run([*words, name], cwd=place, env=environment, capture_output=True, text=True, check=False)
        print(done.stdout[-2000:], done.stderr[-1500:], file=sys.stderr)
        assert done.returncode == 0
        return time.time() - began

    began = time.time()
    whole = run("run")
    kept = _bytes(store)
    copies = set(scratch.rglob("entry.json"))
    again = run("again")
    more = len(set(scratch.rglob("entry.json")) - copies)
    first = min(path.stat().st_mtime for path in (place / "run").rglob("*") if "journal" in str(path)) - began
    starts = _events(place / "run", began)
    return [
        Figure(f"from run to the first rollout of {TASKS} tasks with an image each", "s", starts, 1, goal=15),
        Figure("… the first file of a journal", "s", first, 1),
        Figure("… the whole campaign", "s", whole, 1),
        Figure("… a second campaign over the same images", "s", again, 1),
        Figure(f"copies that it made on the node, beside {len(copies)} of the first", "copies", more, 1, goal=0),
        Figure("bytes that it added to the store", "B", _bytes(store) - kept, 1, goal=0),
        Figure("store of these images beyond the base", "MB", _bytes(store) / MB, 1, goal=5),
        Figure("node's cache of these images beyond the base", "MB", _layers(scratch) / MB, 1, goal=5),
    ]


def _events(run: Path, began: float) -> float:
    found = []
    for path in run.rglob("*.jsonl"):
        for line in path.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "rollout" in json.dumps(event)[:400] and isinstance(event.get("t"), float):
                found.append(event["t"])
    return min(found) - began if found else -1.0


def dataset(base: str, place: Path) -> list[Figure]:
    """Figures of :data:`IMAGES` images over :data:`ENVIRONMENTS` environments, made by their Dockerfiles."""
    store = ImageStore(place / "store")
    images = Images(store, builder=Builder())
    mapping = ImageMapping({"base": base}, place)
    shared = "RUN head -c 3000000 /dev/urandom > /opt/base.bin && mkdir -p /testbed\n"
    began = time.monotonic()
    files = []
    for number in range(IMAGES):
        environment = number % ENVIRONMENTS
        context = place / "contexts" / str(number)
        context.mkdir(parents=True)
        (context / "repo").mkdir()
        (context / "repo" / "code.py").write_bytes(os.urandom(20_000))
        (context / "Dockerfile").write_text(
            f"FROM base\n{shared}"
            f"RUN echo environment {environment} && head -c 1000000 /dev/urandom > /opt/environment.bin\n"
            "WORKDIR /testbed\nCOPY repo /testbed/\n"
            "RUN rm -f /opt/none && echo installed >> /testbed/state\n"
        )
        files.append(str(images.resolve_dockerfile(Dockerfile(context / "Dockerfile"), mapping)))
    built = time.monotonic() - began
    found = [read_layered(file) for file in files]
    distinct = {layer.digest: layer for image in found for layer in image.layers}
    stored = sum(path.stat().st_size for path in (store.root / "layers").iterdir() if not path.suffix)
    figures = [
        Figure(f"{IMAGES} images of {ENVIRONMENTS} environments built of Dockerfiles", "s", built, 1),
        Figure("bytes stored over distinct layer bytes", "x", stored / sum(x.bytes for x in distinct.values()), 1),
    ]
    context = place / "contexts" / "more"
    context.mkdir()
    (context / "repo").mkdir()
    (context / "repo" / "code.py").write_bytes(b"one more")
    text = (place / "contexts" / "0" / "Dockerfile").read_text().rpartition("RUN rm")[0]
    (context / "Dockerfile").write_text(text)
    began = time.monotonic()
    images.resolve_dockerfile(Dockerfile(context / "Dockerfile"), mapping)
    figures.append(Figure("one more task with the same Dockerfile but one COPY", "s", time.monotonic() - began, 1, 0.3))
    for again in (False, True):
        cache = ImageCache(place / "cache", find_apptainer())
        began = time.monotonic()
        for file in files:
            cache.acquire(file).release()
        figures.append(
            Figure(f"staging {'again' if again else 'first'}", "s", time.monotonic() - began, 1),
        )
        expected = sum(layer.bytes for layer in distinct.values()) + os.path.getsize(base)
        figures.append(
            Figure(
                f"bytes copied {'again' if again else 'over base and distinct layers'}",
                "x",
                cache.copied_bytes / expected,
                1,
            )
        )
    unpacked = sum(layer.unpacked_bytes for layer in distinct.values())
    on_node = _layers(place / "cache")
    figures.append(Figure("bytes on the node over those of distinct layers unpacked", "x", on_node / unpacked, 1, 1.05))
    return figures


def _bytes(place: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in place.rglob("*") if path.is_file() and not path.is_symlink())


def _layers(place: Path) -> int:
    return sum(_bytes(path) for path in place.rglob("*-layer"))


def main() -> None:
    """Prints the figures of the named parts."""
    base = os.environ["MEGAFLOW_TEST_BASE_SIF"]
    parts: dict[str, Callable[[str, Path], list[Figure]]] = {"campaign": campaign, "dataset": dataset}
    for name in sys.argv[1:] or parts:
        place = Path(tempfile.mkdtemp(prefix="task-images-"))
        try:
            for figure in parts[name](base, place):
                goal = "" if figure.goal is None else f"  (goal {figure.goal:g})"
                print(f"{figure.name}: {figure.value:.3g} {figure.unit}{goal}", flush=True)
        finally:
            remove_tree(place)


if __name__ == "__main__":
    main()
