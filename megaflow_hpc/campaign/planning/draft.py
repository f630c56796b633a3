"""Reads a campaign file with its tasks and collects all mistakes before querying the site."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megaflow_hpc.agents.registry import WITHOUT_MODEL
from megaflow_hpc.campaign.planning.gpus import check_gpu_types, check_memory, check_sharing, sleeping
from megaflow_hpc.campaign.planning.model_paths import Where, absolute, absolute_training, check_models
from megaflow_hpc.campaign.planning.own_code import check_agents, check_methods
from megaflow_hpc.config import CampaignConfig, Policy
from megaflow_hpc.config.quotas import settle, site_caps
from megaflow_hpc.config.sections import TaskSource, scaffold
from megaflow_hpc.config.slurm import LIFTED
from megaflow_hpc.errors import ConfigError, Mistakes, SiteError
from megaflow_hpc.ledger.blocks import RolloutGroups
from megaflow_hpc.rundir.endpoints import SERVICE
from megaflow_hpc.rundir.record import ServerGroup, ServerRecord
from megaflow_hpc.training.methods import Digests
from megaflow_hpc.types import Rollout, Task

if TYPE_CHECKING:
    from megaflow_hpc.environments.images.build_progress import BuildProgress
    from megaflow_hpc.environments.images.resolve import Images
    from megaflow_hpc.environments.images.sources import ImageMapping, ImageRequest

MAX_ROLLOUTS = 10**7
"""Default maximum number of rollouts of a campaign. A larger number is assumed to be a typo."""


class PlanWatch(Protocol):
    """Interface for progress reports during planning."""

    def step(self, text: str) -> None:
        """Reports the next step, such as ``reading tasks``."""

    def say(self, line: str) -> None:
        """Reports a line of output from an image build or download."""

    def show(self, state: BuildProgress) -> None:
        """Reports the progress of image builds. Called several times per second."""


class Silent:
    """A :class:`PlanWatch` that ignores all reports."""

    def step(self, text: str) -> None: ...

    def say(self, line: str) -> None: ...

    def show(self, state: BuildProgress) -> None: ...


SILENT = Silent()


@dataclass
class Draft:
    """A campaign as read from its file. Nothing is built or written yet, and the site has not been queried."""

    config: CampaignConfig
    base: Path
    """Directory against which relative paths are resolved."""
    policies: dict[str, Policy] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    """Tasks with rollouts, followed by held-out tasks."""
    held_out: tuple[str, ...] = ()
    """Ids of tasks that are used only for evaluation during training."""
    rollouts: RolloutGroups = field(default_factory=RolloutGroups)
    own_code: tuple[str, ...] = ()
    """Files and directories in ``base`` that contain the campaign's own agents and functions."""
    digests: Digests = field(default_factory=dict)
    """Digests of the source files that define the functions in ``training``."""
    images: Images | None = None
    mapping: ImageMapping | None = None
    requests: list[ImageRequest] = field(default_factory=list)
    image_files: dict[str, str] = field(default_factory=dict)
    """SIF file or directory of each image that the tasks name, by image name. Empty until images are resolved."""
    source: str = ""
    """Text of the campaign file."""
    file: str = ""
    """Path of the campaign file. Empty if the campaign has none."""
    only: list[str] = field(default_factory=list)
    """Patterns that select the rollouts. Empty selects all."""
    left_out: list[str] = field(default_factory=list)
    """Errors of the tasks that cannot be read or tested."""
    mistakes: list[str] = field(default_factory=list)
    """Mistakes in the campaign file, each with its location."""
    warnings: list[str] = field(default_factory=list)
    """Findings that do not prevent planning."""
    refusal: SiteError | None = None
    """Reason why images are unavailable on this machine. Reported after the mistakes."""

    @property
    def servers(self) -> list[ServerRecord]:
        """Policy and model of each element of the engine array, by index. Services of the campaign come last."""
        servers = list_servers(self.policies, sleeping(self.config))
        return [*servers, *list_services(self.config, self.tasks, self.image_files)]

    @property
    def server_groups(self) -> list[ServerGroup]:
        """Consecutive servers with the same resources. Each group is one Slurm array."""
        servers = self.servers
        engines = group_servers([server for server in servers if server.service is None])
        return [*engines, *group_services(servers)]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Collects the mistakes that the body of a ``with`` statement raises."""
        try:
            yield
        except Mistakes as error:
            self.mistakes += error.found
        except ConfigError as error:
            self.mistakes.append(str(error))

    def check(self) -> None:
        """Raises :class:`Mistakes` if any were collected."""
        if self.mistakes:
            raise Mistakes(self.mistakes)


def read(
    config: CampaignConfig,
    base: Path,
    where: Where,
    only: Sequence[str] = (),
    watch: PlanWatch = SILENT,
    most: int = MAX_ROLLOUTS,
) -> Draft:
    """Reads the tasks of a campaign and collects mistakes, which :meth:`Draft.check` raises.

    Args:
        base: Directory against which relative paths are resolved.
        only: Rollout or task ids (shell patterns). Empty selects all.
        most: Maximum number of rollouts of the whole campaign.
    """
    draft = Draft(config, base, only=[*only])
    watch.step("looking at models and agents")
    for name, policy in config.policies().items():
        with draft.noting():
            draft.policies[name] = absolute(policy, base, where, name, bool(config.models))
    if config.training:
        with draft.noting():
            draft.config = config.model_copy(update={"training": absolute_training(config.training, base, where)})
        with draft.noting():
            draft.warnings += check_memory(draft.config, base, where)
    unloadable = check_models(draft.policies, draft.config, where)
    if config.slurm.check:
        draft.mistakes += unloadable
    else:
        draft.warnings += [line + LIFTED for line in unloadable]
    if config.is_pool:
        draft.config = config.model_copy(update={"pool": config.pool or {}})
        return draft
    with draft.noting():
        draft.own_code = check_agents(draft.policies, config.environment.network, base, where)
    if config.training:
        with draft.noting():
            tried = check_methods(config.training, draft.config.team, base, where)
            draft.own_code = tuple(dict.fromkeys([*draft.own_code, *tried.code]))
            draft.digests = tried.digests
            draft.warnings += tried.warnings
    for check in (check_together, check_sharing, check_gpu_types):
        with draft.noting():
            check(config, where)
    with draft.noting():
        draft.config = within_caps(draft.config, len(draft.servers), where)
    _open_images(draft, base, where)
    _read_tasks(draft, base, where, only, watch, most)
    return draft


def _open_images(draft: Draft, base: Path, where: Where) -> None:
    from megaflow_hpc.environments.builds.builder import Builder
    from megaflow_hpc.environments.images.resolve import Images
    from megaflow_hpc.environments.images.sources import ImageMapping, Registries
    from megaflow_hpc.environments.images.store import ImageStore

    environment = draft.config.environment
    try:
        with draft.noting():
            registries = Registries(environment.mirrors, environment.air_gapped)
            store = ImageStore(named=environment.image_store)
            draft.images = Images(store, registries, Builder(environment.network_of_builds))
    except SiteError as error:
        draft.refusal = error
    draft.mapping = ImageMapping(environment.images, base, where("environment.images"))


def _read_tasks(draft: Draft, base: Path, where: Where, only: Sequence[str], watch: PlanWatch, most: int) -> None:
    """Reads the tasks. Determines the rollouts and the required images."""
    from megaflow_hpc.tasks.formats import format_of
    from megaflow_hpc.tasks.harbor.verifier import check_fresh
    from megaflow_hpc.tasks.loading import at_key, image_requests, load_tasks, summarise

    config, before = draft.config, len(draft.mistakes)
    dockerfiles = draft.images.dockerfiles if draft.images else None

    def load(sources: Iterable[TaskSource], key: str) -> list[Task]:
        try:
            dumped = [source.model_dump() for source in sources]
            return load_tasks(dumped, base, dockerfiles, config.services, draft.left_out)
        except ConfigError as error:
            raise at_key(where(key), error) from None

    tasks: list[Task] = []
    held_out: list[Task] = []
    watch.step("reading tasks")
    with draft.noting():
        tasks = load(config.tasks, "tasks")
    if config.training and config.training.evaluate:
        with draft.noting():
            held_out = load(config.training.evaluate.tasks, "training.evaluate.tasks")
        if both := {task.id for task in held_out} & {task.id for task in tasks}:
            draft.mistakes.append(
                f"{where('training.evaluate.tasks')}: {', '.join(sorted(both)[:3])}: also among tasks, so the "
                "evaluation would not be held out (exclude them: tasks: [{path: …, exclude: […]}])"
            )
    if draft.left_out:
        say = f"{len(draft.left_out)} tasks cannot be read or tested and are left out (strict: true refuses them)"
        draft.warnings += [f"{where('tasks')}: {say}", *summarise(draft.left_out)]
    watch.step(f"listing the rollouts of {len(tasks)} tasks")
    evaluated = config.training.evaluate.samples if config.training and config.training.evaluate else 0
    try:
        draft.rollouts = only_wanted(expand(tasks, draft.policies, config.scheduling.spare, most), only)
        check_count(len(held_out) * evaluated, most)
    except ConfigError as error:
        draft.mistakes.append(f"{where('samples')}: {error}")
    if not draft.rollouts and len(draft.mistakes) == before and len(draft.policies) == len(config.policies()):
        nothing = f"no rollout matches --only {' '.join(only)}; ids look like <task>/<policy>/<sample>"
        draft.mistakes.append(f"{where('tasks')}: {nothing if only else 'no policy runs tasks; raise samples of one'}")
    used = {rollout.task_id for rollout in draft.rollouts.firsts()}
    draft.tasks = [task for task in tasks if task.id in used] + held_out
    draft.held_out = tuple(task.id for task in held_out)
    teamed = [task.id for task in draft.tasks if task.metadata.get("python", {}).get("teamed")]
    if teamed and not config.team:
        draft.mistakes.append(
            f"{where('tasks')}: the score of {len(teamed)} tasks takes the roles of a team ({teamed[0]}); add a "
            "section team, or give the parameter roles a default"
        )
    asking = [task.id for task in draft.tasks if format_of(task).asks_judge(task)]
    if asking and not config.judges():
        draft.mistakes.append(
            f"{where('tasks')}: the verification of {len(asking)} tasks asks a judge ({asking[0]}); name a model with "
            "judge: true in models"
        )
    conversing = [task.id for task in draft.tasks if not task.image]
    if conversing:
        theirs = [policy for policy in draft.policies.values() if policy.samples]
        for name in dict.fromkeys(agent.name for policy in theirs for agent in policy.agents):
            if ":" not in name and name not in WITHOUT_MODEL:
                draft.mistakes.append(
                    f"{where('agent')}: agent {name!r} works in a sandbox, and {len(conversing)} tasks have none "
                    f"({conversing[0]}: image: none); use an agent of your own, module:Class"
                )
    if config.environment.verification == "fresh":
        for task in filter(lambda task: task.image, draft.tasks):
            with draft.noting():
                check_fresh(task)
    watch.step(f"looking at the images of {len(draft.tasks)} tasks")
    with draft.noting():
        draft.requests = image_requests(draft.tasks)
        if draft.images and draft.mapping:
            draft.mistakes += draft.images.unmapped(draft.requests, draft.mapping)


def try_sandboxes(draft: Draft, watch: PlanWatch, slurm: bool) -> None:
    """Raises :class:`SiteError` if images, or sandboxes with the required networks, are unavailable on this machine.

    Args:
        slurm: True if the sandboxes will run in Slurm jobs, whose ``slurm.setup`` may provide Apptainer.
    """
    from megaflow_hpc.environments.sandbox.probe import require
    from megaflow_hpc.environments.sandbox.scratch import default_scratch

    if draft.refusal is not None:
        raise draft.refusal
    networks = {draft.config.environment.network_of(task) for task in draft.tasks if task.image}
    if networks:
        watch.step("trying a sandbox")
        require(networks, default_scratch(), provided=slurm and bool(draft.config.slurm.setup))


def expand(
    tasks: Sequence[Task], policies: dict[str, Policy], spare: int = 0, most: int = MAX_ROLLOUTS
) -> RolloutGroups:
    """Returns all rollouts. The samples of a group are consecutive, with spares last.

    Raises:
        ConfigError: There are more than ``most`` rollouts. The number is computed without listing them.
    """
    groups = [
        (Rollout(task.id, name, 0, agent.title, scaffold=scaffold(agent, policy.agents)), policy.samples + spare)
        for task in tasks
        for name, policy in policies.items()
        for agent in policy.agents
        if policy.samples
    ]
    check_count(sum(samples for _, samples in groups), most)
    return RolloutGroups((first, range(samples)) for first, samples in groups)


def check_count(rollouts: int, most: int) -> None:
    """Checks that there are at most ``most`` rollouts.

    Raises:
        ConfigError: There are more rollouts.
    """
    if rollouts > most:
        raise ConfigError(
            f"{rollouts:,} rollouts (tasks x policies x samples), expected at most {most:,}; lower samples, or allow "
            "more with --max-rollouts N"
        )


def only_wanted(rollouts: RolloutGroups, only: Sequence[str]) -> RolloutGroups:
    """Returns the rollouts that match any ``--only`` pattern. Without patterns, returns all."""
    if not only:
        return rollouts
    groups: dict[str, tuple[Rollout, list[int]]] = {}
    for rollout in rollouts:
        if wanted(rollout, only):
            groups.setdefault(rollout.group_id, (rollout, []))[1].append(rollout.sample_index)
    return RolloutGroups(groups.values())


def wanted(rollout: Rollout, only: Sequence[str]) -> bool:
    """Returns whether any ``--only`` pattern matches the rollout's id, group or task."""
    names = (rollout.id, rollout.group_id, rollout.task_id)
    return not only or any(fnmatch.fnmatchcase(name, pattern) for pattern in only for name in names)


