"""A batch of images: what is written for its jobs, how it is shared out, and one element without Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow_hpc.campaign.image_batch import Batch, Recipe, Wanted, asked_for
from megaflow_hpc.cli import main
from megaflow_hpc.config.slurm import BuildsConfig, SlurmConfig
from megaflow_hpc.environments.images.resolve import source_key
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.slurm.script import images_job, script


def make_batch(tmp_path: Path, base: str, count: int, elements: int) -> Batch:
    recipe = Recipe({"base": base}, str(tmp_path), "--map")
    wanted = []
    for number in range(count):
        place = tmp_path / f"task{number}"
        place.mkdir()
        (place / "file").write_text(f"{number}\n")
        copied = "absent" if number == 1 else "file"
        (place / "Dockerfile").write_text(f"FROM base\nCOPY {copied} /file\n")
        wanted.append(Wanted(f"task {number}", recipe, dockerfile=str(place / "Dockerfile")))
    ImageStore(tmp_path / "store").prepare("a batch")
    return Batch(RunDir(tmp_path / "store" / "work" / "batch-1"), elements, wanted, [f"{n}" for n in range(count)])


def test_shares_are_all_of_it_and_none_twice(tmp_path: Path) -> None:
    for count, elements in ((1, 1), (5, 2), (7, 7), (37, 16), (500, 16)):
        batch = Batch(RunDir(tmp_path), elements, [Wanted("x", Recipe({}, "/", ""))] * count)
        shares = [list(batch.share(element)) for element in range(elements)]
        assert [number for share in shares for number in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all(number in shares[batch.element_of(number)] for number in range(count))


def test_what_is_asked_for_keeps_its_name_when_its_base_is_fetched(tmp_path: Path, base_sif: Path) -> None:
    """By that name who asks again finds the job that has fetched the base and builds on."""
    remote = "docker://lab.org/base:1"
    one = make_batch(tmp_path, remote, 1, 1).wanted[0]
    store, request, mapping = ImageStore(tmp_path / "store"), one.request, one.recipe.image_mapping()
    images = one.recipe.images(store, builds=False)
    before, key = asked_for(one, images), images.resolve_request(request, mapping, build=False)
    store.make(source_key(remote), remote, lambda target: shutil.copyfile(base_sif, target) and None)
    assert images.resolve_request(request, mapping, build=False) != key  # which cannot be told apart by that
    assert asked_for(one, images) == before
    (tmp_path / "task0" / "file").write_text("another\n")
    assert asked_for(one, one.recipe.images(store, builds=False)) != before


def test_an_element_builds_its_share_and_says_what_failed(tmp_path: Path, busybox_rootfs: str) -> None:
    make_batch(tmp_path, busybox_rootfs, 5, 2).write(["export A=1"])
    batch = Batch.read(tmp_path / "store" / "work" / "batch-1")
    assert [one.name for one in batch.wanted] == [f"task {number}" for number in range(5)]
    command = [sys.executable, "-m", "megaflow_hpc.campaign.image_batch", str(batch.run), "0"]
    environment = os.environ | {"MEGAFLOW_IMAGE_STORE": str(tmp_path / "store"), "MEGAFLOW_SCRATCH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    results = batch.results()
    assert results.keys() == {0, 1}
    assert results[0].file == next(ImageStore(tmp_path / "store").images()).path
    assert (results[1].file, "absent" in results[1].error) == ("", True)
    # Started again, it does none of it twice.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_script_asks_for_what_the_campaign_says(tmp_path: Path) -> None:
    builds = BuildsConfig(partition="cpu", cpus=4, mem_gb=8, time=90, extra={"qos": "short"})
    slurm = SlurmConfig(account="lab", builds=builds)
    text = script(images_job(slurm, RunDir(tmp_path / "batch-1f"), 16, 4))
    for line in (
        "--array=0-15%4",
        "--job-name=megaflow-images",
        "--comment=batch-1f",
        "--account=lab",
        "--partition=cpu",
        "--cpus-per-task=4",
        "--mem=8000M",
        "--time=90",
        "--qos=short",
        "--requeue",
        f"--output={tmp_path}/batch-1f/logs/images-%A_%a.log",
    ):
        assert f"#SBATCH {line}\n" in text
    assert f"BATCH={tmp_path}/batch-1f\n" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--detach"], "add --slurm"),
        (["--sbatch", "time=5"], "add --slurm"),
        (["--slurm", "--jobs", "0"], "--jobs: 0: give a whole number of at least 1"),
        (["--slurm", "--sbatch", "time"], "--sbatch time: expected NAME=VALUE"),
    ],
)
def test_options_that_say_nothing_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM base\n")
    assert main(["images", "build", str(tmp_path / "Dockerfile"), "--store", str(tmp_path / "store"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
