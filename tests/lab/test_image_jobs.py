"""Images built by jobs of the lab: a failing one alone fails, what is there stays, and an interrupted wait cancels."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import h5py
import pytest

from megaflow_hpc.campaign.image_batch import Recipe, Wanted
from megaflow_hpc.campaign.image_jobs import ImageJobs
from megaflow_hpc.config.slurm import BuildsConfig, SlurmConfig
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.slurm.script import IMAGES
from tests.support.campaigns import Make, cli
from tests.support.labs import pods, sbatch
from tests.support.registries import Registry, front, layer, registry_server, tree_layer
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]


def write_context(place: Path, number: int, step: str = "true") -> str:
    """A Dockerfile whose first step is that of all others, and whose copied file is its own."""
    place.mkdir(parents=True)
    (place / "file").write_text(f"{number}\n")
    (place / "Dockerfile").write_text(f"FROM base\nRUN echo shared > /shared\nCOPY file /file\nRUN {step}\n")
    return str(place / "Dockerfile")


def build(store: Path, base: str, *words: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    common = ("--slurm", "--store", store, "--map", f"base={base}", "--sbatch", "time=10", "--sbatch", "mem=900")
    return cli("images", "build", *words, *common, "--json", timeout=timeout)


def queued() -> list[str]:
    return subprocess.check_output(["squeue", "-h", "--me", f"--name={IMAGES}", "-o", "%F"], text=True).split()


@pytest.fixture
def registry(base_sif: Path, tmp_path: Path) -> Iterator[Registry]:
    (tmp_path / "registry").mkdir()
    with registry_server(base_sif.with_name("registry"), tmp_path / "registry") as found:
        yield found


def test_an_image_that_fails_fails_alone_and_what_is_built_stays(
    tmp_path: Path, busybox_rootfs: str, registry: Registry
) -> None:
    store = tmp_path / "store"
    registry.push("own", "1", [layer({"own": b"own"})])
    remote, nowhere = f"docker://{registry.address}/own:1", f"docker://{registry.address}/own:2"
    good = [write_context(tmp_path / f"task{number}", number) for number in range(4)]
    bad = write_context(tmp_path / "bad", 9, "echo never to be built; exit 7")
    plain = ("--mirror", f"{registry.address}=http://{registry.address}")
    done = build(store, busybox_rootfs, *good, bad, remote, nowhere, "--jobs", 2, *plain)
    assert done.returncode == 1, done.stderr
    images = json.loads(done.stdout)["images"]
    assert {name: image["state"] for name, image in images.items()} == dict.fromkeys([*good, remote], "built") | {
        bad: "failed",
        nowhere: "failed",
    }
    assert "if nodes have no way out, set slurm.builds.fetch: here" in images[nowhere]["error"]
    assert "to fetch" not in done.stderr
    assert re.search(r"layers: \d+ to be made, 0 to be fetched\nstore: at least .*\nnode: at least .*", done.stderr)
    assert "never to be built" in images[bad]["error"]
    assert "images: 7, elements: 2" in done.stderr
    assert {image["file"] for image in images.values()} - {""} == {image.path for image in ImageStore(store).images()}
    assert len(list((store / "steps").iterdir())) >= 1
    again = build(store, busybox_rootfs, *good)
    assert again.returncode == 0, again.stderr
    assert {image["state"] for image in json.loads(again.stdout)["images"].values()} == {"there"}
    assert "job" not in again.stderr


@pytest.mark.parametrize("where", ["here", "job"])
def test_a_base_is_fetched_where_the_campaign_says(
    tmp_path: Path, busybox_rootfs: str, registry: Registry, where: Literal["here", "job"]
) -> None:
    """Nodes without a way out build onto what was fetched where one types: their jobs ask no registry."""
    registry.push("team/base", "1", [tree_layer(Path(busybox_rootfs))], Env=["PATH=/bin", "OF_BASE=there"])
    write_context(tmp_path / "task", 1, 'test "$OF_BASE" = there')
    store = ImageStore(tmp_path / "store")
    slurm = SlurmConfig(builds=BuildsConfig(count=1, time=10, mem_gb=0.9, fetch=where))
    asked_by_then: list[int] = []
    with front(registry.address) as between:
        mapping, mirrors = {"base": "docker://lab.org/team/base:1"}, {"lab.org": f"http://{between.address}"}
        recipe = Recipe(mapping, str(tmp_path), "--map", mirrors=mirrors)

        def say(line: str) -> None:
            if " builds them: " in line:
                asked_by_then.append(len(between.asked))

        wanted = [
            Wanted("base", recipe),
            Wanted("task", recipe, dockerfile=str(tmp_path / "task" / "Dockerfile")),
        ]
        outcomes = ImageJobs(store, slurm, say).build(wanted)
        [before], after = asked_by_then, len(between.asked)
    states = [(outcome.name, outcome.state, outcome.error) for outcome in outcomes]
    assert states == [("base", "fetched" if where == "here" else "built", ""), ("task", "built", "")]
    assert (before > 0, after > before) == ((True, False) if where == "here" else (False, True))


def test_who_asks_again_waits_for_the_same_job_and_an_interrupted_wait_cancels_its_own(
    tmp_path: Path, busybox_rootfs: str
) -> None:
    store = tmp_path / "store"
    slow = write_context(tmp_path / "slow", 1, "sleep 500")
    first = build(store, busybox_rootfs, slow, "--detach")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["images"][slow]["state"] == "queued"
    jobs = queued()
    assert len(jobs) == 1
    second = build(store, busybox_rootfs, slow, "--detach")
    assert f"job {jobs[0]} builds 1 of them already" in second.stderr
    assert queued() == jobs
    command = [sys.executable, "-m", "megaflow_hpc", "images", "build", slow, "--slurm", "--store", str(store)]
    command += ["--map", f"base={busybox_rootfs}", "--sbatch", "mem=900"]
    said_by_third = tmp_path / "third"
    with open(said_by_third, "w") as file:
        third = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        until(lambda: f"job {jobs[0]} builds 1 of them already" in said_by_third.read_text(), "it waits for the job")
        until(lambda: list(store.glob("work/batch-*/logs/images-*.log")), "the job runs")
        subprocess.run(["scancel", *jobs], check=True)
        image = json.loads(third.communicate(timeout=120)[0])["images"][slow]
    finally:
        third.kill()
    assert (third.returncode, image["state"]) == (1, "failed")
    assert "ended as CANCELLED on cpu" in image["error"]
    assert f"{store}/work/batch-" in image["error"]
    until(lambda: not queued(), "the job is gone")

    waiting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: len(queued()) == 1, "the job is queued")
        waiting.send_signal(signal.SIGINT)
        said = waiting.communicate(timeout=60)[1]
    finally:
        waiting.kill()
    assert waiting.returncode == 130, said
    assert "is cancelled; what was built stays" in said
    until(lambda: not queued(), "the job is gone")


def test_a_preempted_element_goes_on_and_one_at_its_walltime_fails_its_own_images(
    tmp_path: Path, busybox_rootfs: str
) -> None:
    """Elements of one CPU each: the nodes are taken from both, in a step; later the time of one is made short."""
    store = tmp_path / "store"
    whole, cut = write_context(tmp_path / "whole", 1, "sleep 500"), write_context(tmp_path / "cut", 2, "sleep 500")
    command = [sys.executable, "-m", "megaflow_hpc", "images", "build", whole, cut, "--slurm", "--json"]
    command += ["--store", str(store), "--map", f"base={busybox_rootfs}", "--sbatch", "partition=preempt"]
    command += ["--sbatch", "time=10", "--sbatch", "mem=900", "--sbatch", "cpus-per-task=1", "--jobs", "2"]

    def starts(element: int) -> list[str]:
        """What each start of an element said."""
        texts = [log.read_text() for log in (store / "work").glob(f"batch-*/logs/images-*_{element}.log")]
        return [line for text in texts for line in text.splitlines() if "Dockerfile:4: RUN sleep" in line]

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        try:
            until(lambda: starts(0) and starts(1), "both are in their last steps")
            write = Path(whole).write_text  # what begins again need not take long
            write(Path(whole).read_text().replace("sleep 500", "sleep 1"))
            made = {path.name for path in (store / "layers").glob("*.json")}
            sbatch("--partition=cpu", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
            until(lambda: len(starts(0)) == len(starts(1)) == 2, "both have begun again", 240)
            subprocess.run(["scontrol", "update", f"JobId={queued()[0]}_1", "TimeLimit=1"], check=True)
            images = json.loads(waiting.communicate(timeout=240)[0])["images"]
        finally:
            waiting.send_signal(signal.SIGINT)
    assert waiting.returncode == 1
    assert (images[whole]["state"], images[cut]["state"]) == ("built", "failed")
    assert "ended as TIMEOUT on cpu" in images[cut]["error"]
    assert f"{tmp_path}/store/work/batch-" in images[cut]["error"]
    log = (store / "work").glob("batch-*/logs/images-*_0.log")
    assert sum(text.count(":2: RUN") + text.count(":3: COPY") for text in map(Path.read_text, log)) <= 2
    assert made <= {path.name for path in (store / "layers").glob("*.json")}
    (tmp_path / "cut" / "Dockerfile").write_text("FROM base\nRUN echo shared > /shared\nCOPY file /file\n")
    assert cli("images", "build", cut, "--store", store, "--map", f"base={busybox_rootfs}").returncode == 0
    assert [path.name for path in (store / "work").glob("*/") if not path.name.startswith("batch-")] == []


def test_in_a_campaign_tasks_fail_whose_image_was_not_built_and_no_others(
    tmp_path: Path, make_campaign: Make, base_sif: Path
) -> None:
    campaign = make_campaign(3, pods(count=1) + "  builds: {count: 2, time: 10, mem_gb: 0.9}\n", agent="oracle")
    text = campaign.read_text().replace("network: none,", "network: none, build: slurm,")
    campaign.write_text(text)
    for number, step in enumerate(("true", "echo no such luck; exit 3")):
        place = tmp_path / "tasks" / f"task{number}"
        (place / "environment").mkdir(exist_ok=True)
        (place / "environment" / "Dockerfile").write_text(f"FROM base\nRUN {step}\n")
        config = place / "task.toml"
        config.write_text("".join(line for line in config.read_text().splitlines(True) if "docker_image" not in line))
    done = cli("run", campaign, "--launcher", "slurm", "--json", MEGAFLOW_IMAGE_STORE=str(tmp_path / "store"))
    assert done.returncode == 1, done.stderr
    assert "node: at least " in done.stderr.partition(" builds them: ")[0]
    assert "images that were not built: 1 of 3; rollouts of their tasks will fail" in done.stderr
    run = json.loads(done.stdout)["run"]
    with h5py.File(Path(run) / "trajectories.h5") as file:
        table = file["trajectories"]
        columns = ("id", "status", "error_kind", "error")
        found = {row[0]: row[1:] for row in zip(*([v.decode() for v in table[c][:]] for c in columns), strict=True)}
        attempts = set(table["attempt"][:])
    assert found.keys() == {f"task{number}/oracle/0" for number in range(3)}
    status, kind, error = found.pop("task1/oracle/0")
    assert (status, kind) == ("failed", "user")
    assert "no such luck" in error
    assert set(found.values()) == {("completed", "", "")}
    assert attempts == {0}