def whole_groups(config: CampaignConfig) -> bool:
    """Returns whether all samples of a group must run in the same pod, because scheduling rules compare their
    rewards."""
    scheduling = config.scheduling
    return bool(scheduling.spare or scheduling.signal_after)


def list_servers(policies: dict[str, Policy], sleeping: Mapping[str, int] | None = None) -> list[ServerRecord]:
    """Returns the elements of the engine array, sorted by resources. Each policy gets its maximum number of servers.

    Args:
        sleeping: Sleep level of each policy whose server runs in the trainer's job. These servers come last.
    """
    servers = []
    for name, policy in policies.items():
        if policy.model is None or policy.model.pool:
            continue
        for model in policy.model.kinds():
            for number in range(model.servers.max):
                section = model.model_dump(mode="json", exclude={"agent", "also"})
                servers.append(ServerRecord(name, section, held=number >= model.servers.min))
    for server in servers:
        if level := (sleeping or {}).get(server.policy):
            server.model["sleep_level"], server.held = level, False
    return sorted(servers, key=_shape)


def group_servers(servers: Sequence[ServerRecord]) -> list[ServerGroup]:
    """Groups consecutive servers with the same resources into Slurm arrays. Excludes servers that run in trainers'
    jobs."""
    groups: list[ServerGroup] = []
    for index, server in enumerate(servers):
        if server.model.get("sleep_level"):
            continue
        shape = (server.model["gpus"], server.held, server.model["nodes"], server.model["gpu_type"] or "")
        last = groups[-1] if groups else None
        if last and (last.gpus, last.held, last.nodes, last.gpu_type) == shape:
            last.count += 1
        else:
            groups.append(ServerGroup(index, 1, *shape))
    return groups


