"""The token ids of a prompt: the chat template's rendering, with the rollout's own answers as they were sampled.

A rendering encodes the text of each earlier answer anew, often to other ids than were sampled. Where it gives an answer
word for word, the sampled ids replace it, so the sequence grows; white space between thought, text and tool calls may
differ, as parsers leave there what templates add again. Where the template leaves a part of an answer out or
changes it, the rendering itself is the prompt, as it is for every other client of the engine: a new sequence starts::

    rendered      [ prompt i           ][ answer i, encoded anew   ][ end of turn, observation, … ]
    sent          [ all of sequence up to here, answer i as sampled ][ end of turn, observation, … ]

Many templates leave the thoughts of earlier answers out, Qwen3's from the next user message on. With ``thoughts: keep``
in the campaign file's model section, every answer stays in the prompt as it was sampled.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from megaflow_hpc.model.api import RENDER, TEXTS
from megaflow_hpc.model.aside import aside
from megaflow_hpc.model.engine_answer import ids
from megaflow_hpc.model.gateway.dialects.base import reasoning_of
from megaflow_hpc.model.gateway.engine_call import Call, Refused
from megaflow_hpc.model.gateway.recorder import Tip

_TRIES = 4
"""Sequences for which one call looks whether it continues them although the rendering of their prompts has changed."""
_SEED = 16
"""Preceding tokens by which an engine's decoder knows how a text begins."""


async def continued(call: Call, rendered: array[int]) -> array[int]:
    """Returns the prompt to send for a rendering; raises as :meth:`Call.post` does, or if an answer lacks a part."""
    messages, recorder = call.body.get("messages") or (), call.recorder
    found = await aside(call.size, recorder.tip, rendered, messages, call.policy)
    if found is None:
        return await _kept(call, rendered, messages) if call.keep_thoughts else rendered
    sequence, tip = found
    after = rendered[len(tip.rendered) :]
    if tip.stop is None:
        tail = await _tail(call, rendered, messages, tip)
        if len(tail) > len(after):
            return rendered
    elif tip.stop in after:
        tail = after[after.index(tip.stop) + 1 :]
    else:
        return rendered
    sampled, given = sequence.tokens[tip.start : tip.end], after[: len(after) - len(tail)]
    if given == sampled or await _same_text(call, sampled, given, tip):
        return sequence.tokens[: tip.end] + tail
    if not call.keep_thoughts:
        return rendered
    tail = await _tail(call, rendered, messages, tip)  # the answer may have become several turns
    return sequence.tokens[: tip.end] + tail if tail else rendered


async def _kept(call: Call, rendered: array[int], messages: Sequence[Mapping[str, Any]]) -> array[int]:
    """Returns the prompt that keeps the answers of a conversation whose past renders otherwise now."""
    for sequence, tip in await aside(call.size, call.recorder.answered, messages, call.policy, _TRIES):
        if await _rendered(call, messages[: tip.messages]) == tip.rendered:
            tail = await _tail(call, rendered, messages, tip)
            return sequence.tokens[: tip.end] + tail if tail else rendered
    return rendered


async def _same_text(call: Call, sampled: array[int], given: array[int], tip: Tip) -> bool:
    """Returns whether two ways to encode an answer have the same text; bytes that are no UTF-8 at its end have none."""
    end = None if tip.stop is None else -1
    both = [list(part[:end]) for part in (sampled, given)]
    seed = list(tip.rendered[-_SEED:])
    asked = [tokens for tokens in both if tokens]
    request = {
        "model": call.server.model_name,
        "generate_responses": [
            {"request_id": str(n), "choices": [{"index": 0, "token_ids": t}]} for n, t in enumerate(asked)
        ],
        "prompt_token_ids": [seed for _ in asked],
    }
    try:
        choices = (await call.post(TEXTS, request, 8 * len(sampled)))["choices"] if asked else []
    except Refused:
        return False  # it cannot tell
    texts = [str(choice["text"]).rstrip("\ufffd") for choice in choices]
    if len(texts) != len(asked):
        raise ValueError(f"{len(texts)} texts of {len(asked)}")
    one, other = [*texts, "", ""][:2]
    return _parts(one, tip.answer) == _parts(other, tip.answer)


def _parts(text: str, answer: Mapping[str, Any]) -> list[str]:
    """Returns thought, text and what is around them, without the white space between: parsers and clients trim it."""
    parts = []
    for said in (reasoning_of(answer), answer.get("content")):
        if (said := str(said or "").strip()) and said in text:
            before, _, text = text.partition(said)
            parts += [before.strip(), said]
    return [*parts, text.strip()]


async def _tail(call: Call, rendered: array[int], messages: Sequence[Mapping[str, Any]], tip: Tip) -> array[int]:
    """Returns what follows the answer in a rendering; empty if that cannot be told.

    It is what the rendering has in common with that of the same conversation with another answer.
    """
    said = str(tip.answer.get("content") or "").rstrip()
    changed = [dict(m) for m in messages]
    changed[tip.messages] = {"role": "assistant", "content": "B" if said.endswith("A") else "A"}
    common = await aside(call.size, _common_end, rendered, await _rendered(call, changed))
    tail = rendered[len(rendered) - common :]
    if tip.stop is None:
        return tail
    return tail[tail.index(tip.stop) + 1 :] if tip.stop in tail else array("i")


def _common_end(one: array[int], other: array[int]) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


async def _rendered(call: Call, messages: Sequence[Mapping[str, Any]]) -> array[int]:
    return ids((await call.post(RENDER, call.asked(messages=list(messages))))["token_ids"])
