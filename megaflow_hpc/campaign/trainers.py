"""The trainers of a campaign on this machine: children, each started again while its starts commit steps."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

from megaflow_hpc.campaign.job_environment import trainer_python
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import TrainingView, say_last

MISTAKE = 2
"""Exit status of a trainer whose campaign or model is wrong: another start would say the same."""
STOP_S = 60.0

Start = Callable[[list[str], str, dict[str, str]], "subprocess.Popen[bytes]"]
"""Starts a command under the name of its log, with variables of its own."""


class LocalTrainer:
    """The trainer of one policy: what ``trainer.sh`` is on Slurm. One process, which sees the GPUs that we see."""

    def __init__(self, run: RunDir, policy: str, requeues: int, start: Start) -> None:
        self._run, self.policy, self._requeues, self._start = run, policy, requeues, start
        self._log = run.logs / f"trainer-{policy}-local.log"
        self._view = TrainingView(run, policy)
        self._vain, self.word = 0, ""
        """Starts in a row that committed nothing; the last word, once it is not started again."""
        self._begin()

    def _begin(self) -> None:
        self._before = self._steps()
        self._written = self._log.stat().st_size if self._log.exists() else 0
        command = [trainer_python(), "-m", "megaflow_hpc.training.trainer", str(self._run), "--policy", self.policy]
        path = [str(self._run.training / ".package"), os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        self.process = self._start(command, f"trainer-{self.policy}", own)

    def _steps(self) -> int:
        return sum(commit.step for commit in self._view.commits(1))

    def look(self) -> None:
        """Starts it again if it ended too early."""
        status = self.process.poll()
        if status is None or self.word:
            return
        word = self._became(status)
        say_last(self._run, self.policy, word, status, self._log, self._written)
        if word == "requeued":
            self._begin()
        else:
            self.word = word

    def _became(self, status: int) -> str:
        if status == 0 and not self._view.open:
            return "done"
        if status == MISTAKE:
            return "failed"
        self._vain = 0 if self._steps() > self._before else self._vain + 1
        return "lost" if self._vain > self._requeues else "requeued"

    def stop(self) -> None:
        """Lets it end the step at hand; it goes on from there with ``resume``."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)  # its own session, and not yet waited for
                self.process.wait()
