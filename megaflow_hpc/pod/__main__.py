"""Entry point of every rank: ``python -m megaflow_hpc.pod RUN``, under srun, mpiexec or alone.

Alone it is a pod of one process and its runner, without MPI. ``MEGAFLOW_SERVER`` names the engine server that a rank
keeps, where engines and pod are one job; what rank 0 reads from the environment stands in
:mod:`megaflow_hpc.pod.master.assembly`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from pathlib import Path

from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.mpi import mpi_library, mpi_order
from megaflow_hpc.pod.comm import ChildComm, Comm, MpiComm, world_hint
from megaflow_hpc.pod.engine_rank import accompany, start_server
from megaflow_hpc.pod.worker import serve, start_runner, stop_runner
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import ORDERLY, WORLD
from megaflow_hpc.texts import printable

LEAVE_S = 30
"""Seconds for which rank 0 waits for workers that stop their runners."""


def main(argv: list[str] | None = None) -> int:
    """Runs one rank and ends the process: with 0 after an orderly end, else the error's exit status or 1."""
    parser = argparse.ArgumentParser(prog="python -m megaflow_hpc.pod", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="run directory, as megaflow-hpc plan printed it")
    run = RunDir(parser.parse_args(argv).run)
    # Draining comes through the drain file; a step's signals must not kill a rank in the middle of a commit.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    status = 1
    try:
        run.check_ours()
        rank, size = world_hint()
        status = _alone(run) if size == 1 else _rank(run, rank, size)
    except MegaflowError as error:
        print(printable(f"pod: {error}"), file=sys.stderr)
        status = error.exit_status
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    # MPI_Finalize would wait for a rank that is dead; everything durable is on disk.
    os._exit(status)


def _alone(run: RunDir) -> int:
    _say_found()
    runner = start_runner()
    state = _lead(run, ChildComm(runner[1]))
    stop_runner(*runner)
    return 0 if state in ORDERLY else 1


def _rank(run: RunDir, rank: int, size: int) -> int:
    # Children are started before MPI is initialised.
    engine = os.environ.get("MEGAFLOW_SERVER")
    server = start_server(run, int(engine)) if engine is not None else None
    runner = start_runner() if server is None and rank > 0 else None
    comm = MpiComm()
    if comm.size != size:
        library, now = mpi_library(), os.environ.get("MEGAFLOW_MPI", "")
        others = " or ".join(plugin for plugin in mpi_order(library)[:2] if plugin != now)
        raise MegaflowError(
            f"MPI sees {comm.size} ranks where the launcher started {size}: mpi4py's {library or 'MPI'} and "
            f"{f'srun --mpi={now}' if now else 'the launcher'} do not fit; set MEGAFLOW_MPI to {others}, or to another "
            "type of srun --mpi=list"
        )
    if server is not None or runner is not None:
        led = accompany(comm, server) if server is not None else serve(comm, *runner) if runner is not None else False
        if led:
            comm.leave()  # however long rank 0 goes on: when it ends otherwise, so do we
        return 0
    _say_found()
    state = _lead(run, comm)
    comm.flush(5.0)
    comm.leave(LEAVE_S)
    return 0 if state in ORDERLY else 1


def _say_found() -> None:
    """Tells the batch shell that the ranks have found each other."""
    if directory := os.environ.get("MEGAFLOW_POD_DIR"):
        (Path(directory) / WORLD).touch()


def _lead(run: RunDir, comm: Comm) -> str:
    # Imported by rank 0 alone: the models of a campaign file would be most of what another rank takes to start.
    from megaflow_hpc.pod.master.assembly import lead

    return lead(run, comm)


if __name__ == "__main__":
    main()
