"""Exports to Inspect logs, which ``inspect view`` opens, with one log per policy.

Files are named ``inspect/POLICY.eval``, or ``inspect/POLICY+AGENT.eval`` if a policy has several agents. Each rollout
becomes an Inspect sample, with the task id as its id and the sample number, counted from 1, as its epoch. The sample's
messages and events come from the main conversation; other conversations are stored in its metadata. Each reward becomes
a score of the same name.

Images are embedded in messages as ``data:`` URLs.

Follows version 2 of the log schema (Inspect 0.3): a ZIP file with a JSON document per sample, a list of sample
summaries, and a header.
"""

from __future__ import annotations

import json
import math
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megaflow_hpc.resources import __version__
from megaflow_hpc.trajectories.exports.files import published_directory, safe_name
from megaflow_hpc.trajectories.exports.messages import (
    as_json,
    as_text,
    finite_rewards,
    iso_time,
    reasoning_of,
    round_suffix,
    text_and_images,
    tool_calls,
)
from megaflow_hpc.trajectories.reading.conversations import Conversation, main_first, tokens_of_calls
from megaflow_hpc.trajectory import Image

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.store import Row

HELP = "Inspect logs (.eval), for inspect view"

LOG_VERSION = 2
MAX_SUMMARY_CHARS = 2000
"""Maximum number of characters of a sample's input in its summary."""
_STOPS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls", "content_filter": "content_filter"}


def write(job: ExportJob) -> list[Path]:
    """Writes the ``inspect`` directory, one log per policy."""
    directory = job.directory / "inspect"
    store = job.store
    pairs = set(zip(store.column("policy").tolist(), store.column("agent").tolist(), strict=True))
    policies = [policy for policy, _ in pairs]
    with published_directory(directory) as temporary, ExitStack() as stack:
        logs: dict[tuple[str, str], _Log] = {}
        for row in job.rows():
            pair = (row.policy, row.agent)
            if pair not in logs:
                several = policies.count(row.policy) > 1
                name = f"{row.policy}+{row.agent.rpartition(':')[2]}" if several else row.policy
                path = temporary / f"{safe_name(name)[:200]}.eval"
                if path.exists():  # the names of two policies differ only in unsafe characters
                    path = path.with_name(f"{path.stem[:180]}-{len(logs)}.eval")
                logs[pair] = _Log(path, row, store.campaign or "campaign")
                stack.callback(logs[pair].abandon)
            logs[pair].add(row)
        for log in logs.values():
            log.finish()
    return [directory]