def list_services(config: CampaignConfig, tasks: Sequence[Task], image_files: Mapping[str, str]) -> list[ServerRecord]:
    """Returns the services that serve the whole campaign, as elements of the engine array.

    Args:
        tasks: The tasks. Every task lists all services of the campaign. Once images are resolved, it also has the
            programs of their images.
        image_files: File of each image, by name. Empty until images are resolved.
    """
    records = []
    default = config.environment.limits
    known = {service.name: service for service in tasks[0].services} if tasks else {}
    for name, section in config.services.items():
        if section.per != "campaign":
            continue
        service = known.get(name, section.service(name))
        limits = {
            "memory_mb": service.limits.memory_mb or default.memory_mb,
            "cpus": service.limits.cpus or default.cpus,
            "disk_mb": service.limits.disk_mb or default.disk_mb,
            "processes": section.limits.processes or default.processes or 512,
            "nested": config.environment.nested,
        }
        fields = {**asdict(service), "image_file": image_files.get(service.image, ""), "sandbox": limits}
        model = {"gpus": 0, "nodes": 1, "gpu_type": None, "servers": [1, 1]}
        records.append(ServerRecord(SERVICE + name, model, service=fields))
    return records


def group_services(servers: Sequence[ServerRecord]) -> list[ServerGroup]:
    """Returns a group for each service. Each service runs in a separate job."""
    return [
        ServerGroup(
            index,
            1,
            0,
            service_cpus=max(1, math.ceil(server.service["sandbox"]["cpus"] or 1)),
            service_mb=server.service["sandbox"]["memory_mb"],
        )
        for index, server in enumerate(servers)
        if server.service is not None
    ]


