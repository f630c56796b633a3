"""What a trajectory takes over of each step: what the gateway recorded, with its links."""

from __future__ import annotations

import pytest

from megaflow_hpc.errors import UserCodeError
from megaflow_hpc.model.gateway.recorder import Recorder, SampledTokens
from megaflow_hpc.pod.rollout.preemption import Checkpoint
from megaflow_hpc.pod.rollout.rollout import _add, _of_existing_turns
from megaflow_hpc.tasks.scoring import check_turns
from megaflow_hpc.trajectories.reading.conversations import conversations
from megaflow_hpc.trajectory import Recording, Trajectory
from megaflow_hpc.types import AgentResult, Verdict


def recording(word: str) -> Recording:
    """A call with a tool, the sub-agent that it starts, and what follows."""
    recorder = Recorder("p")
    call = {"id": "c", "type": "function", "function": {"name": "task", "arguments": "{}"}}
    asked = [{"role": "user", "content": word}]
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    recorder.add(SampledTokens([1], [2], [-1.0], message=answer), asked)
    recorder.add(SampledTokens([3], [4], [-1.0], message={"role": "assistant", "content": "sub"}), [{"role": "user"}])
    asked = [*asked, answer, {"role": "tool", "tool_call_id": "c", "content": "seen"}]
    recorder.add(SampledTokens([1, 2, 5], [6], [-1.0], message={"role": "assistant", "content": f"{word}!"}), asked)
    return recorder.finish()


def test_an_agents_own_account_counts_only_without_a_call() -> None:
    invented = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "I never said that."}]
    trajectory = Trajectory("t/p/0", "t", "t/p", "p", "a", "completed")
    _add(trajectory, AgentResult(messages=invented), recording("one"))
    _add(trajectory, AgentResult(messages=invented), Recording())
    _add(trajectory, AgentResult(messages=invented), recording("two"))
    found = conversations(trajectory.messages, trajectory.parents, trajectory.turns)
    assert [(c.turns, c.started_by, c.parent) for c in found] == [
        ([None, 0, None, 2], None, None),
        ([None, 1], 0, 0),
        ([None, 3, None, 5], None, None),
        ([None, 4], 3, 2),
        ([None, None], None, None),
    ]
    assert [c.messages[-1]["content"] for c in found] == ["one!", "sub", "two!", "sub", "I never said that."]
    assert [trajectory.turns[c.turns[-1]].sequence for c in found[:4] if c.turns[-1] is not None] == [0, 1, 2, 3]


def test_rewards_of_calls_that_were_not_made_are_left_out_with_an_error() -> None:
    trajectory = Trajectory("t/p/0", "t", "t/p", "p", "a", "completed")
    _add(trajectory, AgentResult(turn_rewards=[0.5] * 4), recording("one"))
    assert (trajectory.rewards, trajectory.error_kind) == ({}, "agent")
    assert "reward 'turn.3': the rollout made 3 model calls; expected turn.0 to turn.2" in trajectory.error
    _add(trajectory, AgentResult(turn_rewards=[0.25]), recording("two"))
    assert trajectory.rewards == {"turn.3": 0.25}


def test_a_verdict_on_calls_that_were_not_made_is_reward_0() -> None:
    verdict = _of_existing_turns(Verdict.of({"reward": 1.0, "style": 1.0, "turn.2": 1.0}), 2)
    assert (verdict.reward, verdict.rewards) == (0.0, {"reward": 0.0, "style": 0.0})
    assert "reward 'turn.2': the rollout made 2 model calls" in verdict.error
    assert _of_existing_turns(Verdict.of({"turn.1": 1.0}), 2).rewards == {"turn.1": 1.0}


def test_rewards_of_turns_are_numbered_over_all_steps() -> None:
    trajectory = Trajectory("t/p/0", "t", "t/p", "p", "a", "completed")
    _add(trajectory, AgentResult(turn_rewards=[0.5, 0.0, 1.0]), recording("one"))
    _add(trajectory, AgentResult(turn_rewards=[0.25]), recording("two"))
    assert trajectory.rewards == {"turn.0": 0.5, "turn.1": 0.0, "turn.2": 1.0, "turn.3": 0.25}


def test_rewards_of_finished_steps_continue_in_the_next_attempt() -> None:
    before, after = (Trajectory("t/p/0", "t", "t/p", "p", "a", "completed") for _ in range(2))
    _add(before, AgentResult(turn_rewards=[0.5], rewards={"right": 1.0}), recording("one"))
    Checkpoint(before, 1, [], 0.0, {}, {}).carry_over(after)
    assert after.rewards == {"turn.0": 0.5, "right": 1.0}


@pytest.mark.parametrize("number", ["2", "-1", "01", "٠", "9" * 5000])
def test_a_reward_of_a_call_that_was_not_made_is_refused(number: str) -> None:
    check_turns({"turn.0": 1.0, "turn.1": 0.0, "turn.taking": 1.0, "reward": 1.0}, 2)
    with pytest.raises(UserCodeError, match=r"the rollout made 2 model calls; expected turn.0 to turn.1"):
        check_turns({f"turn.{number}": 1.0}, 2)
