"""Images of model calls: stored once by content, tied to their placeholders, refused if they are none."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct
from typing import Any

import pytest
from aiohttp import web

from megaflow_hpc.model.engine_api import GENERATE, RENDER
from megaflow_hpc.model.engines.scripted.engine import ScriptedEngine, error
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer, ToolCall
from megaflow_hpc.model.gateway.recorder import Prompt, Recorder, SampledTokens
from megaflow_hpc.model.gateway.replay import Replay, calls_artifact
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.model.images import MAX_PIXELS, image_spans, read_image, result_images, separated_results
from megaflow_hpc.trajectory import Image, ImageSpan, Trajectory
from megaflow_hpc.types import CallBudget, ModelEndpoint
from tests.model.gateway.image_conversations import check, fault, part
from tests.support.samples import image, png
from tests.support.serving import call, gateway_before, in_loop
from tests.support.split_engine import SplitEngine

ONE, OTHER = image(100, 70, 1), image(100, 70, 2)
"""Two images of one size, and so of the same placeholders."""


class Noting(SplitEngine):
    """Notes the bodies that it was asked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Script(default=(ScriptedAnswer("a click"),)), "m", **options)
        self.bodies: list[tuple[str, Any]] = []

    def application(self) -> web.Application:
        @web.middleware
        async def note(request: web.Request, handler: Any) -> Any:
            self.bodies.append((request.path, await request.json()))
            return await handler(request)

        app = super().application()
        app.middlewares.append(note)
        return app

    def asked(self, path: str) -> list[Any]:
        return [body for own, body in self.bodies if own == path]


def user(*shown: Image, text: str = "look") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}, *map(part, shown)]}


@pytest.mark.parametrize("protocol", ["split", "plain"])
def test_every_placeholder_is_tied_to_its_own_image(protocol: str) -> None:
    """Ten thousand: ``python -m tests.model.gateway.image_conversations``."""
    counts = asyncio.run(check(150, seed=1, protocol=protocol))
    assert counts["wrong"] == 0
    assert min(counts[name] for name in ("spans", "sequences", "equal sized", "their images")) > 40


@in_loop
async def test_an_image_is_stored_once_and_its_engine_gets_all_of_it() -> None:
    engine = Noting()
    async with gateway_before(engine, "split", "p") as gateway:
        model = await gateway.open("t/p/0", "p")
        history = [user(ONE, OTHER)]
        for _ in range(3):
            status, reply = await call(model, {"messages": history})
            assert status == 200, reply
            history += [reply["choices"][0]["message"], user(ONE)]
        shown = gateway.conversation("t/p/0")
        recording = await gateway.close("t/p/0")
    assert recording.images == {ONE.sha256: ONE, OTHER.sha256: OTHER}
    urls = [one["image_url"]["url"] for one in recording.messages[0]["content"] if one["type"] == "image_url"]
    assert urls == [f"sha256:{ONE.sha256}", f"sha256:{OTHER.sha256}"]
    assert all("base64" not in str(messages) for messages in (recording.messages, shown, recording.calls))
    assert len(recording.sequences) == 1
    assert [span.image for span in recording.sequences[0].images] == [one.sha256 for one in (ONE, OTHER, ONE, ONE)]
    for path in (RENDER, GENERATE):
        assert all(str(body).count("data:image/png;base64,") == n for n, body in enumerate(engine.asked(path), 2))
    assert all(body["mm_payload"] == "none" for body in engine.asked(RENDER))


@in_loop
async def test_images_of_one_size_do_not_join_a_sequence() -> None:
    async with gateway_before(Noting(), "split", "p") as gateway:
        model = await gateway.open("t/p/0", "p")
        _, reply = await call(model, {"messages": [user(ONE)]})
        answer = reply["choices"][0]["message"]
        for first in (ONE, OTHER):
            await call(model, {"messages": [user(first), answer, user(OTHER)]})
        recording = await gateway.close("t/p/0")
    assert [turn.sequence for turn in recording.turns] == [0, 0, 1]
    assert [[span.image for span in one.images] for one in recording.sequences] == [
        [ONE.sha256, OTHER.sha256],
        [OTHER.sha256, OTHER.sha256],
    ]


