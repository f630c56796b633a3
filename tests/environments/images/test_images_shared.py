"""Layered images in a store: listed, carried, exported, and pruned together with layers that only they use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc.environments.images import pruning
from megaflow_hpc.environments.images.layered import read_layered
from megaflow_hpc.environments.images.pruning import prune
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.files import remove_tree
from tests.support.builds import unpacked
from tests.support.layers import add_layer
from tests.support.small_images import SmallImages, digest_of

Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store(verb: Verb, small_images: SmallImages) -> ImageStore:
    """A store with a SIF, small image 0."""
    found = ImageStore()
    small_images.fill(found, 1)
    return found


def built(verb: Verb, store: ImageStore, place: Path, *names: str) -> list[Path]:
    """Builds images that share their base and one layer, and have another layer with ``name``."""
    base = next(image for image in store.images() if image.path.endswith(".sif"))
    place.mkdir(exist_ok=True)
    contents = {"shared": "shared by all" * 1000, **{name: name for name in names}}
    for name, text in contents.items():
        (place / name).write_text(text)
        os.utime(place / name, (1e9, 1e9))  # COPY keeps the mtime, so another would make another layer
    dockerfiles = []
    for name in names:
        dockerfiles.append(place / f"{name}.Dockerfile")
        dockerfiles[-1].write_text(f"FROM base\nCOPY shared /shared\nCOPY {name} /name\nWORKDIR /etc\n")
    status, out, said = verb("build", *dockerfiles, "--map", f"base={base.path}", "--json")
    assert status == 0, said
    return [Path(json.loads(out)["images"][str(path)]) for path in dockerfiles]


def blobs(store: Path) -> set[str]:
    return {path.name for path in (store / "layers").iterdir() if not path.name.endswith(".json")}


def test_what_goes_takes_along_what_no_other_image_has(verb: Verb, store: ImageStore, tmp_path: Path) -> None:
    one, two = built(verb, store, tmp_path / "context", "one", "two")
    base = store.image(read_layered(one).base.digest)  # type: ignore[union-attr]
    assert base is not None
    chain = [layer.digest for layer in read_layered(one).layers]
    own = set(chain) - {layer.digest for layer in read_layered(two).layers}
    assert (len(chain), len(own), len(blobs(store.root))) == (2, 1, 3)

    listed = {row["digest"]: row for row in json.loads(verb("list", "--json")[1])["images"]}
    sizes = {layer.digest: layer.bytes for layer in read_layered(one).layers}
    assert listed[one.stem]["own_bytes"] == sum(sizes[digest] for digest in own)
    assert listed[one.stem]["own_bytes"] + listed[one.stem]["shared_bytes"] == sum(sizes.values()) + base.bytes
    assert (listed[base.digest]["own_bytes"], listed[base.digest]["shared_bytes"]) == (base.bytes, 0)

    status, _, said = verb("prune", base.digest)
    assert status == 2
    assert "the base of 2 images of" in said
    would = json.loads(verb("prune", one.stem, "--dry-run", "--json")[1])
    assert len(blobs(store.root)) == 3
    gone = json.loads(verb("prune", one.stem, "--json")[1])
    assert {**would, "dry_run": False} == gone
    assert (gone["removed"], set(gone["layers"])) == ([one.stem], own)
    assert gone["freed_bytes"] > sum(sizes[digest] for digest in own)
    assert blobs(store.root) == {layer.digest for layer in read_layered(two).layers}

    (again,) = built(verb, store, tmp_path / "context", "one")  # the step of a removed layer is repeated
    assert (again, blobs(store.root) >= own) == (one, True)
    gone = json.loads(verb("prune", base.digest, one.stem, two.stem, "--json")[1])
    assert (len(gone["removed"]), len(gone["layers"])) == (3, 3)
    assert [list((store.root / room).iterdir()) for room in ("sha256", "layers", "names")] == [[]] * 3
    left = [json.loads(path.read_text()) for path in (store.root / "steps").iterdir()]
    assert {step["layer"] for step in left} == {""}  # WORKDIR, which changes no file


def test_layers_that_no_image_had_stay_for_a_day_and_the_base_of_what_stays_for_ever(
    verb: Verb, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = built(verb, store, tmp_path / "context", "one")
    with store.layers.making("another") as place:
        shutil.copy(store.layers.path(read_layered(one).layers[0].digest), place / "copy")
        assert json.loads(verb("prune", one.stem, "--dry-run", "--json")[1])["layers"] == []  # a build is running
    store.remove(one.stem)
    assert prune(store).layers == ()
    with monkeypatch.context() as patched:
        patched.setattr(pruning, "DAY_S", -1.0)
        assert len(prune(store, dry_run=True).layers) == 2
    (again,) = built(verb, store, tmp_path / "context", "one")
    kept = json.loads((again.with_suffix(".json")).read_text())["created_at"]
    note = again.with_suffix(".json")
    note.chmod(0o644)
    note.write_text(json.dumps({**json.loads(note.read_text()), "created_at": kept + 1e6}))
    assert json.loads(verb("prune", "--older-than", "0", "--json")[1])["removed"] == []
    again.chmod(0o644)
    again.write_bytes(b"damaged")
    with pytest.raises(SandboxError, match=r"cannot be read as an image"):
        prune(store)
    assert len(blobs(store.root)) == 2


def test_a_store_of_the_old_version_is_read_and_added_to(verb: Verb, store: ImageStore, tmp_path: Path) -> None:
    for room in ("layers", "steps"):
        (store.root / room).rmdir()
    assert store.find("small0")
    assert [row["own_bytes"] > 0 for row in json.loads(verb("list", "--json")[1])["images"]] == [True]
    assert json.loads(verb("prune", "--json")[1])["removed"] == []
    assert built(verb, store, tmp_path / "context", "one")[0].exists()


def test_images_of_a_group_are_built_on_without_copying_them(
    verb: Verb, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = built(verb, store, tmp_path / "context", "one")
    group = store.root
    own = tmp_path / "own"
    monkeypatch.setenv("MEGAFLOW_IMAGE_STORE", f"{own}:{group}")
    places = [group, *(path for path in group.iterdir() if path.is_dir())]
    for place in places:
        place.chmod(0o555)
    mine = ImageStore()
    assert built(verb, mine, tmp_path / "context", "one") == [one]
    (two,) = built(verb, mine, tmp_path / "context", "two")
    assert two.is_relative_to(own)
    shared = read_layered(two).layers[0].digest
    assert (own / "layers" / shared).readlink() == group / "layers" / shared
    assert not (own / "layers" / read_layered(two).layers[1].digest).is_symlink()
    base = read_layered(two).base
    assert base is not None
    assert Path(base.path).resolve().parent == group / "sha256"
    rows = json.loads(verb("list", "--json")[1])["images"]
    assert sorted(row["digest"] for row in rows) == sorted([base.digest, one.stem, two.stem])
    for place in places:
        place.chmod(0o755)

    # The group removes its image and the layer that a link refers to. The layer is made again.
    assert verb("prune", one.stem, "--store", group)[0] == 0
    assert not mine.is_complete(two)
    (again,) = built(verb, mine, tmp_path / "context", "two")
    assert mine.is_complete(again)
    assert not (own / "layers" / read_layered(again).layers[0].digest).is_symlink()
    doomed = sorted({two.stem, again.stem})  # repeated steps leave other mtimes
    assert json.loads(verb("prune", *doomed, base.digest, "--json", "--store", own)[1])["removed"] != []
    assert (group / "sha256" / f"{base.digest}.sif").exists()


def test_a_manifest_names_base_and_layers_and_its_files_may_lie_side_by_side(
    verb: Verb, store: ImageStore, tmp_path: Path, make_campaign: Callable[..., Path]
) -> None:
    base = next(store.images())
    context = tmp_path / "context"
    context.mkdir()
    (context / "file").write_text("x")
    (context / "Dockerfile").write_text("FROM base\nCOPY file /file\n")
    manifest = tmp_path / "images.json"
    words = ("--map", f"base={base.path}", "--manifest", manifest)
    assert verb("build", context / "Dockerfile", *words)[0] == 0
    (row,) = json.loads(manifest.read_text())["images"]
    image = read_layered(store.root / row["files"][0])
    assert row["base"] == {"digest": base.digest, "bytes": base.bytes}
    assert row["layers"] == [{"digest": layer.digest, "bytes": layer.bytes} for layer in image.layers]
    assert row["bytes"] == sum((store.root / file).stat().st_size for file in row["files"])

    flat = tmp_path / "flat"
    flat.mkdir()
    for file in row["files"]:
        shutil.copy2(store.root / file, flat)
    other = tmp_path / "other"
    status, out, said = verb("pull", "--manifest", manifest, "--from", flat, "--store", other, "--json")
    assert status == 0, said
    (path,) = json.loads(out)["images"].values()
    assert sorted(str(file.relative_to(other)) for file in [Path(path), *other.glob("sha256/*.sif")]) == sorted(
        file for file in row["files"] if not file.startswith("layers/")
    )
    assert ImageStore(other).is_complete(path)

    # A layer is missing, then the base has the wrong digest. Last comes a manifest of version 1.
    lost = (flat / image.layers[0].digest).rename(tmp_path / "lost")
    status, _, said = verb("pull", "--manifest", manifest, "--from", flat, "--store", tmp_path / "third")
    assert (status, f"layers/{image.layers[0].digest}" in said) == (3, True)
    lost.rename(flat / image.layers[0].digest)
    sif = flat / f"{base.digest}.sif"
    sif.chmod(0o644)
    sif.write_bytes(sif.read_bytes()[:-1] + b"x")
    status, _, said = verb("pull", "--manifest", manifest, "--from", flat, "--store", tmp_path / "third")
    assert (status, base.digest in said) == (3, True)
    assert list(ImageStore(tmp_path / "third").images()) == []
    old = {"key": "k", "source": "small", "digest": base.digest, "bytes": base.bytes}
    manifest.write_text(json.dumps({"format": "megaflow-hpc/images", "format_version": 1, "images": [old]}))
    status, out, _ = verb("pull", "--manifest", manifest, "--from", store.root, "--store", tmp_path / "4", "--json")
    assert (status, digest_of(json.loads(out)["images"]["small"])) == (0, base.digest)


def test_a_carried_layer_whose_reader_is_killed_is_not_there(verb: Verb, store: ImageStore, tmp_path: Path) -> None:
    (one,) = built(verb, store, tmp_path / "context", "one")
    layer = read_layered(one).layers[0]
    blob = store.layers.path(layer.digest)
    code = """
