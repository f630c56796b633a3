"""Runs a campaign without Slurm. Engine servers, trainers and one pod are child processes, the pod with or without
``mpiexec``.

Also serves the judges of a run whose pods have ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from megaflow_hpc.campaign.job_environment import trainer_python
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.config.slurm import TRAINER_REQUEUES, SlurmConfig
from megaflow_hpc.errors import ConfigError, ModelServiceError, SiteError, StarvedError
from megaflow_hpc.host.address import unproxied
from megaflow_hpc.host.atomic import file_mode, write_atomic
from megaflow_hpc.host.child import dies_with_parent
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.mpi import mpiexec
from megaflow_hpc.host.private import process_directory
from megaflow_hpc.ledger.lease import process_here
from megaflow_hpc.rundir.endpoints import STALE_S, Endpoint, EndpointFiles
from megaflow_hpc.rundir.engine_pool import pool_servers
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import DRAIN
from megaflow_hpc.rundir.record import RunRecord, ServerRecord, write_run
from megaflow_hpc.rundir.training import FOR_GOOD, TrainingView, say_last
from megaflow_hpc.slurm import site

Launcher = Literal["auto", "local", "slurm"]

STOP_S = 60.0
"""Seconds that trainers, pod and servers get to exit."""
IN_VAIN = (ConfigError.exit_status, StarvedError.exit_status)
"""Exit statuses after which a trainer is not restarted: a configuration error, or no pods."""

Start = Callable[[list[str], str, dict[str, str]], "subprocess.Popen[bytes]"]
"""Function that starts a command. It takes the arguments, the name of the log, and additional environment variables."""


def resolve_launcher(launcher: Launcher, slurm: SlurmConfig) -> Literal["local", "slurm"]:
    """Resolves ``auto`` to ``slurm`` if Slurm is available, and otherwise to ``local``.

    Args:
        slurm: The campaign's ``slurm`` section. If it sets any key, ``auto`` never means ``local``, because this may be
            a login node without the site's Slurm module.

    Raises:
        SiteError: Slurm is requested but missing.
    """
    if launcher == "auto":
        if site.has_slurm():
            return "slurm"
        if slurm == SlurmConfig():
            return "local"
        raise SiteError(
            "the campaign has a slurm: section, but sbatch, squeue and srun are not on PATH; load the site's Slurm "
            "module, or run the campaign on this machine with --launcher local"
        )
    if launcher == "slurm" and not site.has_slurm():
        raise SiteError("sbatch, squeue, srun: not found; load the site's Slurm module, or use --launcher local")
    return launcher


def living_pods(leases: Iterable[Mapping[str, Any]]) -> dict[str, Path]:
    """Returns the directory of each live pod of the run on this host that is not a Slurm job, by pod.

    Includes pods that other processes started. To drain a pod, create a file :data:`~megaflow_hpc.rundir.marks.DRAIN`
    in its directory.

    Args:
        leases: The pods' leases in the ledger.
    """
    directories = {}
    for lease in leases:
        if (process := process_here(lease)) is None:
            continue
        try:
            words = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        named = [word.partition(b"=")[2] for word in words if word.startswith(b"MEGAFLOW_POD_DIR=")]
        if named and process.alive():
            directories[str(lease["pod"])] = Path(os.fsdecode(named[0]))
    return directories


def _environment() -> dict[str, str]:
    """Returns this process's environment without Slurm's variables. Excludes loopback addresses from proxies."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return environment | unproxied(os.environ)


def _start(command: list[str], log_file: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts a command in a new session, so that Ctrl-C in the terminal reaches only the caller. Appends its output to
    a log."""
    with open(log_file, "ab") as log:
        os.fchmod(log.fileno(), file_mode(log_file.parent))
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _stop(processes: Iterable[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Terminates processes, and kills those that have not exited after ``grace_s`` seconds."""
    processes = list(processes)
    for process in processes:
        if process.poll() is None:
            process.terminate()
    end = time.monotonic() + grace_s
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # it leads its own session and is not reaped yet
        process.wait()


class LocalTrainer:
    """Runs a policy's trainer as a local process that can use this process's GPUs. ``trainer.sh`` does the same under
    Slurm."""

    def __init__(self, run: RunDir, policy: str, requeues: int, start: Start) -> None:
        self._run, self.policy, self._requeues, self._start = run, policy, requeues, start
        self._log = run.logs / f"trainer-{policy}-local.log"
        self._view = TrainingView(run, policy)
        self._vain_starts, self.word = 0, ""
        """Number of consecutive starts without a commit, and the final outcome of the trainer."""
        self._begin()

    def _begin(self) -> None:
        self._before = self._steps()
        self._written = self._log.stat().st_size if self._log.exists() else 0
        command = [trainer_python(), "-m", "megaflow_hpc.training.trainer", str(self._run), "--policy", self.policy]
        path = [str(self._run.training / ".package"), os.environ.get("PYTHONPATH", "")]
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "MEGAFLOW_ASK_PODS": "echo 0",  # no pod is queued
        }
        self.process = self._start(command, f"trainer-{self.policy}", own)

    def _steps(self) -> int:
        return sum(commit.step for commit in self._view.commits(1))

    def look(self) -> None:
        """Restarts the trainer if it exited too early."""
        status = self.process.poll()
        if status is None or self.word:
            return
        word = self._became(status)
        say_last(self._run, self.policy, word, status, self._log, self._written)
        if word == "requeued":
            self._begin()
        else:
            self.word = word

    def _became(self, status: int) -> str:
        if status == 0 and not self._view.open:
            return "done"
        if status in IN_VAIN:
            return "failed"
        self._vain_starts = 0 if self._steps() > self._before else self._vain_starts + 1
        return "lost" if self._vain_starts > self._requeues else "requeued"


