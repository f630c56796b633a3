"""Reads all that a store of trajectories can tell."""

from __future__ import annotations

from typing import Any

from megaflow_hpc.trajectories.hdf5.schema import COLUMNS
from megaflow_hpc.trajectories.reading.store import TrajectoryStore

_PARTS = ("rewards", "messages", "sequences", "turns", "attempts", "artifacts")
_SCALARS = sorted(c.name for c in COLUMNS.values() if c.group == "trajectories" and c.extent == "n")


def everything(store: TrajectoryStore) -> dict[str, str]:
    """Each thing that is read, by name, as text; unequal things have unequal texts."""
    found: dict[str, str] = {}
    for row in store:
        for name in (*_PARTS, *_SCALARS):
            found[f"row {row.index} {name}"] = _text(getattr(row, name))
    for name in (*_SCALARS, *(f"rewards/{name}" for name in store.reward_names)):
        found[name] = _text(store.column(name).tolist())
    found["lengths"] = _text(store.lengths().tolist())
    for name, values in store.batch(range(len(store))).items():
        found[f"batch {name}"] = _text(values.tolist())
    found["chosen"] = _text(store.select("reward >= 0 or status == 'failed'").tolist())
    found["versions"] = _text(sorted(store.versions))
    return found


def _text(value: Any) -> str:
    if isinstance(value, list) and value and hasattr(value[0], "logprobs"):
        return repr([(v.policy, *(getattr(v, name).tolist() for name in _TOKENS)) for v in value])
    return repr(value)


_TOKENS = ("tokens", "logprobs", "loss_mask", "weight_versions")
