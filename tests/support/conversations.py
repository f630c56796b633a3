"""Random conversations of agents in every dialect, streamed or not. Compares their recordings with what was sampled.

An agent's client, the gateway and a scripted engine in three requests use real sockets. A part of every answer is
sampled as ids that its text does not encode to (``drift``). Answers have reasoning and tool calls whose arguments have
any spacing and order. Each agent sends them back like its API's own client.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaflow_hpc.model.engines.scripted.script import ScriptedAnswer, ToolCall

TOOLS = ("bash", "edit")
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
WORDS = ("fix", "the", "naïve", "test", "größer", "λ", "0x1f", "return", "None", "\n", "  ", "ok.", "日本", '"quoted"')


class ChatAgent:
    """Appends answers in the form of its API, as the real clients do. The API has no reasoning."""

    path = "/chat/completions"

    def __init__(self) -> None:
        self.history: list[Any] = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "Go."}]

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in TOOLS]
        return {"messages": self.history, "tools": tools}

    def whole(self, events: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        """The answer that a stream adds up to."""
        message: dict[str, Any] = {}
        for _, chunk in events:
            for choice in chunk["choices"]:
                for key, value in choice["delta"].items():
                    message[key] = value if key == "tool_calls" or key not in message else message[key] + value
        return {"choices": [{"message": message}]}

    def take(self, answer: Mapping[str, Any], results: Sequence[str]) -> None:
        message = answer["choices"][0]["message"]
        self.history.append({k: v for k, v in message.items() if k not in ("reasoning", "reasoning_content")})
        calls = message.get("tool_calls") or ()
        for call, result in zip(calls, results, strict=False):
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not calls:
            self.history.append({"role": "user", "content": results[0]})


class MessagesAgent(ChatAgent):
    path = "/messages"

    def __init__(self) -> None:
        self.history = [{"role": "user", "content": [{"type": "text", "text": "Go."}]}]

    def body(self) -> dict[str, Any]:
        tools = [{"name": name, "input_schema": SCHEMA} for name in TOOLS]
        return {"system": "Be exact.", "messages": self.history, "max_tokens": 100_000, "tools": tools}

    def whole(self, events: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        for name, data in events:
            if name == "content_block_start":
                blocks.append({**data["content_block"], "json": ""})
            elif name == "content_block_delta":
                delta = data["delta"]
                for key, of in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                    if key in delta:
                        blocks[-1][of] = blocks[-1].get(of, "") + delta[key]
        for block in blocks:
            written = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(written or "{}")
        return {"content": blocks}

    def take(self, answer: Mapping[str, Any], results: Sequence[str]) -> None:
        # Rebuilt from the form the answer has in JSON, which keeps neither spacing nor order of a tool's input.
        blocks = json.loads(json.dumps(answer["content"], sort_keys=True))
        self.history.append({"role": "assistant", "content": blocks})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        said: list[Any] = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": result}]}
            for call, result in zip(calls, results, strict=False)
        ]
        self.history.append({"role": "user", "content": said or results[0]})


class ResponsesAgent(ChatAgent):
    path = "/responses"

    def __init__(self) -> None:
        self.history = [{"role": "user", "content": [{"type": "input_text", "text": "Go."}]}]

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in TOOLS]
        return {"instructions": "Be exact.", "input": self.history, "tools": tools}

    def whole(self, events: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        response: dict[str, Any] = events[-1][1]["response"]
        return response

    def take(self, answer: Mapping[str, Any], results: Sequence[str]) -> None:
        items = [{k: v for k, v in item.items() if k not in ("id", "status")} for item in answer["output"]]
        for item in items:
            if item["type"] == "reasoning":
                item.pop("content", None)  # not handed back where it was not asked for in an encrypted form
        self.history += items
        calls = [item for item in items if item["type"] == "function_call"]
        self.history += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": result}
            for call, result in zip(calls, results, strict=False)
        ]
        if not calls:
            self.history.append({"type": "message", "role": "user", "content": results[0]})


AGENTS: tuple[type[ChatAgent], ...] = (ChatAgent, MessagesAgent, ResponsesAgent)


class RandomScript:
    """Replaces a script: no two answers are equal."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, most: int) -> str:
        return " ".join(self._random.choices(WORDS, k=self._random.randint(1, most)))

    def arguments(self) -> dict[str, Any]:
        chosen = self._random.sample(["command", "path", "count", "flags"], k=self._random.randint(0, 3))
        values: dict[str, Any] = {"command": self.text(6), "path": "/a b", "count": 3, "flags": [True, None, "x"]}
        return {name: values[name] for name in chosen}

    def answer(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[str] = ()) -> ScriptedAnswer:
        calls = tuple(
            ToolCall(self._random.choice(list(tools)), self.arguments())
            for _ in range(self._random.choice((0, 1, 1, 2)) if tools else 0)
        )
        text = self.text(12) if not calls or self._random.random() < 0.7 else ""
        return ScriptedAnswer(text, calls=calls, reasoning=self.text(8) if self._random.random() < 0.5 else "")


