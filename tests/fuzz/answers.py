"""Fuzz the gateway with answers of engines: JSON documents, and whole HTTP answers as bytes.

The engine answers with the input, to agents of every dialect in each of the three protocols. The agent gets an answer
or an error, the answers cannot make a log grow, and only valid tokens are recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

from megaflow_hpc.model import json_text
from megaflow_hpc.model.gateway import engine_call
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.trajectory import Recording
from tests.fuzz.contract import PART, Target, reader
from tests.fuzz.servers import BODIES, KEY, ROOT, Site, exchange, request, started, statuses

PROTOCOLS = ("text", "plain", "split")
_ENOUGH_S = 60.0
"""The gateway gives up an engine half a minute after its answers break off."""
_SMALL = (
    (json_text, "LARGE", 300),
    (json_text, "OFFLOAD_BYTES", 400),
    (engine_call, "SMALL_ANSWER", 500),
)
"""Limits lowered for the test, so that answers of a kilobyte are handled as if they had megabytes."""


class _Engines(Site):
    """A gateway, and an engine that answers with the input."""

    def __init__(self) -> None:
        super().__init__("")
        self.gateway = ModelGateway(wait_s=0.0, request_timeout_s=0.2)
        self.answers: list[bytes] = []
        self._server: asyncio.Server | None = None
        self._rollouts = 0

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        await self.gateway.start()

    async def _stop(self) -> None:
        await self.gateway.stop()
        assert self._server is not None
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, OSError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
                writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
                await writer.drain()
                if not self.answers[-1].startswith(b"HTTP/1.1 200 OK\r\nContent-Length: "):
                    break  # these bytes may have no end
        writer.close()

    async def fresh(self, protocol: str) -> None:
        """Open a rollout without a history, at a server that never failed."""
        assert self._server is not None
        self._rollouts += 1
        name, port = f"default.{self._rollouts}", self._server.sockets[0].getsockname()[1]
        served = {"server": name, "policy": "default", "url": f"http://127.0.0.1:{port}", "key": "k"}
        self.gateway.update_endpoints([{**served, "model_name": "m", "protocol": protocol}])
        endpoint = await self.gateway.open("fuzz", "default")
        self.key, self.root = endpoint.api_key, "/" + endpoint.base_url.split("/", 3)[3]

    def ask(self, number: int, answers: list[bytes]) -> None:
        """Send a request of an agent, and check the answer and the recording."""
        self.run(self.fresh(PROTOCOLS[number % len(PROTOCOLS)]))
        path, body = BODIES[number // len(PROTOCOLS) % len(BODIES)]
        self.answers, logged_before = answers, self.log.bytes
        asked = json.dumps({**body, "stream": bool(number & 64)}).encode()
        whole = request(ROOT + path, asked).replace(KEY, self.key.encode()).replace(ROOT, self.root.encode())
        found = statuses(exchange(self.gateway.port, whole, _ENOUGH_S))
        recording = self.run(self.gateway.close("fuzz"))
        assert len(found) == 1, found
        assert found[0] in (200, 400, 404, 409, 413, 415, 422, 501, 503)
        self.log.check(logged_before)
        _check_recording(recording)


def _check_recording(recording: Recording) -> None:
    """Check that the recording has valid tokens, and can be stored."""
    for sequence in recording.sequences:
        columns = sequence.tokens, sequence.logprobs, sequence.loss_mask, sequence.weight_versions
        for token, logprob, mask, version in zip(*columns, strict=True):
            sampled = math.isfinite(logprob)  # the mask is 0 if the call constrained the tokens
            assert token >= 0
            assert sampled == (version >= 0)
            assert mask <= sampled
    for turn in recording.turns:
        assert -1 <= turn.sequence < len(recording.sequences)
        assert turn.token_start <= turn.token_end
        assert isinstance(turn.finish_reason, str)
    json_text.packed([recording.messages, recording.calls])


def _check_decoding(data: bytes) -> None:
    """Check that the bounds on answers change no value."""
    if b"NaN" in data or b"Infinity" in data or b"e" in data.lower():
        return  # decoders may differ in such numbers
    found: list[Any] = []
    for bounds in (json_text.Bounds(2**60, 2**60, 2**60), json_text.ANSWER):
        try:
            found.append(repr(json_text.decoded(data, bounds)))
        except (ValueError, RecursionError):
            found.append(None)
    assert found[0] == found[1]


def _whole(data: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX-Megaflow-Weight-Version: 3\r\n\r\n%b" % (len(data), data)


_engines = started(_Engines)


@reader
def documents(data: bytes) -> None:
    """Answer with JSON documents, one after another. The first byte of the input chooses the agent."""
    answers = data[1:].split(PART)
    with _lowered_limits():
        for answer in answers[:3]:
            _check_decoding(answer)
        _engines().ask(data[0] if data else 0, [_whole(answer) for answer in answers])


@reader
def http_bytes(data: bytes) -> None:
    """Answer with bytes, one answer after another."""
    with _lowered_limits():
        _engines().ask(data[0] if data else 0, data[1:].split(PART))


@contextlib.contextmanager
def _lowered_limits() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, name, value in _SMALL:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


_USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
_SCORES = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}, {"token": "b", "logprob": -1.5}]
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
_SAID = {"role": "assistant", "content": "ab", "reasoning": "r", "tool_calls": [_CALL]}
_CHOICE = {
    "index": 0,
    "message": _SAID,
    "finish_reason": "stop",
    "token_ids": [97, 98],
    "logprobs": {"content": _SCORES},
}
_CHAT = {"id": "x", "object": "chat.completion", "created": 1, "choices": [_CHOICE], "prompt_token_ids": [1, 2, 3]}
_PLAIN = {
    "index": 0,
    "text": "ab",
    "finish_reason": "length",
    "token_ids": [97, 98],
    "prompt_token_ids": [1, 2, 3],
    "logprobs": {"token_logprobs": [-0.5, -1.5], "tokens": ["a", "b"], "text_offset": [0, 1], "top_logprobs": [{}, {}]},
}
_RENDERED = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 9, "logprobs": 0}, "features": None}
_SPANS = [{"version": "1", "end": 1}, {"version": "2", "end": 2}]
_GENERATED = {"request_id": "r", "choices": [{**_CHOICE, "weight_versions": _SPANS, "stop_reason": None}]}


def _seeds() -> list[bytes]:
    chat, plain = {**_CHAT, "usage": _USAGE}, {"object": "text_completion", "choices": [_PLAIN], "usage": _USAGE}
    text = {**chat, "choices": [{"index": 0, "message": _SAID, "finish_reason": "tool_calls"}]}
    long = {**chat, "choices": [{**_CHOICE, "token_ids": [7] * 40, "logprobs": {"content": _SCORES * 20}}]}
    of_split = [_RENDERED, _GENERATED, {**chat, "choices": [{"index": 0, "message": _SAID, "finish_reason": "stop"}]}]
    found = []
    for number in range(len(PROTOCOLS) * len(BODIES)):
        protocol, path = PROTOCOLS[number % len(PROTOCOLS)], BODIES[number // len(PROTOCOLS)][0]
        chats = [of_split] if protocol == "split" else [[text]] if protocol == "text" else [[chat], [long]]
        for answers in chats if path != b"/completions" else [[plain]]:
            found.append(bytes([number]) + PART.join(json.dumps(answer).encode() for answer in answers))
    return found


def _exchanges() -> list[bytes]:
    whole = [seed[:1] + PART.join(_whole(part) for part in seed[1:].split(PART)) for seed in _seeds()[:12]]
    body = _seeds()[1][1:]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(body[n : n + 50]), body[n : n + 50]) for n in range(0, len(body), 50))
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n" + chunks + b"0\r\nX: y\r\n\r\n"
    refused = b"HTTP/1.1 429 Slow\r\nRetry-After: 5\r\nContent-Length: 20\r\n\r\n" + b'{"error":{"message":1}'
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 No\r\nContent-Length: 22\r\n\r\n" + b'{"error":{"message":1}}'
    closing = b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n" + body
    return [*whole, *(b"\x01" + answer for answer in (chunked, refused, interim, closing))]


_WORDS = (
    b'"token_ids":[-1],', b'"logprob":1e39', b'"logprob":NaN', b'"index":"x",', b'"end":-5', b'"finish_reason":7,',
    b'"weight_versions":[{"version":"99999999999","end":1}],', b'"total_tokens":99999999999999999999999',
    b'"tool_calls":[{"function":{"name":"f","arguments":{"a":1}}}],', b'"content":[{"type":"text","text":"x"}],',
    b'"choices":[],', b"[" * 300, b'{"a":' * 300, b'"\\ud800"',
)  # fmt: skip
_HEADS = (
    b"Transfer-Encoding: chunked\r\n", b"Content-Length: 99999999999\r\n", b"Content-Length: 5\r\n",
    b"Content-Encoding: gzip\r\n", b"X-Megaflow-Weight-Version: 99999999999999999999\r\n",
    b"X: " + b"a" * 9000 + b"\r\n", b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", b"HTTP/1.1 204 No\r\n\r\n",
    b"Retry-After: 99999999999999999999\r\n", b"1\r\nx\r\n" * 500,
)  # fmt: skip
TARGETS = {
    "answers": Target(documents, _seeds, form="json", words=_WORDS),
    "engine": Target(http_bytes, _exchanges, words=_HEADS),
}
