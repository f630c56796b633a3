"""``python -m megaflow_hpc.model.server RUN``: one element of the engine array (:mod:`.server`)."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Sequence

from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.process import raise_descriptor_limit
from megaflow_hpc.model.server.registration import assignment
from megaflow_hpc.model.server.server import BACKOFF_S, HEARTBEAT_S, IDLE_S, POLL_S, EngineServer
from megaflow_hpc.model.server.weight_updates import poll_interval_s
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.texts import printable


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, runs the server and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megaflow_hpc.model.server", description="one engine server")
    parser.add_argument("run", help="run directory")
    parser.add_argument("--policy", help="policy to serve; default: the policy of this element in run.json")
    parser.add_argument("--index", type=int, help="element; default: SLURM_ARRAY_TASK_ID")
    parser.add_argument("--idle-s", type=float, default=IDLE_S, help="leave after this many seconds without a request")
    parser.add_argument("--poll-s", type=float, help="seconds between two polls of the run directory; default: 5")
    parser.add_argument("--beat-s", type=float, default=HEARTBEAT_S, help="seconds between two heartbeats")
    parser.add_argument(
        "--backoff-s", type=float, default=BACKOFF_S, help="seconds before a failed engine starts again"
    )
    arguments = parser.parse_args(argv)
    index = arguments.index
    if index is None and os.environ.get("SLURM_ARRAY_TASK_ID"):
        index = int(os.environ["SLURM_ARRAY_TASK_ID"])
    os.umask(0o077)
    raise_descriptor_limit()
    try:
        run = RunDir(arguments.run)
        run.check_ours()
        planned = read_run(run)
        what = assignment(planned.servers, index, arguments.policy)
        pool = planned.campaign.get("pool")
        caps = None if pool is None else planned.config.pool_caps
        idle_s = arguments.idle_s if pool is None else math.inf  # a pool's server waits for users

        async def serve() -> int:
            poll_s = arguments.poll_s or POLL_S
            if service := planned.servers[what.number].service:
                from megaflow_hpc.model.server.service import ServiceServer

                return await ServiceServer(run, what, service, poll_s, arguments.beat_s, arguments.backoff_s).run()
            server = EngineServer(
                run,
                what,
                idle_s=idle_s,
                poll_s=poll_s,
                weights_poll_s=arguments.poll_s or poll_interval_s(planned, what.policy),
                beat_s=arguments.beat_s,
                backoff_s=arguments.backoff_s,
                caps=caps,
            )
            return await server.run()

        return asyncio.run(serve())
    except MegaflowError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
