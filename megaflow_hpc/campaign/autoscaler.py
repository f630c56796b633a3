"""Scales engine servers between ``min`` and ``max`` by releasing held array elements while requests are queued.

A single process scales the whole campaign (:class:`~megaflow_hpc.ledger.leader.Leader`). If compute nodes can reach
the Slurm controller, it is a child of a pod's batch shell, ``python -m megaflow_hpc.campaign.autoscaler RUN``.
Otherwise it is a ``run`` or ``watch`` command that the user keeps open.

It polls every :data:`POLL_INTERVAL_S` seconds and queries Slurm only if servers are missing. With every heartbeat, a
server reports the length of its engine's queue, and how long the last queued request will wait at the rate of the past
half minute. Servers are added when both numbers are high. Idle servers exit on their own. Slurm then requeues and holds
their array elements, so they can be released again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable

from megaflow_hpc.campaign.jobs import Jobs
from megaflow_hpc.config.model import ServerCount
from megaflow_hpc.errors import SiteError
from megaflow_hpc.ledger import Ledger, read_blocks
from megaflow_hpc.ledger.blocks import numbers
from megaflow_hpc.ledger.leader import RENEW_S, SCALER, Leader
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.rundir.endpoints import EndpointFiles, Load
from megaflow_hpc.rundir.event_reader import EventReader
from megaflow_hpc.rundir.events import RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import RunRecord, read_run
from megaflow_hpc.rundir.summaries import Summary, WantedPods

POLL_INTERVAL_S = RENEW_S
FIRST_POLL_INTERVAL_S = 5.0
"""Seconds between polls before the first pod runs."""
REFUSED_S = 600.0
"""Seconds for which this process leaves scaling to other processes after Slurm has refused its request."""
QUEUE_LENGTH = 4.0
"""Mean length of the engines' queues above which a server is added. Waits must also be long."""
QUEUE_WAIT_S = 10.0
"""Mean wait in seconds of the last queued request above which a server is added. Queues must also be long."""


