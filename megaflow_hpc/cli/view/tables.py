"""Tables for the list: rollouts, or pods and engines. Cells are built only for visible rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from megaflow_hpc.cli.output import seconds
from megaflow_hpc.cli.view.words import STYLES
from megaflow_hpc.monitor.live import RolloutRow, Rollouts
from megaflow_hpc.texts import in_one_line


class ViewColumn(NamedTuple):
    """A column of a list. The first column gets the remaining width."""

    head: str
    width: int = 0
    right: bool = False
    kept: bool = False
    """True to show the column at any width."""


class RolloutTable:
    """Table of rollouts, with running rollouts first."""

    columns = (
        ViewColumn("rollout"),
        ViewColumn("state", 9),
        ViewColumn("node", 10),
        ViewColumn("time", 8, True),
        ViewColumn("turns", 5, True),
        ViewColumn("now, or outcome", 15, kept=True),
    )

    def __init__(self, rollouts: Rollouts, nothing: str) -> None:
        self._rollouts = rollouts
        self.keys = rollouts.ids
        """Rollout id of each row."""
        self.nothing = nothing
        """Text to show if the table is empty."""

    def cells(self, row: int) -> tuple[Sequence[str], str]:
        """Returns the cells and the style of a row."""
        rollout = self._rollouts[row]
        turns = "" if rollout.turns is None else str(rollout.turns)
        node = rollout.place.node if rollout.place else ""
        style = "bold red" if rollout.stuck else STYLES.get(rollout.state, "")
        return (rollout.id, rollout.state, node, seconds(rollout.seconds), turns, last_word(rollout)), style


def last_word(rollout: RolloutRow) -> str:
    """Formats a rollout's outcome. While it runs, formats its current activity and how long that has lasted."""
    if rollout.stored is not None:
        reward = rollout.stored.reward
        outcome = "" if reward is None else f"reward {reward:g}"
        return rollout.stored.kind or outcome
    if rollout.live is None:
        return ""
    doing = "model" if rollout.live.waits else "agent"
    if rollout.stuck:
        doing = "stuck"
    return f"{doing} {seconds(rollout.live.quiet_s)}"


class PartTable:
    """Table of pods and engines."""

    columns = (
        ViewColumn("pod or engine"),
        ViewColumn("state", 9, kept=True),
        ViewColumn("node", 10),
        ViewColumn("run/slots", 9, True),
        ViewColumn("stored", 7, True),
        ViewColumn("tokens/s", 8, True),
    )
    nothing = "no pod has started"

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._rows = [_pod(pod) for pod in status["pods"]] + [_engine(server) for server in status["servers"]]
        self.keys = [cells[0] for cells in self._rows]

    def cells(self, row: int) -> tuple[Sequence[str], str]:
        """Returns the cells and the style of a row."""
        cells = self._rows[row]
        return cells, STYLES.get(cells[1], "")


def _pod(pod: Mapping[str, Any]) -> tuple[str, ...]:
    use, pace = f"{pod['running']}/{pod['slots']}", f"{pod['tokens_per_s']:,.0f}"
    return pod["pod"], pod["state"], pod["node"], use, str(pod["stored"]), pace


def _engine(server: Mapping[str, Any]) -> tuple[str, ...]:
    waiting = str(server["waiting"]) + " wait" if server.get("waiting") else ""
    return server["server"], server["state"], str(server.get("node") or ""), waiting, "", ""


MIN_FIRST_COLUMN_WIDTH = 12
"""Minimum width of the first column. Columns that are not kept are dropped from the right to make room for it."""


