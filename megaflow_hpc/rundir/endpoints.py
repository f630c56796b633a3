"""Reads and writes ``RUN/endpoints``: files that engine servers publish, and the keys for sending them requests.

::

    <policy>.<n>.json           :class:`Endpoint`: the server is serving; rewritten with every heartbeat
    <policy>.<n>.loading        :class:`LoadingServer`: paused briefly to load weights; other servers wait for it
    <policy>.<n>.starting       :class:`FailedServer`: the latest start failed and will be retried, or its external
                                endpoint is unavailable
    <policy>.<n>.failed.json    :class:`FailedServer`: the server gave up
    .pool.<policy>.key          :class:`PoolMembership`: access to the engine pool that serves this policy's model
    .listing                    :class:`EndpointListing`: all endpoints, listed by one pod on behalf of all pods

Every file has mode 0600 and is replaced by rename. A server withdraws only files that contain its own ``start``,
because a later start of the same array element may already have published new ones. Readers skip files that are damaged
or being withdrawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megaflow_hpc.rundir.layout import RunDir, read_json, try_read_json, write_record

T = TypeVar("T")

FAILED, LOADING, LISTING, STARTING = ".failed.json", ".loading", ".listing", ".starting"
STALE_S = 100.0
"""A server counts as dead after this many seconds without a heartbeat. This is three heartbeat periods."""


SERVICE = "service:"
"""Prefix of a service's name where a policy name is expected. A policy name cannot contain a colon."""


class Load(msgspec.Struct, frozen=True):
    """Load of one server since its previous heartbeat."""

    in_flight: int = 0
    """Number of requests that are queued or being processed."""
    waiting: int = 0
    """Number of requests waiting in the engine's queue or, in a pool, at the proxy."""
    wait_s: float = 0.0
    """Expected seconds until the last queued request starts, based on the throughput of the past 30 seconds."""


class RefusedWeights(msgspec.Struct):
    """A weight version that a server could not load."""

    version: int
    cause: str = ""


class Endpoint(msgspec.Struct, kw_only=True):
    """An engine server that is serving requests."""

    server: str
    """Server name, ``<policy>.<n>``."""
    policy: str
    url: str
    key: str = ""
    """Bearer token for requests. Empty in the endpoints that an engine pool advertises."""
    model_name: str = ""
    protocol: str = "plain"
    """Protocol between gateway and engine: ``text``, ``plain`` or ``split``."""
    template: str = ""
    """How the served chat template treats earlier messages of a conversation. Empty if unknown."""
    weight: float = 1.0
    """Relative share of the policy's requests that this server receives."""
    tls_fingerprint: str = ""
    """SHA-256 fingerprint of the TLS certificate. Empty if TLS is not used."""
    node: str = ""
    job_id: str = ""
    start: str = ""
    """Random id of this start of the server process."""
    started_at: float = 0.0
    """Unix timestamp in seconds."""
    heartbeat: int = 0
    weight_version: int = 0
    refused: RefusedWeights | None = None
    down: str = ""
    """Reason why the engine did not answer the latest request. Empty if it answered."""
    in_flight: int = 0
    """Number of requests that are queued or being processed."""
    waiting: int = 0
    """Number of requests in the engine's queue."""
    wait_s: float = 0.0
    """Expected seconds until the last queued request starts, based on the throughput of the past 30 seconds."""


class FailedServer(msgspec.Struct, kw_only=True):
    """An engine server that gave up, or whose latest start failed."""

    server: str
    policy: str
    cause: str
    lasting: bool = False
    """True if restarting the server cannot help."""
    down: bool = False
    """True if the server is waiting for an unavailable external endpoint."""
    job_id: str = ""
    log: str = ""
    """Path of the engine's log. Empty if there is none."""
    at: float = 0.0
    """Time of the failure, as a Unix timestamp in seconds."""


class LoadingServer(msgspec.Struct, kw_only=True):
    """An engine server that is loading weights and therefore not serving."""

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
    """Name of the policy within the pool."""
    key: str


class EndpointListing(msgspec.Struct, kw_only=True):
    """All endpoints of a run, listed by one pod on behalf of all pods."""

    generation: str
    """Digest of the fields that gateways depend on. It changes only if one of them does."""
    found: dict[str, Any]
    """Content of each endpoint file by file name. For a pool's server, ``key`` is this campaign's own key."""