class _Log:
    """Writes one log. Collects the summaries in a file, because there may be a million."""

    def __init__(self, path: Path, row: Row, campaign: str) -> None:
        self._zip = zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED, compresslevel=5)
        self._spool_path = path.with_suffix(".summaries")
        self._spool: IO[str] = self._spool_path.open("x", encoding="utf-8")
        self._sums: dict[str, list[float]] = {}
        self._count = self._errors = self._epochs = 0
        self._tasks: set[str] = set()
        self._tokens = [0, 0]
        self._times = [math.inf, 0.0]
        self._campaign, self._policy, self._agent = as_text(campaign), as_text(row.policy), as_text(row.agent)

    def add(self, row: Row) -> None:
        sample = _sample(row)
        self._put(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
        self._spool.write("," if self._count else "[")
        self._spool.write(_encode(_summary(sample)))
        self._count += 1
        self._tasks.add(sample["id"])
        self._errors += "error" in sample
        self._epochs = max(self._epochs, sample["epoch"])
        self._times = [min(self._times[0], row.started_at), max(self._times[1], row.finished_at)]
        for name, score in sample["scores"].items():
            sums = self._sums.setdefault(name, [0.0, 0.0, 0.0])
            for place, value in enumerate((1.0, score["value"], score["value"] ** 2)):
                sums[place] += value
        usage = sample["output"].get("usage") or {}
        self._tokens[0] += usage.get("input_tokens", 0)
        self._tokens[1] += usage.get("output_tokens", 0)

    def finish(self) -> None:
        self._spool.write("]")
        self._spool.close()
        self._zip.write(self._spool_path, "summaries.json")
        began, ended = (iso_time(at) for at in self._times)
        spec = self._spec(began)
        self._put("_journal/start.json", {"version": LOG_VERSION, "eval": spec, "plan": _PLAN})
        header = {
            "version": LOG_VERSION,
            "status": "success",
            "eval": spec,
            "plan": _PLAN,
            "results": {
                "total_samples": self._count,
                "completed_samples": self._count - self._errors,
                "scores": [_metrics(name, *sums) for name, sums in sorted(self._sums.items())],
            },
            "stats": {
                "started_at": began,
                "completed_at": ended,
                "model_usage": {self._policy: _usage(*self._tokens)},
            },
        }
        self._put("header.json", header)
        self._zip.close()
        self._spool_path.unlink()

    def abandon(self) -> None:
        """Closes the files. Does nothing after :meth:`finish`."""
        self._spool.close()
        self._zip.close()

    def _spec(self, created: str) -> dict[str, Any]:
        name = f"{self._campaign}/{self._policy}/{self._agent}"
        return {
            "eval_id": _short_id(f"{name}/eval"),
            "run_id": _short_id(f"{name}/run"),
            "created": created,
            "task": self._campaign,
            "task_id": _short_id(f"{name}/task"),
            "solver": self._agent or None,
            "dataset": {"name": self._campaign, "samples": len(self._tasks)},
            "scorers": [
                {"name": name, "metrics": [{"name": "mean"}, {"name": "stderr"}]} for name in sorted(self._sums)
            ],
            "model": self._policy,
            "config": {"epochs": self._epochs},
            "packages": {"megaflow_hpc": __version__},
        }

    def _put(self, name: str, value: Any) -> None:
        self._zip.writestr(name, _encode(value))


_PLAN: dict[str, Any] = {"name": "plan", "steps": [], "config": {}}


def _encode(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _short_id(name: str) -> str:
    return uuid.uuid5(uuid.NAMESPACE_URL, f"megaflow-hpc/{name}").hex[:22]


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    return {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}


def _metrics(name: str, count: float, total: float, squares: float) -> dict[str, Any]:
    mean = total / count
    variance = max(0.0, squares / count - mean**2) * count / max(1.0, count - 1)
    values = {"mean": mean, "stderr": math.sqrt(variance / count)}
    return {
        "name": name,
        "scorer": name,
        "scored_samples": int(count),
        "metrics": {metric: {"name": metric, "value": value} for metric, value in values.items()},
    }


def _sample(row: Row) -> dict[str, Any]:
    conversations = row.conversations
    talks = [conversations[number] for number in main_first(conversations, row.policy)]
    images = row.images
    messages = _messages(talks[0], images) if talks else []
    answers = [message for message in messages if message["role"] == "assistant"]
    turns = row.turns
    counts = tokens_of_calls(row)
    usage = _usage(sum(prompt for prompt, _ in counts), sum(sampled for _, sampled in counts))
    output: dict[str, Any] = {"model": as_text(row.policy), "usage": usage}
    if answers:
        stop = _STOPS.get(turns[-1].finish_reason, "unknown") if turns else "unknown"
        output["choices"] = [{"message": answers[-1], "stop_reason": stop}]
        content = answers[-1]["content"]
        output["completion"] = content if isinstance(content, str) else content[-1]["text"]
    began = next((place for place, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    seconds = max(0.0, row.finished_at - row.started_at)
    sample: dict[str, Any] = {
        "id": as_text(row.task_id) + round_suffix(row),
        "epoch": row.sample_index + 1,
        "input": messages[:began] or as_text(row.task_id),
        "target": "",
        "messages": messages,
        "output": output,
        "scores": {name: {"value": value} for name, value in finite_rewards(row).items()},
        "metadata": {
            "rollout": as_text(row.id),
            "status": row.status,
            "node": as_text(row.node),
            "other_conversations": [
                {"policy": as_text(talk.policy), "role": as_text(talk.role), "messages": _messages(talk, images)}
                for talk in talks[1:]
            ],
        },
        "model_usage": {as_text(row.policy): usage},
        "started_at": iso_time(row.started_at),
        "completed_at": iso_time(row.finished_at),
        "total_time": seconds,
        "working_time": seconds,
        "uuid": _short_id(row.id),
        "turn_count": len(turns),
    }
    if talks:
        sample["events"] = list(_events(row, talks[0], messages, counts))
        sample["events_data"] = {"messages": messages, "calls": []}
    if row.error_kind or row.error:
        text = as_text(f"{row.error_kind}: {row.error}" if row.error_kind else row.error)
        sample["error"] = {"message": text, "traceback": text, "traceback_ansi": text}
    return sample


def _events(
    row: Row, talk: Conversation, messages: list[dict[str, Any]], counts: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yields an event for each model call of a conversation. Each event refers to its input by message indices.

    Args:
        counts: Numbers of prompt and sampled tokens of each call.
    """
    turns = row.turns
    seconds = 0.0
    for place, call in enumerate(talk.turns):
        if call is None:
            continue
        turn = turns[call]
        stop = _STOPS.get(turn.finish_reason, "unknown")
        yield {
            "event": "model",
            "uuid": _short_id(f"{row.id}/{call}"),
            "timestamp": iso_time(row.started_at + seconds),
            "working_start": seconds,
            "model": as_text(talk.policy),
            "input": [],
            "input_refs": [[0, place]],
            "tools": [],
            "tool_choice": "auto",
            "config": {},
            "output": {
                "model": as_text(talk.policy),
                "choices": [{"message": messages[place], "stop_reason": stop}],
                "usage": _usage(*counts[call]),
                "time": turn.model_s,
            },
        }
        seconds += turn.model_s + turn.sandbox_s + turn.agent_s + turn.wait_s


def _messages(talk: Conversation, images: Mapping[str, Image]) -> list[dict[str, Any]]:
    return [_message(message, talk.policy, images) for message in talk.messages]


def _message(message: Mapping[str, Any], policy: str, images: Mapping[str, Image]) -> dict[str, Any]:
    role = str(message.get("role", "user"))
    parts = text_and_images(message.get("content"), images)
    text: Any = as_text(message.get("content"))
    if role != "assistant" and any(isinstance(part, Image) for part in parts):
        text = [
            {"type": "image", "image": part.url} if isinstance(part, Image) else {"type": "text", "text": part}
            for part in parts
        ]
    if role in ("system", "developer"):
        return {"role": "system", "content": text}
    if role in ("tool", "function"):
        result = {"role": "tool", "content": text, "tool_call_id": as_text(message.get("tool_call_id"))}
        return {**result, "function": as_text(message.get("name"))} if message.get("name") else result
    if role != "assistant":
        return {"role": "user", "content": text}
    answer: dict[str, Any] = {"role": "assistant", "source": "generate", "model": as_text(policy), "content": text}
    if reasoning := reasoning_of(message):
        answer["content"] = [{"type": "reasoning", "reasoning": reasoning}, {"type": "text", "text": text}]
    if calls := tool_calls(message):
        answer["tool_calls"] = [
            {
                "id": call.id,
                "function": call.name,
                "arguments": call.arguments,
                "type": "function",
                **({"parse_error": f"not a JSON object: {call.unparsed}"} if call.unparsed else {}),
            }
            for call in calls
        ]
    return answer


def _summary(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sample's entry in the list of summaries."""
    asked = sample["input"]
    if not isinstance(asked, str):
        asked = next((message["content"] for message in reversed(asked) if message["role"] == "user"), "")
        if isinstance(asked, list):
            asked = "\n".join(part.get("text", "[image]") for part in asked)
    kept = ("id", "epoch", "target", "scores", "model_usage", "started_at", "completed_at", "total_time")
    summary = {name: sample[name] for name in (*kept, "working_time", "uuid", "turn_count")}
    summary |= {"input": asked[:MAX_SUMMARY_CHARS], "completed": True, "message_count": len(sample["messages"])}
    summary["metadata"] = as_json({name: sample["metadata"][name] for name in ("rollout", "status")})
    if "error" in sample:
        summary["error"] = sample["error"]["message"]
    return summary
