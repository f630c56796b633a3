"""The three protocols between gateway and engine, in order of how much they report about the sampled tokens.

``text``: the plain OpenAI endpoint, for engines that refuse the parameters below. It reports no tokens; only the
conversation is recorded.

``plain``: the OpenAI endpoint with ``logprobs`` and ``return_token_ids`` switched on (vLLM ≥ 0.10 and the scripted
engine have both). The engine re-renders the whole history, so a history whose text does not encode to the sampled ids
starts a new sequence.

``split`` (vLLM with ``--enable-scale-out``): ``…/render`` returns the prompt's token ids, ``/inference/v1/generate``
maps ids to ids, and ``…/derender`` turns them into the agent's answer. Before the second step, the gateway replaces
this rollout's earlier answers in the prompt by the sampled ids (:mod:`~megaflow_hpc.model.gateway.continuation`). So a
conversation that only grows is one sequence, even if its text encodes to other ids.

If a server lacks the endpoints of its protocol, the gateway falls back to the next lower one. It counts the protocols
used per rollout (:attr:`~megaflow_hpc.trajectory.Recording.protocols`), so readers know which calls have no tokens.

The gateway removes what it added to a request from the reply: the agent sees the reply to its own request.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megaflow_hpc.model.api import COMPLETIONS, DERENDER, GENERATE, RENDER
from megaflow_hpc.model.engine_answer import check, check_size, ids, scores
from megaflow_hpc.model.gateway.continuation import continued
from megaflow_hpc.model.gateway.engine_call import Call, Doubtful, RefusedCall, Reply, multiplied, weight_version
from megaflow_hpc.model.gateway.recorder import SampledTokens
from megaflow_hpc.model.json_text import TooMuch
from megaflow_hpc.model.offload import offload

T = TypeVar("T")
_WRONG = (KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError)
"""What reading an answer raises that is none."""
_SAID = 500
"""Characters of what is said of one."""
_MOST_TOKENS = 2**31
LACKING = frozenset({404, 405, 501})
"""HTTP statuses of a server that has no such path."""


@dataclass
class Answer:
    """An engine's answer, split into what goes back to the agent and what is recorded."""

    body: dict[str, Any]
    samples: list[SampledTokens] = field(default_factory=list)
    """Empty if the engine reports no tokens; see :func:`texts_of`."""
    protocol: str = ""
    """The protocol in which the engine was asked."""
    size: int = 0
    """Bytes that the engine sent."""


async def ask(call: Call) -> Answer:
    """Makes one call in the server's protocol; raises as :func:`post` does."""
    return await PROTOCOLS[call.server.protocol](call)


async def text(call: Call) -> Answer:
    """Makes a call of which only the text is kept."""
    reply = await call.complete()
    return await _read(call, reply, "an answer without a choice", _text, call, reply)


def _text(call: Call, reply: Reply) -> Answer:
    check(reply, call.chat, call.choices)
    check_size(reply, reply.size)
    return Answer(reply, protocol="text", size=reply.size)


async def plain(call: Call) -> Answer:
    """Calls ``/v1/chat/completions`` or ``/v1/completions`` with ids and log-probabilities switched on."""
    server, body = call.server, call.body
    scores = True if call.chat else max(1, int(body.get("logprobs") or 0))
    try:
        reply = await call.complete(return_token_ids=True, logprobs=scores)
    except RefusedCall as refusal:
        # It may not know the parameter, or the agent wrote the word.
        known = b"return_token_ids" not in refusal.body or await _own(call, call.path, return_token_ids=True) < 400
        if known or await _own(call, call.path) >= 400:
            raise
        server.protocol, server.degraded = "text", True
        return await text(call)
    return await _read(call, reply, "no token ids or log-probabilities in the answer", _plain, call, reply)


def _plain(call: Call, reply: Reply) -> Answer:
    check(reply, call.chat, call.choices)
    reply["model"] = call.body.get("model") or call.server.model_name
    text_alone, samples = _text_alone(reply), []
    if not text_alone:
        samples = [_sample(reply, choice, call.chat, call.server.name) for choice in reply["choices"]]
        _strip(reply, call.body, call.chat)
    check_size(reply, reply.size)
    return Answer(reply, samples, protocol="text" if text_alone else "plain", size=reply.size)


