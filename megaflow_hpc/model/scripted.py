"""An engine that answers from a file: real sockets, real token ids, no model.

It speaks the engines' plain dialect (``/v1/chat/completions``, ``/v1/completions``, ``/v1/models``, ``/health``) and is
run by the same wrapper as any engine, so a campaign can be driven to a known end without weights. A script is YAML or
JSON::

    tasks:
      - when: "text of the task"         # a part of the conversation; or  pattern: a regular expression
        answers:                         # the n-th answers a conversation with n assistant messages; the last repeats
          - "THOUGHT: … ```mswea_bash_command …```"
          - {file: fix.txt}              # text from a file beside the script
          - {text: "…", delay_s: 2.0}    # seconds before answering
          - {status: 500}                # this answer is an HTTP error
    default: ["…"]                       # where no task matches

Tokens are UTF-8 bytes (ids 0 to 255) with 256 as end of turn and 257 as start of turn; log-probabilities are a function
of id and position. So every invariant of the recording holds: a conversation's prompt extends the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from megaflow_hpc.errors import ConfigError

END, START = 256, 257
DEFAULT = "ready"


@dataclass(frozen=True)
class Answer:
    text: str = ""
    delay_s: float = 0.0
    status: int = 200


@dataclass(frozen=True)
class ScriptedTask:
    pattern: re.Pattern[str]
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Script:
    tasks: tuple[ScriptedTask, ...] = ()
    default: tuple[Answer, ...] = (Answer(DEFAULT),)

    def answer(self, messages: Sequence[Mapping[str, Any]]) -> Answer:
        conversation = "\n".join(text_of(m) for m in messages)
        turn = sum(m.get("role") == "assistant" for m in messages)
        for task in self.tasks:
            if task.pattern.search(conversation):
                return task.answers[min(turn, len(task.answers) - 1)]
        return self.default[min(turn, len(self.default) - 1)]


def load(path: Path) -> Script:
    """Reads a script; every mistake is a :class:`ConfigError` that names it."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: the script of answers cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML or JSON: {error}") from error
    if not isinstance(data, dict) or set(data) - {"tasks", "default"}:
        raise ConfigError(f"{path}: a script has the keys tasks and default")
    tasks = []
    for number, entry in enumerate(data.get("tasks") or ()):
        where = f"{path}: tasks[{number}]"
        if not isinstance(entry, dict) or ("when" in entry) == ("pattern" in entry) or not entry.get("answers"):
            raise ConfigError(f"{where}: needs answers and one of when (a text) or pattern (a regular expression)")
        try:
            pattern = re.compile(re.escape(entry["when"]) if "when" in entry else entry["pattern"], re.DOTALL)
        except (re.error, TypeError) as error:
            raise ConfigError(f"{where}: {error}") from error
        tasks.append(ScriptedTask(pattern, tuple(_answer(a, path, where) for a in entry["answers"])))
    default = tuple(_answer(a, path, f"{path}: default") for a in data.get("default") or (DEFAULT,))
    return Script(tuple(tasks), default)


def _answer(value: Any, path: Path, where: str) -> Answer:
    if isinstance(value, str):
        return Answer(value)
    if not isinstance(value, dict) or set(value) - {"text", "file", "delay_s", "status"}:
        raise ConfigError(f"{where}: an answer is a text, or has the keys text or file, delay_s, status: {value!r}")
    text = str(value.get("text", ""))
    if "file" in value:
        try:
            text = (path.parent / value["file"]).read_text()
        except OSError as error:
            raise ConfigError(f"{where}: {value['file']}: {error.strerror}") from error
    return Answer(text, float(value.get("delay_s", 0.0)), int(value.get("status", 200)))


def script_from_patch(instruction_snippet: str, patch: str) -> dict[str, Any]:
    """One entry of a script's ``tasks`` in which mini-swe-agent's text form solves a task by a known patch.

    Args:
        instruction_snippet: A text that only this task's conversation contains.
        patch: A unified diff that applies with ``-p1`` from the sandbox's work directory, by git or patch.
    """
    mark = "END_OF_PATCH"
    while f"\n{mark}\n" in f"\n{patch}\n":
        mark += "_"
    apply = (
        f"cat > /tmp/fix.patch <<'{mark}'\n{patch.rstrip(chr(10))}\n{mark}\n"
        "if command -v git >/dev/null; then git apply -p1 -v /tmp/fix.patch; else patch -p1 -i /tmp/fix.patch; fi"
    )
    steps = [
        ("I look at the source tree first.", "pwd && ls -a"),
        ("The defect is clear; I apply the repair.", apply),
        ("The repair is in place, so I submit.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    answers = [f"THOUGHT: {thought}\n\n```mswea_bash_command\n{command}\n```" for thought, command in steps]
    return {"when": instruction_snippet, "answers": answers}


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))