URL = "data:image/png;base64," + base64.b64encode(ONE.data).decode()
RAW = URL.partition(",")[2]
SOURCE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RAW}}
INLINE = {"inlineData": {"mimeType": "image/png", "data": RAW}}
CALL = {"id": "c", "type": "function", "function": {"name": "f"}}
DIALECTS = {
    "/chat/completions": {
        "messages": [
            {"role": "user", "content": [part(ONE)]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "done"}, part(ONE)]},
        ]
    },
    "/messages": {
        "max_tokens": 100,
        "messages": [
            {"role": "user", "content": [SOURCE]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [SOURCE]}]},
        ],
    },
    "/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": URL}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URL}]},
        ]
    },
    "/models/m:generateContent": {
        "contents": [
            {"role": "user", "parts": [INLINE]},
            {"role": "model", "parts": [{"functionCall": {"id": "c", "name": "f", "args": {}}}]},
            {
                "role": "user",
                "parts": [{"functionResponse": {"id": "c", "name": "f", "response": {}, "parts": [INLINE]}}],
            },
        ]
    },
}


@pytest.mark.parametrize("path", DIALECTS)
@in_loop
async def test_images_of_every_dialect_and_of_tool_results_are_recorded(path: str) -> None:
    async with gateway_before(Noting(), "split", "p") as gateway:
        model = await gateway.open("t/p/0", "p")
        status, reply = await call(model, DIALECTS[path], path)
        assert status == 200, reply
        recording = await gateway.close("t/p/0")
    assert recording.images == {ONE.sha256: ONE}
    assert [span.image for span in recording.sequences[0].images] == [ONE.sha256] * 2
    assert str(recording.messages).count(f"sha256:{ONE.sha256}") == 2


RESULTS = [[ONE], [], [OTHER, ONE]]
"""The images of the results of three calls in one answer."""
NAMED = ["Shown by tool result 1 of 3:", ONE, "Shown by tool result 3 of 3:", OTHER, ONE]
"""What follows these results."""


