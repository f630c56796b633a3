"""The three ways in which the gateway asks an engine, from least to most that is known of the sampled tokens.

``text``: the OpenAI endpoint as it is, for engines that refuse the parameters below. Nothing is known of tokens; only
the conversation is kept.

``plain``: the OpenAI endpoint with ``logprobs`` and ``return_token_ids`` switched on (vLLM ≥ 0.10 and the scripted
engine have both). The engine renders the whole history anew, so a history whose text does not encode to the sampled
ids starts a new sequence.

``split`` (vLLM with ``--enable-scale-out``): ``…/render`` makes the prompt's token ids, ``/inference/v1/generate`` goes
from ids to ids, ``…/derender`` makes the agent's answer of them. Between the first and the second, the part of the
prompt that is this rollout's own earlier answers is replaced by the ids that were sampled, so a conversation that is
only appended to is one sequence whatever its text encodes to::

    rendered      [ prompt i           ][ answer i, encoded anew   ][ end of turn, observation, … ]
    sent          [ all of sequence up to here, answer i as sampled ][ end of turn, observation, … ]

A server that lacks what its protocol needs is asked in the next lower one. The protocols used are counted per rollout
(:attr:`~megaflow_hpc.trajectory.Recording.protocols`), so that text is never taken for tokens.

What the gateway adds to a request it takes out of the answer: the agent sees what the engine would have told it.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaflow_hpc.model.api import COMPLETIONS, DERENDER, GENERATE, RENDER
from megaflow_hpc.model.gateway.engine_call import Call, Doubtful, Refused
from megaflow_hpc.model.gateway.recorder import Sample

LACKING = frozenset({404, 405, 501})
"""HTTP statuses of a server that has no such path."""


@dataclass
class Answer:
    """An engine's answer, split into what goes back to the agent and what is recorded."""

    body: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    message: dict[str, Any] | None = None
    """The assistant's message where there is no sample."""
    protocol: str = ""
    """The protocol in which the engine was asked."""


async def ask(call: Call) -> Answer:
    """Makes one call in the server's protocol; raises as :func:`post` does."""
    return await PROTOCOLS[call.server.protocol](call)


async def text(call: Call) -> Answer:
    """Makes a call of which only the text is kept."""
    reply = await call.post(call.path, call.asked())
    try:
        choice = reply["choices"][0]
        message = _brief(choice["message"]) if "message" in choice else None
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise Doubtful(f"{call.server.name}: an answer without a choice ({error!r})", again=False) from error
    return Answer(reply, message=message, protocol="text")


