"""Building many images in parallel: progress, failures and cancelling."""

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

from megaflow_hpc.cli.making.images import Wanted, share_of
from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.build_progress import BuildProgress, at_once, make_all
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.sources import ImageMapping, ImageRequest, Registries
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import ConfigError, MegaflowError, SiteError
from tests.support.places import ROOT
from tests.support.small_images import SmallImages

Verb = Callable[..., tuple[int, str, str]]


def dockerfiles(place: Path, *texts: str) -> list[ImageRequest]:
    """Requests for Dockerfiles in one context, which contains ``file``."""
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
            together.wait(30)  # as many run at once
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

    with pytest.raises(ConfigError, match="'gone'"):  # before anything is made
        Images(store, builder=Builder()).resolve_all(requests, mapping)
    assert list(store.layers.layers()) == []
    first = Images(store, builder=Builder()).resolve_all(requests[:1], mapping)
    before = sum(layer.bytes for layer in store.layers.layers())
    images = Images(store, builder=Builder())
    images.say, images.show = lines.append, states.append
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


def test_a_dry_run_lists_what_the_store_lacks_and_makes_nothing(
    verb: Verb, small_images: SmallImages, tmp_path: Path
) -> None:
    base = small_images.fill(ImageStore(), 1)[0]
    requests = dockerfiles(tmp_path / "context", "FROM base\nCOPY file /a\n", "FROM base\nCOPY file /b\n")
    paths = [str(request.dockerfile) for request in requests]
    words = (*paths, "--map", f"base={base}")
    assert verb("build", *words, "--dry-run")[1] == (
        f"images: 2, 0 in the store, 2 to be made\n  {paths[0]}\n  {paths[1]}\n"
    )
    assert verb("build", *words, "--dry-run", "--share", "2/2")[1] == (
        f"images: 1, 0 in the store, 1 to be made\n  {paths[1]}\n"
    )
    assert list(ImageStore().layers.layers()) == []
    assert verb("build", paths[0], "--map", f"base={base}")[0] == 0
    assert json.loads(verb("build", *words, "--dry-run", "--json")[1]) == {
        "images": 2,
        "there": 1,
        "missing": [paths[1]],
    }


def test_a_share_is_cut_across_sources_and_leaves_none_out(tmp_path: Path) -> None:
    mapping, registries = ImageMapping({}, tmp_path), Registries({})
    parts = [
        Wanted([ImageRequest(f"{part} {number}") for number in range(count)], mapping, None, registries)
        for part, count in enumerate((3, 0, 37, 1))
    ]
    everything = [request.name for part in parts for request in part.requests]
    for shares in (1, 2, 16, 100):
        cut = [share_of(parts, number, shares) for number in range(1, shares + 1)]
        names = [[request.name for part in share for request in part.requests] for share in cut]
        assert [name for share in names for name in share] == everything
        assert max(map(len, names)) - min(map(len, names)) <= 1


@pytest.fixture
def sleeping(small_rootfs: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A build on a terminal of two images whose first steps never end."""
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
