"""The clients of OpenAI, Anthropic and LiteLLM, each with its APIs, behind one function.

A conversation is written in each API's form, with the freedom that clients have: texts as parts, arguments of a tool
call encoded again, thoughts sent back or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import openai

from megaflow_hpc.types import ModelEndpoint
from tests.model.gateway.trees.engine import ARGUMENTS

KINDS = {
    "native": (("openai", "chat"), ("openai", "responses"), ("anthropic", "messages")),
    "litellm": (("litellm", "chat"), ("litellm", "messages"), ("litellm", "responses")),
}
"""Makers of clients → the APIs of each."""
TOOLS = {
    name: {"type": "object", "properties": {key: {} for key in keys}}
    for name, keys in (("bash", sorted(ARGUMENTS[1])), ("task", ["prompt"]))
}


class Left(Exception):
    """The client hung up."""


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        return json.loads(self.arguments or "{}")


@dataclass(frozen=True)
class Said:
    """One message as a client holds it."""

    role: str
    text: str = ""
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    result_of: str = ""
    origin: tuple[int, int] | None = None
    """Call and choice of the engine's answer that it is, as the driver knows; ``None`` for what the client wrote."""


@dataclass
class Request:
    model: str
    call: int
    messages: list[Said]
    tools: bool = True
    n: int = 1
    stream: bool = False
    leave: bool = False
    """Hang up after the first event of the stream."""
    parts: bool = False
    """Write texts as lists of parts."""


