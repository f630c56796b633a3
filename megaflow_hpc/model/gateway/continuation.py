"""Builds a prompt's token ids from the chat template's rendering, with earlier answers replaced by their sampled ids.

A rendering re-encodes the text of each earlier answer, often to ids that differ from the sampled ones. If the rendering
contains the full text of an answer, the sampled ids replace its ids, and the sequence grows. Whitespace between
reasoning, text and tool calls may differ, because parsers drop it and templates add it again. If the template omits or
changes a part of an answer, the rendering is sent unchanged, and a new sequence starts::

    rendered      [ prompt i           ][ answer i, re-encoded     ][ end of turn, observation, … ]
    sent          [ the sequence so far, with answer i as sampled  ][ end of turn, observation, … ]

Image spans are shifted along with the tokens. The prompt must show the same images as the rendering, in the same order.

Many templates omit the reasoning of earlier answers. Qwen3's template omits it after the next user message. With
``thoughts: keep`` in the campaign file's model section, every answer stays in the prompt as it was sampled.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from megaflow_hpc.model.engine_api import DETOKENIZE, RENDER, TEXTS, TOKENIZE, token_ids
from megaflow_hpc.model.gateway.canonical import reasoning_of
from megaflow_hpc.model.gateway.engine_call import Call, RefusedCall
from megaflow_hpc.model.gateway.recorder import Prompt, Tip
from megaflow_hpc.model.json_text import offload
from megaflow_hpc.trajectory import TokenSequence

_MAX_SEQUENCES = 4
"""Maximum number of sequences to try for a call whose prompt does not extend a recorded rendering. Applies to
``thoughts: keep``."""
_RENDERED = (
    *("model", "messages", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs"),
    "continue_final_message",
)
"""Options of a chat request that influence its prompt in SGLang."""
_CONTEXT_TOKENS = 16
"""Number of prompt tokens decoded along with an answer, to give its start the right context."""


async def continued(call: Call, rendered: Prompt) -> Prompt:
    """Returns the prompt to send instead of a rendered prompt.

    Raises the errors of :meth:`Call.post`. A malformed reply raises KeyError or a similar error.
    """
    request = call.request
    messages = request.body.get("messages") or ()
    continues = await offload(request.size, request.recorder.tip, rendered, messages, request.policy, request.role)
    if continues is None:
        return await _with_thoughts(call, rendered, messages) if request.keep_thoughts else rendered
    sequence, tip = continues
    after = rendered.tokens[len(tip.rendered) :]
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
        return _joined(sequence, tip, tail, rendered)
    if not request.keep_thoughts:
        return rendered
    tail = await _tail(call, rendered, messages, tip)  # the template may have split the answer into several turns
    return _joined(sequence, tip, tail, rendered) if tail else rendered


def _joined(sequence: TokenSequence, tip: Tip, tail: array[int], rendered: Prompt) -> Prompt:
    """Returns the sequence up to its answer, followed by the end of the rendering.

    Returns the rendering unchanged if the result would not show the same images.
    """
    first = len(rendered.tokens) - len(tail)
    shift = tip.end - first
    images = [span for span in sequence.images if span.end <= tip.end]
    images += [span._replace(start=span.start + shift) for span in rendered.images if span.start >= first]
    if [span[1:] for span in images] != [span[1:] for span in rendered.images]:
        return rendered
    return Prompt(sequence.tokens[: tip.end] + tail, images)


async def _with_thoughts(call: Call, rendered: Prompt, messages: Sequence[Mapping[str, Any]]) -> Prompt:
    """Returns a prompt that keeps the answers as they were sampled, although the template now renders earlier turns in
    another way."""
    request = call.request
    speaker = request.policy, request.role
    tips = await offload(request.size, request.recorder.answered, messages, *speaker, _MAX_SEQUENCES)
    for sequence, tip in tips:
        if await _rendered(call, messages[: tip.messages]) == tip.rendered:
            tail = await _tail(call, rendered, messages, tip)
            return _joined(sequence, tip, tail, rendered) if tail else rendered
    return rendered


async def _same_text(call: Call, sampled: array[int], given: array[int], tip: Tip) -> bool:
    """Returns whether two encodings of an answer decode to the same text. Ignores invalid UTF-8 at the end."""
    end = None if tip.stop is None else -1
    encodings = [list(part[:end]) for part in (sampled, given)]
    asked = [tokens for tokens in encodings if tokens]
    if call.server.protocol == "sglang":
        return await _same_text_sglang(call, asked, tip)
    request = {
        "model": call.server.model_name,
        "generate_responses": [
            {"request_id": str(n), "choices": [{"index": 0, "token_ids": t}]} for n, t in enumerate(asked)
        ],
        "prompt_token_ids": [list(tip.rendered[-_CONTEXT_TOKENS:])] * len(asked),
    }
    try:
        choices = (await call.post(TEXTS, request, 8 * len(sampled)))["choices"] if asked else []
    except RefusedCall:
        return False  # this server cannot decode token ids
    return _same_parts([str(choice["text"]) for choice in choices], len(asked), tip)


async def _same_text_sglang(call: Call, encodings: list[list[int]], tip: Tip) -> bool:
    """Returns whether two encodings of an answer decode to the same text in SGLang. Also decodes a part of the prompt,
    because SGLang's endpoint does not know the context."""
    context = list(tip.rendered[-_CONTEXT_TOKENS:])
    request = {
        "model": call.server.model_name,
        "tokens": [context, *(context + tokens for tokens in encodings)],
        "skip_special_tokens": False,
    }
    before, *texts = map(str, (await call.post(DETOKENIZE, request))["text"])
    return _same_parts([text.removeprefix(before) for text in texts], len(encodings), tip)


