"""A batch of images: what is written for its jobs, how it is shared out, and one element without Slurm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow_hpc.campaign.image_batch import Batch, Recipe, Wanted, asked_for
from megaflow_hpc.campaign.image_jobs import ImageJobs
from megaflow_hpc.cli import main
from megaflow_hpc.config.slurm import BuildsConfig, SlurmConfig
from megaflow_hpc.environments.images.resolve import source_key
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.slurm.script import images_job, script
from tests.support.registries import front, layer, registry_server


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
    store = ImageStore(tmp_path / "store")

    def asked() -> tuple[Path, str]:
        images = one.recipe.asking(store)
        return images.resolve_request(one.request, one.recipe.image_mapping(), build=False), asked_for(one, images)

    key, before = asked()
    store.make(source_key(remote), remote, lambda target: shutil.copyfile(base_sif, target) and None)
    another, same = asked()
    assert another != key  # which cannot be told apart by that
    assert same == before
    (tmp_path / "task0" / "file").write_text("another\n")
    assert asked()[1] != before


def test_a_context_is_read_once_for_what_jobs_are_to_build(tmp_path: Path, busybox_rootfs: str) -> None:
    one, size = make_batch(tmp_path, busybox_rootfs, 1, 1).wanted[0], 30_000_000
    (tmp_path / "task0" / "file").write_bytes(bytes(size))
    images = one.recipe.asking(ImageStore(tmp_path / "store"))

    def characters() -> int:
        return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])

    before = characters()
    images.resolve_request(one.request, one.recipe.image_mapping(), build=False)
    asked_for(one, images)
    assert size <= characters() - before < 1.5 * size


def test_where_nodes_have_no_way_out_images_of_registries_are_fetched_here_once(tmp_path: Path, base_sif: Path) -> None:
    """Where nothing else is lacking, no Slurm is needed for it."""
    (tmp_path / "registry").mkdir()
    said: list[str] = []
    slurm = SlurmConfig(builds=BuildsConfig(fetch="here"))
    with registry_server(base_sif.with_name("registry"), tmp_path / "registry") as registry:
        registry.push("own", "1", [layer({"own": b"own"})])
        with front(registry.address) as between:
            mirrors = {"lab.org": f"http://{between.address}"}
            recipe = Recipe({"own": "docker://lab.org/own:1"}, str(tmp_path), "--map", mirrors=mirrors)
            wanted = [Wanted("own", recipe)]
            [first] = ImageJobs(ImageStore(tmp_path / "store"), slurm, said.append).build(wanted)
            asked = len(between.asked)
            [second] = ImageJobs(ImageStore(tmp_path / "store"), slurm, said.append).build(wanted)
            assert len(between.asked) == asked > 0
    assert (first.state, second.state) == ("fetched", "there")
    assert first.file == second.file == next(ImageStore(tmp_path / "store").images()).path
    assert said.count("images: 1, to be built: 0") == 2


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
