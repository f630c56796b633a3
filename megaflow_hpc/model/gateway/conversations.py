"""The conversations of one rollout, stored as a tree of messages.

A call's conversation is the path from a root to its answer. Conversations with a common beginning share its nodes::

    system ── user ── answer 0 ── tool ── answer 1 ── tool ── answer 3      the agent
                                                  └── tool ── answer 4      the agent, with an edited history
    system ── user ── answer 2                                              a sub-agent, started by call 1

Clients change earlier answers before they send them back. They re-encode the arguments of a tool call, fill in
defaults, trim white space, and drop reasoning that their API does not carry. Such a message is matched with a recorded
answer if it means the same **and** has the same position in the same conversation. The engine then gets the answer as
it was generated. If several answers match, later messages of the conversation narrow them down. If the remaining ones
differ, the engine gets what the client sent, and the conversation becomes a branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaflow_hpc.model.gateway.meaning import arguments_of, call_ids, completes, fingerprint, meaning, reasoning_of
from megaflow_hpc.texts import content_of
from megaflow_hpc.trajectory import Recording

Message = Mapping[str, Any]


class AskedPrompt(list[Message]):
    """The messages of a call, as they are sent to the engine, and their position in the tree."""

    def __init__(self, messages: Sequence[Message], keys: list[str], nodes: list[int], started_by: int) -> None:
        super().__init__(messages)
        self.keys, self.nodes, self.started_by = keys, nodes, started_by
        """``keys``: fingerprint of each message. ``nodes``: nodes of the leading messages that the tree already has.
        ``started_by``: the call that started this conversation (:attr:`~megaflow_hpc.trajectory.Turn.started_by`)."""


class Conversations:
    """Index over the messages of a recording. Not thread-safe, except that :meth:`find` may run during :meth:`add`."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._messages, self._parents = recording.messages, recording.parents
        self._children: dict[tuple[int, str], list[int]] = {}
        """Parent and key of a message → nodes. The key is the message's fingerprint; answers are also stored under
        their meaning and under the ids of their tool calls."""
        self._turns: dict[int, int] = {}
        """Node of an answer → its call."""
        self._open: dict[int, None] = {}
        """Nodes of answers with tool calls whose results no call has sent yet."""
        answers = {turn.message: number for number, turn in enumerate(recording.turns) if turn.message >= 0}
        for node, parent in enumerate(self._parents):
            self._index(node, fingerprint(self._messages[node]), answers.get(node))
            self._close(parent)

    def find(self, messages: Sequence[Message], policy: str) -> AskedPrompt:
        """Returns the messages to send to the engine for a call, with their position in the tree.

        Args:
            messages: The client's messages, in OpenAI form.
            policy: The policy that the call is for. Only its own answers are restored.
        """
        keys = [fingerprint(message) for message in messages]
        levels: list[list[int]] = []
        for message, key in zip(messages, keys, strict=True):
            found = self._matching(levels[-1] if levels else [-1], message, key)
            if not found:
                break
            levels.append(found)
        nodes = [min(levels[-1])] if levels else []
        known, told_apart = len(levels), False
        for depth in range(len(levels) - 2, -1, -1):
            # A later answer narrows the candidates down. Other messages may be new to each of them.
            told_apart = told_apart or messages[depth + 1].get("role") == "assistant"
            if told_apart:
                levels[depth] = sorted({self._parents[node] for node in levels[depth + 1]})
            nodes.append(self._parents[nodes[-1]])
        nodes.reverse()
        sent = list(messages)
        for depth, fitting in enumerate(levels):
            first, *others = (self._as_written(node, messages[depth], keys[depth], policy) for node in fitting)
            if first is None or any(other != first for other in others):
                known = depth
                break
            sent[depth] = first
        return AskedPrompt(sent, keys, nodes[:known], self._starter(sent, nodes[:known]))

    def add(self, asked: AskedPrompt, answer: Message | None, turn: int) -> int:
        """Stores the new messages of a call, and its answer. Returns the answer's node, -1 if there is no answer."""
        node = asked.nodes[-1] if asked.nodes else -1
        for message, key in zip(asked[len(asked.nodes) :], asked.keys[len(asked.nodes) :], strict=True):
            known = [child for child in self._children.get((node, key), ()) if child not in self._turns]
            node = known[0] if known else self._append(message, node, key)
        if answer is None:
            return -1
        return self._append(answer, node, fingerprint(answer), turn)

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
            keys.append(meaning(message))
            if ids := call_ids(message):
                keys.append(f"ids {ids}")
                self._open[node] = None
        for each in keys:
            self._children.setdefault((parent, each), []).append(node)

    def _matching(self, parents: Sequence[int], message: Message, key: str) -> list[int]:
        """Returns the children of ``parents`` that ``message`` may stand for."""
        found = [node for parent in parents for node in self._children.get((parent, key), ())]
        if message.get("role") != "assistant":
            return found
        ids, said, thought = call_ids(message), meaning(message), reasoning_of(message)
        for parent in parents:
            alike = [*self._children.get((parent, said), ())]
            if ids:
                for node in self._children.get((parent, f"ids {ids}"), ()):
                    alike += [node] if completes(message, self._messages[node]) else []
            for node in alike:
                if node not in found and thought in ("", reasoning_of(self._messages[node])):
                    found.append(node)
        named = [node for node in found if call_ids(self._messages[node]) == ids]
        return named or found

    def _as_written(self, node: int, message: Message, key: str, policy: str) -> Message | None:
        """Returns the recorded answer at a node. Its tool calls keep the client's ids, because later messages use them.

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
        """Returns the call that started the conversation, -1 if none did, and closes tool calls that have results.

        A conversation without an earlier answer that begins while another one waits for tool results was started by a
        waiting call: the latest whose arguments appear in the new conversation's user messages, or else the latest.
        """
        for node in nodes[: len(messages) - 1]:
            self._close(node)
        # The tree has no path for a truncated or edited history, so look for tool results by id.
        handed_back = {call_ids(message): message for message in messages[len(nodes) : -1]}
        for node in list(self._open):
            message = handed_back.get(call_ids(self._messages[node]))
            if message is not None and completes(message, self._messages[node]):
                self._close(node)
        waiting = list(self._open)
        if not waiting or any(node in self._turns for node in nodes):
            return -1
        told = "\n".join(content_of(dict(message)) for message in messages if message.get("role") == "user")
        named = [node for node in waiting if any(text in told for text in _texts(self._messages[node]))]
        return self._turns[max(named or waiting)]

    def _close(self, node: int) -> None:
        """Marks the tool calls of an answer as done, and those of its siblings: they will get no results."""
        if node in self._open:
            for other in list(self._open):
                if self._parents[other] == self._parents[node]:
                    self._open.pop(other, None)


def _texts(answer: Message) -> list[str]:
    """Returns the string arguments of an answer's tool calls."""
    found: list[str] = []
    for call in answer.get("tool_calls") or ():
        values = arguments_of(call.get("function", {}).get("arguments")).values()
        found += [value.strip() for value in values if isinstance(value, str) and value.strip()]
    return found
