"""Verbs that set up and start campaigns: ``recipes``, ``init``, ``check``, ``plan``, ``run`` and ``submit``."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megaflow_hpc.cli.campaigns.following import add_launcher, say_notices, start_and_follow
from megaflow_hpc.cli.output import note, print_json, print_result, say, seconds, table
from megaflow_hpc.cli.progress import PlanProgress
from megaflow_hpc.cli.verb import Subparsers, above_zero, add_verb, run_path, whole
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.resources import docs

if TYPE_CHECKING:
    from megaflow_hpc.campaign.facade import Campaign
    from megaflow_hpc.campaign.planning.estimate import Estimate

MAX_LINES = 100
"""Maximum number of errors that ``check`` prints without ``--json``."""


def register(subparsers: Subparsers) -> None:
    """Registers the verbs ``recipes``, ``init``, ``check``, ``plan``, ``run`` and ``submit``."""
    recipes = add_verb(
        subparsers,
        "recipes",
        _recipes,
        "list complete campaigns to start from, or show one",
        examples=["recipes", "recipes reasoning", "init --recipe reasoning"],
        description="A recipe is a complete campaign with its tasks, its agent, a rehearsal and figures to compare "
        f"with. megaflow-hpc init --recipe NAME writes its files. {docs('how-to/recipes.md')} compares all.",
    )
    recipes.add_argument("name", metavar="NAME", nargs="?", help="show this recipe; default: list all")

    init = add_verb(
        subparsers,
        "init",
        _init,
        "write a campaign file for this site",
        examples=["init", "init experiments/first.yaml", "init --force", "init --recipe reasoning first"],
        description="Writes a commented campaign file with this site's partitions, accounts and walltimes, the tasks "
        "next to it, and a model if one is available. Asks no questions. Unknown values are comments. With --recipe it "
        "writes all files of a recipe, for this site.",
    )
    init.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="file or directory; default: campaign.yaml, or with --recipe a directory NAME",
    )
    init.add_argument("--recipe", metavar="NAME", help="write the files of this recipe; megaflow-hpc recipes lists all")
    init.add_argument("--force", action="store_true", help="replace existing files")

    check = add_verb(
        subparsers,
        "check",
        _check,
        "find errors in a campaign file",
        examples=["check campaign.yaml", "check campaign.yaml --no-site --json"],
        description="Reports every error of a campaign file, its tasks and models, with line and remedy. Then checks "
        "the campaign against this site: partitions, walltimes, limits and sandboxes. Creates, fetches and submits "
        "nothing.",
    )
    check.add_argument("campaign", metavar="CAMPAIGN", help="campaign file (YAML)")
    check.add_argument("--no-site", action="store_true", help="check only the file, without Slurm and Apptainer")
    _add_max_rollouts(check)

    plan = add_verb(
        subparsers,
        "plan",
        _plan,
        "create the run directory and submit nothing",
        examples=["plan campaign.yaml", "plan campaign.yaml --only 'fix-*/default/0' --run-dir runs/trial"],
        description="Checks the campaign, creates the run directory and prints it. On stderr it prints the commands "
        "that submit the run by hand.",
    )
    _add_campaign(plan)

    run = add_verb(
        subparsers,
        "run",
        _run,
        "submit, follow, gather and print the summary",
        examples=["run campaign.yaml", "run campaign.yaml --launcher local --ranks 4"],
        description="Plans the campaign, submits it, shows its progress, and prints the summary at its end. Ctrl-C "
        "cancels the jobs and keeps stored results; megaflow-hpc resume continues from there.",
    )
    _add_campaign(run)
    add_launcher(run)
    _add_dry_run(run)

    submit = add_verb(
        subparsers,
        "submit",
        _submit,
        "submit the campaign and return",
        examples=["submit campaign.yaml --dry-run", "submit campaign.yaml"],
        description="Plans the campaign, submits its jobs and prints the run directory and the jobs. Follow the run "
        "with megaflow-hpc watch RUN.",
    )
    _add_campaign(submit)
    _add_dry_run(submit)


def _add_campaign(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("campaign", metavar="CAMPAIGN", help="campaign file (YAML)")
    parser.add_argument(
        "--run-dir", metavar="RUN", help="run directory; default: a new one under the campaign's run_dir"
    )
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        default=[],
        metavar="ID",
        help="plan only these tasks, groups or rollouts (shell patterns)",
    )
    _add_max_rollouts(parser)


def _add_max_rollouts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-rollouts",
        type=whole(1),
        default=10**7,
        metavar="N",
        help="refuse a campaign with more rollouts than N (10,000,000)",
    )


def _recipes(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.recipes import find_recipe, recipe_names

    recipes = [find_recipe(name) for name in ([arguments.name] if arguments.name else recipe_names())]
    if arguments.json:
        print_json([recipe.to_builtins() for recipe in recipes])
        return 0
    if not arguments.name:
        rows = [(recipe.name, recipe.title, recipe.needs.image, recipe.needs.gpu) for recipe in recipes]
        say(table(("recipe", "what it is", "image", "GPU"), rows))
        say("One of them: megaflow-hpc recipes NAME; its files: megaflow-hpc init --recipe NAME")
        return 0
    [recipe] = recipes
    say(f"{recipe.title}\n{recipe.summary}")
    say(f"  image     {recipe.needs.image}\n  GPU       {recipe.needs.gpu}")
    missing = recipe.missing
    for package in recipe.needs.packages:
        lacks = ", not installed" if package in missing else ""
        say(f"  package   {package.name} {package.version} ({package.licence}{lacks})")
    for expected in recipe.expected:
        say(f"  expected  {expected.figure}\n            {expected.source}")
    for measured in recipe.measured:
        say(f"  measured  {measured.figure}\n            {measured.on}; {measured.took}; {measured.date}")
    if not recipe.measured:
        say("  measured  nothing yet")
    say(f"  files     {', '.join(recipe.files)}")
    say("Next:")
    for command in (f"megaflow-hpc init --recipe {recipe.name} && cd {recipe.name}", *recipe.commands):
        say(f"  {command}")
    return 0


def _init(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.planning.starter import Starter
    from megaflow_hpc.host.atomic import write_atomic

    if arguments.recipe is not None:
        return _init_recipe(arguments)
    path = Path(arguments.path or "campaign.yaml")
    path = path / "campaign.yaml" if path.is_dir() else path
    if path.exists() and not arguments.force:
        raise ConfigError(f"{path}: exists already; name another file, or replace it with --force")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no directory {path.parent}; create it, or name another file")
    with PlanProgress() as watch:
        watch.step("examining this site")
        starter = Starter.of(path.parent)
    write_atomic(path, starter.text())
    for line in starter.notices:
        note(line)
    found = {"campaign": str(path), "slurm": starter.slurm, "tasks": starter.tasks, "model": starter.model}
    print_result(arguments.json, found, path, f"next: {'; then '.join(starter.next_steps(path))}")
    return 0


def _init_recipe(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.planning.starter import Starter
    from megaflow_hpc.host.atomic import write_atomic
    from megaflow_hpc.recipes import find_recipe

    recipe = find_recipe(arguments.recipe)
    directory = Path(arguments.path or recipe.name)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory}: is a file; --recipe needs a directory, which it creates if it is missing")
    for path in (directory / file for file in recipe.files):
        if os.path.lexists(path) and not arguments.force:
            raise ConfigError(f"{path}: exists already; name another directory, or replace its files with --force")
        if path.is_dir():
            raise ConfigError(f"{path}: is a directory; the recipe has a file of this name; name another directory")
        for parent in (directory / above for above in path.relative_to(directory).parents):
            if os.path.lexists(parent) and not parent.is_dir():
                raise ConfigError(f"{parent}: is a file; the recipe has a directory of this name; name another one")
    with PlanProgress() as watch:
        watch.step("examining this site")
        starter = Starter.of(directory)
    for file, source in recipe.files.items():
        content = source.read_bytes()
        if source.suffix == ".yaml":
            content = starter.adapted(content.decode()).encode()
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / file, content)
    for line in dict.fromkeys(starter.notices):
        note(line)
    written = {"directory": str(directory), "files": list(recipe.files), "commands": recipe.commands}
    first, *others = recipe.commands
    steps = [f"next: cd {shlex.quote(str(directory))} && {first}", *(f"then: {each}" for each in others)]
    print_result(arguments.json, {**written, "slurm": starter.slurm}, directory, "\n".join(steps))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import check

    with PlanProgress() as watch:
        result = check(arguments.campaign, not arguments.no_site, watch, arguments.max_rollouts)
    if arguments.json:
        found = asdict(result)
        print_json({"ok": not (result.file or result.site), "mistakes": found.pop("file"), **found})
    else:
        wrong = [*result.file, *result.site]
        for line in wrong[:MAX_LINES]:
            note(line)
        if len(wrong) > MAX_LINES:
            note(f"… and {len(wrong) - MAX_LINES} more; --json prints them all")
        for line in result.warnings:
            note(f"warning: {line}")
        for line in result.notes:
            note(line)
        if not result.file and any(not line.startswith(arguments.campaign) for line in result.site):
            note("the file itself has no errors; --no-site checks it alone, and run --launcher local needs no Slurm")
        if not result.file and not result.site:
            less = f"; {_count(len(result.left_out), 'task')} left out" if result.left_out else ""
            counts = f"{_count(result.tasks, 'task')}, {_count(result.rollouts, 'rollout')}{less}"
            say(f"{arguments.campaign}: ok: {counts}")
    if result.file:
        return ConfigError.exit_status
    return SiteError.exit_status if result.site else 0


def _read_campaign(arguments: argparse.Namespace) -> Campaign:
    from megaflow_hpc.campaign.facade import Campaign

    campaign = Campaign.from_yaml(arguments.campaign)
    campaign.max_rollouts = arguments.max_rollouts
    return campaign


def _plan(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.job_requests import by_hand
    from megaflow_hpc.slurm import site

    campaign = _read_campaign(arguments)
    slurm = site.has_slurm()
    with PlanProgress(arguments.campaign) as watch:
        run = campaign.plan(arguments.run_dir, arguments.only, "slurm" if slurm else "local", watch)
    say_notices(campaign)
    commands = [f"megaflow-hpc resume {run.path} --launcher local"]
    if slurm:
        commands = by_hand(run.config, run.dir, run.record.server_groups)
    print_result(arguments.json, {"run": str(run.path), "commands": commands}, run.path, "\n".join(commands))
    return 0


def _run(arguments: argparse.Namespace) -> int:
    campaign = _read_campaign(arguments)
    if arguments.dry_run:
        return _dry_run(campaign, arguments)
    with PlanProgress(arguments.campaign) as watch:
        run = campaign.plan(arguments.run_dir, arguments.only, arguments.launcher, watch)
    note(f"run directory: {run.path}")
    say_notices(campaign)

    def start() -> bool:
        campaign.start(run, arguments.launcher, arguments.ranks)
        note(f"jobs: {' '.join(run.job_ids()) or 'local'}")
        say_notices(run.slurm_jobs)
        return True

    return start_and_follow(run, arguments, start)


def _submit(arguments: argparse.Namespace) -> int:
    campaign = _read_campaign(arguments)
    if arguments.dry_run:
        return _dry_run(campaign, arguments)
    with PlanProgress(arguments.campaign) as watch:
        run = campaign.submit("slurm", arguments.run_dir, arguments.only, watch=watch)
    say_notices(campaign, run.slurm_jobs)
    jobs = run.job_ids()
    lines = "\n".join([str(run.path), *jobs])
    hint = f"follow with: megaflow-hpc status {run.path}"
    print_result(arguments.json, {"run": str(run.path), "jobs": jobs}, lines, hint)
    return 0


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Adds ``--dry-run`` and the options for assumed rollout durations."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print every script and an estimate of time, hours, nodes and disk space; change nothing",
    )
    parser.add_argument(
        "--like", metavar="RUN", type=run_path, help="with --dry-run: rollouts take as long as in this run"
    )
    parser.add_argument(
        "--rollout-seconds", metavar="N", type=above_zero, help="with --dry-run: every rollout takes N seconds"
    )


def _dry_run(campaign: Campaign, arguments: argparse.Namespace) -> int:
    """Prints the job scripts and the estimate. Returns the exit status."""
    from megaflow_hpc.slurm import script

    with PlanProgress() as watch:
        jobs, estimate = campaign.estimate(
            getattr(arguments, "launcher", "slurm"),  # submit has no --launcher: it always uses Slurm
            arguments.run_dir,
            arguments.only,
            getattr(arguments, "ranks", 1),
            arguments.rollout_seconds,
            arguments.like,
            watch,
        )
    texts = {f"{job.role}-{number}": script.script(job) for number, job in enumerate(jobs)}
    if arguments.json:
        print_json({"scripts": texts, "estimate": asdict(estimate), "warnings": campaign.notices})
        return 0
    say("\n".join(texts.values()), end="")
    for line in [*_lines(estimate), *campaign.notices]:
        note(line)
    return 0


def _lines(estimate: Estimate) -> list[str]:
    """Formats the estimate as text."""
    wait = "" if estimate.jobs and estimate.jobs[0].role == "local" else " and the wait in the queue"
    blocks = f" in {_count(estimate.blocks, 'block')}" if estimate.blocks else ""
    pods, slots, nodes = estimate.pods, estimate.slots, estimate.nodes
    lines = [
        f"{_count(estimate.rollouts, 'rollout')} of {_count(estimate.tasks, 'task')}{blocks}",
        f"{_count(pods, 'pod')} with {_count(slots, 'slot')} at once, {_count(nodes, 'node')} in all",
        f"time: {seconds(estimate.time_s)}{wait} ({estimate.basis})",
    ]
    for name, hours in (("core-hours", estimate.core_hours), ("GPU-hours", estimate.gpu_hours)):
        if hours.expected or hours.by_walltime:
            most = "no walltime bounds it"
            if hours.by_walltime is not None:
                most = f"at most {hours.by_walltime:,.1f} by walltime, more if jobs are requeued"
            lines.append(f"{name}: {hours.expected:,.1f} expected, {most}")
    for job in estimate.jobs:
        end = "no known end" if job.walltime_s is None else seconds(job.walltime_s)
        throttled = f", {job.at_once} at once" if job.at_once < job.elements else ""
        gpus = f", {_count(job.gpus, 'GPU')}" if job.gpus else ""
        on_demand = ", started on demand" if job.held else ""
        each = f"{_count(job.nodes, 'node')}, {_count(job.cores, 'core')}{gpus}, {end}{on_demand}"
        lines.append(f"{job.role}: {job.elements}{throttled}, each {each}")
    if estimate.images.get("images"):
        lines.append(f"images: {estimate.images['images']}, {estimate.images['to_make'] or 'none'} missing")
    for storage in estimate.storage:
        wants = f"about {storage.bytes / 1e9:.2g} GB and {storage.inodes} files, " if storage.bytes else ""
        files = "" if storage.free_inodes is None else f" and {storage.free_inodes:,.0f} files"
        lacks = "" if storage.fits else "NOT ENOUGH: "
        free = f"{storage.free_bytes / 1e9:,.0f} GB{files} free ({storage.by})"
        lines.append(f"{storage.what}: {lacks}{wants}{free} at {storage.path}")
    return [*lines, *estimate.site]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
