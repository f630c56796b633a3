"""The image store and its commands: content-addressed, atomic, read-only for other users, and carried offline."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc.cli import main
from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.disk_quota import SITE_VARIABLES, VARIABLE, default_stores
from megaflow_hpc.environments.images.image_file import LABEL, image_start, working_directory
from megaflow_hpc.environments.images.layered import ImageStart, read_layered
from megaflow_hpc.environments.images.resolve import Images, definition_digest
from megaflow_hpc.environments.images.sources import ImageMapping, Registries, split_name
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.apptainer import clean_environment, find_apptainer
from megaflow_hpc.host.mounts import mount_of
from tests.support.oci import oci_archive
from tests.support.registries import Front, Registry, tree_layer
from tests.support.small_images import SmallImages, digest_of

Verb = Callable[..., tuple[int, str, str]]


# --- the store --------------------------------------------------------------------------------------------------------


def test_an_image_lies_under_the_digest_of_its_content(small_images: SmallImages, tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    first, second = map(Path, small_images.fill(store, 2))
    assert first != second
    for path in (first, second):
        assert path.stem == digest_of(path)
        assert path.stat().st_mode & 0o777 == 0o444
    again = store.make("another key", "the same content", lambda target: small_images.write(0, target))
    assert again == first
    assert [(image.digest, image.inodes) for image in store.images()] == sorted(
        (path.stem, sif.system_partition(path).inodes) for path in (first, second)
    )
    assert store.names()[first.stem] == ["the same content", "small image 0"]
    assert [path.name for path in (tmp_path / "store" / "work").glob("*/")] == []


def test_builders_of_one_image_wait_for_the_first(small_images: SmallImages, tmp_path: Path) -> None:
    built: list[str] = []

    def build(target: Path) -> None:
        built.append(target.parent.name)
        time.sleep(0.05)
        small_images.write(7, target)

    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(ImageStore(tmp_path / "store").make("key", "seven", build)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(found) == 4
    assert len(set(found)) == 1


def test_a_build_that_fails_or_is_killed_leaves_no_image_and_blocks_nobody(
    small_images: SmallImages, tmp_path: Path
) -> None:
    store = ImageStore(tmp_path / "store")

    def fail(target: Path) -> None:
        target.write_bytes(b"half")
        raise SiteError("no")

    with pytest.raises(SiteError):
        store.make("key", "x", fail)
    assert list(store.images()) == []
    code = """
import os, signal, sys
from pathlib import Path
from megaflow_hpc.environments.images.store import ImageStore
def build(target):
    target.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
