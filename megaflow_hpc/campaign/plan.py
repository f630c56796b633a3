"""From a campaign file to a run directory: tasks read, images resolved, rollouts cut into blocks.

Everything a pod needs stands in ``run.json``, so that a run means the same after the campaign file was edited.
"""

from __future__ import annotations

import fnmatch
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import yaml

from megaflow_hpc.agents import code
from megaflow_hpc.campaign import provenance
from megaflow_hpc.campaign.agents import check_agents
from megaflow_hpc.campaign.job_environment import environment_script
from megaflow_hpc.campaign.model_paths import Where, absolute, absolute_training
from megaflow_hpc.config import CampaignConfig, Policy
from megaflow_hpc.config.engine_pool import EnginePoolConfig
from megaflow_hpc.config.quotas import settle, site_caps
from megaflow_hpc.config.sections import TaskSource
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import make_directory, write_atomic
from megaflow_hpc.ledger import Ledger, OpenLease, write_blocks
from megaflow_hpc.resources import docs
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, ServerGroup, ServerRecord, write_run
from megaflow_hpc.types import Rollout, Task
from megaflow_hpc.version import __version__

if TYPE_CHECKING:
    from megaflow_hpc.environments.images.making import Watch
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
        groups: list[ServerGroup] = []
        for index, server in enumerate(self.servers):
            shape = (server.model["gpus"], server.held, server.model["nodes"])
            last = groups[-1] if groups else None
            if last and (last.gpus, last.held, last.nodes) == shape:
                last.count += 1
            else:
                groups.append(ServerGroup(index, 1, *shape))
        return groups


def make(
    config: CampaignConfig,
    base: Path,
    where: Where,
    source: str = "",
    only: Sequence[str] = (),
    build: bool = True,
    watch: Watch | None = None,
) -> Plan:
    """Reads the tasks and resolves everything else.

    Args:
        base: directory that relative paths are relative to.
        only: rollout or task ids (shell patterns); empty takes all.
        build: build images that are not there yet, or have jobs build them; without it they are only checked.
        watch: is told which are made, and how far that is.

    Raises:
        ConfigError: names file, line, value and remedy.
    """
    from megaflow_hpc.campaign.image_jobs import build_by_jobs
    from megaflow_hpc.environments.builds.builder import Builder
    from megaflow_hpc.environments.images.registries import Registries
    from megaflow_hpc.environments.images.resolve import ImageMapping, Images
    from megaflow_hpc.environments.images.store import ImageStore
    from megaflow_hpc.environments.sandbox.probe import require
    from megaflow_hpc.environments.sandbox.provider import default_scratch
    from megaflow_hpc.tasks.harbor.verifier import check_fresh
    from megaflow_hpc.tasks.images import image_requests, in_image_directories, with_unbuilt
    from megaflow_hpc.tasks.loading import load_tasks

    if config.is_pool:
        named = bool(config.models)
        pools = {name: absolute(policy, base, where, name, named) for name, policy in config.policies().items()}
        config = config.model_copy(update={"pool": config.pool or EnginePoolConfig()})
        return Plan(config, pools, [], [], {}, list_servers(pools), source)
    environment = config.environment
    registries = Registries.configured(environment.mirrors, environment.air_gapped or None)
    images = Images(ImageStore(), registries, Builder(environment.network_of_builds))
    if watch is not None:
        images.watch(watch)

    def load(sources: Iterable[TaskSource], key: str) -> list[Task]:
        try:
            return load_tasks([source_.model_dump() for source_ in sources], base, images.dockerfiles)
        except ConfigError as error:
            if str(error).startswith("/"):  # a task's own file, which names itself
                raise
            raise ConfigError(f"{where(key)}: {error}") from None

    tasks, held_out = load(config.tasks, "tasks"), []
    if config.training and config.training.evaluate:
        held_out = load(config.training.evaluate.tasks, "training.evaluate.tasks")
        if both := {task.id for task in held_out} & {task.id for task in tasks}:
            raise ConfigError(
                f"{where('training.evaluate.tasks')}: {', '.join(sorted(both)[:3])}: also among tasks; what is trained "
                "on tells nothing when it is evaluated on (tasks: [{path: …, exclude: […]}])"
            )
    policies = {
        name: absolute(policy, base, where, name, bool(config.models)) for name, policy in config.policies().items()
    }
    if config.training:
        config = config.model_copy(update={"training": absolute_training(config.training, base, where)})
        samples = config.training.batch.samples if config.training else None
        for name in config.training.policies if config.training and samples else ():
            policies[name] = policies[name].model_copy(update={"samples": samples})
    own_code = check_agents(policies, config.environment.network, base, where)
    check_supported(config, where)
    check_together(config, where)
    config = within_caps(config, len(list_servers(policies)), where)
    rollouts = [rollout for rollout in expand(tasks, policies, config.scheduling.spare) if wanted(rollout, only)]
    if not rollouts:
        shown = f"--only {' '.join(only)}" if only else "the policies' include patterns"
        raise ConfigError(f"{where('tasks')}: no rollout is left by {shown}; ids look like <task>/<policy>/<sample>")
    used = {rollout.task_id for rollout in rollouts}
    tasks = [task for task in tasks if task.id in used] + held_out
    require((environment.network_of(task) for task in tasks), default_scratch())
    mapping = ImageMapping(environment.images, base, where("environment.images"))
    requests, by_jobs = image_requests(tasks), build and environment.build == "slurm"
    if by_jobs:
        tasks = with_unbuilt(tasks, build_by_jobs(config, images, requests, mapping))
    files = images.resolve_all(requests, mapping, build=build and not by_jobs)
    tasks = in_image_directories(tasks, files, images, mapping)
    if environment.verification == "fresh":
        for task in tasks:
            check_fresh(task)
    durations = learned(config, base, where)
    aside = tuple(task.id for task in held_out)
    servers, beside = list_servers(policies), str(base) if own_code else ""
    return Plan(config, policies, tasks, rollouts, files, servers, source, aside, durations, own_code, beside)


