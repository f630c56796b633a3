"""Selections: which expressions are allowed, and the errors for all others."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories import gather, open_trajectories
from megaflow_hpc.trajectory import TokenSequence
from tests.support.samples import commit, run_dir, trajectory


def versions(number: int) -> list[TokenSequence]:
    """A prompt of two tokens and an answer of two, sampled by weights ``number`` and ``number + 1``."""
    nan = float("nan")
    return [
        TokenSequence(
            "default",
            array("i", [1, 2, 3, 4]),
            array("f", [nan, nan, -1.0, -2.0]),
            array("B", [0, 0, 1, 1]),
            array("i", [-1, -1, number, number + 1]),
        )
    ]


@pytest.fixture(params=["journals", "file"], scope="module")
def store(tmp_path_factory, request):
    run = run_dir(tmp_path_factory.mktemp("selection") / "run")
    rollouts = [trajectory(n, policy="ab"[n % 2], sequences=versions(n), turns=[]) for n in range(10)]
    rollouts += [
        trajectory(n, task="other", status="failed", sequences=[], turns=[], error="Ünglück") for n in (10, 11)
    ]
    commit(run, "a", *((0, 0, t) for t in rollouts))
    if request.param == "file":
        gather(run)
    with open_trajectories(run.path) as opened:
        yield opened


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("status == 'completed' and reward >= 0.5 and policy == 'b'", [1, 3, 5, 7, 9]),
        ("status != 'completed'", [10, 11]),
        ("task == 'other' or sample < 2", [0, 1, 10, 11]),
        ("not (status == 'completed')", [10, 11]),
        ("2 <= sample_index < 4", [2, 3]),
        ("policy in ['a', 'c'] and sample > 5", [6, 8]),
        ("policy not in ('a', 'default')", [1, 3, 5, 7, 9]),
        ("rewards['tests'] > 0", [1, 3, 5, 7, 9, 11]),
        ("rewards.tests == 0.5 and status == 'failed'", [11]),
        ("isnan(reward)", [10, 11]),
        ("weight_version_min >= 3 and weight_version_max <= 6", [3, 4, 5]),
        ("weight_version_min == -1", [10, 11]),
        ("tokens == 0", [10, 11]),
        ("tokens * 2 - 1 == 7 and sample == 0", [0]),
        ("sampled_tokens == 0 and sequences == 1 and sample == 0", [0]),
        ("turns == 0 and messages == 2 and attempts == 1 and sample == 3", [3]),
        ("started_at < '2023-11-14T22:13:22' and duration_s < 0.5", [0, 1]),
        ("finished_at >= '2023-11-15'", []),
        ("id.startswith('other/') and agent == 'mini-swe-agent'", [10, 11]),
        ("id.endswith('/4')", [4]),
        ("id.matches('task/*/[12]')", [1, 2]),
        ("error.contains('glück') or error == 'Ünglück'", [10, 11]),
        ("reward == reward", list(range(10))),
        ("True and sample == -(-1)", [1]),
        ("abs(sample - 5) <= 1 and sample % 2 == 1", [5]),
        ("group == 'task/default' and node == 'node-1' and job_id == '17_3' and sample == 7", [7]),
    ],
)
def test_an_expression_chooses_rows(store, expression, rows):
    found = store.select(expression)
    assert (found.dtype, found.tolist()) == (np.int64, rows)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("stats == 'completed'", r"column 1: no column 'stats'; there are: status"),
        ("status == 'completed' and rewards['x'] > 0", r"column 27: no reward named 'x'; there are: tests"),
        ("status == ", r"column \d+: .*expected one such as"),
        ("reward", "is a value, not a condition"),
        ("status and reward > 0", r"column 1: 'status' is a value"),
        ("status > 3", "compares text with a number"),
        ("status + 1 == 2", r"column 1: 'status' is text, expected a number"),
        ("reward is None", "not allowed"),
        ("finished_at > 'yesterday'", r"column 15: 'yesterday' is not a date"),
        ("policy in 'ab'", "expected a list behind 'in'"),
        ("'x'.startswith('x')", "is not a text column"),
        ("__import__('os').system('true')", "is not allowed here"),
        ("open('/etc/passwd')", "is not allowed here"),
        ("().__class__ == 1", "is not allowed here"),
        ("status.__class__ == 1", "is not allowed here"),
        ("[x for x in id] == 1", "is not allowed here"),
        ("(lambda: 1)() == 1", "is not allowed here"),
        ("9 ** 9 ** 9 > reward", "is not allowed here"),
        ("id.startswith(prefix='x')", "is not allowed here"),
        ("f'{id}' == 'x'", "is not allowed here"),
        ("reward > 0 " + "and reward > 0 " * 1000, "at most 10000"),
        ("(" * 3000 + "reward" + ")" * 3000 + " > 0", "selection: "),
        ("-" * 2000 + "reward > 0", "selection: "),
        ("reward > 1\0", "selection: "),
    ],
)
def test_what_is_wrong_with_an_expression_is_said(store, expression, message):
    with pytest.raises(ConfigError, match=message):
        store.select(expression)
