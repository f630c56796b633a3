"""Recorded ids are the sampled ids, for any conversation and any editing of its history."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_hpc.host.wire import pack, unpack
from megaflow_hpc.model.engines.scripted.engine import END, logprob, render
from megaflow_hpc.model.gateway import recorder as gateway_recorder
from megaflow_hpc.model.gateway.recorder import Recorder, SampledTokens
from megaflow_hpc.trajectory import TokenSequence

IDS = st.lists(st.integers(0, 300), max_size=12)
STEP = st.tuples(
    st.sampled_from(["extend", "extend", "extend", "edit", "fresh", "repeat"]), IDS, IDS, st.integers(0, 5)
)


def sample(prompt: list[int], tokens: list[int], version: int = 0) -> SampledTokens:
    return SampledTokens(prompt, tokens, [logprob(t, n) for n, t in enumerate(tokens)], weight_version=version)


def check_columns(sequence: TokenSequence) -> None:
    columns = (sequence.tokens, sequence.logprobs, sequence.loss_mask, sequence.weight_versions)
    assert len({len(c) for c in columns}) == 1
    for score, mask, version in zip(*columns[1:], strict=True):
        assert (mask == 1) == (not math.isnan(score)) == (version >= 0)


@given(st.lists(STEP, max_size=12))
def test_every_sampled_token_is_kept_once_and_every_call_can_be_read_back(steps: list) -> None:
    recorder, calls = Recorder("p"), []
    context: list[int] = [1, 2, 3]
    for kind, new, sampled, version in steps:
        if kind == "edit":
            context = [*context[: len(context) // 2], 999]
        elif kind == "fresh":
            context = [1000 + len(calls)]
        elif kind == "extend":
            context = context + new
        if version % 2:  # the recording continues in another process
            recorder = Recorder.resumed(unpack(pack(recorder.state())))
        recorder.add(sample(context, sampled, version))
        calls.append((list(context), sampled, version))
        if kind != "repeat":
            context = context + sampled
    recording = recorder.finish()
    assert len(recording.turns) == len(calls)
    for turn, (prompt, sampled, version) in zip(recording.turns, calls, strict=True):
        sequence = recording.sequences[turn.sequence]
        assert list(sequence.tokens[: turn.token_start]) == prompt
        assert list(sequence.tokens[turn.token_start : turn.token_end]) == sampled
        assert set(sequence.weight_versions[turn.token_start : turn.token_end]) <= {version}
    for sequence in recording.sequences:
        check_columns(sequence)
    assert sum(sum(s.loss_mask) for s in recording.sequences) == sum(len(s) for _, s, _ in calls)


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), min_size=1, max_size=6))
def test_an_append_only_conversation_is_one_sequence(exchanges: list[tuple[str, str]]) -> None:
    recorder, messages = Recorder("p"), []
    for question, answer in exchanges:
        messages.append({"role": "user", "content": question})
        recorder.add(sample(render(messages), [*answer.encode(), END]), messages)
        messages.append({"role": "assistant", "content": answer})
    recording = recorder.finish()
    assert len(recording.sequences) == 1
    expected = b"".join(answer.encode() for _, answer in exchanges)
    sequence = recording.sequences[0]
    sampled = [t for t, m in zip(sequence.tokens, sequence.loss_mask, strict=True) if m]
    assert bytes(t for t in sampled if t < 256) == expected


def test_two_conversations_of_one_rollout_grow_side_by_side() -> None:
    recorder = Recorder("p")
    recorder.add(sample([1, 2], [3]))
    recorder.add(sample([7, 8], [9]))
    recorder.add(sample([1, 2, 3, 4], [5]))
    recorder.add(sample([7, 8, 9, 4], [5]))
    recording = recorder.finish()
    assert [list(s.tokens) for s in recording.sequences] == [[1, 2, 3, 4, 5], [7, 8, 9, 4, 5]]
    assert [t.sequence for t in recording.turns] == [0, 1, 0, 1]


def test_a_token_without_log_probability_is_refused() -> None:
    with pytest.raises(ValueError, match="2 sampled tokens, 1 log-prob"):
        Recorder("p").add(SampledTokens([1], [2, 3], [-0.1]))


def test_every_call_is_kept_with_its_answer_and_without_its_tokens() -> None:
    recorder = Recorder("p")
    for _ in range(5):
        recorder.add(sample([1], [2] * 400_000))
    calls = recorder.finish().calls
    assert len(calls) == 5
    assert all(len(str(call)) < 200 for call in calls)


def test_the_time_in_the_sandbox_is_that_of_the_turn_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(gateway_recorder.time, "monotonic", lambda: now)
    recorder = Recorder("p")
    with recorder.in_sandbox():  # before the first call: the program of an agent that lives there
        now += 1
        recorder.add(sample([1], [2]))
        now += 0.5
        with recorder.in_sandbox():
            now += 2
    now += 0.25
    recorder.request_arrived()
    recorder.add(sample([1, 2], [3]))
    first, second = recorder.recording.turns
    assert (first.sandbox_s, first.agent_s) == (0.0, 2.75)
    with recorder.in_sandbox():
        now += 3
        with recorder.in_sandbox():  # at the same time
            now += 4
    now += 1
    recorder.request_arrived()
    assert (second.sandbox_s, second.agent_s) == (7.0, 1.0)
    again = Recorder.resumed(unpack(pack(recorder.state())))
    assert [turn.sandbox_s for turn in again.recording.turns] == [0.0, 7.0]
    again.add(sample([1, 2, 3], [4]))
    with again.in_sandbox():
        now += 5
        again.finish()  # cut off
    assert (again.recording.turns[-1].sandbox_s, again.recording.turns[-1].agent_s) == (5.0, 0.0)