def _same_parts(texts: list[str], expected: int, tip: Tip) -> bool:
    """Returns whether up to two decodings of an answer have the same parts."""
    if len(texts) != expected:
        raise ValueError(f"{len(texts)} texts of {expected}")
    texts = [text.rstrip("\ufffd") for text in texts]
    one, other = [*texts, "", ""][:2]
    return _parts(one, tip.answer) == _parts(other, tip.answer)


def _parts(text: str, answer: Mapping[str, Any]) -> list[str]:
    """Splits a decoded answer into reasoning, text and the rest. Strips the whitespace that parsers also strip."""
    parts = []
    for part in (reasoning_of(answer), str(answer.get("content") or "").strip()):
        if part and part in text:
            before, _, text = text.partition(part)
            parts += [before.strip(), part]
    return [*parts, text.strip()]


async def _tail(call: Call, rendered: Prompt, messages: Sequence[Mapping[str, Any]], tip: Tip) -> array[int]:
    """Returns the tokens that follow the answer in a rendering, or an empty array if they cannot be determined.

    Renders the conversation again with a different answer. The tokens that both renderings end with are the result.
    """
    content = str(tip.answer.get("content") or "").rstrip()
    changed = [dict(m) for m in messages]
    changed[tip.messages] = {"role": "assistant", "content": "B" if content.endswith("A") else "A"}
    common = await offload(call.request.size, _common_end, rendered.tokens, await _rendered(call, changed))
    tail = rendered.tokens[len(rendered.tokens) - common :]
    if tip.stop is None:
        return tail
    return tail[tail.index(tip.stop) + 1 :] if tip.stop in tail else array("i")


def _common_end(one: array[int], other: array[int]) -> int:
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        count += 1
    return count


async def _rendered(call: Call, messages: Sequence[Mapping[str, Any]]) -> array[int]:
    asked = call.asked(messages=list(messages))
    if call.server.protocol == "sglang":
        return token_ids((await call.post(TOKENIZE, tokenize_request(asked)))["tokens"])
    return token_ids((await call.post(RENDER, call.rendering(asked)))["token_ids"])


def tokenize_request(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request for SGLang to render the messages of a chat request."""
    return {name: asked[name] for name in _RENDERED if name in asked}
