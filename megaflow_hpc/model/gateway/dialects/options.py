"""Tables of the options of a model call, one per dialect.

An option is passed on to the engine, dropped, or refused. Options that no table lists are dropped: each version of a
client adds new ones. The engine's request is made in two steps::

    agent's request ── MESSAGES, RESPONSES: names and types ──► conversion ──► CHAT, COMPLETIONS ──► engine

So :data:`CHAT` and :data:`COMPLETIONS` list everything that an engine can get, for every API. An option is refused
instead of dropped if the agent would otherwise get an answer to a different question.

The tables also say which options constrain the policy's choice of tokens (:attr:`Option.constrains`).
:func:`constraints` finds them in a request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megaflow_hpc.model.gateway.dialects import content
from megaflow_hpc.model.gateway.dialects.base import BadRequest, expect_list, expect_object, expect_text
from megaflow_hpc.model.gateway.dialects.checks import (
    Check,
    flag,
    integer,
    logit_bias,
    number,
    one_of,
    prompt,
    response_format,
    structured_outputs,
    text,
    texts,
    thinking,
)

COUNT = 2**31 - 1
ALTERNATIVES = 16
"""Answers to one request: each is recorded with the whole prompt."""


@dataclass(frozen=True)
class Option:
    """What becomes of one option. ``None`` as its value counts as not given."""

    check: Check | None = None
    """Checks the value and returns what is passed on."""
    passed: bool = True
    """Whether the value goes on; else it is the gateway's own, or nobody's."""
    refused: str = ""
    """Why a value is refused, with the remedy."""
    harmless: Any = False
    """The value that is left out instead, as is every empty one: clients send defaults."""
    constrains: str = ""
    """Condition under which the option constrains a call, so that its tokens get loss mask 0; empty: never."""
    becomes: str = ""
    """Name of the chat option that it is converted to, if that differs."""


def _all(option: Option, names: str) -> dict[str, Option]:
    return dict.fromkeys(names.split(), option)


def _refused(why: str, names: str, harmless: Any = False) -> dict[str, Option]:
    return _all(Option(refused=why, harmless=harmless), names)


DROPPED = Option(passed=False)
_FLAG = Option(flag)
DIFFERS = "it differs from the policy's `sampling`"
_ENGINES = "is not passed on; set it for the whole engine by model.args of the campaign file"
_RECORDED = "is not served: the call could not be recorded"

_SAMPLING: Mapping[str, Option] = {
    "model": Option(text(512)),
    "max_tokens": Option(integer(1, COUNT)),
    "n": Option(integer(1, ALTERNATIVES)),
    "seed": Option(integer(-(2**63), 2**63 - 1)),
    "stop": Option(texts(16, 1024)),
    "temperature": Option(number(0, 2), constrains=DIFFERS),
    "top_p": Option(number(0, 1), constrains=DIFFERS),
    "top_k": Option(integer(-1, COUNT), constrains=DIFFERS),
    "min_p": Option(number(0, 1), constrains=DIFFERS),
    "frequency_penalty": Option(number(-2, 2), constrains=DIFFERS),
    "presence_penalty": Option(number(-2, 2), constrains=DIFFERS),
    "repetition_penalty": Option(number(0.01, 100), constrains=DIFFERS),
    "logit_bias": Option(logit_bias, constrains="it names a token"),
    "response_format": Option(response_format, constrains="its type is not text"),
    "structured_outputs": Option(structured_outputs, constrains="always"),
    **_all(_FLAG, "add_special_tokens skip_special_tokens spaces_between_special_tokens include_stop_str_in_output"),
    **_all(_FLAG, "return_token_ids return_tokens_as_token_ids"),
    "stream": Option(flag, passed=False),
    "stream_options": Option(expect_object, passed=False),
    # Clients send these, but they have no effect here.
    **_all(DROPPED, "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention"),
    **_all(DROPPED, "request_id session_id include_reasoning stream_interval length_penalty truncation_side"),
    # With these, the recorder cannot tell sampled tokens from others.
    **_refused(_RECORDED, "echo suffix use_beam_search prompt_logprobs logprob_token_ids truncate_prompt_tokens"),
    **_refused(_RECORDED, "prompt_embeds return_prompt_text return_token_offsets routed_experts_prompt_start"),
    "best_of": Option(refused=f"{_RECORDED}; give n", harmless=1),
    # These change the engine for other calls, name its files, hosts or code, or need unbounded computation.
    **_refused(_ENGINES, "kv_transfer_params ec_transfer_params vllm_xargs priority cache_salt mm_processor_kwargs"),
    **_refused(_ENGINES, "media_io_kwargs mm_payload return_mm_kwargs watermarking repetition_detection"),
    **_refused(_ENGINES, "min_tokens ignore_eos stop_token_ids allowed_token_ids bad_words thinking_token_budget"),
    **_refused(_ENGINES, "lora_path custom_logit_processor custom_params session_params return_hidden_states"),
    **_refused(
        "is not served; give response_format, or structured_outputs with json or choice",
        "guided_json guided_regex guided_choice guided_grammar regex ebnf json_schema structural_tag",
    ),
}

CHAT: Mapping[str, Option] = {
    **_SAMPLING,
    "messages": Option(content.messages),
    "tools": Option(content.tools, constrains="a function is `strict`, and tool_choice is not none"),
    "tool_choice": Option(content.tool_choice, constrains="it is required, or names a function"),
    "parallel_tool_calls": _FLAG,
    "max_completion_tokens": Option(integer(1, COUNT)),
    "logprobs": _FLAG,
    "top_logprobs": Option(integer(0, 20)),
    "reasoning_effort": Option(one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    "chat_template_kwargs": Option(thinking),
    **_all(_FLAG, "add_generation_prompt continue_final_message"),
    **_all(DROPPED, "modalities prediction verbosity web_search_options"),
    **_refused(_ENGINES, "chat_template documents"),
    **_refused("is not served; give tools and tool_choice", "functions function_call"),
    **_refused("is not served; ask for text", "audio"),
}
"""``/v1/chat/completions``. The messages and responses APIs are converted to it."""

COMPLETIONS: Mapping[str, Option] = {
    **_SAMPLING,
    "prompt": Option(prompt),
    "logprobs": Option(integer(0, 20)),
}
"""``/v1/completions``."""

_CONVERTED: Mapping[str, Option] = {
    **{name: _SAMPLING[name] for name in ("model", "temperature", "top_p", "top_k")},
    "stream": _FLAG,
    "tools": Option(expect_list, becomes="tools"),
    # vLLM's own, which the APIs themselves do not have.
    **_all(DROPPED, "kv_transfer_params ec_transfer_params cache_salt mm_payload return_mm_kwargs watermarking"),
    **_all(DROPPED, "vllm_xargs priority media_io_kwargs mm_processor_kwargs chat_template_kwargs"),
}

MESSAGES: Mapping[str, Option] = {
    **_CONVERTED,
    "max_tokens": Option(integer(1, COUNT)),
    "messages": Option(expect_list),
    "system": Option(lambda value, field: value if isinstance(value, str) else expect_list(value, field)),
    "stop_sequences": Option(texts(16, 1024), becomes="stop"),
    "tool_choice": Option(expect_object, becomes="tool_choice"),
    **_all(Option(expect_object, becomes="response_format"), "output_config output_format"),
    **_all(DROPPED, "metadata service_tier thinking context_management cache_control betas speed inference_geo"),
    # Tools that run at Anthropic are not offered to the model.
    **_all(DROPPED, "container mcp_servers"),
}
"""``/v1/messages`` and ``/v1/messages/count_tokens``. The campaign decides how a model thinks."""

RESPONSES_SAMPLING = (
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "logit_bias"),
    "structured_outputs",
)
"""Options of a chat request that vLLM's responses API also has."""