def render(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """A conversation's prompt: ``START role NEWLINE content END NEWLINE`` per message, then the head of the answer."""
    tokens: list[int] = []
    for message in messages:
        tokens += [START, *f"{message.get('role', 'user')}\n".encode(), *text_of(message).encode(), END, 10]
    return [*tokens, START, *b"assistant\n"]


def logprob(token: int, position: int) -> float:
    """A made-up log-probability in (-2, 0)."""
    return -(1 + (token * 31 + position * 17) % 199) / 100


class ScriptedEngine:
    """The HTTP application. ``max_model_len`` in tokens, as an engine's."""

    def __init__(self, script: Script, model_name: str, max_model_len: int = 1_000_000) -> None:
        self.script, self.model_name, self.max_model_len = script, model_name, max_model_len

    def application(self) -> web.Application:
        app = web.Application(client_max_size=256 * 2**20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self.model_name, "object": "model", "owned_by": "script", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            return _error(400, "messages: expected a list of at least one message")
        prompt = render(messages)
        return await self._reply(body, self.script.answer(messages), prompt, chat=True)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body.get("prompt")
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(isinstance(t, int) for t in prompt)):
            return _error(400, "prompt: expected a text or a list of token ids")
        tokens = list(prompt.encode()) if isinstance(prompt, str) else prompt
        text = bytes(t for t in tokens if t < 256).decode("utf-8", "replace")
        return await self._reply(body, self.script.answer([{"role": "user", "content": text}]), tokens, chat=False)

    async def _reply(self, body: Mapping[str, Any], answer: Answer, prompt: list[int], *, chat: bool) -> web.Response:
        if answer.delay_s:
            await asyncio.sleep(answer.delay_s)
        if answer.status != 200:
            return _error(answer.status, answer.text or "scripted error")
        room = self.max_model_len - len(prompt)
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        if room <= 0 or wanted > room:
            return _error(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{wanted} output tokens and your prompt contains {len(prompt)} input tokens.",
            )
        sampled = [*answer.text.encode(), END]
        limit = min(wanted or room, room)
        finish = "stop" if len(sampled) <= limit else "length"
        sampled = sampled[:limit]
        text = bytes(t for t in sampled if t < 256).decode("utf-8", "replace")
        return web.json_response(_response(body, self.model_name, prompt, sampled, text, finish, chat=chat))


def _response(
    body: Mapping[str, Any], model: str, prompt: list[int], sampled: list[int], text: str, finish: str, *, chat: bool
) -> dict[str, Any]:
    scores = [logprob(t, len(prompt) + i) for i, t in enumerate(sampled)]
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    if body.get("logprobs"):
        names = [f"token_id:{t}" for t in sampled]
        choice["logprobs"] = (
            {"content": [{"token": n, "logprob": s, "top_logprobs": []} for n, s in zip(names, scores, strict=True)]}
            if chat
            else {"tokens": names, "token_logprobs": scores, "top_logprobs": None, "text_offset": []}
        )
    reply: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sampled),
            "total_tokens": len(prompt) + len(sampled),
        },
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = sampled
        (reply if chat else choice)["prompt_token_ids"] = prompt
    return reply


def _error(status: int, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": status}}, status=status)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megaflow_hpc.model.scripted", description="answers from a script")
    parser.add_argument("--script", type=Path)
    parser.add_argument("--served-model-name", default="scripted")
    parser.add_argument("--max-model-len", type=int, default=1_000_000)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--uds")
    where.add_argument("--port", type=int, help="on 127.0.0.1")
    arguments = parser.parse_args(argv)
    try:
        script = load(arguments.script) if arguments.script else Script()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    engine = ScriptedEngine(script, arguments.served_model_name, arguments.max_model_len)
    place: dict[str, Any] = {"path": arguments.uds} if arguments.uds else {"host": "127.0.0.1", "port": arguments.port}
    web.run_app(engine.application(), **place, access_log=None, print=lambda *_: print(json.dumps(place), flush=True))


if __name__ == "__main__":
    main()