@dataclass
class Clients:
    """All clients, for one rollout after the other."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    litellm: LiteLLM | None
    endpoint: ModelEndpoint | None = None

    def connect(self, endpoint: ModelEndpoint) -> None:
        """Connects the clients to another rollout."""
        base = endpoint.base_url
        self.endpoint = endpoint
        self.openai = self.openai.copy(base_url=base, api_key=endpoint.api_key)
        self.anthropic = self.anthropic.copy(base_url=base.removesuffix("/v1"), api_key=endpoint.api_key)

    async def ask(self, kind: tuple[str, str], request: Request) -> list[Said]:
        """Returns the answers to a request, as its client sees them.

        Raises:
            Left: The client hung up as requested.
        """
        maker, api = kind
        options = WRITE[api](request)
        if maker == "litellm":
            assert self.litellm is not None
            assert self.endpoint is not None
            answer = await self.litellm.ask(api, options, self.endpoint)
        else:
            answer = await getattr(self, f"_{api}")(options, request.leave)
        return [replace(said, origin=(request.call, n)) for n, said in enumerate(READ[api](answer))]

    async def _chat(self, options: dict[str, Any], leave: bool) -> dict[str, Any]:
        answer = await self.openai.chat.completions.create(**options)
        if not options["stream"]:
            return answer.model_dump()
        messages: dict[int, dict[str, Any]] = {}
        async with answer:
            async for chunk in answer:
                for choice in chunk.model_dump()["choices"]:
                    message = messages.setdefault(choice["index"], {"tool_calls": []})
                    for name, value in choice["delta"].items():
                        if name == "tool_calls":
                            message[name] += value or []
                        elif isinstance(value, str):
                            message[name] = message.get(name, "") + value if name != "role" else value
                if leave:
                    raise Left
        return {"choices": [{"message": messages[index]} for index in sorted(messages)]}

    async def _responses(self, options: dict[str, Any], leave: bool) -> dict[str, Any]:
        answer = await self.openai.responses.create(**options)
        if options["stream"]:
            async with answer:
                async for event in answer:
                    last = event
                    if leave:
                        raise Left
            answer = last.response
        return answer.model_dump()

    async def _messages(self, options: dict[str, Any], leave: bool) -> dict[str, Any]:
        if not options.pop("stream"):
            return (await self.anthropic.messages.create(**options)).model_dump()
        async with self.anthropic.messages.stream(**options) as stream:
            if leave:
                async for _ in stream:
                    raise Left
            return (await stream.get_final_message()).model_dump()


@contextlib.asynccontextmanager
async def native_clients() -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    """Yields clients that are not yet connected."""
    options: Any = {"api_key": "k", "base_url": "http://x", "max_retries": 0, "timeout": 60}
    async with openai.AsyncOpenAI(**options) as ai, anthropic.AsyncAnthropic(**options) as an:
        yield ai, an


class LiteLLM:
    """The process of :mod:`tests.support.litellm_process`."""

    def __init__(self, python: Path, script: Path) -> None:
        self._process = subprocess.Popen([python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self.version = ""

    async def start(self) -> None:
        reader = asyncio.StreamReader(limit=2**26)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout)
        first = await reader.readline()
        assert first, "LiteLLM does not start in Harbor's environment"
        self.version = json.loads(first)["ready"]
        self._reading = loop.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            answer = json.loads(line)
            if (waiting := self._waiting.pop(answer["id"], None)) and not waiting.done():
                if "error" in answer:
                    waiting.set_exception(RuntimeError(answer["error"]))
                else:
                    waiting.set_result(answer["answer"])

    def _tell(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    async def ask(self, api: str, options: dict[str, Any], endpoint: ModelEndpoint) -> Any:
        provider = "anthropic" if api == "messages" else "openai"
        base = endpoint.base_url.removesuffix("/v1") if api == "messages" else endpoint.base_url
        if api == "messages":
            options["stream"] = False  # a stream would take a package that LiteLLM needs and does not bring
        where = {"model": f"{provider}/{options['model']}", "api_base": base, "api_key": endpoint.api_key}
        self._count += 1
        number, self._waiting[number] = self._count, asyncio.get_running_loop().create_future()
        self._tell({"id": number, "kind": api, "options": {**options, **where}})
        try:
            answer = await self._waiting[number]
        except asyncio.CancelledError:
            self._tell({"cancel": number})
            raise
        return answer

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


# --- a request in each API's form --------------------------------------------------------------------------------


def _chat(request: Request) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for said in request.messages:
        message: dict[str, Any] = {"role": said.role, "content": said.text}
        if request.parts and said.role in ("system", "user"):
            message["content"] = [{"type": "text", "text": said.text}]
        if said.role == "tool":
            message["tool_call_id"] = said.result_of
        if said.thought:
            message["reasoning_content"] = said.thought
        if said.calls:
            message["content"] = said.text or None
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in said.calls
            ]
        messages.append(message)
    tools = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in TOOLS.items()]
    offered = {"tools": tools} if request.tools else {}
    several = {"n": request.n} if request.n > 1 else {}
    head = {"model": request.model, "max_tokens": request.call, "stream": request.stream}
    return {**head, "messages": messages, **offered, **several}


def _messages(request: Request) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    system = [said.text for said in request.messages if said.role == "system"]
    for said in request.messages:
        blocks: list[dict[str, Any]] = []
        if said.role == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": said.result_of, "content": said.text}]
        elif said.role == "user":
            blocks = [{"type": "text", "text": said.text}]
        elif said.role == "assistant":
            if said.thought:
                blocks.append({"type": "thinking", "thinking": said.thought, "signature": "s"})
            if said.text or not (said.thought or said.calls):
                blocks.append({"type": "text", "text": said.text})
            blocks += [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.values} for c in said.calls]
        role = "assistant" if said.role == "assistant" else "user"
        last = found[-1] if found else {}
        if blocks and last.get("role") == role == "user" and last["content"][-1]["type"] == "tool_result":
            last["content"] += blocks
        elif blocks:
            found.append({"role": role, "content": blocks})
    tools = [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()]
    head = {"model": request.model, "max_tokens": request.call, "stream": request.stream, "messages": found}
    return {**head, **({"system": system[0]} if system else {}), **({"tools": tools} if request.tools else {})}


def _responses(request: Request) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    system = [said.text for said in request.messages if said.role == "system"]
    for said in request.messages:
        if said.role == "tool":
            items.append({"type": "function_call_output", "call_id": said.result_of, "output": said.text})
        elif said.role == "user":
            content = [{"type": "input_text", "text": said.text}] if request.parts else said.text
            items.append({"type": "message", "role": "user", "content": content})
        elif said.role == "assistant":
            if said.thought:
                thought = [{"type": "reasoning_text", "text": said.thought}]
                items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": thought})
            if said.text or not (said.thought or said.calls):
                text = [{"type": "output_text", "text": said.text, "annotations": []}]
                items.append({"type": "message", "role": "assistant", "content": text})
            items += [
                {"type": "function_call", "call_id": c.id, "name": c.name, "arguments": c.arguments} for c in said.calls
            ]
    tools = [{"type": "function", "name": n, "parameters": p, "strict": False} for n, p in TOOLS.items()]
    head = {"model": request.model, "max_output_tokens": request.call, "stream": request.stream, "input": items}
    return {**head, **({"instructions": system[0]} if system else {}), **({"tools": tools} if request.tools else {})}


WRITE = {"chat": _chat, "messages": _messages, "responses": _responses}


# --- an answer in each API's form ----------------------------------------------------------------------------------


def _from_chat(answer: dict[str, Any]) -> Iterator[Said]:
    for choice in answer["choices"]:
        message = choice["message"]
        calls = [
            ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls") or ()
        ]
        thought = message.get("reasoning") or message.get("reasoning_content") or ""
        yield Said("assistant", message.get("content") or "", thought, tuple(calls))


def _from_messages(answer: dict[str, Any]) -> Iterator[Said]:
    blocks = answer["content"]
    calls = [ToolCall(b["id"], b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"]
    texts = ["".join(b.get(name, "") for b in blocks if b["type"] == kind) for kind, name in _BLOCKS]
    yield Said("assistant", *texts, tuple(calls))


_BLOCKS = (("text", "text"), ("thinking", "thinking"))


def _from_responses(answer: dict[str, Any]) -> Iterator[Said]:
    text, thought, calls = "", "", []
    for item in answer["output"]:
        if item["type"] == "message":
            text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            thought += "".join(part["text"] for part in item.get("content") or ())
        else:
            calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
    yield Said("assistant", text, thought, tuple(calls))


READ = {"chat": _from_chat, "messages": _from_messages, "responses": _from_responses}
