"""Defines tables of the options of a model call, one for each dialect.

Each option is passed on to the engine, dropped, or refused. Options not in a table are dropped, because every version
of a client adds new ones. The engine's request is built in two steps::

    agent's request ── MESSAGES, RESPONSES: names and types ──► conversion ──► CHAT, COMPLETIONS ──► engine

So :data:`CHAT` and :data:`COMPLETIONS` list everything that an engine can receive, whichever API the agent uses. The
other tables are in their dialects' modules. An option is refused instead of dropped if dropping it would change the
meaning of the request.

The tables also state which options constrain the policy's choice of tokens (:attr:`Option.constrains`).
:func:`is_constrained` checks a request for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megaflow_hpc.model.gateway.dialects import content
from megaflow_hpc.model.gateway.dialects.base import BadRequest, Check, of, shown, typed
from megaflow_hpc.model.gateway.dialects.schemas import response_format, structured_outputs

COUNT = 2**31 - 1
MAX_ANSWERS = 16
"""Maximum number of choices per request. The whole prompt is recorded with each choice."""
MAX_PROMPTS = 16
"""Maximum number of prompts in a plain completion request."""


# --- types of options ------------------------------------------------------------------------------------------------


def integer(low: int, high: int) -> Check:
    """Returns a check for integers from ``low`` to ``high``."""
    return of(Annotated[int, Meta(ge=low, le=high)])


def number(low: float, high: float) -> Check:
    """Returns a check for numbers from ``low`` to ``high``. NaN and infinity always fail."""
    return of(Annotated[float, Meta(ge=low, le=high)])


def text(max_length: int) -> Check:
    """Returns a check for strings of at most ``max_length`` characters."""
    return of(Annotated[str, Meta(max_length=max_length)])


StopText = Annotated[str, Meta(max_length=1024)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=16)]
TokenId = Annotated[int, Meta(ge=0, le=COUNT)]
LogitBias = Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]
Prompt = str | Annotated[list[TokenId | str | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]


def logit_bias(value: Any, field: str) -> Any:
    """Accepts a map from up to 1,024 token ids to biases from -100 to 100."""
    biases = typed(value, LogitBias, field)
    for token in biases:
        if not re.fullmatch(r"[0-9]{1,9}", token):
            raise BadRequest(f"{field}: expected token ids, found {shown(token)}")
    return biases


def prompt(value: Any, field: str) -> Any:
    """Accepts a string or a list of token ids, or a list of up to :data:`MAX_PROMPTS` of either."""
    given = typed(value, Prompt, field)
    if isinstance(given, str):
        return given
    kinds = set(map(type, given))
    if int in kinds and len(kinds) > 1:
        raise BadRequest(f"{field}: expected a text or a list of token ids, found a list of both")
    if int not in kinds and len(given) > MAX_PROMPTS:
        raise BadRequest(f"{field}: {len(given)} prompts; {MAX_PROMPTS} are allowed")
    return given


class TemplateSwitches(msgspec.Struct, omit_defaults=True):
    """Chat template variables that control reasoning. The campaign sets all other variables."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    clear_thinking: bool | None = None
    thinking_budget: Annotated[int, Meta(ge=0, le=COUNT)] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None


def template_switches(value: Any, field: str) -> dict[str, Any]:
    """Accepts an object with the fields of :class:`TemplateSwitches`."""
    switches = TemplateSwitches.__struct_fields__
    for name, given in typed(value, dict[str, Any], field).items():
        if given is not None and name not in switches:
            raise BadRequest(
                f"{field}.{name:.100}: not passed on; a request may set {', '.join(switches)}, and a campaign sets "
                "other variables for all calls with model.args: {default-chat-template-kwargs: {…}}"
            )
    return dict(msgspec.to_builtins(typed(value, TemplateSwitches, field)))


