"""Pulls from a registry into the store: each layer is fetched once, and killed pulls leave a consistent store."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images import pull
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.image_file import working_directory
from megaflow_hpc.environments.images.layered import read_layered
from megaflow_hpc.environments.images.pull import exports
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.sources import ImageMapping, Registries
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import SiteError
from tests.support.builds import layers_of
from tests.support.registries import Front, Layer, Registry, layer, noise, says, tree_layer
from tests.support.sandboxes import runs

Resolve = Callable[[str], Path]


@pytest.fixture
def images(tmp_path: Path, between: Front) -> Images:
    """A store of this test, with the registry as a mirror of ``lab.org``."""
    return Images(ImageStore(tmp_path / "store"), Registries({"lab.org": f"http://{between.address}"}))


def pulled(images: Images, name: str) -> Path:
    return images.resolve_source(f"docker://lab.org/{name}", "test")


def stored(images: Images) -> Mapping[str, int]:
    """Sizes of the layer blobs in the store."""
    files = (images.store.root / "layers").iterdir()
    return {file.name: file.stat().st_size for file in files if not file.name.endswith(".json")}


def test_images_made_as_swe_bench_makes_them_are_stored_at_the_cost_of_what_differs(
    registry: Registry, between: Front, images: Images
) -> None:
    """12 images of 3 environments over one base."""
    base = layer({"usr/lib/base": noise("system", 1_000_000)})
    blobs = {base.digest: len(base.blob)}
    names = []
    for number in range(3):
        environment = layer({f"opt/{number}": noise(f"packages {number}", 300_000)}, "zstd" if number % 2 else "gzip")
        blobs[environment.digest] = len(environment.blob)
        for instance in range(4):
            name = f"sweb.eval.{number}-{instance}"
            source = layer({"testbed/source.py": noise(name, 1000)})
            blobs[source.digest] = len(source.blob)
            registry.push(name, "latest", [base, environment, source], WorkingDir="/testbed")
            names.append(name)
    paths = [pulled(images, name) for name in names]
    assert len({path.name for path in paths}) == 12
    assert stored(images) == blobs
    assert sorted(digest for digest in between.blobs() if digest in blobs) == sorted(blobs)
    everything = sum(file.stat().st_size for file in images.store.root.rglob("*") if file.is_file())
    assert everything <= 1.05 * sum(blobs.values())
    for path in paths:
        image = read_layered(path)
        assert (image.base, image.workdir, image.layers[0].digest) == (None, "/testbed", base.digest)
        assert image.layers[0].inodes == 1
    asked = len(between.asked)
    again = Images(ImageStore(images.store.root), images.registries)
    assert [pulled(again, name) for name in names] == paths
    assert len(between.asked) == asked


def test_layers_without_files_are_left_out_and_one_that_comes_twice_counts_last(
    registry: Registry, images: Images
) -> None:
    one, two, empty = layer({"a": b"1"}), layer({"a": b"2"}), layer({})
    registry.push("chain", "1", [one, empty, two, one, empty], Env=["A=$HOME 'x'", "no name", "B-C=1", "=2"])
    image = read_layered(pulled(images, "chain:1"))
    assert [each.digest for each in image.layers] == [two.digest, one.digest]
    assert image.settings == "export A='$HOME '\"'\"'x'\"'\"''\n"
    assert image.workdir is None


def test_variables_mean_to_a_shell_what_they_say() -> None:
    values = {"PATH": "/opt/bin:/bin", "A": "`id`", "B": "x\ny", "C": "$(id) \\ \"'", "D": ""}
    text = exports([f"{name}={value}" for name, value in values.items()])
    shown = "".join(f'printf "%s\\0" "${name}"\n' for name in values)
    done = subprocess.run(["/bin/sh", "-c", text + shown], env={}, capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == list(values.values())


def test_pulls_at_once_fetch_a_shared_layer_once(registry: Registry, between: Front, images: Images) -> None:
    shared = layer({"shared": noise("shared at once", 200_000)})
    for number in range(4):
        registry.push(f"at-once-{number}", "1", [shared, layer({str(number): b"own"})])
    arrived = threading.Barrier(4)

    def together(handler: BaseHTTPRequestHandler) -> None:
        arrived.wait(60)
        between.passed_on(handler)

    for number in range(4):  # all have listed their missing layers before any layer is fetched
        between.rules[f"at-once-{number}/manifests/1"] = together
    failed: list[BaseException] = []

    def one(number: int) -> None:
        try:
            pulled(Images(ImageStore(images.store.root), images.registries), f"at-once-{number}:1")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert between.blobs().count(shared.digest) == 1
    assert len(stored(images)) == 5


def test_what_came_wrong_is_not_stored(registry: Registry, between: Front, images: Images) -> None:
    good, no_archive = layer({"a": b"good"}), Layer(b"no archive, but a layer by its name" * 100, "gzip")
    registry.push("wrong", "1", [good, no_archive])
    with pytest.raises(SiteError, match=rf"{no_archive.digest}: not a layer of an image.*\n.*out of reach: map"):
        pulled(images, "wrong:1")
    assert list(images.store.images()) == []
    assert set(stored(images)) <= {good.digest}
    assert images.store.leftovers() == []


@pytest.mark.parametrize("how", ["another layer", "bytes"])
def test_another_blob_than_was_asked_for_is_not_stored(
    registry: Registry, between: Front, images: Images, how: str
) -> None:
    """Both have the same size, so only the digest differs."""
    right, wrong = layer({"a": b"right"}, ""), layer({"a": b"wrong"}, "")
    registry.push("another", "1", [right])
    sent = wrong.blob if how == "another layer" else bytes(7) + wrong.blob[7:]
    between.rules[right.digest] = says(200, sent)
    with pytest.raises(
        SiteError, match=rf"{right.digest}: the received blob has the digest {sha256(sent).hexdigest()}"
    ):
        pulled(images, "another:1")
    assert list(images.store.images()) == []
    assert stored(images) == {}
    assert images.store.leftovers() == []


def test_a_pull_says_how_far_it_is_and_that_there_is_no_room(
    registry: Registry, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.push("large", "1", [layer({"a": noise("large", 3_000_000)}, "")])
    said: list[str] = []
    images.say = said.append
    monkeypatch.setattr(pull, "SPARE_BYTES", 1 << 60)
    with pytest.raises(SiteError, match=r"2 MiB to fetch, and only \d+ MiB free at .*; set MEGAFLOW_IMAGE_STORE to a"):
        pulled(images, "large:1")
    assert said == []
    monkeypatch.undo()
    monkeypatch.setattr(pull, "REPORT_INTERVAL_S", 0.0)
    pulled(images, "large:1")
    assert said[0] == "docker://lab.org/large:1: 3.0 MB to fetch"
    assert said[-1] == "docker://lab.org/large:1: 3.0 of 3.0 MB, 0 s left"


def test_a_sandbox_starts_from_layers_as_their_maker_meant_it(
    registry: Registry, images: Images, busybox_rootfs: str, scratch: Path
) -> None:
    """The base is like Docker's, without files of Apptainer. One layer changes files and one hides files."""
    base = tree_layer(Path(busybox_rootfs))
    environment = layer({"opt/tool": b"new", "opt/old": b"x", "etc/motd": b"hello"}, "zstd")
    instance = layer({"opt/.wh.old": b"", "testbed/source.py": b"pass"})
    env = ["PATH=/opt:/bin", "GREETING=it's $HOME"]
    registry.push("eval", "1", [base, environment, instance], Env=env, WorkingDir="/testbed")

    async def look(sandbox: ApptainerSandbox) -> str:
        done = await sandbox.exec('pwd; echo "$PATH"; echo "$GREETING"; cat /etc/motd; echo; echo /opt/* /testbed/*')
        return done.stdout

    path = str(pulled(images, "eval:1"))
    said = runs(path, scratch)(look, workdir=working_directory(path))
    assert said.splitlines() == ["/testbed", "/opt:/bin", "it's $HOME", "hello", "/opt/tool /testbed/source.py"]


