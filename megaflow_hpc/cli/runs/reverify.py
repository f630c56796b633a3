"""``reverify``: scores stored rollouts again, without sampling. Keeps both the old and the new rewards."""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import math
import tempfile
import time
import traceback
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megaflow_hpc.cli.output import note, print_json, say
from megaflow_hpc.cli.progress import PlanProgress, under_way
from megaflow_hpc.cli.runs.shell import until_signalled
from megaflow_hpc.cli.verb import Subparsers, add_run, add_verb, share, whole
from megaflow_hpc.errors import ConfigError, MegaflowError, ModelServiceError, UnscoredError
from megaflow_hpc.ledger.tasks import PlannedTask, planned_tasks
from megaflow_hpc.rundir.budget import total_use, use_lines
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, check_version, read_run
from megaflow_hpc.rundir.rewards import GivenReward, RewardLog, check_name, given_as
from megaflow_hpc.types import VERIFIED, RolloutName, Task

if TYPE_CHECKING:
    from megaflow_hpc.campaign.local import JudgeServers
    from megaflow_hpc.pod.rollout.rescoring import NewScore, Rescoring
    from megaflow_hpc.pod.rollout.services import Services
    from megaflow_hpc.tasks.scoring import Scorer
    from megaflow_hpc.trajectories.reading.store import Row, TrajectoryStore

OWN = "verifier"
"""Default name for rewards from the tasks' own tests."""
JOBS, JOBS_WITH = 2, 16
"""Default number of rollouts to score concurrently, in sandboxes and with ``--with``."""
POLL_S = 1.0
MAX_ERROR_CHARS = 2_000
"""Maximum number of characters of an error, which may quote an agent's output. Readers of stored rewards skip lines
longer than 1 MiB."""
SHOWN = 10
"""Number of rollouts to list for each reason."""

DESCRIPTION = """\
Scores the verified rollouts of a run again, on this machine, from what is stored. New rewards are written to
RUN/rewards/NAME, and read as rewards named NAME and NAME.PART; the campaign's own rewards stay. Repeated, it continues
with the rollouts that have no reward of this name yet.

Without --with, each task's verification runs again, as the task is today, on the stored patch in a fresh sandbox. With
--with, a function, a class or a rubric scores the stored conversation. A rollout whose record lacks something is listed
with the reason. Judges of the campaign are started here unless they still serve.
"""


def register(subparsers: Subparsers) -> None:
    """Adds ``reverify``."""
    parser = add_verb(
        subparsers,
        "reverify",
        _reverify,
        "score stored rollouts again, without sampling",
        examples=[
            "reverify RUN",
            "reverify RUN --with score.py --only 'fix-*'",
            "reverify RUN --with rubric.yaml --name polite --json",
            "reverify RUN --share 3/8          # in the third of eight processes, such as elements of a job array",
        ],
        description=DESCRIPTION,
    )
    add_run(parser)
    parser.add_argument(
        "--with",
        metavar="FILE",
        dest="scorer",
        help="score by FILE.py (its function score), FILE.py:NAME, package.module:NAME or RUBRIC.yaml",
    )
    parser.add_argument("--name", help=f"name of the new rewards; default: the name of FILE or NAME, or {OWN}")
    parser.add_argument(
        "--only",
        metavar="ID",
        action="extend",
        nargs="+",
        default=[],
        help="score only these tasks, groups or rollouts (shell patterns)",
    )
    parser.add_argument("--share", metavar="I/N", type=share, default=(1, 1), help="score only share I of N, as 3/16")
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=whole(1),
        help=f"number of rollouts to score at once; default: {JOBS}, with --with {JOBS_WITH}",
    )