async def plain(call: Call) -> Answer:
    """Calls ``/v1/chat/completions`` or ``/v1/completions`` with ids and log-probabilities switched on."""
    server, body, chat = call.server, call.body, call.path.endswith("/chat/completions")
    scores = True if chat else max(1, int(body.get("logprobs") or 0))
    try:
        asked = call.asked(return_token_ids=True, logprobs=scores)
        reply = await call.post(call.path, asked)
    except Refused as refusal:
        # It may not know the parameter, or the agent wrote the word.
        known = b"return_token_ids" not in refusal.body or await _own(call, call.path, return_token_ids=True) < 400
        if known or await _own(call, call.path) >= 400:
            raise
        server.protocol, server.degraded = "text", True
        return await text(call)
    if (found := _text_alone(reply, chat)) is not None:
        reply["model"] = body.get("model") or server.model_name
        return Answer(reply, message=found.get("message"), protocol="text")
    try:
        samples = [_sample(reply, choice, chat, reply.weight_version, server.name) for choice in reply["choices"]]
        if not samples:
            raise ValueError("no choice")
    except (KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
        why = f"{server.name}: no token ids or log-probabilities in the answer ({error!r})"
        raise Doubtful(why, again=False) from error
    reply["model"] = body.get("model") or server.model_name
    _strip(reply, body, chat)
    return Answer(reply, samples, protocol="plain")


async def split(call: Call) -> Answer:
    """Makes a chat call in three requests: render, generate, derender; what these cannot express, in ``plain``."""
    body = call.body
    if not call.path.endswith("/chat/completions") or body.get("stop") or (body.get("n") or 1) > 1:
        return await plain(call)  # derender knows nothing of stop strings and sampled alternatives
    server = call.server
    asked = call.asked(logprobs=True)
    try:
        request = await call.post(RENDER, asked)
    except Refused as refusal:
        if refusal.status not in LACKING or await _own(call, RENDER) not in LACKING:
            raise
        server.protocol, server.degraded = "plain", True  # it has no such paths: from now on as one without them
        return await plain(call)
    try:
        rendered, sampling = list(request["token_ids"]), dict(request["sampling_params"])
        prompt = rendered if request.get("features") else await _continued(call, rendered)
        if prompt is not rendered and not (body.get("max_tokens") or body.get("max_completion_tokens")):
            sampling["max_tokens"] += len(rendered) - len(prompt)  # it was all the room that the rendered prompt left
        sampling["logprobs"] = max(0, sampling.get("logprobs") or 0)
        generate = {**request, "token_ids": prompt, "sampling_params": sampling, "stream": False}
        generated = await call.post(GENERATE, generate)
        (choice,) = generated["choices"]
        tokens = list(choice["token_ids"])
        scores = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        _check(tokens, scores)
        spans = _spans(choice, len(tokens)) or [(generated.weight_version, len(tokens))]
        about = {"generate_response": generated, "chat_request": asked, "prompt_token_ids": prompt}
        reply = await call.post(DERENDER, {"model": server.model_name, "prompt_tokens": len(prompt), **about})
        message = _brief(reply["choices"][0]["message"])
        finish = reply["choices"][0].get("finish_reason") or choice.get("finish_reason") or ""
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        why = f"{server.name}: an answer of render, generate or derender lacks a part ({error!r})"
        raise Doubtful(why, again=False) from error
    sample = Sample(
        prompt=prompt,
        tokens=tokens,
        logprobs=scores,
        text=message.get("content") or "",
        finish_reason=finish,
        weight_version=spans[-1][0],
        weight_spans=spans,
        server=server.name,
        message=message,
        request_id=str(generated.get("request_id", "")),
        rendered=rendered,
        stopped=choice.get("finish_reason") == "stop" and not isinstance(choice.get("stop_reason"), str),
    )
    reply["model"] = body.get("model") or server.model_name
    _strip(reply, body, chat=True)
    return Answer(reply, [sample], protocol="split")


async def count(call: Call) -> int:
    """Returns the number of tokens of the request's prompt; raises as :func:`post` does."""
    try:
        if call.server.protocol == "split":
            return len((await call.post(RENDER, call.asked()))["token_ids"])
        reply = await call.post(call.path, call.asked(max_tokens=1))  # the one count that every engine gives
        return int(reply["usage"]["prompt_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        why = f"{call.server.name}: an answer without a count of the prompt's tokens ({error!r})"
        raise Doubtful(why, again=False) from error


async def _continued(call: Call, rendered: list[int]) -> list[int]:
    """Returns ``rendered`` with the rollout's own earlier answers as they were sampled; itself where none is known."""
    messages = call.body.get("messages") or ()
    found = call.recorder.tip(rendered, messages, call.policy)
    if found is None:
        return rendered
    sequence, tip = found
    after = rendered[len(tip.rendered) :]
    if tip.stop is not None:
        if tip.stop not in after:
            return rendered
        tail = after[after.index(tip.stop) + 1 :]
    else:
        # A limit cut the answer off, so no token in it marks its end: what follows an answer without text is the rest.
        emptied = [dict(m) for m in messages]
        emptied[tip.messages] = {"role": "assistant", "content": ""}
        bare = list((await call.post(RENDER, call.asked(messages=emptied)))["token_ids"])
        tail = bare[len(tip.rendered) :]
        if bare[: len(tip.rendered)] != list(tip.rendered) or not tail or after[-len(tail) :] != tail:
            return rendered
    return [*sequence.tokens[: tip.end], *tail]


def text_of(answer: Answer) -> Sample:
    """Returns what is known of an answer without token ids."""
    choice = answer.body["choices"][0]
    said = choice.get("text") if answer.message is None else answer.message.get("content")
    return Sample(
        *((), (), ()),
        text=said if isinstance(said, str) else "",
        finish_reason=str(choice.get("finish_reason") or ""),
        message=answer.message,
        request_id=str(answer.body.get("id") or ""),
    )


def usage(reply: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the tokens of prompt and answer together, and of the answer, as the engine says; 0 where it does not."""
    told = reply.get("usage")
    counts = [told.get(name) if isinstance(told, Mapping) else 0 for name in ("total_tokens", "completion_tokens")]
    total, sampled = (count if isinstance(count, int) and count > 0 else 0 for count in counts)
    return total, sampled


def _sample(reply: Mapping[str, Any], choice: Mapping[str, Any], chat: bool, version: int, server: str) -> Sample:
    message = dict(choice["message"]) if chat else None
    scores = choice["logprobs"]
    logprobs = [t["logprob"] for t in scores["content"]] if chat else list(scores["token_logprobs"])
    prompt = array("i", reply["prompt_token_ids"] if chat else choice["prompt_token_ids"])
    tokens = choice["token_ids"]
    _check(tokens, logprobs)
    return Sample(
        prompt=prompt,
        tokens=list(tokens),
        logprobs=logprobs,
        text=(message.get("content") or "") if message is not None else choice.get("text", ""),
        finish_reason=choice.get("finish_reason") or "",
        weight_version=version,
        server=server,
        message=_brief(message) if message is not None else None,
        request_id=str(reply.get("id", "")),
    )


def _spans(choice: Mapping[str, Any], tokens: int) -> list[tuple[int, int]]:
    """Returns version and end of each run of tokens where the engine tells them: it may sample while weights change."""
    versions = choice.get("weight_versions") or []
    if not versions or not all(str(span["version"]).isdecimal() for span in versions):
        return []  # the engine was started without a number; the proxy's header has it
    spans = [(int(span["version"]), int(span["end"])) for span in versions]
    if spans[-1][1] != tokens:
        raise ValueError(f"weight versions of {spans[-1][1]} tokens, {tokens} token ids")
    return spans


async def _own(call: Call, path: str, **options: Any) -> int:
    """Asks the server what the gateway itself wrote, and returns the HTTP status.

    How a server is asked from then on hangs on it, for all rollouts: nothing that an agent wrote may decide that.
    """
    question: dict[str, Any] = {"messages": [{"role": "user", "content": "."}]}
    if path == COMPLETIONS:
        question = {"prompt": "."}
    try:
        await call.post(path, {"model": call.server.model_name, "max_tokens": 1, **question, **options})
    except Refused as refusal:
        return refusal.status
    return 200


def _text_alone(reply: Mapping[str, Any], chat: bool) -> dict[str, Any] | None:
    """Returns the choice of a good answer that has no token ids, its message short; ``None`` for any other answer."""
    try:
        (choice,) = reply["choices"]
        if "token_ids" in choice or not reply["usage"]:
            return None
        if chat and isinstance(choice["message"]["role"], str):
            return {"message": _brief(choice["message"])}
        if not chat and isinstance(choice["text"], str):
            return {}
    except (KeyError, TypeError, ValueError):
        pass
    return None


def _check(tokens: list[int], logprobs: list[float]) -> None:
    """Raises ValueError, TypeError or OverflowError unless all are numbers and there is one for each id."""
    if len(array("i", tokens)) != len(array("f", logprobs)):
        raise ValueError(f"{len(tokens)} token ids, {len(logprobs)} log-probabilities")


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
