"""Exports agent traces for the trace viewer of the Hugging Face Hub.

::

    traces/README.md                       dataset card with the tags that enable the viewer
    traces/TASK__POLICY__SAMPLE.jsonl      the main conversation
    traces/TASK__POLICY__SAMPLE.1.jsonl    another conversation of the rollout, such as a sub-agent's

Follows the Session Trace Simple Format (https://huggingface.co/docs/hub/session-traces-format): one line for the
session, then one line per message. The format does not support images, so each is replaced by its label. Review the
directory before you upload it to a dataset or a bucket: traces contain everything that the agents saw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.trajectories.exports.files import published_directory
from megaflow_hpc.trajectories.exports.harbor import trial_name
from megaflow_hpc.trajectories.exports.messages import as_text, reasoning_of, tool_calls
from megaflow_hpc.trajectories.reading.conversations import Conversation, main_first

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.store import Row

HELP = "traces for the Hugging Face Hub's trace viewer, one JSON Lines file per conversation"

CARD = """\
---
pretty_name: {name}
tags:
  - agent-traces
  - format:agent-traces
configs:
  - config_name: default
    data_files:
      - split: train
        path: "*.jsonl"
---

# {name}

{count} rollouts of a campaign of megaflow_hpc, one file per conversation.
"""
_ROLES = {"developer": "system", "function": "tool"}
_KNOWN = ("user", "assistant", "system", "tool")


def write(job: ExportJob) -> list[Path]:
    """Writes the ``traces`` directory."""
    directory = job.directory / "traces"
    campaign = job.store.campaign or "campaign"
    with published_directory(directory) as temporary:
        for row in job.rows():
            conversations = row.conversations
            order = main_first(conversations, row.policy)
            for place, talk in enumerate([conversations[number] for number in order] or [None]):
                suffix = f".{place}" if place else ""
                lines = (json.dumps(line, ensure_ascii=False, allow_nan=False) for line in _lines(row, talk, suffix))
                path = temporary / f"{trial_name(row)}{suffix}.jsonl"
                path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        name = json.dumps(as_text(campaign), ensure_ascii=False)
        card = CARD.format(name=name, count=len(job.numbers)).replace(f"# {name}", f"# {as_text(campaign)}")
        (temporary / "README.md").write_text(card, encoding="utf-8")
    return [directory]


def _lines(row: Row, talk: Conversation | None, suffix: str) -> Iterator[dict[str, Any]]:
    yield {
        "type": "session",
        "harness": as_text(row.agent or "unknown"),
        "id": as_text(row.id) + suffix,
        "name": as_text(row.id) + suffix,
        "task": as_text(row.task_id),
        "policy": as_text(talk.policy if talk else row.policy),
        "status": row.status,
        "reward": row.reward if math.isfinite(row.reward) else None,
        "error": as_text(row.error),
    }
    if talk is None:
        return
    labels = row.image_labels
    for message in talk.messages:
        role = str(message.get("role", "user"))
        role = _ROLES.get(role, role)
        line: dict[str, Any] = {
            "role": role if role in _KNOWN else "user",
            "content": as_text(message.get("content"), labels),
        }
        if role == "assistant":
            line["model"] = as_text(talk.policy)
            if reasoning := reasoning_of(message):
                line["reasoningContent"] = reasoning
            if calls := tool_calls(message):
                line["toolCalls"] = [
                    {
                        "id": call.id,
                        "function": {"name": call.name, "arguments": call.unparsed or json.dumps(call.arguments)},
                    }
                    for call in calls
                ]
        if role == "tool" and message.get("tool_call_id"):
            line["toolCallId"] = as_text(message["tool_call_id"])
        yield {"type": "message", "message": line}