RESPONSES: Mapping[str, Option] = {
    **_CONVERTED,
    "input": Option(lambda value, field: value if isinstance(value, str) else expect_list(value, field)),
    "instructions": Option(expect_text),
    "max_output_tokens": Option(integer(1, COUNT), becomes="max_tokens"),
    "text": Option(expect_object, becomes="response_format"),
    "tool_choice": Option(lambda value, field: value, becomes="tool_choice"),
    "parallel_tool_calls": _FLAG,
    **{name: _SAMPLING[name] for name in RESPONSES_SAMPLING},
    **_all(DROPPED, "include_reasoning request_id session_id skip_special_tokens include_stop_str_in_output"),
    **_all(DROPPED, "reasoning include store metadata service_tier truncation user safety_identifier client_metadata"),
    **_all(DROPPED, "prompt_cache_key prompt_cache_retention stream_options max_tool_calls top_logprobs"),
    **_all(DROPPED, "context_management enable_response_messages ignore_eos stop_token_ids"),
    **_refused(
        "nothing is kept between requests here; send the whole conversation as input",
        "previous_response_id conversation background prompt previous_input_messages",
    ),
}
"""``/v1/responses``."""


def allowed(table: Mapping[str, Option], body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a request that are passed on, checked.

    Raises:
        BadRequest: One is refused, or has a value that is not allowed.
    """
    found: dict[str, Any] = {}
    for name, value in body.items():
        option = table.get(name)
        if option is None or value is None:
            continue
        if option.refused:
            if value and value != option.harmless:
                raise BadRequest(f"{name}: {option.refused}")
        elif option.check is not None:
            value = option.check(value, name)
            if option.passed:
                found[name] = value
    return found


def engine_request(request: Mapping[str, Any], chat: bool, domains: Collection[str] = ()) -> dict[str, Any]:
    """Returns the checked request for the engine: only options that the tables pass on.

    Args:
        request: The request that the dialect built.
        chat: True for a chat request, false for a completion.
        domains: Hosts from which the engine may fetch images.

    Raises:
        BadRequest: An option is refused or missing, or has a value that is not allowed.
    """
    table = CHAT if chat else COMPLETIONS
    if chat and domains:
        table = {**CHAT, "messages": Option(partial(content.messages, domains=domains))}
    found = allowed(table, request)
    needed = "messages" if chat else "prompt"
    if needed not in found:
        raise BadRequest(f"{needed}: expected {'a list of at least one message' if chat else 'a text'}, found nothing")
    if not found.get("tools", True):
        del found["tools"]  # engines refuse an empty list
    if chat:
        content.compiled_tools(found)
    elif isinstance(found["prompt"], list) and not isinstance(found["prompt"][0], int):
        answers = len(found["prompt"]) * found.get("n", 1)
        if answers > ALTERNATIVES:
            raise BadRequest(f"n: {answers} answers for all prompts; {ALTERNATIVES} are allowed")
    return found


Constraint = tuple[str, Any, str]
"""An option, its value, and the value that a free call has instead."""


def constraints(request: Mapping[str, Any], settings: Mapping[str, float]) -> list[Constraint]:
    """Returns the options of an engine's request that constrain the policy's choice of tokens.

    Args:
        request: The result of :func:`engine_request`.
        settings: The policy's sampling settings.
    """
    found: list[Constraint] = []
    for name, value in request.items():
        if name in settings:
            off = name == "top_k" and value in (0, -1)
            if (-1 if off else value) != settings[name]:
                found.append((name, value, f"{settings[name]:g}"))
        elif name in CAUSES and CAUSES[name](value):
            found.append((name, value, "none"))
    if request.get("tool_choice") == "none":  # the model sees the tools, but the engine enforces none
        found = [constraint for constraint in found if constraint[0] != "tools"]
    return found


CAUSES: Mapping[str, Callable[[Any], bool]] = {
    "logit_bias": bool,
    "response_format": lambda value: value["type"] != "text",
    "structured_outputs": lambda value: True,
    "tool_choice": lambda value: value not in ("none", "auto"),
    "tools": lambda value: any(tool["function"].get("strict") for tool in value),
}
"""Option other than a sampling setting → test whether a checked value constrains the tokens."""
