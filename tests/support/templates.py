"""An engine with a chat template, and a conversation with it by a client that drops the thoughts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from megaflow_hpc.model.engines.scripted import engine as scripted
from megaflow_hpc.model.engines.scripted.engine import END, START, text_of_tokens
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer, ToolCall
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.trajectory import Recording
from tests.support.split_engine import SplitEngine

Message = dict[str, Any]
Template = Callable[[Sequence[Message]], list[Message]]


def appends(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


def as_qwen3(messages: Sequence[Message]) -> list[Message]:
    """Omits the thoughts before the last user message. Thoughts between later tool messages stay."""
    last = max(n for n, m in enumerate(messages) if m["role"] == "user")
    return [without_thought(m) if n < last else m for n, m in enumerate(messages)]


def never_thinks(messages: Sequence[Message]) -> list[Message]:
    return [without_thought(m) for m in messages]


def trims(messages: Sequence[Message]) -> list[Message]:
    """Omits white space around a message, like Llama 3's template."""
    return [{**m, "content": (m.get("content") or "").strip()} for m in messages]


def adds_a_line(messages: Sequence[Message]) -> list[Message]:
    """Repeats the line before a tool call, which the text already contains, like Qwen3's template with vLLM's
    parser."""
    return [{**m, "content": m["content"] + "\n"} if m.get("tool_calls") else m for m in messages]


def joins_lines(messages: Sequence[Message]) -> list[Message]:
    return [{**m, "content": " ".join(str(m.get("content") or "").split())} for m in messages]


def shortens_results(messages: Sequence[Message]) -> list[Message]:
    """Omits the results of all tool calls but the last."""
    tools = [n for n, m in enumerate(messages) if m["role"] == "tool"]
    return [{**m, "content": "…"} if n in tools[:-1] else m for n, m in enumerate(messages)]


def without_thought(message: Message) -> Message:
    return {k: v for k, v in message.items() if k != "reasoning"}


class Engine(SplitEngine):
    """An engine with a chat template. It thinks before each answer and calls a tool if the script says so."""

    def __init__(self, template: Template, answers: Sequence[ScriptedAnswer], **options: Any) -> None:
        super().__init__(Script(), "m", **options)
        self.template, self.given, self.asked_texts = template, list(answers), 0
        self.rendered: list[list[int]] = []
        self.script = self  # type: ignore[assignment]

    def answer(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[str] = ()) -> ScriptedAnswer:
        return self.given[len(self.log)]

    async def _render(self, request: web.Request) -> web.Response:
        body = await scripted.body_of(request)
        tokens = scripted.render(self.template(body["messages"]))
        self.rendered.append(tokens)
        return web.json_response({"token_ids": tokens, "sampling_params": {"max_tokens": 9999}, "features": None})

    async def _texts(self, request: web.Request) -> web.Response:
        self.asked_texts += 1
        return await super()._texts(request)


def thinks(number: int, *calls: ToolCall, text: str = "") -> ScriptedAnswer:
    return ScriptedAnswer(text or f"answer {number}", calls=calls, reasoning=f"thought {number}")


CALL = ToolCall("look", {"at": "it"})
CHAT = [thinks(n) for n in range(4)]
"""Answers to user messages."""
TOOLS = [thinks(0, CALL), thinks(1, CALL), thinks(2), thinks(3, CALL), thinks(4)]
"""Answers with tool calls; a user speaks after the third."""


async def converse(gateway: ModelGateway, answers: int, **options: Any) -> Recording:
    """Holds a conversation as a client that sends each answer back without its thought."""
    model = await gateway.open("t/p/0", "p")
    history: list[Message] = [{"role": "user", "content": "question"}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as session:
        for number in range(answers):
            body = {"messages": history, **options}
            async with session.post(model.base_url + "/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                message = (await response.json())["choices"][0]["message"]
            history.append({k: v for k, v in message.items() if k != "reasoning" and v})
            calls = message.get("tool_calls") or ()
            history += [{"role": "tool", "tool_call_id": c["id"], "content": f"result {number}"} for c in calls]
            history += [] if calls else [{"role": "user", "content": f"observation {number}"}]
    return await gateway.close("t/p/0")


def marked(tokens: Sequence[int]) -> str:
    """The text of tokens, including the markers of turns."""
    parts = {END: "<end>", START: "<start>"}
    return "".join(parts.get(t) or text_of_tokens([t]) if t in parts or t % 512 < 128 else "?" for t in tokens)


def check_sent(engine: Engine, recording: Recording, prompts: Sequence[list[int]]) -> None:
    """Each prompt has the text that the template renders, and was recorded as it was sent."""
    assert [marked(sent) for sent, _ in engine.log] == [marked(rendered) for rendered in prompts]
    for turn, (prompt, sampled) in zip(recording.turns, engine.log, strict=True):
        tokens = list(recording.sequences[turn.sequence].tokens)
        assert (tokens[: turn.token_start], tokens[turn.token_start : turn.token_end]) == (prompt, sampled)