async def split(call: Call) -> Answer:
    """Makes a chat call in three requests: render, generate, derender; what these cannot express, in ``plain``."""
    body = call.body
    if not call.chat or body.get("stop") or call.choices > 1:
        return await plain(call)  # derender knows nothing of stop strings and sampled alternatives
    server = call.server
    asked = call.asked(logprobs=True)
    try:
        request = await call.post(RENDER, asked)
    except RefusedCall as refusal:
        if refusal.status not in LACKING or await _own(call, RENDER) not in LACKING:
            raise
        server.protocol, server.degraded = "plain", True  # it has no such paths: from now on as one without them
        return await plain(call)
    lacking = "an answer of render, generate or derender lacks a part"
    try:
        rendered, sampling = await offload(request.size, ids, request["token_ids"]), dict(request["sampling_params"])
        prompt = rendered if request.get("features") else await continued(call, rendered)
        if prompt is not rendered and not (body.get("max_tokens") or body.get("max_completion_tokens")):
            sampling["max_tokens"] += len(rendered) - len(prompt)  # it was all the room that the rendered prompt left
        if call.limit:
            sampling["max_tokens"] = min(sampling["max_tokens"], call.limit)
        sampling["logprobs"] = max(0, sampling.get("logprobs") or 0)
    except _WRONG as error:
        raise Doubtful(f"{server.name}: {lacking} ({error!r})", again=False) from error
    told = await offload(len(prompt), prompt.tolist)
    generate = {**request, "token_ids": told, "sampling_params": sampling, "stream": False}
    generated = await call.post(GENERATE, generate, request.size)
    choice, tokens, scored, spans = await _read(call, generated, lacking, _generated, generated)
    about = {"generate_response": generated, "chat_request": asked, "prompt_token_ids": told}
    derender = {"model": server.model_name, "prompt_tokens": len(prompt), **about}
    reply = await call.post(DERENDER, derender, generated.size)
    reply.size = max(reply.size, generated.size)
    reply["model"] = body.get("model") or server.model_name

    def derendered() -> Answer:
        check(reply, True, 1)
        message = _brief(reply["choices"][0]["message"])
        finish = reply["choices"][0].get("finish_reason") or _name(choice.get("finish_reason"))
        sample = SampledTokens(
            prompt=prompt,
            tokens=tokens,
            logprobs=scored,
            text=message.get("content") or "",
            finish_reason=finish,
            weight_version=spans[-1][0],
            weight_spans=spans,
            server=server.name,
            message=message,
            request_id=_name(generated.get("request_id")),
            rendered=rendered,
            stopped=choice.get("finish_reason") == "stop" and not isinstance(choice.get("stop_reason"), str),
        )
        _strip(reply, body, chat=True)
        check_size(reply, reply.size)
        return Answer(reply, [sample], protocol="split", size=reply.size)

    return await _read(call, reply, lacking, derendered)


def _generated(generated: Reply) -> tuple[dict[str, Any], array[int], array[float], list[tuple[int, int]]]:
    """Returns the choice of an answer of generate, its ids and log-probabilities, and the versions of its tokens."""
    (choice,) = generated["choices"]
    tokens = ids(choice["token_ids"])
    scored = scores([entry["logprob"] for entry in choice["logprobs"]["content"]], len(tokens))
    return choice, tokens, scored, _spans(choice, len(tokens)) or [(generated.weight_version, len(tokens))]


async def _read(call: Call, reply: Reply, wrong: str, read: Callable[..., T], *args: Any) -> T:
    """Returns what is read in an answer, beside the loop if it is large; raises :class:`Doubtful` where it is none."""
    try:
        return await offload(reply.size, read, *args)
    except _WRONG as error:
        why, asked = f"{call.server.name}: {wrong} ({error!r})", isinstance(error, TooMuch) and multiplied(call.body)
        raise Doubtful(why[:_SAID], again=False, by_request=asked) from error


async def count(call: Call) -> int:
    """Returns the number of tokens of the request's prompt; raises as :func:`post` does."""
    try:
        if call.server.protocol == "split":
            return len((await call.post(RENDER, call.asked()))["token_ids"])
        reply = await call.post(call.path, call.asked(max_tokens=1))  # the one count that every engine gives
        return int(reply["usage"]["prompt_tokens"])
    except _WRONG as error:
        why = f"{call.server.name}: an answer without a count of the prompt's tokens ({error!r})"
        raise Doubtful(why[:_SAID], again=False) from error


