"""The resources by which a campaign packs rollouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from megaflow_hpc.ledger.tasks import PlannedTask
from megaflow_hpc.pod.master.pod import Pod
from megaflow_hpc.pod.scheduling.scheduler import NOTHING
from megaflow_hpc.types import Limits, Service, Task


def test_a_rollout_needs_what_its_own_services_need_but_not_what_it_shares() -> None:
    limits = Limits(memory_mb=1000, cpus=2)
    services = [
        Service(name="mine", limits=limits),
        Service(name="nodes", per="node", limits=limits),
        Service(name="all", per="campaign", limits=limits),
    ]
    task = Task("t", "", "base", "", limits=limits, services=tuple(services)).to_dict()
    pod = cast(Pod, SimpleNamespace(scheduling=SimpleNamespace(pack=("cpus", "memory"))))
    needed = Pod.demand(pod, PlannedTask(task))
    assert (needed.cpus, needed.memory_mb) == (4, 2000)
    none = cast(Pod, SimpleNamespace(scheduling=SimpleNamespace(pack=())))
    assert Pod.demand(none, PlannedTask(task)) == NOTHING