# --- tables of options -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """Rule for handling one option of a request. An option with the value ``None`` counts as not set."""

    check: Check | None = None
    """Validates the value and returns the value to pass on."""
    passed: bool = True
    """True if the value is passed to the engine. Otherwise it is dropped, or only the gateway uses it."""
    refused: str = ""
    """Reason why the option is refused, with the remedy. Empty if it is allowed."""
    harmless: Any = False
    """Value that is dropped instead of refused, because clients send it by default. Empty values are dropped too."""
    constrains: str = ""
    """Condition under which the option constrains a call. The call's tokens then get loss mask 0. If empty, the option
    never constrains a call."""
    becomes: str = ""
    """Name of the chat option to which this option is converted. Empty if it keeps its name."""


def flags(names: str) -> dict[str, Option]:
    """Returns table entries for boolean options."""
    return dict.fromkeys(names.split(), FLAG)


def dropped(names: str) -> dict[str, Option]:
    """Returns table entries for options that are not passed on."""
    return dict.fromkeys(names.split(), DROPPED)


def refused(why: str, names: str) -> dict[str, Option]:
    """Returns table entries for options that are refused unless their value is empty."""
    return dict.fromkeys(names.split(), Option(refused=why))


DROPPED = Option(passed=False)
FLAG = Option(of(bool))
DIFFERS = "it differs from the policy's `sampling`"
_ENGINES = "is not passed on; set it for the whole engine by model.args of the campaign file"
_RECORDED = "is not served: the call could not be recorded"

SAMPLING: Mapping[str, Option] = {
    "model": Option(text(512)),
    "max_tokens": Option(integer(1, COUNT)),
    "n": Option(integer(1, MAX_ANSWERS)),
    "seed": Option(integer(-(2**63), 2**63 - 1)),
    "stop": Option(of(Stop)),
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
    **flags("add_special_tokens skip_special_tokens spaces_between_special_tokens include_stop_str_in_output"),
    **flags("return_token_ids return_tokens_as_token_ids"),
    "stream": Option(of(bool), passed=False),
    "stream_options": Option(of(dict[str, Any]), passed=False),
    # Sent by clients, but without effect here.
    **dropped("user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention"),
    **dropped("request_id session_id include_reasoning stream_interval length_penalty truncation_side"),
    # With these options, the recorder cannot distinguish sampled tokens from others.
    **refused(_RECORDED, "echo suffix use_beam_search prompt_logprobs logprob_token_ids truncate_prompt_tokens"),
    **refused(_RECORDED, "prompt_embeds return_prompt_text return_token_offsets routed_experts_prompt_start"),
    "best_of": Option(refused=f"{_RECORDED}; give n", harmless=1),
    # These options affect the engine's other calls, name files, hosts or code on its node, or need unbounded
    # computation.
    **refused(_ENGINES, "kv_transfer_params ec_transfer_params vllm_xargs priority cache_salt mm_processor_kwargs"),
    **refused(_ENGINES, "media_io_kwargs mm_payload return_mm_kwargs watermarking repetition_detection"),
    **refused(_ENGINES, "min_tokens ignore_eos stop_token_ids allowed_token_ids bad_words thinking_token_budget"),
    **refused(_ENGINES, "lora_path custom_logit_processor custom_params session_params return_hidden_states"),
    **refused(
        "is not served; give response_format, or structured_outputs with json or choice",
        "guided_json guided_regex guided_choice guided_grammar regex ebnf json_schema structural_tag",
    ),
}

