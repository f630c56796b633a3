"""Adds tasks and samples to a run that was planned before (``megaflow-hpc extend``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.campaign import plan
from megaflow_hpc.campaign.edits import EXTENDABLE, differing_keys, digest
from megaflow_hpc.campaign.facade import Campaign
from megaflow_hpc.campaign.planning.draft import SILENT, Draft, PlanWatch, whole_groups
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.ledger import read_blocks, write_blocks
from megaflow_hpc.ledger.tasks import append_tasks, planned_tasks
from megaflow_hpc.rundir.record import check_version, read_run, write_run
from megaflow_hpc.tasks.digests import fixed


@dataclass(frozen=True)
class Extension:
    """Tasks and rollouts that :func:`extend` added."""

    tasks: list[str]
    rollouts: int


def extend(run: Run, file: str | Path | None = None, watch: PlanWatch = SILENT) -> Extension:
    """Adds the tasks and samples of an edited campaign file that the run lacks. :meth:`Run.resume` then runs them.

    Removes nothing, even if the file now has fewer tasks or samples. A run that was planned with ``only`` gets only
    rollouts that match it. A killed call can be repeated safely.

    Args:
        file: The edited campaign file. Default: the file from which the run was planned.

    Raises:
        ConfigError: Other keys differ too, the run trains a policy or is an engine pool, or its pods are running.
        SiteError: Slurm does not report which pods exist.
    """
    run.dir.check_ours(to_run=True)
    check_version(run.record, run.dir)
    record = run.record
    if run.config.training or run.config.is_pool:
        raise ConfigError(f"{run.path}: a campaign that trains or serves cannot be extended; plan a new run")
    file = Path(file or record.file)
    if not file.name:
        raise ConfigError(
            f"{run.path}: was planned without a campaign file; name one: megaflow-hpc extend RUN CAMPAIGN"
        )
    campaign = Campaign.from_yaml(file)
    edited = differing_keys(run.edits.planned_text(), campaign.text)
    if keys := [key for key in edited if key not in EXTENDABLE]:
        raise ConfigError(
            f"{campaign.where(keys[0])}: {keys[0]}: not as it was planned for {run.path}; extend adds tasks and "
            "samples only: undo the edit, or plan a new run"
        )
    run.check_stopped()
    draft = plan.make(campaign.config, campaign.base, campaign.where, campaign.text, record.only, watch)
    draft.tasks = fixed(draft.tasks)
    draft.file = str(file.absolute())
    if "environment.images" in edited:
        _check_images(run, draft, campaign.where("environment.images"))
    with run.slurm_jobs.arrays.alone():
        if read_run(run.dir) != record:
            raise ConfigError(f"{run.path}: another process changes this run; nothing was added: repeat the command")
        run.check_stopped()
        return _add(run, draft, campaign.text)


def _add(run: Run, draft: Draft, text: str) -> Extension:
    """Adds the missing tasks and rollouts. If the call is killed, a repeated call adds the rest."""
    record = run.record
    known = set(planned_tasks(run.dir, record))
    new = [planned for planned in plan.planned_tasks(draft) if planned.task["id"] not in known]
    if new:
        assert record.packed is not None
        record.packed = append_tasks(run.dir, record.packed, new)
        record.sandboxes = record.sandboxes or any(planned.task.get("image") for planned in new)
        write_run(run.dir, record)
    there = {rollout.id for block in read_blocks(run.dir) for rollout in block.rollouts}
    rollouts = [rollout for rollout in draft.rollouts if rollout.id not in there]
    if rollouts:
        write_blocks(run.dir, rollouts, run.config.slurm.pods.total, whole=whole_groups(run.config))
    planned = draft.config.model_dump(mode="json")
    record.campaign |= {key: planned[key] for key in ("tasks", "samples")}
    record.campaign["environment"] = {**record.campaign["environment"], "images": planned["environment"]["images"]}
    for name, policy in record.policies.items():
        policy.samples = draft.policies[name].samples
    record.total = len({*there, *(rollout.id for rollout in rollouts)}) - sum(
        run.ledger.rollouts_added(added) for added in run.ledger.added()
    )
    record.left_out = len(draft.left_out)
    record.source, record.file = digest(text), draft.file
    write_run(run.dir, record)
    write_atomic(run.dir.campaign_yaml, text)
    return Extension([planned.task["id"] for planned in new], len(rollouts))


def _check_images(run: Run, draft: Draft, where: str) -> None:
    """Checks that no image of a planned task was edited, because its rollouts keep the planned image."""
    known = planned_tasks(run.dir, run.record)
    for planned in plan.planned_tasks(draft):
        before = known[planned.task["id"]].images if planned.task["id"] in known else {}
        for name in before.keys() & planned.images.keys():
            if before[name] != planned.images[name]:
                raise ConfigError(
                    f"{where}: environment.images: {planned.task['id']} was planned with {before[name]} for {name!r}, "
                    f"not {planned.images[name]}; undo the edit, or plan a new run"
                )
