"""Full-screen view of a rollout, pod or engine: properties, transcript and log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import RichLog, Static

from megaflow_hpc.cli.output import ROLE_COLOURS, seconds, used
from megaflow_hpc.cli.view.reader import Detail, RunReader, RunView
from megaflow_hpc.cli.view.tables import last_word
from megaflow_hpc.cli.view.words import STYLES
from megaflow_hpc.monitor.live import RolloutRow, RunSnapshot
from megaflow_hpc.texts import in_one_line, printable


class DetailScreen(Screen[None]):
    """Shows a rollout, pod or engine until the user presses Escape.

    Args:
        key: Rollout id, or name of a pod or engine.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,left,backspace", "back", "back"),
        Binding("t", "transcript", "transcript"),
        Binding("l", "log", "log"),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home", "first", show=False),
        Binding("end", "last", show=False),
    ]
    CSS = """
    DetailScreen #known { height: auto; }
    DetailScreen #body { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; background: transparent; }
    DetailScreen #keys { height: 1; }
    """

    def __init__(self, key: str, reader: RunReader) -> None:
        super().__init__()
        self.key, self._reader = key, reader
        self._log = "/" not in key
        self._detail: Detail | None = None
        self._shown: list[Text] = []
        self._property_lines = 0

    def compose(self) -> ComposeResult:
        yield Static(id="known")
        yield RichLog(id="body", wrap=True, markup=False, highlight=False, auto_scroll=False, min_width=0)
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Makes the reader read the details of this item."""
        self._reader.wants_log = self._log
        self._reader.open(self.key)
        self._body.write(Text("reading …", "dim"))
        keys = "Esc back  ↑↓ scroll  End follow" + ("  t transcript  l log" if "/" in self.key else "")
        self.query_one("#keys", Static).update(Text(keys, "reverse", no_wrap=True))

    def on_unmount(self) -> None:
        """Makes the reader stop reading details."""
        self._reader.wants_log = False
        self._reader.open("")

    @property
    def _body(self) -> RichLog:
        return self.query_one("#body", RichLog)

    def show(self, look: RunView) -> None:
        """Shows the result of a poll."""
        if look.snapshot is not None:
            row = look.snapshot.rollouts.of(self.key)
            lines = facts_about(row) if row else _part(self.key, look.snapshot)
            if look.problem:
                lines.append(Text(in_one_line(look.problem), "bold red"))
            grown, self._property_lines = len(lines) != self._property_lines, len(lines)
            self.query_one("#known", Static).update(_joined(lines, self.size.width), layout=grown)
        if look.detail is not None and look.detail.key == self.key:
            self._detail = look.detail
            self._fill()

    def _fill(self, anew: bool = False) -> None:
        if self._detail is None:
            return
        lines = _log(self._detail) if self._log else _transcript(self._detail)
        if lines == self._shown and not anew:
            return
        body, first = self._body, not self._shown
        at_end, top = first or body.is_vertical_scroll_end, body.scroll_offset.y
        grows = not anew and bool(self._shown) and lines[: len(self._shown)] == self._shown
        if not grows:
            body.clear()
        for line in lines[len(self._shown) :] if grows else lines:
            body.write(line)
        self._shown = lines
        if at_end:
            body.scroll_end(animate=False)
        elif not grows:
            body.scroll_to(y=top, animate=False)

    def on_resize(self) -> None:
        """Wraps lines for the new width."""
        self._fill(anew=True)

    # --- keys ---

    def action_back(self) -> None:
        self.dismiss()

    def action_transcript(self) -> None:
        self._switch(log=False)

    def action_log(self) -> None:
        self._switch(log=True)

    def _switch(self, log: bool) -> None:
        if "/" in self.key and log != self._log:
            self._log = self._reader.wants_log = log
            self._shown = []
            self._fill(anew=True)
            self._reader.wake()

    def action_scroll(self, by: int) -> None:
        """Scrolls by lines."""
        self._body.scroll_relative(y=by, animate=False)

    def action_page(self, by: int) -> None:
        """Scrolls by pages."""
        self._body.scroll_relative(y=by * max(1, self._body.size.height - 1), animate=False)

    def action_first(self) -> None:
        self._body.scroll_home(animate=False)

    def action_last(self) -> None:
        """Scrolls to the end and follows new text."""
        self._body.scroll_end(animate=False)


def facts_about(row: RolloutRow) -> list[Text]:
    """Formats the properties of a rollout, without transcript and log."""
    place, stored, live = row.place, row.stored, row.live
    lines = [Text.assemble((in_one_line(row.id), "bold"), "  ", (row.state, f"bold {STYLES.get(row.state, '')}"))]
    where = f"attempt {place.attempt + 1} on {place.node or '?'}, rank {place.rank} of pod {place.pod}" if place else ""
    lines.append(Text(in_one_line(f"{where}  {seconds(row.seconds)}".strip())))
    if live is not None:
        lines.append(Text(f"model calls {live.calls}  tokens {live.tokens:,}  {last_word(row)}"))
    if stored is not None:
        reward = "not verified" if stored.reward is None else f"reward {stored.reward:g}"
        spent = used(stored.cpu_s, stored.memory_peak_mb, stored.disk_peak_mb)
        lines.append(Text(f"{reward}  {stored.turns} turns{f'  {spent}' if spent else ''}"))
        if stored.kind or stored.error:
            lines.append(Text(in_one_line(f"{stored.kind}: {stored.error}"), "red"))
    return lines


def _part(key: str, snapshot: RunSnapshot) -> list[Text]:
    for part in [*snapshot.status["pods"], *snapshot.status["servers"]]:
        if key in (part.get("pod"), part.get("server")):
            text = "  ".join(f"{name} {value}" for name, value in part.items() if value not in ("", 0, 0.0, None))
            return [Text(in_one_line(text))]
    return [Text(in_one_line(key), "bold"), Text("not begun")]


def _joined(lines: Sequence[Text], width: int) -> Text:
    for line in lines:
        line.truncate(max(1, width), overflow="ellipsis")
    return Text("\n", no_wrap=True).join(lines)


def _transcript(detail: Detail) -> list[Text]:
    lines = [Text(f"… {detail.left_out} messages before these: megaflow-hpc show", "dim")] if detail.left_out else []
    for role, text in detail.messages:
        lines += [Text(f"── {in_one_line(role)}", f"bold {ROLE_COLOURS.get(role, 'cyan')}"), Text(printable(text))]
    return [*lines, Text(printable(detail.note), "dim")] if detail.note else lines


def _log(detail: Detail) -> list[Text]:
    return [Text(printable(line)) for line in detail.log] or [Text("there are no lines about it yet", "dim")]
