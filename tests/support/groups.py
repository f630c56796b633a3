"""Samples and groups as data algorithms see them: by hand, and any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from megaflow_hpc.training.algorithms.samples import Sample, SampleGroup


def sample(group: str = "t/p", index: int = 0, reward: float = 0.0, **fields: Any) -> Sample:
    """A verified sample of task ``t``, with ten sampled tokens."""
    known: dict[str, Any] = {
        "id": f"{group}/{index}",
        "task": group.partition("/")[0].partition("@")[0],
        "group": group,
        "index": index,
        "status": "completed",
        "error_kind": "",
        "reward": reward,
        "rewards": {},
        "oldest": 0,
        "newest": 0,
        "tokens": 10,
        "longest": 20,
        "time_ns": index,
    }
    return Sample(**{**known, **fields})


def failed(group: str, index: int, kind: str = "sandbox") -> Sample:
    """A sample that infrastructure has failed."""
    return sample(group, index, math.nan, status="failed", error_kind=kind, oldest=-1, newest=-1, tokens=0)


def group(values: Sequence[float], name: str = "t/p", **fields: Any) -> SampleGroup:
    """A group of verified samples with these rewards."""
    samples = tuple(sample(name, i, value, **fields) for i, value in enumerate(values))
    return SampleGroup(name, name.partition("/")[0].partition("@")[0], samples)


_ROWS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5, math.nan, None]),
        st.booleans(),
        st.integers(0, 6),
        st.sampled_from([0, 10, 60, 80, 200]),
        st.integers(0, 9),
    ),
    max_size=20,
)


def groups() -> st.SearchStrategy[list[SampleGroup]]:
    """Some groups of one policy: of any status, reward and age; failures and a group without samples among them."""
    return _ROWS.map(_grouped)


def _grouped(rows: list[tuple[int, float | None, bool, int, int, int]]) -> list[SampleGroup]:
    made: dict[int, list[Sample]] = {7: []}
    for number, reward, cut, oldest, tokens, time_ns in rows:
        name, there = _name(number), made.setdefault(number, [])
        if reward is None:
            there.append(failed(name, len(there)))
            continue
        status = "truncated" if cut else "completed"
        there.append(sample(name, len(there), reward, status=status, oldest=oldest, tokens=tokens, time_ns=time_ns))
    return [SampleGroup(_name(number), f"task-{number % 4}", tuple(there)) for number, there in made.items()]


def _name(number: int) -> str:
    return f"task-{number % 4}@{number}/p"
