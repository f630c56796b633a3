"""The four protocols between gateway and engine, in order of how much they report about the sampled tokens.

``text``: the plain OpenAI endpoint, for engines that reject the parameters below. It reports no tokens, so only the
conversation is recorded.

``plain``: the OpenAI endpoint with ``logprobs`` and ``return_token_ids`` enabled (supported by vLLM ≥ 0.10 and the
scripted engine). The engine re-renders the whole history for each call. If the history's text does not encode to the
sampled ids, a new sequence starts.

``split`` (vLLM with ``--enable-scale-out``): ``…/render`` returns the prompt's token ids, ``/inference/v1/generate``
maps ids to ids, and ``…/derender`` turns them into the agent's response. Before the second step, the gateway replaces
this rollout's earlier answers in the prompt with the sampled ids (:mod:`~megaflow_hpc.model.gateway.continuation`). So
a conversation that only grows is a single sequence, even if its text would encode to other ids.

``sglang`` (SGLang) does the same in two requests: ``/tokenize`` renders the prompt, and a chat completion takes it as
``input_ids`` and returns the sampled ids with the agent's response.

If a server lacks the endpoints of its protocol, the gateway falls back to the next lower one. Each rollout counts its
calls per protocol (:attr:`~megaflow_hpc.trajectory.Recording.protocols`), so readers know how many calls have no
tokens.

A prompt contains a run of placeholder tokens for each image. With ``split``, ``…/render`` reports which run belongs to
which image. The gateway then sends the ids, with one placeholder per run, together with the images, and checks that the
engine expands them to the same prompt. If it does not, and always with ``plain``, the engine renders the messages a
second time, and both renderings must agree. If placeholders cannot be matched to images, the call is recorded as
``text``, so that no trainer mistakes placeholders for text.

The gateway removes fields from the reply that only its own additions to the request caused, so the agent gets only what
it asked for.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megaflow_hpc.model.engine_api import (
    CLASSIFY,
    COMPLETIONS,
    DERENDER,
    GENERATE,
    RENDER,
    TOKENIZE,
    check,
    check_size,
    log_probabilities,
    routed_experts,
    token_ids,
)
from megaflow_hpc.model.gateway.continuation import continued, tokenize_request
from megaflow_hpc.model.gateway.engine_call import Call, RefusedCall, Reply, UnusableAnswer, parse_weight_version
from megaflow_hpc.model.gateway.recorder import Prompt, SampledTokens
from megaflow_hpc.model.images import image_spans
from megaflow_hpc.model.json_text import TooMuch, offload

T = TypeVar("T")
_MALFORMED = (KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError)
"""Exceptions raised by parsing a malformed response."""
_MAX_MESSAGE = 500
"""Maximum length of an error message or a name, in characters."""
_MAX_TOKENS = 2**31
_NOT_SERVED = frozenset({404, 405, 501})
"""HTTP statuses of a server that does not support a path."""


@dataclass
class Answer:
    """An engine's response: the body to return to the agent, and the samples to record."""

    body: dict[str, Any]
    samples: list[SampledTokens] = field(default_factory=list)
    protocol: str = ""
    """The protocol that was used."""
    size: int = 0
    """Size of the engine's response in bytes."""
    total_tokens: int = 0
    """Number of prompt tokens and completion tokens combined."""


async def ask(call: Call) -> Answer:
    """Makes one call in the server's protocol. Raises the same errors as :meth:`Call.post`."""
    return await PROTOCOLS[call.server.protocol](call)


async def text(call: Call) -> Answer:
    """Makes a call that returns no tokens, so that only its text is recorded."""
    reply = await call.complete()
    return await _read(call, reply, "an answer without a choice", _text, call, reply)


def _text(call: Call, reply: Reply) -> Answer:
    check(reply, call.request.chat, call.request.choices)
    check_size(reply, reply.size)
    return _text_answer(call, reply)


