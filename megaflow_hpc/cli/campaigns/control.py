"""Verbs for an existing run: ``resume``, ``extend``, ``scale``, ``cancel`` and ``gather``."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from megaflow_hpc.cli.campaigns.following import add_launcher, say_notices, start_and_follow
from megaflow_hpc.cli.output import note, print_result, unstarted_lines
from megaflow_hpc.cli.progress import PlanProgress, under_way
from megaflow_hpc.cli.verb import Subparsers, add_run, add_verb, limit, request, whole
from megaflow_hpc.errors import ConfigError, SiteError

STOPPED = 75
"""Exit status of a stopped gather that can be continued (EX_TEMPFAIL of sysexits.h)."""


def register(subparsers: Subparsers) -> None:
    """Registers the verbs ``resume``, ``extend``, ``scale``, ``cancel`` and ``gather``."""
    resume = add_verb(
        subparsers,
        "resume",
        _resume,
        "continue a run; stored rollouts are not run again",
        examples=[
            "resume RUN",
            "resume RUN --failed --no-wait",
            "resume RUN --time 8:00:00 --time servers=12:00:00 --mem 64G",
            "resume RUN --limit gpu_hours=200 --limit wall=none",
        ],
        description="Submits jobs for the missing rollouts, whatever ended the run: a limit, a walltime, Ctrl-C, a "
        "broken node.",
    )
    add_run(resume)
    resume.add_argument("--failed", action="store_true", help="also repeat failed rollouts")
    resume.add_argument(
        "--only", action="extend", nargs="+", default=[], metavar="ID", help="also repeat these rollouts if they failed"
    )
    resume.add_argument(
        "--accept-changes",
        action="store_true",
        help="accept tasks whose files were changed after planning, and record their digests",
    )
    resume.add_argument(
        "--limit",
        action="append",
        default=[],
        type=limit,
        metavar="NAME=HOURS",
        help="change a limit from now on: core_hours, gpu_hours, wall or usd; none removes it",
    )
    for name, key, metavar, what in (
        ("--time", "time", "TIME", "walltime"),
        ("--mem", "mem", "SIZE", "memory on each node, such as 64G,"),
        ("--partition", "partition", "NAME", "partition"),
    ):
        resume.add_argument(
            name,
            action="append",
            default=[],
            type=request(key),
            metavar=f"[JOBS=]{metavar}",
            dest="requests",
            help=f"{what} for new jobs of JOBS: pods (the default), servers, trainer or gather; none: the site's "
            "default",
        )
    resume.add_argument("--no-wait", action="store_true", help="submit and return")
    add_launcher(resume)

    extend = add_verb(
        subparsers,
        "extend",
        _extend,
        "add the new tasks and samples of an edited campaign file to a run",
        examples=["extend RUN", "extend latest more-tasks.yaml", "resume RUN"],
        description="Edit tasks, samples or environment.images in the campaign file, then extend the run: it gets the "
        "rollouts that it lacks, and megaflow-hpc resume runs them. A run that was planned with --only gets only those "
        "that match it. Removes nothing. Other edits are refused: rollouts of one run would differ. Pods must have "
        "ended.",
    )
    add_run(extend)
    extend.add_argument(
        "campaign", metavar="CAMPAIGN", nargs="?", help="campaign file; default: the one that the run was planned from"
    )

    scale = add_verb(
        subparsers,
        "scale",
        _scale,
        "add pods to a running campaign, or release some",
        examples=["scale RUN --pods 12", "scale RUN --servers 4 --policy student"],
        description="Sets the number of pods or engine servers from now on. Pods that leave finish their running "
        "rollouts first.",
    )
    add_run(scale)
    scale.add_argument("--pods", type=whole(), metavar="N", help="target number of pods, queued or running")
    scale.add_argument(
        "--servers", type=whole(), metavar="N", help="target number of engine servers; releases held servers"
    )
    scale.add_argument("--policy", help="with --servers: the model's policy, if there are several")

    cancel = add_verb(
        subparsers,
        "cancel",
        _cancel,
        "cancel a run's jobs; stored results stay",
        examples=["cancel RUN"],
        description="Cancels every job of the run. Stored results stay, and megaflow-hpc resume continues the run.",
    )
    add_run(cancel)

    gather = add_verb(
        subparsers,
        "gather",
        _gather,
        "write trajectories.h5 from the journals",
        examples=["gather RUN", "gather latest --rebuild"],
        description="Writes all results stored so far into RUN/trajectories.h5, while the campaign runs or after it. "
        "On SIGTERM, keeps what it has written and exits with status 75; the next call continues.",
    )
    add_run(gather)
    gather.add_argument("--rebuild", action="store_true", help="rebuild trajectories.h5 even if it is up to date")
    gather.add_argument(
        "--wait", action="store_true", help="wait for the pods first, including those on other clusters"
    )
    gather.add_argument("--end-servers", nargs="+", default=[], metavar="JOB", help="cancel these engine arrays first")


def _resume(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run

    with under_way(f"reading {arguments.run_dir}"):
        run = Run(arguments.run_dir)
        run.dir.check_ours()
        status = run.status()
    for line in [*unstarted_lines(status), *status["warnings"]]:
        note(line)
    if edited := run.edits.tasks():
        shown = f"{', '.join(edited[:3])}{', …' if len(edited) > 3 else ''}"
        changed = f"{len(edited)} {'task was' if len(edited) == 1 else 'tasks were'} changed after the run was planned"
        if arguments.accept_changes:
            note(f"{changed} and accepted: {shown}")
        elif not status["rollouts"]["pending"] + status["rollouts"]["running"] + status["rollouts"]["failed"]:
            note(
                f"{changed}, and stored rollouts keep the rewards of the earlier tests: {shown}; score them again "
                f"with: megaflow-hpc reverify {run.path}; or run them again in a new run: megaflow-hpc run "
                f"{run.record.file or 'CAMPAIGN'} --only {' '.join(edited[:3])}"
            )
        else:
            note(
                f"{changed}, so rollouts fail: {shown}; restore the files, accept the changes with --accept-changes, "
                "or plan a new run"
            )
    requests: dict[str, dict[str, Any]] = {}
    for role, key, value in arguments.requests:
        requests.setdefault(role, {})[key] = value
    limits = dict(arguments.limit)

    def start() -> bool:
        try:
            resumed = run.resume(
                arguments.failed,
                arguments.only,
                arguments.launcher,
                arguments.ranks,
                limits=limits,
                requests=requests,
                accept_changes=arguments.accept_changes,
            )
        finally:
            for line in run.edits.campaign_keys():  # keys that this call has not changed
                note(line)
        if not resumed:
            more = "" if arguments.failed else "; repeat the failed ones with --failed"
            note(f"nothing to do: every rollout is stored{more}")
            return True
        say_notices(run.slurm_jobs)
        if arguments.no_wait:
            print_result(arguments.json, {"run": str(run.path), "jobs": run.job_ids()}, run.path)
            return False
        return True

    return start_and_follow(run, arguments, start)


def _extend(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.extension import extend
    from megaflow_hpc.campaign.facade import Run

    run = Run(arguments.run_dir)
    with PlanProgress() as watch:
        added = extend(run, arguments.campaign, watch)
    text = f"added {len(added.tasks)} tasks and {added.rollouts} rollouts"
    hint = f"run them: megaflow-hpc resume {run.path}"
    if not added.rollouts:
        which = f" that --only {' '.join(run.record.only)} selects" if run.record.only else ""
        text, hint = f"nothing to add: the run has every rollout of the file{which}", ""
    print_result(arguments.json, {"run": str(run.path), **asdict(added)}, text, hint)
    return 0


def _scale(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run

    wanted = [number for number in (arguments.pods, arguments.servers) if number is not None]
    if len(wanted) != 1:
        raise ConfigError(f"scale: {' and '.join(map(str, wanted)) or 'no number'}: give --pods N or --servers N")
    run = Run(arguments.run_dir)
    if arguments.servers is not None:
        return _scale_servers(run, arguments)
    with under_way(f"scaling {run.path}"):
        changed = run.scale(arguments.pods)
    say_notices(run.slurm_jobs)
    text = "\n".join(f"{verb} {pod}" for verb, pods in changed.items() for pod in pods)
    if not text:
        text = "the campaign is finished" if run.ledger.finished else f"{arguments.pods} pods are queued or running"
    print_result(arguments.json, {"run": str(run.path), "pods": arguments.pods, **changed}, text)
    return 0


def _scale_servers(run: Any, arguments: argparse.Namespace) -> int:
    released = run.scale_servers(arguments.servers, arguments.policy)
    text = "\n".join(f"released {element}" for element in released) or "enough servers are queued or running"
    print_result(arguments.json, {"run": str(run.path), "servers": arguments.servers, "added": released}, text)
    return 0


def _cancel(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run

    run = Run(arguments.run_dir)
    with under_way(f"cancelling {run.path}"):
        done = run.cancel()
    lines = [f"cancelled {' '.join(done.jobs)}"] if done.jobs else []
    lines += [f"local pod {pod} drains" for pod in done.pods]
    hint = f"continue with: megaflow-hpc resume {run.path}"
    if done.before == "finished":
        hint = f"{run.path} is finished: every rollout is stored, so there is nothing to cancel"
    found = {"run": str(run.path), "before": done.before, "cancelled": done.jobs, "pods": done.pods}
    print_result(arguments.json, found, "\n".join(lines) or "nothing was queued or running", hint)
    return 0


def _gather(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run

    run = Run(arguments.run_dir)
    with _terminated() as terminated:
        if arguments.wait:
            note(f"waiting for the pods of {run.path}")
            run.slurm_jobs.until_pods_left()
        if run.slurm_jobs.gather_later(arguments.end_servers):
            note("pods will start again, so another gather job was queued to wait for them")
            return 0
        say_notices(run.slurm_jobs)
        with under_way(f"gathering {run.path}"):
            # End the servers first: gathering may take long, and engines receive no more requests.
            servers = sorted({*arguments.end_servers, *run.job_ids("servers")}) if arguments.end_servers else []
            ended: list[str] | None = []
            if servers:
                with suppress(SiteError):  # Slurm does not respond; the results do not wait for it
                    ended = None
                    ended = run.slurm_jobs.end_servers(servers)
            path = run.gather(arguments.rebuild, terminated)
            ended = run.slurm_jobs.end_servers(servers) if ended is None else ended
    print_result(arguments.json, {"trajectories": str(path), "servers_ended": ended}, path)
    return 0


@contextmanager
def _terminated() -> Iterator[Callable[[], bool]]:
    """Handles SIGTERM. Yields a function that returns whether the signal has arrived.

    Until that function is first called, SIGTERM ends the process with status :data:`STOPPED`.
    """
    arrived = polled = False

    def handle(*_: object) -> None:
        nonlocal arrived
        arrived = True
        if not polled:
            raise SystemExit(STOPPED)

    def poll() -> bool:
        nonlocal polled
        polled = True
        return arrived

    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread only
        yield poll
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield poll
    finally:
        signal.signal(signal.SIGTERM, before)
