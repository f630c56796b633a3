"""An engine with a fixed delay that uses almost no CPU, so that a gateway's overhead can be measured.

Answers are encoded once, at its start. A request that asks for ``return_token_ids`` gets ids and log-probabilities in
vLLM's form; other requests get the same answer without them. ``--delay-s`` passes between a complete request and its
answer. Other paths are answered at once. It prints its port and serves until its standard input ends.

Token ids of answer *v* (of ``ANSWERS``, used in turn) are ``(v * 7919 + n * 104729) % 151_000``, so a recording can be
checked without the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any, cast

from tests.bench.load import run_fast

ANSWERS = 16
VOCABULARY = 151_000


def sampled(number: int, count: int) -> list[int]:
    """The token ids of one answer."""
    return [(number * 7919 + n * 104_729) % VOCABULARY for n in range(count)]


def prompt_text(tokens: int) -> str:
    """A prompt of ``tokens`` tokens, at four characters each."""
    return ("abc " * tokens)[: 4 * tokens]


def reply(number: int, prompt: int, count: int, ids: bool) -> bytes:
    """One answer as it goes over the wire: ``prompt`` tokens in, ``count`` out."""
    text = "".join(f"w{n} " for n in range(count))
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
    choice["message"] = {"role": "assistant", "content": text}
    body: dict[str, Any] = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count},
    }
    if ids:
        body["prompt_token_ids"] = [(n * 31) % VOCABULARY for n in range(prompt)]
        choice["token_ids"] = sampled(number, count)
        scores = [-((n * 37) % 1999) / 997 for n in range(count)]
        choice["logprobs"] = {
            "content": [
                {"token": f"token_id:{t}", "logprob": s, "bytes": None, "top_logprobs": []}
                for t, s in zip(choice["token_ids"], scores, strict=True)
            ]
        }
    return response(json.dumps(body, separators=(",", ":")).encode())


def response(body: bytes, status: str = "200 OK") -> bytes:
    """An HTTP response whose body is JSON."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with Content-Length, one request at a time: all that the gateways here send."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._got = engine, bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._got += data
        while (end := self._got.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._got[:end]).lower()
            _, found, rest = head.partition(b"content-length:")
            length = int(rest.split(b"\r\n", 1)[0]) if found else 0
            if len(self._got) < end + 4 + length:
                if b"expect: 100-continue" in head and self._transport:
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            body = bytes(self._got[end + 4 : end + 4 + length])
            del self._got[: end + 4 + length]
            self._engine.serve(head, body, self._write)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


class Engine:
    """Answers encoded in advance and used in turn. ``delay_s`` passes before each."""

    def __init__(self, prompt: int, count: int, delay_s: float) -> None:
        self.delay_s, self._turn = delay_s, 0
        self._with = [reply(n, prompt, count, ids=True) for n in range(ANSWERS)]
        self._without = [reply(n, prompt, count, ids=False) for n in range(ANSWERS)]
        card = {"id": "m", "object": "model", "created": 1_700_000_000, "owned_by": "bench", "max_model_len": 200_000}
        self._card = response(json.dumps({"object": "list", "data": [card]}).encode())
        self._fine = response(b"{}")
        self._lacking = response(b"{}", "404 Not Found")

    def connection(self) -> _Connection:
        """The protocol of one more connection."""
        return _Connection(self)

    def serve(self, head: bytes, body: bytes, write: Any) -> None:
        """Writes the answer to a request: a completion, the model card, or an empty object."""
        if not head.startswith(b"post"):
            write(self._card if b"/models" in head.split(b"\r\n", 1)[0] else self._fine)
            return
        if b"/completions " not in head.split(b"\r\n", 1)[0]:  # vllm-router asks for a rendered prompt first
            write(self._lacking)
            return
        self._turn = (self._turn + 1) % ANSWERS
        answer = (self._with if b'"return_token_ids"' in body else self._without)[self._turn]
        if self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, write, answer)
        else:
            write(answer)


async def _serve(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(arguments.prompt, arguments.sampled, arguments.delay_s)
    server = await loop.create_server(engine.connection, "127.0.0.1", 0, backlog=1024)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


def main() -> None:
    """Serves until standard input ends; prints the port."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fixed_engine", description=__doc__)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens that every prompt counts as")
    parser.add_argument("--sampled", type=int, default=200, help="tokens of every answer")
    parser.add_argument("--delay-s", type=float, default=0.5)
    run_fast(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
