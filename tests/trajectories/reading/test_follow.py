"""A follower yields each rollout once, only durable ones, and reads no byte twice."""

from __future__ import annotations

import io
import json
import random
import threading
from pathlib import Path

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import write_blocks
from megaflow_hpc.trajectories import JournalWriter, follow, gather, open_trajectories
from megaflow_hpc.trajectories.reading import follow as follow_module
from megaflow_hpc.trajectories.reading.follow import FULL_INTERVAL_S, QUIET_S, Follower
from megaflow_hpc.types import Rollout
from tests.support.operations import counted
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


def test_a_poll_costs_what_runs_and_not_what_has_ended(run, monkeypatch):
    """Journals of a pod's earlier starts are looked at seldom: only a delayed writer still appends to them."""
    now = [0.0]
    monkeypatch.setattr(follow_module.time, "monotonic", lambda: now[0])
    for start in range(50):
        commit(run, "pod", (start, 0, trajectory(start)), start=str(start))
    follower = Follower(run)
    assert len(follower.poll()) == 50
    with counted(run.path, whole=True) as operations:
        assert follower.poll() == []
    assert 0 < operations["looks"] < 5
    with JournalWriter(run.journal_file("late", "0")) as late:
        for number in (50, 51):
            late.append(record(number))
            late.commit()
            assert ids(follower.poll()) == [f"task/default/{number}"]
            commit(run, "late", (52 + number, 0, trajectory(100 + number)), start=str(number))
            assert ids(follower.poll()) == [f"task/default/{100 + number}"]
            now[0] += FULL_INTERVAL_S if number == 50 else 0
        late.append(record(60))
        late.commit()
        assert follower.poll() == []
        now[0] += FULL_INTERVAL_S
        assert ids(follower.poll()) == ["task/default/60"]


def test_pods_that_were_replaced_cost_a_poll_nothing(run, monkeypatch):
    """If Slurm does not requeue pods, each walltime leaves the journals of pods that never start again."""
    now = [0.0]
    monkeypatch.setattr(follow_module.time, "monotonic", lambda: now[0])
    for pod in range(50):
        commit(run, f"pod{pod}", (pod, 0, trajectory(pod)))
    follower = Follower(run)
    assert len(follower.poll()) == 50
    now[0] += QUIET_S
    assert follower.poll() == []
    with counted(run.path, whole=True) as operations:
        assert follower.poll() == []
    assert operations["looks"] < 5
    with JournalWriter(run.journal_file("slow", "0")) as slow:
        for number in (50, 51):
            slow.append(record(number))
            slow.commit()
            assert ids(follower.poll()) == [f"task/default/{number}"]
            now[0] += QUIET_S - 1
        now[0] += 1
        assert follower.poll() == []
        slow.append(record(60))
        slow.commit()
        assert follower.poll() == []
        now[0] += FULL_INTERVAL_S
        assert ids(follower.poll()) == ["task/default/60"]
        slow.append(record(61))
        slow.commit()
        assert ids(follower.poll()) == ["task/default/61"], "it grows again"


def test_a_poll_that_fails_leaves_everything_to_the_next(run, monkeypatch):
    for start in range(2):
        commit(run, "pod", (start, 0, trajectory(start)), start=str(start))
    follower, seals_of = Follower(run), follow_module.seals_of

    def away(_):
        monkeypatch.setattr(follow_module, "seals_of", seals_of)
        raise OSError("the file system is away")

    monkeypatch.setattr(follow_module, "seals_of", away)
    with pytest.raises(OSError, match="away"):
        follower.poll()
    assert ids(follower.poll()) == ["task/default/0", "task/default/1"]


def test_following_sees_what_opening_sees(run):
    commit(run, "a", *((0, 0, trajectory(n)) for n in range(6)))
    with open_trajectories(run.path) as store:
        followed = Follower(run).poll()
        assert ids(followed) == store.ids
        assert [repr(row.trajectory()) for row in followed] == [repr(row.trajectory()) for row in store]


def test_a_rollout_is_given_once_whoever_stores_it_again(run):
    follower = Follower(run, after=["task/default/3"])
    commit(run, "a", (0, 0, trajectory(1)), (0, 0, trajectory(3, status="failed")))
    assert ids(follower.poll()) == ["task/default/1"]
    commit(run, "b", (2, 1, trajectory(1)), (2, 1, trajectory(2)), (2, 1, trajectory(3)))
    assert ids(follower.poll()) == ["task/default/2"]


