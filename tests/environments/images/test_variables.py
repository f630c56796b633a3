"""The variables of base images in steps and sandboxes: all of them, each once, for every form of image."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.sources import ImageMapping, Registries
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from tests.support.builds import layers_of
from tests.support.registries import Front, Registry, tree_layer
from tests.support.sandboxes import runs

SAY = 'echo "$PATH|$X|$Y|$USER|${LOGNAME-none}|$HOME"'
OF_DOCKER = """\
#!/bin/sh
export PATH="/opt/bin:/bin"
export X="${X:-"base"}"
export USER="${USER:-"ada lovelace"}"
export HOME="${HOME:-"/ignored"}"
"""
"""Variables as Apptainer writes them for a Docker image. ``HOME`` is the caller's by its own rule."""


@pytest.fixture(params=["of a registry", "of Apptainer"])
def base(request: pytest.FixtureRequest, tmp_path: Path, busybox_rootfs: str) -> str:
    """An image that sets variables, including ``USER``."""
    if request.param == "of a registry":
        registry: Registry = request.getfixturevalue("registry")
        env = ["PATH=/opt/bin:/bin", "X=base", "USER=ada lovelace", "HOME=/srv"]
        registry.push("team/variables", "1", [tree_layer(Path(busybox_rootfs))], Env=env)
        return "docker://lab.org/team/variables:1"
    tree = tmp_path / "base"
    shutil.copytree(busybox_rootfs, tree, symlinks=True)
    (tree / ".singularity.d" / "env").mkdir(parents=True)
    (tree / ".singularity.d" / "env" / "10-docker2singularity.sh").write_text(OF_DOCKER)
    return str(tree)


class Made:
    """Builds Dockerfiles on named images, and reads the files that their steps wrote."""

    def __init__(self, place: Path, registries: Registries) -> None:
        self.place = place
        self.images = Images(ImageStore(place / "store"), registries, Builder())
        self.count = 0

    def image(self, base: str, text: str) -> Path:
        self.count += 1
        context = self.place / f"context{self.count}"
        context.mkdir()
        (context / "Dockerfile").write_text(f"FROM base\n{text}")
        return self.images.resolve_dockerfile(
            Dockerfile(context / "Dockerfile"), ImageMapping({"base": base}, self.place)
        )

    def said(self, image: Path, *names: str) -> list[list[str]]:
        return [layers_of(image).read(name).decode().rstrip("\n").split("|") for name in names]


@pytest.fixture
def made(tmp_path: Path, between: Front) -> Made:
    return Made(tmp_path, Registries({"lab.org": f"http://{between.address}"}))


def in_sandbox(image: Path, scratch: Path) -> list[str]:
    async def look(sandbox: ApptainerSandbox) -> list[str]:
        return (await sandbox.exec(SAY)).stdout.rstrip("\n").split("|")

    found: list[str] = runs(str(image), scratch)(look)
    return found


def test_a_step_has_the_variables_of_what_it_starts_from_and_those_of_the_file_build_on_them_once(
    made: Made, base: str, scratch: Path
) -> None:
    home = "/srv" if base.startswith("docker:") else "/root"
    first = made.image(base, f'RUN {SAY} >/one\nENV X=a$X Y="b c" PATH=/own:$PATH\nRUN {SAY} >/two\n')
    one, two = made.said(first, "one", "two")
    assert (one[0].split(":")[:2], one[1:]) == (["/opt/bin", "/bin"], ["base", "", "ada lovelace", "none", home])
    assert (two[0], two[1:]) == (f"/own:{one[0]}", ["abase", "b c", "ada lovelace", "none", home])
    inside = in_sandbox(first, scratch)
    assert (inside[0].count("/own"), inside[1:]) == (1, ["abase", "b c", "root", "root", "/root"])

    second = made.image(str(first), f"RUN {SAY} >/three\nENV LOGNAME=eve HOME=/var\nRUN {SAY} >/four\n")
    three, four = made.said(second, "three", "four")
    assert three == two
    assert four == [*two[:4], "eve", "/var"]
    assert in_sandbox(second, scratch) == inside


def test_an_image_that_was_written_to_a_sif_keeps_its_variables_below_others(
    made: Made, base: str, scratch: Path, tmp_path: Path
) -> None:
    first = made.image(base, "ENV X=a$X PATH=/own:$PATH\n")
    Builder().export(first, tmp_path / "first.sif")
    second = made.image(str(tmp_path / "first.sif"), f"ENV Y=b$X\nRUN {SAY} >/said\n")
    [said] = made.said(second, "said")
    assert (said[0].count("/own"), said[1:4]) == (1, ["abase", "babase", "ada lovelace"])
    Builder().export(second, tmp_path / "second.sif")
    inside = in_sandbox(tmp_path / "second.sif", scratch)
    assert (inside[0].count("/own"), inside[1:3]) == (1, ["abase", "babase"])


def test_a_step_is_made_anew_where_only_the_variables_below_it_differ(
    made: Made, registry: Registry, busybox_rootfs: str
) -> None:
    tree = tree_layer(Path(busybox_rootfs))
    found = []
    for value in ("1", "2"):
        registry.push("team/same", value, [tree], Env=["PATH=/bin", f"X={value}"])
        found += made.said(made.image(f"docker://lab.org/team/same:{value}", "RUN echo $X >/x\n"), "x")
    assert found == [["1"], ["2"]]


def test_a_value_keeps_what_others_take_for_ends_of_lines(
    made: Made, registry: Registry, busybox_rootfs: str, scratch: Path
) -> None:
    value = "a\x0bb\x0cc\x85d\u2028e\nf\rg"
    registry.push("team/lines", "1", [tree_layer(Path(busybox_rootfs))], Env=["PATH=/bin", f"X={value}"])
    image = made.image("docker://lab.org/team/lines:1", 'RUN printf "%s" "$X" >/x\n')

    async def look(sandbox: ApptainerSandbox) -> bytes:
        return (await sandbox.exec('printf "%s" "$X"')).stdout_bytes

    assert layers_of(image).read("x") == value.encode()
    assert runs(str(image), scratch)(look) == value.encode()
