"""What a build does otherwise than Docker and nothing refuses is said while it is made, and not when it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.mapping import ImageMapping
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.store import ImageStore
from tests.support.builds import unpacked
from tests.support.namespaces import no_subordinate_ids

TOLD = ": other than in Docker: "
NO_OWNERS = ": no subordinate ids here (/etc/subuid): while steps run, every file is root's"


def told(place: Path, base: str, text: str) -> tuple[list[str], Path]:
    """What a build says of a Dockerfile, as ``LINE: …``, and its image."""
    (place / "context").mkdir(exist_ok=True)
    (place / "context" / "own").touch()
    (place / "context" / "Dockerfile").write_text(f"FROM base\n{text}")
    images, said = Images(ImageStore(place / "store"), builder=Builder()), list[str]()
    images.say = said.append
    dockerfile = Dockerfile(place / "context" / "Dockerfile")
    image = images.resolve_dockerfile(dockerfile, ImageMapping({"base": base}, place))
    return [line.partition("Dockerfile:")[2].replace(TOLD, ": ") for line in said if TOLD in line], image


def test_a_volume_is_told_where_any_image_is_built(busybox_rootfs: str, tmp_path: Path) -> None:
    text = "RUN mkdir /data\nVOLUME /data\nLABEL a=b\nRUN echo kept >/data/f\n"
    said, image = told(tmp_path, busybox_rootfs, text)
    assert said == ["3: a volume's directory is one like any other"]
    assert (unpacked(image, tmp_path / "tree") / "data" / "f").read_text() == "kept\n"
    assert told(tmp_path, busybox_rootfs, text) == ([], image)


@pytest.mark.parametrize("step", ["echo 10.0.0.1 lab >>/etc/hosts", "rm /etc/hosts"])
def test_names_of_hosts_that_a_step_changed_are_told(
    busybox_rootfs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    said, _ = told(tmp_path, busybox_rootfs, f"RUN cat /etc/hosts; touch /etc/other\nRUN {step}\n")
    assert said == ["3: /etc/hosts was changed, which is read-only there"]


def test_that_no_other_owners_can_be_had_is_told_once(busybox_rootfs: str, tmp_path: Path) -> None:
    text = "COPY --chown=7:8 own /file\nRUN stat -c %u:%g /file >/owner\nRUN touch /more\n"
    assert told(tmp_path, busybox_rootfs, text)[0] == []
    with no_subordinate_ids(tmp_path / "bin", "fakeroot"):
        said, image = told(tmp_path, busybox_rootfs, text.replace("more", "others"))
        assert said == ["4" + NO_OWNERS]  # the steps before were made with owners
        said, image = told(tmp_path, busybox_rootfs, text.replace("%u:%g", "%u.%g"))
        assert said == ["3" + NO_OWNERS]
    assert (unpacked(image, tmp_path / "tree") / "owner").read_text() == "0.0\n"
