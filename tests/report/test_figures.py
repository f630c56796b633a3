"""Figures are computed from the rollouts, whatever they are read from. Comparisons are paired by task."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.monitor.evaluation import mean_interval, wilson
from megaflow_hpc.monitor.usage import JobUse, totals
from megaflow_hpc.report import transcripts as module
from megaflow_hpc.report.comparison import Difference, compare, matrix_of, paired_interval, sign_flip_test
from megaflow_hpc.report.cost import Prices
from megaflow_hpc.report.figures import LoadedRun, RunFigures, figures_of, to_builtins
from megaflow_hpc.report.files import charts_of, prometheus_text
from megaflow_hpc.report.page import page
from megaflow_hpc.report.policies import STAGES, Arm
from megaflow_hpc.report.rollouts import attempt_spans, read_rollouts
from megaflow_hpc.report.series import lanes, mean_level, peak_level, thinned
from megaflow_hpc.report.timeline import bars_of
from megaflow_hpc.report.transcripts import Wanted, chosen, messages_of, transcripts
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import FINISHED
from megaflow_hpc.rundir.record import RunRecord, write_run
from megaflow_hpc.rundir.training import Commit
from megaflow_hpc.training.plan import TrainingFiles
from megaflow_hpc.trajectories import gather, open_trajectories
from megaflow_hpc.trajectory import CALLS_FILE, Attempt, Turn
from megaflow_hpc.types import Artifact
from tests.support import samples
from tests.support.training import training_run


def test_figures_are_those_of_the_rollouts(attacked: RunDir) -> None:
    found = figures_of(attacked.path)
    assert (found.stored, found.total, found.state) == (48, 50, "unfinished")
    assert found.states == {"completed": 46, "truncated": 0, "failed": 2, "cancelled": 0}
    first, second = found.policies
    assert (first.policy, first.rollouts, second.rollouts) == ("first", 24, 24)
    assert first.evaluation is not None
    # Tasks 0 and 1 pass, task 2 passes every other time, task 5 has lost two of its four samples.
    assert (first.evaluation["passed"], first.evaluation["samples"], first.evaluation["unrated"]) == (10, 22, 2)
    assert first.evaluation["mean"] == pytest.approx(2.5 / 6, abs=1e-4)
    assert [point.k for point in first.pass_at] == [1, 2, 3, 4]
    assert first.pass_at[0].value == first.evaluation["mean"]
    assert sum(one.count for one in first.rewards) == 22
    parts = {phase.phase: phase for phase in found.phases if phase.policy == "first"}
    assert list(parts) == ["environment", "model", "agent", "evaluation", "other"]
    assert (parts["environment"].seconds.p50, parts["evaluation"].seconds.p50) == (1.0, 2.0)
    assert parts["model"].seconds.p50 + parts["agent"].seconds.p50 == pytest.approx(30.0, abs=1.5)
    assert sum(phase.share for phase in parts.values()) == pytest.approx(1.0, abs=1e-4)
    assert [(one.kind, one.rollouts) for one in found.failures] == [("sandbox", 2)], "errors but for their numbers"
    assert (found.repeated, found.failures_by_kind) == ({"node": 1}, {"sandbox": 2})
    (pod,) = found.pods
    assert (pod.slots, pod.rollouts, pod.repeated, pod.state) == (8, 48, 1, "done")
    assert found.stragglers[0].rollout.endswith("/47")
    assert found.stragglers[0].seconds == pytest.approx(87.0)
    busy = sum(run * 1.0 for run in found.concurrency.running) * found.seconds / len(found.concurrency.running)
    assert busy == pytest.approx(sum(40 + n for n in range(48)), rel=1e-3), "the curve's area is what was spent"
    assert found.concurrency.waiting[-1] == pytest.approx(2.0), "two are not stored"
    assert len(found.tasks) == 12
    assert to_builtins(found)["cost"]["source"] == "none"


@pytest.mark.parametrize("gathered", [False, True])
def test_tokens_that_an_endpoint_without_ids_reports_are_counted(tmp_path: Path, gathered: bool) -> None:
    run = samples.run_dir(tmp_path / "run")
    own = samples.trajectory(1)
    turns = [Turn(-1, 0, 0, "stop", policy="default", message=message) for message in (1, -1)]
    calls = Artifact(CALLS_FILE, b'{"tokens": [100, 20]}\n{"tokens": [150, 30]}\n')
    reported = samples.trajectory(0, turns=turns, sequences=[], artifacts=[calls])
    samples.commit(run, "pod0", (0, 0, own), (0, 0, reported), (0, 0, samples.trajectory(2, turns=[], sequences=[])))
    if gathered:
        gather(run)
    tokens = sum(len(sequence.tokens) for sequence in own.sequences)
    sampled = sum(turn.token_end - turn.token_start for turn in own.turns)
    (policy,) = figures_of(run.path).policies
    assert (policy.tokens.max, policy.tokens.total) == (300, tokens + 300)
    assert (policy.sampled_tokens.max, policy.sampled_tokens.total) == (50, sampled + 50)
    assert sum(one.count for one in policy.token_bins if one.low <= 300 <= one.high) == 1


def test_phases_add_up_to_what_a_rollout_took_and_stages_to_the_time_since_the_planning(
    attacked: RunDir, tmp_path: Path
) -> None:
    found = figures_of(attacked.path)
    for policy in found.policies:
        whole = policy.seconds.total
        assert sum(one.seconds.total for one in found.phases if one.policy == policy.policy) == pytest.approx(whole)
    assert found.stages == [], "nobody says when it was planned"

    run = RunDir(tmp_path / "run")
    shutil.copytree(attacked.path, run.path)
    planned_at, submitted_at = 1.7e9 - 100, 1.7e9 - 90
    write_run(run, RunRecord(campaign={"name": "late"}, total=50, planned_at=planned_at))
    run.jobs.mkdir(parents=True)
    write_json(run.jobs / "17.json", {"role": "pods", "id": "17", "submitted_at": submitted_at})
    write_json(run.jobs / "18.json", {"role": "gather", "id": "18", "submitted_at": submitted_at + 5})
    found = figures_of(run.path)
    assert [one.stage for one in found.stages if one.policy == "first"] == list(STAGES)
    ran = [n for n in range(24) if n not in (5, 11)]
    parts = {one.stage: one.seconds.total for one in found.stages if one.policy == "first"}
    assert parts["submission"] == pytest.approx(10 * len(ran))
    assert parts["scheduling"] == pytest.approx(sum(90 + 10 * (n // 4) for n in ran))
    assert parts["environment startup"] == pytest.approx(len(ran))
    assert sum(parts.values()) == pytest.approx(sum(100 + 10 * (n // 4) + 40 + n for n in ran))
    assert sum(one.share for one in found.stages) == pytest.approx(2, abs=1e-4)
    assert 'policy="first",stage="submission"} 220' in prometheus_text([found])


def test_what_rollouts_used_is_counted_where_it_is_known(tmp_path: Path) -> None:
    run = samples.run_dir(tmp_path / "run")
    used = [{"cpu_s": 2.0, "memory_peak_mb": 100.0}, {"cpu_s": 4.0, "memory_peak_mb": 300.0}, {}]
    samples.commit(run, "pod0", *[(0, 0, samples.trajectory(n, f"t{n}", **one)) for n, one in enumerate(used)])
    (policy,) = (found := figures_of(run.path)).policies
    assert (policy.cpu_s.n, policy.cpu_s.total, policy.memory_peak_mb.max, policy.disk_peak_mb.n) == (2, 6.0, 300.0, 0)
    assert sum(one.count for one in policy.cpu_bins) == sum(one.count for one in policy.memory_bins) == 2
    names = {chart.title for chart in charts_of([found], [[]], [])}
    assert {"CPU of rollouts", "Memory of rollouts"} <= names
    assert 'policy="default"} 300000000' in prometheus_text([found])


def test_a_pod_that_left_no_word_is_gone_once_somebody_knows(attacked: RunDir, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(attacked.path, run.path)
    for pod, start, t in (("7_0", "b", 0), ("7_0", "a", 100), ("7_1", "c", 50), ("7_2", "d", 60)):
        lines = ({"t": 1.7e9 + t + n, "event": "pod", "state": "started", "node": "n"} for n in (0, 9))
        run.event_file(pod, start).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.ledger / "gone").mkdir(parents=True, exist_ok=True)
    (run.ledger / "gone" / "7_1.c").touch()
    with LoadedRun(run.path) as loaded:
        bars = bars_of(loaded.rollouts, loaded.events, loaded.threshold)
    found = loaded.figures
    states = {pod.pod: pod.state for pod in found.pods}
    assert states == {"pod0.0": "done", "7_0.b": "gone", "7_0.a": "started", "7_1.c": "gone", "7_2.d": "started"}
    (chart,) = (one for one in charts_of([found], [bars], []) if one.name == "timeline")
    there, _, crosses = chart.spec["layer"]
    assert {one["pod"] for one in there["data"]["values"]} == set(states), "those without a rollout are shown too"
    assert {one["pod"] for one in crosses["data"]["values"]} == {"7_0.b", "7_1.c"}
    assert there["encoding"]["y"]["sort"] == ["7_0.b", "7_0.a", "pod0.0", "7_1.c", "7_2.d"], "starts of one together"
    (run.path / FINISHED).write_text("{}")
    assert {pod.state for pod in figures_of(run.path).pods} == {"done", "gone"}


def test_figures_of_tasks_are_those_of_their_own_rollouts(attacked: RunDir) -> None:
    with LoadedRun(attacked.path) as loaded:
        rows = loaded.rollouts
        for one in loaded.figures.tasks:
            own = [n for n in range(len(rows)) if (rows.task.of(n), rows.policy.of(n)) == (one.task, one.policy)]
            given = [float(rows.reward[n]) for n in own if rows.reward[n] == rows.reward[n]]
            assert (one.samples, one.rated, one.passed) == (len(own), len(given), sum(r >= 1 for r in given))
            assert one.seconds == pytest.approx(statistics.median(float(rows.seconds[n]) for n in own))
            assert one.mean == (pytest.approx(sum(given) / len(given)) if given else None)


def test_of_very_many_transcripts_some_are_in_the_page(attacked: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaflow_hpc.report.transcripts.MAX_TRANSCRIPTS", 5)
    with LoadedRun(attacked.path) as loaded:
        assert len(transcripts(loaded.store, loaded.rollouts, "some")[0]) == 5
        assert len(transcripts(loaded.store, loaded.rollouts, "all")[0]) == 48
        assert "5 of 48 transcripts are in this page" in page([loaded], [], [])


def test_a_file_and_journals_give_the_same_figures_as_the_run(attacked: RunDir, better: RunDir, tmp_path: Path) -> None:
    run, file = figures_of(attacked.path), figures_of(attacked.trajectories)
    assert (run.policies, run.phases, run.tasks) == (file.policies, file.phases, file.tasks)
    journals = figures_of(better.path)
    gathered = RunDir(tmp_path / "gathered")
    gathered.create()
    for path in (better.run_json, *better.journal.glob("*")):
        gathered.path.joinpath(path.relative_to(better.path)).write_bytes(path.read_bytes())
    gather(gathered, {})
    now = figures_of(gathered.path)
    assert (journals.policies, journals.phases, journals.tasks) == (now.policies, now.phases, now.tasks)
    with pytest.raises(ConfigError):
        figures_of(tmp_path / "nothing")


def test_campaigns_are_compared_task_by_task(attacked: RunDir, better: RunDir) -> None:
    old, new = figures_of(attacked.path), figures_of(better.path)
    (found,) = compare([old, new], "run")
    assert (found.name, found.against, found.where) == ("better", old.campaign, {"policy": "first"})
    assert (found.tasks, found.better, found.worse) == (6, 1, 0)
    each = [0, 0, 0.5, 0, 0, 0]
    assert found.difference == pytest.approx(0.5 / 6, abs=1e-4)
    assert (found.low, found.high) == pytest.approx(mean_interval(each), abs=1e-4)
    assert found.changed == ["task2 +0.5"]
    assert found.p == 1.0, "one changed task proves nothing"
    assert paired_interval([0.0] * 20) == pytest.approx((-wilson(0, 20)[1], wilson(0, 20)[1]))


def test_policies_agents_and_roles_of_one_run_are_compared_like_runs(tmp_path: Path) -> None:
    run = samples.run_dir(tmp_path / "run")
    passed = {"old": lambda task: task < 2, "new": lambda task: task < 8}
    made = []
    for number, (policy, agent, task) in enumerate(itertools.product(passed, ("x", "y"), range(10))):
        reward = float(passed[policy](task) or (agent == "y" and task == 9))
        one = samples.trajectory(
            3 * number + 1,
            f"t{task}",
            id=f"t{task}/{policy}+{agent}/0",
            group_id=f"t{task}/{policy}+{agent}",
            policy=policy,
            agent=agent,
            reward=reward,
            rewards={"checker": 1.0, "writer": reward},
        )
        one.turns[0].role = "writer" if number % 2 else "checker"
        made.append(one)
    samples.commit(run, "pod0", *[(0, 0, one) for one in made])
    figures = [figures_of(run.path)]
    by_axis: dict[str, list[Difference]] = {}
    for one in compare(figures):
        by_axis.setdefault(one.axis, []).append(one)
    assert {axis: len(found) for axis, found in by_axis.items()} == {"policy": 2, "agent": 2, "role": 4}
    old = by_axis["policy"][0]
    assert (old.label, old.against, old.difference, old.better, old.worse) == ("old (x)", "new", -0.6, 0, 6)
    assert old.p == pytest.approx(2 / 2**6), "all six changed tasks changed in one direction"
    assert {(one.label, one.difference) for one in by_axis["agent"]} == {("y (new)", 0.1), ("y (old)", 0.1)}
    assert {(one.name, one.against) for one in by_axis["role"]} == {("writer", "checker")}
    (turned,) = {one.difference for one in compare(figures, against="x") if one.where == {"policy": "new"}}
    assert turned == 0.1
    assert {one.difference for one in compare(figures, "policy", against="old")} == {0.6}
    with pytest.raises(ConfigError, match="--against z: expected one of agent: x, y"):
        compare(figures, "agent", against="z")
    matrix = matrix_of(figures)
    assert matrix.arms == ["new · x", "new · y", "old · x", "old · y"]
    assert matrix.means[matrix.tasks.index("t9")] == [0.0, 1.0, 0.0, 1.0]
    assert set(matrix.tasks[-3:]) == {"t0", "t1", "t8"}, "the same in all arms"


def test_equal_differences_are_equal_whatever_their_last_bits_are() -> None:
    """0.7 - 0.6 and 0.8 - 0.7 differ as floating-point numbers."""
    there = {"a": 0.6, "b": 0.7, "c": 0.2}
    runs = [
        cast(RunFigures, SimpleNamespace(run=name, campaign=name, arms=[Arm(policy="p", agent="x", rewards=rewards)]))
        for name, rewards in {"old": there, "new": {"a": 0.7, "b": 0.8, "c": 0.3}}.items()
    ]
    (found,) = compare(runs)
    assert (found.low, found.high) == pytest.approx(paired_interval([0.1] * 3))
    assert found.high is not None
    assert found.high > 0.5, "three equal differences say little"


def test_the_sign_flip_test_is_exact_for_few_tasks_and_close_for_many() -> None:
    assert sign_flip_test([0.0] * 5) == 1.0
    assert sign_flip_test([1.0, 1.0, 1.0, -1.0]) == pytest.approx(10 / 16)
    few = [0.1, 0.4, -0.2, 0.3, 0.25, 0.05, -0.15, 0.2, 0.35, -0.1, 0.12, 0.22, 0.18]
    assert sign_flip_test([*few, 0.01, 0.02]) == pytest.approx(sign_flip_test([*few, 0.03]), abs=0.01)
    assert sign_flip_test([0.5] * 40) == pytest.approx(1 / 20_001), "the smallest p of the sampled signs"


def test_what_was_held_has_a_price_and_an_efficiency(attacked: RunDir) -> None:
    hour = 3600.0
    uses = [
        JobUse((1.7e9 - hour, 1.7e9 + hour), 4, 0, "17_3", "pods", "COMPLETED", 3.6 * hour, 4096.0, 1024.0),
        JobUse((1.7e9, 1.7e9 + hour), 2, 1, "18_0", "servers", "TIMEOUT", None, None, None),
    ]
    cost = figures_of(attacked.path, uses, Prices(core_hour=0.5, gpu_hour=2.0, currency="EUR")).cost
    assert (cost.source, cost.core_hours, cost.gpu_hours, cost.price) == ("accounting", 10.0, 1.0, 7.0)
    assert cost.price_per_passed == pytest.approx(7.0 / 20)
    assert cost.idle_core_hours == pytest.approx(10 - 6 * 197 / hour, rel=1e-4)
    pods, servers = cost.jobs
    assert (pods.cpu_efficiency, pods.memory_efficiency) == (0.45, 0.25)
    assert (servers.cpu_efficiency, servers.memory_efficiency, cost.cpu_efficiency) == (None, None, 0.45)


def test_what_was_idle_is_what_usage_says(tmp_path: Path) -> None:
    """A pod was requeued. Its first start was cut short; during its second start only the other pod worked."""
    run = samples.run_dir(tmp_path / "run")
    cut = Attempt(0, "cancelled", "walltime", "", "node-1", "7_1", 20.0, 40.0)
    for number, (job, start, end, before) in enumerate([("7_0", 10.0, 90.0, []), ("7_1", 70.0, 80.0, [cut])]):
        last = Attempt(len(before), "completed", "", "", "node-1", job, start, end)
        times = {"job_id": job, "started_at": start, "finished_at": end, "attempts": [*before, last]}
        samples.commit(run, f"pod{number}", (number, 0, samples.trajectory(number, **times)))
    gather(run)
    uses = [
        JobUse((0, 100), 4, 0, "7_0", "pods"),
        JobUse((10, 45), 4, 0, "7_1", "pods"),
        JobUse((50, 85), 4, 0, "7_1", "pods"),
        JobUse((0, 100), 8, 2, "6_0", "servers"),
        JobUse((0, 110), 4, 1, "6_1", "servers"),
        JobUse((100, 110), 2, 0, "8", "gather"),
    ]
    cost = figures_of(run.path, uses).cost
    idle = {role.role: (role.idle_core_hours, role.idle_gpu_hours) for role in cost.roles}
    assert idle["pods"] == (pytest.approx(4 * (20 + 15 + 25) / 3600, rel=1e-4), 0)
    assert idle["gather"] == (0, 0)
    with open_trajectories(run.path) as store:
        found = totals(uses, [(a.job_id, (a.started_at, a.finished_at)) for row in store for a in row.attempts])
    assert cost.idle_core_hours == pytest.approx(found["idle_core_seconds"] / 3600, rel=1e-4)
    assert cost.idle_gpu_hours == pytest.approx(found["idle_gpu_seconds"] / 3600, rel=1e-4)
    assert (cost.core_hours, cost.gpu_hours) == pytest.approx((1940 / 3600, 310 / 3600), rel=1e-4)


def test_a_run_that_trains_has_a_curve_for_each_metric(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {"steps": 20})
    files = TrainingFiles(run, "default")
    files.create()
    for step in range(1, 8):
        files.commit(
            Commit(
                step=step,
                metrics={
                    "reward": step / 10,
                    "entropy": math.nan if step == 3 else 0.5,
                    "x": 1.0,
                    "reward/checker": 1 - step / 10,
                },
            )
        )
    found = figures_of(run.path)
    (of_role,) = (curve for curve in found.training if curve.policy == "default+checker")
    assert (of_role.metric, of_role.steps[-1], of_role.values[-1]) == ("reward", 7, 0.3)
    curves = {curve.metric: curve for curve in found.training if curve != of_role}
    assert curves.keys() == {"reward", "entropy"}
    assert (curves["reward"].steps[-1], curves["reward"].values[-1]) == (7, 0.7)
    assert curves["entropy"].steps == [1, 2, 4, 5, 6, 7]
    assert [chart.name for chart in charts_of([found], [[]], [])] == ["training-reward", "training-entropy"]
    assert "megaflow_training_steps_total" in prometheus_text([found])


def test_levels_lanes_and_thinning() -> None:
    starts, ends = np.array([0.0, 0.0, 2.0]), np.array([2.0, 4.0, 4.0])
    assert mean_level(starts, ends, np.array([0.0, 1.0, 2.0, 4.0])).tolist() == [2.0, 2.0, 2.0]
    assert mean_level(starts, ends, np.array([0.0, 8.0])).tolist() == [1.0]
    assert peak_level(starts, ends) == 2, "one that ends as another begins makes no third"
    assert lanes([(0, 2), (0, 4), (2, 4), (3, 5)]) == [0, 1, 0, 2]
    assert thinned(5, 10).tolist() == [0, 1, 2, 3, 4]
    few = thinned(1000, 10)
    assert (len(few), few[0], few[-1]) == (10, 0, 999)


def test_transcripts_are_cut_and_chosen_failures_first(attacked: RunDir) -> None:
    from megaflow_hpc.report.figures import LoadedRun

    with LoadedRun(attacked.path) as loaded:
        order = list(chosen(loaded.rollouts))
        assert sorted(order) == list(range(48))
        assert loaded.rollouts.status.of(order[0]) == "failed"
        rewards = [loaded.rollouts.reward[row] for row in order[1:3]]
        assert rewards == [1.0, 0.0], "then the best and the worst"
    part = {"type": "image_url", "image_url": {"url": "sha256:" + 64 * "a"}}
    content = [{"type": "text", "text": "look"}, part]
    (shown,) = messages_of([{"role": "user", "content": content}], {64 * "a": "[image 8x6 PNG]"})
    assert (shown["text"], shown["images"]) == ("look\n[image 8x6 PNG]", {64 * "a": "[image 8x6 PNG]"})
    (unknown,) = messages_of([{"role": "user", "content": content}])
    assert "images" not in unknown
    long = messages_of([{"role": "tool", "content": "x" * 50_000 + "end"}, *({"role": "user"} for _ in range(1000))])
    assert len(long) == 401
    assert len(long[0]["text"]) < 13_000
    assert long[0]["text"].endswith("end")
    assert "601 messages are omitted" in long[200]["text"]


def test_images_of_a_page_have_a_bound_that_transcripts_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes its first and last images. One that several transcripts show takes its space once."""
    run = samples.run_dir(tmp_path / "run", "run")
    common, size = samples.image(40, 30, 99), len(samples.image(40, 30).data)
    shown = [[common, *(samples.image(40, 30, 4 * n + k) for k in range(4))] for n in range(3)]
    rollouts = []
    for number, images in enumerate(shown):
        parts = [{"type": "image_url", "image_url": {"url": f"sha256:{one.sha256}"}} for one in images]
        messages = [{"role": "user", "content": [part]} for part in parts]
        by_name = {one.sha256: one for one in images}
        rollouts.append(samples.trajectory(number, id=f"{number}", messages=messages, images=by_name))
    samples.commit(run, "pod0", *[(0, 0, one) for one in rollouts])

    def included(limit: int, wanted: Wanted = "some", runs: int = 1) -> tuple[dict[str, list[int]], list[str]]:
        """Returns which of its images each rollout has in the page, and the notes on missing ones."""
        monkeypatch.setattr(module, "MAX_IMAGE_BYTES", limit)
        with LoadedRun(run.path) as loaded:
            texts, images = transcripts(loaded.store, loaded.rollouts, wanted, runs)
            assert sum(len(one.data) for one in images.values()) <= limit // runs
            assert all(hashlib.sha256(one.data).hexdigest() == name for name, one in images.items())
            ids = loaded.rollouts.ids
            notes = [message["text"] for one in texts.values() for message in one if message["role"] == "report"]
            return {
                ids[row]: [n for n, one in enumerate(shown[int(ids[row])]) if one.sha256 in images] for row in texts
            }, notes

    everything = {str(number): [*range(5)] for number in range(3)}
    assert included(100 * size) == (everything, [])
    some, notes = included(7 * size)
    first, *others = some.values()
    assert first == [0, 4], "a third of the space"
    assert others == [[0, 1, 4], [0, 1, 4]], "the common one is there already"
    assert len(notes) == 3
    assert f"2 of 5 images are not in this page; megaflow-hpc show RUN {[*some][1]} --images DIR writes" in notes[1]
    assert included(15 * size, 1)[0] == {next(iter(some)): [*range(5)]}, "all of the space for the only one"
    assert included(14 * size, "some", 2) == (some, notes), "of which each run has half"
    assert included(size - 30)[0] == {str(number): [] for number in range(3)}
    assert included(100 * size, "none") == ({}, [])


def test_attempts_of_a_run_that_is_not_gathered_yet_are_those_of_its_file(tmp_path: Path) -> None:
    run = samples.run_dir(tmp_path / "run", "run")
    earlier = Attempt(0, "failed", "node", "lost", "node-2", "17_9", 5.0, 6.0)
    final = Attempt(1, "completed", "", "", "", "17_3")
    rollouts = [samples.trajectory(n, attempts=[earlier, final]) for n in range(3)]
    samples.commit(run, "pod0", *[(0, 0, rollout) for rollout in rollouts])

    def spans() -> list[tuple[str, tuple[float, float]]]:
        with open_trajectories(run.path) as store:
            return sorted(attempt_spans(store, read_rollouts(store)))

    before = spans()
    assert ("17_9", (5.0, 6.0)) in before
    gather(run, {})
    assert spans() == before