class LocalPod:
    """A pod with its engines and trainers on this machine. The pod exits when all work is done. :meth:`stop` ends
    all processes."""

    def __init__(self, run: RunDir, ranks: int, servers: int, config: CampaignConfig | None = None) -> None:
        command = [sys.executable, "-m", "megaflow_hpc.pod", str(run)]
        if ranks > 1:
            command = [*mpiexec(ranks), *command]
        self._run = run
        self._directory = process_directory()
        self._environment = {**_environment(), "MEGAFLOW_POD_DIR": str(self._directory)}
        self.servers = [
            self._start([sys.executable, "-m", "megaflow_hpc.model.server", str(run), "--index", str(i)], f"server-{i}")
            for i in range(servers)
        ]
        self.pod = self._start(command, "pod")
        learning = config.training.policies if config and config.training else ()
        self._trainers = [LocalTrainer(run, policy, TRAINER_REQUEUES, self._start) for policy in learning]

    def _start(self, command: list[str], role: str, own: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        return _start(command, self._run.logs / f"{role}-local.log", {**self._environment, **(own or {})})

    @property
    def running(self) -> bool:
        """True until the pod's process has exited."""
        return self.pod.poll() is None

    @property
    def training(self) -> list[str]:
        """Policies whose trainer process is running."""
        return [trainer.policy for trainer in self._trainers if trainer.process.poll() is None]

    def look(self) -> bool:
        """Restarts trainers that exited too early. Drains the pod if a trainer cannot be restarted. Returns
        :attr:`running`."""
        for trainer in self._trainers:
            trainer.look()
            if trainer.word in FOR_GOOD and self.running:
                self.drain()
        return self.running

    def drain(self, why: str = "") -> None:
        """Asks the pod to finish running rollouts within its grace period and then exit.

        Args:
            why: A key of :data:`~megaflow_hpc.rundir.marks.WHY_DRAIN`.
        """
        write_atomic(self._directory / DRAIN, why)

    def stop(self) -> None:
        """Stops the trainers after their current step, drains the pod, and then stops the engines.

        An interrupt kills all processes immediately. ``resume`` continues training from the last step.
        """
        try:
            _stop((trainer.process for trainer in self._trainers), STOP_S)
            if self.running:
                self.drain("stopped")
                self.pod.wait(STOP_S)
            _stop(self.servers, STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills all remaining processes. Sandboxes exit when the socket to their runner closes."""
        for process in [self.pod, *self.servers, *(trainer.process for trainer in self._trainers)]:
            _kill(process)
        remove_tree(self._directory, ignore_errors=True)


# --- judges -----------------------------------------------------------------------------------------------------------

JUDGE_STOP_S = 30.0
"""Seconds that judge servers get to exit."""


class JudgeServers:
    """Context manager that serves a run's judges while no pod runs.

    Servers that are still running are reused. All other servers are started on this machine and end with this process.
    They use their own run directory, so they cannot disturb the run.

    Args:
        judges: Names of the judges to serve.

    Raises:
        ModelServiceError: A judge's engine pool currently has no server.
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
        command = [*dies_with_parent("TERM"), sys.executable, "-m", "megaflow_hpc.model.server", str(self._own)]
        for index in range(len(servers)):
            log_file, words = self._own.logs / f"server-{index}.log", ["--idle-s", "inf", "--index", str(index)]
            self._processes.append(_start([*command, *words], log_file, _environment()))

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
        _stop(self._processes, JUDGE_STOP_S)
        self._processes.clear()
        if self._folder is not None:
            remove_tree(self._folder, ignore_errors=True)
            self._folder = None