class Heartbeats:
    """Detects dead processes by heartbeats that have stopped changing. Uses only this process's clock.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[object, float]] = {}
        """Maps each name to its latest state and the time at which this process first saw that state."""

    def unchanged_s(self, name: str, state: object) -> float:
        """Returns how many seconds ago this process first saw ``name`` in this state. Returns 0 for a new state."""
        now = self._clock()
        before, since = self._seen.setdefault(name, (state, now))
        if before != state:
            self._seen[name] = state, now
            return 0.0
        return now - since

    def alive(self, endpoint: Endpoint) -> bool:
        """Returns whether a server has sent a heartbeat, or restarted, within the last :data:`STALE_S` seconds."""
        return self.unchanged_s(endpoint.server, (endpoint.start, endpoint.heartbeat)) < STALE_S


class EndpointFiles:
    """Reads and writes the endpoint files of one run."""

    def __init__(self, run: RunDir) -> None:
        self._folder = run.endpoints

    def serving(self, policy: str | None = None) -> list[Endpoint]:
        """Returns the servers of one policy, or of all policies, sorted by file name."""
        paths = [path for path in self._folder.glob("*.json") if not path.name.endswith(FAILED)]
        endpoints = _readable(paths, Endpoint)
        return [endpoint for endpoint in endpoints if endpoint.url and policy in (None, endpoint.policy)]

    def written_at(self, endpoint: Endpoint) -> float:
        """Returns the time of a server's latest heartbeat in Unix seconds, by the file system's clock. Returns 0 if its
        file no longer exists."""
        try:
            return self._file(endpoint.server).stat().st_mtime
        except OSError:
            return 0.0

    def failed(self) -> list[FailedServer]:
        """Returns the servers that have given up."""
        return _readable(self._folder.glob(f"*{FAILED}"), FailedServer)

    def starting(self) -> list[FailedServer]:
        """Returns the servers that are retrying a failed start or waiting for an unavailable external endpoint."""
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
        """Returns the campaign's memberships in engine pools.

        Raises:
            OSError: A key file cannot be read.
            ValueError: A key file is damaged.
        """
        paths = sorted(self._folder.glob(".pool.*.key"))
        return [read_json(path, PoolMembership) for path in paths]

    def publish(self, endpoint: Endpoint) -> None:
        """Publishes a server's heartbeat, and withdraws its ``.loading`` and ``.starting`` files."""
        self._write(self._file(endpoint.server), endpoint)
        self._loading_file(endpoint.server).unlink(missing_ok=True)
        if endpoint.heartbeat <= 1:
            self.withdraw_starting(endpoint.server)

    def publish_failed(self, server: FailedServer) -> None:
        """Publishes that a server has given up, and why."""
        self._write(self._folder / f"{server.server}{FAILED}", server)
        self.withdraw_starting(server.server)

    def publish_starting(self, server: FailedServer) -> None:
        """Publishes why a server's latest start failed."""
        self._write(self._folder / f"{server.server}{STARTING}", server)

    def withdraw_starting(self, server: str) -> None:
        """Withdraws the file that explains a failed start. Call it once the server serves, gives up or exits."""
        (self._folder / f"{server}{STARTING}").unlink(missing_ok=True)

    def publish_loading(self, server: LoadingServer) -> None:
        """Publishes that a server is loading weights."""
        self._write(self._loading_file(server.server), server)

    def withdraw_failed(self, server: str) -> None:
        """Withdraws the failure that an earlier start of the server published."""
        (self._folder / f"{server}{FAILED}").unlink(missing_ok=True)

    def publish_membership(self, membership: PoolMembership) -> None:
        """Stores the campaign's key for the engine pool that serves a policy's model."""
        self._write(self._folder / f".pool.{membership.policy}.key", membership)

    def publish_listing(self, listing: EndpointListing) -> None:
        """Publishes one pod's listing for all other pods."""
        self._write(self._folder / LISTING, listing)

    def listing(self) -> EndpointListing | None:
        """Returns the listing of endpoints that one pod has published. Returns ``None`` if there is none."""
        return try_read_json(self._folder / LISTING, EndpointListing)

    def withdraw(self, server: str, start: str) -> bool:
        """Withdraws the files that this start of a server published. Returns false if a later start replaced them."""
        endpoint = try_read_json(self._file(server), Endpoint)
        if endpoint is None or endpoint.start != start:
            return False
        self._file(server).unlink(missing_ok=True)
        return True

    def withdraw_loading(self, server: str, start: str) -> None:
        """Withdraws the loading file that this start of a server published. Keeps the file of a later start."""
        loading = try_read_json(self._loading_file(server), LoadingServer)
        if loading is not None and loading.start == start:
            self._loading_file(server).unlink(missing_ok=True)

    def clear(self) -> None:
        """Withdraws all endpoint files, including those of killed servers."""
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
    """Returns the records of all readable files in path order."""
    records = [try_read_json(path, kind) for path in sorted(paths)]
    return [record for record in records if record is not None]
