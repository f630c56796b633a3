"""From a campaign file to a run directory: tasks read, images resolved, rollouts cut into blocks.

Everything a pod needs stands in ``run.json`` and the file of tasks, so that a run means the same after the campaign
file was edited.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import yaml

from megaflow_hpc.agents import code
from megaflow_hpc.campaign import edits, provenance
from megaflow_hpc.campaign.job_environment import environment_script
from megaflow_hpc.campaign.planning.draft import (
    Draft,
    PlanWatch,
    Silent,
    group_servers,
    read,
    try_sandboxes,
    whole_groups,
)
from megaflow_hpc.campaign.planning.model_paths import Where
from megaflow_hpc.config import CampaignConfig, Policy
from megaflow_hpc.config.site_profile import Profile
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import make_directory, write_atomic
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.ledger import Ledger, OpenLease, write_blocks
from megaflow_hpc.ledger.tasks import PlannedTask, write_tasks
from megaflow_hpc.resources import resource
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, ServerGroup, ServerRecord, write_run
from megaflow_hpc.tasks.digests import fixed
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.types import Rollout, Task
from megaflow_hpc.version import __version__

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.reading.durations import Durations


@dataclass(frozen=True)
class Plan:
    """A campaign, resolved. Writing it makes a run directory."""

    config: CampaignConfig
    policies: dict[str, Policy]
    tasks: list[Task]
    rollouts: list[Rollout]
    images: dict[str, str]
    """Image name in the tasks → SIF file or directory."""
    servers: list[ServerRecord]
    """One entry per engine array element, by index: its policy and its model."""
    source: str
    """The campaign as the user wrote it."""
    held_out: tuple[str, ...] = ()
    """Ids of the tasks that a campaign which trains is evaluated on."""
    durations: Durations | None = None
    """The durations that earlier campaigns tell of; ``None``: the campaign names none."""
    own_code: tuple[str, ...] = ()
    """Files and directories beside the campaign file that its agents are made of."""
    beside: str = ""
    """The campaign file's directory, where it has agents of its own."""

    @property
    def server_groups(self) -> list[ServerGroup]:
        """Neighbouring servers of one shape: one Slurm array each."""
        return group_servers(self.servers)


def make(
    config: CampaignConfig,
    base: Path,
    where: Where,
    source: str = "",
    only: Sequence[str] = (),
    build: bool = True,
    watch: PlanWatch | None = None,
    site: Callable[[Draft], None] | None = None,
) -> Plan:
    """Reads the tasks and resolves everything else. Reports mistakes in the file before it asks the site.

    Args:
        base: directory that relative paths are relative to.
        only: rollout or task ids (shell patterns); empty takes all.
        build: build the images that the store lacks; without it they are only looked up.
        watch: gets each step, each image that is built, and the progress.
        site: checks that the site lets the campaign run; called after the file was checked.

    Raises:
        Mistakes: names file, line, value and remedy of each.
    """
    draft = read(config, base, where, only, watch)
    draft.check()
    if site is not None:
        (watch or Silent()).step("asking Slurm")
        site(draft)
    return complete(draft, source, build, watch)


def complete(draft: Draft, source: str = "", build: bool = True, watch: PlanWatch | None = None) -> Plan:
    """Builds the images of a draft without mistakes. The arguments are those of :func:`make`."""
    from megaflow_hpc.tasks.images import in_image_directories

    config, tasks, images, mapping, watch = draft.config, draft.tasks, draft.images, draft.mapping, watch or Silent()
    try_sandboxes(draft, watch)
    if images is None or mapping is None:  # an engine pool has no tasks
        return Plan(config, draft.policies, [], [], {}, draft.servers, source)
    watch.step(f"looking up images of {len(tasks)} tasks")
    images.say, images.show = watch.say, watch.show
    files = images.resolve_all(draft.requests, mapping, build=build)
    watch.step(f"looking up work directories of {len(tasks)} tasks")
    tasks = in_image_directories(tasks, files, images, mapping)
    return Plan(
        config,
        draft.policies,
        tasks,
        draft.rollouts,
        files,
        draft.servers,
        source,
        draft.held_out,
        draft.durations,
        draft.own_code,
        str(draft.base) if draft.own_code else "",
    )


# --- writing --------------------------------------------------------------------------------------------------------


