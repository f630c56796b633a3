"""Unpacked bases and layers that builds share: how long they stay."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from megaflow_hpc.environments.builds.trees import Trees

GB = 10**9


class Disk(NamedTuple):
    """As :func:`shutil.disk_usage` tells it."""

    total: int
    used: int
    free: int


@pytest.mark.parametrize(
    ("disk", "stay"),
    [
        (Disk(250 * GB, 190 * GB, 60 * GB), ["a", "b"]),  # less than a quarter, and plenty
        (Disk(24 * GB, 16 * GB, 8 * GB), ["a", "b"]),
        (Disk(250 * GB, 240 * GB, 10 * GB), []),
        (Disk(24 * GB, 20 * GB, 4 * GB), []),
    ],
)
def test_trees_stay_for_the_next_build_as_long_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, stay: list[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    trees, made = Trees(tmp_path), list[str]()

    def make(target: Path) -> None:
        target.mkdir()
        made.append(target.name)

    with trees.holding() as first:
        first("a", make)
        with trees.holding() as second:
            second("b", make)
        assert (tmp_path / "trees" / "a").is_dir(), "it is in use"
    assert sorted(path.name for path in (tmp_path / "trees").iterdir()) == stay
    with trees.holding() as third:
        third("a", make)
    assert len(made) == (2 if stay else 3)
