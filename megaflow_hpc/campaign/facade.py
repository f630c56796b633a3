"""Entry point of the Python API: :class:`Campaign` plans and submits, and returns a
:class:`~megaflow_hpc.campaign.run.Run`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from megaflow_hpc import config as config_module
from megaflow_hpc.campaign import job_requests
from megaflow_hpc.campaign import plan as plan_module
from megaflow_hpc.campaign.local import Launcher, resolve_launcher
from megaflow_hpc.campaign.planning.draft import (
    MAX_ROLLOUTS,
    SILENT,
    Draft,
    PlanWatch,
    read,
    try_sandboxes,
    within_caps,
)
from megaflow_hpc.campaign.planning.estimate import Estimate, durations_of, estimate, spending
from megaflow_hpc.campaign.planning.preflight import check_packages, warnings
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.config.campaign import Loaded
from megaflow_hpc.config.slurm import CPUS_PER_RANK, LIFTED
from megaflow_hpc.errors import ConfigError, MegaflowError, Mistakes, SiteError
from megaflow_hpc.rundir.layout import RunDir, new_run_name
from megaflow_hpc.slurm import fits, script, site

__all__ = ["Campaign", "Run"]


class Campaign:
    """A validated campaign file that has not been planned yet.

    >>> campaign = Campaign.from_yaml("campaign.yaml")                                   # doctest: +SKIP
    >>> campaign = Campaign(name="fix-bugs", tasks="tasks/*", agent="oracle", samples=4)  # doctest: +SKIP
    >>> run = campaign.submit(launcher="local")                                          # doctest: +SKIP

    Args:
        fields: The campaign file's keys as Python values.

    Raises:
        ConfigError: A value is invalid.
    """

    def __init__(self, **fields: Any) -> None:
        self._begin(config_module.parsed(fields), Path.cwd())

    def _begin(self, loaded: Loaded, base: Path, file: str | None = None, text: str = "") -> None:
        self.config, self._node, self._profile = loaded.config, loaded.node, loaded.profile
        self.base, self.file, self.text = base, file, text
        self._made: list[Path] = []
        self.max_rollouts = MAX_ROLLOUTS
        """Maximum number of rollouts to plan."""
        self.notices: list[str] = []
        """Warnings for the user from planning."""

    @classmethod
    def from_yaml(cls, path: str | Path) -> Campaign:
        """Reads a campaign file.

        Raises:
            ConfigError: A value is invalid.
        """
        campaign = cls.__new__(cls)
        loaded = config_module.read(path)
        campaign._begin(loaded, Path(path).absolute().parent, str(path), Path(path).read_text(encoding="utf-8"))
        return campaign

    def __repr__(self) -> str:
        return f"<Campaign {self.config.name!r} from {self.file or 'Python'}>"

    def where(self, key: str) -> str:
        """Returns ``file:line`` of a dotted key, for error messages."""
        if self.file is None:
            return f"campaign {self.config.name}"
        return config_module.place_of(self._node, [_part(part) for part in key.split(".")], self.file)

    def _run_dir(self, run_dir: str | Path | None) -> RunDir:
        if run_dir is not None:
            return RunDir(run_dir)
        return RunDir(self.runs / new_run_name(self.config.name))

    @property
    def runs(self) -> Path:
        """Directory in which the campaign's runs are created.

        Raises:
            ConfigError: ``run_dir`` names a variable that is not set.
        """
        path = os.path.expanduser(os.path.expandvars(self.config.run_dir))
        if "$" in path:
            raise ConfigError(f"{self.where('run_dir')}: run_dir {path!r}: a variable that is not set; export it first")
        return self.base / path

    def plan(
        self,
        run_dir: str | Path | None = None,
        only: Sequence[str] = (),
        launcher: Launcher = "auto",
        watch: PlanWatch = SILENT,
    ) -> Run:
        """Creates the run directory without submitting anything.

        Args:
            run_dir: Directory to create. Default: a new one in the campaign's ``run_dir``.
            only: Ids or shell patterns of tasks or rollouts. Default: all.
            launcher: ``slurm``, ``local`` (this machine), or ``auto`` (Slurm if available).
            watch: Receives progress reports.

        Raises:
            ConfigError: The campaign, a task or an image is invalid, or the directory exists.
            SiteError: The site lacks something that pods need.
        """
        slurm, run = resolve_launcher(launcher, self.config.slurm) == "slurm", self._run_dir(run_dir)
        plan_module.check_new(run)
        config = self.config if slurm else _filled_here(self.config)

        def check(draft: Draft) -> None:
            for one in self._preflight(draft, slurm, watch, packages=slurm):
                one()

        made = plan_module.make(
            config,
            self.base,
            self.where,
            self.text,
            only,
            watch=watch,
            site=check,
            most=self.max_rollouts,
        )
        made.file = os.path.abspath(self.file) if self.file else ""
        self.notices += made.warnings
        mpi = site.mpi_attempts() if slurm else "pmi2 pmix"
        window_s = job_requests.drain_window_s(made.config) if slurm else 0
        self._made = plan_module.write(made, run, mpi, watch, self._profile, window_s)
        return Run(run)

    def _check_site(self, draft: Draft) -> None:
        """Checks that Slurm has the requested resources and would start the jobs. Resolves ``ranks_per_node: fill``."""
        filled = job_requests.with_ranks(draft.config, self.where)
        if filled is not draft.config:  # the caps on model calls depend on the number of ranks
            draft.config = within_caps(filled, len(draft.servers), self.where)
        groups = draft.server_groups
        self.notices += job_requests.check(draft.config, groups, self.where)
        walltimes_s = {
            key: fits.walltime_s(job.options)
            for key, job in job_requests.each_job(draft.config, RunDir("/RUN"), groups)
            if job.role == "pods"
        }
        self.notices += job_requests.requeue_warnings(draft.config, groups, self.where)
        self.notices += warnings(draft, self.where, walltimes_s)

    def _preflight(
        self, draft: Draft, slurm: bool, watch: PlanWatch, packages: bool = True
    ) -> Iterator[Callable[[], object]]:
        """Yields checks of everything that pods require from this site. Used by ``check``, ``plan`` and ``run``.

        Args:
            packages: Also check the packages that pods import. Without Slurm, ``run`` checks them only when it starts a
                pod, so that planning works with the core install.
        """
        if slurm:
            watch.step("asking Slurm")
            yield lambda: self._check_site(draft)
            yield site.mpi_attempts
        if packages:
            watch.step("trying Python and MPI")
            yield lambda: self._run_check(draft, lambda: check_packages(draft.config, slurm))
        yield lambda: self._run_check(draft, lambda: try_sandboxes(draft, watch, slurm))

    def _run_check(self, draft: Draft, check: Callable[[], None]) -> None:
        """Runs a check. With ``slurm.check: false``, turns its error into a warning, because compute nodes may
        differ from this one."""
        try:
            check()
        except SiteError as error:
            if draft.config.slurm.check or error is draft.refusal:
                raise
            self.notices.append(str(error) + LIFTED)

    def site_mistakes(self, draft: Draft, watch: PlanWatch) -> list[str]:
        """Checks this site. Returns a message for each missing resource, and for each job that Slurm would refuse."""
        mistakes: list[str] = []
        for check in chain([self._run_dir(None).check_new], self._preflight(draft, site.has_slurm(), watch)):
            try:
                check()
            except Mistakes as error:
                mistakes += error.found
            except MegaflowError as error:
                mistakes.append(str(error))
        return mistakes

    def submit(
        self,
        launcher: Launcher = "slurm",
        run_dir: str | Path | None = None,
        only: Sequence[str] = (),
        ranks: int = 1,
        watch: PlanWatch = SILENT,
    ) -> Run:
        """Plans the campaign and submits it, or starts it on this machine if ``launcher="local"``.

        Args:
            launcher: ``slurm`` or ``local``.
            run_dir, only, watch: As in :meth:`plan`.
            ranks: MPI ranks of a local pod. 1 means without MPI.

        Raises:
            ConfigError: As :meth:`plan`.
            SiteError: The site lacks something, or Slurm refused a job.
        """
        run = self.plan(run_dir, only, launcher, watch)
        self.start(run, launcher, ranks)
        return run

    def start(self, run: Run, launcher: Launcher = "slurm", ranks: int = 1) -> None:
        """Starts a freshly planned run. Deletes the run directory if Slurm accepts none of its jobs.

        Raises:
            SiteError: Slurm refused a job. The error quotes Slurm's message.
        """
        try:
            run.start(launcher, ranks)
        except SiteError:
            if not run.job_ids():
                plan_module.discard(run.dir, self._made)
            raise

    def estimate(
        self,
        launcher: Launcher = "slurm",
        run_dir: str | Path | None = None,
        only: Sequence[str] = (),
        ranks: int = 1,
        rollout_seconds: float | None = None,
        like: str | Path | None = None,
        watch: PlanWatch = SILENT,
    ) -> tuple[list[script.Job], Estimate]:
        """Returns the jobs that :meth:`submit` would submit, and their estimated cost. Submits and writes nothing.

        Args:
            rollout_seconds: Assumed duration of each rollout.
            like: Earlier run from which to take durations.
        """
        slurm = resolve_launcher(launcher, self.config.slurm) == "slurm"
        self._run_dir(run_dir).check_new()
        earlier = None if like is None else Path(like)
        draft = read(self.config, self.base, self.where, only, watch, self.max_rollouts)
        draft.check()
        durations = durations_of(draft, rollout_seconds, earlier)
        run, jobs, site_lines = self._run_dir(run_dir), list[script.Job](), list[str]()
        for one in self._preflight(draft, slurm, watch):
            one()
        if slurm:
            jobs = job_requests.preview(draft.config, run, draft.server_groups, len(draft.rollouts))
            site_lines = job_requests.limit_effects(draft.config, jobs)
        plan_module.complete(draft, build=False, watch=watch)
        return jobs, estimate(draft, run.path, jobs, durations, site_lines, 0 if slurm else ranks, earlier)


@dataclass
class Findings:
    """Result of :func:`check`: problems, each with a location and a remedy."""

    file: list[str] = field(default_factory=list)
    """Problems in the file, its tasks and its models."""
    site: list[str] = field(default_factory=list)
    """Missing resources at this site, and jobs that Slurm would refuse."""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Explanations of the limits that apply to the campaign."""
    left_out: list[str] = field(default_factory=list)
    """Errors of the tasks that the campaign leaves out."""
    tasks: int = 0
    rollouts: int = 0


