"""The file of tasks. Each task is read on access, and a damaged file is named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megaflow_hpc.errors import ConfigError, LedgerError
from megaflow_hpc.ledger import write_blocks
from megaflow_hpc.ledger.tasks import PlannedTask, TaskFile, image_files, planned_tasks, write_tasks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, read_run, write_run
from megaflow_hpc.types import Rollout, Task
from tests.support.ledgers import prepared
from tests.support.pods import IoPod

COUNT = 400


def task(number: int) -> PlannedTask:
    made = Task(f"t{number}", "x" * 3000, f"image{number % 7}", "/tasks", metadata={"of": number, "nan": float("nan")})
    return PlannedTask(made.to_dict(), {made.image: f"/images/{number % 7}.sif"}, 57)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = prepared(tmp_path / "run")
    write_run(run, RunRecord(campaign={"name": "x"}, packed=write_tasks(run, (task(n) for n in range(COUNT)))))
    return run


def tasks_of(run: RunDir) -> TaskFile:
    found = planned_tasks(run, read_run(run))
    assert isinstance(found, TaskFile)
    return found


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_tasks_are_found_by_id_and_come_in_the_order_of_the_plan(run: RunDir) -> None:
    tasks = tasks_of(run)
    assert len(tasks) == COUNT
    assert list(tasks) == [f"t{n}" for n in range(COUNT)]
    for n in (0, 17, COUNT - 1):
        found, wanted = tasks[f"t{n}"], task(n)
        assert math.isnan(found.task["metadata"].pop("nan"))
        del wanted.task["metadata"]["nan"]
        assert Task.from_dict(found.task) == Task.from_dict(wanted.task)
        assert (found.images, found.alike) == (wanted.images, wanted.alike)
    assert [planned.task["id"] for planned in tasks.values()] == list(tasks)
    assert "t17" in tasks
    assert "t1000" not in tasks
    assert Task.from_dict(tasks["t3"].task).image == "image3"
    assert image_files(tasks) == {f"image{n}": f"/images/{n}.sif" for n in range(7)}


def test_a_pod_reads_the_tasks_of_the_blocks_that_it_claims_and_no_others(run: RunDir) -> None:
    write_blocks(run, [Rollout(f"t{n}", "p", s, "nop") for n in range(COUNT) for s in range(4)], size=40)
    pod = IoPod(run, tasks=tasks_of(run))
    began = bytes_read()
    block = pod.claim()
    read = bytes_read() - began
    assert list(block.tasks) == [f"t{n}" for n in range(10)]
    size = run.packed_tasks.stat().st_size
    block_size = run.block(0).stat().st_size
    assert read < 2 * (size * 10 / COUNT + COUNT * 20 + block_size + run.run_json.stat().st_size), read
    assert read < size / 10


@pytest.mark.parametrize("index", [None, b"", b"MFHPCTSK", "flipped", "of another run"])
def test_without_a_whole_index_lines_are_counted(run: RunDir, tmp_path: Path, index: bytes | str | None) -> None:
    whole = run.tasks_index.read_bytes()
    run.tasks_index.unlink()
    if index == "flipped":
        run.tasks_index.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    elif index == "of another run":
        other = RunDir(tmp_path / "other")
        other.create()
        write_tasks(other, (task(n + 1) for n in range(COUNT)))
        run.tasks_index.write_bytes(other.tasks_index.read_bytes())
    elif isinstance(index, bytes):
        run.tasks_index.write_bytes(index)
    assert tasks_of(run)["t17"].task["id"] == "t17"


def test_what_is_wrong_with_the_file_is_said(run: RunDir) -> None:
    whole = run.packed_tasks.read_bytes()
    run.packed_tasks.write_bytes(whole[:-10])
    with pytest.raises(ConfigError, match=r"tasks\.jsonl: it has \d+ bytes, but run\.json says"):
        list(tasks_of(run))
    run.packed_tasks.write_bytes(b"{" * len(whole))
    with pytest.raises(ConfigError, match=r"tasks\.jsonl: one of its lines is not a task"):
        tasks_of(run)["t17"]
    run.packed_tasks.unlink()
    with pytest.raises(ConfigError, match=r"tasks\.jsonl: it is gone"):
        tasks_of(run)["t17"]


def test_a_block_of_a_task_that_was_never_planned_is_named(run: RunDir) -> None:
    write_blocks(run, [Rollout("nobody", "p", 0, "nop")], size=1)
    with pytest.raises(LedgerError, match="'nobody'"):
        IoPod(run, tasks=tasks_of(run)).claim()


def test_lines_are_plain_json(run: RunDir) -> None:
    first = json.loads(run.packed_tasks.read_text().splitlines()[0])
    assert sorted(first) == ["alike", "images", "task"]
    assert sorted(path.name for path in run.path.glob("tasks*")) == ["tasks", "tasks.index", "tasks.jsonl"]
