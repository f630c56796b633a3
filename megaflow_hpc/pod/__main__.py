"""Entry point of every rank: ``python -m megaflow_hpc.pod RUN``.

srun, mpiexec or the user starts it. Without srun or mpiexec, it runs a pod without MPI: this process and its runner. If
engines and pod share one job, ``MEGAFLOW_SERVER`` contains the index of the rank's engine server.
:mod:`megaflow_hpc.pod.master.assembly` lists the environment variables that rank 0 reads.
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
from megaflow_hpc.pod.worker import keep_server, serve, start_runner, start_server, stop_runner
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import ORDERLY, WORLD
from megaflow_hpc.texts import printable

LEAVE_S = 30
"""Maximum number of seconds that rank 0 waits for the workers to stop their runners."""


def main(argv: list[str] | None = None) -> int:
    """Runs one rank, then exits the process. The exit status is 0 after a clean shutdown. After an error, it is the
    error's exit status, or 1."""
    parser = argparse.ArgumentParser(prog="python -m megaflow_hpc.pod", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", help="run directory, as megaflow-hpc plan printed it")
    run = RunDir(parser.parse_args(argv).run)
    # Only the drain file starts a drain. Signals to the step must not kill a rank in the middle of a commit.
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
    # Skip MPI_Finalize, which would wait for a dead rank. All durable state is on disk.
    os._exit(status)


def _alone(run: RunDir) -> int:
    process, link = start_runner()
    state = _lead(run, ChildComm(link))
    stop_runner(process, link)
    return 0 if state in ORDERLY else 1


def _rank(run: RunDir, rank: int, size: int) -> int:
    # Start children before MPI is initialised.
    engine = os.environ.get("MEGAFLOW_SERVER")
    server = start_server(run, int(engine)) if engine is not None else None
    runner = start_runner() if server is None and rank > 0 else None
    comm = MpiComm()
    if comm.size != size:
        raise _wrong_size(comm.size, size)
    if rank == 0 and server is None:
        state = _lead(run, comm)
        comm.flush(5.0)
        comm.leave(LEAVE_S)
        return 0 if state in ORDERLY else 1
    if server is not None:
        master_is_there = keep_server(comm, server)
    else:
        assert runner is not None
        master_is_there = serve(comm, *runner)
    if master_is_there:
        comm.leave()  # waits for rank 0 indefinitely; the launcher kills this rank if rank 0 dies
    return 0


def _wrong_size(seen: int, started: int) -> MegaflowError:
    library, plugin = mpi_library(), os.environ.get("MEGAFLOW_MPI", "")
    common = [other for other in mpi_order(library) if other in ("pmi2", "pmix")]
    others = " or ".join(other for other in common if other != plugin)
    return MegaflowError(
        f"MPI sees {seen} ranks where the launcher started {started}: mpi4py's {library or 'MPI'} and "
        f"{f'srun --mpi={plugin}' if plugin else 'the launcher'} do not fit; set MEGAFLOW_MPI to {others}, or to "
        "another type of srun --mpi=list"
    )


def _lead(run: RunDir, comm: Comm) -> str:
    if directory := os.environ.get("MEGAFLOW_POD_DIR"):
        (Path(directory) / WORLD).touch()  # tells the batch script that all ranks are connected
    # Only rank 0 imports the models of the campaign file, because the import would double the start time of other
    # ranks.
    from megaflow_hpc.pod.master.assembly import lead

    return lead(run, comm)


if __name__ == "__main__":
    main()
