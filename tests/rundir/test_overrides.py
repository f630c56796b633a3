"""``resume --time``, ``--mem`` and ``--partition`` change the requests of new jobs and nothing that was planned."""

from __future__ import annotations

import pytest

from megaflow_hpc import config
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.overrides import overridden, override
from megaflow_hpc.slurm import script

PLANNED = config.parse(
    {
        "name": "x",
        "tasks": "t",
        "agent": "nop",
        "slurm": {"qos": "low", "pods": {"time": "1:00:00", "mem_per_cpu": "2G", "nice": 5}},
    }
)


def asked(run: RunDir) -> dict[str, object]:
    return dict(script.pod_job(overridden(run, PLANNED), run).options)


def test_what_new_jobs_ask_for_is_changed_and_kept(run: RunDir) -> None:
    before = asked(run)
    assert overridden(run, PLANNED) is PLANNED
    override(run, PLANNED, {"pods": {"time": "8:00:00", "mem": "64G"}})
    override(run, PLANNED, {"pods": {"partition": "long"}, "servers": {"time": "1-00:00:00"}})
    now = asked(run)
    assert now == {**{k: v for k, v in before.items() if k != "mem-per-cpu"}, **now}
    assert (now["time"], now["mem"], now["partition"], now["nice"]) == ("8:00:00", "64G", "long", 5)
    assert "mem-per-cpu" not in now, "it would be asked for beside --mem, which Slurm refuses"
    assert overridden(run, PLANNED).slurm.servers.time == "1-00:00:00"
    override(run, PLANNED, {"pods": {"time": None}})
    assert asked(run)["time"] is None, "the partition's own"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pods": {"time": "soon"}}, "'soon' is not a time"),
        ({"pods": {"count": 3}}, "expected time, mem, partition of pods, servers, trainer, gather"),
        ({"everything": {"time": "1:00"}}, "everything: time"),
        ({"pods": {"mem": "64"}}, r"slurm\.pods\.mem '64': write a number and its unit, such as 16G"),
        ({"gather": {"time": "soon"}}, r"slurm\.gather\.time 'soon': 'soon' is not a time"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_and_changes_nothing(run: RunDir, changes: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        override(run, PLANNED, changes)
    assert overridden(run, PLANNED) is PLANNED


def test_memory_that_an_earlier_version_stored_is_read(run: RunDir) -> None:
    run.changed_requests.parent.mkdir(exist_ok=True)
    run.changed_requests.write_text('{"pods": {"mem_gb": 1.5}, "servers": {"mem_gb": null}}')
    slurm = overridden(run, PLANNED).slurm
    assert (slurm.memory_mb(slurm.pods), slurm.memory_mb(slurm.servers)) == (1500, None)


def test_what_the_site_refuses_changes_nothing(run: RunDir) -> None:
    def check(changed: config.CampaignConfig) -> None:
        raise ConfigError(f"{changed.slurm.pods.time} is too long")

    with pytest.raises(ConfigError, match="9:00:00 is too long"):
        override(run, PLANNED, {"pods": {"time": "9:00:00"}}, check)
    assert not run.changed_requests.exists()


def test_an_option_of_every_job_is_replaced_for_one_but_not_removed(run: RunDir) -> None:
    slurm = {"time": "10", "mem-per-cpu": "2G"}
    shared = config.parse({"name": "x", "tasks": "t", "agent": "nop", "slurm": slurm})
    changed = override(run, shared, {"pods": {"time": "1:00:00"}})
    assert script.pod_job(changed, run).options["time"] == "1:00:00"
    assert script.server_job(changed, run, 1, 0).options["time"] == "10"
    with pytest.raises(ConfigError, match=r"slurm\.time is set for every job"):
        override(run, shared, {"pods": {"time": None}})
    with pytest.raises(ConfigError, match=r"slurm\.mem-per-cpu is set for every job"):
        override(run, shared, {"pods": {"mem": "4G"}})
