"""Scripted answers: the file format of scripts, and the choice of an answer for a conversation.

A script is YAML or JSON::

    tasks:
      - when: "text of the task"         # a substring of the conversation, or pattern: a regular expression
        answers:                         # answer n (from 0) follows n assistant messages; the last repeats
          - "THOUGHT: … ```mswea_bash_command …```"
          - {file: fix.txt}              # text from a file, relative to the script
          - {text: "…", delay_s: 2.0}    # seconds before answering
          - {status: 500}                # this answer is an HTTP error
          - {tool: bash, arguments: {command: ls}, text: "I look.", reasoning: "Where am I?"}
          - {tools: [{tool: bash, arguments: {}}, {tool: read, arguments: {}}]}
    default: ["…"]                       # if no task matches

A task whose answers call a tool matches only conversations that offer this tool. So auxiliary requests that agents
make, such as for a title or a summary, get the default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megaflow_hpc.errors import ConfigError

DEFAULT = "ready"
_KEYS = {"text", "file", "reasoning", "delay_s", "status", "tool", "arguments", "tools"}


@dataclass(frozen=True)
class ToolCall:
    """A call to one of the conversation's tools."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ScriptedAnswer:
    """One scripted answer, sent after ``delay_s`` seconds. It is an HTTP error unless ``status`` is 200."""

    text: str = ""
    delay_s: float = 0.0
    status: int = 200
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class ScriptedTask:
    """Answers to conversations that match ``pattern``. The last answer repeats."""

    pattern: re.Pattern[str]
    answers: tuple[ScriptedAnswer, ...]

    @property
    def tools(self) -> set[str]:
        """Names of the tools that the answers call."""
        return {call.name for answer in self.answers for call in answer.calls}


@dataclass(frozen=True)
class Script:
    """Scripted answers by task. ``default`` applies if no task matches."""

    tasks: tuple[ScriptedTask, ...] = ()
    default: tuple[ScriptedAnswer, ...] = (ScriptedAnswer(DEFAULT),)

    def answer(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[str] = ()) -> ScriptedAnswer:
        """Returns the next answer in a conversation that offers these tools."""
        conversation = "\n".join(text_of(m) for m in messages)
        turn = sum(m.get("role") == "assistant" for m in messages)
        for task in self.tasks:
            if task.tools <= set(tools) and task.pattern.search(conversation):
                return task.answers[min(turn, len(task.answers) - 1)]
        return self.default[min(turn, len(self.default) - 1)]


def load(path: Path) -> Script:
    """Loads a script.

    Raises:
        ConfigError: The file cannot be read or is invalid. The message names the entry.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: the script of answers cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML or JSON: {error}") from error
    if not isinstance(data, dict) or set(data) - {"tasks", "default"}:
        raise ConfigError(f"{path}: expected only the keys tasks and default")
    tasks = []
    for number, entry in enumerate(data.get("tasks") or ()):
        where = f"{path}: tasks[{number}]"
        if not isinstance(entry, dict) or ("when" in entry) == ("pattern" in entry) or not entry.get("answers"):
            raise ConfigError(f"{where}: needs answers and one of when (a text) or pattern (a regular expression)")
        try:
            pattern = re.compile(re.escape(entry["when"]) if "when" in entry else entry["pattern"], re.DOTALL)
        except (re.error, TypeError) as error:
            raise ConfigError(f"{where}: {error}") from error
        tasks.append(ScriptedTask(pattern, tuple(_answer(a, path, where) for a in entry["answers"])))
    default = tuple(_answer(a, path, f"{path}: default") for a in data.get("default") or (DEFAULT,))
    return Script(tuple(tasks), default)


def _answer(value: Any, path: Path, where: str) -> ScriptedAnswer:
    if isinstance(value, str):
        return ScriptedAnswer(value)
    if not isinstance(value, dict) or set(value) - _KEYS:
        raise ConfigError(
            f"{where}: expected a string, or a mapping with the keys text or file, reasoning, delay_s, status, tool "
            f"and arguments, or tools; found {value!r}"
        )
    text = str(value.get("text", ""))
    if "file" in value:
        try:
            text = (path.parent / value["file"]).read_text()
        except OSError as error:
            raise ConfigError(f"{where}: {value['file']}: {error.strerror}") from error
    calls = tuple(_call(call, where) for call in value.get("tools") or ([value] if "tool" in value else []))
    delay_s, status = float(value.get("delay_s", 0.0)), int(value.get("status", 200))
    return ScriptedAnswer(text, delay_s, status, calls, str(value.get("reasoning", "")))


def _call(value: Any, where: str) -> ToolCall:
    arguments = value.get("arguments", {}) if isinstance(value, dict) else None
    if not isinstance(arguments, dict) or not isinstance(value.get("tool"), str):
        raise ConfigError(f"{where}: expected a call {{tool: NAME, arguments: {{…}}}}, found {value!r}")
    return ToolCall(value["tool"], arguments)


def text_of(message: Mapping[str, Any]) -> str:
    """Returns the text of an OpenAI message, whose content is a string or a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))