class Calling(Noting):
    """An engine of a model that calls a tool three times in its first answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        calls = tuple(ToolCall("f", {"n": n}) for n in range(3))
        self.script = Script(default=(ScriptedAnswer("three", calls=calls), ScriptedAnswer("a click")))


def claude(reply: dict[str, Any] | None) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": 5000, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    body["messages"] = [{"role": "user", "content": "go"}]
    if reply:
        uses = [block for block in reply["content"] if block["type"] == "tool_use"]
        blocks: list[dict[str, Any]] = []
        for use, images in zip(uses, RESULTS, strict=True):
            sources = [{"type": "base64", "media_type": "image/png", "data": image.url[22:]} for image in images]
            content = [{"type": "text", "text": "done"}, *({"type": "image", "source": source} for source in sources)]
            blocks.append({"type": "tool_result", "tool_use_id": use["id"], "content": content})
        blocks.append({"type": "text", "text": "go on"})
        body["messages"] += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": blocks}]
    return body


def openai(reply: dict[str, Any] | None) -> dict[str, Any]:
    body: dict[str, Any] = {"tools": [{"type": "function", "name": "f"}], "input": [{"role": "user", "content": "go"}]}
    if reply:
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        body["input"] += reply["output"]
        for one, images in zip(calls, RESULTS, strict=True):
            shown = [{"type": "input_image", "image_url": image.url} for image in images]
            output = [{"type": "input_text", "text": "done"}, *shown]
            body["input"].append({"type": "function_call_output", "call_id": one["call_id"], "output": output})
        body["input"].append({"role": "user", "content": "go on"})
    return body


def gemini(reply: dict[str, Any] | None) -> dict[str, Any]:
    body: dict[str, Any] = {"tools": [{"functionDeclarations": [{"name": "f"}]}], "contents": []}
    body["contents"].append({"role": "user", "parts": [{"text": "go"}]})
    if reply:
        said = reply["candidates"][0]["content"]
        calls = [part["functionCall"] for part in said["parts"] if "functionCall" in part]
        results: list[dict[str, Any]] = []
        for one, images in zip(calls, RESULTS, strict=True):
            inline = [{"inlineData": {"mimeType": "image/png", "data": image.url[22:]}} for image in images]
            result = {"id": one["id"], "name": "f", "response": {"output": "done"}, "parts": inline}
            results.append({"functionResponse": result})
        body["contents"] += [said, {"role": "user", "parts": [*results, {"text": "go on"}]}]
    return body


@pytest.mark.parametrize("protocol", ["split", "plain"])
@pytest.mark.parametrize(
    ("path", "body"), [("/messages", claude), ("/responses", openai), ("/models/m:generateContent", gemini)]
)
@in_loop
async def test_results_of_several_calls_come_first_and_then_their_images_each_with_its_result(
    path: str, body: Any, protocol: str
) -> None:
    """A strict chat template refuses a user message between the results of one answer."""
    engine = Calling(drift=0.4 if protocol == "split" else 0.0)
    async with gateway_before(engine, protocol, "p") as gateway:
        model = await gateway.open("t/p/0", "p")
        status, reply = await call(model, body(None), path)
        assert status == 200, reply
        status, reply = await call(model, body(reply), path)
        assert status == 200, reply
        recording = await gateway.close("t/p/0")
    roles = [message["role"] for message in recording.messages]
    separate = path == "/responses"  # its user message is an item of its own
    assert roles == ["user", "assistant", *["tool"] * 3, *["user"] * (1 + separate), "assistant"]
    calls = [one["id"] for one in recording.messages[1]["tool_calls"]]
    assert [(m["tool_call_id"], m["content"]) for m in recording.messages[2:5]] == [(one, "done") for one in calls]
    shown = [one.get("text") or one["image_url"]["url"] for one in recording.messages[5]["content"]]
    expected = [one if isinstance(one, str) else f"sha256:{one.sha256}" for one in NAMED]
    assert shown == expected + ([] if separate else ["go on"])
    assert [turn.sequence for turn in recording.turns] == [0, 0], "the second prompt extends the first"
    sent = [ONE.sha256, OTHER.sha256, ONE.sha256]
    assert fault(recording, [[], sent], engine.log, engine.shown) == ""
    assert [span.image for span in recording.sequences[0].images] == sent


def test_images_return_to_their_results_for_apis_that_take_them_there() -> None:
    tools = [{"role": "tool", "tool_call_id": str(n), "content": "done"} for n in range(3)]
    before, after = {"role": "user", "content": "go"}, {"role": "assistant", "content": "x"}
    shown = [*result_images([[{"type": "text", "text": "done"}, *map(part, images)] for images in RESULTS])]
    text = {"type": "text", "text": "go on"}
    first, last = ({"role": "user", "content": [*map(part, images)]} for images in (RESULTS[0], RESULTS[2]))
    for rest in ([], [text], [text, part(ONE)]):
        ours = [before, *tools, {"role": "user", "content": [*shown, *rest]}, after]
        others = [{"role": "user", "content": rest}] if rest else []
        assert [*separated_results(ours)] == [before, tools[0], first, tools[1], tools[2], last, *others, after]
    (alone,) = result_images([[part(ONE)]])
    for unchanged in (
        [before, tools[0], {"role": "user", "content": [alone]}, after],
        [before, *tools, {"role": "user", "content": [part(ONE), text]}, after],
        [before, *tools, before, after],
        [before, {"role": "user", "content": shown}],
        [before, *tools],
    ):
        assert [*separated_results(unchanged)] == unchanged


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header says that it has this size."""
    return ONE.data[:16] + struct.pack(">II", width, height) + ONE.data[24:]