def texts_of(answer: Answer) -> list[SampledTokens]:
    """Returns a sample without tokens for each choice of an answer."""
    found = []
    for choice in answer.body["choices"]:
        message = _brief(choice["message"]) if "message" in choice else None
        said = choice.get("text") if message is None else message.get("content")
        sample = SampledTokens(
            *((), (), ()),
            text=said or "",
            finish_reason=choice.get("finish_reason") or "",
            message=message,
            request_id=_name(answer.body.get("id")),
        )
        found.append(sample)
    return found


def usage(reply: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the tokens of prompt and answer together, and of the answer, as the engine says; 0 where it does not."""
    told = reply.get("usage") or {}
    total, sampled = (min(max(0, told.get(name) or 0), _MOST_TOKENS) for name in ("total_tokens", "completion_tokens"))
    return total, sampled


def _sample(reply: Reply, choice: Mapping[str, Any], chat: bool, server: str) -> SampledTokens:
    message = _brief(choice["message"]) if chat else None
    told = choice["logprobs"]
    tokens = ids(choice["token_ids"])
    logprobs = [t["logprob"] for t in told["content"]] if chat else told["token_logprobs"]
    return SampledTokens(
        prompt=ids(reply["prompt_token_ids"] if chat else choice["prompt_token_ids"]),
        tokens=tokens,
        logprobs=scores(logprobs, len(tokens)),
        text=(message.get("content") or "") if message is not None else choice.get("text", ""),
        finish_reason=choice.get("finish_reason") or "",
        weight_version=reply.weight_version,
        server=server,
        message=message,
        request_id=_name(reply.get("id")),
    )


def _spans(choice: Mapping[str, Any], tokens: int) -> list[tuple[int, int]]:
    """Returns version and end of each run of tokens where the engine tells them: it may sample while weights change."""
    versions = choice.get("weight_versions") or []
    spans, last = list[tuple[int, int]](), 0
    for span in versions:
        version, end = weight_version(span["version"]), int(span["end"])
        if version is None:
            return []  # the engine was started without a number; the proxy's header has it
        if not last <= end <= tokens:
            raise ValueError(f"weight versions of {end} tokens after {last}, {tokens} token ids")
        spans.append((version, end))
        last = end
    if spans and last != tokens:
        raise ValueError(f"weight versions of {last} tokens, {tokens} token ids")
    return spans


def _name(value: Any) -> str:
    """Returns a name that an engine gave; empty where it is none."""
    return value if isinstance(value, str) and len(value) <= _SAID else ""


async def _own(call: Call, path: str, **options: Any) -> int:
    """Asks the server what the gateway itself wrote, and returns the HTTP status.

    How a server is asked from then on hangs on it, for all rollouts: nothing that an agent wrote may decide that.
    """
    question: dict[str, Any] = {"messages": [{"role": "user", "content": "."}]}
    if path == COMPLETIONS:
        question = {"prompt": "."}
    try:
        await call.post(path, {"model": call.server.model_name, "max_tokens": 1, **question, **options})
    except RefusedCall as refusal:
        return refusal.status
    return 200


def _text_alone(reply: Mapping[str, Any]) -> bool:
    """Returns whether a valid answer has no token ids."""
    return bool(reply.get("usage")) and not any("token_ids" in choice for choice in reply["choices"])


def _brief(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message without its empty fields."""
    return {k: v for k, v in message.items() if v or k in ("role", "content")}


def _strip(reply: dict[str, Any], body: Mapping[str, Any], chat: bool) -> None:
    """Removes what the agent did not ask for."""
    if not body.get("return_token_ids"):
        reply.pop("prompt_token_ids", None)
        for choice in reply["choices"]:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
    asked = body.get("logprobs")
    if not asked and (chat or asked is None):
        for choice in reply["choices"]:
            choice["logprobs"] = None


PROTOCOLS: Mapping[str, Callable[[Call], Awaitable[Answer]]] = {"text": text, "plain": plain, "split": split}
