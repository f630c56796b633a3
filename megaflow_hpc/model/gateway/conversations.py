"""The conversations of one rollout: a tree of messages, and where in it the messages of a call belong.

A call's conversation is the path from a root to its answer. Conversations that begin alike share those messages::

    system ── user ── answer 0 ── tool ── answer 1 ── tool ── answer 3      the agent
                                                  └── tool ── answer 4      the same, its history edited
    system ── user ── answer 2                                              a sub-agent, started by call 1

Agents hand earlier answers back in their client's form: arguments of a tool call encoded anew or completed by defaults,
reasoning dropped because its API does not carry it, white space trimmed. Such a message is the recorded answer if it
means the same **and** stands at the same place of the same conversation. Then the engine gets the answer as it wrote
it. If several answers fit, those that the rest of the conversation does not rule out must agree; otherwise the engine
gets what the client sent, and the conversation is a branch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaflow_hpc.model.gateway.meaning import arguments_of, call_ids, completes, fingerprint, meaning, reasoning_of
from megaflow_hpc.texts import content_of
from megaflow_hpc.trajectory import Recording

Message = Mapping[str, Any]


class Asked(list[Message]):
    """The messages of a call, as they are sent to the engine, and their place in the tree."""

    def __init__(self, messages: Sequence[Message], keys: list[str], nodes: list[int], started_by: int) -> None:
        super().__init__(messages)
        self.keys, self.nodes, self.started_by = keys, nodes, started_by
        """Fingerprint of each message; the nodes of those at the beginning that are in the tree already; and the call
        that started this conversation (:attr:`~megaflow_hpc.trajectory.Turn.started_by`)."""


class Conversations:
    """The messages of a recording, indexed. Not thread-safe, but :meth:`find` may run beside :meth:`add`."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._messages, self._parents = recording.messages, recording.parents
        self._children: dict[tuple[int, str], list[int]] = {}
        """Parent and fingerprint of a message (of an answer also its meaning and the ids of its tool calls) → nodes."""
        self._turns: dict[int, int] = {}
        """Node of an answer → its call."""
        self._open: dict[int, None] = {}
        """Nodes of answers with tool calls whose results no call has sent yet."""
        answers = {turn.message: number for number, turn in enumerate(recording.turns) if turn.message >= 0}
        for node, parent in enumerate(self._parents):
            self._index(node, fingerprint(self._messages[node]), answers.get(node))
            self._close(parent)

    def find(self, messages: Sequence[Message], policy: str) -> Asked:
        """Returns the messages of a call as they go to the engine, with their place in the tree.

        Args:
            messages: What the client sent, in OpenAI form.
            policy: The policy that is asked; only its own answers are restored.
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
            # A later answer rules others out; what a client adds may be new to any of them.
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
        return Asked(sent, keys, nodes[:known], self._starter(sent, nodes[:known]))

    def add(self, asked: Asked, answer: Message | None, turn: int) -> int:
        """Stores the messages of a call that are new, and its answer; returns the answer's node, -1 without one."""
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
        """Returns the children of some nodes that a message may be."""
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
        """Returns the answer at a node, with the ids that the client gave its tool calls: later messages name them.

        ``None`` if it is another policy's, and not what the client sent.
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
        """Returns the call that started the conversation, and notes which tool calls have got their results.

        A conversation without an earlier answer, that begins while tool calls of another one have no result yet, was
        started by them: by the latest whose arguments hold what the new conversation was told, or else the latest.
        """
        for node in nodes[: len(messages) - 1]:
            self._close(node)
        # A window of the conversation, or one that was edited, is not found from its root.
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
        """Notes that the tool calls of an answer have got their results; its alternatives will get none."""
        if node in self._open:
            for other in list(self._open):
                if self._parents[other] == self._parents[node]:
                    self._open.pop(other, None)


def _texts(answer: Message) -> list[str]:
    """Returns the texts among the arguments of an answer's tool calls."""
    found: list[str] = []
    for call in answer.get("tool_calls") or ():
        values = arguments_of(call.get("function", {}).get("arguments")).values()
        found += [value.strip() for value in values if isinstance(value, str) and value.strip()]
    return found