def learned(config: CampaignConfig, base: Path, where: Where) -> Durations | None:
    """What earlier campaigns tell of durations."""
    from megaflow_hpc.trajectories.reading.durations import Durations

    earlier = config.scheduling.learn_from
    if not earlier:
        return None
    try:
        return Durations(base / os.path.expanduser(os.path.expandvars(path)) for path in earlier)
    except ConfigError as error:
        raise ConfigError(f"{where('scheduling.learn_from')}: {error}") from None


def expand(tasks: Sequence[Task], policies: dict[str, Policy], spare: int = 0) -> list[Rollout]:
    """Every rollout, the samples of a group side by side, ``spare`` ones last."""
    return [
        Rollout(task.id, name, sample, policy.agent.name)
        for task in tasks
        for name, policy in policies.items()
        if not policy.include or any(fnmatch.fnmatchcase(task.id, pattern) for pattern in policy.include)
        for sample in range(policy.samples + spare if policy.samples else 0)
    ]


def wanted(rollout: Rollout, only: Sequence[str]) -> bool:
    """Whether ``--only`` lets it pass: a pattern matches its id, its group or its task."""
    names = (rollout.id, rollout.group_id, rollout.task_id)
    return not only or any(fnmatch.fnmatchcase(name, pattern) for pattern in only for name in names)


def list_servers(policies: dict[str, Policy]) -> list[ServerRecord]:
    """The engine array: ``servers.max`` elements a policy, those with equal GPUs and nodes side by side."""
    servers = [
        ServerRecord(name, model.model_dump(mode="json", exclude={"agent", "also"}), held=number >= least)
        for name, policy in policies.items()
        if policy.model and not policy.model.pool
        for model in policy.model.kinds()
        for least in (model.servers.min,)
        for number in range(model.servers.max)
    ]
    return sorted(servers, key=_shape)


def _shape(server: ServerRecord) -> tuple[int, int, bool]:
    return -server.model["nodes"], -server.model["gpus"], server.held


def within_caps(config: CampaignConfig, servers: int, where: Where) -> CampaignConfig:
    """With the quotas that hold: its own, and its site's caps where it states none."""
    caps, source = site_caps()
    try:
        quotas = settle(config.quotas, config.slurm.pods, servers, caps, source)
    except ConfigError as error:
        raise ConfigError(f"{where('quotas')}: {error}") from None
    return config.model_copy(update={"quotas": quotas})


def check_supported(config: CampaignConfig, where: Where) -> None:
    """Refuses what the campaign file may say and nothing honours yet, rather than to ignore it."""
    if config.scheduling.retry_every is not None and config.scheduling.signal_after is None:
        place = where("scheduling.retry_every")
        raise ConfigError(f"{place}: scheduling.retry_every needs signal_after; say after how many equal rewards")
    if config.training and config.slurm.trainer.share == "sleep":
        raise ConfigError(
            f"{where('slurm.trainer.share')}: slurm.trainer.share: sleep is not there yet "
            f"({docs('limits.md')}); leave it out, and give trainer and engines GPUs of their own"
        )


def check_together(config: CampaignConfig, where: Where) -> None:
    """One heterogeneous job holds one pod, and engines to be together with."""
    if not config.slurm.together:
        return
    if config.slurm.pods.total != 1:
        raise ConfigError(
            f"{where('slurm.together')}: slurm.together: {config.slurm.pods.total} pods, expected one; give it more "
            "nodes (slurm.pods.nodes), or leave together out"
        )
    if any(kind.nodes > 1 for policy in config.policies().values() if policy.model for kind in policy.model.kinds()):
        raise ConfigError(
            f"{where('slurm.together')}: slurm.together: its engines have one node each; leave model.nodes out"
        )
    if not any(policy.model for policy in config.policies().values()):
        raise ConfigError(f"{where('slurm.together')}: slurm.together: there is no model to be together with")


# --- writing --------------------------------------------------------------------------------------------------------


def write(plan: Plan, run: RunDir, mpi: str = "pmi2") -> None:
    """Makes the run directory; ``run.json`` comes last, so a run directory is whole or not one."""
    if run.run_json.exists():
        raise ConfigError(f"{run}: is a run directory already; continue it with: megaflow-hpc resume {run}")
    run.create(plan.config.share)
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
    write_blocks(run, planned, plan.config.slurm.pods.total, expected_s=expected_s)
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
            campaign=plan.config.model_dump(mode="json"),
            beside=plan.beside,
            policies={
                name: msgspec.convert(policy.model_dump(mode="json"), PolicyRecord)
                for name, policy in plan.policies.items()
            },
            tasks={task.id: task.to_dict() for task in plan.tasks},
            held_out=list(plan.held_out),
            images=plan.images,
            servers=plan.servers,
            server_groups=plan.server_groups,
            pools={name: pool.about()[theirs[name]] for name, pool in pools.items()},
            total=len(planned),
            learned=[list(row) for row in earlier.learned(plan.rollouts)] if earlier else [],
        ),
    )


def prepare_training(training: TrainingConfig, run: RunDir) -> None:
    """Makes what a trainer finds: its policy's directory and open lease, and this package alone for its interpreter."""
    make_directory(run.training)
    for policy in training.policies:
        make_directory(run.training / policy)
        OpenLease(run, policy).put()
    make_directory(run.training / ".package")
    (run.training / ".package" / "megaflow_hpc").symlink_to(Path(__file__).parents[1])
