"""The engine server: ``python -m megaflow_hpc.model.server RUN [--policy P] [--index N]``.

::

    start engine (Unix socket, under a lifeline) ─► first completion ─► RUN/endpoints/<policy>.<index>.json
         ▲                                                               │ heartbeat every 30 s
         ├── engine ended: backoff, at most three starts in a row ◄──────┤
         └── new weights that it cannot load in place ◄──────────────────┤
                                                                         ▼
             SIGTERM, SIGUSR2, campaign finished, idle: unregister, answer requests in flight, leave

Entry ``SLURM_ARRAY_TASK_ID`` of ``servers`` in run.json describes the server's model: ``[{"policy": …, "model": {…}},
…]``. A server that gives up writes the cause to ``<policy>.<index>.failed.json``. Its engine's output is in
``RUN/logs/<policy>.<index>.engine.log``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError, ModelServiceError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.ledger.consumers import Consumers
from megaflow_hpc.ledger.files import Files
from megaflow_hpc.ledger.leader import SCALER, Leader
from megaflow_hpc.model.engines import adapters
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.engines.process import EngineProcess, is_lasting
from megaflow_hpc.model.server.proxy import Proxy, make_context
from megaflow_hpc.model.server.registration import Assignment, Registration, check_address, in_slurm
from megaflow_hpc.model.server.sleep import Sleeper
from megaflow_hpc.model.server.tenants import Tenants
from megaflow_hpc.model.server.weight_updates import WeightUpdater
from megaflow_hpc.rundir.budget import Meter, gpus_of
from megaflow_hpc.rundir.endpoints import RefusedWeights
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.training import SharedGpu
from megaflow_hpc.rundir.weights import Version
from megaflow_hpc.texts import printable

HEARTBEAT_S = 30.0
POLL_S = 5.0
"""Seconds between polls of the run directory and of the idle time."""
IDLE_S = 300.0
MAX_MISSING_POLLS = 5
"""The run directory counts as deleted after this many consecutive polls that do not find it."""
DRAIN_S = 25.0
"""Seconds that an exiting server waits for requests in flight. Slurm sends SIGKILL 30 s after preemption (KillWait)."""
MAX_STARTS = 3
"""A server gives up after this many consecutive failed starts."""
BACKOFF_S = 1.0
"""Seconds before the second start. The third start waits five times as long."""
STEADY_S = 60.0
"""The count of failed starts is reset after this many seconds of serving."""
RESTART_DRAIN_S = 900.0
"""Maximum seconds to wait for requests in flight before a working engine is restarted with new weights."""
IDLE_STATUS = 75
"""Exit status of an idle server, at which the batch script requeues and holds the array element."""


class _RestartForWeights(Exception):
    """The engine must be restarted with the current version of the weights."""


class ElementServer:
    """Base class of the servers that run as an element of the engine array.

    Args:
        run: The campaign's run directory.
        what: Model and name of this server.
        poll_s: Seconds between polls of the run directory.
        beat_s: Seconds between heartbeats.
        backoff_s: Seconds before the second consecutive start. The third start waits five times as long.
    """

    def __init__(self, run: RunDir, what: Assignment, poll_s: float, beat_s: float, backoff_s: float) -> None:
        self.run_dir, self.what = run, what
        self.poll_s, self.beat_s, self.backoff_s = poll_s, beat_s, backoff_s
        self._leave = asyncio.Event()
        self._marks, self._missing = Marks(run), 0

    async def run(self) -> int:
        """Serves until the server has to exit. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            loop.add_signal_handler(number, self.leave, f"signal {signal.Signals(number).name}")
        private = Path(tempfile.mkdtemp(prefix="megaflow-", dir=scratch()))
        watcher = asyncio.create_task(self._watch())
        try:
            check_address()
            encrypted = os.environ.get("MEGAFLOW_TLS", "1") != "0"
            context, fingerprint = make_context(private) if encrypted else (None, "")
            return await self._serve(private, context, fingerprint)
        except ConfigError as error:
            self._give_up(str(error), lasting=True)
            return error.exit_status
        finally:
            watcher.cancel()
            remove_tree(private, ignore_errors=True)

    async def _serve(self, private: Path, context: ssl.SSLContext | None, fingerprint: str) -> int:
        """Serves until :meth:`leave` is called or every start has failed. Returns the exit status.

        Args:
            private: A node-local directory of mode 0700.
            context: TLS context with the certificate of this server. ``None`` to serve without TLS.
            fingerprint: SHA-256 of that certificate.
        """
        raise NotImplementedError

    async def _watch(self) -> None:
        """Calls :meth:`_look_at_run` every few seconds."""
        while not self._leave.is_set():
            await asyncio.sleep(self.poll_s)
            self._look_at_run()

    def leave(self, why: str) -> None:
        """Makes :meth:`run` drain and return. Idempotent."""
        if not self._leave.is_set():
            self._say(f"leaving: {why}")
            self._leave.set()

    def _look_at_run(self) -> None:
        """Makes the server exit if the campaign is over or its directory was deleted."""
        if self._marks.over:
            self.leave("the campaign is over")
        try:
            self.run_dir.run_json.stat()
            self._missing = 0
        except FileNotFoundError:
            self._missing += 1
        except OSError:  # the file system is temporarily unreachable
            self._missing = 0
        if self._missing >= MAX_MISSING_POLLS:
            self.leave("the run directory was deleted or moved away")

    async def _leaves_before_start(self, failures: int) -> bool:
        """Waits before the next start of the engine, after ``failures`` failed ones. Returns whether the server has to
        exit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.backoff_s * (1 if failures == 1 else 5)):
                await self._leave.wait()
        return self._leave.is_set()

    def _give_up(self, cause: str, lasting: bool) -> None:
        self._say(f"giving up: {cause}")
        Registration(self.run_dir, self.what).failed(cause, lasting)

    def _say(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.gmtime())
        print(printable(f"{stamp} [{self.what.name}] {text}"), file=sys.stderr, flush=True)


class EngineServer(ElementServer):
    """Runs one engine behind a proxy until the server has to exit. Takes the arguments of :class:`ElementServer`.

    Args:
        idle_s: Seconds without a request after which the server exits. Does not apply before the first request.
        weights_poll_s: Seconds between polls of the weights pointer.
        caps: The ``pool`` section if the campaign is a pool, otherwise ``None``.
    """

    def __init__(
        self,
        run: RunDir,
        what: Assignment,
        *,
        idle_s: float,
        poll_s: float,
        weights_poll_s: float,
        beat_s: float,
        backoff_s: float,
        caps: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(run, what, poll_s, beat_s, backoff_s)
        self.idle_s, self.weights_poll_s = idle_s, weights_poll_s
        pool = EnginePool(run.path) if caps is not None else None
        self.files = Registration(run, what, pool)
        self._tenants = Tenants(pool, caps) if pool is not None and caps is not None else None
        self._proxy = Proxy(tenants=self._tenants)
        self.weights = WeightUpdater(run, what, self._proxy)
        gpus = int(what.model.get("gpus") or 0) * int(what.model.get("nodes") or 1)
        self._meter = Meter(run, what.name, gpus_of(gpus))
        level, gpu = int(what.model.get("sleep_level") or 0), SharedGpu(run, what.policy)
        self._sleeper = Sleeper(gpu, level, self.weights, self._leave, self._say) if level else None
        self._fingerprint = ""
        self._status = 0
        self._scaler, self._consumers = Leader(run, SCALER), Consumers()

    async def _serve(self, private: Path, context: ssl.SSLContext | None, fingerprint: str) -> int:
        self._fingerprint = fingerprint
        self.weights.copies.scratch = private
        await self._proxy.start(context)
        try:
            return await self._keep_running(private)
        finally:
            self._note_gpus(now=True)
            self.files.leave()
            await self._proxy.stop()
            self.weights.copies.close()

    async def _keep_running(self, private: Path) -> int:
        failures = 0
        while True:
            if self._sleeper is not None:
                await self._sleeper.until_free()
                if self._leave.is_set():
                    return 0
            started = time.monotonic()
            version = Version(policy=self.what.policy)
            try:
                version = self.weights.choose()
                await self._run_engine(private, version)
                return self._status
            except _RestartForWeights:
                failures = 0
                continue
            except ModelServiceError as error:
                served = self.files.beats > 0
                steady = served and time.monotonic() - started > STEADY_S
                failures = 1 if steady else failures + 1
                self.files.unregister()
                self._say(f"start {failures} of {MAX_STARTS}: {error}")
                lasting = not served and is_lasting(str(error))
                if lasting or failures >= MAX_STARTS:
                    if served or not version.path:  # weights that were served are not at fault
                        self._give_up(str(error), lasting)
                        return ConfigError.exit_status if lasting else 1
                    self.weights.refused[version.version] = str(error)  # try the previous version
                    failures = 0
                    continue
                self.files.starts_again(f"start {failures} of {MAX_STARTS}: {error}")
            if await self._leaves_before_start(failures):
                return 0

    async def _run_engine(self, private: Path, version: Version) -> None:
        """Runs one engine from start to end. Returns when the server has to exit.

        Raises:
            ModelServiceError: The engine ended, or never became healthy.
            _RestartForWeights: The engine cannot load the current weights in place.
        """
        version = await asyncio.to_thread(self.weights.whole, version)
        launch = adapters.launch(self.weights.model(version), self.what.policy, private, [self.run_dir.weights])
        if self._tenants is not None:
            self._tenants.set_capacity(launch.slots)
        engine = EngineProcess(launch, self.files.log_file)
        self._say(f"starting {' '.join(launch.command[:3])} … ({_named(version)}); output in {self.files.log_file}")
        await engine.start()
        ended = asyncio.create_task(engine.wait())
        leaving = asyncio.create_task(self._leave.wait())
        healthy = asyncio.create_task(engine.until_healthy(self._proxy.ask, self.files.is_down))
        following: asyncio.Task[None] | None = None
        try:
            self._proxy.opened = False
            await self._proxy.attach(launch)
            await asyncio.wait({ended, leaving, healthy}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                return
            if ended.done():
                raise ModelServiceError(engine.cause())
            healthy.result()
            await self.weights.complete_start(version, launch)
            self._proxy.opened = True
            url = await self.files.register(launch, self._proxy, self._fingerprint)
            self._say(f"serving {_named(version)} at {url}")
            if launch.command and not launch.uds:
                self._say(f"WARNING: every user of this node can reach the engine at {launch.base_url}, without a key")
            await self._beat()
            following = asyncio.create_task(self._follow(launch))
            await asyncio.wait({ended, leaving, following}, return_when=asyncio.FIRST_COMPLETED)
            if not leaving.done() and ended.done():
                raise ModelServiceError(f"the engine ended while serving: {engine.cause()}")
            if not leaving.done():
                following.result()
            self.files.unregister()
            if not await self._proxy.drain(DRAIN_S):
                self._say(f"{self._proxy.in_flight} requests were not answered within {DRAIN_S:g} s")
        finally:
            for task in (ended, leaving, healthy, following):
                if task is not None:
                    task.cancel()
            await self._proxy.attach(None)
            self._proxy.draining = False
            await engine.end()

    async def _follow(self, launch: Launch) -> None:
        """Loads new weight versions in place. Raises :class:`_RestartForWeights` if a version needs a restart."""
        while True:
            await asyncio.sleep(self.weights_poll_s)
            async with self._sleeper.turn(self._proxy) if self._sleeper else contextlib.nullcontext() as slept:
                version = self.weights.next()
                if version is not None:
                    await self._load(version, launch)
                elif slept:
                    await self._beat()  # the engine may have newer weights since it woke

    async def _load(self, version: Version, launch: Launch) -> None:
        self._say(f"loading {_named(version)}")
        began = time.monotonic()
        try:
            if not launch.reload or not version.path:
                raise ModelServiceError("this engine restarts for other weights")
            await self.weights.load(version, launch)
        except ModelServiceError as error:
            self._say(str(error))
            self.files.loading(version.version)
            self.files.unregister()  # so that gateways use other servers or queue their requests
            await self._proxy.drain(DRAIN_S if launch.reload else RESTART_DRAIN_S)
            raise _RestartForWeights from error
        await self._beat()
        if version.version in self.weights.refused:
            self._say(f"{_named(version)} refused: {self.weights.refused[version.version]}")
        else:
            self._say(f"serving {_named(version)}, loaded in place in {time.monotonic() - began:.1f} s")

    async def _beat(self) -> None:
        refused = [RefusedWeights(version, cause) for version, cause in self.weights.refused.items()]
        load = await self._proxy.load(time.monotonic())
        version = self._proxy.serving.weights.version
        if self._proxy.attached:  # the engine may have been detached during the await
            self.files.beat(version, refused[-1] if refused else None, load, self._proxy.down)

    async def _watch(self) -> None:
        """Renews the heartbeat, and makes the server exit when the campaign ends or the server is idle."""
        next_beat = time.monotonic() + self.beat_s
        while not self._leave.is_set():
            self._note_gpus()
            await asyncio.sleep(min(self.poll_s, self.idle_s))
            self._look_at_run()
            idle = time.monotonic() - self._proxy.last_request
            if self._asked() and not self._proxy.in_flight and idle > self.idle_s and await self._may_idle():
                self._status = IDLE_STATUS if in_slurm() else 0
                self.leave(f"no request for {idle:.0f} s")
            if self.files.beats and not self._leave.is_set() and time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self.beat_s
                try:
                    await self._beat()
                except OSError as error:
                    self._say(f"heartbeat: {error}")

    def _note_gpus(self, now: bool = False) -> None:
        try:
            self._meter.tick(now)
        except OSError as error:
            self._say(f"GPU time: {error}")

    def _asked(self) -> bool:
        """Returns whether a request has arrived, or this element was requeued and is serving again."""
        return self._proxy.requests > 0 or (self.files.beats > 0 and os.environ.get("SLURM_RESTART_COUNT", "0") != "0")

    async def _may_idle(self) -> bool:
        """Returns whether an idle server may exit.

        It must keep running while no scaler is running, since only a scaler can release its held array element again.
        It also keeps running while a trainer may soon add rollouts. A judge never exits, because agents may work for a
        long time between two verifications.
        """
        if self.what.model.get("judge"):
            return False
        if in_slurm() and not await asyncio.to_thread(self._scaler.confirmed):
            return False
        await asyncio.to_thread(Files(self.run_dir).carry_out, self._consumers.look())
        return not self._consumers.awaited


def _named(version: Version) -> str:
    return f"weights {version.version}" if version.path else "the campaign's weights"


def scratch() -> str | None:
    """Returns a node-local directory whose path is short enough for sockets, or ``None`` for the system's default."""
    for name in ("MEGAFLOW_SCRATCH", "SLURM_TMPDIR", "TMPDIR"):
        path = os.environ.get(name, "")
        if path and len(path) < adapters.MAX_SOCKET_PATH - 40 and os.access(path, os.W_OK | os.X_OK):
            return path
    return None
