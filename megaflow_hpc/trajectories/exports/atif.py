"""ATIF, Harbor's agent trajectory interchange format: one document per trajectory.

Files are called ``atif/<task>/<policy>/<sample>.json``, or ``<sample>@<round>.json`` for further rounds of a task.

A step is a message of the system, the user or the agent. Tool results are the observation of the preceding agent step.
An agent step has the data of its model call: seconds, and the sampled tokens with log-probabilities if they were
recorded. For prompts only the number of tokens is given.

The document has the main conversation. All other conversations are in its ``subagent_trajectories``. If a model call
started a conversation, the step of that call refers to it. Steps that a conversation shares with an earlier one are
marked as copied context, so each call has exactly one step. Calls without a linked message appear only in the totals.

Schema ATIF-v1.7 (RFC 0001 of Harbor); Harbor's own models take it.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.trajectories.exports.files import published_directory, safe_name
from megaflow_hpc.trajectories.reading.conversations import Conversation, main
from megaflow_hpc.trajectories.reading.sources import SequenceView
from megaflow_hpc.trajectory import Turn
from megaflow_hpc.types import round_of
from megaflow_hpc.version import __version__

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.row import Row

HELP = "ATIF, Harbor's trajectory format, one JSON document per trajectory"

SCHEMA = "ATIF-v1.7"
_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}


def write(job: ExportJob) -> list[Path]:
    """Writes the directory ``atif``, one document per trajectory."""
    directory = job.directory / "atif"
    with published_directory(directory) as temporary:
        for row in job.rows():
            folder = temporary / safe_name(row.task_id) / safe_name(row.policy)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            text = json.dumps(document(row, job.store.campaign), allow_nan=False)
            again = round_of(row.task_id, row.group_id)
            name = f"{row.sample_index}@{again}.json" if again else f"{row.sample_index}.json"
            (folder / name).write_text(text, encoding="utf-8")
    return [directory]


def document(row: Row, campaign: str) -> dict[str, Any]:
    """Returns one trajectory as an ATIF document."""
    turns, views, found = row.turns, row.sequences, row.conversations
    metrics = [_metrics(turn, views) for turn in turns]
    first = main(found, row.policy) if found else -1
    order = sorted(range(len(found)), key=lambda number: number != first)
    answers: dict[int, dict[str, Any]] = {}
    """Call → its step."""
    seen: set[int] = set()
    documents = [_document(row, found[number], f"{row.id}#{number}", metrics, answers, seen) for number in order]
    for number, started in zip(order, documents, strict=True):
        started_by = found[number].started_by
        if started_by is not None and (step := answers.get(started_by)) is not None:
            results = step.setdefault("observation", {"results": []})["results"]
            results.append({"subagent_trajectory_ref": [{"trajectory_id": started["trajectory_id"]}]})
    said = row.error or f"no conversation was recorded ({row.status})"
    root = documents[0] if documents else {"steps": _numbered([{"source": "system", "message": said}])}
    root["steps"][0]["timestamp"] = _iso(row.started_at)
    extra: dict[str, Any] = {
        "trajectory": row.id,
        "task_id": row.task_id,
        "group_id": row.group_id,
        "policy": row.policy,
        "status": row.status,
        "error_kind": row.error_kind,
        "error": row.error,
        "reward": None if math.isnan(row.reward) else row.reward,
        "rewards": row.rewards,
        "finished_at": _iso(row.finished_at),
        "campaign": campaign,
        "calls_without_a_step": sum(turn.message < 0 for turn in turns),
    }
    final = {**_final(metrics), "total_steps": len(root["steps"])}
    whole = {**_head(row), "session_id": row.id, "trajectory_id": row.id, "steps": root["steps"]}
    subagents = {"subagent_trajectories": documents[1:]} if documents[1:] else {}
    return {**whole, "final_metrics": final, "extra": extra, **subagents}


def _head(row: Row) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA,
        "agent": {"name": row.agent or "unknown", "version": __version__, "model_name": row.policy},
    }


def _document(
    row: Row,
    conversation: Conversation,
    name: str,
    metrics: list[dict[str, Any]],
    answers: dict[int, dict[str, Any]],
    seen: set[int],
) -> dict[str, Any]:
    """Returns one conversation as a document.

    Args:
        row: Its trajectory.
        conversation: The conversation.
        name: The document's ``trajectory_id``.
        metrics: Metrics of the trajectory's calls.
        answers: Call → its step. Steps of this conversation are added.
        seen: Messages that earlier documents have. Those of this document are added.
    """
    again = [node in seen for node in conversation.nodes]
    seen.update(conversation.nodes)
    steps = _steps(conversation, again, metrics, answers)
    own = [
        metrics[call] for call, known in zip(conversation.turns, again, strict=True) if call is not None and not known
    ]
    return {
        **_head(row),
        "trajectory_id": name,
        "steps": steps,
        "final_metrics": {**_final(own), "total_steps": len(steps)},
        "extra": {"policy": conversation.policy, "started_by_call": conversation.started_by},
    }


def _final(metrics: list[dict[str, Any]]) -> dict[str, int]:
    return {
        f"total_{name}": sum(item.get(name, 0) for item in metrics) for name in ("prompt_tokens", "completion_tokens")
    }


def _steps(
    conversation: Conversation, again: list[bool], metrics: list[dict[str, Any]], answers: dict[int, dict[str, Any]]
) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    told = conversation.shared > 0
    for message, call, known in zip(conversation.messages, conversation.turns, again, strict=True):
        role = str(message.get("role", "user"))
        if role in ("tool", "function"):
            _observe(steps, message)
            continue
        step: dict[str, Any] = {"source": _SOURCES.get(role, "user"), "message": _text(message.get("content"))}
        if step["source"] == "agent":
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            if reasoning:
                step["reasoning_content"] = _text(reasoning)
            tool_calls = [_tool_call(each, i) for i, each in enumerate(message.get("tool_calls") or ())]
            if tool_calls:
                step["tool_calls"] = tool_calls
            if call is not None and not known:
                answers[call] = step
                step |= {"metrics": metrics[call], "llm_call_count": 1}
        if known and told:
            step["is_copied_context"] = True
        steps.append(step)
    return _numbered(steps)


def _numbered(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, step in enumerate(steps):
        step["step_id"] = number + 1
    return steps


def _observe(steps: list[dict[str, Any]], message: Mapping[str, Any]) -> None:
    """Adds a tool's answer to the latest step of the agent that called it."""
    result: dict[str, Any] = {"content": _text(message.get("content"))}
    wanted = _text(message.get("tool_call_id"))
    owner = next(
        (s for s in reversed(steps) if any(c["tool_call_id"] == wanted for c in s.get("tool_calls", ()))), None
    )
    if owner is not None:
        result["source_call_id"] = wanted
    elif steps:
        owner = next((s for s in reversed(steps) if s["source"] == "agent"), steps[-1])
    else:
        owner = {"source": "system", "message": ""}
        steps.append(owner)
    owner.setdefault("observation", {"results": []})["results"].append(result)


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    call = call if isinstance(call, dict) else {}
    function = call.get("function") if isinstance(call.get("function"), dict) else {}
    given = function.get("arguments")
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        arguments = None
    found = {
        "tool_call_id": _text(call.get("id") or f"call_{number}"),
        "function_name": _text(function.get("name") or "unknown"),
        "arguments": _plain(arguments) if isinstance(arguments, dict) else {},
    }
    if not isinstance(arguments, dict) and given:
        found["extra"] = {"arguments": _text(given)}  # not the JSON object it should be: kept as it came
    return found


