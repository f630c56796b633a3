"""What the list shows: rollouts, or pods and engines; cells are made of a row when it is on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from megaflow_hpc.cli.output import seconds
from megaflow_hpc.cli.view.words import STYLES
from megaflow_hpc.monitor.live import RolloutRow, Rollouts


class ViewColumn(NamedTuple):
    """A column of a list; the first one takes the width that others leave."""

    head: str
    width: int = 0
    right: bool = False


class ViewTable(Protocol):
    """Rows that a list can show."""

    @property
    def columns(self) -> Sequence[ViewColumn]:
        """Its columns, of which the first takes what width is left."""

    @property
    def keys(self) -> Sequence[str]:
        """What each row is called."""

    @property
    def nothing(self) -> str:
        """What is said where there is no row."""

    def cells(self, row: int) -> tuple[Sequence[str], str]:
        """Returns the cells of a row, and its style."""


class RolloutTable:
    """Rollouts, those that run first."""

    columns = (
        ViewColumn("rollout"),
        ViewColumn("state", 9),
        ViewColumn("node", 10),
        ViewColumn("time", 8, True),
        ViewColumn("turns", 5, True),
        ViewColumn("now, or outcome", 15),
    )

    def __init__(self, rollouts: Rollouts, nothing: str) -> None:
        self._rollouts, self.keys, self.nothing = rollouts, rollouts.ids, nothing

    def cells(self, row: int) -> tuple[Sequence[str], str]:
        """Returns the cells of a row, and its style."""
        rollout = self._rollouts[row]
        turns = "" if rollout.turns is None else str(rollout.turns)
        node = rollout.place.node if rollout.place else ""
        style = "bold red" if rollout.stuck else STYLES.get(rollout.state, "")
        return (rollout.id, rollout.state, node, seconds(rollout.seconds), turns, last_word(rollout)), style


def last_word(rollout: RolloutRow) -> str:
    """What a rollout does now and for how long, or what came of it."""
    if rollout.stored is not None:
        reward = rollout.stored.reward
        outcome = "" if reward is None else f"reward {reward:g}"
        return rollout.stored.kind or outcome
    if rollout.live is None:
        return ""
    doing = "stuck" if rollout.stuck else "model" if rollout.live.waits else "agent"
    return f"{doing} {seconds(rollout.live.quiet_s)}"


class PartTable:
    """Pods and engines."""

    columns = (
        ViewColumn("pod or engine"),
        ViewColumn("state", 9),
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
        """Returns the cells of a row, and its style."""
        cells = self._rows[row]
        return cells, STYLES.get(cells[1], "")


def _pod(pod: Mapping[str, Any]) -> tuple[str, ...]:
    use, pace = f"{pod['running']}/{pod['slots']}", f"{pod['tokens_per_s']:,.0f}"
    return pod["pod"], pod["state"], pod["node"], use, str(pod["stored"]), pace


def _engine(server: Mapping[str, Any]) -> tuple[str, ...]:
    waiting = str(server["waiting"]) + " wait" if server.get("waiting") else ""
    return server["server"], server["state"], str(server.get("node") or ""), waiting, "", ""
