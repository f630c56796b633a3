"""``python -m tests.model.gateway.image_conversations --conversations N``: is each placeholder tied to its own image?

Random agents converse through the real gateway with an engine that notes which image it was shown at which tokens.
Images repeat, several have one size, and agents drop old ones (a window), edit the history or start again. The engine
calls tools, up to three at once, whose results have images too.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer, ToolCall
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.trajectories.journal.checks import checked
from megaflow_hpc.trajectory import Image, ImageSpan, Recording, Trajectory, image_parts
from tests.support.samples import image
from tests.support.serving import gateway_before
from tests.support.split_engine import SplitEngine

SIZES = [(130, 70), (130, 70), (130, 70), (130, 70), (64, 64), (64, 64), (200, 10)]
POOL = [image(*size, number) for number, size in enumerate(SIZES)]
NAMES = {shown.url: shown.sha256 for shown in POOL}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ANSWERS = [
    ScriptedAnswer("a click at 10, 20"),
    *(ScriptedAnswer("I look.", calls=(ToolCall("look", {"at": 1}),) * number) for number in (1, 2, 3)),
]


def part(shown: Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": shown.url}}


@dataclass
class Talk:
    """One random conversation: what was said and shown, and how it goes on."""

    draw: random.Random
    messages: list[dict[str, Any]] = field(default_factory=list)
    window: int = 0
    asked: list[list[str]] = field(default_factory=list)
    """The images of each call, in the order of its messages."""

    def __post_init__(self) -> None:
        self.window = self.draw.choice([1, 2, 3, 99])
        self.messages = [{"role": "user", "content": "do it"}]
        self.observe()

    def body(self) -> dict[str, Any]:
        """Returns the next request."""
        urls = [one["image_url"]["url"] for message in self.messages for one in image_parts(message)]
        self.asked.append([NAMES[url] for url in urls])
        return {"messages": self.messages, "tools": [TOOL]}

    def observe(self) -> None:
        """Adds the results of the last answer's calls or, without any, an observation. Drops images before the window.

        Each has up to two images.
        """
        calls = self.messages[-1].get("tool_calls") or ()
        for head in [{"role": "tool", "tool_call_id": call["id"]} for call in calls] or [{"role": "user"}]:
            shown = self.draw.choices(POOL, k=self.draw.choice([0, 1, 1, 1, 2]))
            content: list[dict[str, Any]] = [{"type": "text", "text": f"step {len(self.messages)}"}, *map(part, shown)]
            self.draw.shuffle(content)
            self.messages.append({**head, "content": content})
        kept = self.window
        for number in range(len(self.messages) - 1, -1, -1):
            content = self.messages[number]["content"]
            if isinstance(content, list) and len(content) > 1:
                kept -= 1
                if kept < 0:
                    texts = [one if one["type"] == "text" else {"type": "text", "text": "(old)"} for one in content]
                    self.messages[number] = {**self.messages[number], "content": texts}

    def answered(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        if self.draw.random() < 0.15:  # the same conversation with another screenshot somewhere
            images: list[Any] = [one for message in self.messages for one in image_parts(message)]
            if images:
                self.draw.choice(images)["image_url"] = part(self.draw.choice(POOL[:4]))["image_url"]
        if self.draw.random() < 0.1:
            del self.messages[2:]
        else:
            self.observe()


async def converse(
    gateway: ModelGateway, session: aiohttp.ClientSession, name: str, talk: Talk, turns: int
) -> Recording:
    model = await gateway.open(name, "p")
    for _ in range(turns):
        headers = {"Authorization": f"Bearer {model.api_key}"}
        async with session.post(model.base_url + "/chat/completions", json=talk.body(), headers=headers) as response:
            assert response.status == 200, await response.text()
            talk.answered((await response.json())["choices"][0]["message"])
    return await gateway.close(name)


def fault(
    recording: Recording,
    asked: list[list[str]],
    log: list[tuple[list[int], list[int]]],
    shown: list[list[ImageSpan]],
) -> str:
    """Returns how a recording differs from what the agent sent and the engine was shown. Empty if it does not."""
    calls = zip(recording.turns, asked, log, shown, strict=True)
    for number, (turn, images, (prompt, sampled), spans) in enumerate(calls):
        if [span.image for span in spans] != images:
            return f"call {number}: sent {images}, shown {spans}"
        sequence = recording.sequences[turn.sequence]
        if sequence.tokens[: turn.token_end] != array("i", [*prompt, *sampled]):
            return f"call {number}: other tokens"
        if [span for span in sequence.images if span.start < turn.token_end] != spans:
            return f"call {number}: shown {spans}, recorded {sequence.images}"
    named = {span.image for sequence in recording.sequences for span in sequence.images}
    if not named <= recording.images.keys():
        return "an image is missing"
    heading = {"id": "t/p/0", "task_id": "t", "group_id": "t/p", "policy": "p", "agent": "a", "status": "completed"}
    names = ("messages", "parents", "sequences", "turns", "images")
    checked(Trajectory(**heading, **{name: getattr(recording, name) for name in names}))
    return ""


async def check(conversations: int, seed: int = 0, protocol: str = "split") -> dict[str, int]:
    """Holds conversations. Returns what was counted."""
    engine = SplitEngine(Script(), "m")
    names = ("conversations", "calls", "tool results", "their images", "spans", "sequences", "equal sized", "wrong")
    counts = dict.fromkeys(names, 0)
    async with gateway_before(engine, protocol, "p") as gateway, aiohttp.ClientSession() as session:
        for number in range(conversations):
            talk = Talk(random.Random(f"{seed} {number}"))
            engine.drift = talk.draw.choice([0.0, 0.3]) if protocol == "split" else 0.0
            engine.script = Script(default=tuple(talk.draw.choices(ANSWERS, k=4)))
            engine.log.clear()
            engine.shown.clear()
            recording = await converse(gateway, session, f"t/p/{number}", talk, talk.draw.randint(1, 4))
            problem = fault(recording, talk.asked, engine.log, engine.shown)
            if problem:
                print(f"seed {seed}, conversation {number}: {problem}", file=sys.stderr)
            spans = [span for sequence in recording.sequences for span in sequence.images]
            counts["conversations"] += 1
            counts["calls"] += len(recording.turns)
            results = [message for message in recording.messages if message["role"] == "tool"]
            counts["tool results"] += len(results)
            counts["their images"] += sum(len(image_parts(message)) for message in results)
            counts["spans"] += len(spans)
            counts["sequences"] += len(recording.sequences)
            counts["equal sized"] += len({span.image for span in spans}) > len({span.length for span in spans})
            counts["wrong"] += bool(problem)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--protocol", choices=["split", "plain"], default="split")
    arguments = parser.parse_args()
    began = time.monotonic()
    counts = asyncio.run(check(arguments.conversations, arguments.seed, arguments.protocol))
    print(counts, f"in {time.monotonic() - began:.0f} s")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
