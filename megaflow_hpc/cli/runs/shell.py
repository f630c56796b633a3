"""``shell``: recreates a rollout's sandbox and opens a shell in it."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from megaflow_hpc.cli.output import note, print_json, say
from megaflow_hpc.cli.runs.show import find
from megaflow_hpc.cli.verb import Subparsers, add_run, add_verb
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger.blocks import numbers, read_block
from megaflow_hpc.ledger.tasks import planned_tasks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, read_run
from megaflow_hpc.types import RolloutName, Task

if TYPE_CHECKING:
    from megaflow_hpc.config import Policy
    from megaflow_hpc.config.sections import AgentConfig
    from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox

PATCH = "patch"
"""Name of the artifact with a rollout's changes to its checkout."""


def register(subparsers: Subparsers) -> None:
    """Registers the verb ``shell``."""
    parser = add_verb(
        subparsers,
        "shell",
        _shell,
        "recreate a rollout's sandbox and open a shell in it",
        examples=[
            "shell RUN fix-humanize/default/0",
            "shell RUN fix-humanize/default/0 --fresh --network host",
            "shell latest 0 --command 'git status; python -m pytest -q'",
        ],
        description="Recreates the sandbox of a rollout on this machine, as the agent had it: image, work directory, "
        "variables, user, mounts and limits. Applies the rollout's stored patch, if any. Calls the run's own Python "
        "classes of agents or tasks only with --own-code. The sandbox is removed after the shell. With --command, the "
        "exit status is the command's. Programs in the sandbox can write any control sequence to your terminal.",
    )
    add_run(parser)
    parser.add_argument("id", metavar="ID", help="rollout id (<task>/<policy>/<sample>), or its row number")
    parser.add_argument("-c", "--command", metavar="CMD", help="run CMD with /bin/sh -c instead of a shell")
    parser.add_argument("--fresh", action="store_true", help="apply no patch")
    parser.add_argument(
        "--own-code",
        action="store_true",
        help="call the run's own Python classes, outside of the sandbox",
    )
    parser.add_argument(
        "--network",
        choices=("none", "host"),
        default="none",
        help="network of the sandbox: none (the default) or the host's",
    )


def _shell(arguments: argparse.Namespace) -> int:
    run = RunDir(arguments.run_dir)
    record = read_run(run)
    if arguments.command is None and arguments.json:
        raise ConfigError("--json: only with --command, because a shell is interactive")
    if arguments.command is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("shell: standard input and output are not a terminal; give --command CMD")
    rollout = _find(run, record, arguments.id)
    return asyncio.run(until_signalled(_look_in(arguments, run, record, rollout)))


class _Found(NamedTuple):
    """A planned rollout: its id and agent, and the stored patch, if any."""

    id: str
    agent: AgentConfig
    patch: bytes = b""


def _find(run: RunDir, record: RunRecord, wanted: str) -> _Found:
    """Finds a planned rollout by id or row number. Includes the stored patch, if any."""
    import msgspec

    from megaflow_hpc.config import Policy, resolved
    from megaflow_hpc.trajectories import open_trajectories

    with open_trajectories(run.path) as store:
        if wanted.isdigit() or wanted in store:
            row = find(store, wanted)
            policy = resolved(Policy, msgspec.to_builtins(record.policies[row.policy]))
            patch = next((artifact.data for artifact in row.artifacts if artifact.name == PATCH), b"")
            return _Found(row.id, policy.agent(row.agent), patch)
    name = RolloutName.parse(wanted)
    tasks = planned_tasks(run, record)
    if name.policy not in record.policies or name.task_id not in tasks:
        example = f"{next(iter(tasks), 'task')}/{next(iter(record.policies), 'policy')}/0"
        raise ConfigError(f"{run}: no rollout {wanted!r}; ids are <task>/<policy>/<sample>, such as {example}")
    policy = resolved(Policy, msgspec.to_builtins(record.policies[name.policy]))
    return _Found(wanted, _agent(run, policy, wanted, name.scaffold))


