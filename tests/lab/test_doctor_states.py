"""A site broken for real, in one way at a time: ``doctor`` names the cause with a remedy, and nothing else."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.labs import Lab, own_lab
from tests.support.namespaces import restricted

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]

Findings = dict[str, list[dict[str, str]]]


def doctor(before: str = ":", **environ: str) -> Findings:
    """What doctor finds after a shell command has changed something in a namespace; by check."""
    done = restricted(before, "-m", "megaflow_hpc", "doctor", "--json", **environ)
    assert done.returncode in (0, 3), done.stderr
    found: Findings = defaultdict(list)
    for finding in json.loads(done.stdout)["findings"]:
        found[finding["check"]].append(finding)
    assert (done.returncode == 3) == any(f["level"] == "FAIL" for each in found.values() for f in each)
    return found


def only(findings: Findings, check: str) -> tuple[str, str, str]:
    """The one finding of a check: its level, what was found, the remedy."""
    [finding] = findings[check]
    return finding["level"], finding["found"], finding["remedy"]


def partitions(findings: Findings) -> dict[str, dict[str, str]]:
    return {f["found"].split(":")[0]: f for f in findings["partition"]}


def without_pmi(lab: Lab, place: Path) -> Path:
    """A slurm.conf whose directory of plug-ins lacks those of pmi2 and pmix."""
    settings = lab.slurm("scontrol", "show", "config").splitlines()
    [directories] = [line.partition("=")[2].strip() for line in settings if line.startswith("PluginDir")]
    few = place / "plugins"
    few.mkdir()
    for file in (file for plugins in directories.split(":") for file in Path(plugins).iterdir()):
        if not file.name.startswith("mpi_pmi"):
            (few / file.name).symlink_to(file)
    conf = place / "slurm.conf"
    conf.write_text((lab.dir / "slurm.conf").read_text() + f"PluginDir={few}\n")
    return conf


def worse(broken: Findings, sound: Findings) -> set[str]:
    """The checks that complain of something they did not complain of on the sound site."""

    def complaints(findings: Findings) -> set[tuple[str, str]]:
        return {(check, f["found"]) for check, each in findings.items() for f in each if f["level"] != "ok"}

    return {check for check, _ in complaints(broken) - complaints(sound)}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with own_lab(tmp_path_factory.mktemp("doctor")) as lab:
        yield lab


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def seen(lab: Lab, scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Findings]:
    """The sound site, and two states of it that one process alone can be in, at the same time."""
    lent = os.environ.get("MEGAFLOW_FUSE")
    open_fuse = f"mount --bind {lent} /dev/fuse" if lent else ":"
    fill = f"mount -t tmpfs -o size=70m tmpfs {scratch} && head -c 69M /dev/zero >{scratch}/full"
    states = {
        "sound": (open_fuse, {}),
        "PMI gone": (open_fuse, {"SLURM_CONF": str(without_pmi(lab, tmp_path_factory.mktemp("pmi")))}),
        "scratch full": (f"{open_fuse} && {fill}", {}),
    }
    with ThreadPoolExecutor(2) as threads:
        asked = {
            name: threads.submit(doctor, before, MEGAFLOW_SCRATCH=str(scratch), **environ)
            for name, (before, environ) in states.items()
        }
    return {name: found.result() for name, found in asked.items()}


@pytest.fixture
def ask(scratch: Path) -> Callable[[], Findings]:
    """What doctor finds now."""
    lent = os.environ.get("MEGAFLOW_FUSE")
    return lambda: doctor(f"mount --bind {lent} /dev/fuse" if lent else ":", MEGAFLOW_SCRATCH=str(scratch))


def test_a_sound_site(seen: dict[str, Findings]) -> None:
    sound = seen["sound"]
    for check in ("accounting", "controller", "srun --mpi", "scratch", "containers"):
        assert all(f["level"] == "ok" for f in sound[check]), sound[check]
    assert partitions(sound).keys() == {"cpu", "gpu", "preempt"}
    assert all(f["level"] == "ok" for f in sound["partition"])


def test_pmi_gone(seen: dict[str, Findings]) -> None:
    level, found, remedy = only(seen["PMI gone"], "srun --mpi")
    assert level == "FAIL"
    assert "neither pmi2 nor pmix" in found or "offers none of pmi2, pmix" in found
    assert "ask the site for Slurm's plug-in mpi/pmi2 or mpi/pmix" in remedy
    assert worse(seen["PMI gone"], seen["sound"]) == {"srun --mpi"}


def test_scratch_full(seen: dict[str, Findings], scratch: Path) -> None:
    level, found, remedy = only(seen["scratch full"], "scratch")
    assert level == "FAIL"
    assert f"{scratch} on tmpfs: 0 GB" in found
    assert "it is full" in found
    assert "megaflow-hpc janitor" in remedy
    assert only(seen["scratch full"], "apptainer")[::2] == ("warn", "free space on scratch first")
    assert worse(seen["scratch full"], seen["sound"]) == {"scratch", "apptainer"}


def test_slurmdbd_stopped(lab: Lab, seen: dict[str, Findings], ask: Callable[[], Findings]) -> None:
    lab.kill("slurmdbd")
    broken = ask()
    lab.start()
    level, found, remedy = only(broken, "accounting")
    assert level == "warn"
    assert found.startswith("slurmdbd at 127.0.0.1:")
    assert "does not answer" in found
    assert "tell the site that slurmdbd is down" in remedy
    assert worse(broken, seen["sound"]) == {"accounting"}


def test_a_partition_down_and_nodes_drained(lab: Lab, seen: dict[str, Findings], ask: Callable[[], Findings]) -> None:
    lab.slurm("scontrol", "update", "PartitionName=preempt", "State=DOWN")
    lab.slurm("scontrol", "update", "NodeName=gpu[1-2]", "State=DRAIN", "Reason=GPU fell off the bus")
    lab.slurm("scontrol", "update", "NodeName=cpu3", "State=DRAIN", "Reason=disk")
    broken = ask()
    lab.slurm("scontrol", "update", "PartitionName=preempt", "State=UP")
    lab.slurm("scontrol", "update", "NodeName=gpu[1-2],cpu3", "State=RESUME")
    parts = partitions(broken)
    assert parts["preempt"]["level"] == "warn"
    assert parts["preempt"]["found"].endswith("it is down: jobs wait in it")
    assert parts["gpu"]["level"] == "warn"
    assert parts["gpu"]["found"].endswith("none of them takes jobs (drained: GPU fell off the bus)")
    assert "another partition" in parts["gpu"]["remedy"]
    assert parts["cpu"]["level"] == "ok"
    assert parts["cpu"]["found"].endswith("1 of them take no jobs (drained: disk)")
    assert worse(broken, seen["sound"]) == {"partition"}


def test_a_partition_dropped(lab: Lab, seen: dict[str, Findings], ask: Callable[[], Findings]) -> None:
    lab.slurm("scontrol", "delete", "PartitionName=cpu")
    broken = ask()
    lab.slurm("scontrol", "create", "PartitionName=cpu", "Nodes=cpu[1-4]", "Default=YES", "State=UP")
    assert "cpu" not in partitions(broken)
    assert partitions(broken)["there is no default"]["remedy"].startswith("set slurm.pods.partition")
    assert worse(broken, seen["sound"]) == {"partition"}


def test_the_controller_gone(lab: Lab, seen: dict[str, Findings], ask: Callable[[], Findings]) -> None:
    lab.kill("slurmctld")  # the last test: to start it again takes longer than to end the lab
    broken = ask()
    level, _, remedy = only(broken, "controller")
    assert level == "FAIL"
    assert "scontrol ping" in remedy
    assert broken["partition"] == [], "that is what is said, and nothing about partitions"
    assert worse(broken, seen["sound"]) == {"controller"}
