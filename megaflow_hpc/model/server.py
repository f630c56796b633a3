"""One element of the engine array: ``python -m megaflow_hpc.model.server RUN [--policy P] [--index N]``.

::

    start engine (Unix socket, under a lifeline) ─► a real completion ─► RUN/endpoints/<policy>.<index>.json
         ▲                                                                │ a counter in it every 30 s
         └── engine ended: back-off, three starts in a row at most ◄──────┤
                                                                          ▼
             SIGTERM, SIGUSR2, campaign finished, idle: unregister, answer what is in flight, leave with 0

Which model an element serves is element ``SLURM_ARRAY_TASK_ID`` of ``servers`` in run.json:
``[{"policy": …, "model": {…}}, …]``. A server that gives up leaves ``<policy>.<index>.failed.json`` with one line of
cause, and its engine's output in ``RUN/logs/<policy>.<index>.engine.log``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from megaflow_hpc.errors import ConfigError, MegaflowError, ModelServiceError
from megaflow_hpc.model import engines
from megaflow_hpc.model.engines import Launch
from megaflow_hpc.model.proxy import Proxy
from megaflow_hpc.rundir import RunDir, write_json

HEARTBEAT_S = 30.0
POLL_S = 5.0
"""Between looks at ``RUN/ledger/finished`` (one stat) and the clock."""
IDLE_S = 300.0
DRAIN_S = 25.0
"""Slurm's preemption gives 30 s before SIGKILL by default (KillWait)."""
STARTS = 3
"""Starts in a row that may fail."""
WARM_UP = 3
"""Tokens of the first completion: one is the prompt's work alone, the next ones compile the decoding."""
BACKOFF_S = (1.0, 5.0)
STEADY_S = 60.0
"""An engine that ran this long starts the count anew."""
TAIL = 20_000
"""Bytes of the engine's log that are looked at for a cause."""


class Assignment(NamedTuple):
    number: int
    policy: str
    model: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.policy}.{self.number}"


def assignment(run: Mapping[str, Any], index: int | None, policy: str | None) -> Assignment:
    """Which entry of ``servers`` this process serves.

    Raises:
        ConfigError: There is no such entry.
    """
    servers: list[Mapping[str, Any]] = run.get("servers") or []
    if index is None:
        named = [n for n, s in enumerate(servers) if policy is None or s["policy"] == policy]
        index = named[0] if named else -1
    if not 0 <= index < len(servers):
        raise ConfigError(f"no model server {index}: the campaign has {len(servers)} (array elements count from 0)")
    entry = servers[index]
    if policy is not None and entry["policy"] != policy:
        raise ConfigError(f"model server {index} is of policy {entry['policy']!r}, not {policy!r}")
    return Assignment(index, str(entry["policy"]), entry["model"])


