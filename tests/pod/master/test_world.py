"""The master over real MPI, ledger and journal: causes of failure, bad ranks, groups, copies, limits of a campaign."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.host.wire import WireLink
from megaflow_hpc.ledger import Ledger, OpenLease, write_blocks
from megaflow_hpc.ledger.tasks import PlannedTask, write_tasks
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.pod.comm import ChildComm
from megaflow_hpc.pod.scheduling.failures import RULES
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import WHY_DRAIN
from megaflow_hpc.rundir.record import RunRecord, write_run
from megaflow_hpc.trajectories import gather, open_trajectories
from megaflow_hpc.trajectories.journal.frames import read_journal
from megaflow_hpc.types import Rollout
from tests.support import world


class Played:
    """The results of a world."""

    def __init__(self, run: RunDir, state: str) -> None:
        self.run, self.state = run, state
        records = [record for file in run.journal.iterdir() for _, record in read_journal(file)]
        self.stored = [record["trajectory"] for record in records if record["kind"] == "trajectory"]

    def of(self, event: str) -> list[dict[str, Any]]:
        return world.events(self.run, event)

    @property
    def whys(self) -> list[str]:
        return [event["why"] for event in self.of("pod") if event["state"] == "draining"]


def prepare(tmp_path: Path, tasks: Sequence[str], each: int = 1, **settings: Any) -> RunDir:
    rollouts = [Rollout(task, "p", n, "a") for task in tasks for n in range(each)]
    return world.prepare(tmp_path / "run", rollouts, **settings)


def play(tmp_path: Path, tasks: Sequence[str], ranks: int = 2, each: int = 1, **settings: Any) -> Played:
    """Plays a world of rank 0 and ``ranks`` workers from its start to its end."""
    return turn(prepare(tmp_path, tasks, each, **settings), ranks)


def turn(run: RunDir, ranks: int = 2) -> Played:
    """Plays one start of the pod of an existing world."""
    (run.report / "state").unlink(missing_ok=True)
    command = [*world.launcher(ranks + 1), sys.executable, "-m", "tests.support.world", str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.report / "state").exists(), done.stderr
    return Played(run, (run.report / "state").read_text())


@pytest.mark.parametrize("ranks", [1, 5])  # two in the other tests
def test_every_rollout_is_stored_once_with_so_many_worker_ranks(tmp_path: Path, ranks: int) -> None:
    played = play(tmp_path, [f"ok_{n}" for n in range(150)], ranks, each=2)
    assert played.state == "done"
    assert Counter(t["id"] for t in played.stored) == {f"ok_{n}/p/{s}": 1 for n in range(150) for s in range(2)}
    assert {t["status"] for t in played.stored} == {"completed"}
    assert len(played.of("rollout")) == 300
    assert {entry["rank"] for entry in played.of("worker")} == set(range(1, ranks + 1))


@pytest.mark.parametrize("cuts", [1, 2])
def test_an_interrupted_rollout_continues_in_the_next_pod_until_it_was_interrupted_too_often(
    tmp_path: Path, cuts: int
) -> None:
    run = prepare(tmp_path, ["fails_sandbox-lost_b", "cut_a"])
    for start in range(5):  # a retry of b may be cut short as well, by the drain that a brings about
        world.configure(run, start=str(start), max_interruptions=cuts)
        played = turn(run)
        if played.state == "done":
            break
        assert played.state == "drained"
        (run.partial / "half.json").write_text('{"rollouts": {"cut_a/p/0":')  # its pod was killed while writing it
    assert played.state == "done"
    assert start >= cuts
    stored = {trajectory["task_id"]: trajectory for trajectory in played.stored}
    failed, stored = (stored[name] for name in ("fails_sandbox-lost_b", "cut_a"))
    assert [attempt["attempt"] for attempt in failed["attempts"]] == [0, 1, 2], "retries are counted on"
    kinds = [(attempt["attempt"], attempt["status"], attempt["error_kind"]) for attempt in stored["attempts"]]
    first, second = (0, "cancelled", "walltime"), (1, "cancelled", "walltime")
    if cuts == 2:
        assert kinds == [first, second, (2, "completed", "")]
        assert stored["reward"] == 1.0, "each attempt gets what the last one left"
    else:
        assert kinds == [first, (1, "failed", "walltime")]
        assert (stored["status"], stored["error_kind"]) == ("failed", "walltime")
        assert "allocations ended 2 times before it did" in stored["error"]
        assert "resume RUN --failed --time" in stored["error"]
    assert [entry["kind"] for entry in played.of("attempt") if entry["id"] == "cut_a/p/0"] == ["walltime"] * 2
    assert not run.partial.exists()


@pytest.mark.slow  # four starts of a pod, each with a walltime of its own
def test_what_ends_a_pod_is_said_and_a_rollout_that_no_walltime_holds_fails_after_two(tmp_path: Path) -> None:
    run = prepare(tmp_path, ["late_a"])
    for start, word in enumerate(["cancelled", "now", "walltime", "walltime"]):
        world.configure(run, start=str(start), drain={"word": word, "whole_s": 0.6})
        played = turn(run, ranks=1)
        assert WHY_DRAIN[word] in played.whys
    assert played.state == "done", "nothing is left for which its element should be queued again"
    (stored,) = played.stored
    assert (stored["status"], stored["error_kind"]) == ("failed", "walltime")
    assert "the walltime ended it 2 times in a row" in stored["error"]
    assert "resume RUN --failed --time" in stored["error"]
    kinds = [(attempt["status"], attempt["error_kind"]) for attempt in stored["attempts"]]
    assert kinds == [("cancelled", ""), ("cancelled", "preemption"), ("cancelled", "walltime"), ("failed", "walltime")]
    write_run(run, RunRecord(campaign={"name": "x"}, total=1))
    assert Monitor(run).status()["retries"] == {"preemption": 1, "walltime": 2}


def test_a_pod_of_one_process_does_the_same(tmp_path: Path) -> None:
    run = prepare(tmp_path, [f"ok_{n}" for n in range(50)])
    ours, theirs = socket.socketpair()

    def serve() -> None:
        player, link = world.Player(1, run), WireLink(theirs)
        with theirs:
            while True:
                message = link.receive()
                if message is None:
                    continue
                if message["op"] == "stop":
                    return
                for answer in player.answer(message):
                    link.send(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    played = Played(run, world.lead(run, ChildComm(WireLink(ours))))
    thread.join()
    ours.close()
    assert played.state == "done"
    assert sorted(t["id"] for t in played.stored) == sorted(f"ok_{n}/p/0" for n in range(50))


def test_each_cause_has_its_own_bound_and_the_rest_goes_on(tmp_path: Path) -> None:
    causes = ["model", "sandbox-start", "sandbox-lost", "user"]
    played = play(tmp_path, [*(f"fails_{cause}" for cause in causes), *(f"ok_{n}" for n in range(40))])
    assert played.state == "done"
    failed = {t["task_id"].removeprefix("fails_"): t for t in played.stored if t["status"] == "failed"}
    assert {cause: t["attempt"] for cause, t in failed.items()} == {cause: RULES[cause].retries for cause in causes}
    assert {cause: t["error_kind"] for cause, t in failed.items()} == {cause: RULES[cause].kind for cause in causes}
    assert sum(t["status"] == "completed" for t in played.stored) == 40
    assert Counter(entry["kind"] for entry in played.of("attempt")) == {
        cause: RULES[cause].retries for cause in causes if RULES[cause].retries
    }


def test_a_rank_on_which_no_sandbox_starts_is_left_out_and_named(tmp_path: Path) -> None:
    played = play(tmp_path, [f"badnode_{n}" for n in range(120)])
    assert played.state == "done"
    assert {t["status"] for t in played.stored} == {"completed"}
    assert len(played.stored) == 120
    (excluded,) = [entry for entry in played.of("worker") if entry["state"] == "excluded"]
    assert (excluded["rank"], excluded["node"]) == (1, "node1")
    assert "sandboxes do not start on node1" in excluded["why"]
    write_run(played.run, RunRecord(campaign={"name": "bad"}, total=120))
    (pod,) = Monitor(played.run).status()["pods"]
    assert list(pod["excluded"]) == ["node1"]
    assert pod["workers"] == 1


def test_failures_that_look_systematic_pause_the_pod_and_give_the_rest_back(tmp_path: Path) -> None:
    played = play(tmp_path, [f"fails_user_{n}" for n in range(400)], systematic_last=20)
    assert played.state == "paused"
    assert 20 <= len(played.stored) < 400
    assert "failed for one cause, user" in played.whys[0]
    claimed, done, released = (
        {path.name.split(".")[0] for path in (played.run.ledger / name).iterdir()}
        for name in ("claims", "done", "released")
    )
    assert claimed == done | released, "no block stays held"


def test_a_group_is_closed_at_its_rewards_and_the_rest_cancelled_also_where_it_runs(tmp_path: Path) -> None:
    played = play(
        tmp_path, [f"late_{n}" for n in range(20)], each=5, scheduling={"spare": 3},
        samples={"p": 2},
    )  # fmt: skip
    assert played.state == "done"
    assert len({t["id"] for t in played.stored}) == len(played.stored) == 100
    statuses = {t["id"]: t["status"] for t in played.stored}
    for n in range(20):
        group = [statuses[f"late_{n}/p/{sample}"] for sample in range(5)]
        assert group[0] == "cancelled", "the one that never ends was told to stop"
        assert group.count("completed") >= 2
        assert set(group) == {"completed", "cancelled"}
    assert "the 2 rewards that were asked for" in next(t["error"] for t in played.stored if t["error"])


def test_a_task_that_is_asked_again_is_a_group_of_its_own(tmp_path: Path) -> None:
    run = prepare(tmp_path, [], scheduling={"signal_after": 2})
    samples = {0: (0, 2), 3: (1, 5), 12: (0, 5)}
    write_blocks(run, [Rollout("mixed_a", "p", n, "a", again) for again, both in samples.items() for n in both])
    packed = write_tasks(run, [PlannedTask({"id": "mixed_a"}, {})])
    write_run(run, RunRecord(campaign={"name": "x"}, packed=packed, total=6))
    played = turn(run)
    named = {t["id"]: (t["task_id"], t["group_id"], t["sample_index"]) for t in played.stored}
    names = {"": (0, 2), "@3": (1, 5), "@12": (0, 5)}
    assert named == {
        f"mixed_a{again}/p/{n}": ("mixed_a", f"mixed_a{again}/p", n) for again, both in names.items() for n in both
    }
    gather(run, Ledger(run).seals())
    with open_trajectories(run.path) as store:
        found = dict(zip(store.column("id").tolist(), store.advantages("drgrpo").tolist(), strict=True))
    assert {name: value for name, value in found.items() if value} == {"mixed_a@12/p/0": -0.5, "mixed_a@12/p/5": 0.5}
    monitor = Monitor(run)
    monitor.list_rollouts()
    monitor.refresh()
    assert monitor.summary()["p"]["evaluation"]["tasks"] == 1


def test_rules_of_groups_do_not_touch_the_tasks_that_training_is_evaluated_on(tmp_path: Path) -> None:
    tasks = [f"solved_{n}" for n in range(12)]
    played = play(tmp_path, tasks, each=8, held_out=tasks[:6], scheduling={"signal_after": 2})
    completed = Counter(t["task_id"] for t in played.stored if t["status"] == "completed")
    assert [completed[task] for task in tasks[:6]] == [8] * 6
    assert sum(completed[task] for task in tasks[6:]) < 6 * 8


def test_a_pod_leaves_when_who_may_add_rollouts_has_not_renewed_for_long(tmp_path: Path) -> None:
    run = prepare(tmp_path, ["ok_a"], open_s=1.0)
    lease = OpenLease(run, "learner")
    lease.put()
    played = turn(run)
    assert played.state == "drained"
    assert "no consumer that may add blocks has renewed its lease for long" in played.whys[0]
    assert [t["id"] for t in played.stored] == ["ok_a/p/0"]
    assert not Ledger(run).finished
    lease.close()
    assert Ledger(run).finished


def test_groups_without_signal_are_dropped(tmp_path: Path) -> None:
    tasks = [f"{kind}_{n}" for n in range(30) for kind in ("solved", "mixed")]
    played = play(tmp_path, tasks, each=8, scheduling={"signal_after": 2})
    assert played.state == "done"
    assert len({t["id"] for t in played.stored}) == len(played.stored) == 480
    done = Counter(t["task_id"].partition("_")[0] for t in played.stored if t["status"] == "completed")
    assert done["mixed"] > 200, "a group of both rewards is dropped only if its first two happen to be equal"
    assert 30 * 2 <= done["solved"] < 240, "two of each group, and others that ran by then"


def test_a_limit_of_the_whole_campaign_pauses_the_pod(tmp_path: Path) -> None:
    played = play(tmp_path, [f"ok_{n}" for n in range(6_000)], limits={"wall": 1e-6})
    assert played.state == "paused"
    assert "limits.wall is 1e-06" in played.whys[0]
    assert 0 < len(played.stored) < 6_000
