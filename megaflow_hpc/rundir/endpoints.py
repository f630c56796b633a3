"""``RUN/endpoints``: files published by engine servers, and the keys for requests to them.

::

    <policy>.<n>.json           :class:`Endpoint`: the server is serving; rewritten with every heartbeat
    <policy>.<n>.loading        :class:`LoadingServer`: paused briefly to load weights; other servers wait for it
    <policy>.<n>.starting       :class:`FailedServer`: the latest start failed and will be retried, or its external
                                endpoint is unavailable
    <policy>.<n>.failed.json    :class:`FailedServer`: the server gave up
    .pool.<policy>.key          :class:`PoolMembership`: the engine pool that serves this policy's model
    .listing                    :class:`EndpointListing`: all endpoints, listed by one pod for the others

Every file has mode 0600 and is replaced by rename. A later start of the same array element may already have published
its own files. So a start withdraws only files that contain its own ``start``. Readers skip files that are damaged or
being withdrawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megaflow_hpc.rundir.json_files import read_json, try_read_json, write_record
from megaflow_hpc.rundir.layout import RunDir

T = TypeVar("T")

FAILED, LOADING, LISTING, STARTING = ".failed.json", ".loading", ".listing", ".starting"
STALE_S = 100.0
"""A server counts as dead after this many seconds without a heartbeat, which is three periods."""


SERVICE = "service:"
"""Prefix of a service's name in place of a policy. No policy's name has a colon."""


class RefusedWeights(msgspec.Struct):
    """A weight version that a server could not load."""

    version: int
    cause: str = ""


class Endpoint(msgspec.Struct, kw_only=True):
    """An engine server that is serving."""

    server: str
    """``<policy>.<n>``."""
    policy: str
    url: str
    key: str = ""
    """Bearer token. Omitted from the endpoints that an engine pool publishes."""
    model_name: str = ""
    protocol: str = "plain"
    """Protocol between gateway and engine: ``text``, ``plain`` or ``split``."""
    template: str = ""
    """Effect of the served chat template on earlier messages. Empty if unknown."""
    weight: float = 1.0
    """Share of the policy's requests, relative to the policy's other servers."""
    tls_fingerprint: str = ""
    """SHA-256 fingerprint of the TLS certificate. Empty without TLS."""
    node: str = ""
    job_id: str = ""
    start: str = ""
    """Random id of this start of the server."""
    started_at: float = 0.0
    """Unix seconds."""
    heartbeat: int = 0
    weight_version: int = 0
    refused: RefusedWeights | None = None
    down: str = ""
    """Why the engine did not answer the latest request. Empty if it answered."""
    in_flight: int = 0
    """Number of requests that the server processes or has queued."""
    waiting: int = 0
    """Number of requests in the engine's queue."""
    wait_s: float = 0.0
    """Expected seconds until the last queued request starts, at the rate of the past 30 seconds."""


class FailedServer(msgspec.Struct, kw_only=True):
    """An engine server that gave up, or whose latest start failed."""

    server: str
    policy: str
    cause: str
    lasting: bool = False
    """True if another start would fail too."""
    down: bool = False
    """True if the server waits for an external endpoint that is unavailable."""
    job_id: str = ""
    log: str = ""
    """Path of the engine's log. Empty if there is none."""
    at: float = 0.0
    """Unix seconds."""


class LoadingServer(msgspec.Struct, kw_only=True):
    """An engine server that is loading weights and not serving."""

    server: str = ""
    policy: str
    start: str = ""
    weight_version: int


class PoolMembership(msgspec.Struct, kw_only=True):
    """A campaign's access to the engine pool that serves one of its policies."""

    pool: str
    """The pool's run directory."""
    policy: str
    theirs: str
    """Name of the policy in the pool."""
    key: str


class EndpointListing(msgspec.Struct, kw_only=True):
    """All endpoints, which one pod lists for the others."""

    generation: str
    """Digest of the parts of the listing that gateways need."""
    found: dict[str, Any]
    """File name → content of the endpoint file. For a pool's server, the key is this campaign's own key."""