ImageStore(sys.argv[1]).make("key", "x", build)
"""
    assert subprocess.run([sys.executable, "-c", code, store.root], check=False).returncode == -9
    assert len(store.leftovers()) == 1
    assert (store.root / "work" / "key.lock").exists()
    next_to_come = ImageStore(store.root)
    assert next_to_come.make("key", "x", lambda target: small_images.write(1, target)).exists()
    assert list((store.root / "work").iterdir()) == []


def test_a_store_of_somebody_else_is_read_and_never_written(
    small_images: SmallImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, own = tmp_path / "group", tmp_path / "own"
    shared = Path(small_images.fill(ImageStore(group), 1)[0])
    places = [group, group / "sha256", group / "names", group / "work"]
    for place in places:
        place.chmod(0o555)
    before = sorted(os.listdir(path) for path in places)
    monkeypatch.setenv("MEGAFLOW_IMAGE_STORE", str(group))
    assert ImageStore().find("small0") == shared
    with pytest.raises(
        SiteError, match=r"x: not in the image store .*group, which is not yours.*IMAGE_STORE=~/.*:.*group"
    ):
        ImageStore().make("other", "x", lambda target: small_images.write(1, target))
    monkeypatch.setenv("MEGAFLOW_IMAGE_STORE", f"{own}:{group}")
    assert ImageStore().find("small0") == shared
    mine = ImageStore().make("other", "x", lambda target: small_images.write(1, target))
    assert mine.is_relative_to(own)
    assert [image.path for image in ImageStore().images()] == [str(mine), str(shared)]
    assert sorted(os.listdir(path) for path in places) == before
    for place in places:
        place.chmod(0o755)


def test_a_store_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(SiteError, match=r"everybody may write to this image store; chmod o-w"):
        ImageStore(tmp_path / "store")


def test_a_group_store_gives_its_rooms_its_own_mode(small_images: SmallImages, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o2755)
    mask = os.umask(0o077)
    try:
        small_images.fill(ImageStore(tmp_path / "store"), 1)
    finally:
        os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "store").iterdir()} == {0o755}
    files = [path for path in (tmp_path / "store").rglob("*") if path.suffix in (".sif", ".json")]
    assert [path.stat().st_mode & 0o777 for path in files] == [0o444] * 3


def test_a_definitions_key_follows_what_it_copies(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("1")
    definition = tmp_path / "x.def"
    definition.write_text("Bootstrap: localimage\nFrom: base.sif\n%files\n    f /f\n%post\n    true\n")
    before = definition_digest(definition)
    (tmp_path / "f").write_text("2")
    assert definition_digest(definition) != before


def test_a_name_is_mapped_to_a_dockerfile_whose_base_is_mapped_too(tmp_path: Path) -> None:
    """tests/recipes builds such an image and runs it."""
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM base\nCOPY a /a\n")
    (tmp_path / "a").write_text("first")
    (tmp_path / "base").mkdir()
    images = Images(ImageStore(tmp_path / "store"))

    def key(**names: str) -> Path:
        mapping = ImageMapping({"index": "Dockerfile", **names}, tmp_path, "c.yaml: environment.images")
        return images.resolve("index", mapping, build=False)

    first = key(base="base")
    (tmp_path / "a").write_text("second")
    assert key(base="base") != first
    with pytest.raises(ConfigError, match=r"image 'base'.* is not mapped"):
        key()
    with pytest.raises(ConfigError, match="Dockerfile: its FROM is mapped to itself; map it to another image"):
        key(base="Dockerfile")


def test_without_build_sources_are_checked_and_nothing_is_made(tmp_path: Path) -> None:
    images = Images(ImageStore(tmp_path / "store"), Registries({}))
    path = images.resolve("a", ImageMapping({"a": "docker://debian:12"}, tmp_path), build=False)
    assert path.is_relative_to(images.store.root)
    assert not images.store.root.exists()
    assert list(images.store.images()) == []


def test_the_work_directory_of_an_image_that_was_pulled(small_rootfs: str, base_sif: Path, tmp_path: Path) -> None:
    program = {"Entrypoint": ["/entry"], "Cmd": ["serve", "all"], "ExposedPorts": {"80/tcp": {}, "53/udp": {}}}
    oci_archive(Path(small_rootfs, "etc"), tmp_path / "x.tar", "/app/src", **program)
    command = [find_apptainer(), "build", str(tmp_path / "x.sif"), f"oci-archive:{tmp_path / 'x.tar'}"]
    subprocess.run(command, env=clean_environment(tmp_path), check=True, capture_output=True)
    assert working_directory(tmp_path / "x.sif") == "/app/src"
    assert working_directory(base_sif) is None
    assert image_start(tmp_path / "x.sif") == ImageStart(("/entry",), ("serve", "all"), (80,))
    assert image_start(base_sif) == image_start(tmp_path) == image_start(tmp_path / "gone") == ImageStart()


def test_the_work_directory_in_a_label_and_of_what_is_no_image(tmp_path: Path) -> None:
    assert working_directory(tmp_path) is None
    labels = tmp_path / ".singularity.d" / "labels.json"
    labels.parent.mkdir()
    for text, found in ((json.dumps({LABEL: "/srv"}), "/srv"), (json.dumps({LABEL: "srv"}), None), ("[]", None)):
        labels.write_text(text)
        assert working_directory(tmp_path) == found
    (tmp_path / "x").write_bytes(b"not a SIF")
    assert working_directory(tmp_path / "x") is None
    assert working_directory(tmp_path / "gone") is None


# --- registries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("debian:12", ("docker.io", "library/debian:12")),
        ("org/image:1", ("docker.io", "org/image:1")),
        ("docker.io/debian", ("docker.io", "library/debian")),
        ("ghcr.io/a/b/c@sha256:0", ("ghcr.io", "a/b/c@sha256:0")),
        ("localhost/x", ("localhost", "x")),
        ("host:5000/x:1", ("host:5000", "x:1")),
    ],
)
def test_a_name_is_split_into_registry_and_path_as_docker_does(name: str, expected: tuple[str, str]) -> None:
    assert split_name(name) == expected


def test_mirrors_stand_for_registries() -> None:
    mirrors = {"docker.io": "hub.site.edu/proxy", "ghcr.io": "http://10.0.0.1:5000", "quay.io": "https://q.site.edu/"}
    registries = Registries(mirrors)
    assert registries.address("docker://debian:12") == ("docker://hub.site.edu/proxy/library/debian:12", False)
    assert registries.address("oras://ghcr.io/a/b:1") == ("oras://10.0.0.1:5000/a/b:1", True)
    assert registries.address("docker://quay.io/a:1") == ("docker://q.site.edu/a:1", False)
    assert registries.address("docker://other.io/a:1") == ("docker://other.io/a:1", False)


@pytest.fixture(scope="module")
def hub(registry: Registry, small_rootfs: str) -> str:
    """A mirror of Docker's registry with the image ``tiny:1``."""
    env = ["FROM_REGISTRY=it's here", "PATH=/usr/bin:/bin"]
    registry.push("hub/library/tiny", "1", [tree_layer(Path(small_rootfs))], Env=env, WorkingDir="/usr", Cmd=["ls"])
    return "/hub"