class EngineServer:
    """Runs one engine from start to leave.

    Args:
        run: The campaign's run directory.
        what: The model and the name of this server.
        idle_s: Seconds without a request, after the first, before it leaves.
    """

    def __init__(self, run: RunDir, what: Assignment, *, idle_s: float = IDLE_S) -> None:
        self.run_dir, self.what, self.idle_s = run, what, idle_s
        self.endpoint_file = run.endpoint(what.name)
        self.failed_file = run.endpoints / f"{what.name}.failed.json"
        self.admin_file = run.endpoints / f".{what.name}.admin"
        self.log_file = run.logs / f"{what.name}.engine.log"
        self.start_id = secrets.token_hex(8)
        self.weight_version = 0
        self._leave = asyncio.Event()
        self._beats = 0
        self._fingerprint = ""
        self._log_start = 0
        self._record: dict[str, Any] = {}
        self._proxy: Proxy

    async def run(self) -> int:
        """Serves until told to leave; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            loop.add_signal_handler(number, self.leave, f"signal {signal.Signals(number).name}")
        private = Path(tempfile.mkdtemp(prefix="megaflow-", dir=scratch()))
        try:
            context = None
            if os.environ.get("MEGAFLOW_TLS", "1") != "0":
                try:
                    from megaflow_hpc.model.tls import make_context
                except ImportError as error:
                    raise ConfigError(f"{error}: TLS needs it; install it with: pip install cryptography") from error
                context, self._fingerprint = make_context(private)
            self._proxy = Proxy(context)
            await self._proxy.start()
            watcher = asyncio.create_task(self._watch())
            try:
                return await self._keep_running(private)
            finally:
                watcher.cancel()
                self._unregister()
                await self._proxy.stop()
        except ConfigError as error:
            self._record_failure(str(error))
            return error.exit_status
        finally:
            shutil.rmtree(private, ignore_errors=True)

    def leave(self, why: str) -> None:
        if not self._leave.is_set():
            self._say(f"leaving: {why}")
            self._leave.set()

    async def _keep_running(self, private: Path) -> int:
        failures = 0
        while True:
            started = time.monotonic()
            try:
                launch = engines.launch(self.what.model, self.what.policy, private)
                await self._one_life(launch)
                return 0
            except ModelServiceError as error:
                self._unregister()
                failures = 1 if time.monotonic() - started > STEADY_S and self._beats else failures + 1
                self._beats = 0
                self._say(f"start {failures} of {STARTS}: {error}")
                if failures >= STARTS:
                    self._record_failure(str(error))
                    return 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leave.wait(), BACKOFF_S[min(failures, len(BACKOFF_S)) - 1])
                return 0

    async def _one_life(self, launch: Launch) -> None:
        """From the engine's start to its end; returns when this server is to leave.

        Raises:
            ModelServiceError: The engine ended, or never answered.
        """
        if launch.uds:
            Path(launch.uds).unlink(missing_ok=True)
        engine = await self._spawn(launch) if launch.command else None
        ended = asyncio.create_task(engine.wait() if engine else asyncio.Event().wait())
        leaving = asyncio.create_task(self._leave.wait())
        healthy = asyncio.create_task(self._until_healthy(launch))
        try:
            await self._proxy.attach(launch)
            await asyncio.wait({ended, leaving, healthy}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                return
            if ended.done():
                raise ModelServiceError(self._cause(engine))
            healthy.result()
            self._register(launch)
            await asyncio.wait({ended, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not leaving.done():
                raise ModelServiceError(f"the engine ended while serving: {self._cause(engine)}")
            self._unregister()
            if not await self._proxy.drain(DRAIN_S):
                self._say(f"{self._proxy.in_flight} requests were not answered within {DRAIN_S:g} s")
        finally:
            for task in (ended, leaving, healthy):
                task.cancel()
            await self._proxy.attach(None)
            if engine is not None:
                await _end(engine)

    async def _spawn(self, launch: Launch) -> asyncio.subprocess.Process:
        self._say(f"starting {' '.join(launch.command[:3])} …; its output goes to {self.log_file}")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_"))}
        descriptor = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._log_start = os.fstat(descriptor).st_size
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "megaflow_hpc.model.lifeline", *launch.command),
                stdin=asyncio.subprocess.PIPE,
                stdout=descriptor,
                stderr=descriptor,
                env={**environment, **launch.env},
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    async def _until_healthy(self, launch: Launch) -> None:
        """Waits for a real completion."""
        deadline = time.monotonic() + launch.start_timeout_s
        pause, last = 0.05, "it did not listen"
        messages = [{"role": "user", "content": "Are you ready?"}]
        scores = launch.protocol != "text"  # as the gateway will ask, so that all is compiled before it does
        tries: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": messages, "logprobs": scores}),
            ("/v1/completions", {"prompt": "Are you ready?", "logprobs": 1 if scores else None}),
        ]
        while time.monotonic() < deadline:
            for path, body in tries:
                try:
                    request = {"model": launch.model_name, "max_tokens": WARM_UP, **body}
                    status, text = await self._proxy.ask(path, request, timeout_s=120)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    last = f"{type(error).__name__}: {error}"
                    break
                if status == 200:
                    return
                last = f"HTTP {status} for a completion: {text[:300]}"
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 1.0)
        raise ModelServiceError(f"not healthy after {launch.start_timeout_s:g} s: {last}")

    # --- registration ------------------------------------------------------------------------------------------------

    def _register(self, launch: Launch) -> None:
        scheme = "https" if self._fingerprint else "http"
        self._record = {
            "server": self.what.name,
            "policy": self.what.policy,
            "url": f"{scheme}://{address()}:{self._proxy.port}",
            "key": self._proxy.key,
            "model_name": launch.model_name,
            "protocol": launch.protocol,
            "weight_version": self.weight_version,
            "tls_fingerprint": self._fingerprint,
            "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "job_id": job_id(),
            "start": self.start_id,
            "started_at": time.time(),
        }
        self.failed_file.unlink(missing_ok=True)
        write_json(self.admin_file, {"start": self.start_id, "key": self._proxy.admin_key})
        self._beat()
        self._say(f"serving at {self._record['url']}")

    def _beat(self) -> None:
        self._beats += 1
        write_json(self.endpoint_file, {**self._record, "heartbeat": self._beats})

    def _unregister(self) -> None:
        """Takes the endpoint file away, unless a later start of this element has written its own."""
        try:
            if json.loads(self.endpoint_file.read_text()).get("start") == self.start_id:
                self.endpoint_file.unlink()
                self.admin_file.unlink(missing_ok=True)
        except (OSError, ValueError):
            pass

    async def _watch(self) -> None:
        """Heartbeat, end of campaign, idleness."""
        finished = self.run_dir.ledger / "finished"
        next_beat = time.monotonic() + HEARTBEAT_S
        while not self._leave.is_set():
            await asyncio.sleep(min(POLL_S, self.idle_s))
            if finished.exists() or (self.run_dir.ledger / "cancelled").exists():
                self.leave("the campaign is over")
            idle = time.monotonic() - self._proxy.last_request
            if self._proxy.requests and not self._proxy.in_flight and idle > self.idle_s:
                self.leave(f"no request for {idle:.0f} s")
            if self._beats and not self._leave.is_set() and time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_S
                try:
                    self._beat()
                except OSError as error:
                    self._say(f"heartbeat: {error}")

    def _cause(self, engine: asyncio.subprocess.Process | None) -> str:
        try:
            with self.log_file.open("rb") as file:
                file.seek(max(self._log_start, self.log_file.stat().st_size - TAIL))
                tail = file.read().decode("utf-8", "replace")
        except OSError:
            tail = ""
        return engines.cause(tail, engine.returncode if engine else None)

    def _record_failure(self, cause: str) -> None:
        self._say(f"giving up: {cause}")
        record = {"server": self.what.name, "policy": self.what.policy, "cause": cause, "job_id": job_id()}
        write_json(self.failed_file, {**record, "log": str(self.log_file), "at": time.time()})

    def _say(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.gmtime())
        print(f"{stamp} [{self.what.name}] {text}", file=sys.stderr, flush=True)


async def _end(engine: asyncio.subprocess.Process) -> None:
    """End-of-file on the lifeline; it leaves when the last process has."""
    if engine.returncode is None:
        if engine.stdin is not None:
            engine.stdin.close()
        try:
            await asyncio.wait_for(engine.wait(), 20)
        except TimeoutError:
            engine.kill()
            await engine.wait()


def scratch() -> str | None:
    """Where sockets go: local to the node, short of name; ``None`` is the system's choice."""
    for name in ("MEGAFLOW_SCRATCH", "SLURM_TMPDIR", "TMPDIR"):
        path = os.environ.get(name, "")
        if path and len(path) < engines.MAX_SOCKET_PATH - 40 and os.access(path, os.W_OK | os.X_OK):
            return path
    return None


def address() -> str:
    """How other nodes reach this one: the host's name where it resolves, else the address of its route outward."""
    chosen = os.environ.get("MEGAFLOW_ADDRESS")
    if chosen:
        return chosen
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None, socket.AF_INET)
        return name
    except OSError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def job_id() -> str:
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array and element else os.environ.get("SLURM_JOB_ID", "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megaflow_hpc.model.server", description="one model server")
    parser.add_argument("run", help="run directory")
    parser.add_argument("--policy", help="policy to serve; default: what run.json says of this element")
    parser.add_argument("--index", type=int, help="element; default: SLURM_ARRAY_TASK_ID")
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="leave after this many seconds without a request")
    arguments = parser.parse_args(argv)
    index = arguments.index
    if index is None and os.environ.get("SLURM_ARRAY_TASK_ID"):
        index = int(os.environ["SLURM_ARRAY_TASK_ID"])
    os.umask(0o077)
    try:
        run = RunDir(arguments.run)
        what = assignment(run.read_run(), index, arguments.policy)

        async def serve() -> int:
            return await EngineServer(run, what, idle_s=arguments.idle_s).run()

        return asyncio.run(serve())
    except MegaflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    raise SystemExit(main())
