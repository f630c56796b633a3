"""``RUN/endpoints``: what engine servers publish of themselves, and the keys by which others ask them.

::

    <policy>.<n>.json           :class:`Endpoint`: serves now; replaced with every heartbeat
    <policy>.<n>.loading        :class:`LoadingServer`: away for a moment to load weights; other servers wait for it
    <policy>.<n>.starting       :class:`FailedServer`: its latest start failed, and another follows
    <policy>.<n>.failed.json    :class:`FailedServer`: gave up
    .<policy>.<n>.admin         :class:`AdminKey`: opens the paths that change the engine
    .pool.<policy>.key          :class:`PoolMembership`: the engine pool that is this policy's model
    .listing                    :class:`EndpointListing`: all of them as one pod found them, so that not each lists them

Every file is replaced by rename, with mode 0600. A later start of the same array element may have published its own,
so a start withdraws only what carries its ``start``. Readers skip a file that is just being withdrawn or is damaged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from megaflow_hpc.rundir.json_files import read_json, try_read_json, write_record
from megaflow_hpc.rundir.layout import RunDir

FAILED, LOADING, LISTING, STARTING = ".failed.json", ".loading", ".listing", ".starting"


class RefusedWeights(msgspec.Struct):
    """A version of the weights that a server could not load."""

    version: int
    cause: str = ""


class Endpoint(msgspec.Struct, kw_only=True):
    """An engine server that answers."""

    server: str
    """``<policy>.<n>``."""
    policy: str
    url: str
    key: str = ""
    """Bearer token; not in what an engine pool shows to others."""
    model_name: str = ""
    protocol: str = "plain"
    """What the gateway may ask of the engine: ``text``, ``plain`` or ``split``."""
    template: str = ""
    """How the served chat template changes earlier messages; empty if unknown."""
    weight: float = 1.0
    """Share of the policy's requests, relative to its other servers."""
    tls_fingerprint: str = ""
    """SHA-256 of the certificate; empty without TLS."""
    node: str = ""
    job_id: str = ""
    start: str = ""
    """Random name of this start of the server."""
    started_at: float = 0.0
    """Seconds UTC."""
    heartbeat: int = 0
    weight_version: int = 0
    refused: RefusedWeights | None = None
    in_flight: int = 0
    """Requests at the server."""
    waiting: int = 0
    """Requests in the engine's queue."""
    wait_s: float = 0.0
    """Seconds until the last of them starts, at the pace of the past half minute."""


class FailedServer(msgspec.Struct, kw_only=True):
    """An engine server that gave up, or whose latest start failed."""

    server: str
    policy: str
    cause: str
    lasting: bool = False
    """Whether another start would fail in the same way."""
    job_id: str = ""
    log: str = ""
    """Its engine's output; empty if there is none."""
    at: float = 0.0
    """Seconds UTC."""


class LoadingServer(msgspec.Struct, kw_only=True):
    """An engine server that is away to load weights."""

    server: str = ""
    policy: str
    start: str = ""
    weight_version: int


class AdminKey(msgspec.Struct):
    """The key that opens the paths which change an engine, and the start of the server that has it."""

    start: str
    key: str


class PoolMembership(msgspec.Struct, kw_only=True):
    """A policy whose model is an engine pool."""

    pool: str
    """The pool's run directory."""
    policy: str
    theirs: str
    """The pool's policy."""
    key: str


class EndpointListing(msgspec.Struct, kw_only=True):
    """The engines as one pod listed them for all."""

    generation: str
    """Differs where anything differs that a pod has to hear of."""
    found: dict[str, Any]
    """File name → decoded endpoint file; of a pool's server, as its member asks it."""


