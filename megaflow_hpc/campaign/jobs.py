"""The jobs of one run on Slurm: engine arrays, pod arrays and the gather job, as one campaign.

Slurm is asked with one batched ``squeue`` for all of them, at most twice a minute, and may be away: what runs needs
neither slurmctld nor this process.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.config.quotas import check_scale
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.blocks import numbers
from megaflow_hpc.rundir.endpoints import EndpointFiles
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import RunRecord, ServerGroup
from megaflow_hpc.slurm import accounting, limits, resources, script, site
from megaflow_hpc.slurm.accounting import JobState
from megaflow_hpc.slurm.arrays import Arrays, cpus_per_gpu, pod_jobs, pod_jobs_elsewhere, server_jobs
from megaflow_hpc.slurm.ids import array_of, cluster_of, number, scancel

ASK_SLURM_S = 30.0
"""Seconds between two queries of a following process; each is one batched squeue."""

GONE_S = 120.0
MAX_DEPENDENCIES = 16
"""Engines whose start pods wait for: any one of them is enough."""

LEAVE_S = 30.0
"""Seconds for engines to leave once the campaign is finished."""


class Jobs:
    """The jobs of one run on Slurm.

    Args:
        planned: What ``run.json`` holds.
    """

    def __init__(self, run: RunDir, config: CampaignConfig, planned: RunRecord, ledger: Ledger) -> None:
        self._run, self._config, self._ledger, self._marks = run, config, ledger, Marks(run)
        self._groups, self._servers = planned.server_groups, planned.servers
        self.arrays = Arrays(run, planned.jobs)
        self._live: tuple[float, dict[str, JobState] | None] = (-ASK_SLURM_S, None)
        self.notices: list[str] = []
        """Messages for the user on the last start."""
        self._short = 0
        self._topped = time.monotonic()

    # --- start ---

    def start(self) -> None:
        """Queues engine arrays, pod arrays and the gather job, as many as limits leave room for."""
        allowed = limits.allowance(_options(self._config))
        engines = sum(group.count for group in self._groups)
        pods = self._config.slurm.pods
        count = 0 if self._config.is_pool else self._fitting(allowed, pods.here, engines + 1, pods.total)
        try:
            if self._config.slurm.together:
                self.arrays.queue(_together(self._config, self._run, self._groups))
                self._queue_gather([])
                self.invalidate()
                return
            servers: list[str] = []
            started: list[str] = []
            for job in server_jobs(self._config, self._run, self._groups, allowed):
                queued = self.arrays.queue(job)
                servers += queued
                started += [] if job.options.get("hold") else queued
            if self._config.is_pool:  # its servers are all there is of it, until it is cancelled
                self.invalidate()
                return
            # Pods wait in the queue, not on a node, until an engine starts.
            dependency = "?".join(f"after:{engine}" for engine in started[:MAX_DEPENDENCIES]) or None
            beside = _beside(self._config, self._run, self._groups, allowed)
            for job in pod_jobs(self._config, self._run, allowed, count, dependency, engines, beside):
                self.arrays.queue(job)
            for job in pod_jobs_elsewhere(self._config, self._run):
                self.arrays.queue(job)
            self._queue_gather(sorted({array_of(engine) for engine in servers}))
        except BaseException:
            self.cancel()  # half a campaign would hold GPUs for nothing
            raise
        self.invalidate()

    def _fitting(self, allowed: limits.Allowance, wanted: int, others: int, total: int) -> int:
        """How many of ``wanted`` pods fit beside ``others`` jobs; with those that are there they make ``total``."""
        self._short = 0
        if allowed.room is None or wanted + others <= allowed.room:
            return wanted
        fitting = allowed.room - others
        if fitting < 1:
            raise SiteError(
                f"{allowed.why} jobs at once and {allowed.queued} are queued: no room for {others} further jobs and a "
                "pod; wait until some have ended, or name another account or QOS"
            )
        self._short = total
        self.notices.append(
            f"{fitting} of {wanted} pods are queued: {allowed.why} jobs at once. The others follow while run or watch "
            f"is open, or with: megaflow-hpc scale {self._run} --pods {total}"
        )
        return fitting

    def _queue_gather(self, servers: Sequence[str]) -> None:
        pods = ":".join(self._here())
        self.arrays.queue(script.gather_job(self._config, self._run, f"afterany:{pods}", servers))

    @property
    def _clusters(self) -> list[str]:
        """Our own, which has no name here, and those of the pools."""
        return ["", *sorted({pool.cluster for pool in self._config.slurm.pods.pools if pool.cluster})]

    def _here(self) -> list[str]:
        """The pod arrays that a job of this cluster can wait for."""
        return [array for array in self.arrays.ids("pods") if not cluster_of(array)]

    def until_pods_left(self) -> None:
        """Waits for pods at other clusters, for whose end no job can be made to wait; for the gather job."""
        while not self._ledger.finished and self.live_pods(0) != []:
            time.sleep(ASK_SLURM_S)

    # --- look ---

    def ids(self, role: str | None = None) -> list[str]:
        """Returns every array of this run, including those submitted by hand once they have started."""
        ids = set(self.arrays.ids(role))
        if role in (None, "pods"):
            ids |= {array_of(lease["job_id"]) for lease in self._ledger.leases().values() if lease.get("job_id")}
        return sorted(ids)

    def live(self, max_age_s: float = ASK_SLURM_S) -> dict[str, JobState] | None:
        """Returns the elements that Slurm still has, by id; ``None`` without Slurm or while it does not answer.

        Args:
            max_age_s: Age in seconds up to which the previous answer is used.
        """
        asked, live = self._live
        if time.monotonic() - asked >= max_age_s:
            live = None
            if (ids := self.ids()) and site.has_slurm():
                try:
                    live = {job.id: job for job in accounting.live_jobs(ids).values() if job.live}
                except SiteError:
                    pass  # the controller is away for a while; the campaign goes on without it
            self._live = (time.monotonic(), live)
        return live

    @property
    def asked_at(self) -> float:
        """Time of the last query of :meth:`live`, on the monotonic clock."""
        return self._live[0]

    def invalidate(self) -> None:
        """Makes the next look ask Slurm."""
        self._live = (-ASK_SLURM_S, None)

    def live_pods(self, max_age_s: float = ASK_SLURM_S) -> list[JobState] | None:
        """Returns the pods that are queued or running; ``None`` if Slurm cannot tell now."""
        live = self.live(max_age_s)
        if live is None:
            return None
        pods = set(self.ids("pods"))
        return [state for element, state in live.items() if array_of(element) in pods]

    # --- act ---

    def scale(self, pods: int) -> dict[str, list[str]]:
        """Adds or removes pods until ``pods`` are queued or running; idempotent.

        More are added as a further array. Fewer: queued ones are cancelled first, then the youngest drain and give
        their blocks back.

        Returns:
            ``added`` and ``leaving``: ids of elements.

        Raises:
            ConfigError: The campaign is cancelled, or ``pods`` is more than it may have.
            SiteError: Slurm does not answer, refuses, or has no room.
        """
        if pods < 0:
            raise ConfigError(f"--pods {pods}: at least 0")
        check_scale(pods, self._config.slurm.pods, self._config.quotas)
        if self._marks.cancelled:
            raise ConfigError(f"{self._run}: is cancelled; continue it first: megaflow-hpc resume {self._run}")
        with self.arrays.alone():
            self.arrays.adopt(self._config.name, self._clusters)
            live = self.live_pods(0)
            if live is None:
                raise SiteError(f"{self._run}: Slurm does not say which pods there are; nothing was changed")
            leaving = self._marks.leaving()
            here = [state for state in live if state.id not in leaving]
            if self._ledger.finished:
                return {"added": [], "leaving": []}
            if len(here) < pods:
                return {"added": self._add(pods - len(here), pods), "leaving": []}
            return {"added": [], "leaving": self._remove(here, len(here) - pods)}

    def _add(self, count: int, total: int) -> list[str]:
        allowed = limits.allowance(_options(self._config))
        live = self.live(0) or {}
        gathers = [job for job in self.arrays.ids("gather") if live.get(job, JobState(job, "")).state == "PENDING"]
        added: list[str] = []
        fitting = self._fitting(allowed, count, int(not gathers), total)
        for job in pod_jobs(self._config, self._run, allowed, fitting):
            added += self.arrays.queue(job)
        if gathers:  # it shall wait for the new pods too
            pods = ":".join(self._here())
            site.ask("scontrol", "update", f"jobid={gathers[-1]}", f"dependency=afterany:{pods}")
        else:
            self._queue_gather(sorted({array_of(job) for job in self.arrays.ids("servers")}))
        self.invalidate()
        return added

    def _remove(self, pods: Sequence[JobState], count: int) -> list[str]:
        queued = [pod.id for pod in pods if pod.state != "RUNNING"]
        running = [pod.id for pod in pods if pod.state == "RUNNING"]
        going = sorted(queued, key=_age, reverse=True)[:count]
        if going:
            scancel(going)
        drained = sorted(running, key=_age, reverse=True)[: count - len(going)]
        for pod in drained:
            self.arrays.leave(pod)
        self.invalidate()
        return [*going, *drained]

    def servers(self, max_age_s: float = ASK_SLURM_S) -> dict[int, JobState] | None:
        """Returns the engine servers that Slurm still has, by their index; ``None`` if Slurm cannot tell now."""
        live = self.live(max_age_s)
        if live is None:
            return None
        found = {}
        for record in self.arrays.records():
            for element, state in live.items() if record.role == "servers" else ():
                array, _, index = element.partition("_")
                if array == record.id and index.isdecimal():
                    found[int(index) + record.base] = state
        return found

    def release(self, policy: str, count: int) -> list[str]:
        """Releases held servers of a policy until ``count`` are queued or running; idempotent.

        Returns:
            Ids of the released elements.

        Raises:
            SiteError: Slurm does not answer, or refuses.
        """
        servers = self.servers(ASK_SLURM_S / 2)
        if servers is None:
            raise SiteError(f"{self._run}: Slurm does not say which engine servers there are; nothing was changed")
        own = {n: state for n, state in sorted(servers.items()) if self._servers[n].policy == policy}
        held = [state.id for state in own.values() if state.held]
        going = held[: max(0, count - (len(own) - len(held)))]
        if going:
            site.ask("scontrol", "release", *going)
            self.invalidate()
        return going

    def top_up(self) -> None:
        """Adds pods that did not fit before, once there is room and unclaimed blocks are left."""
        if time.monotonic() - self._topped < ASK_SLURM_S:
            return
        self._topped = time.monotonic()
        queued = [record.elements or 1 for record in self.arrays.records() if record.role == "pods"]
        wanted = self._short or self._config.slurm.pods.total
        if not queued or sum(queued) >= wanted:  # none: submitted by hand, or local
            return
        if not set(numbers(self._run)) - set(self._ledger.view().epochs):
            return
        try:
            self.scale(wanted)
        except SiteError:
            pass  # no room yet, or nobody to ask

    def cancel(self) -> list[str]:
        """Asks Slurm to cancel every job of the run; returns their ids."""
        ids = self.ids()
        if site.has_slurm():
            try:
                self.arrays.adopt(self._config.name, self._clusters)
                ids = self.ids()
            finally:
                if ids:
                    scancel(ids)  # jobs that have ended do not mind
        self.invalidate()
        return ids

    def end_servers(self, ids: Sequence[str]) -> list[str]:
        """Ends engine arrays after the campaign, for the gather job.

        Elements in the queue are cancelled at once, running ones :data:`LEAVE_S` seconds later.

        Returns:
            The arrays that had to be cancelled.
        """
        end, pause_s = time.monotonic() + LEAVE_S, 2.0
        with contextlib.suppress(SiteError):  # Slurm may have forgotten them
            scancel(ids, "--state=PENDING")
        while live := {array_of(job.id) for job in accounting.live_jobs(ids).values() if job.live}:
            if time.monotonic() > end:
                scancel(sorted(live))
                break
            time.sleep(pause_s)  # they look for the finished mark every few seconds and leave by themselves
            pause_s *= 1.5
        EndpointFiles(self._run).clear()
        return sorted(live)

    def until_gone(self) -> None:
        """Waits until Slurm has none of the run's jobs.

        Raises:
            SiteError: Some are left after :data:`GONE_S` seconds.
        """
        end = time.monotonic() + GONE_S
        while live := self.live(2.0):
            if time.monotonic() > end:
                raise SiteError(f"jobs {' '.join(sorted(live))} were cancelled and are still there; try again later")
            time.sleep(1.0)


def preview(config: CampaignConfig, run: RunDir, groups: Sequence[ServerGroup]) -> list[script.Job]:
    """Returns the jobs that :meth:`Jobs.start` would queue on an idle site; the gather job comes last."""
    allowed = limits.allowance(_options(config))
    engines = sum(group.count for group in groups)
    if config.slurm.together:
        return [_together(config, run, groups), script.gather_job(config, run, "afterany:ID_OF_THE_POD")]
    if config.is_pool:
        return list(server_jobs(config, run, groups, allowed))
    pods = pod_jobs(config, run, allowed, engines=engines, beside=_beside(config, run, groups, allowed))
    gather = script.gather_job(config, run, "afterany:ID_OF_THE_POD_ARRAY")
    return [*server_jobs(config, run, groups, allowed), *pods, *pod_jobs_elsewhere(config, run), gather]


def _beside(
    config: CampaignConfig, run: RunDir, groups: Sequence[ServerGroup], allowed: limits.Allowance
) -> list[resources.Amounts]:
    """What each engine server asks for of that which pods may have."""
    found = []
    for job in server_jobs(config, run, groups, allowed) if allowed.caps else ():
        both = set(allowed.caps) & set(limits.resource_caps(_named(job.options)))
        found += [resources.shared(resources.asked(job.options), both)] * (job.elements or 1)
    return found


def check_resources(config: CampaignConfig, groups: Sequence[ServerGroup], where: Any) -> None:
    """Checks that limits let a pod and an engine server start at all.

    Raises:
        SiteError: One would stay in the queue for ever; names the limit.
    """
    run, pods = RunDir("/RUN"), config.slurm.pods
    known: dict[tuple[str, ...], tuple[resources.Cap, ...]] = {}
    jobs = [] if config.is_pool else [("slurm.pods", script.pod_job(config, run, 1))]
    jobs += [(f"slurm.pods.pools.{n}", script.pod_job(config, run, 1, pool=p)) for n, p in enumerate(pods.pools)]
    jobs += [("slurm.servers", job) for job in server_jobs(config, run, groups, limits.Allowance())]
    for key, job in jobs:
        if job.cluster:
            continue  # its limits are not ours to read
        options = _named(job.options)
        names = tuple(str(options.get(name)) for name in ("account", "qos", "partition"))
        known[names] = known[names] if names in known else limits.resource_caps(options)
        wanted = resources.asked(options)
        if cap := resources.impossible(known[names], wanted):
            what = "engine server" if job.role == "servers" else "pod"
            raise SiteError(
                f"{where(key)}: one {what} asks for {cap.resource}={wanted[cap.resource]}, and {cap}: it would never "
                "start; ask for less, or name another account or QOS"
            )


def _together(config: CampaignConfig, run: RunDir, groups: Sequence[ServerGroup]) -> script.Job:
    cpus = min((cpus for group in groups if (cpus := cpus_per_gpu(config, run, group))), default=None)
    return script.together_job(config, run, [group.gpus for group in groups for _ in range(group.count)], cpus)


def _options(config: CampaignConfig) -> dict[str, Any]:
    """The sbatch options of pods that decide which limits hold."""
    slurm = config.slurm
    return _named({"account": slurm.account, "partition": slurm.pods.partition, **slurm.extra, **slurm.pods.extra})


def _named(options: Mapping[str, Any]) -> dict[str, Any]:
    return {script.option_name(name): value for name, value in options.items()}


def _age(job_id: str) -> tuple[int, ...]:
    """Sorts ids by array and element: later ones are younger."""
    return tuple(int(part) for part in re.findall(r"\d+", number(job_id)))