@dataclass
class Reverified:
    """Results of one call of the verb."""

    scored: dict[str, GivenReward] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    """The campaign's own rewards of the rollouts in ``scored``, by rollout id."""
    already: int = 0
    """Number of rollouts that an earlier call scored."""
    not_verified: int = 0
    """Number of rollouts that the campaign did not verify, and that are therefore not scored."""
    unscored: dict[str, str] = field(default_factory=dict)
    """Reasons why rollouts cannot be scored, by rollout id."""
    failed: dict[str, str] = field(default_factory=dict)
    """Errors of rollouts that could not be scored because a node or a judge failed, by rollout id. The next call
    retries them."""

    def report(self, run: RunDir, name: str) -> dict[str, Any]:
        """Returns the outcome as plain JSON."""
        new = {rollout: given.reward for rollout, given in self.scored.items() if given.reward is not None}
        old = [self.before[rollout] for rollout in new]
        judge = total_use(given.judge for given in self.scored.values())
        return {
            "run": str(run),
            "name": name,
            "scored": len(self.scored),
            "already": self.already,
            "not_verified": self.not_verified,
            "mean_before": math.fsum(old) / len(old) if old else None,
            "mean": math.fsum(new.values()) / len(new) if new else None,
            # The campaign's own rewards are stored as float32.
            "changed": sum(not math.isclose(self.before[one], new[one], rel_tol=1e-7) for one in new),
            "judge": msgspec.to_builtins(judge),
            "unscored": self.unscored,
            "failed": self.failed,
        }


