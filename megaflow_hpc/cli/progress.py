"""Shows the progress of long operations on stderr: a bar or live line on a terminal, and occasional lines in a log."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import FINAL, note, seconds, status_line, status_parts
from megaflow_hpc.resources import resource
from megaflow_hpc.texts import in_one_line, printable

if TYPE_CHECKING:
    from megaflow_hpc.environments.images.build_progress import BuildProgress


class ProgressLine:
    """Shows a campaign's progress on stderr: a bar on a terminal, or at most one line every 15 s in a log."""

    LINE_EVERY_S = 15.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar: Any = None
        self._task: Any = None
        self._last_line = ("", 0.0)
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(in_one_line(name), total=None, detail="")

    def __call__(self, status: dict[str, Any]) -> None:
        if self._bar is not None:
            counts = status["rollouts"]
            done = sum(counts[state] for state in FINAL)
            detail = in_one_line(f"{status['state']}: {', '.join(status_parts(status))}")
            self._bar.update(self._task, completed=done, total=counts["total"], detail=detail)
            return
        line = status_line(self._name, status)
        line_before, when = self._last_line
        settled = status["state"] in ("finished", "cancelled") or not line_before
        if line != line_before and (settled or time.monotonic() - when > self.LINE_EVERY_S):
            note(line)
            self._last_line = (line, time.monotonic())

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()


class PlanProgress:
    """Shows the current step and the progress of image builds on stderr.

    A terminal shows a single line that is updated in place. A log gets a line every two seconds, and none for
    shorter steps. Context manager. Thread-safe.

    Args:
        campaign: Campaign file to plan. Used in a hint on building its images on compute nodes.
    """

    EVERY_S = 2.0
    MANY_IMAGES = 4
    """If at least this many images are missing, suggest a job array instead of building on the login node."""
    MAX_SHARES = 16

    def __init__(self, campaign: str | None = None) -> None:
        self._campaign = campaign
        self._live: Any = None
        self._terminal = sys.stderr.isatty()
        self._printed_at = time.monotonic()
        self._is_building = False
        self._step, self._detail, self._since = "", "", time.monotonic()
        self._guard = threading.RLock()
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> PlanProgress:
        self._beats.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        with self._guard:
            self._take_down()

    def step(self, text: str) -> None:
        """Starts a new step."""
        with self._guard:
            self._step, self._detail, self._since = text, "", time.monotonic()
            if self._live is not None:
                self._show_line(text)

    def detail(self, text: str) -> None:
        """Sets the progress within the current step. May be called often."""
        self._detail = f", {text}"

    def say(self, line: str) -> None:
        """Prints a line above the live line."""
        with self._guard:
            if self._live is None:
                note(line)
            else:
                self._live.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
            self._printed_at = time.monotonic()

    def show(self, state: BuildProgress) -> None:
        """Updates the progress of image builds."""
        with self._guard:
            self._show_images(state)
            if self._campaign and state.to_make >= self.MANY_IMAGES:
                self._suggest_jobs(self._campaign, state.to_make)
                self._campaign = None

    def _show_images(self, state: BuildProgress) -> None:
        if state.looked_up < state.total:
            self._show_line(f"images: {state.looked_up} of {state.total} looked up")
            return
        if not self._is_building:
            self._is_building = True
            wrong = state.total - state.there - state.to_make
            line = f"images: {state.total}, {state.there} in the store, {state.to_make or 'none'} to be made"
            if state.to_make or wrong:
                self.say(f"{line}, {wrong} cannot be" if wrong else line)
        done = state.made + state.failed
        figures = f"{state.steps} steps, {state.bytes / 1e6:.1f} MB, {seconds(state.elapsed_s)}"
        figures += f", {state.failed} failed" if state.failed else ""
        if done < state.to_make:
            left = f", {seconds(state.left_s)} left" if state.left_s is not None else ""
            self._show_line(f"images: {done}/{state.to_make} made, {state.at_work} under way, {figures}{left}")
        else:
            self._is_building = False
            self._take_down()
            if state.to_make:
                self.say(f"images: {done}/{state.to_make} made, {figures}")

    def _suggest_jobs(self, campaign: str, images: int) -> None:
        """Suggests a command that builds the images on compute nodes, because some sites forbid builds on login
        nodes."""
        from megaflow_hpc.slurm.site import has_slurm

        if not has_slurm() or "SLURM_JOB_ID" in os.environ:
            return
        script = resource("sbatch/build_images.sbatch")
        command = shlex.join(["sbatch", f"--array=1-{min(images, self.MAX_SHARES)}", str(script), campaign])
        self.say(f"the images are built here; to build them on compute nodes, press Ctrl-C and run: {command}")

    def _show_line(self, line: str) -> None:
        """Updates the live line. In a log, prints the line if nothing was printed for two seconds."""
        if self._terminal:
            if self._live is None:
                from rich.console import Console
                from rich.live import Live

                # Piped output must bypass rich.
                on_terminal = sys.stdout.isatty()
                console = Console(stderr=True)
                self._live = Live(console=console, refresh_per_second=4, transient=True, redirect_stdout=on_terminal)
                self._live.start()
            from rich.text import Text

            self._live.update(Text(in_one_line(line), no_wrap=True, overflow="ellipsis"))
            self._printed_at = time.monotonic()
        elif time.monotonic() - self._printed_at >= self.EVERY_S:
            self.say(line)

    def _take_down(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _beat(self) -> None:
        while not self._over.wait(self.EVERY_S / 4):
            with self._guard:
                silent = time.monotonic() - self._printed_at >= self.EVERY_S
                if silent and self._step and not self._over.is_set():
                    self._show_line(f"{self._step}{self._detail}: {seconds(time.monotonic() - self._since)}")


@contextmanager
def under_way(step: str) -> Iterator[PlanProgress]:
    """Reports the elapsed time of a step on stderr every two seconds. Reports nothing for shorter steps."""
    with PlanProgress() as watch:
        watch.step(step)
        yield watch
