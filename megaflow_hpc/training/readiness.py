"""Determines what a trainer is waiting for: pods, engines, or other policies' trainers.

*Pods.* A live pod renews its lease. If no lease has been renewed for a while, the trainer asks the site whether pods
are running or queued. A trainer does not call Slurm itself, so it runs the command in :data:`ASK_VARIABLE`. If this
variable is not set, the trainer keeps waiting.

*Engines.* Engines load a new version of their policy's weights at different times, and sample with older weights until
then. So a trainer with a staleness bound waits for every live engine before it requests rollouts. It ignores engines
that are dead or refuse the version (:class:`~megaflow_hpc.rundir.endpoints.RefusedWeights`), unless no other engine is
left. It also ignores engines that are not registered yet, because they start with the newest weights.

*Other trainers.* A policy with ``samples: 0`` is a *helper*: it runs no tasks, and other policies' agents call its
model. Policies that run tasks are *owners*. A helper's step ``s`` uses the groups that the owners use in their steps
``s``. So each group is used exactly once. The helper's training is complete once the owners' trainers have ended and
the helper has used all their steps. With a staleness bound k, an owner requests the batch of step ``s`` only after
every helper has committed step ``s - 1 - k``. This keeps groups from piling up at a slow helper, and the bound holds
for the helper too. Deadlock is impossible, because a helper's step ``s`` needs the owners' steps ``s``, and these need
only earlier steps of the helper.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from megaflow_hpc.errors import StarvedError
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.lease import TIMES
from megaflow_hpc.rundir.endpoints import STALE_S, Endpoint, EndpointFiles, Heartbeats, RefusedWeights
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import OPEN
from megaflow_hpc.rundir.training import FOR_GOOD, Commit, Trainer, TrainingView
from megaflow_hpc.rundir.weights import current
from megaflow_hpc.training.plan import StepPlan, TrainingFiles

POLL_INTERVAL_S = 30.0
"""Seconds between two polls of the leases, and between two queries to the site."""
LEASE_READS_PER_S = 10
"""Maximum number of leases to read per second. With many pods, the poll interval grows accordingly."""
GIVE_UP_S = 900.0
"""A trainer gives up after this many seconds without pods. Until then, the user or ``watch`` may start new pods."""
ASK_VARIABLE = "MEGAFLOW_ASK_PODS"
"""Environment variable with a command that prints the number of running and queued pods. The command fails if the
number is unknown."""
QUEUED = "no pod runs yet; some are queued or starting"
ASK_TIMEOUT_S = 120.0
"""Timeout of the command in :data:`ASK_VARIABLE`, in seconds."""
ENDPOINT_READS_PER_S = 100
"""Maximum number of endpoint files to read per second. If there are fewer files, each call reads them all."""


# --- pods ---


def ask_site() -> int | None:
    """Returns the number of running and queued pods. Returns ``None`` if the number is unknown, for example because the
    trainer was started manually."""
    command = os.environ.get(ASK_VARIABLE, "")
    if not command:
        return None
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, timeout=ASK_TIMEOUT_S, check=True)
        return int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


class PodWatch:
    """Watches the pods of a run on behalf of a waiting trainer.

    Args:
        run: the run directory.
        ask: returns the number of running and queued pods, or ``None`` if unknown.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        run: RunDir,
        ask: Callable[[], int | None] = ask_site,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._ask, self._clock = run, ask, clock
        self._ledger = Ledger(run)
        self._seen: dict[str, object] = {}
        """Maps ``<pod>.<start>`` to the lease counter at the last poll."""
        self._next_at = self._alive_at = clock()
        """Monotonic times of the next poll, and of the last sign that a pod is alive."""
        self._gone_at: float | None = None
        """Time at which pods were first found missing. ``None`` if any pod is alive or queued."""
        self._message = ""

    def begin(self) -> None:
        """Starts a new wait. Assumes that a pod is alive now."""
        self._next_at = self._alive_at = self._clock()
        self._gone_at, self._message = None, ""

    def look(self) -> str:
        """Returns a message if no pod is alive, otherwise an empty string. Polls at most every :data:`POLL_INTERVAL_S`
        seconds.

        Raises:
            StarvedError: no pod has been running or queued for :data:`GIVE_UP_S` seconds.
            OSError: the run directory is unavailable.
        """
        now = self._clock()
        if now >= self._next_at:
            self._message = self._describe_absence(now)
            self._next_at = now + max(POLL_INTERVAL_S, len(self._seen) / LEASE_READS_PER_S)
        return self._message

    def _describe_absence(self, now: float) -> str:
        leases = {name: lease.get("counter") for name, lease in self._ledger.leases().items() if not lease.get("ended")}
        if any(self._seen.get(name) != counter for name, counter in leases.items()):
            self._alive_at = now
        self._seen = dict(leases)
        if now - self._alive_at <= TIMES.lease_s:
            self._gone_at = None
            return ""
        coming = self._ask()
        if coming != 0:
            self._gone_at = None
            return "no pod runs, and the number of queued pods is unknown" if coming is None else QUEUED
        self._gone_at = self._gone_at or now
        silent = now - self._gone_at
        remedy = f"start some with: megaflow-hpc resume {self._run}"
        if silent >= GIVE_UP_S:
            raise StarvedError(
                f"{self._run}: for {silent / 60:.0f} minutes no pod ran and none was queued, so no rollout can "
                f"arrive; {remedy}, and training continues from its last checkpoint"
            )
        return f"no pod runs and none is queued; {remedy}; this trainer ends in {(GIVE_UP_S - silent) / 60:.0f} min"


