"""An engine's answer with token ids and log-probabilities, read without making an object of each token's score.

Of the 20 KB that 200 tokens come in, only the ids and a number for each are of use, unless the agent asked to see the
scores. Reading the rest as well was a fifth of what a call costs the gateway (``megaflow-hpc bench gateway``). What an
answer has beyond the fields that are known here goes the general way, so that nothing is lost that an agent might want.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Struct


class _Score(Struct, gc=False):
    logprob: float


class Scores(Struct, gc=False):
    """Log-probabilities of a chat answer, in the order of its tokens."""

    content: list[_Score]

    def values(self) -> list[float]:
        return [score.logprob for score in self.content]


class _Choice(Struct, forbid_unknown_fields=True, gc=False):
    message: dict[str, Any]
    logprobs: Scores
    token_ids: list[int]
    index: Any = UNSET
    finish_reason: Any = UNSET
    stop_reason: Any = UNSET
    routed_experts: Any = UNSET


class _Answer(Struct, forbid_unknown_fields=True, gc=False):
    """Fields of OpenAI's ``chat.completion`` and those that vLLM 0.32 adds."""

    prompt_token_ids: list[int]
    choices: list[_Choice]
    id: Any = UNSET
    object: Any = UNSET
    created: Any = UNSET
    model: Any = UNSET
    usage: Any = UNSET
    service_tier: Any = UNSET
    system_fingerprint: Any = UNSET
    prompt_logprobs: Any = UNSET
    prompt_text: Any = UNSET
    kv_transfer_params: Any = UNSET
    ec_transfer_params: Any = UNSET
    metrics: Any = UNSET


_decoder = msgspec.json.Decoder(_Answer)


def read(raw: bytes) -> dict[str, Any] | None:
    """A chat answer as from JSON, its ``logprobs`` :class:`Scores`; ``None``: it has to be read the general way."""
    try:
        answer = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return {**_fields(answer), "choices": [_fields(choice) for choice in answer.choices]}


def _fields(struct: Struct) -> dict[str, Any]:
    found: Mapping[str, Any] = msgspec.structs.asdict(struct)
    return {name: value for name, value in found.items() if value is not UNSET}