def _reverify(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.tasks.scoring import load_scorer
    from megaflow_hpc.trajectories import open_trajectories

    run = RunDir(arguments.run_dir)
    run.check_ours()
    planned = read_run(run)
    check_version(planned, run)
    scorer = load_scorer(arguments.scorer) if arguments.scorer else None
    name = arguments.name or (scorer.name if scorer else OWN)
    check_name(name)
    outcome = Reverified()
    with under_way(f"reading {run}") as watch, open_trajectories(run.path) as store:
        taken = [one for one in store.recorded.reward_names() if one == name or one.startswith(f"{name}.")]
        if taken:
            raise ConfigError(f"{run}: its rollouts have a reward {taken[0]!r} already; give --name another name")
        work = _Work(arguments, run, planned, scorer, name, store, outcome, watch)
        status = asyncio.run(until_signalled(work.carry_out()))
    report = outcome.report(run, name)
    if arguments.json:
        print_json(report)
    else:
        _say(report)
    return status or (1 if outcome.failed or outcome.unscored else 0)


class _Work:
    """One call of the verb."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        run: RunDir,
        planned: RunRecord,
        scorer: Scorer | None,
        name: str,
        store: TrajectoryStore,
        outcome: Reverified,
        watch: PlanProgress,
    ) -> None:
        self._arguments, self._run, self._planned, self._scorer = arguments, run, planned, scorer
        self._store, self._outcome, self._watch = store, outcome, watch
        self._given, self._log = given_as(run, name), RewardLog(run, name)
        self._name = name
        self._tasks = planned_tasks(run, planned)
        self._today: Mapping[str, Task] | None = None if scorer else _tasks_of_today(planned)
        self._total = 0

    async def carry_out(self) -> int:
        """Scores all rollouts that need it. Returns 0."""
        from megaflow_hpc.config import Policy, resolved
        from megaflow_hpc.pod.rollout.rescoring import Rescoring
        from megaflow_hpc.pod.rollout.services import Services

        rows = list(self._rows())
        self._total = len(rows)
        if not rows:
            return 0
        if self._scorer is not None and self._scorer.batch:
            await self._by_batches(rows)
            return 0
        policies = {
            name: resolved(Policy, msgspec.to_builtins(policy)) for name, policy in self._planned.policies.items()
        }
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            code = (str(self._run.code) if self._run.code.is_dir() else "", self._planned.beside)
            sandboxes = any(task.image for task in (self._today or {}).values())
            services = await Services.open(self._planned.config, policies, folder, code, sandboxes)
            stack.push_async_callback(services.close)
            stack.callback(self._log.close)
            if judges := self._judges():
                await stack.enter_async_context(_judging(self._run, self._planned, judges, services, self._watch))
            self._watch.step(f"scoring {self._total} rollouts")
            rescoring = Rescoring(services)
            limit = asyncio.Semaphore(self._arguments.jobs or (JOBS_WITH if self._scorer else JOBS))
            try:
                async with asyncio.TaskGroup() as group:
                    for row in rows:
                        await limit.acquire()
                        task = group.create_task(self._score(row, services, rescoring))
                        task.add_done_callback(lambda _: limit.release())
            except ExceptionGroup as errors:  # such as a full disk
                raise errors.exceptions[0] from None
        return 0

    def _rows(self) -> Iterator[Row]:
        """Yields the rollouts that need a reward."""
        number, shares = self._arguments.share
        for rollout, given in self._given.items():  # includes other shares and, with a scorer, other tasks
            if self._scorer or self._is_selected(rollout):
                self._check_digest(given, RolloutName.parse(rollout).task_id)
        statuses = self._store.column("status")
        for row, (rollout, status) in enumerate(zip(self._store.ids, statuses, strict=True)):
            if zlib.crc32(rollout.encode()) % shares != number - 1:
                continue
            if not self._is_selected(rollout):
                continue
            if status not in VERIFIED:
                self._outcome.not_verified += 1
            elif rollout in self._given:
                self._outcome.already += 1
            else:
                yield self._store[row]

    def _is_selected(self, rollout: str) -> bool:
        names = (rollout, rollout.rpartition("/")[0], RolloutName.parse(rollout).task_id)
        only = self._arguments.only
        return not only or any(fnmatch.fnmatchcase(one, pattern) for one in names for pattern in only)

    def _check_digest(self, given: GivenReward, task_id: str) -> None:
        if given.digest != self._digest(task_id):
            what = f"--with {self._scorer.title}" if self._scorer else f"task {task_id}"
            raise ConfigError(
                f"{self._run.rewards / self._name}: its rewards were given before {what} was changed, so they are not "
                "comparable with new ones; give --name another name"
            )

    def _digest(self, task_id: str) -> str:
        from megaflow_hpc.tasks.digests import definition_digest

        if self._scorer:
            return self._scorer.digest
        assert self._today is not None
        task = self._today.get(task_id)
        return definition_digest(task) if task else ""

    def _judges(self) -> Sequence[str]:
        from megaflow_hpc.tasks.formats import format_of

        if self._scorer:
            asks = "judge" in self._scorer.parameters
        else:
            assert self._today is not None
            asks = any(format_of(task).asks_judge(task) for task in self._today.values())
        return self._planned.config.judges() if asks else ()

    async def _score(self, row: Row, services: Services, rescoring: Rescoring) -> None:
        from megaflow_hpc.tasks.digests import changed

        rollout = row.id
        try:
            task, planned = self._task(row.task_id)
            services.images.update(planned.images)
            trajectory = row.trajectory()
            if self._scorer:
                score = await rescoring.by_scorer(self._scorer, task, trajectory)
            else:
                agent = services.policies[row.policy].agent(row.agent)
                score = await rescoring.by_task(task, agent, trajectory)
                if await asyncio.to_thread(changed, [task]):
                    what = f"the files of task {task.id} were changed while they verified it"
                    raise ConfigError(f"{what}; restore them, or give --name another name")
        except UnscoredError as error:
            self._outcome.unscored[rollout] = str(error)[:MAX_ERROR_CHARS]
        except MegaflowError as error:
            self._outcome.failed[rollout] = str(error)[:MAX_ERROR_CHARS]
        except Exception as error:  # a bug triggered by one record must not fail the other rollouts
            last = traceback.extract_tb(error.__traceback__)[-1]
            self._outcome.failed[rollout] = f"{last.filename}:{last.lineno}: {error!r}"[:MAX_ERROR_CHARS]
        else:
            self._store_score(rollout, row.task_id, row.reward, score)
        self._show()

    def _task(self, name: str) -> tuple[Task, PlannedTask]:
        """Returns a task and its images, as they are now. If a function scores the task, returns them as planned."""
        planned = self._tasks[name]
        task = Task.from_dict(planned.task)
        if self._today is None:
            return task, planned
        if name not in self._today:
            raise UnscoredError(f"the campaign's sources have no task {name} today")
        today = self._today[name]
        if today.image and today.image not in planned.images:
            raise UnscoredError(f"the task has another image today ({today.image}), which the run did not build")
        return replace(today, workdir=today.workdir or task.workdir), planned

    async def _by_batches(self, rows: Sequence[Row]) -> None:
        """Scores rollouts in batches, using a function with the signature of ``training.score``."""
        from megaflow_hpc.config.sections import Method
        from megaflow_hpc.pod.rollout.rescoring import NewScore
        from megaflow_hpc.training.algorithms.rewards import scores
        from megaflow_hpc.training.algorithms.samples import SCORE
        from megaflow_hpc.training.buffer import MAX_SCORED_AT_ONCE, stored_rollout

        assert self._scorer is not None
        function = self._scorer.target
        method = Method(name=f"{function.__module__}:{function.__name__}")
        self._watch.step(f"scoring {self._total} rollouts")
        for first in range(0, len(rows), MAX_SCORED_AT_ONCE):
            some = rows[first : first + MAX_SCORED_AT_ONCE]
            found = await asyncio.to_thread(scores, method, [stored_rollout(row.trajectory()) for row in some])
            for row in some:
                named = found[row.id]
                if named is None:
                    self._outcome.unscored[row.id] = f"{self._scorer.title} returned None for it"
                    continue
                rewards = {"reward" if name == SCORE else name: value for name, value in named.items()}
                self._store_score(row.id, row.task_id, row.reward, NewScore(rewards))
            self._show()
        self._log.close()

    def _store_score(self, rollout: str, task_id: str, before: float, score: NewScore) -> None:
        from megaflow_hpc.pod.rollout.judges import use_of

        given = GivenReward(
            id=rollout,
            at=time.time(),
            digest=self._digest(task_id),
            reward=score.reward,
            rewards=dict(score.rewards),
            error=score.error[:MAX_ERROR_CHARS],
            judge=total_use(map(use_of, score.calls)),
        )
        self._log.add(given)
        self._outcome.scored[rollout] = given
        self._outcome.before[rollout] = before

    def _show(self) -> None:
        done = len(self._outcome.scored), len(self._outcome.unscored), len(self._outcome.failed)
        words = f"{done[0]} scored, {done[1]} skipped, {done[2]} failed"
        self._watch.detail(f"{sum(done)} done: {words}")


@asynccontextmanager
async def _judging(
    run: RunDir, planned: RunRecord, judges: Sequence[str], services: Services, watch: PlanProgress
) -> AsyncIterator[None]:
    """Serves the judges, and informs the gateway of their endpoints.

    Raises:
        ModelServiceError: An engine does not start.
    """
    from megaflow_hpc.campaign.local import JudgeServers

    watch.step("starting the judges")
    with JudgeServers(run, planned, judges) as servers:
        while not servers.ready(endpoints := servers.serving()):
            await asyncio.sleep(POLL_S)
        services.gateway.update_endpoints(endpoints)
        following = asyncio.create_task(_follow(servers, services, endpoints))
        try:
            yield
        finally:
            following.cancel()


async def _follow(servers: JudgeServers, services: Services, known: list[dict[str, Any]]) -> None:
    while True:
        await asyncio.sleep(POLL_S)
        try:
            endpoints = servers.serving()
        except ModelServiceError:
            endpoints = []  # rollouts whose calls fail are reported as failed
        if [one["url"] for one in endpoints] != [one["url"] for one in known]:
            services.gateway.update_endpoints(endpoints)
            known = endpoints


def _tasks_of_today(planned: RunRecord) -> dict[str, Task]:
    """Reads the campaign's tasks as they are now.

    Raises:
        ConfigError: They cannot be read.
    """
    from megaflow_hpc.tasks.digests import fixed
    from megaflow_hpc.tasks.loading import load_tasks

    config = planned.config
    sources = [*config.tasks]
    if config.training and config.training.evaluate:
        sources += config.training.evaluate.tasks
    base, dumped = planned.beside or ".", [one.model_dump() for one in sources]
    tasks = load_tasks(dumped, base, services=config.services, left_out=[])
    return {task.id: task for task in fixed(tasks)}


def _say(report: Mapping[str, Any]) -> None:
    """Prints the outcome as text."""
    for key, what in (("unscored", "skipped"), ("failed", "failed; the next call tries again")):
        by_reason: dict[str, list[str]] = {}
        for rollout, reason in report[key].items():
            by_reason.setdefault(reason, []).append(rollout)
        for reason, rollouts in list(by_reason.items())[:SHOWN]:
            more = f" and {len(rollouts) - SHOWN} more" if len(rollouts) > SHOWN else ""
            note(f"{what}: {', '.join(rollouts[:SHOWN])}{more}: {reason}")
        if len(by_reason) > SHOWN:
            note(f"{what}: {len(by_reason) - SHOWN} further reasons; --json lists all")
    say(f"{report['scored']} rollouts scored, {report['already']} had a reward {report['name']!r} already")
    if report["mean"] is not None:
        changed = f"{report['changed']} of them changed"
        say(f"mean reward {report['mean']:.4g}, before {report['mean_before']:.4g}; {changed}")
    for line in use_lines(report["judge"]):
        say(line)
    if report["not_verified"]:
        say(f"{report['not_verified']} rollouts have no verdict, and were not scored")