# --- engines ---


@dataclass(frozen=True)
class ServedWeights:
    """State of one policy's engines with respect to its newest weights."""

    missing: str
    """Description of the engines that a request must wait for, or an empty string."""
    serve_newest: bool
    """True if a live engine serves the newest weights."""


class Readiness:
    """Tracks the weights that the engines of a run serve.

    Args:
        run: the run directory.
        clock: monotonic clock in seconds.
    """

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._files, self._clock = run, EndpointFiles(run), clock
        self._heartbeats = Heartbeats(clock)
        self._polled: dict[tuple[str, int], tuple[ServedWeights, float]] = {}
        """Maps (policy, version) to the last polled state of the engines, and the time of the next poll."""

    def ordinal(self, policy: str) -> int:
        """Returns the index of a policy's newest weights among its versions. The initial model has index 0."""
        return current(self._run, policy).ordinal

    def engines(self, policy: str) -> ServedWeights:
        """Returns whether a policy's engines serve its newest weights. Reads are rate-limited, so this can be called
        often.

        Raises:
            OSError: the run directory is unavailable.
        """
        version, now = current(self._run, policy).version, self._clock()
        last = self._polled.get((policy, version))
        if last is not None and now < last[1]:
            return last[0]
        endpoints = self._files.serving(policy)
        engines = self._compared(policy, endpoints, version)
        self._polled = {key: value for key, value in self._polled.items() if key[0] != policy}
        self._polled[policy, version] = engines, now + len(endpoints) // ENDPOINT_READS_PER_S
        return engines

    def _compared(self, policy: str, endpoints: list[Endpoint], version: int) -> ServedWeights:
        alive = [endpoint for endpoint in endpoints if self._heartbeats.alive(endpoint)]
        behind = [endpoint for endpoint in alive if endpoint.weight_version < version]
        serve_newest = len(behind) < len(alive)
        late = [endpoint for endpoint in behind if not _refuses(endpoint, version)]
        if late:
            names = ", ".join(f"{endpoint.server} (serves {endpoint.weight_version})" for endpoint in late)
            return ServedWeights(f"{names} to load weights {version}", serve_newest)
        if serve_newest or not endpoints:
            return ServedWeights("", serve_newest)
        causes = "; ".join(_cause(endpoint, version) for endpoint in endpoints)
        return ServedWeights(f"an engine of policy {policy!r} to serve weights {version}: {causes}", serve_newest=False)


def _refuses(endpoint: Endpoint, version: int) -> RefusedWeights | None:
    return endpoint.refused if endpoint.refused and endpoint.refused.version == version else None


def _cause(endpoint: Endpoint, version: int) -> str:
    """Returns the reason why an engine does not serve the version, and what the user can do."""
    again = f"scontrol requeue {endpoint.job_id}" if endpoint.job_id else "start it again"
    if refused := _refuses(endpoint, version):
        return f"{endpoint.server} refuses them ({refused.cause}); to try again: {again}"
    return f"{endpoint.server} has not renewed its heartbeat for {STALE_S:.0f} s; if it does not return: {again}"


# --- other trainers ---


class Peer:
    """Reads the progress of another policy's training from the run directory.

    Args:
        run: the run directory.
        policy: name of the policy.
    """

    def __init__(self, run: RunDir, policy: str) -> None:
        self.policy = policy
        self._run, self._files, self._view = run, TrainingFiles(run, policy), TrainingView(run, policy)

    @property
    def committed(self) -> int:
        """Number of the last committed step, or 0.

        Raises:
            OSError: the run directory is unavailable.
        """
        return max(self._files.numbers(Commit), default=0)

    @property
    def ended(self) -> bool:
        """True if a trainer has ended the training, completely or early. False if it failed or has not started yet.

        Raises:
            OSError: the run directory is unavailable.
        """
        latest = self._files.read(Trainer, max(self._files.numbers(Trainer), default=0))
        return latest is not None and not (self._run.path / OPEN / latest.consumer).exists()

    def groups(self, step: int) -> set[str] | None:
        """Returns the groups that a step of the policy trains on or drops, or ``None`` if the step is not planned
        yet."""
        plan = self._files.read(StepPlan, step)
        return None if plan is None else plan.groups

    def waited_for(self, act: str) -> str:
        """Returns a phrase for log lines, such as ``the trainer of a to commit step 3``.

        Args:
            act: infinitive that names the expected action, such as ``commit step 3``.
        """
        word = self._view.last_word()
        text = f"the trainer of policy {self.policy!r} to {act}"
        if word is None or word.word not in FOR_GOOD:
            return text
        return f"{text}, but it {word.word} ({word.cause}); start it again with: megaflow-hpc resume {self._run}"
