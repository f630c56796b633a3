"""Live view of a run: the status above a list of rollouts, or of pods and engines."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult, ScreenStackError
from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Static

from megaflow_hpc.campaign.run import Run
from megaflow_hpc.cli.output import seconds
from megaflow_hpc.cli.view.detail import DetailScreen
from megaflow_hpc.cli.view.reader import RunReader, RunView
from megaflow_hpc.cli.view.tables import PartTable, RolloutRows, RolloutTable
from megaflow_hpc.cli.view.words import head
from megaflow_hpc.monitor.live import RunSnapshot
from megaflow_hpc.texts import in_one_line

SLOW_RUN_DIRECTORY_S = 15.0
"""Warn if the run directory has not responded for this many seconds."""

KEYS = """\
↑ ↓ PgUp PgDn   choose a rollout; Home and End: the first and the last
Enter           look into it: its transcript as it grows, and its log
Esc             back; shows all again
f               show only failed rollouts, or all
/               find: part of an id, node, state or error
p               show pods and engines, or rollouts; Enter shows their logs
q               leave; the campaign continues

Running rollouts come first, the longest-running at the top.
"model 0:12": the model has not answered for 12 s. "agent 0:12": the
agent has been working since the last answer, 12 s ago. "stuck": there
has been no answer for more than five minutes.
"""


class Polled(Message):
    """Posted after each poll of the reader."""

    def __init__(self, look: RunView) -> None:
        super().__init__()
        self.look = look


class WatchApp(App[None]):
    """Shows a run until the user presses ``q``.

    Args:
        every_s: Seconds between two polls.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: transparent; }
    #head { height: auto; }
    RolloutRows { height: 1fr; }
    #find { display: none; height: 1; border: none; padding: 0; }
    #keys { height: 1; }
    Help { align: center middle; overflow-y: auto; }
    Help Static { width: auto; max-width: 100%; height: auto; border: solid $foreground; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "leave"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("f", "failed", "only failed"),
        Binding("slash", "find", "find"),
        Binding("p", "parts", "pods"),
        Binding("escape", "clear", show=False),
        Binding("question_mark,h", "keys", "keys"),
    ]

    def __init__(self, run: Run, every_s: float = 2.0) -> None:
        super().__init__(ansi_color=True)
        self._campaign = run.config.name
        self.reader = RunReader(run, every_s, lambda look: self.post_message(Polled(look)))
        self.snapshot: RunSnapshot | None = None
        """Result of the last successful poll."""
        self.over = False
        """True if the run can no longer change."""
        self.title = in_one_line(f"{self._campaign} ({run.path.name})")
        self._problem, self._looked_at = "", time.monotonic()
        self._failed = self._parts = False
        self._text = ""
        self._lines = 1
        """Number of lines above the list."""

    def compose(self) -> ComposeResult:
        yield Static(Text("reading …", "dim"), id="head")
        yield RolloutRows()
        yield Input(id="find", placeholder="part of an id, node, state or error")
        yield Static(id="keys")

    def on_mount(self) -> None:
        self.theme = "ansi-dark"  # use the terminal's own colours and background
        self.query_one(RolloutRows).focus()
        self._show_keys()
        self.set_interval(1.0, self._look_at_clock)
        self.reader.start()

    def on_unmount(self) -> None:
        self.reader.stop()

    # --- polling ---

    def on_polled(self, message: Polled) -> None:
        """Shows the result of a poll. After a failed poll, the last successful result stays visible."""
        look = message.look
        self._looked_at, self._problem = time.monotonic(), look.problem
        if look.snapshot is not None:
            self.snapshot, self.over = look.snapshot, look.over
        with suppress(NoMatches, ScreenStackError):  # a screen is opening or closing; the next poll will draw it
            self._show_rows()
            self._show_head()
            if isinstance(self.screen, DetailScreen):
                self.screen.show(look)

    def _look_at_clock(self) -> None:
        if not self.is_headless and not os.isatty(sys.__stdin__.fileno() if sys.__stdin__ else 0):
            # The terminal vanished without a signal, for example under nohup. Textual would then read end-of-file in an
            # endless loop, on a login node. Nothing can be restored, so exit as after a hang-up.
            self.reader.stop()
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGHUP)
        silent_s = time.monotonic() - self._looked_at
        if silent_s > SLOW_RUN_DIRECTORY_S:
            self._problem = f"the run directory has not answered for {seconds(silent_s)}"
            self._show_head()

    @property
    def _list(self) -> Screen[object]:
        """The screen with the list. Other screens are stacked on top of it.

        Raises:
            ScreenStackError: The screen is opening or closing.
        """
        if not self.screen_stack:
            raise ScreenStackError("no screen")
        return self.screen_stack[0]

    def _show_head(self) -> None:
        where = self._list
        if self.snapshot is None:
            lines = [Text(in_one_line(self._problem) or "reading …", "bold red" if self._problem else "dim")]
        else:
            lines = head(self._campaign, self.snapshot, self.size, self._problem)
        grown, self._lines = len(lines) != self._lines, len(lines)
        where.query_one("#head", Static).update(Text("\n").join(lines), layout=grown)

    def _show_rows(self) -> None:
        if self.snapshot is None:
            return
        rows = self._list.query_one(RolloutRows)
        if self._parts:
            rows.show(PartTable(self.snapshot.status))
        else:
            matching = self.snapshot.rollouts.matching(self._text, self._failed)
            filtered = self._text or self._failed
            rows.show(RolloutTable(matching, "none; Esc shows all" if filtered else "no rollout has begun"))
        self._tell_reader()

    def _tell_reader(self) -> None:
        self.reader.live.shown = () if self._parts else list(self._list.query_one(RolloutRows).on_screen)

    @on(RolloutRows.Moved)
    def _ask_about_visible_rows(self) -> None:
        """Requests live details of the visible rows."""
        self._tell_reader()

    @on(RolloutRows.Opened)
    def _open_details(self, message: RolloutRows.Opened) -> None:
        """Opens the details of the selected row."""
        self.push_screen(DetailScreen(message.key, self.reader))

    def on_resize(self) -> None:
        """Reformats the lines above the list for the new size."""
        self.call_after_refresh(self._show_head)

    # --- keys ---

    def _show_keys(self) -> None:
        keys = "q leave  Enter look into  f only failed  / find  p pods  ? keys"
        if self._failed or self._text:
            shown = ["failed only (f)"] if self._failed else []
            shown += [f"with {self._text!r} (Esc)"] if self._text else []
            keys = f"shown: {', '.join(shown)}  q leave  ? keys"
        self._list.query_one("#keys", Static).update(Text(in_one_line(keys), "reverse", no_wrap=True))

    def action_failed(self) -> None:
        """Toggles between failed rollouts and all rollouts."""
        self._failed, self._parts = not self._failed, False
        self._show_all()

    def action_parts(self) -> None:
        """Toggles between rollouts, and pods and engines."""
        self._parts = not self._parts
        self._show_all()

    def action_clear(self) -> None:
        """Removes all filters and shows all rollouts."""
        self._failed = self._parts = False
        self._find("")
        self._close_find()

    def action_find(self) -> None:
        line = self.query_one("#find", Input)
        line.value, line.display = self._text, True
        line.focus()

    def on_input_changed(self, message: Input.Changed) -> None:
        """Filters the list while the user types."""
        if message.input.has_focus:
            self._parts = False
            self._find(message.value)

    def on_input_submitted(self) -> None:
        """Returns focus to the list and keeps the filter."""
        self._close_find()

    def _find(self, text: str) -> None:
        self._text = text
        self._show_all()

    def _close_find(self) -> None:
        self.query_one("#find", Input).display = False
        self.query_one(RolloutRows).focus()

    def _show_all(self) -> None:
        self._show_rows()
        self._show_keys()

    def action_keys(self) -> None:
        self.push_screen(Help())


class Help(ModalScreen[None]):
    """Help on keys. Closes when the user presses any key."""

    def compose(self) -> ComposeResult:
        yield Static(Text(KEYS))

    def on_key(self) -> None:
        self.dismiss()