def test_pull_fetches_through_a_mirror_and_knows_the_image_by_its_own_name(
    verb: Verb, between: Front, hub: str
) -> None:
    mirror = f"docker.io=http://{between.address}{hub}"
    status, out, said = verb("pull", "docker://tiny:1", "--mirror", mirror, "--json")
    assert status == 0
    assert re.search(r"^docker://tiny:1: \d+\.\d MB to fetch$", said, re.MULTILINE)
    path = Path(json.loads(out)["images"]["docker://tiny:1"])
    assert between.asked[0][0] == "/v2/hub/library/tiny/manifests/1"
    image = read_layered(path)
    assert (image.base, len(image.layers), image.workdir) == (None, 1, "/usr")
    assert image_start(path) == image.start == ImageStart(command=("ls",))
    assert image.settings == "export FROM_REGISTRY='it'\"'\"'s here'\nexport PATH=/usr/bin:/bin\n"
    asked = len(between.asked)
    assert verb("pull", "docker://tiny:1", "--air-gapped")[0] == 0  # the image is stored, so no request is sent
    assert len(between.asked) == asked
    listed = json.loads(verb("list", "--json")[1])["images"]
    assert [(row["sources"], row["path"]) for row in listed] == [(["docker://tiny:1"], str(path))]


def test_a_registry_that_does_not_have_it_is_the_sites_error_with_a_remedy(
    verb: Verb, registry: Registry, hub: str
) -> None:
    for name in ("docker://absent:1", "oras://docker.io/library/absent:1"):
        status, out, said = verb("pull", name, "--mirror", f"docker.io=http://{registry.address}{hub}")
        assert (status, out) == (3, "")
        assert "library/absent:1" in said
        assert f"for {name}" in said
        assert "name a mirror (environment.mirrors, --mirror)" in said


# --- without network --------------------------------------------------------------------------------------------------