@dataclass
class Outcome:
    """What was recorded of many rollouts, compared with what the engine sampled."""

    rollouts: int = 0
    calls: int = 0
    wrong: int = 0
    """Calls whose recorded prompt or sampled ids are not the engine's."""
    one_sequence: int = 0
    surplus: list[float] = field(default_factory=list)
    """Training tokens of a rollout divided by those of its last prompt and answer."""


async def converse(count: int, *, seed: int = 0, drift: float = 0.2, protocol: str = "split") -> Outcome:
    """Holds ``count`` conversations at one gateway, eight at a time."""
    from tests.support.serving import gateway_before
    from tests.support.split_engine import SplitEngine

    engine = SplitEngine(RandomScript(seed), "m", drift=drift, seed=seed)
    outcome, turns = Outcome(), asyncio.Semaphore(8)
    async with gateway_before(engine, protocol, wait_s=30) as gateway:

        async def one(number: int) -> None:
            async with turns:
                await _rollout(gateway, engine, number, random.Random(f"{seed}/{number}"), outcome)

        await asyncio.gather(*(one(number) for number in range(count)))
    return outcome


async def _rollout(gateway: Any, engine: Any, number: int, chance: random.Random, outcome: Outcome) -> None:
    import aiohttp

    agent, name = AGENTS[number % len(AGENTS)](), f"t{number}/default/0"
    agent.history[-1] = json.loads(json.dumps(agent.history[-1]).replace("Go.", f"Go {number}."))
    model = await gateway.open(name, "default")
    headers = {"Authorization": f"Bearer {model.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for _ in range(chance.randint(1, 8)):
            body = {"model": "m", **agent.body(), "stream": chance.random() < 0.5}
            async with session.post(model.base_url + agent.path, json=body) as response:
                text = await response.text()
                assert response.status == 200, text
            answer = agent.whole(list(events(text))) if body["stream"] else json.loads(text)
            agent.take(answer, [" ".join(chance.choices(WORDS, k=5)) for _ in range(3)])
    recording = await gateway.close(name)
    mine = f"Go {number}.".encode()
    said = [(p, s) for p, s in engine.log if mine in bytes(t % 512 for t in p if t not in (256, 257))]
    outcome.rollouts += 1
    outcome.calls += len(said)
    kept = []
    for turn in recording.turns:
        tokens = recording.sequences[turn.sequence].tokens
        kept.append((list(tokens[: turn.token_start]), list(tokens[turn.token_start : turn.token_end])))
    outcome.wrong += sum(a != b for a, b in zip(kept, said, strict=False)) + abs(len(kept) - len(said))
    outcome.one_sequence += len(recording.sequences) == 1
    prompt, sampled = said[-1]
    outcome.surplus.append(sum(len(s.tokens) for s in recording.sequences) / (len(prompt) + len(sampled)))


def events(stream: str) -> Iterator[tuple[str, Any]]:
    """The (event, data) pairs of a stream of server-sent events, the last word left out."""
    for part in stream.split("\n\n"):
        name, data = "", ""
        for line in part.splitlines():
            key, _, value = line.partition(": ")
            name, data = (value, data) if key == "event" else (name, value) if key == "data" else (name, data)
        if data and data != "[DONE]":
            yield name, json.loads(data)
