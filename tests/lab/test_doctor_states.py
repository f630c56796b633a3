"""A site broken for real, in several ways at a time: ``doctor`` names each cause with a remedy, and nothing else."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.labs import Lab, own_lab
from tests.support.namespaces import CLOSED, restricted

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
    [plugins] = [Path(line.partition("=")[2].strip()) for line in settings if line.startswith("PluginDir")]
    few = place / "plugins"
    few.mkdir()
    for file in plugins.iterdir():
        if not file.name.startswith("mpi_pmi"):
            (few / file.name).symlink_to(file)
    conf = place / "slurm.conf"
    conf.write_text((lab.dir / "slurm.conf").read_text() + f"PluginDir={few}\n")
    return conf


def test_doctor_names_each_cause_of_a_site_that_is_broken(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    for place in (scratch, tmp_path / "lab"):
        place.mkdir()
    with own_lab(tmp_path / "lab") as lab:
        lent = os.environ.get("MEGAFLOW_FUSE")
        sound = doctor(f"mount --bind {lent} /dev/fuse" if lent else ":", MEGAFLOW_SCRATCH=str(scratch))
        for check in ("accounting", "srun --mpi", "scratch", "containers", *(["image mount"] if lent else [])):
            assert only(sound, check)[0] == "ok", sound[check]
        assert partitions(sound).keys() == {"cpu", "gpu", "preempt"}
        assert all(f["level"] == "ok" for f in sound["partition"])

        # slurmdbd stopped, PMI gone, FUSE closed, a partition down, a node drained, the nodes of another drained.
        lab.kill("slurmdbd")
        lab.slurm("scontrol", "update", "PartitionName=preempt", "State=DOWN")
        lab.slurm("scontrol", "update", "NodeName=gpu[1-2]", "State=DRAIN", "Reason=GPU fell off the bus")
        lab.slurm("scontrol", "update", "NodeName=cpu3", "State=DRAIN", "Reason=disk")
        conf = without_pmi(lab, tmp_path)
        broken = doctor(CLOSED, MEGAFLOW_SCRATCH=str(scratch), SLURM_CONF=str(conf))

        level, found, remedy = only(broken, "accounting")
        assert level == "warn"
        assert found.startswith("slurmdbd at 127.0.0.1:")
        assert "does not answer" in found
        assert "tell the site that slurmdbd is away" in remedy

        level, found, remedy = only(broken, "srun --mpi")
        assert level == "FAIL"
        assert "neither pmi2 nor pmix" in found or "offers none of pmi2, pmix" in found
        assert "ask the site for Slurm's plug-in mpi/pmi2 or mpi/pmix" in remedy

        level, found, remedy = only(broken, "image mount")
        assert (level, found) == ("warn", "/dev/fuse is not open to users")
        assert "ask the site to open /dev/fuse" in remedy

        parts = partitions(broken)
        assert parts["preempt"]["level"] == "warn"
        assert parts["preempt"]["found"].endswith("it is down: jobs wait in it")
        assert parts["gpu"]["level"] == "warn"
        assert parts["gpu"]["found"].endswith("none of them takes jobs (drained: GPU fell off the bus)")
        assert "another partition" in parts["gpu"]["remedy"]
        assert parts["cpu"]["level"] == "ok"
        assert parts["cpu"]["found"].endswith("1 of them take no jobs (drained: disk)")
        for check in ("controller", "scratch", "containers", "overlay"):
            assert all(f["level"] == "ok" for f in broken[check]), broken[check]

        # Scratch full, and the default partition dropped.
        lab.start()
        lab.slurm("scontrol", "delete", "PartitionName=cpu")
        fill = f"mount -t tmpfs -o size=70m tmpfs {scratch} && head -c 69M /dev/zero >{scratch}/full"
        full = doctor(fill, MEGAFLOW_SCRATCH=str(scratch))
        level, found, remedy = only(full, "scratch")
        assert level == "FAIL"
        assert f"{scratch} on tmpfs: 0 GB" in found
        assert "it is full" in found
        assert "megaflow-hpc janitor" in remedy
        assert only(full, "apptainer")[::2] == ("warn", "make room on scratch first")
        assert "cpu" not in partitions(full)
        assert partitions(full)["none is the default"]["remedy"].startswith("name one in slurm.pods.partition")
        assert only(full, "accounting")[0] == "ok"

        # The controller gone: that is what is said, and nothing about partitions.
        lab.kill("slurmctld")
        gone = doctor(MEGAFLOW_SCRATCH=str(scratch))
        level, found, remedy = only(gone, "controller")
        assert level == "FAIL"
        assert "scontrol ping" in remedy
        assert gone["partition"] == []
        assert only(gone, "scratch")[0] == "ok"