def _agent(run: RunDir, policy: Policy, rollout: str, scaffold: str) -> AgentConfig:
    """Returns the agent of a rollout that is not stored yet. If several agents share the policy and the id names none,
    looks the agent up in the rollout's block.
    """
    if len(policy.agents) == 1:
        return policy.agents[0]
    for agent in policy.agents:
        if agent.short_title == scaffold:
            return agent
    for number in sorted(numbers(run), reverse=True):
        for planned in read_block(run, number).rollouts:
            if planned.id == rollout:
                return policy.agent(planned.agent)
    names = ", ".join(agent.short_title for agent in policy.agents)
    raise ConfigError(
        f"{run}: no rollout {rollout!r} is planned, and its policy has several agents: {names}; give the id of a "
        "planned rollout, or with an agent: <task>/<policy>+<agent>/<sample>"
    )


async def until_signalled(work: Any) -> int:
    """Runs ``work`` and returns its status. On SIGHUP or SIGTERM, cancels it and returns 128 plus the signal number."""
    task = asyncio.ensure_future(work)
    signals: list[int] = []

    def end(number: int) -> None:
        if not signals:
            signals.append(number)
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGHUP, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    try:
        return int(await task)
    except asyncio.CancelledError:
        if signals:
            return 128 + signals[0]
        raise


async def _look_in(arguments: argparse.Namespace, run: RunDir, record: RunRecord, rollout: _Found) -> int:
    from megaflow_hpc.environments import ApptainerProvider
    from megaflow_hpc.pod.rollout.sandboxes import recreated

    planned = planned_tasks(run, record)[RolloutName.parse(rollout.id).task_id]
    task = Task.from_dict(planned.task)
    if not arguments.json:
        note(f"{rollout.id}: starting its sandbox of {planned.image or task.image}")
    async with ApptainerProvider() as provider:
        environment = record.config.environment
        async with recreated(
            provider, task, rollout.agent, planned.images, environment, arguments.network, arguments.own_code
        ) as sandbox:
            await _patch(sandbox, b"" if arguments.fresh else rollout.patch)
            if arguments.command is None:
                return await _interact(provider, sandbox)
            return await _command(sandbox, arguments.command, rollout.id, arguments.json)


async def _patch(sandbox: ApptainerSandbox, patch: bytes) -> None:
    from megaflow_hpc.tasks import checkout

    if patch:
        failed = await checkout.apply(sandbox, patch)
        note(f"its patch could not be applied: {failed}" if failed else "its patch was applied (--fresh: leave it out)")


async def _interact(provider: ApptainerProvider, sandbox: ApptainerSandbox) -> int:
    terminal = await provider.terminal(sandbox, {"TERM": os.environ.get("TERM", "dumb")})
    try:
        status = await terminal.relay(sys.stdin.fileno(), sys.stdout.fileno())
        breach = terminal.shell.result().breach if terminal.shell.done() else None
        if breach:
            note(f"the shell was ended: {breach}")
        return status
    finally:
        await terminal.close()


async def _command(sandbox: ApptainerSandbox, command: str, rollout: str, as_json: bool) -> int:
    """Runs a command and streams its output. Output is escaped on a terminal and unchanged in a pipe or file."""
    if as_json:
        done = await sandbox.exec(command)
        print_json({"id": rollout, "exit_code": done.exit_code, "stdout": done.stdout, "stderr": done.stderr})
        return done.exit_code

    def show(data: bytes) -> bool:
        if sys.stdout.isatty():
            say(data.decode("utf-8", "backslashreplace"), end="")
        else:
            sys.stdout.buffer.write(data)
        sys.stdout.flush()
        return True

    done = await sandbox.exec(command, on_output=show)
    if done.stderr and sys.stderr.isatty():
        note(done.stderr.removesuffix("\n"))
    else:
        sys.stderr.buffer.write(done.stderr_bytes)
        sys.stderr.flush()
    return done.exit_code