REFUSED = {
    "not a PNG, JPEG, WebP or GIF image": data_url(b"<svg/>", "image/svg+xml"),
    "not base64": "data:image/png;base64,*",
    "an image of 100000x100000 pixels": data_url(bomb(100_000, 100_000)),
    "or one without its header": data_url(bomb(0, 5)),
    "send the image itself, not its address": "http://files.example/a.png",
    "expected data:image/": "file:///etc/passwd",
    "expected data:image": f"sha256:{ONE.sha256}",
}


@pytest.mark.parametrize("message", REFUSED)
@in_loop
async def test_an_image_that_is_none_is_refused_and_not_stored(message: str) -> None:
    engine = Noting()
    bad = {"role": "user", "content": [part(ONE), {"type": "image_url", "image_url": {"url": REFUSED[message]}}]}
    async with gateway_before(engine, "split", "p") as gateway:
        model = await gateway.open("t/p/0", "p")
        status, reply = await call(model, {"messages": [bad]})
        recording = await gateway.close("t/p/0")
    assert status == 400
    assert "messages[0].content[1].image_url.url: " in reply["error"]["message"]
    assert message in reply["error"]["message"]
    assert (recording.images, recording.turns, engine.bodies) == ({}, [], [])


@in_loop
async def test_a_rollout_stores_no_more_images_than_its_budget() -> None:
    async with gateway_before(Noting(), "split", "p") as gateway:
        budget = CallBudget(image_bytes=len(ONE.data) + 10)
        model = await gateway.open("t/p/0", "p", budget=budget)
        for shown, expected in ((ONE, 200), (ONE, 200), (OTHER, 429), (ONE, 200)):
            status, reply = await call(model, {"messages": [user(shown)]})
            assert status == expected, reply
            if status == 429:
                assert "agent.max_image_mb" in reply["error"]["message"]
        recording = await gateway.close("t/p/0")
    assert recording.images == {ONE.sha256: ONE}
    assert "images take" in recording.over_budget


class Mute(ScriptedEngine):
    """An engine that cannot render, as SGLang and other endpoints."""

    async def _render(self, request: web.Request) -> web.Response:
        raise web.HTTPNotFound


@in_loop
async def test_tokens_whose_images_are_unknown_are_not_recorded() -> None:
    """The engine reports no placeholders."""
    script = Script(default=(ScriptedAnswer("a click"),))
    async with gateway_before(Mute(script, "m"), "plain", "p") as gateway:
        model = await gateway.open("t/p/0", "p")
        content = [{"type": "image_url", "image_url": {"url": URL}}]
        status, reply = await call(model, {"messages": [{"role": "user", "content": content}], "logprobs": True})
        assert status == 200, reply
        await call(model, {"messages": [{"role": "user", "content": "no image"}]})
        recording = await gateway.close("t/p/0")
    assert [turn.sequence for turn in recording.turns] == [-1, 0]
    assert recording.inexact == 1
    assert recording.calls[0]["tokens"][1] == len("a click") + 1
    assert recording.messages[0]["content"][0]["image_url"]["url"] == f"sha256:{ONE.sha256}"


class Blind(Noting):
    """An engine of a model without a vision part, which refuses images as vLLM does."""

    async def _render(self, request: web.Request) -> web.Response:
        if "image_url" in await request.text():
            return error(400, "At most 0 image(s) may be provided in one prompt.")
        return await super()._render(request)

    async def _chat(self, request: web.Request) -> web.Response:
        return await self._render(request)


