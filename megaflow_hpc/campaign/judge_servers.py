"""Engine servers of a run's judges while no pod runs: those that still serve, and otherwise processes of this machine.

The processes get a run directory of their own, so they cannot disturb the run. They end with this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.host.address import unproxied
from megaflow_hpc.host.child import dies_with_parent
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.private import process_directory
from megaflow_hpc.rundir.endpoints import STALE_S, Endpoint, EndpointFiles
from megaflow_hpc.rundir.engine_pool import pool_servers
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, ServerRecord, write_run

STOP_S = 30.0
"""Grace period in seconds for servers to exit."""


class JudgeServers:
    """Serves a run's judges until it is closed. A context manager.

    Args:
        judges: Names of the judges to serve.

    Raises:
        ModelServiceError: A judge's engine pool has no server now.
    """

    def __init__(self, run: RunDir, planned: RunRecord, judges: Collection[str]) -> None:
        self._run, self._files = run, EndpointFiles(run)
        self._judges = frozenset(judges)
        started = self._judges - {str(server["policy"]) for server in self._elsewhere()}
        firsts = {server.policy: server for server in reversed(planned.servers) if server.policy in started}
        if missing := sorted(started - firsts.keys()):
            raise ModelServiceError(f"judge {missing[0]}: its engine pool has no server now; start the pool")
        servers = list(firsts.values())
        self._folder: Path | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        if servers:
            self._start(planned, servers)

    def __enter__(self) -> JudgeServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, planned: RunRecord, servers: list[ServerRecord]) -> None:
        self._folder = process_directory()
        self._own = RunDir(self._folder / "run")
        self._own.create()
        write_run(self._own, msgspec.structs.replace(planned, servers=servers, packed=None))
        environment = {**{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}, **unproxied(os.environ)}
        for index in range(len(servers)):
            command = [sys.executable, "-m", "megaflow_hpc.model.server", str(self._own), "--idle-s", "inf"]
            with open(self._own.logs / f"server-{index}.log", "ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        [*dies_with_parent("TERM"), *command, "--index", str(index)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        start_new_session=True,  # Ctrl-C reaches this process first, which stops them
                    )
                )

    def serving(self) -> list[dict[str, Any]]:
        """Returns the endpoints of the judges.

        Raises:
            ModelServiceError: A server that was started here gave up.
        """
        own: list[dict[str, Any]] = []
        if self._folder is not None:
            files = EndpointFiles(self._own)
            own = [msgspec.to_builtins(server) for server in files.serving()]
            failed = files.failed()
            if failed:
                raise ModelServiceError(f"judge {failed[0].policy}: its engine does not start: {failed[0].cause}")
            ended = [process.returncode for process in self._processes if process.poll() is not None]
            if ended:
                logs = "\n".join(path.read_text()[-2000:] for path in sorted(self._own.logs.glob("server-*.log")))
                raise ModelServiceError(f"judge: its server ended with status {ended[0]}: {logs}")
        return [*own, *self._elsewhere()]

    def ready(self, endpoints: Collection[dict[str, Any]]) -> bool:
        """Returns whether each judge has an endpoint."""
        return self._judges <= {endpoint["policy"] for endpoint in endpoints}

    def _elsewhere(self) -> list[dict[str, Any]]:
        """Returns the endpoints of the run's own servers and of engine pools."""
        servers: list[Endpoint] = [
            server for server in self._files.serving() if time.time() - self._files.written_at(server) < STALE_S
        ]
        for membership in self._files.memberships():
            servers += pool_servers(membership)
        return [msgspec.to_builtins(server) for server in servers if server.policy in self._judges]

    def close(self) -> None:
        """Stops the servers that were started here."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        if self._folder is not None:
            remove_tree(self._folder, ignore_errors=True)
            self._folder = None
