"""Coordinates pods: a leader polls on behalf of all pods, so that metadata operations do not grow quadratically.

The leader (:data:`~megaflow_hpc.ledger.leader.COORDINATOR`) surveys the ledger, lists the engines and sums up the
campaign's usage. It also removes files that are no longer needed. It publishes its report in its lease file, and the
other pods poll only that file. If there are only a few pods or no leader, each pod polls the ledger itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from enum import Enum

import msgspec

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.accounts import progress_of
from megaflow_hpc.ledger.coordinator import PRUNE_S, Surveyed
from megaflow_hpc.ledger.files import Operation
from megaflow_hpc.ledger.leader import COORDINATOR, FEW, RENEW_S, Leader, Report, reported
from megaflow_hpc.ledger.lease import TIMES
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.live import Asked, LiveFiles
from megaflow_hpc.rundir.pods.condensing import EndedPods

SOON_S = 2.0
"""Minimum interval between updates of a lease, in seconds."""
SELDOM_S = 10.0
"""Seconds between polls if there are only a few pods."""
LOOKS_PER_S = 33.0
"""Maximum number of times per second that all pods together read the leader's report. It also limits how often they
renew their leases."""
CALLS_PER_TURN = 64
"""Maximum number of file-system calls of a survey before the I/O thread returns to storing results."""


class Role(Enum):
    """Role of a pod, decided at each poll of the leader's lease.

    ========= ============================================================= ====================
    role      when                                                          data source
    ========= ============================================================= ====================
    LEADER    this pod holds the lease, or acquired the free lease          its own survey
    FOLLOWER  another pod leads and has reported more than ``few`` pods     the leader's report
    ALONE     otherwise                                                     its own polls
    ========= ============================================================= ====================
    """

    LEADER = "leader"
    FOLLOWER = "follower"
    ALONE = "alone"


class Coordination:
    """One pod's part in the coordination. Used only by the I/O thread.

    Args:
        clock: A monotonic clock, in seconds.
        few: Maximum number of pods for which each pod polls the ledger itself.
    """

    def __init__(
        self,
        ledger: Ledger,
        endpoints: Endpoints,
        budget: CampaignBudget,
        clock: Callable[[], float] = time.monotonic,
        few: int = FEW,
    ) -> None:
        self._name = ledger.identity.name if ledger.identity else ""
        self._leader = Leader(ledger.run, COORDINATOR, self._name, clock)
        self._ledger, self._endpoints, self._budget = ledger, endpoints, budget
        self._clock, self._few = clock, few
        self.role = Role.ALONE
        self.report = Report()
        """The latest report, published by this pod or read from the leader."""
        self._survey: Operation[Surveyed] | None = None
        self._pruning: Operation[None] | None = None
        """The pruning in progress, or ``None``. It pauses while a survey runs."""
        self._ended_pods = EndedPods(ledger.run.events, TIMES.lease_s, clock)
        self._looked_at = self._renewed_at = self._pruned_at = -math.inf
        self._listed = ""
        """Digest of the list of engines that this pod last published or adopted."""
        self._live = LiveFiles(ledger.run, clock)

    @property
    def renew_s(self) -> float:
        """Interval in seconds at which this pod updates the progress in its lease."""
        return max(SOON_S, self.report.pods / LOOKS_PER_S)

    @property
    def _look_interval_s(self) -> float:
        return self.renew_s if self.report.pods > self._few else SELDOM_S

    def tick(self) -> None:
        """Polls the leader's lease, or continues the survey or pruning in progress. Raises OSError."""
        now = self._clock()
        if self._survey is None and now - self._looked_at >= self._look_interval_s:
            self._looked_at = now
            self._look()
        try:
            if self._survey is not None:
                self._continue_survey(self._survey)
            if self._survey is None and self.role is Role.LEADER:
                self._prune(now)
        except OSError:  # an operation cannot continue after an error
            self._survey = self._pruning = None
            raise

    def list_engines(self) -> bool:
        """Lists the engines, or adopts the leader's list. Returns true if the list has changed and gateways must be
        informed."""
        if self.role is Role.FOLLOWER and self.report.generation:
            if self.report.generation == self._listed:
                return False
            changed = self._endpoints.adopt()
            self._listed = self._endpoints.engines.generation  # the previous one after a failed read
            return changed
        changed = self._endpoints.refresh()
        generation = self._endpoints.engines.generation
        if self.role is Role.LEADER and self._listed != generation:
            self._endpoints.publish()
            self._listed = generation
        return changed

    def asked(self) -> Asked:
        """Returns the rollouts whose status viewers have requested. Raises OSError."""
        return self.report.asked if self.role is Role.FOLLOWER else self._live.asked()

    def leave(self) -> None:
        """Resigns as leader, so that another pod can take over. Raises OSError."""
        self._ledger.follow(None)
        self._leader.leave()

    def _continue_survey(self, survey: Operation[Surveyed]) -> None:
        if survey.advance(CALLS_PER_TURN):
            self._survey = None
            self._publish(survey.result)
        elif self._clock() - self._renewed_at >= RENEW_S and not self._hold(self.report):
            self._survey = None
            self._take_role(Role.ALONE)

    def _prune(self, now: float) -> None:
        if self._pruning is None and now - self._pruned_at >= PRUNE_S:
            self._pruned_at, self._pruning = now, self._ledger.prune()
        if self._pruning is not None and self._pruning.advance(CALLS_PER_TURN):
            self._pruning = None
            self._ended_pods.look(self._ledger.pods())
        self._ended_pods.advance()

    def _hold(self, report: Report) -> bool:
        """Takes or renews the leader's lease with this report. Returns false if another pod leads."""
        self._renewed_at = self._clock()
        return self._leader.hold(msgspec.to_builtins(report))

    def _look(self) -> None:
        holder = self._leader.holder()
        if holder in ("", self._name):
            if holder or self._hold(self.report):
                self._survey = self._ledger.survey()
                self._take_role(Role.LEADER)
            else:
                self._take_role(Role.ALONE)
            return
        self.report = reported(self._leader)
        many_pods = self.report.pods > self._few
        self._take_role(Role.FOLLOWER if self.report.survey is not None and many_pods else Role.ALONE)

    def _take_role(self, role: Role) -> None:
        self.role = role
        uses_survey = role is not Role.ALONE and self.report.pods > self._few
        self._ledger.follow(self.report.survey if uses_survey else None)

    def _publish(self, surveyed: Surveyed) -> None:
        leases, live = surveyed.leases, surveyed.live
        many_pods = len(live) > self._few
        progress = {name: progress_of(leases[name]) for name in live}
        report = Report(
            pods=len(live),
            survey=surveyed.survey,
            generation=self._listed,
            exceeded=self._budget.exceeded(surveyed.accounts),
            progress={name: shown for name, shown in progress.items() if shown is not None},
            asked=self._live.asked() if many_pods else Asked(),
        )
        leads = True
        if report != self.report or self._clock() - self._renewed_at >= RENEW_S:
            leads = self._hold(report)
        self.report = report
        self._take_role(Role.LEADER if leads else Role.ALONE)
