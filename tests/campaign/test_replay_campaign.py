"""A whole campaign with a real agent in sandboxes, and the same again from its record, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow_hpc import open_trajectories
from megaflow_hpc.trajectory import Trajectory
from tests.support.campaigns import run_local

ANSWERS = [
    "I look.\n\n```mswea_bash_command\ncat README; date +%Y > year\n```",
    "I write.\n\n```mswea_bash_command\necho 42 > answer\n```",
    "Done.\n\n```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```",
]


def campaign(folder: Path, base_sif: Path, model: dict[str, Any], **more: Any) -> dict[str, Any]:
    content = {
        "name": "replay",
        "tasks": "tasks/*",
        "agent": "mini-swe-agent",
        "samples": 2,
        "model": model,
        "environment": {"network": "none", "images": {"base": str(base_sif)}},
        **more,
    }
    file = folder / f"{model['engine']}.yaml"
    file.write_text(yaml.safe_dump(content))
    result, done = run_local(file)
    assert done.returncode == 0, done.stderr
    return result


def said(trajectory: Trajectory) -> list[Any]:
    """What a model said and was told, byte for byte; not when."""
    columns = [
        [s.policy, *(c.tobytes() for c in (s.tokens, s.logprobs, s.loss_mask, s.weight_versions))]
        for s in trajectory.sequences
    ]
    return [columns, trajectory.messages, trajectory.reward, trajectory.status]


@pytest.mark.slow
def test_a_campaign_is_replayed_byte_for_byte_without_an_engine(
    tmp_path: Path, base_sif: Path, make_task: Callable[..., Path]
) -> None:
    make_task(tmp_path / "tasks", "write")
    script = {"tasks": [{"pattern": "(?s).*", "answers": ANSWERS}]}
    (tmp_path / "script.yaml").write_text(yaml.safe_dump(script))
    quotas = {"quotas": {"requests_per_s": 50, "in_flight": 4}}
    first = campaign(tmp_path, base_sif, {"engine": "scripted", "script": "script.yaml"}, **quotas)
    again = campaign(tmp_path, base_sif, {"engine": "replay", "path": first["run"]})
    with open_trajectories(first["run"]) as one, open_trajectories(again["run"]) as other:
        assert sorted(one.ids) == sorted(other.ids) == ["write/default/0", "write/default/1"]
        for name in one.ids:
            assert said(one[name].trajectory()) == said(other[name].trajectory())
            assert one[name].reward == 1.0
    assert not list(Path(again["run"], "endpoints").glob("*.json"))
    evaluation = again["policies"]["default"]["evaluation"]
    assert (evaluation["mean"], evaluation["pass_at"]["2"]["value"]) == (1.0, 1.0)
