"""Rank 0's part of the dataflow: it requests rollouts, follows them, and plans steps of complete groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.weights import current
from megaflow_hpc.training.buffer import Buffer, Sequences
from megaflow_hpc.training.microbatch import Ordinal
from megaflow_hpc.training.plan import Settled, StepPlan, TrainingFiles
from megaflow_hpc.training.planner import Planner
from megaflow_hpc.training.policy import TrainedPolicy
from megaflow_hpc.training.staleness import FIRST_REFILL_ROUND, StalenessControl


@dataclass
class _View:
    """The rollouts that no plan has settled. A later trainer rebuilds this view from the last plan."""

    buffer: Buffer
    planner: Planner


class Planning:
    """Requests and plans for one policy.

    Args:
        run: the run directory.
        files: where plans and requests are recorded.
        policy: the policy that is trained.
        config: the section ``training``.
        requests: whether rollouts are requested. If not, those that the campaign planned are used as they come.
        sequences: reads token sequences.
        ordinal: number of a weight version → the policy's own count.
    """

    def __init__(
        self,
        run: RunDir,
        files: TrainingFiles,
        policy: TrainedPolicy,
        config: TrainingConfig,
        requests: bool,
        sequences: Sequences,
        ordinal: Ordinal,
    ) -> None:
        self._run, self._files, self._policy, self._config = run, files, policy, config
        self._requests, self._sequences, self._ordinal = requests, sequences, ordinal
        self._flags = Marks(run)
        self._view: _View | None = None
        self.control = StalenessControl(files, policy, config)
        self.exhausted = False
        """True if no task is left to request in the place of dropped groups."""

    def request(self, committed: int, say: Callable[[str], None]) -> None:
        """Requests the batches that are due.

        Args:
            committed: number of the last step that is committed.
            say: gets a line if requests wait for engines.

        Raises:
            OSError: the run directory does not answer; the next call continues.
        """
        if self._requests:
            self.control.keep(committed, self._learned_prompts(), say)

    def wanted(self, step: int) -> int:
        """Returns the number of groups that a step waits for."""
        return self.control.want(step) if self._requests else self._config.batch.tasks

    @property
    def complete_groups(self) -> int:
        """Groups that are complete and in no plan."""
        return len(self._view.buffer.complete()) if self._view else 0

    @property
    def open_groups(self) -> int:
        """Groups that are in no plan, complete or not."""
        return self._view.buffer.open_groups if self._view else 0

    @property
    def journals(self) -> int:
        """Journals whose size each poll asks for."""
        return self._view.buffer.journals if self._view else 0

    def plan(self, step: int, trainer: int) -> StepPlan | None:
        """Returns the plan of a step, or ``None`` while its rollouts are missing.

        If another trainer has claimed the step meanwhile, its plan is returned.

        Args:
            step: number of the step, from 1.
            trainer: number of this trainer's start.

        Raises:
            OSError: the run directory does not answer; the next call continues.
        """
        if self._view is None:
            self._view = self._opened(step)
        view, over = self._view, self._flags.over  # before the poll: what is stored until then is seen by it
        view.buffer.poll()
        version = self._ordinal(current(self._run, self._policy.name).version)
        waits = self._requests and not over and self.control.is_due(view.buffer.rounds_under_way(), version)
        plan = None if waits else self._planned(view, step, version, trainer, over)
        if plan is None:
            return None
        claimed = self._files.claim(step, plan)
        if claimed is not plan:
            self._view = None  # the other plan says what is settled
        return claimed

    def _learned_prompts(self) -> dict[str, object]:
        learned: dict[str, object] = self._view.planner.learned.get("prompts", {}) if self._view else {}
        return learned

    def _opened(self, step: int) -> _View:
        """Returns the rollouts that the plans before ``step`` left unsettled."""
        before = self._files.read(StepPlan, step - 1)
        settled, learned = (before.settled, before.state) if before else (Settled(), {})
        policy = self._policy
        buffer = Buffer(self._run, self._sequences, policy.owners, self._ordinal, settled, policy.held_out)
        numbers = range(step - 1, 0, -1)
        earlier = (plan for number in numbers if (plan := self._files.read(StepPlan, number)) is not None)
        return _View(buffer, Planner(self._config, policy, buffer, learned, earlier))

    def _planned(self, view: _View, step: int, version: int, trainer: int, over: bool) -> StepPlan | None:
        """Plans the step if there is enough for it, and requests groups in the place of dropped ones."""
        buffer, planner, control = view.buffer, view.planner, self.control
        max_refills = self._config.batch.refill if self._requests else 0
        want, complete = self.wanted(step), buffer.complete()
        under_way = buffer.open_groups - len(complete) if max_refills else 0  # which looks for blocks
        refills_used_up = bool(max_refills) and control.refills(step) >= max_refills
        newest_round = max(buffer.rounds_under_way(), default=0)
        refill_under_way = refills_used_up and newest_round >= FIRST_REFILL_ROUND
        least = 0
        if self._requests and len(complete) > want:
            least = control.settles(step, complete, buffer.open_groups, version)

        def plan(last: bool, short: bool = False) -> StepPlan | None:
            replace = bool(max_refills)
            return planner.plan(step, version, want, trainer, least, last=last, replace=replace, short=short)

        made = plan(last=over, short=refills_used_up and not refill_under_way)
        is_requested = control.batch(step - 1) is not None
        if made is not None or over or not max_refills or not is_requested:
            return made
        lacks = planner.lacks - under_way
        if lacks <= 0 or refill_under_way:
            return None
        if control.refill(step, lacks, self._learned_prompts()) or under_way:
            return None
        self.exhausted = not complete
        return plan(last=True)
