"""Starts, scales and cancels the Slurm jobs of a run: engine arrays, trainers, pod arrays and the gather job.

Running jobs need neither slurmctld nor this process.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence

import msgspec

from megaflow_hpc.campaign import replacements
from megaflow_hpc.campaign.job_requests import beside, pod_options, together
from megaflow_hpc.campaign.live_jobs import ASK_SLURM_S, DISABLED, LiveJobs
from megaflow_hpc.campaign.replacements import BARREN_ROUNDS, PAUSE_S, Replacements, Successors
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.config.quotas import check_scale
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.blocks import numbers
from megaflow_hpc.rundir.endpoints import EndpointFiles
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Refused
from megaflow_hpc.rundir.record import JobRecord, RunRecord, ServerGroup
from megaflow_hpc.slurm import accounting, limits, site
from megaflow_hpc.slurm.accounting import JobState
from megaflow_hpc.slurm.arrays import (
    JOURNAL_BYTES,
    gather_job,
    pod_jobs,
    pod_jobs_elsewhere,
    server_jobs,
    trainer_jobs,
)
from megaflow_hpc.slurm.ids import array_of, cluster_of, number, scancel
from megaflow_hpc.trajectories.journal import packs

GONE_S = 120.0
"""Maximum seconds to wait for cancelled jobs to leave Slurm. Also the maximum wait for slurmctld before engines are
ended."""
MAX_DEPENDENCIES = 16
"""Maximum number of engines in the dependency of pods. Pods start after any of them has started."""

LEAVE_S = 30.0
"""Seconds that engines get to exit after the campaign has finished."""


class Jobs(LiveJobs):
    """Queries, starts, scales and cancels the Slurm jobs of a run.

    Args:
        planned: Content of ``run.json``.
    """

    def __init__(self, run: RunDir, config: CampaignConfig, planned: RunRecord, ledger: Ledger) -> None:
        super().__init__(run, config, planned, ledger)
        self._groups, self._servers = planned.server_groups, planned.servers
        self._planned_rollouts = planned.total
        self.notices: list[str] = []
        """Messages for the user about the most recent start."""
        self._asked_again: set[Refused] = set()
        """Refused requeues for which :meth:`bring_back` has sent another request."""
        self._brought_back_at = 0.0
        """:attr:`asked_at` of the last squeue answer that :meth:`bring_back` handled."""
        self._topped_up_at = 0.0
        """:attr:`asked_at` of the last squeue answer that :meth:`top_up` handled."""
        self._try_at, self._refused, self._why_refused = 0.0, 0, ""
        self._successors = Successors(config.slurm.lead_s)
        self.replacing = False
        """True if a later call of :meth:`top_up` will add pods."""

    # --- start ---

    def start(self) -> None:
        """Submits engine arrays, trainers, pod arrays and the gather job, up to the site's limits."""
        allowed = limits.allowance(pod_options(self._config))
        trainers = list(trainer_jobs(self._config, self._run))
        engines = sum(group.count for group in self._groups) + len(trainers)
        pods = self._config.slurm.pods
        count = 0 if self._config.is_pool else self._fitting(allowed, pods.here, engines + 1, pods.total)
        replacements.write(self._run, Replacements(pods.total, settled=self.arrays.ids("pods")))
        try:
            if self._config.slurm.together:
                for job in trainers:
                    self.arrays.queue(job)
                self.arrays.queue(together(self._config, self._run, self._groups))
                self._queue_gather([])
                self.invalidate()
                return
            started = self._queue_servers(allowed, self._groups)
            if self._config.is_pool:  # a pool consists only of servers, which run until it is cancelled
                self.invalidate()
                return
            # Let pods wait in the queue, not on a node, until at least one engine and all trainers have started.
            # Without trainers, no rollouts would be requested.
            dependency = "?".join(f"after:{engine}" for engine in started[:MAX_DEPENDENCIES]) or None
            if trainers:
                first = [job for trainer in trainers for job in self.arrays.queue(trainer)]
                dependency = "after:" + ":".join([*first, *started[:1]])
            others = beside(self._config, self._run, self._groups, allowed)
            for job in pod_jobs(self._config, self._run, allowed, count, dependency, engines, others):
                self.arrays.queue(job)
            for job in pod_jobs_elsewhere(self._config, self._run):
                self.arrays.queue(job)
            self._queue_gather(self.arrays.ids("servers"))
        except BaseException:
            self.cancel()  # a partial campaign would waste GPUs
            raise
        self.invalidate()

    def _queue_servers(self, allowed: limits.Allowance, groups: Sequence[ServerGroup]) -> list[str]:
        """Submits engine arrays. Returns the elements that are not held."""
        started: list[str] = []
        for job in server_jobs(self._config, self._run, groups, allowed):
            queued = self.arrays.queue(job)
            started += [] if job.options.get("hold") else queued
        return started

    def _fitting(self, allowed: limits.Allowance, wanted: int, others: int, total: int) -> int:
        """Returns how many of ``wanted`` pods can be queued in addition to ``others`` jobs.

        Args:
            total: The campaign's number of pods, for the notice to the user.

        Raises:
            SiteError: No pod fits.
        """
        if allowed.room is None or wanted + others <= allowed.room:
            return wanted
        fitting = allowed.room - others
        if fitting < 1:
            raise SiteError(
                f"{allowed.why} jobs at once and {allowed.queued} are queued: no room for {others} further jobs and a "
                "pod; wait until some have ended, or name another account or QOS"
            )
        self.notices.append(
            f"{fitting} of {wanted} pods are queued: {allowed.why} jobs at once. The others follow while run or watch "
            f"is open, or with: megaflow-hpc scale {self._run} --pods {total}"
        )
        return fitting

    def _queue_gather(self, servers: Sequence[str]) -> None:
        expected = self._journal_bytes()
        self.arrays.queue(gather_job(self._config, self._run, self._gather_dependency(), servers, expected))

    def _journal_bytes(self) -> float:
        """Returns the expected total size of the journals in bytes. It is the current size, plus an estimate for open
        blocks."""
        size = 0
        for path in self._run.journal.glob("*.[jp]*"):  # journals and packs
            with contextlib.suppress(FileNotFoundError):  # a journal that was packed and removed in the meantime
                size += path.stat().st_size
        blocks, done = len(numbers(self._run)), len(self._ledger.done())
        if not blocks:  # a trainer will add them
            return size + self._planned_rollouts * JOURNAL_BYTES
        of_block = size / done if done else self._planned_rollouts * JOURNAL_BYTES / blocks
        return size + max(0, blocks - done) * of_block

    def _gather_dependency(self) -> str:
        """Returns the dependency of the gather job. It waits until all trainers, and all pods on this cluster, have
        ended."""
        return "afterany:" + ":".join([*self._local_arrays(), *self.arrays.ids("trainer")])

    @property
    def _clusters(self) -> list[str]:
        """Names of the clusters in use. The empty name stands for this cluster."""
        return ["", *sorted({pool.cluster for pool in self._config.slurm.pods.pools if pool.cluster})]

    def _local_arrays(self) -> list[str]:
        """Returns the pod arrays on this cluster. Slurm accepts only these as dependencies."""
        return [array for array in self.arrays.ids("pods") if not cluster_of(array)]

    def until_pods_left(self) -> None:
        """Waits for pods on other clusters, on which the gather job cannot depend."""
        while not self._ledger.finished and self.live_pods() != []:
            time.sleep(ASK_SLURM_S)

    # --- act ---

    def revive(self) -> None:
        """Restarts jobs that Slurm holds or failed to requeue, and servers and trainers that ended while others run."""
        self.release_unlaunched()
        self.bring_back(0)
        self._marks.forget_refused()
        with self.arrays.alone():
            self.restart_servers()
        if self._config.training:
            self.restart_trainers()

    def bring_back(self, max_age_s: float = ASK_SLURM_S) -> list[str]:
        """Requeues ended jobs whose requeue Slurm refused. Acts once per squeue answer.

        Slurm forgets an ended job after MinJobAge, 5 minutes by default.

        Args:
            max_age_s: Maximum age of the squeue answer in seconds.

        Returns:
            Ids of the requeued jobs.
        """
        live = self.live(max_age_s)
        if live is None or self.asked_at == self._brought_back_at or self._marks.over:
            return []
        self._brought_back_at = self.asked_at
        # A job with Requeue=0 would be refused again; top_up replaces it.
        refused = {refusal for refusal in self._marks.refused() if DISABLED not in refusal.words} - self._asked_again
        room = self._config.slurm.pods.total - len(self.live_pods() or ())
        requeued: list[str] = []
        for refusal in sorted(refused, key=lambda refusal: (refusal.at, refusal.job)):
            if refusal.job in live or (refusal.role == "pod" and room <= 0):  # the pod may have been replaced
                continue
            self._asked_again.add(refusal)
            with contextlib.suppress(SiteError):
                site.ask("scontrol", *site.on(cluster_of(refusal.job)), "requeue", number(refusal.job))
                requeued.append(refusal.job)
                room -= refusal.role == "pod"
        if requeued:
            self._marks.forget_refused(requeued)
            self.invalidate()
        return requeued

    def gather_later(self, servers: Sequence[str]) -> bool:
        """Queues another gather job if pods will be requeued. Called by the gather job.

        Returns:
            True if another gather job was queued. The calling job then has nothing to do.
        """
        if self._marks.over or os.environ.get("SLURM_JOB_ID") not in self.arrays.ids("gather"):
            return False
        end = time.monotonic() + GONE_S
        while self.live(0) is None and site.has_slurm() and time.monotonic() < end:  # slurmctld may be restarting
            time.sleep(ASK_SLURM_S / 3)
        self.bring_back(0)
        if not [pod for pod in self.live_pods(0) or () if not cluster_of(pod.id)]:
            return False
        try:
            self._queue_gather(servers)
        except SiteError as error:
            self.notices.append(f"no other gather job could be queued: {error}; this one waits for the pods")
            self.until_pods_left()
            return False
        return True

    def restart_servers(self, indices: Collection[int] | None = None) -> None:
        """Submits the engine servers that Slurm no longer has.

        Args:
            indices: Only these servers, held if their policy's servers start on demand. Default: all, as planned.
        """
        elastic = {server.policy for server in self._servers if server.held}
        states = None if self._config.slurm.together else self.servers(0)
        if states is None:
            return
        missing: list[ServerGroup] = []
        for group in self._groups:
            last = None
            for index in range(group.first, group.first + group.count):
                if index in states or (indices is not None and index not in indices):
                    last = None
                    continue
                held = group.held or (indices is not None and self._servers[index].policy in elastic)
                if last is not None and last.held == held:
                    last.count += 1
                else:
                    last = msgspec.structs.replace(group, first=index, count=1, held=held)
                    missing.append(last)
        if missing:
            self._queue_servers(limits.allowance(pod_options(self._config)), missing)
            self.invalidate()

    def _replace_refused(self) -> None:
        """Replaces engine servers and trainers that ended because Slurm does not requeue them (Requeue=0). Raises
        SiteError."""
        refused = {mark.job for mark in self._marks.refused() if DISABLED in mark.words}
        live = self.live() if refused else None
        if live is None:
            return
        ended = refused - live.keys()
        servers = self._server_indices(ended)
        if servers:
            self.restart_servers(set(servers.values()))
        records = [record for record in self.arrays.records() if record.id in ended]
        trainers = {record.id: record.policy for record in records if record.policy}
        if trainers:
            self.restart_trainers(trainers.values())
        self._marks.forget_refused([*servers, *trainers])

    def restart_trainers(self, policies: Iterable[str] = ()) -> None:
        """Submits a trainer for each of ``policies``, or for all, unless it has a queued or running trainer."""
        states = self.trainer_states(0)
        if states is None:
            return
        missing = set(policies or self.trainers()) - states.keys()
        for trainer in trainer_jobs(self._config, self._run, missing):
            self.arrays.queue(trainer)
        if missing:
            self._postpone(self._waiting_gathers())
        self.invalidate()

    def _waiting_gathers(self) -> list[str]:
        live = self.live(0) or {}
        return [job for job in self.arrays.ids("gather") if live.get(job, JobState(job, "")).waits]

    def _postpone(self, gathers: Iterable[str]) -> None:
        """Makes gather jobs also wait for pods and trainers that were added later."""
        for gather in gathers:
            site.ask("scontrol", "update", f"jobid={gather}", f"dependency={self._gather_dependency()}")

    def scale(self, pods: int) -> dict[str, list[str]]:
        """Adds or removes pods until ``pods`` are queued or running. Idempotent.

        Added pods form a new array. To remove pods, cancels queued pods first, then drains the youngest running
        pods, which release their blocks.

        Returns:
            ``added`` and ``leaving``: ids of elements.

        Raises:
            ConfigError: The campaign is cancelled, or may not have that many pods.
            SiteError: Slurm does not respond, refuses the request, or has reached a limit on queued jobs.
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
                raise SiteError(f"{self._run}: Slurm does not report which pods exist; nothing was changed")
            here = self._not_leaving(live)
            if self._ledger.finished:
                return {"added": [], "leaving": []}
            plan = replacements.read(self._run, pods)
            plan.wanted = pods
            replacements.write(self._run, plan)
            if len(here) < pods:
                return {"added": self._add(pods - len(here), pods), "leaving": []}
            return {"added": [], "leaving": self._remove(here, len(here) - pods)}

    def _add(self, count: int, total: int) -> list[str]:
        allowed = limits.allowance(pod_options(self._config))
        gathers = self._waiting_gathers()
        added: list[str] = []
        fitting = self._fitting(allowed, count, int(not gathers), total)
        for job in pod_jobs(self._config, self._run, allowed, fitting):
            added += self.arrays.queue(job)
        self._postpone(gathers)
        if not gathers:
            self._queue_gather(self.arrays.ids("servers"))
        self.invalidate()
        return added

    def _remove(self, pods: Sequence[JobState], count: int) -> list[str]:
        queued = [pod.id for pod in pods if pod.state != "RUNNING"]
        running = [pod.id for pod in pods if pod.state == "RUNNING"]
        cancelled = sorted(queued, key=_age, reverse=True)[:count]
        for pod in cancelled:  # so that they are not replaced
            self._marks.leave(pod)
        if cancelled:
            scancel(cancelled)
        drained = sorted(running, key=_age, reverse=True)[: count - len(cancelled)]
        self.arrays.leave(drained)
        self.invalidate()
        return [*cancelled, *drained]

    def release(self, policy: str, count: int) -> list[str]:
        """Releases held servers of a policy until ``count`` are queued or running. Idempotent.

        Returns:
            Ids of the released elements.

        Raises:
            SiteError: Slurm does not respond, or refuses the request.
        """
        servers = self.servers(ASK_SLURM_S / 2)
        if servers is None:
            raise SiteError(f"{self._run}: Slurm does not report which engine servers exist; nothing was changed")
        own = {n: state for n, state in sorted(servers.items()) if self._servers[n].policy == policy}
        held = [state.id for state in own.values() if state.held]
        to_release = held[: max(0, count - (len(own) - len(held)))]
        if to_release:
            site.ask("scontrol", "release", *to_release)
            self.invalidate()
        return to_release

    def release_unlaunched(self) -> list[str]:
        """Releases jobs that Slurm holds because a node failed to launch them, and adds a notice for the user.

        Returns:
            Ids of the released jobs.
        """
        released: list[str] = []
        for job, state in sorted((self.live(0) or {}).items()):
            if state.unlaunched:
                try:  # one at a time, because scontrol fails if any job has ended
                    site.ask("scontrol", *site.on(cluster_of(job)), "release", number(job))
                    released.append(job)
                except SiteError as error:
                    self.notices.append(f"{job}: not released: {error}")
        if released:
            shown = f"{', '.join(released[:3])}{', …' if len(released) > 3 else ''}"
            count = f"{len(released)} jobs that their nodes" if len(released) > 1 else "a job that its node"
            self.notices.append(f"released {count} could not launch: {shown}")
            self.invalidate()
        return released

    def top_up(self) -> None:
        """Adds pods that could not be queued at first, and replaces pods that Slurm ended while blocks remain.

        Replaces pods with Requeue=0 shortly before they end. Acts once per squeue answer, and when a pod is about to
        end. Ignores pods that were submitted by hand or run on this machine.
        """
        live = self.live_pods()
        if live is None or (self.asked_at == self._topped_up_at and time.time() < self._try_at):
            return
        if self.bring_back():
            live = self.live_pods() or live
        self._topped_up_at, self._try_at, self.replacing = self.asked_at, math.inf, False
        pods = [record for record in self.arrays.records() if record.role == "pods"]
        if not pods or self._config.slurm.together or self._marks.over:
            return
        with self.arrays.alone():
            plan = replacements.read(self._run, self._config.slurm.pods.total)
            before = msgspec.to_builtins(plan)
            self._record_ends(plan, pods, live)
            open_blocks = len(set(numbers(self._run)) - self._ledger.done())
            try:
                self._replace_refused()
                if plan.due(self._lasting_count(live), open_blocks, time.time()):
                    self.arrays.adopt(self._config.name, self._clusters)
                    live = self.live_pods(0) or live
                    lasting = self._lasting_count(live)
                    count = plan.due(lasting, open_blocks, time.time())
                    if count and self.servers() == {}:  # the gather job has ended the earlier servers
                        self.restart_servers()
                    added = self._add(count, plan.wanted) if count else []
                    plan.added(added, time.time(), len(self._not_leaving(live)) - lasting)
                self._refused = 0
            except SiteError as error:  # limits are reached, or Slurm does not respond or refuses
                self._refused += 1
                plan.again_at = time.time() + min(3600.0, PAUSE_S * 2**self._refused)
                self._why_refused = str(error)
            if msgspec.to_builtins(plan) != before:
                replacements.write(self._run, plan)
        staying = self._not_leaving(live)
        if len(staying) >= plan.wanted:  # pods that Slurm refused to requeue were replaced
            there = {state.id for state in live}
            refused = [each.job for each in self._marks.refused() if each.role == "pod" and each.job not in there]
            self._marks.forget_refused(refused)
        self.replacing = self._refused < BARREN_ROUNDS and plan.due(len(staying), open_blocks, math.inf) > 0
        self._try_at = self._successors.next_at(staying, time.time())
        if self.replacing or plan.again_at > time.time():
            self._try_at = min(self._try_at, plan.again_at)

    def _record_ends(self, plan: Replacements, pods: Sequence[JobRecord], live: Sequence[JobState]) -> None:
        """Updates ``plan`` with the ends of pods that Slurm no longer lists."""
        listed = {state.id for state in live}
        asked_at = time.time() - (time.monotonic() - self.asked_at)
        missed = plan.missed(pods, listed, asked_at)
        leaving = self._marks.leaving() if missed else set()
        states = {job: self._ended[job] for job in missed if job in self._ended}
        if unlisted := [job for job in missed if job not in states]:
            states |= accounting.finished_jobs(sorted({array_of(job) for job in unlisted}))
        ends = {}
        for job in missed:
            state = states[job].state if job in states else ""
            if job in leaving:
                ends[job] = "leaving"
            elif self._gave_no_results(job):
                ends[job] = "vain"
            elif state not in accounting.LIVE:  # slurmdbd may be late
                ends[job] = state
        # Look for journals, because leases of ended pods are removed. A start that stores nothing leaves no journal.
        journals = packs.sizes(self._run.journal) if ends or plan.last else ()
        stored = {name.removesuffix(packs.JOURNAL).rpartition(".")[0] for name in journals}
        plan.take_in(pods, {state.id for state in self._not_leaving(live)}, ends, stored)

    def _gave_no_results(self, pod: str) -> bool:
        """Returns whether a pod was given up because too many consecutive starts stored nothing.

        ``pods.sh`` records these starts. The limit is ``slurm.requeues``.
        """
        try:
            return (self._run.logs / f"pod-{number(pod)}.requeues").stat().st_size > self._config.slurm.requeues
        except OSError:
            return False

    def _lasting_count(self, pods: Sequence[JobState]) -> int:
        """Returns the number of pods that neither leave nor are due to be replaced."""
        staying = self._not_leaving(pods)
        return len(staying) - len(self._successors.ending(staying, time.time()))

    def _not_leaving(self, pods: Sequence[JobState]) -> list[JobState]:
        """Returns the pods that are not marked as leaving."""
        leaving = self._marks.leaving()
        return [pod for pod in pods if pod.id not in leaving]

    def forgive(self) -> None:
        """Lets :meth:`top_up` replace pods again, even if replacing was given up."""
        with self.arrays.alone():
            plan = replacements.read(self._run, self._config.slurm.pods.total)
            plan.forgive()
            replacements.write(self._run, plan)

    def unreplaced(self) -> list[str]:
        """Returns warnings about pods that ended without being replaced."""
        plan = replacements.read(self._run, 0)
        lines = []
        if plan.vain:
            pods = f"{len(plan.vain)} pods" if len(plan.vain) > 1 else "a pod"
            lines.append(
                f"{pods} stored nothing in {self._config.slurm.requeues + 1} starts in a row and ended; see: "
                f"megaflow-hpc logs {self._run} {plan.vain[-1]}; once the cause is fixed: "
                f"megaflow-hpc resume {self._run}"
            )
        if plan.given_up:
            lines.append(
                f"replacement pods stored nothing in {BARREN_ROUNDS} rounds, so no more are added; see: "
                f"megaflow-hpc logs {self._run}; once the cause is fixed: megaflow-hpc resume {self._run}"
            )
        if self._refused:
            lines.append(f"pods that ended cannot be replaced at the moment: {self._why_refused}")
        return lines

    def cancel(self) -> list[str]:
        """Cancels all jobs of the run. Returns their ids."""
        ids = self.ids()
        if site.has_slurm():
            try:
                self.arrays.adopt(self._config.name, self._clusters)
                ids = self.ids()
            finally:
                if ids:
                    scancel(ids)  # includes jobs that have ended, which is harmless
        self.invalidate()
        return ids

    def end_servers(self, ids: Sequence[str]) -> list[str]:
        """Ends the engine arrays after the campaign. Called by the gather job.

        Cancels queued elements immediately and running elements after :data:`LEAVE_S` seconds.

        Returns:
            The arrays that had to be cancelled.
        """
        end, pause_s = time.monotonic() + LEAVE_S, 2.0
        while live := [job for job in accounting.live_jobs(ids).values() if job.live]:
            if time.monotonic() > end:
                scancel(sorted({array_of(job.id) for job in live}))
                break
            # scancel --state=PENDING would fetch the whole job table.
            if queued := [job.id for job in live if job.waits]:
                with contextlib.suppress(SiteError):  # they may have ended
                    scancel(queued)
            time.sleep(pause_s)  # servers poll for the end of the campaign every few seconds
            pause_s *= 1.5
        EndpointFiles(self._run).clear()
        return sorted({array_of(job.id) for job in live})

    def until_gone(self) -> None:
        """Waits until all jobs of the run have left Slurm.

        Raises:
            SiteError: Some jobs remain after :data:`GONE_S` seconds.
        """
        end = time.monotonic() + GONE_S
        pause_s = 1.0
        while live := self.live(0):
            if time.monotonic() > end:
                raise SiteError(f"jobs {' '.join(sorted(live))} were cancelled and are still there; try again later")
            time.sleep(pause_s)
            pause_s = min(15.0, 1.5 * pause_s)


def _age(job_id: str) -> tuple[int, ...]:
    """Returns a sort key for a job id, in which later arrays and elements come last."""
    return tuple(int(part) for part in re.findall(r"\d+", number(job_id)))
