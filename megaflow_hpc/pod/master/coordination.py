"""What one pod finds out for all, so that metadata operations do not grow with the square of the pods.

The pod that holds the lease :data:`~megaflow_hpc.ledger.leader.COORDINATOR` surveys the ledger, reads every pod's
lease, lists the engines and sums up what the campaign uses. The file of its lease is its report, the one file that
every other pod reads now and then. Where few pods run, each looks at the ledger for itself, which is quicker; where
nobody leads, all do so until somebody has taken the lease.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.files import Operation
from megaflow_hpc.ledger.leader import COORDINATOR, RENEW_S, Leader
from megaflow_hpc.ledger.report import FEW, Report, progress_of, reported
from megaflow_hpc.ledger.survey import Surveyed
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.live import Asked, LiveFiles

SOON_S = 2.0
SELDOM_S = 10.0
"""Between two looks where pods are few."""
LOOKS_PER_S = 33.0
"""Reports that all pods together read in a second, and leases that they renew."""
SLICE = 64
"""Calls of a survey between which results are stored."""


class Coordination:
    """One pod's part in it; belongs to the I/O thread.

    Args:
        clock: seconds of a clock that never jumps.
        few: see :data:`~megaflow_hpc.ledger.report.FEW`.
    """

    def __init__(
        self,
        ledger: Ledger,
        endpoints: Endpoints,
        budget: CampaignBudget,
        clock: Callable[[], float] = time.monotonic,
        few: int = FEW,
    ) -> None:
        name = ledger.identity.name if ledger.identity else ""
        self._lease = Leader(ledger.run, COORDINATOR, name, clock)
        self._name, self._ledger, self._endpoints, self._budget = name, ledger, endpoints, budget
        self._clock, self._few = clock, few
        self.report = Report()
        """What is known for all: of this pod's own survey, or of another's."""
        self.leads = False
        self._follows = False
        self._survey: Operation[Surveyed] | None = None
        self._looked_at = self._renewed_at = -math.inf
        self._generation = ""
        """Of the engines that this pod knows."""
        self._live = LiveFiles(ledger.run, clock)

    @property
    def renew_s(self) -> float:
        """How often this pod's lease shall say how far it is, in seconds."""
        return max(SOON_S, self.report.pods / LOOKS_PER_S)

    @property
    def _every_s(self) -> float:
        return self.renew_s if self.report.pods > self._few else SELDOM_S

    def tick(self) -> None:
        """Looks at the report, or goes on with a survey. Raises OSError."""
        now = self._clock()
        if self._survey is None and now - self._looked_at >= self._every_s:
            self._looked_at = now
            self._look()
        if self._survey is not None and self._survey.advance(SLICE):
            found, self._survey = self._survey.result, None
            self._tell(found)

    def list_engines(self) -> bool:
        """Looks at the engines, or at their listing where it is new; whether gateways must hear of a change."""
        if self._follows and not self.leads and self.report.generation:
            if self.report.generation == self._generation:
                return False
            changed = self._endpoints.adopt()
            self._generation = self._endpoints.generation  # the old one where the listing could not be read
            return changed
        changed = self._endpoints.refresh()
        if self.leads and self._generation != self._endpoints.generation:
            self._endpoints.publish()
            self._generation = self._endpoints.generation
        return changed

    def asked(self) -> Asked:
        """Returns what viewers want to know. Raises OSError."""
        return self.report.asked if self._follows and not self.leads else self._live.asked()

    def leave(self) -> None:
        """Lets another pod take the lease. Raises OSError."""
        self._ledger.follow(None)
        self._lease.leave()

    def _look(self) -> None:
        holder = self._lease.holder()
        if holder in ("", self._name):
            self.leads = bool(holder) or self._lease.hold(msgspec.to_builtins(self.report))
            self._survey = self._ledger.survey() if self.leads else None
            self._follow(self._survey is not None)
            return
        self.leads = False
        self.report = reported(self._lease)
        self._follow(self.report.survey is not None)

    def _follow(self, somebody: bool) -> None:
        self._follows = somebody and self.report.pods > self._few
        self._ledger.follow(self.report.survey if self._follows else None)

    def _tell(self, found: Surveyed) -> None:
        leases, live = found.leases, found.live
        report = Report(
            pods=len(live),
            survey=found.survey,
            generation=self._generation,
            exceeded=self._budget.exceeded(leases),
            progress={name: progress for name in live if (progress := progress_of(leases[name])) is not None},
            asked=self._live.asked() if len(live) > self._few else Asked(),
        )
        if report != self.report or self._clock() - self._renewed_at >= RENEW_S:
            self.leads = self._lease.hold(msgspec.to_builtins(report))
            self._renewed_at = self._clock()
        self.report = report
        self._follow(self.leads)