def check(
    path: str | Path, site_too: bool = True, watch: PlanWatch = SILENT, max_rollouts: int = MAX_ROLLOUTS
) -> Findings:
    """Finds all problems in a campaign file and at this site. Changes nothing.

    Args:
        site_too: Also query Slurm, if available, and start a sandbox.
        max_rollouts: Maximum number of rollouts.

    Raises:
        ConfigError: The file does not exist.
    """
    findings = Findings()
    try:
        campaign = Campaign.from_yaml(path)
    except ConfigError as error:
        if not Path(path).is_file():
            raise
        findings.file = error.found if isinstance(error, Mistakes) else [str(error)]
        return findings
    draft = read(campaign.config, campaign.base, campaign.where, (), watch, max_rollouts)
    findings.file, findings.tasks, findings.rollouts = draft.mistakes, len(draft.tasks), len(draft.rollouts)
    if site_too:
        try:
            resolve_launcher("auto", campaign.config.slurm)
        except SiteError as error:
            campaign.notices.append(f"checked without Slurm: {error}")
        findings.site = campaign.site_mistakes(draft, watch)
    findings.left_out = draft.left_out
    findings.warnings = [*draft.warnings, *campaign.notices]
    findings.notes = spending(draft)
    return findings


def _filled_here(config: CampaignConfig) -> CampaignConfig:
    """Replaces ``ranks_per_node: fill`` with the number of ranks for a pod on this machine."""
    pods = config.slurm.pods
    if pods.ranks_per_node != "fill":
        return config
    return config.with_ranks(max(1, len(os.sched_getaffinity(0)) // (pods.cpus_per_rank or CPUS_PER_RANK)))


def _part(part: str) -> str | int:
    return int(part) if part.isdecimal() else part