@pytest.mark.lab
@pytest.mark.usefixtures("slurm")
def test_an_air_gapped_campaign_names_the_image_it_lacks(
    make_campaign: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MEGAFLOW_IMAGE_STORE", str(tmp_path / "store"))
    campaign = make_campaign(1)
    text = campaign.read_text()
    images = "images: {base: docker://debian:12}, air_gapped: true"
    campaign.write_text(text.replace(text[text.index("images:") : text.index("}}") + 1], images))
    assert main(["plan", str(campaign), "--run-dir", str(tmp_path / "run")]) == 3
    said = capsys.readouterr().err
    assert "base: docker://debian:12: not in the image store, and nothing may be fetched here" in said
    assert "images build CAMPAIGN --manifest FILE" in said
    assert not (tmp_path / "run").exists()
    definition = tmp_path / "x.def"
    definition.write_text("Bootstrap: docker\nFrom: debian:12\n")
    campaign.write_text(campaign.read_text().replace("docker://debian:12", "x.def"))
    assert main(["plan", str(campaign), "--run-dir", str(tmp_path / "run")]) == 3
    assert "x.def (Bootstrap: docker): not in the image store" in capsys.readouterr().err


def test_images_are_carried_with_a_manifest_and_checked_where_they_arrive(
    verb: Verb, make_campaign: Callable[..., Path], registry: Registry, hub: str, tmp_path: Path
) -> None:
    campaign = make_campaign(1)
    text = campaign.read_text()
    campaign.write_text(
        text.replace(text[text.index("images:") : text.index("}}") + 1], "images: {base: docker://tiny:1}")
    )
    manifest = tmp_path / "images.json"
    status, out, _ = verb("manifest", campaign, "--output", manifest, "--json")
    assert status == 1
    assert json.loads(out)["missing"] == ["docker://tiny:1"]

    mirror = f"docker.io=http://{registry.address}{hub}"
    assert verb("build", campaign, "--mirror", mirror, "--manifest", manifest)[0] == 0
    assert verb("manifest", campaign)[0] == 0
    carried = tmp_path / "carried"
    for file in json.loads(manifest.read_text())["images"][0]["files"]:
        (carried / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tmp_path / "store" / file, carried / file)
    other = tmp_path / "other-store"

    status, _, said = verb("pull", "--manifest", manifest, "--store", other)
    assert status == 3  # without the mirror no registry can be reached
    empty = tmp_path / "empty"
    empty.mkdir()
    status, _, said = verb("pull", "--manifest", manifest, "--from", empty, "--store", other)
    assert status == 3
    assert "1 of 1 images are not in" in said
    assert "docker://tiny:1 (" in said
    status, out, _ = verb("pull", "--manifest", manifest, "--from", carried, "--store", other, "--json")
    assert status == 0
    path = Path(json.loads(out)["images"]["docker://tiny:1"])
    assert path.is_relative_to(other)
    assert path.stem == digest_of(path)
    assert {file.name for file in (other / "layers").glob("*[!n]")} == {
        each.digest for each in read_layered(path).layers
    }
    status, out, _ = verb("build", campaign, "--air-gapped", "--store", other, "--json")
    assert (status, json.loads(out)["images"]) == (0, {"base": str(path)})

    damaged = next((carried / "layers").iterdir())
    damaged.chmod(0o644)
    with open(damaged, "r+b") as file:
        file.seek(-5000, os.SEEK_END)
        file.write(b"damage")
    status, _, said = verb("pull", "--manifest", manifest, "--from", carried, "--store", tmp_path / "third")
    assert status == 3
    assert damaged.name in said
    assert list(ImageStore(tmp_path / "third").images()) == []
    manifest.write_text("{}")
    assert verb("pull", "--manifest", manifest)[0] == 2


# --- commands ---------------------------------------------------------------------------------------------------------


def test_a_definition_is_built_once_and_a_dockerfile_with_its_bases_mapped(verb: Verb, tmp_path: Path) -> None:
    (tmp_path / "marker").write_text("x")
    definition = tmp_path / "tiny.def"
    definition.write_text("Bootstrap: scratch\n%files\n    marker /marker\n")
    built = json.loads(verb("build", definition, "--json")[1])["images"][str(definition)]
    changed = Path(built).stat().st_mtime_ns
    assert verb("build", definition)[0] == 0
    assert Path(built).stat().st_mtime_ns == changed
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM org/base:1\nCMD x\n")
    status, _, said = verb("build", dockerfile, "--map", "other=x.sif")
    assert status == 2
    assert "--map: image 'org/base:1' is not mapped" in said
    assert f"{dockerfile}:2: CMD is left out" in said


def test_a_build_that_fails_is_the_sites_error_with_its_cause(verb: Verb, tmp_path: Path) -> None:
    definition = tmp_path / "bad.def"
    definition.write_text("Bootstrap: nothing-of-that-name\nFrom: x\n")
    status, _, said = verb("build", definition)
    assert status == 3
    assert "nothing-of-that-name" in said
    assert list((tmp_path / "store" / "sha256").iterdir()) == []
    assert list((tmp_path / "store" / "work").glob("*/")) == []


def test_stage_list_and_prune_the_copies_of_a_node(verb: Verb, small_images: SmallImages, tmp_path: Path) -> None:
    paths = small_images.fill(ImageStore(), 2)
    status, out, _ = verb("stage", Path(paths[0]).stem[:12], paths[1], "--json")
    assert status == 0
    staged = json.loads(out)
    assert [row["image"] for row in staged["staged"]] == paths
    assert all(Path(row["path"], "etc/number").exists() for row in staged["staged"])
    assert staged["copied_bytes"] == sum(os.path.getsize(path) for path in paths)
    assert json.loads(verb("stage", *paths, "--json")[1])["copied_bytes"] == 0
    assert len(json.loads(verb("list", "--staged", "--json")[1])["copies"]) == 2
    assert json.loads(verb("prune", "--staged", "--dry-run", "--json")[1])["freed_bytes"] > 0
    assert len(json.loads(verb("list", "--staged", "--json")[1])["copies"]) == 2
    assert len(json.loads(verb("prune", "--staged", "--json")[1])["removed"]) == 2
    assert json.loads(verb("list", "--staged", "--json")[1])["copies"] == []
    status, _, said = verb("stage", "abc")
    assert status == 2
    assert "abc: neither a file nor the digest of an image" in said


def test_prune_removes_what_is_named_and_what_is_old(verb: Verb, small_images: SmallImages, tmp_path: Path) -> None:
    paths = [Path(path) for path in small_images.fill(ImageStore(), 3)]
    size = paths[0].stat().st_size
    assert json.loads(verb("prune", paths[0].stem, "--dry-run", "--json")[1]) == {
        "removed": [paths[0].stem],
        "layers": [],
        "freed_bytes": size,
        "dry_run": True,
    }
    assert json.loads(verb("prune", paths[0].stem[:16], "--json")[1])["freed_bytes"] == size
    assert ImageStore().find("small0") is None
    assert json.loads(verb("prune", "--json")[1])["removed"] == []
    assert json.loads(verb("prune", "--older-than", "1", "--json")[1])["removed"] == []
    assert len(json.loads(verb("prune", "--older-than", "0", "--json")[1])["removed"]) == 2
    assert list(ImageStore().images()) == []
    assert verb("prune", "0000")[0] == 2


def test_images_are_kept_where_there_is_room_and_are_not_made_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (VARIABLE, *SITE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    home, scratch, named = tmp_path / "home", tmp_path / "scratch", tmp_path / "named"
    scratch.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert default_stores() == [home / ".megaflow-hpc" / "images"]
    monkeypatch.setenv("PSCRATCH", str(scratch))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "gone"))
    own = scratch / f"megaflow-hpc-{os.getuid()}" / "images"
    assert default_stores() == [own]
    (home / ".megaflow-hpc" / "images").mkdir(parents=True)
    assert default_stores() == [own, home / ".megaflow-hpc" / "images"]
    assert default_stores(f"{named}:/group/images") == [named, Path("/group/images")]
    # If a quota leaves little space, another directory is chosen, and a named store there is refused.
    device = mount_of(scratch).device
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "quota").write_text(f"#!/bin/sh\necho '{device} 1000 0 3000 0 10 0 0 0'\n")
    (programs / "quota").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert default_stores() == [home / ".megaflow-hpc" / "images"]
    monkeypatch.setenv(VARIABLE, str(named))
    with pytest.raises(SiteError, match=r"image store .*/named: 2 MB \(quota\) and .* less than 1000 MB"):
        ImageStore(named="/elsewhere").prepare("docker://debian:12")
    assert not named.exists()
    own.mkdir(parents=True)
    monkeypatch.delenv(VARIABLE)
    assert default_stores()[0] == own  # an existing store is kept