CHAT: Mapping[str, Option] = {
    **SAMPLING,
    "messages": Option(content.messages),
    "tools": Option(content.tools, constrains="a function is `strict`, and tool_choice is not none"),
    "tool_choice": Option(content.tool_choice, constrains="it is required, or names a function"),
    "parallel_tool_calls": FLAG,
    "max_completion_tokens": Option(integer(1, COUNT)),
    "logprobs": FLAG,
    "top_logprobs": Option(integer(0, 20)),
    "reasoning_effort": Option(of(Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"])),
    "chat_template_kwargs": Option(template_switches),
    **flags("add_generation_prompt continue_final_message"),
    **dropped("modalities prediction verbosity web_search_options"),
    **refused(_ENGINES, "chat_template documents"),
    **refused("is not served; give tools and tool_choice", "functions function_call"),
    **refused("is not served; ask for text", "audio"),
}
"""Options of ``/v1/chat/completions``. Requests in the other chat APIs are converted to these options."""

COMPLETIONS: Mapping[str, Option] = {
    **SAMPLING,
    "prompt": Option(prompt),
    "logprobs": Option(integer(0, 20)),
}
"""Options of ``/v1/completions``."""

CONVERTED: Mapping[str, Option] = {
    **{name: SAMPLING[name] for name in ("model", "temperature", "top_p", "top_k")},
    "stream": FLAG,
    # vLLM extensions that the APIs themselves do not define.
    **dropped("kv_transfer_params ec_transfer_params cache_salt mm_payload return_mm_kwargs watermarking"),
    **dropped("vllm_xargs priority media_io_kwargs mm_processor_kwargs chat_template_kwargs"),
}
"""Options shared by the messages and responses APIs."""


def allowed(table: Mapping[str, Option], body: Mapping[str, Any]) -> dict[str, Any]:
    """Validates the options of a request and returns those to pass on.

    Raises:
        BadRequest: An option is refused, or its value is not allowed.
    """
    passed: dict[str, Any] = {}
    for name, value in body.items():
        option = table.get(name)
        if option is None or value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON does not distinguish 5.0 from 5
        if option.refused:
            if value and value != option.harmless:
                raise BadRequest(f"{name}: {option.refused}")
        elif option.check is not None:
            value = option.check(value, name)
            if option.passed:
                passed[name] = value
    return passed


def engine_request(request: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """Returns the validated request for the engine, with only the options that the tables pass on.

    Args:
        request: The request that the dialect built.
        chat: True for a chat request, false for a plain completion.

    Raises:
        BadRequest: An option is refused or missing, or its value is not allowed.
    """
    passed = allowed(CHAT if chat else COMPLETIONS, request)
    required, kind = ("messages", "a list of at least one message") if chat else ("prompt", "a text")
    if required not in passed:
        raise BadRequest(f"{required}: expected {kind}, found nothing")
    if not passed.get("tools", True):
        del passed["tools"]  # engines reject an empty list
    if chat:
        content.compiled_tools(passed)
    elif isinstance(passed["prompt"], list) and not isinstance(passed["prompt"][0], int):
        answers = len(passed["prompt"]) * passed.get("n", 1)
        if answers > MAX_ANSWERS:
            raise BadRequest(f"n: {answers} answers for all prompts; {MAX_ANSWERS} are allowed")
    return passed


def is_constrained(request: Mapping[str, Any], settings: Mapping[str, float]) -> bool:
    """Returns whether an option of an engine's request constrains the policy's choice of tokens.

    Args:
        request: The result of :func:`engine_request`.
        settings: The policy's sampling settings.
    """
    for name, value in request.items():
        if name in settings:
            is_off = name == "top_k" and value in (0, -1)
            if (-1 if is_off else value) != settings[name]:
                return True
        elif name == "tools" and request.get("tool_choice") == "none":
            continue  # the model sees the tools, but the engine does not enforce their schemas
        elif name in CONSTRAINING and CONSTRAINING[name](value):
            return True
    return False


CONSTRAINING: Mapping[str, Callable[[Any], bool]] = {
    "logit_bias": bool,
    "response_format": lambda value: value["type"] != "text",
    "structured_outputs": lambda value: True,
    "tool_choice": lambda value: value not in ("none", "auto"),
    "tools": lambda value: any(tool["function"].get("strict") for tool in value),
}
"""Test for each option that can constrain tokens, other than sampling settings. It takes the validated value."""
