"""Writes a first campaign file for this directory and site (``megaflow-hpc init``).

Fills in detected values: tasks in the directory, a model in the Hugging Face cache, an engine, a site profile, and
Slurm partitions, accounts and walltimes. All other keys are commented out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.campaign.planning.model_paths import cached_models, why_no_engine
from megaflow_hpc.config import site_profile
from megaflow_hpc.config.sections import NAME
from megaflow_hpc.config.site_profile import Profile
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.resources import docs, install, is_installed
from megaflow_hpc.slurm import fits, site
from megaflow_hpc.slurm.site import Partition
from megaflow_hpc.tasks.harbor.format import BASE

WALLTIME_S = 4 * 3600
"""Walltime of jobs in seconds, if the partition allows it."""
RANKS = 4
REQUEST = re.compile(
    r"(?P<head>  (?P<role>\w+): \{)partition: (?P<kind>cpu|gpu)(?P<rest>, .*?)(?:, time: (?P<time>\d+:\d\d:\d\d))?\}"
)
"""Matches a line of a recipe's campaign file that requests jobs in the partition ``cpu`` or ``gpu``."""


@dataclass
class Starter:
    """Values detected in a directory and at this site."""

    name: str
    tasks: str = ""
    """Source of tasks in the directory. Empty if no tasks were detected."""
    model: str = ""
    base: str = BASE
    """Source from which the image ``base`` is built."""
    engine: bool = False
    agent: bool = False
    """True if mini-swe-agent is installed."""
    profiles: list[Profile] = field(default_factory=list)
    """Profiles for this site: the user's first, then the group's."""
    recognised: str = ""
    """Rule of the first profile that matches this machine. Empty if the profile has no rule."""
    slurm: bool = False
    silent: bool = False
    """True if Slurm's programs are installed here but no controller answers."""
    accounts: list[str] = field(default_factory=list)
    """Slurm accounts, with the default account first."""
    partitions: list[Partition] = field(default_factory=list)
    whole_nodes: set[str] = field(default_factory=set)
    """Partitions that allocate whole nodes."""
    notices: list[str] = field(default_factory=list)
    """Explanations for the user why values could not be detected."""

    @classmethod
    def of(cls, directory: Path) -> Starter:
        """Detects values in a directory and at this site."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.resolve().name).strip("-._")
        starter = cls(name if NAME.match(name) else "campaign")
        starter.tasks = _tasks_in(directory)
        if (directory / "images" / "base.sif").exists():
            starter.base = "images/base.sif"
        starter.model = next(iter(cached_models()), "")
        starter.engine = not why_no_engine({"engine": "vllm"})
        starter.agent = is_installed("minisweagent")
        if site.has_slurm():
            try:
                starter.partitions = [partition for partition in site.partitions(hidden=False).values() if partition.up]
                starter.whole_nodes = site.whole_nodes()
                starter.slurm = True
            except SiteError as error:
                starter.silent = True
                starter.notices.append(f"{error}; written without partitions and accounts")
        if starter.slurm:
            starter.accounts = site.accounts()
        starter._find_profiles()
        return starter

    def _find_profiles(self) -> None:
        """Finds the profiles whose rule matches this machine, and those without a rule."""
        try:
            cluster = site.cluster_name() if self.slurm else ""
        except SiteError:
            cluster = ""
        matches: list[str] = []
        for name in site_profile.names():
            try:
                profile = site_profile.find(name, "init")
            except ConfigError as error:
                self.notices.append(str(error))
                continue
            match = profile.recognise.match(cluster) if profile.recognise else ""
            if match or not (profile.recognise or profile.shipped):
                self.profiles.append(profile)
                matches.append(match)
        self.recognised = matches[0] if matches else ""

    def next_steps(self, path: Path) -> list[str]:
        """Returns the commands with which the user continues.

        Args:
            path: The campaign file.
        """
        new = [] if self.tasks else ["megaflow-hpc tasks new NAME"]
        local = " --launcher local" if self.silent else ""
        return [*new, f"megaflow-hpc check {path}", f"megaflow-hpc run {path}{local}"]

    def text(self) -> str:
        """Returns the campaign file: at most 40 lines, valid for :func:`megaflow_hpc.config.load`."""
        return "\n".join([*self._head(), *self._agent(), *self._environment(), *self._slurm(), *self._limits()]) + "\n"

    def adapted(self, text: str) -> str:
        """Returns a recipe's campaign file with this site's profile, account, image, partitions and walltimes."""
        lines: list[str] = []
        profile = self.profiles[0] if self.profiles else None
        if not self.base.startswith("docker:"):
            text = re.sub(r'"docker://python:[\w.-]+"', json.dumps(self.base), text)
        for line in text.splitlines():
            if request := REQUEST.match(line):
                line = self._request(request, profile)
            lines.append(line)
            if line.startswith("name: ") and profile and "\nslurm:" in text:
                lines.append(f"site: {_quoted(profile.name)}{_others([each.name for each in self.profiles])}")
            if line.startswith("slurm:") and self.accounts:
                lines.append(f"  account: {_quoted(self.accounts[0])}{_others(self.accounts)}")
        if not self.slurm and "\nslurm:" in text:
            self.notices.append("no Slurm here: the campaign files name partitions cpu and gpu; correct them at a site")
        return "\n".join(lines) + "\n"

    def _request(self, request: re.Match[str], profile: Profile | None) -> str:
        choice = [p for p in self.partitions if bool(p.gpus) == (request["kind"] == "gpu")]
        choice = choice or (self.partitions if request["kind"] == "cpu" else [])
        if profile and request["role"] in (profile.fields.get("slurm") or {}):
            return f"{request['head']}{request['rest'].removeprefix(', ')}}}  # the profile sets partition and walltime"
        if not choice:
            if self.slurm:
                self.notices.append(f"no partition with GPUs here: correct slurm.{request['role']}.partition")
            return request.string
        first = _first(choice)
        time = ""
        if request["time"]:
            hours, minutes, seconds = map(int, request["time"].split(":"))
            time = f", time: {_walltime(first, hours * 3600 + minutes * 60 + seconds)}"
        names = [first.name, *(partition.name for partition in choice if partition is not first)]
        return f"{request['head']}partition: {_quoted(first.name)}{request['rest']}{time}}}{_others(names)}"

    def _head(self) -> list[str]:
        profile = []
        if self.profiles:
            names = [profile.name for profile in self.profiles]
            if self.recognised:
                match = re.sub(r"[^\x20-\x7e]", "?", self.recognised)[:60]
                profile.append(
                    f"# {match}: this site has a profile, whose values are overridden by the keys of this file."
                )
            if self.profiles[0].shipped:
                profile.append(f"# It has not been tested there: {docs(f'sites/{names[0]}.md')}")
            profile.append(f"site: {_quoted(names[0])}{_others(names)}")
        tasks = f"tasks: {_quoted(self.tasks or 'tasks/*')}"
        hint = "directories of Harbor tasks, or a *.jsonl file"
        hint += "" if self.tasks else "; begin one: megaflow-hpc tasks new NAME"
        return [
            "# Every task is given to an agent, `samples` times, in a sandbox of its own, and verified.",
            f"# All keys: {docs('reference/campaign-file.md')}",
            f"name: {self.name}",
            *profile,
            f"{tasks}  # {hint}",
            "samples: 1  # rollouts of each task",
        ]

    def _agent(self) -> list[str]:
        agent = "agent: {name: mini-swe-agent, max_turns: 50, timeout_s: 1800}"
        model = f"model: {{path: {_quoted(self.model or '/path/to/model')}, gpus: 1, servers: [1, 2]}}"
        if self.model and self.engine and self.agent:
            return [agent, f"{model}  # a directory, or a name in Hugging Face's cache"]
        lacking = [
            *([] if self.model else ["a model: a directory, or a name in Hugging Face's cache"]),
            *([] if self.engine else ["vLLM: MEGAFLOW_ENGINE_VENV names the virtual environment that has it"]),
            *([] if self.agent else [f"mini-swe-agent: {install('agents')}"]),
        ]
        return [
            "agent: oracle  # carries out each task's own solution; needs no model. With one:",
            f"# {agent}",
            f"# {model}",
            *(f"#   needs {each}" for each in lacking),
        ]

    def _environment(self) -> list[str]:
        return [
            "environment:",
            "  network: gateway  # sandboxes reach the model only; or none, host",
            "  images:  # of the names that tasks use: NAME: FILE.sif, FILE.def or docker://ADDRESS",
            f'    base: "{self.base}"  # the name in tasks made by: megaflow-hpc tasks new',
            '    "*": "docker://*"  # all other names: from Docker Hub',
        ]

    def _slurm(self) -> list[str]:
        if not self.slurm:
            if self.silent:
                return ["# Slurm did not answer. Until it does, run with --launcher local to use this machine."]
            return ["# There is no Slurm here: megaflow-hpc run uses this machine."]
        account = [f"  account: {_quoted(self.accounts[0])}{_others(self.accounts)}"] if self.accounts else []
        if self.profiles and "pods" in (self.profiles[0].fields.get("slurm") or {}):
            unknown = [] if account else ["  # account: PROJECT  # many sites demand one"]
            return [
                "slurm:",
                *account,
                *unknown,
                "  pods: {count: 1}  # the profile sets partition, walltime and ranks",
            ]
        cpu = [p for p in self.partitions if not p.gpus] or self.partitions
        gpu = [p for p in self.partitions if p.gpus]
        return [
            "slurm:",
            *account,
            "  pods:  # jobs that run agents and sandboxes",
            *self._partition(cpu),
            "    count: 1",
            *self._ranks(cpu),
            *(["  servers:  # jobs that run the model", *self._partition(gpu)] if gpu else []),
        ]

    @staticmethod
    def _partition(choice: list[Partition]) -> list[str]:
        if not choice:
            return []
        first = _first(choice)
        names = [first.name, *(partition.name for partition in choice if partition is not first)]
        gpus = ", with GPUs" if first.gpus else ""
        size = f"{first.nodes} nodes of {first.cpus} CPUs, {first.memory_mb / 1000:.0f} GB{gpus}, at most {first.time}"
        return [
            f"    partition: {_quoted(first.name)}  # {size}{_others(names, '; ')}",
            f"    time: {_walltime(first, WALLTIME_S)}",
        ]

    def _ranks(self, choice: list[Partition]) -> list[str]:
        if choice and _first(choice).name in self.whole_nodes:
            return ["    ranks_per_node: fill  # of 2 CPUs each, because jobs get whole nodes"]
        cpus = max((partition.cpus for partition in choice), default=0)
        ranks = max(2, min(RANKS, cpus // 2))
        return [f"    ranks_per_node: {ranks}  # of 2 CPUs each: one schedules, the others run 2 rollouts at once"]

    def _limits(self) -> list[str]:
        return ["limits: {core_hours: 100}  # then pods start no more rollouts"]


def _tasks_in(directory: Path) -> str:
    """Returns the source of the tasks in a directory. Returns an empty string if there are none. Also finds tasks
    written by ``tasks import``."""
    if any(directory.glob("tasks/*/task.toml")):
        return "tasks/*"
    for pattern in ("*.jsonl", "tasks/*.jsonl", "tasks/*/*/task.toml"):
        for path in sorted(directory.glob(pattern))[:1]:
            return str((path.parent.with_name("*") if path.name == "task.toml" else path).relative_to(directory))
    return ""


def _first(choice: list[Partition]) -> Partition:
    """Returns the partition to write into the file."""
    return max(choice, key=lambda partition: (partition.default, partition.nodes))


def _walltime(partition: Partition, wanted_s: float) -> str:
    """Returns the requested walltime, capped at the partition's maximum."""
    minutes = max(1, int(min(fits.longest_s({"partition": partition.name}), wanted_s) // 60))
    return f"{minutes // 60}:{minutes % 60:02d}:00"


def _quoted(value: str) -> str:
    """Quotes a value, if necessary, so that YAML reads it as a string."""
    plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9._/-]*\*?", value) and value.lower() not in ("yes", "no", "on", "off")
    return value if plain and value.lower() not in ("true", "false", "null", "y", "n") else json.dumps(value)


def _others(names: Iterable[str], before: str = "  # ") -> str:
    """Returns a comment that lists up to five alternatives."""
    rest = [re.sub(r"[^\x21-\x7e]", "?", name) for name in names][1:6]
    return f"{before}also: {', '.join(rest)}" if rest else ""
