"""Determines which engines a trainer must wait for before it requests rollouts.

Engines load each new version of their policy's weights at their own pace. Rollouts requested before that are sampled by
older weights, so a trainer with a staleness bound waits for every engine that is alive. It does not wait for an engine
that is dead or refuses the version (:class:`~megaflow_hpc.rundir.endpoints.RefusedWeights`), unless no other engine is
left. Engines that are not registered need no wait, because they start with the newest weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from megaflow_hpc.rundir.endpoints import STALE_S, Endpoint, EndpointFiles, Heartbeats
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import current

READS_PER_S = 100
"""Number of endpoint files to read per second. If there are fewer, they are read at every call."""


@dataclass(frozen=True)
class ServedWeights:
    """The engines of one policy at one moment."""

    missing: str
    """Describes what a request must wait for; empty if nothing."""
    serve_newest: bool
    """True if a live engine serves the newest weights."""


class Readiness:
    """Follows the engines of a run.

    Args:
        run: the run directory.
        clock: monotonic clock in seconds.
    """

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._files, self._clock = run, EndpointFiles(run), clock
        self._heartbeats = Heartbeats(clock)
        self._polled: dict[tuple[str, int], tuple[ServedWeights, float]] = {}
        """(policy, version) → the engines at the last poll, and when to poll next."""

    def ordinal(self, policy: str) -> int:
        """Returns the ordinal of a policy's newest weights."""
        return current(self._run, policy).ordinal

    def engines(self, policy: str) -> ServedWeights:
        """Returns the state of a policy's engines. Cheap enough to call often.

        Raises:
            OSError: the run directory is unavailable.
        """
        version, now = current(self._run, policy).version, self._clock()
        last = self._polled.get((policy, version))
        if last is not None and now < last[1]:
            return last[0]
        endpoints = self._files.serving(policy)
        engines = self._judge(policy, endpoints, version)
        self._polled = {key: value for key, value in self._polled.items() if key[0] != policy}
        self._polled[policy, version] = engines, now + len(endpoints) // READS_PER_S
        return engines

    def _judge(self, policy: str, endpoints: list[Endpoint], version: int) -> ServedWeights:
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


def _refuses(endpoint: Endpoint, version: int) -> bool:
    return endpoint.refused is not None and endpoint.refused.version == version


def _cause(endpoint: Endpoint, version: int) -> str:
    """Describes why an engine is not waited for, with the remedy."""
    again = f"scontrol requeue {endpoint.job_id}" if endpoint.job_id else "start it again"
    if endpoint.refused is not None and _refuses(endpoint, version):
        return f"{endpoint.server} refuses them ({endpoint.refused.cause}); to try again: {again}"
    return f"{endpoint.server} has not renewed its heartbeat for {STALE_S:.0f} s; if it does not return: {again}"