async def plain(call: Call) -> Answer:
    """Makes a call at ``/v1/chat/completions`` or ``/v1/completions`` that returns token ids and log-probabilities."""
    server, request = call.server, call.request
    logprobs = True if request.chat else max(1, int(request.body.get("logprobs") or 0))
    rendered = await _rendered_images(call)
    try:
        reply = await call.complete(return_token_ids=True, logprobs=logprobs)
    except RefusedCall as refusal:
        # The server may not support the parameter, but the agent's own text may also contain its name.
        if b"return_token_ids" not in refusal.body:
            raise
        supported = await _control_status(call, request.path, return_token_ids=True) < 400
        if supported or await _control_status(call, request.path) >= 400:
            raise
        server.protocol, server.degraded = "text", True
        return await text(call)
    return await _read(call, reply, "no token ids or log-probabilities in the answer", _plain, call, reply, rendered)


async def _rendered_images(call: Call) -> Prompt | None:
    """Returns the prompt with the spans of its images, or ``None`` if there are no images or the server does not report
    their spans."""
    if not call.request.asked_images or None in call.request.asked_images:
        return None
    try:
        reply = await call.post(RENDER, call.rendering(call.asked()))
        return await _read(call, reply, "an answer of render lacks a part", _prompt, call, reply)
    except (RefusedCall, UnusableAnswer):
        return None


def _prompt(call: Call, reply: Reply) -> Prompt | None:
    """Returns a rendered prompt, or ``None`` if the server does not report the positions of the request's images."""
    tokens, asked = token_ids(reply["token_ids"]), call.request.asked_images
    if not asked:
        return Prompt(tokens)
    if None in asked or not reply.get("features"):
        return None
    return Prompt(tokens, image_spans(reply["features"], [image for image in asked if image], len(tokens)))


def _plain(call: Call, reply: Reply, rendered: Prompt | None) -> Answer:
    request, server = call.request, call.server
    check(reply, request.chat, request.choices)
    reply["model"] = request.body.get("model") or server.model_name
    if reply.get("usage") and not any("token_ids" in choice for choice in reply["choices"]):
        check_size(reply, reply.size)
        return _text_answer(call, reply)
    samples = [_sample(reply, choice, request.chat, server.name) for choice in reply["choices"]]
    for sample in samples if request.asked_images else ():
        if rendered is None or sample.prompt != rendered.tokens:
            _strip(reply, request.body, request.chat)
            check_size(reply, reply.size)
            return _text_answer(call, reply)
        sample.images = rendered.images
    return _token_answer(call, reply, samples, "plain")


async def split(call: Call) -> Answer:
    """Makes a chat call in three requests: render, generate, derender. Falls back to ``plain`` for other requests."""
    body, server = call.request.body, call.server
    if not call.request.chat or body.get("stop") or call.request.choices > 1:
        return await plain(call)  # derender supports neither stop strings nor multiple choices
    images = call.request.asked_images
    if images and (None in images or not server.expands_images):
        return await plain(call)
    asked = call.asked(logprobs=True)
    try:
        request = await call.post(RENDER, call.rendering(asked))
    except RefusedCall as refusal:
        if refusal.status not in _NOT_SERVED or await _control_status(call, RENDER) not in _NOT_SERVED:
            raise
        server.protocol, server.degraded = "plain", True
        return await plain(call)
    lacking = "an answer of render, generate or derender lacks a part"
    rendered = await _read(call, request, lacking, _prompt, call, request)
    if rendered is None:
        return await plain(call)
    try:
        sampling = {**request["sampling_params"]}
        prompt = await continued(call, rendered)
        if prompt is not rendered and not (body.get("max_tokens") or body.get("max_completion_tokens")):
            # The limit was computed from the rendered prompt's length.
            sampling["max_tokens"] += len(rendered.tokens) - len(prompt.tokens)
        if call.request.limit:
            sampling["max_tokens"] = min(sampling["max_tokens"], call.request.limit)
        speaker = call.request.policy, call.request.role
        sampling["logprobs"] = max(0, sampling.get("logprobs") or 0)
        if routed := call.request.recorder.routed(prompt.tokens, *speaker, prompt.images):
            sampling["routed_experts_prompt_start"] = routed
    except _MALFORMED as error:
        raise UnusableAnswer(f"{server.name}: {lacking} ({error!r})", retry=False) from error
    prompt_ids = await offload(len(prompt.tokens), prompt.tokens.tolist)
    generate = {**request, "token_ids": prompt_ids, "sampling_params": sampling, "stream": False}
    if images:
        shown = _with_pixels(call, prompt)
        if shown is None:
            return await plain(call)
        generate |= shown
    generated = await call.post(GENERATE, generate, max(request.size, call.request.size))
    if images and generated.pop("prompt_token_ids", None) != prompt_ids:
        server.expands_images = False
        return await plain(call)
    choice, tokens, logprobs, spans = await _read(call, generated, lacking, _generated, generated)
    encoded = choice.pop("routed_experts", None)
    experts = await _read(call, generated, lacking, routed_experts, encoded, len(prompt_ids) + len(tokens), routed)
    derender = {
        "model": server.model_name,
        "prompt_tokens": len(prompt_ids),
        "generate_response": generated,
        "chat_request": asked,
        "prompt_token_ids": prompt_ids,
    }
    reply = await call.post(DERENDER, derender, generated.size)
    reply.size = max(reply.size, generated.size)
    reply["model"] = body.get("model") or server.model_name

    def derendered() -> Answer:
        check(reply, True, 1)
        message = _without_empty(reply["choices"][0]["message"])
        sample = SampledTokens(
            prompt=prompt.tokens,
            images=prompt.images,
            tokens=tokens,
            logprobs=logprobs,
            text=message.get("content") or "",
            finish_reason=reply["choices"][0].get("finish_reason") or _name(choice.get("finish_reason")),
            weight_version=spans[-1][0],
            weight_spans=spans,
            server=server.name,
            message=message,
            request_id=_name(generated.get("request_id")),
            rendered=rendered,
            stopped=choice.get("finish_reason") == "stop" and not isinstance(choice.get("stop_reason"), str),
            experts=experts,
        )
        return _token_answer(call, reply, [sample], "split")

    return await _read(call, reply, lacking, derendered)


