"""What a model server leaves under ``RUN/endpoints`` so that others find it, or learn why they cannot.

::

    <policy>.<n>.json          serves now: address, key, fingerprint, weight version, a counter renewed as heartbeat
    .<policy>.<n>.admin        the key for paths that change the engine
    <policy>.<n>.loading       is away for a moment to load weights; other servers wait for it
    <policy>.<n>.failed.json   gave up: one line of cause

All are replaced by rename, mode 0600. A later start of the same array element may have written its own: a start takes
away only what carries its own ``start``.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.address import address
from megaflow_hpc.model.engines.failure import lasting
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.server.proxy import Proxy
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir, write_json
from megaflow_hpc.rundir.record import ServerRecord


class Assignment(NamedTuple):
    """Entry ``number`` of ``servers`` in run.json: which model this element serves."""

    number: int
    policy: str
    model: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.policy}.{self.number}"


def assignment(servers: Sequence[ServerRecord], index: int | None, policy: str | None) -> Assignment:
    """Which entry of ``servers`` this process serves.

    Raises:
        ConfigError: There is no such entry.
    """
    if index is None:
        named = [n for n, s in enumerate(servers) if policy is None or s.policy == policy]
        index = named[0] if named else -1
    if not 0 <= index < len(servers):
        raise ConfigError(f"no model server {index}: the campaign has {len(servers)} (array elements count from 0)")
    entry = servers[index]
    if policy is not None and entry.policy != policy:
        raise ConfigError(f"model server {index} is of policy {entry.policy!r}, not {policy!r}")
    return Assignment(index, entry.policy, entry.model)


class Registration:
    """The files of one start of one server."""

    def __init__(self, run: RunDir, what: Assignment, pool: EnginePool | None = None) -> None:
        self.what, self._pool = what, pool
        self.endpoint_file = run.endpoint(what.name)
        self.failed_file = run.endpoints / f"{what.name}.failed.json"
        self.loading_file = run.endpoints / f"{what.name}.loading"
        self.admin_file = run.endpoints / f".{what.name}.admin"
        self.log_file = run.logs / f"{what.name}.engine.log"
        self.start = secrets.token_hex(8)
        self.beats = 0
        """Heartbeats since the engine's latest start; 0 while it is not registered."""
        self._record: dict[str, Any] = {}

    def register(self, launch: Launch, proxy: Proxy, fingerprint: str) -> str:
        """Lets gateways find the server; its address."""
        url = f"{'https' if fingerprint else 'http'}://{address()}:{proxy.port}"
        self._record = {
            "server": self.what.name,
            "policy": self.what.policy,
            "url": url,
            "key": proxy.key,
            "model_name": launch.model_name,
            "protocol": launch.protocol,
            "weight": float(self.what.model.get("weight") or 1.0),
            "tls_fingerprint": fingerprint,
            "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "job_id": job_id(),
            "start": self.start,
            "started_at": time.time(),
        }
        self.failed_file.unlink(missing_ok=True)
        write_json(self.admin_file, {"start": self.start, "key": proxy.admin_key}, 0o600)
        return url

    def beat(self, **state: Any) -> None:
        """Renews the endpoint file with what changes (``weight_version``, load); only after :meth:`register`."""
        self._record |= state
        self.beats += 1
        record = {**self._record, "heartbeat": self.beats}
        write_json(self.endpoint_file, record, 0o600)
        if self._pool is not None:
            self._pool.advertise(record)
        self.loading_file.unlink(missing_ok=True)

    def loading(self, version: int) -> None:
        """Tells the policy's other servers that this one is away to load weights."""
        write_json(self.loading_file, {"policy": self.what.policy, "start": self.start, "weight_version": version})

    def unregister(self) -> None:
        self.beats = 0
        self._take_away(self.endpoint_file, self.admin_file)

    def leave(self) -> None:
        """Nothing of this start remains."""
        self.unregister()
        self._take_away(self.loading_file)

    def failed(self, cause: str) -> None:
        record = {"server": self.what.name, "policy": self.what.policy, "cause": cause, "lasting": lasting(cause)}
        write_json(self.failed_file, {**record, "job_id": job_id(), "log": str(self.log_file), "at": time.time()})

    def _take_away(self, marked: Path, *others: Path) -> None:
        try:
            if json.loads(marked.read_text()).get("start") == self.start:
                for file in (marked, *others):
                    file.unlink(missing_ok=True)
                if self._pool is not None and marked == self.endpoint_file:
                    self._pool.withdraw(self.what.name)
        except (OSError, ValueError):
            pass


def in_slurm() -> bool:
    """Whether this process is an element of a job array."""
    return bool(os.environ.get("SLURM_ARRAY_JOB_ID"))


def job_id() -> str:
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array and element else os.environ.get("SLURM_JOB_ID", "")