class EndpointFiles:
    """The files of one run."""

    def __init__(self, run: RunDir) -> None:
        self._folder = run.endpoints

    def serving(self, policy: str | None = None) -> list[Endpoint]:
        """Returns the servers that answer now, of one policy or of all, in order of their files' names."""
        paths = sorted(path for path in self._folder.glob("*.json") if not path.name.endswith(FAILED))
        found = [endpoint for path in paths if (endpoint := try_read_json(path, Endpoint)) is not None]
        return [endpoint for endpoint in found if endpoint.url and policy in (None, endpoint.policy)]

    def failed(self) -> list[FailedServer]:
        """Returns the servers that gave up."""
        paths = sorted(self._folder.glob(f"*{FAILED}"))
        return [server for path in paths if (server := try_read_json(path, FailedServer)) is not None]

    def starting(self) -> list[FailedServer]:
        """Returns the servers whose latest start failed, and that go on trying."""
        paths = sorted(self._folder.glob(f"*{STARTING}"))
        return [server for path in paths if (server := try_read_json(path, FailedServer)) is not None]

    def loading(self, policy: str) -> list[LoadingServer]:
        """Returns a policy's servers that are away to load weights."""
        found = []
        for path in sorted(self._folder.glob(f"*{LOADING}")):
            server = try_read_json(path, LoadingServer)
            if server is not None and server.policy == policy:
                server.server = path.name.removesuffix(LOADING)
                found.append(server)
        return found

    def memberships(self) -> list[PoolMembership]:
        """Returns the engine pools that are models of this campaign.

        Raises:
            OSError, ValueError: A key cannot be read.
        """
        paths = sorted(self._folder.glob(".pool.*.key"))
        return [read_json(path, PoolMembership) for path in paths]

    def publish(self, endpoint: Endpoint) -> None:
        """Publishes a heartbeat of a server, which thereby is neither loading nor starting any more."""
        self._write(self._file(endpoint.server), endpoint)
        self._loading_file(endpoint.server).unlink(missing_ok=True)
        if endpoint.heartbeat <= 1:
            self.withdraw_starting(endpoint.server)

    def publish_failed(self, server: FailedServer) -> None:
        """Publishes that a server gave up."""
        self._write(self._folder / f"{server.server}{FAILED}", server)
        self.withdraw_starting(server.server)

    def publish_starting(self, server: FailedServer) -> None:
        """Publishes why a server's latest start failed."""
        self._write(self._folder / f"{server.server}{STARTING}", server)

    def withdraw_starting(self, server: str) -> None:
        """Withdraws why a start failed: it serves, or gave up, or leaves."""
        (self._folder / f"{server}{STARTING}").unlink(missing_ok=True)

    def publish_loading(self, server: LoadingServer) -> None:
        """Publishes that a server is away to load weights."""
        self._write(self._loading_file(server.server), server)

    def publish_admin_key(self, server: str, key: AdminKey) -> None:
        """Publishes the key of a new start, and takes back that an earlier one had failed."""
        (self._folder / f"{server}{FAILED}").unlink(missing_ok=True)
        self._write(self._admin_file(server), key)

    def publish_membership(self, membership: PoolMembership) -> None:
        """Publishes that an engine pool is a policy's model, with the key to it."""
        self._write(self._folder / f".pool.{membership.policy}.key", membership)

    def publish_listing(self, listing: EndpointListing) -> None:
        """Publishes what one pod found, for all."""
        self._write(self._folder / LISTING, listing)

    def listing(self) -> EndpointListing | None:
        """Returns what a pod found for all; ``None`` where none has."""
        return try_read_json(self._folder / LISTING, EndpointListing)

    def withdraw(self, server: str, start: str) -> bool:
        """Withdraws what this start of a server published; False where a later start has published its own."""
        endpoint = try_read_json(self._file(server), Endpoint)
        if endpoint is None or endpoint.start != start:
            return False
        self._file(server).unlink(missing_ok=True)
        self._admin_file(server).unlink(missing_ok=True)
        return True

    def withdraw_loading(self, server: str, start: str) -> None:
        """Withdraws that this start of a server is loading; what a later start published stays."""
        loading = try_read_json(self._loading_file(server), LoadingServer)
        if loading is not None and loading.start == start:
            self._loading_file(server).unlink(missing_ok=True)

    def clear(self) -> None:
        """Withdraws every endpoint: of servers that were killed and could not."""
        for endpoint in self.serving():
            self._file(endpoint.server).unlink(missing_ok=True)
        for server in self.starting():
            self.withdraw_starting(server.server)

    def _file(self, server: str) -> Path:
        return self._folder / f"{server}.json"

    def _loading_file(self, server: str) -> Path:
        return self._folder / f"{server}{LOADING}"

    def _admin_file(self, server: str) -> Path:
        return self._folder / f".{server}.admin"

    def _write(self, path: Path, value: msgspec.Struct) -> None:
        write_record(path, value, 0o600)