def _with_pixels(call: Call, prompt: Prompt) -> dict[str, Any] | None:
    """Returns the fields of a generate request with the prompt's images. Returns ``None`` if token ids cannot mark the
    images' positions.

    vLLM expands the first placeholder token in the prompt to the length of the first image, and so on. Each run is
    therefore sent as a single token. This requires that the placeholder tokens occur nowhere else in the prompt.
    """
    tokens, spans = prompt.tokens, prompt.images
    kinds = {tokens[span.start] for span in spans}
    if sum(map(tokens.count, kinds)) != sum(span.length for span in spans):
        return None
    ids, start = list[int](), 0
    for span in spans:
        ids += tokens[start : span.start + 1]
        start = span.end
    ids += tokens[start:]
    parts = [{"type": "image_url", "url": call.request.images[span.image].url} for span in spans]
    return {"token_ids": ids, "features": None, "content_parts": parts, "return_token_ids": True}


async def sglang(call: Call) -> Answer:
    """Makes a chat call to SGLang in two requests: tokenize, and a chat completion of the ids. Falls back to ``text``
    for other requests."""
    if not call.request.chat or call.request.choices > 1 or call.request.asked_images:
        return await text(call)  # a prompt given as ids cannot contain images
    asked = call.asked()
    try:
        rendered_reply = await call.post(TOKENIZE, tokenize_request(asked))
    except RefusedCall as refusal:
        own = {"model": call.server.model_name, **control_prompt(call.request.path)}
        if refusal.status not in _NOT_SERVED or await _control_status(call, TOKENIZE, own) not in _NOT_SERVED:
            raise
        call.server.protocol, call.server.degraded = "text", True
        return await text(call)
    lacking = "an answer of tokenize or of a chat completion lacks a part"
    rendered = await _read(call, rendered_reply, lacking, lambda: Prompt(token_ids(rendered_reply["tokens"])))
    try:
        prompt = await continued(call, rendered)
    except _MALFORMED as error:
        raise UnusableAnswer(f"{call.server.name}: {lacking} ({error!r})", retry=False) from error
    ids = await offload(len(prompt.tokens), prompt.tokens.tolist)
    reply = await call.complete(input_ids=ids, return_token_ids=True, logprobs=True)

    def answered() -> Answer:
        check(reply, True, 1)
        (choice,) = reply["choices"]
        if "response_token_ids" not in choice:  # an older version ignores the parameters
            call.server.protocol, call.server.degraded = "text", True
            check_size(reply, reply.size)
            return _text_answer(call, reply)
        reply["model"] = call.request.body.get("model") or call.server.model_name
        reply["prompt_token_ids"], choice["token_ids"] = choice["prompt_token_ids"], choice.pop("response_token_ids")
        sample = _sample(reply, choice, True, call.server.name)
        if sample.prompt != prompt.tokens:
            raise ValueError(f"{len(prompt.tokens)} prompt tokens, answered for {len(sample.prompt)} others")
        sample.rendered, sample.stopped = rendered, isinstance(choice.get("matched_stop"), int)
        return _token_answer(call, reply, [sample], "sglang")

    return await _read(call, reply, lacking, answered)


