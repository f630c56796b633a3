"""Keeps what engines reported to the gateways of a test, to compare it with the recordings."""

from __future__ import annotations

from typing import Any

import pytest

from megaflow_hpc.model.gateway.recorder import Recorder, SampledTokens
from megaflow_hpc.trajectory import Recording, Turn

_REPORTED: dict[int, tuple[Recording, list[SampledTokens]]] = {}
"""Samples by the identity of their recording, which is kept so that its identity is not reused."""


def keep_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps every sample until the next test."""
    add = Recorder.add

    def keeping(self: Recorder, sample: SampledTokens, *arguments: Any, **options: Any) -> Turn:
        _REPORTED.setdefault(id(self.recording), (self.recording, []))[1].append(sample)
        return add(self, sample, *arguments, **options)

    _REPORTED.clear()
    monkeypatch.setattr(Recorder, "add", keeping)


def reported(recording: Recording) -> list[SampledTokens]:
    """The samples of a recording, one per turn."""
    return _REPORTED[id(recording)][1] if id(recording) in _REPORTED else []


def answered(recording: Recording) -> list[str]:
    """The text of the answer to each call."""
    pairs = zip(recording.turns, recording.calls, strict=True)
    return [recording.messages[t.message].get("content") or "" if t.message >= 0 else call["text"] for t, call in pairs]


def check_against_reported(recording: Recording, abs_: float | None = None) -> None:
    """Checks that ids and scores of every turn, and the text of its call, are those that the engine reported."""
    assert len(recording.calls) == len(recording.turns)
    samples, texts = reported(recording), answered(recording)
    for turn, text, sample in zip(recording.turns, texts, samples, strict=True):
        sequence = recording.sequences[turn.sequence]
        part = slice(turn.token_start, turn.token_end)
        assert list(sequence.tokens[part]) == list(sample.tokens)
        assert list(sequence.logprobs[part]) == pytest.approx(list(sample.logprobs), abs=abs_)
        assert set(sequence.loss_mask[part]) <= {int(sample.free)}
        assert turn.token_start == len(sample.prompt)
        assert text == sample.text