@pytest.mark.parametrize("protocol", ["split", "plain", "text"])
@in_loop
async def test_an_engine_that_lacks_images_says_so_to_the_agent_and_nothing_is_stored(protocol: str) -> None:
    async with gateway_before(Blind(), protocol, "p") as gateway:
        model = await gateway.open("t/p/0", "p")
        status, reply = await call(model, {"messages": [user(ONE)]})
        recording = await gateway.close("t/p/0")
    assert (status, reply["error"]["message"]) == (400, "At most 0 image(s) may be provided in one prompt.")
    assert (recording.images, recording.turns) == ({}, [])


class Bracketing(Noting):
    """An engine whose image begins and ends with a token of its own, inside its placeholders."""

    async def _render(self, request: web.Request) -> web.Response:
        response = await super()._render(request)
        body = json.loads(response.text or "")
        for one in (body["features"] or {"mm_placeholders": {"image": []}})["mm_placeholders"]["image"]:
            body["token_ids"][one["offset"]] = 300
        return web.json_response(body)


@in_loop
async def test_an_engine_that_makes_another_prompt_of_ids_renders_the_messages_itself() -> None:
    """The prompt with ids would need a placeholder that stands for the whole image. Its own rendering differs here."""
    engine = Bracketing()
    async with gateway_before(engine, "split", "p") as gateway:
        model = await gateway.open("t/p/0", "p")
        status, reply = await call(model, {"messages": [user(ONE)]})
        assert status == 200, reply
        recording = await gateway.close("t/p/0")
    assert not engine.asked(GENERATE)
    assert recording.protocols == {"text": 1}


@in_loop
async def test_a_recording_with_images_is_replayed() -> None:
    async with gateway_before(Noting(drift=0.4), "split", "p") as gateway:
        recording = await _two_calls(await gateway.open("t/p/0", "p"), gateway)
    heading = {"id": "t/p/0", "task_id": "t", "group_id": "t/p", "policy": "p", "agent": "a", "status": "completed"}
    names = ("messages", "parents", "sequences", "turns", "images")
    recorded = Trajectory(**heading, **{name: getattr(recording, name) for name in names})
    recorded.artifacts = [calls_artifact(recording)]

    class Store:
        def trajectory(self, rollout_id: str) -> Trajectory:
            return recorded

    async with ModelGateway(replays={"p": Replay(Store())}) as gateway:
        again = await _two_calls(await gateway.open("t/p/0", "p"), gateway)
    assert repr(again.sequences) == repr(recording.sequences)  # NaN differs from itself
    assert (again.images, again.messages) == (recording.images, recording.messages)


async def _two_calls(model: ModelEndpoint, gateway: ModelGateway) -> Any:
    history = [user(ONE)]
    for _ in range(2):
        status, reply = await call(model, {"messages": history})
        assert status == 200, reply
        history += [reply["choices"][0]["message"], user(OTHER)]
    return await gateway.close("t/p/0")


def test_a_checkpoint_keeps_images_and_their_places() -> None:
    recorder = Recorder("p")
    spans = [ImageSpan(1, 2, ONE.sha256)]
    sample = SampledTokens([1, 9, 9], [4], [-1.0], images=spans, message={"role": "assistant", "content": "x"})
    sample.rendered = Prompt((recorder.recording.sequences and []) or __import__("array").array("i", [1, 9, 9]), spans)
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"sha256:{ONE.sha256}"}}]}]
    recorder.add(sample, messages, images={ONE.sha256: ONE})
    again = Recorder.resumed(recorder.state())
    assert repr(again.recording) == repr(recorder.recording)
    assert again.tips == recorder.tips
    assert again.find([1, 9, 9, 4, 5], images=spans) == 0
    assert again.find([1, 9, 9, 4, 5], images=[ImageSpan(1, 2, OTHER.sha256)]) is None
    assert again.find([1, 9, 9, 4, 5]) is None


# --- headers ---