def _generated(generated: Reply) -> tuple[dict[str, Any], array[int], array[float], list[tuple[int, int]]]:
    """Returns (choice, token ids, log-probabilities, weight version spans) of a generate response."""
    (choice,) = generated["choices"]
    tokens = token_ids(choice["token_ids"])
    logprobs = log_probabilities([entry["logprob"] for entry in choice["logprobs"]["content"]], len(tokens))
    return choice, tokens, logprobs, _spans(choice, len(tokens)) or [(generated.weight_version, len(tokens))]


async def _read(call: Call, reply: Reply, problem: str, read: Callable[..., T], *args: Any) -> T:
    """Calls ``read``, in a worker thread if the reply is large. Raises UnusableAnswer if the reply is malformed."""
    try:
        return await offload(reply.size, read, *args)
    except _MALFORMED as error:
        message = f"{call.server.name}: {problem} ({error!r})"
        by_request = isinstance(error, TooMuch) and call.request.may_be_large
        raise UnusableAnswer(message[:_MAX_MESSAGE], retry=False, by_request=by_request) from error


async def reward(call: Call) -> Answer:
    """Makes a reward model score a conversation. The answer's text is the reward before any activation function."""
    if not call.request.chat:
        raise RefusedCall(400, b"a reward model rates conversations; use /chat/completions")
    body = {"model": call.server.model_name, "messages": call.request.body["messages"], "use_activation": False}
    reply = await call.post(CLASSIFY, body)
    return await _read(
        call, reply, "an answer without a reward; it must be a model with one class", _reward, call, reply
    )


def _reward(call: Call, reply: Reply) -> Answer:
    ((value,),) = (data["probs"] for data in reply["data"])
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    message = {"role": "assistant", "content": repr(float(value))}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": reply["usage"]["prompt_tokens"], "completion_tokens": 0}
    usage["total_tokens"] = usage["prompt_tokens"]
    named = {"id": _name(reply.get("id")), "object": "chat.completion", "created": 0, "model": call.server.model_name}
    return _text_answer(call, Reply({**named, "choices": [choice], "usage": usage}))


async def count(call: Call) -> int:
    """Returns the number of tokens in the request's prompt. Raises the same errors as :meth:`Call.post`."""
    try:
        if call.server.protocol == "split":
            return len((await call.post(RENDER, call.rendering(call.asked())))["token_ids"])
        if call.server.protocol == "sglang":
            return len((await call.post(TOKENIZE, tokenize_request(call.asked())))["tokens"])
        reply = await call.post(call.request.path, call.asked(max_tokens=1))  # every engine reports this count
        return max(0, int(reply["usage"]["prompt_tokens"]))
    except _MALFORMED as error:
        message = f"{call.server.name}: an answer without a count of the prompt's tokens ({error!r})"
        raise UnusableAnswer(message[:_MAX_MESSAGE], retry=False) from error


def _text_answer(call: Call, reply: Reply) -> Answer:
    """Returns an answer without tokens. The first choice gets all usage that the engine reports."""
    usage = reply.get("usage") or {}
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    prompt, sampled, total = (min(max(0, usage.get(name) or 0), _MAX_TOKENS) for name in names)
    total = max(total, prompt + sampled)
    samples = []
    for number, choice in enumerate(reply["choices"]):
        message = _without_empty(choice["message"]) if "message" in choice else None
        sample = SampledTokens(
            prompt=(),
            tokens=(),
            logprobs=(),
            text=(choice.get("text") if message is None else message.get("content")) or "",
            finish_reason=_name(choice.get("finish_reason")),
            server=call.server.name,
            message=message,
            request_id=_name(reply.get("id")),
            counted=0 if number else sampled,
            counted_prompt=0 if number else total - sampled,
        )
        samples.append(sample)
    return Answer(reply, samples, "text", reply.size, total)


