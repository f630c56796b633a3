"""In every dialect, a conversation that an agent sends back in its API's form is the recorded conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_hpc.model.engines.scripted.engine import END, answer_text, render
from megaflow_hpc.model.gateway import dialects
from megaflow_hpc.model.gateway.dialects import BadRequest, chat, gemini, messages, responses
from megaflow_hpc.model.gateway.dialects.options import engine_request
from megaflow_hpc.model.gateway.recorder import Recorder, SampledTokens

DEVELOPER, USER = {"role": "developer", "content": "D"}, {"role": "user", "content": "a"}
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
JSON = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | TEXT, lambda inner: st.lists(inner, max_size=2))


@st.composite
def arguments(draw: st.DrawFn) -> str:
    """Arguments as models write them: in any spacing and order, sometimes empty."""
    given_ = draw(st.dictionaries(TEXT, JSON, max_size=3))
    if not given_ and draw(st.booleans()):
        return ""
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,  ", " : ")]))
    return json.dumps(given_, separators=separators, ensure_ascii=draw(st.booleans()))


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    calls = draw(st.lists(st.tuples(st.sampled_from(["bash", "edit"]), arguments()), max_size=3))
    content = draw(st.text(st.characters(codec="utf-8"), max_size=20)) if calls else draw(TEXT.filter(str.strip))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if draw(st.booleans()):
        message["reasoning"] = draw(TEXT.filter(str.strip))
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{draw(st.uuids())}", "type": "function", "function": {"name": n, "arguments": a}}
            for n, a in calls
        ]
    return message


class ChatAgent:
    """Appends answers in the form of its API, as the real clients do. The API has no reasoning."""

    dialect: dialects.Dialect = chat

    def __init__(self) -> None:
        self.history: list[Any] = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "Go."}]

    def body(self) -> dict[str, Any]:
        return {"messages": self.history}

    def take(self, answer: Mapping[str, Any], results: list[str]) -> None:
        message = answer["choices"][0]["message"]
        self.history.append({k: v for k, v in message.items() if k != "reasoning"})
        calls = message.get("tool_calls") or ()
        self.history += [
            {"role": "tool", "tool_call_id": c["id"], "content": r} for c, r in zip(calls, results, strict=False)
        ]
        if not calls:
            self.history.append({"role": "user", "content": results[0]})


class MessagesAgent(ChatAgent):
    dialect = messages

    def __init__(self) -> None:
        self.history = [{"role": "user", "content": [{"type": "text", "text": "Go."}]}]

    def body(self) -> dict[str, Any]:
        hashed = {"type": "text", "text": f"x-anthropic-billing-header: {len(self.history)}"}
        system = [hashed, {"type": "text", "text": "Be exact.", "cache_control": {"type": "ephemeral"}}]
        return {"system": system, "messages": self.history, "max_tokens": 100}

    def take(self, answer: Mapping[str, Any], results: list[str]) -> None:
        # Rebuilt from the form the answer has in JSON, which keeps neither spacing nor order of a tool's input.
        blocks = json.loads(json.dumps(answer["content"], sort_keys=True))
        self.history.append({"role": "assistant", "content": blocks})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        said: list[Any] = [
            {"type": "tool_result", "tool_use_id": c["id"], "content": [{"type": "text", "text": r}]}
            for c, r in zip(calls, results, strict=False)
        ]
        self.history.append({"role": "user", "content": said or results[0]})


class ResponsesAgent(ChatAgent):
    dialect = responses

    def __init__(self) -> None:
        self.history = [{"role": "user", "content": [{"type": "input_text", "text": "Go."}]}]

    def body(self) -> dict[str, Any]:
        return {"instructions": "Be exact.", "input": self.history}

    def take(self, answer: Mapping[str, Any], results: list[str]) -> None:
        # Reasoning comes back without its content where it was not asked for in an encrypted form.
        self.history += [{k: v for k, v in i.items() if k not in ("id", "status")} for i in answer["output"]]
        for item in self.history:
            if item.get("type") == "reasoning":
                item.pop("content", None)
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        self.history += [
            {"type": "function_call_output", "call_id": c["call_id"], "output": r}
            for c, r in zip(calls, results, strict=False)
        ]
        if not calls:
            self.history.append({"type": "message", "role": "user", "content": results[0]})


class GeminiAgent(ChatAgent):
    """Sends back neither thoughts nor, if ``without_ids``, the ids of calls."""

    dialect = gemini
    without_ids = False

    def __init__(self) -> None:
        self.history = [{"role": "user", "parts": [{"text": "Go."}]}]

    def body(self) -> dict[str, Any]:
        return {"systemInstruction": {"parts": [{"text": "Be exact."}]}, "contents": self.history, "model": "m"}

    def take(self, answer: Mapping[str, Any], results: list[str]) -> None:
        content = json.loads(json.dumps(answer["candidates"][0]["content"], sort_keys=True))
        calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        for call in calls if self.without_ids else ():
            del call["id"]
        parts = [part for part in content["parts"] if not part.get("thought")]
        self.history.append({"role": "model", "parts": parts})
        said: list[Any] = [
            {"functionResponse": {**{k: c[k] for k in ("id", "name") if k in c}, "response": {"output": r}}}
            for c, r in zip(calls, results, strict=False)
        ]
        self.history.append({"role": "user", "parts": said or [{"text": results[0]}]})


class OlderGeminiAgent(GeminiAgent):
    without_ids = True


def reply_of(message: Mapping[str, Any]) -> dict[str, Any]:
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": dict(message), "finish_reason": finish}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


@pytest.mark.parametrize("kind", [ChatAgent, MessagesAgent, ResponsesAgent, GeminiAgent, OlderGeminiAgent])
@given(script=st.lists(st.tuples(answers(), st.lists(TEXT, min_size=3, max_size=3)), min_size=1, max_size=5))
def test_an_agent_that_only_appends_has_one_sequence_of_what_was_sampled(
    kind: type[ChatAgent], script: list[tuple[dict[str, Any], list[str]]]
) -> None:
    agent, recorder = kind(), Recorder("p")
    sampled: list[list[int]] = []
    for message, results in script:
        asked = agent.dialect.request(agent.body())
        conversation = recorder.restore(asked["messages"])
        prompt = render(conversation)
        sampled.append([*answer_text(message).encode(), END])
        recorder.add(SampledTokens(prompt, sampled[-1], [-1.0] * len(sampled[-1]), message=message), conversation)
        agent.take(agent.dialect.answer(reply_of(message), agent.body()), results)
    (sequence,) = recorder.recording.sequences
    assert [list(sequence.tokens[t.token_start : t.token_end]) for t in recorder.recording.turns] == sampled
    assert [m for m in recorder.recording.messages if m["role"] == "assistant"] == [m for m, _ in script]
    assert recorder.recording.messages[0] == {"role": "system", "content": "Be exact."}


@given(message=answers())
def test_a_stream_of_messages_adds_up_to_the_answer(message: dict[str, Any]) -> None:
    answer = messages.answer(reply_of(message), {})
    found: list[dict[str, Any]] = []
    names = []
    for name, data in messages.events(answer, {}):
        assert data["type"] == name
        names.append(name)
        if name == "content_block_start":
            assert data["index"] == len(found)
            found.append({**data["content_block"], "input_json": ""})
        elif name == "content_block_delta":
            for field, of in [("text", "text"), ("thinking", "thinking"), ("partial_json", "input_json")]:
                found[-1][of] = found[-1].get(of, "") + data["delta"].get(field, "")
    for block, whole in zip(found, answer["content"], strict=True):
        if whole["type"] == "tool_use":
            assert json.loads(block["input_json"]) == whole["input"]
        else:
            assert block[whole["type"]] == whole[whole["type"]]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert names.count("content_block_start") == names.count("content_block_stop") == len(answer["content"])


@given(message=answers())
def test_a_stream_of_a_response_adds_up_to_the_answer(message: dict[str, Any]) -> None:
    answer = responses.answer(reply_of(message), {})
    events = list(responses.events(answer, {}))
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert [data["item"] for name, data in events if name == "response.output_item.done"] == answer["output"]
    added: dict[str, str] = {}
    for name, data in events:
        if name.endswith(".delta"):
            added[data["item_id"]] = added.get(data["item_id"], "") + data["delta"]
    for item in answer["output"]:
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert added[item["id"]] == whole
    assert events[-1] == ("response.completed", {**events[-1][1], "response": answer})


def test_many_gemini_calls_are_matched_with_their_results_in_order() -> None:
    count = 20_000
    results = [{"functionResponse": {"name": "f" if n else "other"}} for n in range(count)]
    calls = [{"functionCall": {"name": "f"}} for n in range(count)]
    contents = [{"role": "model", "parts": calls}, {"role": "user", "parts": results}]
    answer, *messages = gemini.request({"contents": contents})["messages"]
    ids = [call["id"] for call in answer["tool_calls"]]
    assert [message["tool_call_id"] for message in messages] == ["", *ids[:-1]]


def test_geminis_forms_become_chat_messages_and_its_errors_end_a_clients_retries() -> None:
    call = {"functionCall": {"name": "f", "args": {"a": 1}}}
    result = {"functionResponse": {"name": "f", "response": {"rows": [1]}}}
    picture = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    contents = [{"parts": [{"text": "x"}, picture]}, {"role": "model", "parts": [call]}, {"parts": [result]}]
    declared = {"name": "f", "parameters": {"type": "OBJECT", "properties": {"type": {"type": "STRING"}}}}
    asked = gemini.request(
        {"contents": contents, "tools": [{"functionDeclarations": [declared]}, {"googleSearch": {}}]}
    )
    asked = engine_request(asked, chat=True)
    assert asked["messages"][0]["content"][1]["image_url"]["url"] == "data:image/png;base64,AAAA"
    assert asked["messages"][1]["tool_calls"][0]["id"] == asked["messages"][2]["tool_call_id"] != ""
    assert asked["messages"][2]["content"] == '{"rows": [1]}'
    (tool,) = asked["tools"]
    assert tool["function"]["parameters"] == {"type": "object", "properties": {"type": {"type": "string"}}}
    over = gemini.error(429, "no more calls", "rollout_budget_exceeded")["error"]
    assert "PerDay" in over["details"][0]["violations"][0]["quotaId"]
    with pytest.raises(BadRequest, match=r"contents\[0\]\.role: expected user or model, found 'tool'"):
        gemini.request({"contents": [{"role": "tool", "parts": [{"text": "x"}]}]})


def test_an_answer_that_the_agent_changed_stays_changed() -> None:
    recorder = Recorder("p")
    said = {"role": "assistant", "content": "A long story.", "reasoning": "why"}
    asked = {"role": "user", "content": "?"}
    recorder.add(SampledTokens([1], [2], [-1.0], message=said), [asked])
    for back in ({"content": "[cut]"}, {"content": "A long story.", "reasoning": "other"}):
        assert recorder.restore([asked, {"role": "assistant", **back}]) == [asked, {"role": "assistant", **back}]
    back = {"content": [{"type": "text", "text": "A long story. "}]}
    assert recorder.restore([asked, {"role": "assistant", **back}]) == [asked, said]


def test_defaults_that_a_client_adds_to_a_call_change_nothing_and_other_values_do() -> None:
    def said(arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
        function = {"name": "edit", "arguments": json.dumps(arguments)}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}], **more}

    recorder = Recorder("p")
    answer = said({"path": "a"}, reasoning="why")
    asked = {"role": "user", "content": "?"}
    recorder.add(SampledTokens([1], [2], [-1.0], message=answer), [asked])
    assert recorder.restore([asked, said({"all": False, "path": "a"})]) == [asked, answer]
    assert recorder.restore([asked, said({"all": False, "path": "b"})])[1] == said({"all": False, "path": "b"})


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def test_images_pass_through() -> None:
    url = "data:image/png;base64,AAAA"
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "seen"}, IMAGE]}
    asked = messages.request({"messages": [{"role": "user", "content": [result, IMAGE]}], "max_tokens": 1})
    tool, user = asked["messages"]
    assert (tool["role"], tool["content"]) == ("tool", "seen")
    assert [part["image_url"]["url"] for part in user["content"]] == [url, url]
    item = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url}]}
    (user,) = responses.request({"input": [item]})["messages"]
    assert [part["type"] for part in user["content"]] == ["text", "image_url"]


@pytest.mark.parametrize("in_result", [False, True])
def test_images_of_a_vendors_files_are_refused_by_name(in_result: bool) -> None:
    parts: list[Any] = [{"type": "image", "source": {"type": "file", "file_id": "f"}}]
    where = "messages[0].content[0]" + (".content[0]" if in_result else "")
    if in_result:
        parts = [{"type": "tool_result", "tool_use_id": "c", "content": parts}]
    with pytest.raises(BadRequest, match=re.escape(f"{where}.source.type: expected one of url, base64, found 'file'")):
        messages.request({"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
    parts = [{"type": "input_image", "file_id": "f"}]
    message = {"role": "user", "content": parts}
    item = {"type": "function_call_output", "call_id": "c", "output": parts} if in_result else message
    with pytest.raises(BadRequest, match=r"input\[0\]\.(content|output)\[0\]\.image_url: expected a value"):
        responses.request({"input": [item]})


SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}


def test_tools_and_their_choice_are_converted() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "stop_sequences": ["\n"]}
    tools = [{"name": "bash", "description": "d", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "w"}]
    choice = {"type": "tool", "name": "bash", "disable_parallel_tool_use": True}
    asked = messages.request({**body, "tools": tools, "tool_choice": choice})
    assert asked["tools"] == [
        {"type": "function", "function": {"name": "bash", "parameters": SCHEMA, "description": "d"}}
    ]
    assert (asked["stop"], asked["parallel_tool_calls"]) == (["\n"], False)
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "bash"}}

    tools = [
        {"type": "function", "name": "bash", "parameters": SCHEMA},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
        {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}]},
        {"type": "web_search"},
    ]
    request = {"input": "a", "tools": tools, "max_output_tokens": 5}
    asked = responses.request(request)
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["bash", "patch", "fs__read"]
    assert asked["max_tokens"] == 5
    calls = [("patch", '{"input": "*** Begin"}'), ("fs__read", '{"x": "1"}')]
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": n, "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls],
    }
    patch, read = responses.answer(reply_of(message), request)["output"]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** Begin")
    assert (read["namespace"], read["name"], read["arguments"]) == ("fs", "read", '{"x": "1"}')
    outputs = [{"type": "custom_tool_call_output", "call_id": "patch", "output": "done"}]
    asked = responses.request({**request, "input": [{"role": "user", "content": "a"}, patch, read, *outputs]})
    recorder = Recorder("p")
    recorder.add(SampledTokens([1], [2], [-1.0], message=message), [{"role": "user", "content": "a"}])
    assert recorder.restore(asked["messages"])[1] == message


def test_what_a_model_wrote_that_is_no_json_reaches_the_tool_and_comes_back() -> None:
    function = {"name": "bash", "arguments": '{"command": "ls'}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    answer = messages.answer(reply_of(message), {})
    assert answer["content"][0]["input"] == {"input": '{"command": "ls'}
    recorder = Recorder("p")
    recorder.add(SampledTokens([1], [2], [-1.0], message=message), [{"role": "user", "content": "a"}])
    body = {"messages": [{"role": "user", "content": "a"}, answer], "max_tokens": 1}
    assert recorder.restore(messages.request(body)["messages"])[1] == message


def test_system_messages_stand_first_or_are_the_users() -> None:
    given_ = [{"role": "user", "content": "a"}, {"role": "system", "content": "Note."}]
    asked = messages.request({"system": "S", "messages": given_, "max_tokens": 1})
    assert [m["role"] for m in asked["messages"]] == ["system", "user", "user"]
    items = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "a"},
        {"role": "developer", "content": "E"},
    ]
    asked = responses.request({"instructions": "S", "input": items})
    assert [(m["role"], m["content"]) for m in asked["messages"]] == [
        ("system", "S\n\nD"),
        ("user", "a"),
        ("user", "E"),
    ]


@pytest.mark.parametrize(
    ("dialect", "body", "roles"),
    [
        (chat, {"messages": [DEVELOPER, USER]}, ["system", "user"]),
        (chat, {"messages": [{"role": "system", "content": "S"}, DEVELOPER, USER]}, ["system", "system", "user"]),
        (chat, {"messages": [USER, DEVELOPER]}, ["user", "system"]),
        (chat, {"messages": [{**DEVELOPER, "content": [{"type": "text", "text": "D"}]}, USER]}, ["system", "user"]),
        (responses, {"input": [DEVELOPER, USER]}, ["system", "user"]),
        (responses, {"input": [USER, {"type": "message", **DEVELOPER}]}, ["user", "user"]),
        (messages, {"messages": [USER, DEVELOPER], "max_tokens": 1}, ["user", "user"]),
    ],
)
def test_no_engine_is_sent_the_developer_role_and_its_words_stay(
    dialect: dialects.Dialect, body: dict[str, Any], roles: list[str]
) -> None:
    asked = engine_request(dialect.request(body), True)
    assert [m["role"] for m in asked["messages"]] == roles
    assert [m["content"] for m in asked["messages"]].count("D") + str(asked).count("'text': 'D'") == 1


@pytest.mark.parametrize(
    ("dialect", "change", "named"),
    [
        (messages, {"max_tokens": None}, "max_tokens"),
        (messages, {"messages": []}, "messages"),
        (messages, {"messages": [{"role": "tool", "content": "a"}]}, r"messages\[0\].role"),
        (
            messages,
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            r"content\[0\].type: .*image.*'video'",
        ),
        (messages, {"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content"),
        (messages, {"tools": [{"name": "x", "type": "memory_20250818"}]}, r"tools\[0\]"),
        (responses, {"previous_response_id": "resp_1"}, "previous_response_id: .*whole conversation"),
        (responses, {"background": True}, "background"),
        (responses, {"input": []}, "input"),
        (
            responses,
            {"input": [{"type": "item_reference", "id": "x"}]},
            r"input\[0\].type: .*message.*item_reference",
        ),
        (responses, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
        (responses, {"input": [3]}, r"input\[0\]: expected `object`"),
    ],
)
def test_what_cannot_be_served_is_named(dialect: dialects.Dialect, change: dict[str, Any], named: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "input": "a", **change}
    with pytest.raises(BadRequest, match=named):
        dialect.request(body)


@given(
    body=st.dictionaries(st.sampled_from(["messages", "input", "tools", "system", "instructions"]), JSON, max_size=4)
)
def test_no_request_breaks_a_conversion(body: dict[str, Any]) -> None:
    for dialect in (messages, responses):
        try:
            dialect.request({"max_tokens": 1, **body})
        except BadRequest:
            pass
