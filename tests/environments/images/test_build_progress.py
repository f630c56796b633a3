"""Many images made side by side: what is said of it, what one that fails leaves, and how it is interrupted."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.builds.forecast import forecaster, foretell, foretelling
from megaflow_hpc.environments.images.build_progress import BuildProgress, at_once, make_all
from megaflow_hpc.environments.images.layered import read_layered
from megaflow_hpc.environments.images.mapping import ImageMapping, ImageRequest
from megaflow_hpc.environments.images.pull import Looks
from megaflow_hpc.environments.images.registries import Registries
from megaflow_hpc.environments.images.registry import client
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.environments.sandbox.scratch import default_scratch
from megaflow_hpc.errors import ConfigError, MegaflowError, SiteError
from tests.support.places import ROOT
from tests.support.registries import Front, Registry, layer, noise
from tests.support.small_images import SmallImages

Verb = Callable[..., tuple[int, str, str]]


def dockerfiles(place: Path, *texts: str) -> list[ImageRequest]:
    """Requests for Dockerfiles in one context, which has ``file``."""
    place.mkdir()
    (place / "file").write_text("x" * 5000)
    requests = []
    for number, text in enumerate(texts):
        path = place / f"{number}.Dockerfile"
        path.write_text(text)
        requests.append(ImageRequest(f"image {number}", dockerfile=path))
    return requests


def test_jobs_are_carried_out_side_by_side_and_one_that_fails_is_named(tmp_path: Path) -> None:
    together = threading.Barrier(at_once())

    def job(number: int) -> Path:
        if number < at_once():
            together.wait(30)  # so many are under way at once
        if number == 1:
            raise SiteError("no")
        return tmp_path / str(number)

    said: list[tuple[int, int, int]] = []
    jobs = {str(number): (lambda number=number: job(number)) for number in range(6)}
    made, failed = make_all(jobs, lambda *state: said.append(state[:3]), lambda: None, keep_going=True)
    assert (sorted(made), sorted(failed)) == (["0", "2", "3", "4", "5"], ["1"])
    assert said[-1] == (5, 1, 0)
    begun: list[int] = []
    halting = {str(n): (lambda n=n: begun.append(n) or job(1)) for n in range(100)}
    together = threading.Barrier(1)
    made, failed = make_all(halting, lambda *state: None, lambda: None, keep_going=False)
    assert made == {}
    assert len(failed) == len(begun) < 100


def test_images_are_looked_up_first_then_made_and_what_fails_is_left_out(
    small_images: SmallImages, tmp_path: Path
) -> None:
    store = ImageStore(tmp_path / "store")
    (base,) = small_images.fill(store, 1)
    copies = [f"FROM base\nCOPY file /{name}\n" for name in ("a", "b", "c")]
    requests = dockerfiles(tmp_path / "context", *copies, "FROM base\nUSER nobody\nWORKDIR /x\n", "FROM gone\nUSER a\n")
    mapping = ImageMapping({"base": base}, tmp_path)
    states: list[BuildProgress] = []
    lines: list[str] = []

    class Watch:
        say = staticmethod(lines.append)
        show = staticmethod(states.append)

    with pytest.raises(ConfigError, match="'gone'"):  # before anything is made
        Images(store, builder=Builder()).resolve_all(requests, mapping)
    assert list(store.layers.layers()) == []
    first = Images(store, builder=Builder()).resolve_all(requests[:1], mapping)
    before = sum(layer.bytes for layer in store.layers.layers())
    images = Images(store, builder=Builder())
    images.watch(Watch)
    failures: dict[str, MegaflowError] = {}
    found = images.resolve_all([*requests, requests[0]], mapping, failures=failures)
    assert list(found) == ["image 0", "image 1", "image 2"]
    assert found["image 0"] == first["image 0"]
    assert set(failures) == {"image 3", "image 4"}
    assert [state.looked_up for state in states if state.total != state.looked_up] == [0, 1, 2, 3, 4]
    last = states[-1]
    assert (last.total, last.there, last.to_make, last.made, last.failed, last.at_work) == (5, 1, 3, 2, 1, 0)
    assert last.steps == len(lines) == 3
    assert last.bytes == sum(layer.bytes for layer in store.layers.layers()) - before > 0
    assert {path for _, path in images.used.values() if path} >= {Path(path) for path in found.values()}


def test_build_goes_on_after_one_that_fails_and_says_what_it_does(
    verb: Verb, small_images: SmallImages, tmp_path: Path
) -> None:
    (base,) = small_images.fill(ImageStore(), 1)
    requests = dockerfiles(tmp_path / "context", "FROM base\nCOPY file /a\n", "FROM base\nUSER x\nWORKDIR /y\n")
    paths = [str(request.dockerfile) for request in requests]
    status, out, said = verb("build", *paths, "--map", f"base={base}", "--json")
    assert status == 1
    found = json.loads(out)
    assert (list(found["images"]), list(found["failed"])) == ([paths[0]], [paths[1]])
    assert "images: 2, 0 in the store, 2 to be made\n" in said
    assert f"{paths[0]}:2: COPY file /a\n" in said
    assert "images: 2/2 made, 2 steps, " in said
    status, out, said = verb("build", *paths, "--map", f"base={base}")
    assert status == 1
    assert "images: 2, 1 in the store, 1 to be made\n" in said
    assert f"{paths[1]} failed: " in said
    assert verb("build", paths[0], "--map", f"base={base}")[2] == ""


def test_what_a_build_takes_is_said_before_and_is_what_it_took(
    verb: Verb, small_images: SmallImages, tmp_path: Path
) -> None:
    """Two Dockerfiles share their first step, and one of them has a third that is not known before."""
    base = small_images.fill(ImageStore(), 1)[0]
    first = "FROM base\nCOPY file /a\n"
    requests = dockerfiles(tmp_path / "context", f"{first}COPY file /b\n", f"{first}COPY <<E /c/d\ntext\nE\n")
    paths = [str(request.dockerfile) for request in requests]
    words = (*paths, "--map", f"base={base}")
    told = json.loads(verb("build", *words, "--dry-run", "--json")[1])
    assert (told["images"], told["there"], told["to_make"]) == (2, 0, 2)
    assert (told["layers_made"], told["layers_fetched"], told["unknown"]) == (3, 0, [])
    assert list(ImageStore().layers.layers()) == []
    predicted = verb("build", *words, "--dry-run")[1]
    _, made, said = verb("build", *words, "--json")
    assert predicted in said
    built = json.loads(made)["images"].values()
    store = ImageStore()
    layers = {layer.digest: layer for path in built for layer in read_layered(path).layers}
    sif = store.image(Path(base).stem)
    assert sif is not None
    assert told["node_bytes"] <= sum(layer.unpacked_bytes for layer in layers.values()) + sif.unpacked_bytes
    assert told["node_bytes"] >= 3 * 4096 + sif.unpacked_bytes
    assert told["store_inodes"] == 3 * len(layers) + 3 * len(built)
    again = json.loads(verb("build", *words, "--dry-run", "--json")[1])
    assert (again["there"], again["to_make"], again["store_bytes"], again["layers_made"]) == (2, 0, 0, 0)

    assert verb("stage", *built)[0] == 0  # nothing more for this node
    again = json.loads(verb("build", *words, "--dry-run", "--json")[1])
    assert (again["node_bytes"], again["node_inodes"]) == (0, 0)
    (tmp_path / "context" / "2.Dockerfile").write_text(f"{first}RUN true\nCOPY file /e\n")
    out = verb("build", tmp_path / "context" / "2.Dockerfile", "--map", f"base={base}", "--dry-run")[1]
    assert "layers: 2 to be made, 0 to be fetched\n" in out
    assert f"not known before it is made:\n  {tmp_path}/context/2.Dockerfile:3\n" in out


def test_what_a_registry_would_send_is_said_before(verb: Verb, registry: Registry) -> None:
    layers = [layer({"base": noise("forecast", 50_000)}), layer({"own": b"own"})]
    registry.push("forecast", "1", layers)
    words = ("docker://lab.org/forecast:1", "--mirror", f"lab.org=http://{registry.address}", "--dry-run", "--json")
    told = json.loads(verb("build", *words)[1])
    assert (told["to_make"], told["layers_fetched"], told["store_bytes"]) == (1, 2, sum(len(x.blob) for x in layers))


def test_before_a_build_each_image_is_looked_up_once_and_a_registry_that_is_silent_too(
    registry: Registry, between: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.push("looked-up", "1", [layer({"own": b"own"})])
    requests = dockerfiles(tmp_path / "context", *(f"FROM a\nCOPY file /{name}\n" for name in "abc"))
    requests += [ImageRequest("b"), ImageRequest("c")]
    names = {name: f"docker://lab.org/looked-up:{number}" for number, name in enumerate("abc", 1)}
    images, said = (
        Images(ImageStore(tmp_path / "store"), Registries({"lab.org": f"http://{between.address}"})),
        list[str](),
    )
    images.say = said.append
    mapping = ImageMapping(names, tmp_path)
    foretell(images, [(request, mapping, None) for request in requests])
    asked = [path for path, _ in between.asked]
    assert len(asked) == len(set(asked)) == 4  # of the first its manifest and configuration, too
    assert said[0] == "layers: 3 to be made, 1 to be fetched"
    assert said[1].startswith("store: at least ")

    between.asked.clear()
    monkeypatch.setattr(client, "QUICK_S", 0.3)
    released = threading.Event()
    between.rules = {"": lambda _: released.wait(60)}
    images.looks = Looks()
    foretell(images, [(request, mapping, None) for request in requests])
    released.set()
    assert len(between.asked) == 1
    assert said[3] == "layers: 3 to be made, 0 to be fetched"

    between.asked.clear()
    images.looks = None
    foretell(images, [(request, mapping, None) for request in requests])
    assert between.asked == []
    assert said[6:] == said[3:6]


def test_what_cannot_be_foretold_silences_nothing_else_and_ends_nothing(
    small_images: SmallImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base,) = small_images.fill(ImageStore(tmp_path / "store"), 1)
    requests = dockerfiles(
        tmp_path / "context", "FROM gone\n", "FROM base\nCOPY file /a\n", "FROM base\nCOPY file /b\n"
    )
    images, said = Images(ImageStore(tmp_path / "store"), builder=Builder()), list[str]()
    images.say, images.foretell = said.append, foretelling(images, None)
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path))
    mapping = ImageMapping({"base": base}, tmp_path)
    assert list(images.resolve_all(requests[:2], mapping, failures={})) == ["image 1"]
    assert said[0] == "layers: 1 to be made, 0 to be fetched"
    assert said[1].startswith("store: at least ")
    images.builder = Builder()
    said.clear()
    cache = default_scratch() / "cache"
    cache.mkdir(exist_ok=True)
    (cache / "images").write_text("")  # it cannot be listed
    with pytest.raises(OSError, match="images"):
        forecaster(images)
    assert list(images.resolve_all(requests[2:], mapping)) == ["image 2"]


@pytest.fixture
def sleeping(small_rootfs: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A build on a terminal whose two images never end; it is in their first steps."""
    requests = dockerfiles(tmp_path / "context", *(f"FROM base\nRUN echo {n} && kill -STOP $$\n" for n in "ab"))
    words = ["images", "build", *(str(request.dockerfile) for request in requests), "--map", f"base={small_rootfs}"]
    terminal, screen = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "megaflow_hpc", *words, "--store", str(tmp_path / "store")],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "MEGAFLOW_SCRATCH": str(tmp_path), "TERM": "xterm", "COLUMNS": "200"},
        stdout=subprocess.DEVNULL,
        stderr=screen,
        start_new_session=True,
    )
    os.close(screen)
    process.stderr = os.fdopen(terminal, "rb", buffering=0)
    yield process
    process.kill()
    process.wait()
    process.stderr.close()


def test_ctrl_c_ends_all_that_is_under_way(sleeping: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert sleeping.stderr is not None
    shown = b""
    while b"2 under way" not in shown or shown.count(b"RUN echo") < 2:
        try:
            shown += os.read(sleeping.stderr.fileno(), 1 << 16)
        except OSError:
            pytest.fail(f"it has ended: {shown.decode()}")
    assert b"images: 2, 0 in the store, 2 to be made" in shown
    sleeping.send_signal(signal.SIGINT)
    reader = threading.Thread(target=_drain, args=(sleeping.stderr.fileno(),), daemon=True)
    reader.start()
    assert sleeping.wait(60) == 130
    assert list((tmp_path / "store" / "work").glob("*.*/")) == []
    assert list((tmp_path / "store" / "layers").iterdir()) == []
    assert not any("echo a && kill -STOP" in line for line in _command_lines())


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except OSError:  # the other end is closed
        pass


def _command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_text(errors="replace")
        except OSError:
            pass
