"""Other policies of the campaign that learn at the same time.

A policy with ``samples: 0`` is a *helper*: it runs no tasks, and other policies' agents call its model. The policies
with rollouts of their own are *owners*. A helper's step ``s`` uses the groups that the owners' steps ``s`` use. So no
group is lost, none is used twice, and the helper's training is complete when its owners' trainers have ended and it has
used all their steps. With a staleness bound k, an owner requests the batch of step ``s`` only after every helper has
committed step ``s - 1 - k``. So groups cannot pile up at a slow helper, and its bound holds too.

Neither side can wait in a circle: step ``s`` of a helper needs step ``s`` of its owners, which need only earlier steps
of the helper.
"""

from __future__ import annotations

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import OPEN
from megaflow_hpc.rundir.training import FOR_GOOD, Commit, Trainer, TrainingView
from megaflow_hpc.training.plan import StepPlan, TrainingFiles


class Peer:
    """Another policy's training, as the run directory shows it. Only reads.

    Args:
        run: the run directory.
        policy: name of the policy.
    """

    def __init__(self, run: RunDir, policy: str) -> None:
        self.policy = policy
        self._run, self._files, self._view = run, TrainingFiles(run, policy), TrainingView(run, policy)

    @property
    def committed(self) -> int:
        """Number of the last committed step, or 0. Raises OSError."""
        return max(self._files.numbers(Commit), default=0)

    @property
    def ended(self) -> bool:
        """True if a trainer has ended the training, complete or early. False if it failed, or has not started yet.

        Raises:
            OSError: the run directory is unavailable.
        """
        latest = self._files.read(Trainer, max(self._files.numbers(Trainer), default=0))
        return latest is not None and not (self._run.path / OPEN / latest.consumer).exists()

    def groups(self, step: int) -> set[str] | None:
        """Returns the groups that a step of the policy uses or drops, or ``None`` if it is not planned yet."""
        plan = self._files.read(StepPlan, step)
        return None if plan is None else plan.groups

    def waited_for(self, act: str) -> str:
        """Returns a message that a step waits for this policy's trainer to do something.

        Args:
            act: an infinitive, such as ``commit step 3``.
        """
        word = self._view.last_word()
        text = f"the trainer of policy {self.policy!r} to {act}"
        if word is None or word.word not in FOR_GOOD:
            return text
        return f"{text}, but it {word.word} ({word.cause}); start it again with: megaflow-hpc resume {self._run}"
