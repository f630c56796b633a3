"""What a trajectory takes over of each step: what the gateway recorded, with its links."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_hpc.agents.registry import result_of
from megaflow_hpc.errors import UserCodeError
from megaflow_hpc.host.wire import pack, unpack
from megaflow_hpc.model.gateway.recorder import Recorder, SampledTokens
from megaflow_hpc.pod.rollout.preemption import Checkpoint
from megaflow_hpc.pod.rollout.rollout import _add, _add_verdict, _storable
from megaflow_hpc.tasks.python_class import named_rewards
from megaflow_hpc.tasks.scoring import check_turns
from megaflow_hpc.tasks.steps import _zero_if_failed
from megaflow_hpc.trajectories.journal.checks import checked
from megaflow_hpc.trajectories.reading.conversations import conversations
from megaflow_hpc.trajectory import Recording, Trajectory
from megaflow_hpc.types import AgentResult, Task, Verdict


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
    _add(trajectory, AgentResult(turn_rewards=[0.5] * 4, rewards={"right": 1.0}), recording("one"))
    assert (trajectory.rewards, trajectory.error_kind) == ({"right": 1.0}, "agent"), "a role's reward stays"
    assert "reward 'turn.3': the rollout made 3 model calls; expected turn.0 to turn.2" in trajectory.error
    _add(trajectory, AgentResult(turn_rewards=[0.25]), recording("two"))
    assert trajectory.rewards == {"right": 1.0, "turn.3": 0.25}


def test_a_verdict_on_calls_that_were_not_made_is_reward_0() -> None:
    verdict = _storable(Verdict.of({"reward": 1.0, "style": 1.0, "turn.2": 1.0}), 2)
    assert (verdict.reward, verdict.rewards) == (0.0, {"reward": 0.0, "style": 0.0})
    assert "reward 'turn.2': the rollout made 2 model calls" in verdict.error
    assert _storable(Verdict.of({"turn.1": 1.0}), 2).rewards == {"turn.1": 1.0}


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


def stored(trajectory: Trajectory) -> Trajectory:
    """Return what readers of the journal accept of a trajectory. They leave out the tokens of any other."""
    return checked(Trajectory.from_record(unpack(pack(trajectory.to_record()))))


def score() -> None:
    """Stands in for a task's method, which errors name."""


TASK = Task("t", "Do it.", "", "/nowhere")
NAMES = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=3),
    st.sampled_from(["reward", "right", "turn.0", "turn.2", "turn.3", "turn.-1", "sequence.0", "turn.style"]),
    st.sampled_from(["a", "é", "\ud800", "turn."]).flatmap(lambda part: st.sampled_from([part * 1020, part * 1025])),
)
VALUES = st.one_of(st.floats(), st.integers(), st.booleans(), st.none(), st.sampled_from([3.4e38, 10**39, 10**400]))


@given(st.dictionaries(NAMES, VALUES), st.lists(VALUES, max_size=4), st.dictionaries(NAMES, VALUES))
def test_no_reward_costs_a_record_its_tokens(
    agents: dict[str, Any], turns: list[Any], verifiers: dict[str, Any]
) -> None:
    """Whatever agents and verifiers give is refused at once, or can be stored."""
    trajectory = Trajectory("t/p/0", "t", "t/p", "p", "a", "completed")
    try:
        result = result_of("mine", AgentResult(rewards=agents, turn_rewards=turns))
    except UserCodeError as error:
        result = AgentResult(exit_code=1, error=str(error))
    _add(trajectory, result, recording("one"))
    try:
        verdict = Verdict.of(named_rewards(TASK, score, verifiers))
    except UserCodeError as error:
        verdict = Verdict(error=str(error))
    _add_verdict(trajectory, _storable(_zero_if_failed(verdict, "", ()), 3))
    read = stored(trajectory)
    assert read.reward is not None
    assert len(read.turns) == 3
    assert sum(len(sequence.tokens) for sequence in read.sequences) == 6


def many(prefix: str, count: int) -> dict[str, float]:
    return {f"{prefix}{number}": 1.0 for number in range(count)}


def test_too_many_names_cost_the_agents_rewards_or_the_verdict_and_no_tokens() -> None:
    with pytest.raises(UserCodeError, match="1001 names of rewards; expected at most 1000"):
        named_rewards(TASK, score, many("r", 1001))
    trajectory = Trajectory("t/p/0", "t", "t/p", "p", "a", "completed")
    _add(trajectory, AgentResult(rewards=many("a", 600)), recording("one"))
    _add_verdict(trajectory, _storable(Verdict.of({"reward": 1.0, **many("r", 600)}), 3))
    assert (trajectory.reward, len(trajectory.rewards), trajectory.error_kind) == (1.0, 601, "agent")
    assert "the agent's rewards are left out: together with the verifier's, 1201 names of rewards" in trajectory.error
    assert len(stored(trajectory).turns) == 3
    steps = _storable(Verdict.of({"reward": 1.0, **many("r", 1200)}), 3)  # of several steps of a task
    assert (steps.reward, set(steps.rewards.values()), len(steps.rewards)) == (0.0, {0.0}, 1000)
    assert "1201 names of rewards" in steps.error


def test_rewards_of_turns_do_not_count_as_names() -> None:
    recorder = Recorder("p")
    for number in range(1500):
        message = {"role": "assistant", "content": "so"}
        recorder.add(SampledTokens([1], [2], [-1.0], message=message), [{"role": "user", "content": str(number)}])
    trajectory = Trajectory("t/p/0", "t", "t/p", "p", "a", "completed")
    _add(trajectory, AgentResult(turn_rewards=[0.5] * 1500), recorder.finish())
    _add_verdict(trajectory, _storable(Verdict.of({"reward": 1.0}), 1500))
    assert (trajectory.error, len(stored(trajectory).rewards)) == ("", 1501)


def test_rewards_of_turns_alone_are_an_error() -> None:
    """Nothing may take the reward of one turn for that of the rollout, and then count the turn twice."""
    verdict = _zero_if_failed(Verdict.of({"turn.0": 0.5, "turn.1": 0.25}), "", ())
    assert (verdict.reward, verdict.rewards) == (0.0, {"reward": 0.0})
    assert "the rollout has no reward, only rewards of turns" in verdict.error
    verdict = Verdict.of({"turn.0": 0.5, "sequence.0": 1.0, "turn.3.style": 0.25})
    assert (verdict.reward, verdict.error) == (0.25, ""), "a name with more than a number belongs to no turn"


@pytest.mark.parametrize("number", ["2", "-1", "01", "٠", "9" * 5000])
def test_a_reward_of_a_call_that_was_not_made_is_refused(number: str) -> None:
    check_turns({"turn.0": 1.0, "turn.1": 0.0, "turn.taking": 1.0, "reward": 1.0}, 2)
    with pytest.raises(UserCodeError, match=r"the rollout made 2 model calls; expected turn.0 to turn.1"):
        check_turns({f"turn.{number}": 1.0}, 2)
