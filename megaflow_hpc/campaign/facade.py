"""The facade: :class:`Campaign` plans and submits; what becomes of it is a :class:`~megaflow_hpc.campaign.run.Run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megaflow_hpc import config as config_module
from megaflow_hpc.campaign import demand
from megaflow_hpc.campaign import plan as plan_module
from megaflow_hpc.campaign.run import Launcher, Run, resolve_launcher
from megaflow_hpc.rundir.layout import RunDir, new_run_name
from megaflow_hpc.slurm import script, site

if TYPE_CHECKING:
    from megaflow_hpc.environments.images.making import Watch

__all__ = ["Campaign", "Run"]


class Campaign:
    """A validated campaign file, not yet a run.

    Args:
        fields: the campaign file's keys as Python values.

    Raises:
        ConfigError: names the key, the value and the remedy.
    """

    def __init__(self, **fields: Any) -> None:
        self.config = config_module.parse(fields)
        self.base = Path.cwd()
        self.file: str | None = None
        self._node: yaml.Node | None = None
        self._text = ""

    @classmethod
    def from_yaml(cls, path: str | Path) -> Campaign:
        """Returns the campaign that a campaign file describes.

        Raises:
            ConfigError: names file, line, value and remedy.
        """
        campaign = cls.__new__(cls)
        campaign.config = config_module.load(path)
        campaign.base = Path(path).absolute().parent
        campaign.file = str(path)
        campaign._text = Path(path).read_text(encoding="utf-8")
        campaign._node = config_module.read_yaml(path)[1]
        return campaign

    def where(self, key: str) -> str:
        """``file:line`` of a dotted key, for messages."""
        if self.file is None:
            return f"campaign {self.config.name}"
        return f"{self.file}:{config_module.line_of(self._node, key.split('.')) or 1}"

    def _run_dir(self, run_dir: str | Path | None) -> RunDir:
        if run_dir is not None:
            return RunDir(run_dir)
        return RunDir(self.base / self.config.run_dir / new_run_name(self.config.name))

    def plan(
        self,
        run_dir: str | Path | None = None,
        only: Sequence[str] = (),
        launcher: Launcher = "auto",
        watch: Watch | None = None,
    ) -> Run:
        """Makes the run directory; queues nothing.

        Args:
            watch: is told which images are made, and how far that is.
        """
        slurm = resolve_launcher(launcher) == "slurm"
        if slurm:
            site.check_site(self.config, self.where)
        made = plan_module.make(self.config, self.base, self.where, self._text, only, watch=watch)
        if slurm:
            demand.check_resources(self.config, made.server_groups, self.where)
        run = self._run_dir(run_dir)
        plan_module.write(made, run, site.mpi_plugin() if slurm else "pmi2")
        return Run(run)

    def submit(
        self,
        launcher: Launcher = "slurm",
        run_dir: str | Path | None = None,
        only: Sequence[str] = (),
        ranks: int = 1,
        watch: Watch | None = None,
    ) -> Run:
        """Plans and queues (or starts, ``launcher="local"``)."""
        run = self.plan(run_dir, only, launcher, watch)
        run.start(launcher, ranks)
        return run

    def dry_run(self, run_dir: str | Path | None = None, only: Sequence[str] = ()) -> list[script.Job]:
        """The jobs that :meth:`submit` would queue; touches nothing."""
        site.check_site(self.config, self.where)
        made = plan_module.make(self.config, self.base, self.where, self._text, only, build=False)
        demand.check_resources(self.config, made.server_groups, self.where)
        run = self._run_dir(run_dir)
        return demand.preview(self.config, run, made.server_groups)
