"""Stores the conversations of one rollout as a tree of messages.

A call's conversation is the path from a root to its answer. Conversations with a common prefix share its nodes::

    system ── user ── answer 0 ── tool ── answer 1 ── tool ── answer 3      the agent
                                                  └── tool ── answer 4      the agent, with an edited history
    system ── user ── answer 2                                              a sub-agent, started by call 1

Clients modify earlier answers before they send them back. They re-encode the arguments of a tool call, fill in
defaults, trim whitespace, and drop reasoning that their API does not carry. Such a message matches a recorded answer if
it has the same meaning **and** the same position in the same conversation. The engine then gets the answer as it was
generated. If several answers match, later messages of the conversation narrow down the candidates. If the remaining
candidates differ, the engine gets the client's version, and the conversation becomes a branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaflow_hpc.model.gateway.canonical import (
    arguments_of,
    call_ids,
    completes,
    meaning_digest,
    message_digest,
    reasoning_of,
)
from megaflow_hpc.texts import content_of
from megaflow_hpc.trajectory import Recording

Message = Mapping[str, Any]
MAX_TASK_CHARACTERS = 20_000
"""Maximum length in characters of tool-call arguments that are kept. They show which call started a background
sub-agent."""


class AskedPrompt(list[Message]):
    """The messages of a call, as sent to the engine, and their position in the tree.

    Args:
        messages: The messages in OpenAI form.
        keys: Digest of each message.
        nodes: Nodes of the leading messages that are already in the tree.
        started_by: The call that started this conversation (:attr:`~megaflow_hpc.trajectory.Turn.started_by`).
    """

    def __init__(self, messages: Sequence[Message], keys: list[str], nodes: list[int], started_by: int) -> None:
        super().__init__(messages)
        self.keys, self.nodes, self.started_by = keys, nodes, started_by


class Conversations:
    """Index of the messages of a recording. Not thread-safe, except that :meth:`find` may run during :meth:`add`."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._messages, self._parents = recording.messages, recording.parents
        self._children: dict[tuple[int, str], list[int]] = {}
        """Child nodes by (parent node, message key). The key is the message's digest. Answers also have entries for the
        digest of their meaning and for their tool-call ids."""
        self._turns: dict[int, int] = {}
        """Index of the model call that returned each answer, by the index of the answer's message."""
        self._open: dict[int, None] = {}
        """Nodes of answers whose tool calls have no results yet."""
        self._asked: dict[str, int] = {}
        """The latest call with each string argument of a tool call, by the argument with a line feed before it. Omits
        strings longer than :data:`MAX_TASK_CHARACTERS`."""
        answers = {turn.message: number for number, turn in enumerate(recording.turns) if turn.message >= 0}
        for node, parent in enumerate(self._parents):
            self._index(node, message_digest(self._messages[node]), answers.get(node))
            self._close(parent)

    def find(self, messages: Sequence[Message], policy: str) -> AskedPrompt:
        """Returns the messages that the engine gets for a call, with their position in the tree.

        Args:
            messages: The client's messages, in OpenAI form.
            policy: The policy called. Only this policy's answers are restored.
        """
        keys = [message_digest(message) for message in messages]
        levels: list[list[int]] = []
        for message, key in zip(messages, keys, strict=True):
            candidates = self._matching(levels[-1] if levels else [-1], message, key)
            if not candidates:
                break
            levels.append(candidates)
        nodes = [min(levels[-1])] if levels else []
        narrowed = False
        for depth in range(len(levels) - 2, -1, -1):
            # Only later answers narrow down the candidates. Other messages may be new, whichever candidate they follow.
            narrowed = narrowed or messages[depth + 1].get("role") == "assistant"
            if narrowed:
                levels[depth] = sorted({self._parents[node] for node in levels[depth + 1]})
            nodes.append(self._parents[nodes[-1]])
        nodes.reverse()
        sent = list(messages)
        for depth, candidates in enumerate(levels):
            first, *others = (self._as_written(node, messages[depth], keys[depth], policy) for node in candidates)
            if first is None or any(other != first for other in others):
                nodes = nodes[:depth]
                break
            sent[depth] = first
        return AskedPrompt(sent, keys, nodes, self._starter(sent, nodes))

    def add(self, asked: AskedPrompt, answer: Message | None, turn: int) -> int:
        """Stores the new messages of a call, and its answer. Returns the answer's node, or -1 if there is no answer."""
        node = asked.nodes[-1] if asked.nodes else -1
        for message, key in zip(asked[len(asked.nodes) :], asked.keys[len(asked.nodes) :], strict=True):
            existing = [child for child in self._children.get((node, key), ()) if child not in self._turns]
            node = existing[0] if existing else self._append(message, node, key)
        if answer is None:
            return -1
        return self._append(answer, node, message_digest(answer), turn)

    def _append(self, message: Message, parent: int, key: str, turn: int | None = None) -> int:
        self._messages.append(dict(message))
        self._parents.append(parent)
        node = len(self._messages) - 1
        self._index(node, key, turn)
        return node

    def _index(self, node: int, key: str, turn: int | None) -> None:
        parent, message = self._parents[node], self._messages[node]
        keys = [key]
        if turn is not None:
            self._turns[node] = turn
            keys.append(meaning_digest(message))
            if ids := call_ids(message):
                keys.append(f"ids {ids}")
                self._open[node] = None
                texts = (text for text in _texts(message) if len(text) <= MAX_TASK_CHARACTERS)
                self._asked |= {f"\n{text}": turn for text in texts}
        for each in keys:
            self._children.setdefault((parent, each), []).append(node)

    def _matching(self, parents: Sequence[int], message: Message, key: str) -> list[int]:
        """Returns the children of ``parents`` that match ``message``."""
        matches = [node for parent in parents for node in self._children.get((parent, key), ())]
        if message.get("role") != "assistant":
            return matches
        ids, meaning, reasoning = call_ids(message), meaning_digest(message), reasoning_of(message)
        for parent in parents:
            candidates = [*self._children.get((parent, meaning), ())]
            if ids:
                same_ids = self._children.get((parent, f"ids {ids}"), ())
                candidates += [node for node in same_ids if completes(message, self._messages[node])]
            for node in candidates:
                if node not in matches and reasoning in ("", reasoning_of(self._messages[node])):
                    matches.append(node)
        return [node for node in matches if call_ids(self._messages[node]) == ids] or matches

    def _as_written(self, node: int, message: Message, key: str, policy: str) -> Message | None:
        """Returns the recorded answer at a node with the client's tool-call ids, because later messages refer to these
        ids.

        Returns ``None`` if another policy gave the answer and the client's message differs from it.
        """
        if node not in self._turns:
            return message
        if self._recording.turns[self._turns[node]].policy != policy:
            return message if node in self._children.get((self._parents[node], key), ()) else None
        answer = dict(self._messages[node])
        if call_ids(answer) != call_ids(message):
            pairs = zip(answer["tool_calls"], message["tool_calls"], strict=True)
            answer["tool_calls"] = [{**own, "id": given.get("id")} for own, given in pairs]
        return answer

    def _starter(self, messages: Sequence[Message], nodes: Sequence[int]) -> int:
        """Returns the call that started this conversation, or -1 if no call did. Closes the tool calls whose results
        have arrived.

        A conversation belongs to a sub-agent if it has no earlier answer and begins while another conversation waits
        for tool results. It was started by the latest waiting call whose arguments appear in its user messages, or else
        by the latest waiting call. A tool that starts a background sub-agent returns immediately, so its call does not
        wait. Such a call is preferred to the latest waiting call if a user message equals one of its arguments, or ends
        with it on a new line.
        """
        for node in nodes[: len(messages) - 1]:
            self._close(node)
        # A truncated or edited history has no path in the tree, so find its earlier answers by their ids.
        by_ids = {call_ids(message): message for message in messages[len(nodes) : -1]}
        for node in list(self._open):
            message = by_ids.get(call_ids(self._messages[node]))
            if message is not None and completes(message, self._messages[node]):
                self._close(node)
        if any(node in self._turns for node in nodes):
            return -1
        prompts = ["\n" + content_of(dict(message)).strip() for message in messages if message.get("role") == "user"]
        prompt, waiting = "".join(prompts), list(self._open)
        quoted = [node for node in waiting if any(text in prompt for text in _texts(self._messages[node]))]
        if quoted:
            return self._turns[max(quoted)]
        begins = not any(message.get("role") == "assistant" for message in messages)
        asked = list(self._asked.items()) if begins else ()
        earlier = [turn for text, turn in asked if any(own.endswith(text) for own in prompts)]
        return max(earlier, default=self._turns[max(waiting)] if waiting else -1)

    def _close(self, node: int) -> None:
        """Marks the tool calls of an answer and of its siblings as done, because the siblings will get no results."""
        if node in self._open:
            for other in list(self._open):
                if self._parents[other] == self._parents[node]:
                    self._open.pop(other, None)


def _texts(answer: Message) -> list[str]:
    """Returns the string arguments of an answer's tool calls."""
    texts: list[str] = []
    for call in answer.get("tool_calls") or ():
        values = arguments_of(call.get("function", {}).get("arguments")).values()
        texts += [value.strip() for value in values if isinstance(value, str) and value.strip()]
    return texts