def _token_answer(call: Call, reply: Reply, samples: list[SampledTokens], protocol: str) -> Answer:
    """Returns an answer with tokens. Removes the fields that only the gateway requested."""
    _strip(reply, call.request.body, call.request.chat)
    check_size(reply, reply.size)
    total = len(samples[0].prompt) + sum(len(sample.tokens) for sample in samples)
    return Answer(reply, samples, protocol, reply.size, total)


def _sample(reply: Reply, choice: dict[str, Any], chat: bool, server: str) -> SampledTokens:
    message = _without_empty(choice["message"]) if chat else None
    prompt = token_ids(reply["prompt_token_ids"] if chat else choice["prompt_token_ids"])
    tokens = token_ids(choice["token_ids"])
    logprobs = choice["logprobs"]
    values = [entry["logprob"] for entry in logprobs["content"]] if chat else logprobs["token_logprobs"]
    return SampledTokens(
        prompt=prompt,
        tokens=tokens,
        logprobs=log_probabilities(values, len(tokens)),
        text=(message.get("content") or "") if message is not None else choice.get("text", ""),
        finish_reason=_name(choice.get("finish_reason")),
        weight_version=reply.weight_version,
        server=server,
        message=message,
        request_id=_name(reply.get("id")),
        experts=routed_experts(choice.pop("routed_experts", None), len(prompt) + len(tokens)),
    )


def _spans(choice: Mapping[str, Any], tokens: int) -> list[tuple[int, int]]:
    """Returns (weight version, end index) of each run of tokens. Returns an empty list if the engine reports no
    versions.

    A response has several versions if the weights changed while it was sampled.
    """
    spans, last = list[tuple[int, int]](), 0
    for span in choice.get("weight_versions") or []:
        version, end = parse_weight_version(span["version"]), int(span["end"])
        if version is None:
            return []  # the engine has no version number; the proxy's header has it
        if not last <= end <= tokens:
            raise ValueError(f"weight versions of {end} tokens after {last}, {tokens} token ids")
        spans.append((version, end))
        last = end
    if spans and last != tokens:
        raise ValueError(f"weight versions of {last} tokens, {tokens} token ids")
    return spans


def _name(value: Any) -> str:
    """Returns a name reported by an engine, or an empty string if it is invalid."""
    return value if isinstance(value, str) and len(value) <= _MAX_MESSAGE else ""


async def _control_status(call: Call, path: str, own: Mapping[str, Any] | None = None, **options: Any) -> int:
    """Sends one of the gateway's own requests to the server and returns the HTTP status.

    The status determines the protocol that all rollouts use with the server. So an agent's text must not influence it.
    """
    body = {"model": call.server.model_name, "max_tokens": 1, **control_prompt(path), **options}
    try:
        await call.post(path, own or body)
    except RefusedCall as refusal:
        return refusal.status
    return 200


def control_prompt(path: str) -> dict[str, Any]:
    """Returns the prompt of the gateway's own short request."""
    return {"prompt": "."} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "."}]}


def _without_empty(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message without its empty fields."""
    return {k: v for k, v in message.items() if v or k in ("role", "content")}


def _strip(reply: dict[str, Any], body: Mapping[str, Any], chat: bool) -> None:
    """Removes fields that the agent did not request."""
    if not body.get("return_token_ids"):
        reply.pop("prompt_token_ids", None)
        for choice in reply["choices"]:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
    logprobs = body.get("logprobs")
    if not logprobs and (chat or logprobs is None):
        for choice in reply["choices"]:
            choice["logprobs"] = None


PROTOCOLS: Mapping[str, Callable[[Call], Awaitable[Answer]]] = {
    "text": text,
    "plain": plain,
    "split": split,
    "sglang": sglang,
    "reward": reward,
}