import os, signal, sys
from pathlib import Path
from megaflow_hpc.environments.images.store import ImageStore
def pieces():
    yield Path(sys.argv[2]).read_bytes()
    os.kill(os.getpid(), signal.SIGKILL)
store = ImageStore(sys.argv[1])
store.prepare("test")
store.layers.take(Path(sys.argv[2]).name, pieces())
"""
    other = ImageStore(tmp_path / "other")
    assert subprocess.run([sys.executable, "-c", code, other.root, blob], check=False).returncode == -9
    assert other.layers.find(layer.digest) is None
    assert len(other.leftovers()) == 1
    assert len(prune(other).leftovers) == 1
    assert other.leftovers() == []
    assert other.layers.take(layer.digest, [blob.read_bytes()]) == layer
    assert subprocess.run([sys.executable, "-c", code, other.root, blob], check=False).returncode == -9
    assert len(other.leftovers()) == 1
    ImageStore(other.root).prepare("the next process that writes to it removes what the killed one left")
    assert list((other.root / "work").iterdir()) == []
    assert other.layers.take(layer.digest, [blob.read_bytes()]) == layer


def test_an_image_is_exported_as_one_sif(verb: Verb, store: ImageStore, tmp_path: Path) -> None:
    (one,) = built(verb, store, tmp_path / "context", "one")
    target = tmp_path / "out.sif"
    source = str(tmp_path / "context" / "one.Dockerfile")
    status, out, said = verb("export", source, "-o", target, "--json")
    assert status == 0, said
    assert json.loads(out) == {"image": str(one), "file": str(target), "bytes": target.stat().st_size}
    tree = unpacked(target, tmp_path / "tree")
    assert ((tree / "name").read_text(), (tree / "shared").stat().st_size) == ("one", 13_000)
    assert (tree / "etc" / "number").read_bytes().split()[0] == b"0"
    remove_tree(tree)
    assert verb("export", one.stem[:12], "-o", target)[0] == 2
    assert verb("export", "small0", "-o", target, "--force")[0] == 0  # a SIF is copied
    assert digest_of(target) == store.find("small0").stem  # type: ignore[union-attr]
    assert verb("export", "nothing of that name", "-o", tmp_path / "no.sif")[0] == 2
    assert sorted(path.name for path in tmp_path.glob("*.sif*")) == ["out.sif"]


def test_an_adopter_that_is_killed_leaves_no_link(tmp_path: Path) -> None:
    """A store takes a layer of the group's store by a link. The process is killed before the link is in place."""
    group = ImageStore(tmp_path / "group")
    layer = add_layer(group, {"a": "1"})
    code = """
import os, signal, sys
from pathlib import Path
from megaflow_hpc.environments.images import atomic_files
from megaflow_hpc.environments.images.store import ImageStore
store = ImageStore(None, f"{sys.argv[1]}:{sys.argv[2]}")
store.prepare("test")
atomic_files.write_record = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store.layers.adopt(sys.argv[3])
"""
    environment = {name: value for name, value in os.environ.items() if name != "MEGAFLOW_IMAGE_STORE"}
    words = [sys.executable, "-c", code, tmp_path / "own", group.root, layer.digest]
    assert subprocess.run(words, env=environment, check=False).returncode == -9
    own = ImageStore(tmp_path / "own")
    assert [path.is_symlink() for path in own.leftovers()] == [True]
    own.prepare("the next process")
    assert list((own.root / "work").iterdir()) == []
    assert group.layers.find(layer.digest) == layer
