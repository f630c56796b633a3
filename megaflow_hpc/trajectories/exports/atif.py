"""Exports to ATIF, Harbor's agent trajectory interchange format, with one document per trajectory.

Files are named ``atif/<task>/<policy>/<sample>.json``, or ``<sample>@<round>.json`` for later rounds of a task.

A step is a message from the system, the user or the agent. Tool results become the observation of the preceding agent
step. An agent step contains the metrics of its model call: the duration, the numbers of tokens and, if recorded, the
sampled tokens with their log-probabilities. For prompts, only the token count is exported.

The document contains the main conversation. All other conversations are in its ``subagent_trajectories``. The step of a
model call that started a conversation refers to that conversation. Steps shared with an earlier conversation are marked
as copied context, so each call has exactly one original step. Calls without a linked message count only towards the
totals.

Images are stored as files in ``images/``, next to the document.

Follows schema ATIF-v1.7 (Harbor's RFC 0001); the output validates against Harbor's models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.resources import __version__
from megaflow_hpc.trajectories.exports.files import published_directory, safe_name
from megaflow_hpc.trajectories.exports.messages import (
    RecordedToolCall,
    as_text,
    iso_time,
    reasoning_of,
    round_suffix,
    text_and_images,
    tool_calls,
)
from megaflow_hpc.trajectories.reading.conversations import Conversation, main_first, tokens_of_calls
from megaflow_hpc.trajectories.reading.sources import SequenceView
from megaflow_hpc.trajectory import Image, Turn

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.store import Row

HELP = "ATIF, Harbor's trajectory format, one JSON document per trajectory"

SCHEMA = "ATIF-v1.7"
IMAGES = "images"
"""Directory of the image files, next to the documents that refer to them."""
_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}


def write(job: ExportJob) -> list[Path]:
    """Writes the ``atif`` directory, one document per trajectory."""
    directory = job.directory / "atif"
    with published_directory(directory) as temporary:
        for row in job.rows():
            folder = temporary / safe_name(row.task_id) / safe_name(row.group_id.rpartition("/")[2])
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            text = json.dumps(document(row, job.store.campaign), allow_nan=False)
            (folder / f"{row.sample_index}{round_suffix(row)}.json").write_text(text, encoding="utf-8")
            write_images(folder, row)
    return [directory]


def write_images(folder: Path, row: Row) -> None:
    """Writes the images to which a document in this directory refers. Files are named by hash, so identical images are
    stored once."""
    for image in row.images.values():
        path = folder / IMAGES / image.file_name
        if not path.exists():
            path.parent.mkdir(exist_ok=True, mode=0o700)
            path.write_bytes(image.data)


def document(row: Row, campaign: str) -> dict[str, Any]:
    """Converts one trajectory to an ATIF document."""
    conversations = row.conversations
    order = main_first(conversations, row.policy)
    documents = _Documents(row)
    built = [documents.add(conversations[number], f"{row.id}#{number}") for number in order]
    for number, started in zip(order, built, strict=True):
        step = documents.step_of_call.get(conversations[number].started_by)
        if step is not None:
            results = step.setdefault("observation", {"results": []})["results"]
            results.append({"subagent_trajectory_ref": [{"trajectory_id": started["trajectory_id"]}]})
    if built:
        steps = built[0]["steps"]
    else:
        reason = row.error or f"no conversation was recorded ({row.status})"
        steps = _numbered([{"source": "system", "message": reason}])
    steps[0]["timestamp"] = _time(row.started_at)
    root: dict[str, Any] = {
        **_head(row),
        "session_id": row.id,
        "trajectory_id": row.id,
        "steps": steps,
        "final_metrics": {**_totals(documents.metrics), "total_steps": len(steps)},
        "extra": {
            "trajectory": row.id,
            "task_id": row.task_id,
            "group_id": row.group_id,
            "policy": row.policy,
            "status": row.status,
            "error_kind": row.error_kind,
            "error": row.error,
            "reward": None if math.isnan(row.reward) else row.reward,
            "rewards": row.rewards,
            "finished_at": _time(row.finished_at),
            "campaign": campaign,
            "calls_without_a_step": sum(turn.message < 0 for turn in row.turns),
        },
    }
    if built[1:]:
        root["subagent_trajectories"] = built[1:]
    return root


def _head(row: Row) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA,
        "agent": {"name": row.agent or "unknown", "version": __version__, "model_name": row.policy},
    }


def _totals(metrics: list[dict[str, Any]]) -> dict[str, int]:
    totals = {}
    for name in ("prompt_tokens", "completion_tokens"):
        totals[f"total_{name}"] = sum(item.get(name, 0) for item in metrics)
    return totals


class _Documents:
    """Converts the conversations of a trajectory to ATIF documents."""

    def __init__(self, row: Row) -> None:
        views = row.sequences
        self._row, self._images = row, row.images
        counts = tokens_of_calls(row)
        self.metrics = [_metrics(turn, views, count) for turn, count in zip(row.turns, counts, strict=True)]
        """Metrics of each model call, by call number."""
        self.step_of_call: dict[int | None, dict[str, Any]] = {}
        """Step of each model call in the documents built so far, by call number."""
        self._seen: set[int] = set()
        """Indices of messages already included in an earlier document."""

    def add(self, conversation: Conversation, name: str) -> dict[str, Any]:
        """Converts one conversation to a document.

        Args:
            conversation: The conversation.
            name: The document's ``trajectory_id``.
        """
        is_copied = [node in self._seen for node in conversation.nodes]
        self._seen.update(conversation.nodes)
        own: list[dict[str, Any]] = []
        steps: list[dict[str, Any]] = []
        for message, call, copied in zip(conversation.messages, conversation.turns, is_copied, strict=True):
            metrics = None
            if call is not None and not copied:
                metrics = self.metrics[call]
                own.append(metrics)
            role = str(message.get("role", "user"))
            if role in ("tool", "function"):
                _observe(steps, message, self._images)
                continue
            step = _step(role, message, self._images)
            if step["source"] == "agent" and metrics is not None:
                self.step_of_call[call] = step
                step |= {"metrics": metrics, "llm_call_count": 1}
            if copied and conversation.shared:
                step["is_copied_context"] = True
            steps.append(step)
        return {
            **_head(self._row),
            "trajectory_id": name,
            "steps": _numbered(steps),
            "final_metrics": {**_totals(own), "total_steps": len(steps)},
            "extra": {
                "policy": conversation.policy,
                "role": conversation.role,
                "depth": conversation.depth,
                "started_by_call": conversation.started_by,
            },
        }


def _step(role: str, message: Mapping[str, Any], images: Mapping[str, Image]) -> dict[str, Any]:
    step: dict[str, Any] = {"source": _SOURCES.get(role, "user"), "message": _content(message, images)}
    if step["source"] == "agent":
        if reasoning := reasoning_of(message):
            step["reasoning_content"] = reasoning
        if calls := tool_calls(message):
            step["tool_calls"] = [_tool_call(call) for call in calls]
    return step


def _content(message: Mapping[str, Any], images: Mapping[str, Image]) -> str | list[dict[str, Any]]:
    parts = text_and_images(message.get("content"), images)
    if not any(isinstance(part, Image) for part in parts):
        return as_text(message.get("content"))
    return [
        {"type": "image", "source": {"media_type": part.media_type, "path": f"{IMAGES}/{part.file_name}"}}
        if isinstance(part, Image)
        else {"type": "text", "text": part}
        for part in parts
    ]


def _numbered(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    return steps


def _observe(steps: list[dict[str, Any]], message: Mapping[str, Any], images: Mapping[str, Image]) -> None:
    """Adds a tool result to the step that made the call. If the call is unknown, adds it to the latest agent step."""
    result: dict[str, Any] = {"content": _content(message, images)}
    wanted = as_text(message.get("tool_call_id"))
    if not steps:
        steps.append({"source": "system", "message": ""})
    owner = next((step for step in reversed(steps) if step["source"] == "agent"), steps[-1])
    for step in steps:
        if any(call["tool_call_id"] == wanted for call in step.get("tool_calls", ())):
            owner = step
            result["source_call_id"] = wanted
    owner.setdefault("observation", {"results": []})["results"].append(result)


def _tool_call(call: RecordedToolCall) -> dict[str, Any]:
    result: dict[str, Any] = {"tool_call_id": call.id, "function_name": call.name, "arguments": call.arguments}
    if call.unparsed:
        result["extra"] = {"arguments": call.unparsed}
    return result


def _metrics(turn: Turn, views: list[SequenceView], count: tuple[int, int]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for name in ("model_s", "sandbox_s", "agent_s", "wait_s"):
        extra[name] = round(getattr(turn, name), 6)
    extra |= {"finish_reason": turn.finish_reason, "server": turn.server}
    counted = dict(zip(("prompt_tokens", "completion_tokens"), count, strict=True)) if any(count) else {}
    if not 0 <= turn.sequence < len(views):
        return {**counted, "extra": extra}
    view = views[turn.sequence]
    span = slice(turn.token_start, turn.token_end)
    logprobs = view.logprobs[span].tolist()
    extra["weight_versions"] = sorted(set(view.weight_versions[span].tolist()))
    return {
        **counted,
        "completion_token_ids": view.tokens[span].tolist(),
        "logprobs": [float(f"{value:.9g}") if math.isfinite(value) else 0.0 for value in logprobs],
        "extra": extra,
    }


def _time(seconds: float) -> str | None:
    return iso_time(seconds) if seconds else None
