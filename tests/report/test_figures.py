"""The figures are those of the rollouts, whatever they are read from; their comparison is paired by task."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.monitor.evaluation import mean_interval, wilson
from megaflow_hpc.monitor.usage import JobUse
from megaflow_hpc.report.charts.every import charts_of
from megaflow_hpc.report.comparison import compare, paired_interval
from megaflow_hpc.report.cost import Prices
from megaflow_hpc.report.figures import figures_of, to_builtins
from megaflow_hpc.report.prometheus import text as metrics
from megaflow_hpc.report.series import lanes, mean_level, peak_level, thinned
from megaflow_hpc.report.transcripts import chosen, messages_of
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import Commit
from megaflow_hpc.training.plan import TrainingFiles
from megaflow_hpc.trajectories import gather
from tests.support.training import training_run


def test_figures_are_those_of_the_rollouts(attacked: RunDir) -> None:
    found = figures_of(attacked.path)
    assert (found.stored, found.total, found.state) == (48, 50, "unfinished")
    assert found.states == {"completed": 46, "truncated": 0, "failed": 2, "cancelled": 0}
    first, second = found.policies
    assert (first.policy, first.rollouts, second.rollouts) == ("first", 24, 24)
    assert first.evaluation is not None
    # Tasks 0 and 1 pass, task 2 does every other time, task 5 has lost two of its four samples.
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
    (found,) = compare([old, new])
    assert (found.policy, found.tasks, found.better, found.worse) == ("first", 6, 1, 0)
    each = [0, 0, 0.5, 0, 0, 0]
    assert found.difference == pytest.approx(0.5 / 6, abs=1e-4)
    assert (found.low, found.high) == pytest.approx(mean_interval(each), abs=1e-4)
    assert found.changed == ["task2 +0.5"]
    assert paired_interval([0.0] * 20) == pytest.approx((-wilson(0, 20)[1], wilson(0, 20)[1]))


def test_what_was_held_has_a_price_and_an_efficiency(attacked: RunDir) -> None:
    hour = 3600.0
    uses = [
        JobUse((1.7e9 - hour, 1.7e9 + hour), 4, 0, "17_0", "pods", "COMPLETED", 3.6 * hour, 4096.0, 1024.0),
        JobUse((1.7e9, 1.7e9 + hour), 2, 1, "18_0", "servers", "TIMEOUT", None, None, None),
    ]
    cost = figures_of(attacked.path, uses, Prices(core_hour=0.5, gpu_hour=2.0, currency="EUR")).cost
    assert (cost.source, cost.core_hours, cost.gpu_hours, cost.price) == ("accounting", 10.0, 1.0, 7.0)
    assert cost.price_per_passed == pytest.approx(7.0 / 20)
    assert cost.idle_core_hours == pytest.approx(10 - 6 * 197 / hour, rel=1e-4)
    pods, servers = cost.jobs
    assert (pods.cpu_efficiency, pods.memory_efficiency) == (0.45, 0.25)
    assert (servers.cpu_efficiency, servers.memory_efficiency, cost.cpu_efficiency) == (None, None, 0.45)


def test_a_run_that_trains_has_a_curve_for_each_metric(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {"steps": 20})
    files = TrainingFiles(run, "default")
    files.create()
    for step in range(1, 8):
        files.commit(
            Commit(step=step, metrics={"reward": step / 10, "entropy": math.nan if step == 3 else 0.5, "x": 1.0})
        )
    found = figures_of(run.path)
    curves = {curve.metric: curve for curve in found.training}
    assert curves.keys() == {"reward", "entropy"}
    assert (curves["reward"].steps[-1], curves["reward"].values[-1]) == (7, 0.7)
    assert curves["entropy"].steps == [1, 2, 4, 5, 6, 7]
    assert [chart.name for chart in charts_of([found], [[]], [])] == ["training-reward", "training-entropy"]
    assert "megaflow_training_steps_total" in metrics([found])


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
    from megaflow_hpc.report.figures import Loaded

    with Loaded(attacked.path) as loaded:
        order = list(chosen(loaded.rollouts))
        assert sorted(order) == list(range(48))
        assert loaded.rollouts.status.of(order[0]) == "failed"
        rewards = [loaded.rollouts.reward[row] for row in order[1:3]]
        assert rewards == [1.0, 0.0], "then the best and the worst"
    long = messages_of([{"role": "tool", "content": "x" * 50_000 + "end"}, *({"role": "user"} for _ in range(1000))])
    assert len(long) == 401
    assert len(long[0]["text"]) < 13_000
    assert long[0]["text"].endswith("end")
    assert "601 messages are left out" in long[200]["text"]