def _metrics(turn: Turn, views: list[SequenceView]) -> dict[str, Any]:
    times = {name: round(getattr(turn, name), 6) for name in ("model_s", "sandbox_s", "agent_s", "wait_s")}
    extra = {**times, "finish_reason": turn.finish_reason, "server": turn.server}
    if not 0 <= turn.sequence < len(views):
        return {"extra": extra}
    view = views[turn.sequence]
    span = slice(turn.token_start, turn.token_end)
    return {
        "prompt_tokens": turn.token_start,
        "completion_tokens": turn.token_end - turn.token_start,
        "completion_token_ids": view.tokens[span].tolist(),
        "logprobs": [float(f"{value:.9g}") if math.isfinite(value) else 0.0 for value in view.logprobs[span].tolist()],
        "extra": {**extra, "weight_versions": sorted(set(view.weight_versions[span].tolist()))},
    }


def _text(content: Any) -> str:
    """Returns any content as text that is valid Unicode."""
    if isinstance(content, list):
        parts = [part.get("text", f"({part.get('type', '?')})") if isinstance(part, dict) else part for part in content]
        content = "\n".join(str(part) for part in parts)
    return ("" if content is None else str(content)).encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> Any:
    """Returns a parsed JSON value as strict JSON in UTF-8 can hold it."""
    if isinstance(value, dict):
        return {_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _text(value) if isinstance(value, str) else value


def _iso(seconds: float) -> str | None:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat() if seconds else None