@pytest.mark.parametrize("status", ["failed", "cancelled"])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_success_after_a_failure_is_given_once_more(run, status, resumed):
    follower = Follower(run)

    def look() -> list[tuple[str, str]]:
        nonlocal follower
        found = [(entry.id, entry.status) for entry in follower.entries()]
        if resumed:
            follower = Follower(run, cursor=json.loads(json.dumps(follower.cursor)))
        return found

    commit(run, "a", (0, 0, trajectory(1, status=status)), (0, 0, trajectory(2)))
    assert look() == [("task/default/1", status), ("task/default/2", "completed")]
    commit(run, "b", (0, 1, trajectory(1, status="failed")))
    assert look() == []
    commit(run, "c", (0, 2, trajectory(1, status="failed")), (0, 2, trajectory(1, status="truncated")))
    assert look() == [("task/default/1", "truncated")]
    assert follower.cursor["failed"] == []
    commit(run, "d", (0, 3, trajectory(3, status="failed")), (0, 3, trajectory(3)))
    assert look() == [("task/default/3", "completed")], "the failure was superseded before anybody saw it"
    assert look() == []


def test_any_cut_of_a_campaign_into_followers_gives_every_rollout_once(run, monkeypatch):
    """Journals grow, are sealed and added, while each follower continues from the cursor of the last one."""
    draw, seals, cursor, seen = random.Random(5), {}, None, []
    monkeypatch.setattr("megaflow_hpc.trajectories.reading.follow.seals_of", lambda _: dict(seals))
    writers: list[JournalWriter | None] = [None] * 3
    epochs = [-1] * 3
    became: dict[int, str] = {}

    def look() -> None:
        nonlocal cursor
        follower = Follower(run, cursor=cursor)
        new = follower.entries()
        assert [follower.load(entry).status for entry in new] == [entry.status for entry in new]
        seen.extend((entry.id, entry.status) for entry in new)
        cursor = json.loads(json.dumps(follower.cursor))

    for step in range(300):
        block = draw.randrange(3)
        writer = writers[block]
        if writer is None or draw.random() < 0.1:
            if writer is not None:  # taken over: what its delayed holder writes from now on is void
                seals[block, epochs[block]] = ("".join(writer.path.name.rsplit(".journal", 1)), writer.committed)
                writer.append(record(10_000 + step, block=block, epoch=epochs[block]))
                writer.close()
            epochs[block] += 1
            path = run.journal_file(f"pod-{block}-{epochs[block]}", "0")
            writer = writers[block] = JournalWriter(path)
        failed = [number for number, status in became.items() if status == "failed"]
        number = draw.choice(failed) if failed and draw.random() < 0.2 else len(became)
        became[number] = "failed" if draw.random() < 0.3 else "completed"
        writer.append(record(number, block=block, epoch=epochs[block], status=became[number]))
        writer.commit()
        if draw.random() < 0.3:
            look()
    look()
    assert len(seen) == len(set(seen))
    winners = {(f"task/default/{number}", status) for number, status in became.items()}
    assert winners <= set(seen)
    assert {status for _, status in set(seen) - winners} == {"failed"}, "given before the success"
    assert cursor["failed"] == sorted(rollout for rollout, status in winners if status == "failed")
    assert len(json.dumps(cursor)) < 50 * (len(list(run.journal.iterdir())) + len(cursor["failed"]))
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("cursor", [{}, {"journals": {"a": -1}, "failed": []}, {"journals": [], "failed": [1]}])
def test_what_is_no_cursor_is_refused(run, cursor):
    with pytest.raises(ConfigError, match=r"Follower\.cursor"):
        Follower(run, cursor=cursor)


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


def bytes_read(look) -> int:
    """Bytes that this process read from files during a call."""

    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = count()
    nothing = count() - before  # what counting itself reads
    before = count()
    look()
    return count() - before - nothing


@pytest.mark.parametrize("resumed", [False, True])
def test_bytes_are_read_once(run, resumed):
    """A poll reads the new bytes, and a constant for each journal that grew."""
    buffer = 2 * io.DEFAULT_BUFFER_SIZE + 4096  # the header and the last record are read with the bytes behind them
    follower, most = Follower(run), 0
    with JournalWriter(run.journal_file("a", "0")) as journal:
        for number in range(60):
            before = journal.length
            for copy in range(10):
                journal.append(record(1000 * number + copy, messages=[{"role": "user", "content": "x" * 2000}]))
            journal.commit()
            if resumed:
                follower = Follower(run, cursor=json.loads(json.dumps(follower.cursor)))
            found = []
            read = bytes_read(lambda look=follower, found=found: found.extend(look.entries()))
            assert len(found) == 10
            if number:  # the first poll imports modules
                most = max(most, read - (journal.length - before))
            assert bytes_read(follower.entries) == 0
    assert most < buffer


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
