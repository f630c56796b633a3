"""Opening a running campaign through its journals, files of older versions, replaced files and large files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories import JournalWriter, gather, open_trajectories
from megaflow_hpc.trajectories.hdf5.file import datasets
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS
from tests.support.samples import commit, run_dir, trajectory


@pytest.fixture
def running(tmp_path):
    """A campaign of several pods with one rollout that ran twice."""
    run = run_dir(tmp_path / "run")
    for pod, first in (("a", 0), ("b", 30)):
        with JournalWriter(run.journal_file(pod, "0")) as journal:
            for number in range(first, first + 24):
                journal.append(
                    {"kind": "trajectory", "block": first, "epoch": 0, "trajectory": trajectory(number).to_record()}
                )
                journal.commit()
    commit(run, "c", (99, 1, trajectory(3, status="failed", error="again")), (99, 1, trajectory(77)))
    return run


def whole(store):
    return [repr(row.trajectory()) for row in store]


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_a_closed_store_says_so(running, gathered, used):
    if gathered:
        gather(running)
    with open_trajectories(running.path) as store:
        row, batches = store[0], store.batches(1000)
        if used:
            whole(store)
            assert store.lengths().any()
            assert store.ids[0] in store
    store.close()
    for use in (
        lambda: store[0], lambda: store["0"], lambda: list(store), lambda: len(store), lambda: list(store.rows([0])),
        lambda: store.ids, lambda: "0" in store, lambda: store.column("status"), lambda: store.column("tokens"),
        store.lengths, lambda: store.select("reward == 1"), lambda: store.batch([0]), lambda: next(batches),
        lambda: store.flat([0]), store.advantages, lambda: store.reward_names, lambda: row.id, lambda: row.messages,
        lambda: row.turns, lambda: row.sequences, lambda: row.artifacts, lambda: row.images, row.trajectory,
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="its store is closed"):
            use()
    assert repr(store) == f"<TrajectoryStore in {store.path}: closed>"


def test_a_running_campaign_shows_the_same_through_journals_and_file(running):
    with open_trajectories(running.path) as store:
        assert store.path == running.path
        assert len(store) == 49
        plain = whole(store)
        rows = np.random.default_rng(0).permutation(np.repeat(np.arange(49), 2))
        batch = store.batch(rows)
        good = store.select("weight_version_min == 3 and reward == 1 and turns > 2")
        advantage = store.advantages("rloo", "tests")
        everything = {
            c.path: store.source.column(c.path) for c in COLUMNS.values() if c.group in ("trajectories", "sequences")
        }
        turns = [store.source.column(f"turns/{name}") for name in ("sequence", "token_start", "token_end")]
    gather(running)
    with open_trajectories(running.path) as store:
        assert store.path == running.trajectories
        assert whole(store) == plain
        final = store.batch(rows)
        assert {name: values.tobytes() for name, values in batch.items()} == {n: v.tobytes() for n, v in final.items()}
        assert store.select("weight_version_min == 3 and reward == 1 and turns > 2").tolist() == good.tolist()
        assert store.advantages("rloo", "tests").tobytes() == advantage.tobytes()
        for path, values in everything.items():
            there = store.source.column(path)
            if there.dtype.kind in "SO":
                values, there = (
                    [v.decode() if isinstance(v, bytes) else v for v in c.tolist()] for c in (values, there)
                )
                assert list(values) == list(there), path
            else:
                assert values.tobytes() == there.tobytes(), path
        for values, name in zip(turns, ("sequence", "token_start", "token_end"), strict=True):
            assert values.tolist() == store.source.column(f"turns/{name}").tolist()


def test_a_reader_of_a_replaced_file_keeps_reading_its_own(running):
    gather(running)
    with open_trajectories(running.path) as store:
        expected = store.batch(range(20, 40))["tokens"].tobytes()
    with open_trajectories(running.path) as store:
        commit(running, "d", (100, 0, trajectory(80)))
        gather(running)
        running.trajectories.write_bytes(b"")
        assert store.batch(range(20, 40))["tokens"].tobytes() == expected


MANY = 150_000


def test_opening_reads_no_row(tmp_path):
    """The memory for opening does not grow with the rows, and reading one row reads no whole column."""
    run = run_dir(tmp_path / "run")
    commit(run, "a", *((0, 0, trajectory(n)) for n in range(3)))
    path = gather(run)
    with h5py.File(path, "r+") as file:
        for path_ in datasets(file):
            if not path_.startswith("trajectories/") or path_ == "trajectories/error":
                continue
            values, dtype = file[path_][:], file[path_].dtype
            extra = np.full(MANY, values[-1])
            if path_ == "trajectories/id":
                extra = np.array([f"many/{n}".encode() for n in range(MANY)], dtype)
            del file[path_]
            file.create_dataset(path_, data=np.concatenate([values, extra]), dtype=dtype, chunks=(4096,), compression=1)
        file["rewards/tests"].resize((MANY + 3,))
    code = (
        "import sys, tracemalloc\n"
        "from megaflow_hpc.trajectories import open_trajectories\n"
        "with open_trajectories(sys.argv[1]) as store: len(store)\n"
        "tracemalloc.start()\n"
        "with open_trajectories(sys.argv[1]) as store:\n"
        "    assert len(store) == 150003\n"
        "    assert tracemalloc.get_traced_memory()[1] < 1_000_000, tracemalloc.get_traced_memory()\n"
        "    assert store[140003].id == 'many/140000' and store[1].messages and store[2].sequences\n"
        "    assert tracemalloc.get_traced_memory()[1] < 3_000_000, tracemalloc.get_traced_memory()\n"
        "    assert store.select(\"id == 'many/7'\").tolist() == [10] and store['many/7'].index == 10\n"
    )
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, env=os.environ)
    assert result.returncode == 0, result.stderr


def test_tables_have_the_rows_turns_and_sequences_of_the_store(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", "tables")
    commit(run, "pod0", *[(0, 0, trajectory(n, f"task{n % 3}")) for n in range(9)])
    with open_trajectories(run.path) as journals:
        before = [str(journals.to_arrow(name).to_pydict()) for name in ("rollouts", "turns", "sequences")]
    gather(run, {})
    with open_trajectories(run.path) as store:
        assert [str(store.to_arrow(name).to_pydict()) for name in ("rollouts", "turns", "sequences")] == before
        frame = store.to_pandas()
        assert frame["id"].tolist() == store.ids
        assert frame["rewards/tests"].isna().sum() == 5
        turns = store.to_pandas("turns", [5, 2])
        expected = [(row.id, number, turn) for row in store.rows([5, 2]) for number, turn in enumerate(row.turns)]
        assert list(zip(turns["rollout"], turns["turn"], strict=True)) == [entry[:2] for entry in expected]
        for name in ("sequence", "token_start", "token_end", "model_s", "server", "message"):
            assert turns[name].tolist() == [getattr(turn, name) for _, _, turn in expected], name
        sequences = store.to_pandas("sequences", "reward == 1")
        kept = [(row.id, s.tokens.tolist()) for row in store.rows(store.select("reward == 1")) for s in row.sequences]
        assert [
            (id_, list(tokens)) for id_, tokens in zip(sequences["rollout"], sequences["tokens"], strict=True)
        ] == kept
        with pytest.raises(ConfigError, match="expected one of rollouts, turns, sequences"):
            store.to_arrow("turn")  # type: ignore[arg-type]
        assert repr(store) == f"<TrajectoryStore of 'tables' in {run.trajectories}: 9 trajectories>"
        assert repr(store[1]) == "<trajectory task1/default/1 completed reward=1>"
