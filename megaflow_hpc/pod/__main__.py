"""Entry point of every rank: ``python -m megaflow_hpc.pod RUN``, under srun, mpiexec or alone.

Alone it is a pod of one process and its runner, without MPI. ``MEGAFLOW_POD`` and ``MEGAFLOW_START`` name the pod and
this start of it, ``MEGAFLOW_POD_DIR`` is a private directory shared with the supervisor: ``drain`` appears there when
the pod shall drain, and the pod leaves its last word in ``state``.
"""

from __future__ import annotations

import argparse
import gc
import os
import secrets
import signal
import sys
from collections import Counter
from pathlib import Path

import msgspec

from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.config.quotas import slots_of_rank
from megaflow_hpc.config.sections import CPUS_PER_RANK, PodsConfig
from megaflow_hpc.errors import ConfigError, MegaflowError
from megaflow_hpc.host.process import Identity
from megaflow_hpc.ledger import Ledger, PodIdentity
from megaflow_hpc.pod.comm import ChildComm, MpiComm, world_hint
from megaflow_hpc.pod.engine_rank import accompany, start_server
from megaflow_hpc.pod.master.loop import Master
from megaflow_hpc.pod.master.settings import Pod
from megaflow_hpc.pod.master.walltime import Walltime
from megaflow_hpc.pod.worker import serve, start_runner, stop_runner
from megaflow_hpc.rundir.events import EventWriter
from megaflow_hpc.rundir.layout import RunDir, write_atomic
from megaflow_hpc.rundir.marks import DRAIN, ORDERLY, STATE
from megaflow_hpc.rundir.record import RunRecord, read_run
from megaflow_hpc.trajectories.journal.shard_maker import ShardMaker
from megaflow_hpc.trajectories.journal.winners import index
from megaflow_hpc.trajectories.journal.writer import JournalWriter, valid_length
from megaflow_hpc.version import __version__

SWITCH_S = 5e-4
"""For how long rank 0's loop and its I/O thread may keep each other from running, in seconds."""
GARBAGE = 50_000
"""Objects made before Python looks for cycles: rank 0 makes none, and each look costs a pause."""


def tune() -> None:
    """Makes the interpreter of rank 0 answer quickly."""
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    gc.set_threshold(GARBAGE, 20, 100)


def identity() -> PodIdentity:
    me = Identity.of(os.getpid())
    assert me is not None
    pod = os.environ.get("MEGAFLOW_POD", "")
    job_id = pod if "SLURM_JOB_ID" in os.environ else ""
    start = os.environ.get("MEGAFLOW_START", "0")
    name = pod or f"local-{me.pid}-{secrets.token_hex(4)}"
    return PodIdentity(name, start, job_id, os.uname().nodename, me.pid, me.start)


def check_version(planned: RunRecord, run: RunDir) -> None:
    """Refuses a run planned by another minor version: its pods must not write into it.

    Raises:
        ConfigError: names both versions.
    """
    if planned.version.split(".")[:2] != __version__.split(".")[:2]:
        raise ConfigError(
            f"{run.run_json}: made by megaflow-hpc {planned.version}, this pod is {__version__}; install "
            f"{planned.version} or plan again"
        )


def slots_per_rank(config: CampaignConfig) -> int:
    """Returns the rollouts that a worker rank runs at once."""
    pods = config.slurm.pods
    given = pods.slots_per_rank or pods.cpus_per_rank or int(os.environ.get("SLURM_CPUS_PER_TASK") or CPUS_PER_RANK)
    return slots_of_rank(given, config.quotas, pods)


def room_per_rank(pods: PodsConfig) -> tuple[float | None, int | None]:
    """Returns the CPUs and the memory in MB of a rank, ``None`` where the campaign file does not say them."""
    return pods.cpus_per_rank, None if pods.mem_gb is None else int(pods.mem_gb * 1000 / pods.ranks_per_node)


def expected_starts(planned: RunRecord) -> dict[str, float]:
    """Returns the sandboxes that one node will start, by image: what unpacking it there is weighed against."""
    each = planned.total / max(len(planned.tasks), 1) / planned.config.slurm.pods.total_nodes
    tasks = Counter(planned.images[task["image"]] for task in planned.tasks.values())
    return {image: count * each for image, count in tasks.items()}


def lead(run: RunDir, comm: MpiComm | ChildComm) -> str:
    """Rank 0 from first claim to last word."""
    planned = read_run(run)
    check_version(planned, run)
    config = planned.config
    who = identity()
    ledger = Ledger(run, who)
    directory = os.environ.get("MEGAFLOW_POD_DIR")
    shards = ShardMaker(run)
    journal = JournalWriter(run.journal_file(who.pod, who.start), on_rotate=shards.add)
    pod = Pod(
        run=run,
        comm=comm,
        ledger=ledger,
        journal=journal,
        events=EventWriter(run.event_file(who.pod, who.start)),
        init={
            "op": "init",
            "campaign": planned.campaign,
            "policies": msgspec.to_builtins(planned.policies),
            "images": planned.images,
            "slots": slots_per_rank(config),
            "starts": expected_starts(planned),
            "partial": str(run.partial),
        },
        tasks=planned.tasks,
        servers={**Counter(server.policy for server in planned.servers), **planned.pools},
        journal_length=lambda owner: valid_length(run.journal / f"{owner}.journal"),
        stored=lambda: {e.id for e in index(run, ledger.seals()).winners if e.status != "failed"},
        drain_file=Path(directory) / DRAIN if directory else None,
        limits=config.limits.model_dump(),
        samples={name: policy.samples for name, policy in planned.policies.items()},
        job_id=who.job_id or os.environ.get("SLURM_JOB_ID", ""),
        scheduling=config.scheduling.model_dump(),
        learned=planned.learned,
        room=room_per_rank(config.slurm.pods),
        walltime=Walltime.of(),
    )
    tune()
    state = Master(pod).run()
    if state != "lost":  # then nothing more may be committed, and the disk may not answer
        journal.close()
        shards.close()
    if directory:
        write_atomic(Path(directory) / STATE, state)
    return state


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megaflow_hpc.pod", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="run directory, as megaflow-hpc plan printed it")
    run = RunDir(parser.parse_args(argv).run)
    # Draining comes through the drain file; a step's signals must not kill a rank in the middle of a commit.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    rank, size = world_hint()
    # Children are started before MPI is initialised.
    engine = os.environ.get("MEGAFLOW_SERVER")
    server = start_server(run, int(engine)) if engine is not None else None
    runner = start_runner() if server is None and (size == 1 or rank > 0) else None
    status = 1
    try:
        if size == 1:
            assert runner is not None
            state = lead(run, ChildComm(runner[1]))
            stop_runner(*runner)
            status = 0 if state in ORDERLY else 1
        else:
            comm = MpiComm()
            if comm.size != size:
                raise MegaflowError(
                    f"MPI sees {comm.size} ranks where the launcher started {size}; "
                    "the MPI of mpi4py and the launcher do not fit: try another MEGAFLOW_MPI (srun --mpi=list)"
                )
            if runner is not None:
                serve(comm, *runner)
                status = 0
            elif server is not None:
                accompany(comm, server)
                status = 0
            else:
                state = lead(run, comm)
                comm.flush(5.0)
                status = 0 if state in ORDERLY else 1
    except MegaflowError as error:
        print(f"pod: {error}", file=sys.stderr)
        status = error.exit_status
    except Exception:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    # MPI_Finalize would wait for a rank that is dead; everything durable is on disk.
    os._exit(status)


if __name__ == "__main__":
    main()