def _shape(server: ServerRecord) -> tuple[bool, int, int, str, bool]:
    model = server.model
    return "sleep_level" in model, -model["nodes"], -model["gpus"], model["gpu_type"] or "", server.held


def within_caps(config: CampaignConfig, servers: int, where: Where) -> CampaignConfig:
    """Returns the campaign with its effective quotas. The site's caps replace missing quotas.

    Quotas of an engine pool apply to each user, so they do not change.
    """
    caps, source = site_caps()
    try:
        quotas = settle(config.quotas, config.slurm.pods, servers, caps, source)
    except ConfigError as error:
        raise ConfigError(f"{where('quotas')}: {error}") from None
    return config if config.is_pool else config.model_copy(update={"quotas": quotas})


def check_together(config: CampaignConfig, where: Where) -> None:
    """Checks that a campaign with ``slurm.together`` has exactly one pod and at least one engine."""
    if not config.slurm.together:
        return
    if config.slurm.pods.total != 1:
        raise ConfigError(
            f"{where('slurm.together')}: slurm.together: {config.slurm.pods.total} pods, expected one; give it more "
            "nodes (slurm.pods.nodes), or leave together out"
        )
    models = [policy.model for policy in config.policies().values() if policy.model]
    if any(kind.nodes > 1 for model in models for kind in model.kinds()):
        raise ConfigError(
            f"{where('slurm.together')}: slurm.together: its engines have one node each; leave model.nodes out"
        )
    if not models:
        raise ConfigError(f"{where('slurm.together')}: slurm.together: the campaign has no model; leave together out")