def wanted_servers(least: int, most: int, loads: Iterable[Load], asking: bool) -> int:
    """Returns the desired number of servers for a policy.

    Args:
        least: Number of servers that start with the campaign.
        most: Maximum number of servers.
        loads: Loads of the servers that are currently responding.
        asking: True if rollouts that use the policy remain to be run.
    """
    loads = list(loads)
    if not asking:
        return 0
    if not loads:
        return max(1, least)
    waiting = sum(load.waiting for load in loads) / len(loads)
    seconds = sum(load.wait_s for load in loads) / len(loads)
    if waiting >= QUEUE_LENGTH and seconds >= QUEUE_WAIT_S:
        return min(most, len(loads) + max(1, len(loads) // 2))
    return max(len(loads), 1)


class Autoscaler:
    """Releases held elements of the engine array when servers are missing.

    Args:
        planned: Content of ``run.json``.
        jobs: Slurm jobs of the run.
        holder: Name of this process in ``status``.
        monitor: Existing monitor of the run. ``None`` creates a new one.
    """

    def __init__(
        self, run: RunDir, planned: RunRecord, jobs: Jobs, holder: str, monitor: Monitor | None = None
    ) -> None:
        self._run, self._jobs, self._monitor = run, jobs, monitor or Monitor(run)
        self._counts = {
            server.policy: ServerCount(*server.model["servers"]) for server in planned.servers if server.held
        }
        """Minimum and maximum number of servers of each policy with held servers, by policy."""
        self._called = {name for name, policy in planned.policies.items() if not policy.samples}
        """Policies without rollouts of their own, such as judges. Rollouts of any policy may call them."""
        self._lease = Leader(run, SCALER, holder)
        self._backlog = Backlog(run)
        self._looked = -POLL_INTERVAL_S
        self._refused_at = -REFUSED_S

    def tick(self) -> list[str]:
        """Releases held servers that are needed, at most every :data:`POLL_INTERVAL_S` seconds. Returns the ids of
        released elements."""
        now = time.monotonic()
        if not self._counts or now - self._looked < POLL_INTERVAL_S or now - self._refused_at < REFUSED_S:
            return []
        self._looked = now
        if not self._lease.hold():
            return []
        loads, asked = self._loads(), self._remaining_rollouts()
        if not asked:
            self._looked = now - POLL_INTERVAL_S + FIRST_POLL_INTERVAL_S  # pods are about to start
        released: list[str] = []
        for policy, count in self._counts.items():
            rollouts = asked.total() if policy in self._called else asked[policy]
            number = wanted_servers(*count, loads.get(policy, ()), rollouts > 0)
            if number > len(loads.get(policy, ())):
                try:
                    released += self._jobs.release(policy, number)
                except SiteError as error:
                    print(f"engine servers cannot be released from here: {error}", file=sys.stderr, flush=True)
                    self._refused_at = now
                    self._lease.leave()
        return released

    def leave(self) -> None:
        """Releases the lease, so that another process can scale."""
        self._lease.leave()

    def _loads(self) -> dict[str, list[Load]]:
        loads: dict[str, list[Load]] = {}
        for server in EndpointFiles(self._run).serving():
            loads.setdefault(server.policy, []).append(Load(server.in_flight, server.waiting, server.wait_s))
        return loads

    def _remaining_rollouts(self) -> Counter[str]:
        """Returns the number of remaining rollouts by policy. Returns an empty counter while no pod is running."""
        pods = self._monitor.status()["pods"]
        if not any(pod["state"] == "started" for pod in pods):
            return Counter()
        return self._backlog.look()


class Backlog:
    """Counts the planned rollouts that no pod has stored yet, from the run's blocks and the pods' events.

    Compares rollout ids instead of counts, because a rollout may end twice.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._policies: dict[str, str] = {}
        """Policy of each rollout that is not stored yet, by rollout id."""
        self._read_blocks: set[int] = set()
        self._events = EventReader(run.events, only="rollout", use_summaries=True)
        self._ended: list[str] = []
        """Rollouts that ended in the previous poll. They are dropped again in the next poll, because their block may
        have been written after the blocks were read."""

    def look(self) -> Counter[str]:
        """Reads new blocks and events. Returns the number of remaining rollouts per policy."""
        new = set(numbers(self._run)) - self._read_blocks
        for block in read_blocks(self._run, sorted(new)):
            self._policies.update((rollout.id, rollout.policy) for rollout in block.rollouts)
        self._read_blocks |= new
        ended = self._read_ended()
        for rollout in (*self._ended, *ended):
            self._policies.pop(rollout, None)
        self._ended = ended
        return Counter(self._policies.values())

    def _read_ended(self) -> list[str]:
        summaries: list[Summary] = []
        ended: list[str] = []
        for _, events in self._events.read():
            for event in events:
                if isinstance(event, Summary):
                    summaries.append(event)
                elif isinstance(event, RolloutEvent):
                    ended.append(event.id)
        if summaries:
            remaining = WantedPods(self._policies)
            for each in summaries:
                ended += remaining.among(each.digests)
                ended += [rollout.id for rollout in each.ended_badly]
        return ended


def main(argv: list[str]) -> int:
    """Scales servers until the campaign is over or the pod's batch shell has exited."""
    run = RunDir(argv[0])
    run.check_ours()
    planned, marks = read_run(run), Marks(run)
    jobs = Jobs(run, planned.config, planned, Ledger(run))
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    autoscaler = Autoscaler(run, planned, jobs, f"pod {os.environ.get('MEGAFLOW_POD', os.getpid())}")
    try:
        while os.getppid() == parent and not marks.over:
            for element in autoscaler.tick():
                print(f"let engine server {element} go", file=sys.stderr, flush=True)
            time.sleep(POLL_INTERVAL_S / 6)
    finally:
        autoscaler.leave()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
