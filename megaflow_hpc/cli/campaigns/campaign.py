"""Verbs about a campaign as a whole: plan, run, submit, resume, scale, cancel, gather."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megaflow_hpc.cli.campaigns.dry_run import add_dry_run, dry_run
from megaflow_hpc.cli.output import (
    FINAL,
    failure_lines,
    note,
    print_json,
    say,
    summary,
    training_lines,
    unstarted_lines,
)
from megaflow_hpc.cli.progress import PlanProgress, Progress
from megaflow_hpc.cli.values import limit, request, whole
from megaflow_hpc.cli.verb import Subparsers, add_run, add_verb
from megaflow_hpc.errors import ConfigError, MegaflowError, SiteError


def register(subparsers: Subparsers) -> None:
    """Adds plan, run, submit, resume, scale, cancel and gather."""
    plan = add_verb(
        subparsers,
        "plan",
        _plan,
        "make the run directory and queue nothing",
        examples=["plan campaign.yaml", "plan campaign.yaml --only 'fix-*/default/0' --run-dir runs/trial"],
        description="Checks the campaign file, its tasks and the site, makes the run directory and prints it; on "
        "stderr the commands that queue it by hand.",
    )
    _add_campaign(plan)

    run = add_verb(
        subparsers,
        "run",
        _run,
        "submit, follow, gather and print the summary",
        examples=["run campaign.yaml", "run campaign.yaml --launcher local --ranks 4"],
        description="Plans the campaign, submits it, shows how far it is, and prints the summary at its end. Ctrl-C "
        "cancels the jobs and keeps what is stored; megaflow-hpc resume goes on from there.",
    )
    _add_campaign(run)
    _add_launcher(run)
    add_dry_run(run)

    submit = add_verb(
        subparsers,
        "submit",
        _submit,
        "queue the campaign and return",
        examples=["submit campaign.yaml --dry-run", "submit campaign.yaml"],
        description="Plans the campaign, queues its jobs and prints the run directory and the jobs. Close the terminal "
        "if you like: follow with megaflow-hpc watch RUN.",
    )
    _add_campaign(submit)
    add_dry_run(submit)

    resume = add_verb(
        subparsers,
        "resume",
        _resume,
        "continue a run; nothing that is stored is run again",
        examples=[
            "resume RUN",
            "resume RUN --failed --no-wait",
            "resume RUN --time 8:00:00 --time servers=12:00:00 --mem 64",
            "resume RUN --limit gpu_hours=200 --limit wall=none",
        ],
        description="Queues what a run still needs, whatever ended it: a limit, a walltime, Ctrl-C, a broken node.",
    )
    add_run(resume)
    resume.add_argument("--failed", action="store_true", help="also run again what failed")
    resume.add_argument("--only", nargs="+", default=[], metavar="ID", help="run again these, where they failed")
    resume.add_argument(
        "--limit",
        action="append",
        default=[],
        type=limit,
        metavar="NAME=HOURS",
        help="change a limit from now on: core_hours, gpu_hours or wall; none lifts it",
    )
    for name, key, metavar, what in (
        ("--time", "time", "TIME", "walltime"),
        ("--mem", "mem_gb", "GB", "memory of each node, in GB"),
        ("--partition", "partition", "NAME", "partition"),
    ):
        resume.add_argument(
            name,
            action="append",
            default=[],
            type=request(key),
            metavar=f"[JOBS=]{metavar}",
            dest="requests",
            help=f"{what} of new jobs: of the pods, or as servers={metavar}, trainer=…, gather=…; none: the site's",
        )
    resume.add_argument("--no-wait", action="store_true", help="queue and return")
    _add_launcher(resume)

    scale = add_verb(
        subparsers,
        "scale",
        _scale,
        "add pods to a running campaign, or let some go",
        examples=["scale RUN --pods 12", "scale RUN --servers 4 --policy student"],
        description="Sets the number of pods, or of engine servers, from now on. Pods that leave finish what they run.",
    )
    add_run(scale)
    scale.add_argument("--pods", type=whole(), metavar="N", help="target number of pods, queued or running")
    scale.add_argument(
        "--servers", type=whole(), metavar="N", help="target number of engine servers; held ones are released"
    )
    scale.add_argument("--policy", help="with --servers: the model's policy, where there are several")

    cancel = add_verb(
        subparsers,
        "cancel",
        _cancel,
        "cancel a run's jobs; what is stored stays",
        examples=["cancel RUN"],
        description="Cancels every job of the run. What is stored stays, and megaflow-hpc resume goes on with it.",
    )
    add_run(cancel)

    gather = add_verb(
        subparsers,
        "gather",
        _gather,
        "write trajectories.h5 from the journals",
        examples=["gather RUN", "gather latest --rebuild"],
        description="Writes what is stored so far into RUN/trajectories.h5, while the campaign runs or after it.",
    )
    add_run(gather)
    gather.add_argument("--rebuild", action="store_true", help="even if trajectories.h5 is up to date")
    gather.add_argument("--wait", action="store_true", help="first for the pods, those at other clusters too")
    gather.add_argument("--end-servers", nargs="+", default=[], metavar="JOB", help="first cancel these engine arrays")


def _add_campaign(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("campaign", metavar="CAMPAIGN", help="campaign file (YAML)")
    parser.add_argument(
        "--run-dir", metavar="RUN", help="run directory; default: a new one under the campaign's run_dir"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="ID", help="plan only these tasks, groups or rollouts (shell patterns)"
    )


def _add_launcher(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        choices=("auto", "local", "slurm"),
        default="auto",
        help="where pods and engines run; auto (the default): on Slurm where there is one",
    )
    parser.add_argument(
        "--ranks", type=whole(1), default=1, metavar="N", help="local only: MPI ranks of the pod (1: no MPI)"
    )


def _plan(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Campaign
    from megaflow_hpc.slurm import site

    campaign = Campaign.from_yaml(arguments.campaign)
    with PlanProgress() as watch:
        run = campaign.plan(arguments.run_dir, arguments.only, watch=watch)
    _say(campaign)
    here = f"megaflow-hpc resume {run.path} --launcher local"
    commands = _by_hand(run) if site.has_slurm() else [here]
    if arguments.json:
        print_json({"run": str(run.path), "commands": commands})
        return 0
    for command in commands:
        note(command)
    say(run.path)
    return 0


def _by_hand(run: Any) -> list[str]:
    """The commands that submit a planned run without this one."""
    from megaflow_hpc.campaign.demand import by_hand

    return by_hand(run.config, run.dir, run.record.server_groups)


def _run(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Campaign

    campaign = Campaign.from_yaml(arguments.campaign)
    if arguments.dry_run:
        return dry_run(campaign, arguments)
    with PlanProgress() as watch:
        run = campaign.plan(arguments.run_dir, arguments.only, arguments.launcher, watch)
    note(f"run directory: {run.path}")
    _say(campaign)

    def start() -> bool:
        campaign.start(run, arguments.launcher, arguments.ranks)
        note(f"jobs: {' '.join(run.job_ids()) or 'local'}")
        _say(run.slurm_jobs)
        return True

    return _start_and_follow(run, arguments, start)


def _start_and_follow(run: Any, arguments: argparse.Namespace, start: Callable[[], bool]) -> int:
    """Starts, follows and ends with the summary; Ctrl-C cancels, keeps what is done and says how to go on.

    Args:
        start: returns whether there is something to follow.
    """
    progress = Progress(run.config.name)
    said: list[str] = []

    def interrupted() -> None:
        progress.close()
        what = "cancelling the jobs" if run.local is None else "the pod here stops, within a minute"
        said.append(f"interrupted: {what}; what is stored stays (once more: at once)")
        note(said[-1])

    try:
        if not start():
            return 0
        result = run.wait(progress=progress, interrupted=interrupted)
    except KeyboardInterrupt:
        try:
            if not said:
                interrupted()
            for step in (run.cancel, run.gather):
                try:
                    step()
                except MegaflowError as error:
                    note(f"{error}")
        except KeyboardInterrupt:
            note("at once: nothing was gathered")
        note(f"continue with: megaflow-hpc resume {run.path}")
        return 130
    finally:
        progress.close()
    return _conclude(result, arguments.json)


def _conclude(result: dict[str, Any], as_json: bool) -> int:
    counts = result["rollouts"]
    missing = counts["total"] - sum(counts[state] for state in FINAL)
    if as_json:
        print_json(result)
    else:
        say(summary(result))
        if result["failures"]:
            say("failures: " + ", ".join(f"{kind} {n}" for kind, n in result["failures"].items()))
            say("\n".join(failure_lines(result)))
        for server in result["servers"]:
            if server["state"] == "failed":
                log = f"\n  log: {server['log']}" if server.get("log") else ""
                say(f"server {server['server']}: {server.get('cause', 'failed')}{log}")
        for line in [*training_lines(result), *unstarted_lines(result)]:
            say(line)
        if missing:
            say(
                f"{missing} of {counts['total']} rollouts are missing; "
                f"continue with: megaflow-hpc resume {result['run']}"
            )
        elif counts["failed"]:
            say(f"run the failed again with: megaflow-hpc resume {result['run']} --failed")
        say(f"results: {result['run']}")
    if missing and result["unstarted"] and not result["pods"]:
        return SiteError.exit_status
    return 1 if missing or counts["failed"] else 0  # cancelled: by the campaign's own rules of groups


def _submit(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Campaign

    campaign = Campaign.from_yaml(arguments.campaign)
    if arguments.dry_run:
        return dry_run(campaign, arguments)
    with PlanProgress() as watch:
        run = campaign.submit("slurm", arguments.run_dir, arguments.only, watch=watch)
    _say(campaign, run.slurm_jobs)
    if arguments.json:
        print_json({"run": str(run.path), "jobs": run.job_ids()})
        return 0
    say(run.path)
    for job in run.job_ids():
        say(job)
    note(f"follow with: megaflow-hpc status {run.path}")
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run

    run = Run(arguments.run_dir)
    status = run.status()
    for line in [*unstarted_lines(status), *status["warnings"]]:
        note(line)
    if edited := run.edits.tasks():
        shown = f"{', '.join(edited[:3])}{', …' if len(edited) > 3 else ''}"
        note(
            f"{len(edited)} tasks were changed after the run was planned, and their rollouts fail: {shown}; put their "
            "files back as they were, or plan a new run"
        )
    requests: dict[str, dict[str, Any]] = {}
    for role, key, value in arguments.requests:
        requests.setdefault(role, {})[key] = value
    limits = dict(arguments.limit)

    def start() -> bool:
        if not run.resume(
            arguments.failed, arguments.only, arguments.launcher, arguments.ranks, limits=limits, requests=requests
        ):
            more = "" if arguments.failed else "; failed ones run again with --failed"
            note(f"nothing to do: every rollout is stored{more}")
        elif arguments.no_wait:
            print_json({"run": str(run.path), "jobs": run.job_ids()}) if arguments.json else say(run.path)
            return False
        return True

    return _start_and_follow(run, arguments, start)


def _scale(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run

    wanted = [number for number in (arguments.pods, arguments.servers) if number is not None]
    if len(wanted) != 1:
        raise ConfigError(f"scale: {' and '.join(map(str, wanted)) or 'no number'}: give --pods N or --servers N")
    run = Run(arguments.run_dir)
    if arguments.servers is not None:
        return _scale_servers(run, arguments)
    changed = run.scale(arguments.pods)
    _say(run.slurm_jobs)
    if arguments.json:
        print_json({"run": str(run.path), "pods": arguments.pods, **changed})
    elif changed["added"] or changed["leaving"]:
        say("\n".join(f"{verb} {pod}" for verb, pods in changed.items() for pod in pods))
    else:
        say("the campaign is finished" if run.ledger.finished else f"{arguments.pods} pods are queued or running")
    return 0


def _scale_servers(run: Any, arguments: argparse.Namespace) -> int:
    going = run.scale_servers(arguments.servers, arguments.policy)
    if arguments.json:
        print_json({"run": str(run.path), "servers": arguments.servers, "added": going})
    else:
        say("\n".join(f"released {element}" for element in going) or "no server is held that this number needs")
    return 0


def _say(*of: Any) -> None:
    """What planning, or the last start of jobs, left to be known."""
    for each in of:
        for line in each.notices:
            note(line)
        each.notices.clear()


def _cancel(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run

    run = Run(arguments.run_dir)
    done = run.cancel()
    if arguments.json:
        print_json({"run": str(run.path), "before": done.before, "cancelled": done.jobs, "pods": done.pods})
        return 0
    said = [f"cancelled {' '.join(done.jobs)}"] * bool(done.jobs) + [f"pod {pod} here drains" for pod in done.pods]
    say("\n".join(said) or "nothing was queued or running")
    if done.before == "finished":
        note(f"{run.path} is finished: every rollout is stored, and nothing is left to cancel")
    else:
        note(f"continue with: megaflow-hpc resume {run.path}")
    return 0


def _gather(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run

    run = Run(arguments.run_dir)
    if arguments.wait:
        run.slurm_jobs.until_pods_left()
    # First: gathering may take long, and nobody asks the engines any more.
    ended = run.slurm_jobs.end_servers(arguments.end_servers) if arguments.end_servers else []
    path = run.gather(arguments.rebuild)
    if arguments.json:
        print_json({"trajectories": str(path), "servers_ended": ended})
    else:
        say(path)
    return 0