class Heartbeats:
    """Detects dead processes: their heartbeats stop changing. Measures with this process's clock only.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[object, float]] = {}
        """Name → its latest state, and when this process first saw that state."""

    def unchanged_s(self, name: str, state: object) -> float:
        """Returns the seconds for which this process has seen ``name`` in this state. The first state counts as new."""
        now = self._clock()
        before, since = self._seen.setdefault(name, (state, now))
        if before != state:
            self._seen[name] = state, now
            return 0.0
        return now - since

    def alive(self, endpoint: Endpoint) -> bool:
        """Returns whether a server has renewed its heartbeat, or started again, within :data:`STALE_S`."""
        return self.unchanged_s(endpoint.server, (endpoint.start, endpoint.heartbeat)) < STALE_S


class EndpointFiles:
    """Reads and writes the endpoint files of one run."""

    def __init__(self, run: RunDir) -> None:
        self._folder = run.endpoints

    def serving(self, policy: str | None = None) -> list[Endpoint]:
        """Returns the servers that serve a policy, or any policy, sorted by file name."""
        paths = [path for path in self._folder.glob("*.json") if not path.name.endswith(FAILED)]
        endpoints = _readable(paths, Endpoint)
        return [endpoint for endpoint in endpoints if endpoint.url and policy in (None, endpoint.policy)]

    def failed(self) -> list[FailedServer]:
        """Returns the servers that gave up."""
        return _readable(self._folder.glob(f"*{FAILED}"), FailedServer)

    def starting(self) -> list[FailedServer]:
        """Returns the servers that retry after a failed start, or wait for an external endpoint that is down."""
        return _readable(self._folder.glob(f"*{STARTING}"), FailedServer)

    def loading(self, policy: str) -> list[LoadingServer]:
        """Returns the servers of a policy that are loading weights."""
        servers = []
        for path in sorted(self._folder.glob(f"*{LOADING}")):
            server = try_read_json(path, LoadingServer)
            if server is not None and server.policy == policy:
                server.server = path.name.removesuffix(LOADING)
                servers.append(server)
        return servers

    def memberships(self) -> list[PoolMembership]:
        """Returns the engine pools that serve models of this campaign.

        Raises:
            OSError: A key file cannot be read.
            ValueError: A key file is damaged.
        """
        paths = sorted(self._folder.glob(".pool.*.key"))
        return [read_json(path, PoolMembership) for path in paths]

    def publish(self, endpoint: Endpoint) -> None:
        """Publishes a server's heartbeat, and withdraws its loading and starting files."""
        self._write(self._file(endpoint.server), endpoint)
        self._loading_file(endpoint.server).unlink(missing_ok=True)
        if endpoint.heartbeat <= 1:
            self.withdraw_starting(endpoint.server)

    def publish_failed(self, server: FailedServer) -> None:
        """Publishes the failure of a server that gave up."""
        self._write(self._folder / f"{server.server}{FAILED}", server)
        self.withdraw_starting(server.server)

    def publish_starting(self, server: FailedServer) -> None:
        """Publishes why a server's latest start failed."""
        self._write(self._folder / f"{server.server}{STARTING}", server)

    def withdraw_starting(self, server: str) -> None:
        """Withdraws the reason of a failed start, once the server serves, gives up or leaves."""
        (self._folder / f"{server}{STARTING}").unlink(missing_ok=True)

    def publish_loading(self, server: LoadingServer) -> None:
        """Publishes that a server is loading weights."""
        self._write(self._loading_file(server.server), server)

    def withdraw_failed(self, server: str) -> None:
        """Withdraws the failure of an earlier start."""
        (self._folder / f"{server}{FAILED}").unlink(missing_ok=True)

    def publish_membership(self, membership: PoolMembership) -> None:
        """Publishes the key for the engine pool that serves a policy's model."""
        self._write(self._folder / f".pool.{membership.policy}.key", membership)

    def publish_listing(self, listing: EndpointListing) -> None:
        """Publishes one pod's listing for the other pods."""
        self._write(self._folder / LISTING, listing)

    def listing(self) -> EndpointListing | None:
        """Returns the listing published by a pod, or ``None`` if there is none."""
        return try_read_json(self._folder / LISTING, EndpointListing)

    def withdraw(self, server: str, start: str) -> bool:
        """Withdraws this start's files of a server. Returns False if a later start has published its own."""
        endpoint = try_read_json(self._file(server), Endpoint)
        if endpoint is None or endpoint.start != start:
            return False
        self._file(server).unlink(missing_ok=True)
        return True

    def withdraw_loading(self, server: str, start: str) -> None:
        """Withdraws this start's loading state. The file of a later start is kept."""
        loading = try_read_json(self._loading_file(server), LoadingServer)
        if loading is not None and loading.start == start:
            self._loading_file(server).unlink(missing_ok=True)

    def clear(self) -> None:
        """Withdraws all endpoints, on behalf of servers that were killed."""
        for endpoint in self.serving():
            self._file(endpoint.server).unlink(missing_ok=True)
        for server in self.starting():
            self.withdraw_starting(server.server)

    def _file(self, server: str) -> Path:
        return self._folder / f"{server}.json"

    def _loading_file(self, server: str) -> Path:
        return self._folder / f"{server}{LOADING}"

    def _write(self, path: Path, value: msgspec.Struct) -> None:
        write_record(path, value, 0o600)


def _readable(paths: Iterable[Path], kind: type[T]) -> list[T]:
    """Returns the records of all readable files, in the order of their paths."""
    records = [try_read_json(path, kind) for path in sorted(paths)]
    return [record for record in records if record is not None]