JPEG = (
    b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00\xff\xfe\x00\x04hi\xff\xff\xc2\x00\x11\x08"
    + struct.pack(">HH", 480, 640)
)
HEADERS = {
    "png": (png(7, 5), "image/png", 7, 5),
    "gif": (b"GIF89a" + struct.pack("<HH", 640, 480), "image/gif", 640, 480),
    "jpeg": (JPEG, "image/jpeg", 640, 480),
    "lossy webp": (
        b"RIFF0000WEBPVP8 0000\x00\x00\x00\x9d\x01\x2a" + struct.pack("<HH", 640 | 0x4000, 480), "image/webp", 640, 480,
    ),
    "lossless webp": (
        b"RIFF0000WEBPVP8L0000\x2f" + struct.pack("<I", 639 | 479 << 14), "image/webp", 640, 480,
    ),
    "extended webp": (
        b"RIFF0000WEBPVP8X0000\x00\x00\x00\x00" + (639).to_bytes(3, "little") + (479).to_bytes(3, "little"),
        "image/webp", 640, 480,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADERS)
def test_the_header_says_type_and_size(kind: str) -> None:
    data, *expected = HEADERS[kind]
    found = read_image(data)
    assert [found.media_type, found.width, found.height] == expected
    assert found.sha256 == hashlib.sha256(data).hexdigest()
    for length in range(len(data) if kind != "png" else 24):
        with pytest.raises(ValueError, match="not a PNG"):
            read_image(data[:length])


def test_a_second_size_is_the_one_that_counts_or_is_refused() -> None:
    """Decoders take the size of a GIF's first frame, and the last one of a PNG or JPEG with two."""
    gif = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6) + b"!\xfe\x02hi\0"
    frame = b"," + struct.pack("<4HB", 10, 20, 30, 40, 0)
    found = read_image(gif + frame)
    assert (found.width, found.height) == (40, 60)
    with pytest.raises(ValueError, match="an image of 65535x60000 pixels"):
        read_image(gif + b"," + struct.pack("<4HB", 0, 0, 65535, 60000, 0))
    second = b"\0\0\0\x0dIHDR" + struct.pack(">II", 60000, 60000) + bytes(9)
    size = JPEG[JPEG.index(b"\xff\xc2") :] + bytes(10)
    scan = b"\xff\xda\0\x02"
    assert read_image(JPEG + bytes(10) + scan).width == 640
    for data in (ONE.data[:33] + second + ONE.data[33:], JPEG + bytes(10) + size + scan):
        with pytest.raises(ValueError, match="not a PNG"):
            read_image(data)


def test_a_jpeg_of_endless_segments_is_refused_in_time() -> None:
    with pytest.raises(ValueError, match="not a PNG"):
        read_image(b"\xff\xd8" + b"\xff\xe0\x00\x02" * 5_000_000)
    for endless in (ONE.data[:33] + bytes(20_000_000), HEADERS["gif"][0] + b"\0\0\0" + b" " * 20_000_000):
        with pytest.raises(ValueError, match="not a PNG"):
            read_image(endless)
    with pytest.raises(ValueError, match=str(MAX_PIXELS)):
        read_image(bomb(2**13, 2**13 + 1))


def test_an_engine_whose_placeholders_are_impossible_is_not_believed() -> None:
    asked = ["a", "b"]

    def features(*ranges: tuple[int, int], hashes: tuple[str, ...] = ("1", "2")) -> dict[str, Any]:
        spans = [{"offset": offset, "length": length} for offset, length in ranges]
        return {"mm_placeholders": {"image": spans}, "mm_hashes": {"image": list(hashes)}}

    assert image_spans(features((5, 2), (1, 3)), asked, 9) == [ImageSpan(1, 3, "b"), ImageSpan(5, 2, "a")]
    for wrong in (((0, 2),), ((0, 3), (2, 2)), ((0, 2), (8, 2)), ((-1, 2), (4, 2)), ((0, 0), (4, 2))):
        with pytest.raises(ValueError):  # noqa: PT011
            image_spans(features(*wrong), asked, 9)
    with pytest.raises(ValueError, match="different digests"):
        image_spans(features((0, 1), (2, 1)), ["a", "a"], 9)