def write(
    plan: Plan, run: RunDir, mpi: str = "pmi2", watch: PlanWatch | None = None, profile: Profile | None = None
) -> list[Path]:
    """Makes the run directory; ``run.json`` comes last, so a run directory is whole or not one.

    What cannot be finished is removed again, with the directories above it that were made for it.

    Returns:
        The directories that were not there before: RUN and those above it.
    """
    check_new(run)
    (watch or Silent()).step(f"taking digests of the files of {len(plan.tasks)} tasks")
    plan = replace(plan, tasks=fixed(plan.tasks))
    missing = [path for path in (run.path, *run.path.parents) if not path.exists()]
    (watch or Silent()).step(f"writing {run} with {len(plan.rollouts)} rollouts")
    try:
        run.create(plan.config.share)
        _fill(plan, run, mpi, profile)
    except BaseException:
        if missing:
            discard(run, missing)
        raise
    return missing


def check_new(run: RunDir) -> None:
    """Raises :class:`ConfigError` if the run directory was planned before, or if another user could replace it."""
    if run.run_json.exists():
        raise ConfigError(f"{run}: is a run directory already; continue it with: megaflow-hpc resume {run}")
    run.check_place()


def discard(run: RunDir, made: Sequence[Path] = ()) -> None:
    """Removes a run directory of which nothing was started, and those of ``made`` above it that are empty."""
    remove_tree(run.path, ignore_errors=True)
    for path in made:
        if path != run.path:
            with suppress(OSError):
                path.rmdir()


def _fill(plan: Plan, run: RunDir, mpi: str, profile: Profile | None) -> None:
    ledger = Ledger(run)
    ledger.create()
    learning = plan.config.training.policies if plan.config.training else {}
    if plan.config.training:
        prepare_training(plan.config.training, run)
    # Their trainers ask for these, round by round.
    planned = [rollout for rollout in plan.rollouts if rollout.policy not in learning]
    source = plan.source or yaml.safe_dump(plan.config.model_dump(mode="json"), sort_keys=False)
    write_atomic(run.campaign_yaml, source)
    write_atomic(run.env_sh, environment_script(plan.config, mpi))
    code.keep(plan.own_code, Path(plan.beside), run.code)
    provenance.keep_tokenizers(run, plan.policies)
    earlier = plan.durations
    expected_s = earlier.expected_s if earlier and plan.config.scheduling.order == "longest" else None
    write_blocks(run, planned, plan.config.slurm.pods.total, expected_s=expected_s, whole=whole_groups(plan.config))
    write_scripts(run)
    if plan.config.pool is not None:
        EnginePool(run.path).create(Counter(server.policy for server in plan.servers), plan.config.pool.share)
    pools = {name: EnginePool(p.model.pool) for name, p in plan.policies.items() if p.model and p.model.pool}
    theirs = {name: pool.policy(name) for name, pool in pools.items()}
    for name, pool in pools.items():
        pool.enrol(run, name, theirs[name])
    write_run(
        run,
        RunRecord(
            version=__version__,
            python=sys.version.split()[0],
            versions=provenance.versions(plan.policies),
            planned_at=time.time(),
            site=profile.record() if profile else {},
            campaign=plan.config.model_dump(mode="json"),
            source=edits.digest(source),
            beside=plan.beside,
            policies={
                name: msgspec.convert(policy.model_dump(mode="json"), PolicyRecord)
                for name, policy in plan.policies.items()
            },
            packed=write_tasks(run, _planned_tasks(plan)) if plan.tasks else None,
            held_out=list(plan.held_out),
            servers=plan.servers,
            server_groups=plan.server_groups,
            pools={name: pool.about()[theirs[name]] for name, pool in pools.items()},
            total=len(planned),
            learned=[list(row) for row in earlier.learned(plan.rollouts)] if earlier else [],
        ),
    )


def _planned_tasks(plan: Plan) -> Iterator[PlannedTask]:
    alike = Counter(task.image for task in plan.tasks)
    for task in plan.tasks:
        wanted = {task.image, *(request.name for request in format_of(task).images(task))}
        images = {name: plan.images[name] for name in sorted(wanted) if name in plan.images}
        yield PlannedTask(task.to_dict(), images, alike[task.image])


def write_scripts(run: RunDir) -> None:
    """Copies the scripts that a person submits by hand: ``RUN/sbatch``, wherever the package is installed."""
    make_directory(run.sbatch)
    for script in sorted(resource("sbatch").glob("*.sbatch")):
        write_atomic(run.sbatch / script.name, script.read_text(encoding="utf-8"))


def prepare_training(training: TrainingConfig, run: RunDir) -> None:
    """Makes what a trainer finds: its policy's directory and open lease, and this package alone for its interpreter."""
    make_directory(run.training)
    for policy in training.policies:
        make_directory(run.training / policy)
        OpenLease(run, policy).put()
    make_directory(run.training / ".package")
    (run.training / ".package" / "megaflow_hpc").symlink_to(Path(__file__).parents[1])