def test_a_dockerfile_on_an_image_of_a_registry_adds_its_layers(
    registry: Registry, images: Images, busybox_rootfs: str, tmp_path: Path
) -> None:
    registry.push("team/base", "1", [tree_layer(Path(busybox_rootfs))], Env=["PATH=/bin"], WorkingDir="/opt")
    dockerfile = tmp_path / "context" / "Dockerfile"
    dockerfile.parent.mkdir()
    dockerfile.write_text("FROM base\nRUN echo made >/opt/made\n")
    images.builder = Builder()
    mapping = ImageMapping({"base": "docker://lab.org/team/base:1"}, tmp_path)
    path = images.resolve_dockerfile(Dockerfile(dockerfile), mapping)
    below = read_layered(pulled(images, "team/base:1"))
    image = read_layered(path)
    assert image.layers[: len(below.layers)] == below.layers
    assert len(image.layers) == len(below.layers) + 1
    assert layers_of(path).read("opt/made") == b"made\n"


def test_steps_run_as_the_user_of_the_image_that_they_start_from(
    registry: Registry, images: Images, busybox_rootfs: str, tmp_path: Path
) -> None:
    """Differences from Docker are reported while steps are carried out."""
    registry.push("team/user", "1", [tree_layer(Path(busybox_rootfs))], Env=["PATH=/bin"], User="12:34")
    dockerfile = tmp_path / "context" / "Dockerfile"
    dockerfile.parent.mkdir()
    dockerfile.write_text(
        "FROM base\nWORKDIR /own\nRUN id -u >who && id -g >>who\n"
        "USER root\nRUN --mount=type=cache,target=/c --mount=source=.,target=/s id -u >/root-did\n"
    )
    images.builder, said = Builder(), list[str]()
    images.say = said.append
    path = images.resolve_dockerfile(
        Dockerfile(dockerfile), ImageMapping({"base": "docker://lab.org/team/user:1"}, tmp_path)
    )
    made = layers_of(path)
    assert (made.read("own/who"), made.read("root-did")) == (b"12\n34\n", b"0\n")
    assert read_layered(path).user == "root"
    assert read_layered(pulled(images, "team/user:1")).user == "12:34"
    notes = [line.partition("Dockerfile:")[2] for line in said if "differs from Docker" in line]
    assert notes == [
        "3: differs from Docker: /tmp and /var/tmp are made writable for every user",
        "5: differs from Docker: a cache mount is empty in every step",
        "5: differs from Docker: a bind mount is a copy; what is written to it is lost, and does not fail",
    ]
