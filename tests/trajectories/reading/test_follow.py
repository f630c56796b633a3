"""Following a campaign: each rollout once, only what is durable, and nothing read twice."""

from __future__ import annotations

import builtins
import threading

import pytest

from megaflow_hpc.ledger import write_blocks
from megaflow_hpc.trajectories import JournalWriter, follow, gather, open_trajectories
from megaflow_hpc.trajectories.reading.follow import Follower
from megaflow_hpc.types import Rollout
from tests.support.samples import commit, run_dir, trajectory


@pytest.fixture
def run(tmp_path):
    return run_dir(tmp_path / "run")


def record(number: int, block: int = 0, epoch: int = 0, **changes):
    return {
        "kind": "trajectory",
        "block": block,
        "epoch": epoch,
        "trajectory": trajectory(number, **changes).to_record(),
    }


def ids(rows) -> list[str]:
    return [row.id for row in rows]


def test_rows_appear_as_they_are_committed_and_stay_readable(run):
    follower = Follower(run)
    assert follower.poll() == []
    with JournalWriter(run.journal_file("a", "0")) as journal:
        journal.append(record(4))
        assert follower.poll() == []
        journal.commit()
        (row,) = follower.poll()
        assert follower.poll() == []
        journal.append(record(5))
        journal.append(record(6))
        journal.commit()
        commit(run, "b", (1, 0, trajectory(7)))
        assert ids(follower.poll()) == [f"task/default/{n}" for n in (5, 6, 7)]
    gather(run)
    assert row.messages == trajectory(4).messages
    assert [len(s.tokens) for s in row.sequences] == [len(s.tokens) for s in trajectory(4).sequences]
    assert follower.poll() == []


def test_following_sees_what_opening_sees(run):
    commit(run, "a", *((0, 0, trajectory(n)) for n in range(6)))
    with open_trajectories(run.path) as store:
        followed = Follower(run).poll()
        assert ids(followed) == store.ids
        assert [repr(row.trajectory()) for row in followed] == [repr(row.trajectory()) for row in store]


def test_a_rollout_is_given_once_whoever_stores_it_again(run):
    follower = Follower(run, after=["task/default/3"])
    commit(run, "a", (0, 0, trajectory(1, status="failed")), (0, 0, trajectory(3)))
    assert [(row.id, row.status) for row in follower.poll()] == [("task/default/1", "failed")]
    commit(run, "b", (2, 1, trajectory(1)), (2, 1, trajectory(2)))
    assert ids(follower.poll()) == ["task/default/2"]


def test_what_lies_behind_a_seal_is_never_given(run):
    seals = {}
    follower = Follower(run, seals=lambda: seals)
    journal = JournalWriter(run.journal_file("a", "0"))
    journal.append(record(1, block=3))
    seals[3, 0] = ("a.0", journal.commit())
    journal.append(record(2, block=3))
    journal.append(record(4, block=4))
    journal.close()
    commit(run, "b", (3, 1, trajectory(2)))
    assert ids(follower.poll()) == [f"task/default/{n}" for n in (1, 4, 2)]


def test_a_torn_record_is_waited_for(run):
    path = run.journal_file("a", "0")
    commit(run, "a", (0, 0, trajectory(1)), (0, 0, trajectory(2)))
    whole = path.read_bytes()
    follower = Follower(run)
    seen = []
    for size in range(0, len(whole) + 1, 97):
        path.write_bytes(whole[:size])
        seen += ids(follower.poll())
    path.write_bytes(whole)
    assert seen + ids(follower.poll()) == ["task/default/1", "task/default/2"]


def test_rotated_journals_are_followed(run):
    follower = Follower(run)
    seen = []
    with JournalWriter(run.journal_file("a", "0"), rotate_bytes=2000) as journal:
        for number in range(30):
            journal.append(record(number))
            journal.commit()
            if number % 7 == 0:
                seen += ids(follower.poll())
    seen += ids(follower.poll())
    assert len(list(run.journal.iterdir())) > 3
    assert seen == [f"task/default/{n}" for n in range(30)]


def test_bytes_are_read_once(run, monkeypatch):
    """Polling a growing journal reads in proportion to what is new, not to what is there."""
    read = 0
    plain_open = builtins.open

    def counting(path, mode="r", *args, **kwargs):
        file = plain_open(path, mode, *args, **kwargs)
        if str(path).endswith(".journal") and mode == "rb":
            plain_read = file.read

            class Counted:
                def __getattr__(self, name):
                    return getattr(file, name)

                def __enter__(self):
                    return self

                def __exit__(self, *_):
                    file.close()

                def read(self, size=-1):
                    nonlocal read
                    data = plain_read(size)
                    read += len(data)
                    return data

            return Counted()
        return file

    monkeypatch.setattr(builtins, "open", counting)
    follower = Follower(run)
    with JournalWriter(run.journal_file("a", "0")) as journal:
        for number in range(60):
            journal.append(record(number % 6 + 6 * number))
            journal.commit()
            assert len(follower.poll()) == 1
    size = run.journal_file("a", "0").stat().st_size
    assert size < read < 2 * size


def test_the_stream_ends_behind_the_last_rollout(run):
    done = threading.Event()
    seen: list[str] = []
    started = threading.Event()

    def read() -> None:
        for row in follow(run, done.is_set, after=["task/default/0"], poll_s=0.01):
            seen.append(row.id)
            started.set()

    reader = threading.Thread(target=read)
    reader.start()
    with JournalWriter(run.journal_file("a", "0")) as journal:
        for number in range(20):
            journal.append(record(number))
            journal.commit()
        assert started.wait(30)
        journal.append(record(20))
        journal.commit()
        done.set()
    reader.join(30)
    assert not reader.is_alive()
    assert seen == [f"task/default/{n}" for n in range(1, 21)]


def test_a_result_without_journals_is_followed_from_its_file(run):
    commit(run, "a", *((0, 0, trajectory(n)) for n in range(4)))
    gather(run)
    run.journal_file("a", "0").unlink()
    rows = follow(run, lambda: True, after=["task/default/2"])
    assert [(row.id, len(row.messages)) for row in rows] == [(f"task/default/{n}", 2) for n in (0, 1, 3)]


def test_the_end_of_a_finished_campaign_is_waited_for_where_a_cache_still_hides_it(run):
    write_blocks(run, [Rollout("task", "default", number, "nop") for number in range(2)])
    run.ledger.joinpath("finished").touch()
    commit(run, "a", (0, 0, trajectory(0)))
    shown = threading.Timer(0.3, commit, (run, "b", (0, 0, trajectory(1))))
    shown.start()
    assert ids(follow(run, lambda: True, poll_s=0.05)) == ["task/default/0", "task/default/1"]
    shown.join()
