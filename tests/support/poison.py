"""Model calls of a hostile agent, by path below ``/v1``. Each must be refused without asking an engine."""

from __future__ import annotations

from typing import Any

USER = [{"role": "user", "content": "hello"}]
GOOD: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": USER},
    "/completions": {"prompt": "hello"},
    "/messages": {"messages": USER, "max_tokens": 9},
    "/responses": {"input": "hello"},
    "/models/MODEL:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
DEEP: Any = {}
for _ in range(200):
    DEEP = {"properties": {"a": DEEP}}


def image(url: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


ANYWHERE: list[dict[str, Any]] = [
    {"n": 10**6},
    {"n": 0},
    {"seed": 2**64},
    {"stop": ["x"] * 1000},
    {"temperature": float("nan")},
    {"temperature": 1e308},
    {"top_p": float("inf")},
    {"top_k": 10**30},
    {"logit_bias": {"1": float("nan")}},
    {"logit_bias": {str(n): 1 for n in range(5000)}},
    {"logit_bias": {"__class__": 1}},
    {"max_tokens": 10**12},
    {"max_tokens": "x"},
    {"model": ["x"]},
    {"stream": "yes"},
    {"stream": True, "stream_options": 3},
    {"echo": True},
    {"prompt_logprobs": 20},
    {"use_beam_search": True},
    {"best_of": 9},
    {"suffix": "x"},
    {"kv_transfer_params": {"remote_host": "127.0.0.1"}},
    {"ec_transfer_params": {"a": 1}},
    {"vllm_xargs": {"b": 2}},
    {"structured_outputs": {"regex": "(a+)+$"}},
    {"structured_outputs": {"grammar": "root ::= root root"}},
    {"structured_outputs": {"structural_tag": "{}"}},
    {"structured_outputs": {"json": "{}"}},
    {"guided_regex": "(a+)+$"},
    {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 100_000]}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "((a{0,99}){99}){99}"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"patternProperties": {"a{9999}": {}}}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1:9/x"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"minItems": 10**9}}}},
    {"priority": -1},
    {"cache_salt": "x"},
    {"truncate_prompt_tokens": 1},
    {"min_tokens": 10**6},
    {"ignore_eos": True},
    {"stop_token_ids": [10**8]},
    {"allowed_token_ids": [10**8]},
    {"bad_words": ["x"] * 1000},
    {"logprob_token_ids": [1]},
    {"thinking_token_budget": 5},
    {"return_token_offsets": True},
    {"return_prompt_text": True},
    {"prompt_embeds": "gAAAAA=="},
    {"mm_processor_kwargs": {"z": 1}},
    {"media_io_kwargs": {"image": {"x": 1}}},
    {"lora_path": "/etc"},
    {"custom_logit_processor": "{}"},
]
"""Poison for both endpoints that engines have."""
POISON: dict[str, list[dict[str, Any]]] = {
    "/chat/completions": [
        *ANYWHERE,
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"enable_thinking": {"a": 1}}},
        {"documents": [{"title": "x"}]},
        {"logprobs": 5},
        {"top_logprobs": -1},
        {"reasoning_effort": "boundless"},
        {"tools": [{"type": "mcp", "server_url": "http://127.0.0.1:9"}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
        {"tools": [{"type": "function", "function": {"name": "f" * 2**22}}]},
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"pattern": "(a{99}){999}"}}}],
            "tool_choice": "required",
        },
        {"functions": [{"name": "f"}]},
        {"audio": {"voice": "x"}},
        {"messages": []},
        {"messages": 5},
        {"messages": [{"role": "root", "content": "x"}]},
        {"messages": [{"role": ["user"], "content": "x"}]},
        {"messages": [{"role": "user", "content": {"a": 1}}]},
        {"messages": [{"role": "user", "content": [{"type": "image_pil", "image_pil": {}}]}]},
        {"messages": [{"role": "user", "content": [{"image_url": "http://127.0.0.1:9/x"}]}]},
        *(
            {"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": "data:x;base64,eA=="}}]}]}
            for kind in (
                "audio_url",
                "video_url",
                "image_embeds",
                "audio_embeds",
                "prompt_embeds",
                "input_audio",
                "file",
            )
        ),
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 999 + "]" * 999}}]}
            ]
        },
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 3, "arguments": ""}}]}]},
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": {"a": 1}}]},
        *(
            image(url)
            for url in (
                "http://127.0.0.1:9/latest",
                "https://example.org/x.png",
                "file:///etc/passwd",
                "FILE://localhost/etc/passwd",
                "ftp://example.org/x",
                "data:image/png,raw",
                "data:application/x-npy;base64,AAAA",
                "/etc/passwd",
                {"a": 1},
            )
        ),
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://[::1]/"}]}]},
        {
            "messages": [
                {"role": "user", "content": image("data:image/png;base64,AA==")["messages"][0]["content"] * 101}
            ]
        },
    ],
    "/completions": [
        *ANYWHERE,
        {"logprobs": -1},
        {"logprobs": 10**6},
        {"logprobs": True},
        {"prompt": {"a": 1}},
        {"prompt": ["x"] * 17},
        {"prompt": ["x"] * 4, "n": 5},
        {"prompt": [1, "x"]},
        {"prompt": [-1]},
        {"prompt": [2**40]},
        {"prompt": [[1], [2**40]]},
        {"prompt": None},
    ],
    "/messages": [
        {"temperature": float("nan")},
        {"max_tokens": 10**12},
        {"top_k": "x"},
        {"stop_sequences": ["x"] * 1000},
        {"stop_sequences": 5},
        {"stream": "yes"},
        {"model": {"a": 1}},
        {"output_config": {"format": {"type": "json_schema", "schema": DEEP}}},
        {"output_format": {"type": "json_schema", "schema": {"pattern": "(a{999}){999}"}}},
        {"output_config": 3},
        {"tool_choice": 3},
        {"tools": {"a": 1}},
        {"tools": [{"name": "f", "input_schema": DEEP}]},
        {"tools": [{"name": {"a": 1}, "input_schema": {}}]},
        {"tools": [{"name": "f", "input_schema": {}, "description": ["x"]}]},
        {"system": [{"type": "text", "text": {"a": 1}}]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": 3}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": [1], "name": "f", "input": {}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "f", "input": DEEP}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": {"a": 1}}]}]},
        *(
            {"messages": [{"role": "user", "content": [{"type": kind, "source": source}]}]}
            for kind in ("image", "document")
            for source in (
                {"type": "url", "url": "http://127.0.0.1:9/latest"},
                {"type": "url", "url": "file:///etc/passwd"},
                {"type": "file", "file_id": "x", "media_type": "text/plain"},
                {"type": "base64", "media_type": "image/png,x", "data": "AAAA"},
                "x",
            )
        ),
    ],
    "/models/MODEL:generateContent": [
        {"generationConfig": {"temperature": "hot"}},
        {"contents": []},
        {"cachedContent": "cachedContents/x"},
        {"contents": "hello"},
        {"contents": [3]},
        {"contents": [{"parts": [3]}]},
        {"contents": [{"role": "system", "parts": [{"text": "x"}]}]},
        {"contents": [{"parts": [{"text": 3}]}]},
        {"contents": [{"parts": [{"inlineData": {"data": 3}}]}]},
        {"contents": [{"parts": [{"inlineData": {"mimeType": "text/html", "data": "AAAA"}}]}]},
        {"contents": [{"parts": [{"fileData": {"fileUri": "file:///etc/passwd"}}]}]},
        {"contents": [{"parts": [{"fileData": {"fileUri": "http://127.0.0.1:9/"}}]}]},
        {"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f", "args": DEEP}}]}]},
        {"contents": [{"role": "model", "parts": [{"functionCall": {"args": {}}}]}]},
        {"contents": [{"parts": [{"functionResponse": {"name": "f", "response": DEEP}}]}]},
        {"contents": [{"parts": [{"functionResponse": {"name": "f", "response": 3}}]}]},
        {"systemInstruction": 3},
        {"tools": [3]},
        {"tools": [{"functionDeclarations": [{"name": 3}]}]},
        {"tools": [{"functionDeclarations": [{"name": "f", "parameters": DEEP}]}]},
        {"tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"$ref": "#"}}]}]},
        {"toolConfig": {"functionCallingConfig": {"mode": 3}}},
        {"generationConfig": 3},
        {"generationConfig": {"candidateCount": 10**6}},
        {"generationConfig": {"maxOutputTokens": 0}},
        {"generationConfig": {"topK": 10**30}},
        {"generationConfig": {"seed": 2**64}},
        {"generationConfig": {"stopSequences": ["x"] * 1000}},
        {"generationConfig": {"responseJsonSchema": DEEP}},
        {"generationConfig": {"responseSchema": {"$ref": "#"}}},
    ],
    "/responses": [
        {"temperature": "hot"},
        {"max_output_tokens": -5},
        {"stream": 1},
        {"previous_response_id": "r"},
        {"background": True},
        {"prompt": {"id": "x"}},
        {"instructions": ["x"]},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": DEEP}}},
        {"text": {"format": 3}},
        {"text": 3},
        {"tools": [{"type": "function", "name": "f", "parameters": DEEP}]},
        {"tools": [{"type": "custom", "name": "f", "format": 3}]},
        {"tools": [TOOL["function"] | {"type": "function"}], "tool_choice": {"type": "mcp"}},
        {"input": [{"type": "x"}]},
        {"input": {"a": 1}},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:9/x"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "http://127.0.0.1:9/x"}]}]},
        {"input": [{"type": "function_call", "name": "f", "arguments": "[" * 999 + "]" * 999, "call_id": "c"}]},
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": {"a": 1}}]},
    ],
}
