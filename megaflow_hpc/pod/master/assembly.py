"""Builds rank 0 of a pod from run.json, the environment, the ledger and the journal, and runs it.

``MEGAFLOW_POD`` and ``MEGAFLOW_START`` name the pod and this start of it. ``MEGAFLOW_POD_DIR`` is a private directory
shared with the supervisor, which is the batch script. To drain the pod, the supervisor creates the file ``drain`` in
it. At its end, the pod writes its final state to the file ``state``.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

import msgspec

from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.config.slurm import CPUS_PER_RANK, SlurmConfig
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.host.process import Identity
from megaflow_hpc.ledger import Ledger, PodIdentity
from megaflow_hpc.ledger.lease import TIMES
from megaflow_hpc.ledger.tasks import planned_tasks
from megaflow_hpc.pod.comm import Comm
from megaflow_hpc.pod.master.drain import STOP_S
from megaflow_hpc.pod.master.loop import Master
from megaflow_hpc.pod.master.pod import Pod, Walltime
from megaflow_hpc.rundir.events import EventWriter
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import DRAIN, STATE
from megaflow_hpc.rundir.overrides import overridden
from megaflow_hpc.rundir.record import RunRecord, check_version, read_run
from megaflow_hpc.trajectories.journal.packs import pack_journals
from megaflow_hpc.trajectories.journal.writer import JournalWriter

SWITCH_S = 5e-4
"""Seconds between switches of Python threads in rank 0. Shorter than the default, because the loop must respond
quickly."""
PACK_AFTER_S, PACK_SPREAD_S = TIMES.lease_s, 600
"""Times in seconds that determine when a start of a pod packs the journals of the pod's earlier starts.

It waits ``PACK_AFTER_S``. By then, earlier starts can commit nothing more, and readers have seen any earlier packs,
because cached listings are at most a minute old. Pods spread their packing over a further ``PACK_SPREAD_S``.
"""
GC_THRESHOLD = 50_000
"""Number of allocations after which Python's garbage collector runs. The threshold is high because each collection
causes a pause, and rank 0 creates no reference cycles."""


def tune() -> None:
    """Tunes the Python interpreter of rank 0 for low latency."""
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 100)


def identity() -> PodIdentity:
    """Returns the identity of this start of the pod. Without a supervisor, the pod gets a random name."""
    me = Identity.of(os.getpid())
    assert me is not None
    pod = os.environ.get("MEGAFLOW_POD", "")
    job_id = pod if "SLURM_JOB_ID" in os.environ else ""
    start = os.environ.get("MEGAFLOW_START", "0")
    name = pod or f"local-{me.pid}-{secrets.token_hex(4)}"
    return PodIdentity(name, start, job_id, os.uname().nodename, me.pid, me.start)


def slots_per_rank(config: CampaignConfig) -> int:
    """Returns the maximum number of rollouts that a worker rank runs at the same time."""
    pods = config.slurm.pods
    return pods.slots_per_rank or pods.cpus_per_rank or int(os.environ.get("SLURM_CPUS_PER_TASK") or CPUS_PER_RANK)


def room_per_rank(slurm: SlurmConfig) -> tuple[float | None, int | None]:
    """Returns the CPUs and the memory in MB of a worker rank. Each is ``None`` if the campaign file does not set it."""
    memory_mb = slurm.memory_mb(slurm.pods)
    return slurm.pods.cpus_per_rank, memory_mb and memory_mb // slurm.pods.ranks


def lead(run: RunDir, comm: Comm) -> str:
    """Runs rank 0 until the pod ends. Writes the pod's final state for the supervisor, and returns it.

    Raises:
        MegaflowError: The pod cannot continue.
    """
    planned = read_run(run)
    check_version(planned, run)
    who = identity()
    directory = os.environ.get("MEGAFLOW_POD_DIR")
    journal = JournalWriter(run.journal_file(who.pod, who.start))
    pod = _pod(run, planned, comm, who, journal)
    pod.drain_file = Path(directory) / DRAIN if directory else None
    if "SLURM_JOB_ID" in os.environ:
        _note_signal(pod)
    tune()
    after_s = PACK_AFTER_S + zlib.crc32(who.name.encode()) % PACK_SPREAD_S
    packing = threading.Timer(after_s, pack_journals, [run.journal, who.pod, who.start])
    packing.daemon = True
    packing.start()
    state = Master(pod).run()
    packing.cancel()
    if state != "lost":  # a lost pod may commit nothing more, and its disk may not respond
        journal.close()
    if directory:
        write_atomic(Path(directory) / STATE, "superseded" if pod.ledger.superseded else state)
    return state


def _note_signal(pod: Pod) -> None:
    """Makes Slurm's signal to the step record its time in ``pod``. The signal does not end rank 0
    (:meth:`Drain.obey`)."""

    def note(*_: object) -> None:
        pod.signalled_at = min(pod.signalled_at, time.monotonic())

    signal.signal(signal.SIGTERM, note)
    signal.siginterrupt(signal.SIGTERM, False)  # so that MPI's system calls are restarted


def _pod(run: RunDir, planned: RunRecord, comm: Comm, who: PodIdentity, journal: JournalWriter) -> Pod:
    config, tasks = overridden(run, planned.config), planned_tasks(run, planned)
    ledger = Ledger(run, who, pods=config.slurm.pods.total)
    return Pod(
        run=run,
        comm=comm,
        ledger=ledger,
        journal=journal,
        events=EventWriter(run.event_file(who.pod, who.start)),
        init={
            "op": "init",
            "campaign": planned.campaign,
            "policies": msgspec.to_builtins(planned.policies),
            "slots": slots_per_rank(config),
            "partial": str(run.partial),
            "code": str(run.code),
            "beside": planned.beside,
            "sandboxes": planned.sandboxes,
        },
        tasks=tasks,
        pods=config.slurm.pods.total,
        servers={**Counter(server.policy for server in planned.servers), **planned.pools},
        limits=config.limits,
        held_out=frozenset(planned.held_out),
        samples={name: policy.samples for name, policy in planned.policies.items()},
        judges=frozenset(planned.config.judges()) | {server.policy for server in planned.servers if server.service},
        job_id=who.job_id or os.environ.get("SLURM_JOB_ID", ""),
        scheduling=config.scheduling,
        room=room_per_rank(config.slurm),
        walltime=Walltime.of_job(config.slurm.lead_s),
        drain_s=config.slurm.lead_s - STOP_S,
    )