class RolloutRows(ScrollView, can_focus=True):
    """Widget that shows a table with a header and a selected row."""

    DEFAULT_CSS = "RolloutRows { overflow-x: hidden; scrollbar-size-vertical: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown,space", "page(1)", "page down", show=False),
        Binding("home", "to(0)", "first", show=False),
        Binding("end", "to(-1)", "last", show=False),
        Binding("enter", "open", "look into it", show=False),
    ]

    class Opened(Message):
        """Posted when a row is opened."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    class Moved(Message):
        """Posted when different rows become visible."""

    def __init__(self) -> None:
        super().__init__()
        self._table: RolloutTable | PartTable | None = None
        self.chosen = 0
        """Index of the selected row."""

    # --- content ---

    def show(self, table: RolloutTable | PartTable) -> None:
        """Shows a table. Keeps the selected row even if it moves, and keeps a list scrolled to the top."""
        key = self.key
        self._table = table
        if key and self.chosen and key in table.keys:
            below = self.chosen - self.scroll_offset.y
            self.chosen = table.keys.index(key)
            self.virtual_size = Size(self.size.width, len(table.keys) + 1)
            self.scroll_to(y=self.chosen - below, animate=False, immediate=True)
        self.chosen = max(0, min(self.chosen, len(table.keys) - 1))
        self.virtual_size = Size(self.size.width, len(table.keys) + 1)
        self.refresh()

    @property
    def key(self) -> str:
        """Key of the selected row. Empty if the table is empty."""
        keys = self._table.keys if self._table else ()
        return keys[self.chosen] if self.chosen < len(keys) else ""

    @property
    def on_screen(self) -> Sequence[str]:
        """Keys of the visible rows."""
        top = self.scroll_offset.y
        return self._table.keys[top : top + max(0, self.size.height - 1)] if self._table else ()

    def render_line(self, y: int) -> Strip:
        """Renders a line of the widget. The first line is the header."""
        width, table = self.size.width, self._table
        if table is None:
            return Strip.blank(width)
        if y == 0:
            return self._strip([column.head for column in table.columns], "  ", Style(bold=True))
        row = self.scroll_offset.y + y - 1
        if row >= len(table.keys):
            text = table.nothing if row == 0 else ""
            return Strip([Segment(set_cell_size(f"  {text}", width))], width)
        cells, style = table.cells(row)
        chosen = row == self.chosen
        own = Style.parse(style) if style else Style.null()
        if chosen:
            return self._strip(cells, "> ", own + Style(reverse=True))
        return self._strip(cells, "  ", own)

    def _strip(self, cells: Sequence[str], mark: str, style: Style) -> Strip:
        assert self._table is not None
        columns = self._table.columns
        fitting, left = _fitting(columns, self.size.width - len(mark))
        parts = [_fit(in_one_line(cells[0]), left, False)]
        parts += [_fit(in_one_line(cells[place]), columns[place].width, columns[place].right) for place in fitting]
        return Strip([Segment(set_cell_size(mark + " ".join(parts), self.size.width), style)], self.size.width)

    # --- selection ---

    def action_move(self, by: int) -> None:
        """Moves the selection by ``by`` rows."""
        self._choose(self.chosen + by)

    def action_page(self, by: int) -> None:
        """Moves the selection by pages."""
        self._choose(self.chosen + by * max(1, self.size.height - 2))

    def action_to(self, row: int) -> None:
        """Selects a row. Negative indices count from the end."""
        rows = len(self._table.keys) if self._table else 0
        self._choose(row if row >= 0 else rows + row)

    def action_open(self) -> None:
        if self.key:
            self.post_message(self.Opened(self.key))

    def on_resize(self) -> None:
        """Keeps the selected row visible."""
        self._choose(self.chosen)

    def _choose(self, row: int) -> None:
        self.chosen = max(0, min(row, len(self._table.keys if self._table else ()) - 1))
        top, height = self.scroll_offset.y, max(1, self.size.height - 1)
        if not top <= self.chosen < top + height:
            self.scroll_to(y=self.chosen - (0 if self.chosen < top else height - 1), animate=False, immediate=True)
        self.refresh()
        self.post_message(self.Moved())


def _fitting(columns: Sequence[ViewColumn], width: int) -> tuple[list[int], int]:
    """Returns the indices of the columns that fit after the first one, and the width of the first column."""
    places = list(range(1, len(columns)))
    while True:
        left = width - sum(columns[place].width + 1 for place in places)
        droppable = [place for place in places if not columns[place].kept]
        if left >= MIN_FIRST_COLUMN_WIDTH or not droppable:
            return places, max(1, left)
        places.remove(droppable[-1])


def _fit(text: str, width: int, right: bool) -> str:
    """Truncates or pads a cell. Shortens long text in the middle, because ids differ at both ends."""
    if cell_len(text) > width > 3:
        tail = (width - 1) // 2
        text = set_cell_size(set_cell_size(text, width - 1 - tail).rstrip() + "…" + text[-tail:], width).rstrip()
    return " " * (width - cell_len(text)) + text if right else set_cell_size(text, width)
