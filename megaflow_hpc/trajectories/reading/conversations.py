"""Splits a trajectory into conversations, using its message tree and the links of its calls.

A conversation is a chain of calls, each of which continues from the answer of the previous call. If two calls continue
from the same answer, or one call sampled several answers, the first keeps the conversation and the others branch off. A
conversation that shares at most a system prompt with earlier conversations has no parent message. It belongs either to
a sub-agent, in which case it records the call that started it, or to the same agent after its context was compacted or
truncated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from megaflow_hpc.texts import parse_object
from megaflow_hpc.trajectory import CALLS_FILE, Turn, path_to
from megaflow_hpc.types import Artifact


@dataclass(frozen=True)
class Conversation:
    """A conversation, from its first message to its last answer."""

    policy: str
    """Policy that answered the last call. Empty if there are no calls."""
    nodes: list[int]
    """Indices of the conversation's messages in the trajectory."""
    messages: list[dict[str, Any]]
    turns: list[int | None]
    """Number of the call that produced each message. ``None`` if the agent wrote it, or if unknown."""
    parent: int | None = None
    """Index of the conversation from which this one branches off, or whose call started it."""
    shared: int = 0
    """Number of leading messages that this conversation shares with the one from which it branches off."""
    started_by: int | None = None
    """Number of the call whose answer started this conversation, such as a sub-agent's."""
    role: str = ""
    """Role that answered the last call. Empty if there is no team."""
    speakers: tuple[tuple[str, str], ...] = ()
    """Distinct (role, policy) pairs that answered the conversation's own calls, in order."""
    depth: int = 0
    """Number of sub-agent levels above this conversation. 0 for the agent itself."""

    @property
    def calls(self) -> int:
        """Number of calls answered in this conversation."""
        return sum(turn is not None for turn in self.turns)


class ConversationCall(NamedTuple):
    """One model call."""

    messages: list[dict[str, Any]]
    """Messages sent to the engine."""
    answer: dict[str, Any] | None
    turn: Turn


def conversations(
    messages: Sequence[dict[str, Any]], parents: Sequence[int], turns: Sequence[Turn]
) -> list[Conversation]:
    """Returns the conversations, ordered by their start.

    Args:
        messages: Messages of a :class:`~megaflow_hpc.trajectory.Trajectory`.
        parents: Index of each message's parent. -1 if it has none.
        turns: The trajectory's model calls.
    """
    call_of = {turn.message: number for number, turn in enumerate(turns) if turn.message >= 0}
    """Call that produced each message, by message index."""
    answer_before = [-1] * len(messages)
    """Index of the nearest answer before each message. -1 if there is none."""
    for node, parent in enumerate(parents):
        if parent >= 0:
            answer_before[node] = parent if parent in call_of else answer_before[parent]
    ends: list[int] = []
    """The last message of each conversation."""
    owner: dict[int, int] = {}
    """First conversation that contains each message, by message index."""
    unanswered = set(range(len(messages))) - set(parents) - call_of.keys()
    for node in [*sorted(call_of, key=lambda answer: call_of[answer]), *sorted(unanswered)]:
        number = owner.get(answer_before[node], -1)
        if number < 0 or ends[number] != answer_before[node]:
            number = len(ends)
            ends.append(node)
        ends[number] = node
        while node >= 0 and node not in owner:
            owner[node] = number
            node = parents[node]
    result: list[Conversation] = []
    for number, end in enumerate(ends):
        nodes = path_to(parents, end)
        calls = [call_of.get(node) for node in nodes]
        one = _conversation(number, nodes, calls, messages, turns, owner)
        if one.parent is not None and one.parent < number:  # a conversation starts after the one that started it
            one = replace(one, depth=result[one.parent].depth + (one.started_by is not None))
        result.append(one)
    return result


def _conversation(
    number: int,
    nodes: list[int],
    calls: list[int | None],
    messages: Sequence[dict[str, Any]],
    turns: Sequence[Turn],
    owner: Mapping[int, int],
) -> Conversation:
    own = [turns[call] for call, node in zip(calls, nodes, strict=True) if call is not None and owner[node] == number]
    shared = sum(owner[node] != number for node in nodes)
    parent, started_by = None, None
    if own and own[0].started_by >= 0:
        started_by = own[0].started_by
        parent = owner.get(turns[started_by].message)
        shared = 0
    elif shared and messages[nodes[shared - 1]].get("role") not in ("system", "developer"):
        parent = owner[nodes[shared - 1]]
    else:
        shared = 0
    return Conversation(
        policy=own[-1].policy if own else "",
        nodes=nodes,
        messages=[messages[node] for node in nodes],
        turns=calls,
        parent=parent,
        shared=shared,
        started_by=started_by,
        role=own[-1].role if own else "",
        speakers=tuple(dict.fromkeys((turn.role, turn.policy) for turn in own)),
    )


def main(candidates: Sequence[Conversation], policy: str) -> int:
    """Returns the index of the main conversation.

    Prefers conversations in which ``policy`` answered, then those with the most calls, then the longest, then the
    first.
    """

    def rank(number: int) -> tuple[bool, int, int]:
        one = candidates[number]
        return policy in (speaker for _, speaker in one.speakers), one.calls, len(one.nodes)

    return max(range(len(candidates)), key=rank)  # on a tie, the first


def main_first(candidates: Sequence[Conversation], policy: str) -> list[int]:
    """Returns the indices of all conversations, the main one first."""
    first = [main(candidates, policy)] if candidates else []
    return [*first, *(number for number in range(len(candidates)) if number not in first)]


def heading(number: int, conversation: Conversation) -> str:
    """Describes a conversation in one line: its number, its calls, and its origin."""
    calls = [call for call in conversation.turns[conversation.shared :] if call is not None]
    if conversation.started_by is not None:
        begins = f"started by call {conversation.started_by}"
    elif conversation.shared:
        begins = f"branches off conversation {conversation.parent} after [{conversation.shared - 1}]"
    else:
        begins = "starts from scratch" if number else "the first one"
    if conversation.started_by is not None and conversation.parent is not None:
        begins += f" of conversation {conversation.parent}"
    count = f"{len(calls)} call{'s' * (len(calls) != 1)}"
    return f"conversation {number}: {count}{_spoken_by(conversation)}, {begins}"


def _spoken_by(conversation: Conversation) -> str:
    """Returns the roles and policies that answered the conversation's own calls, such as `, role writer, policy a`."""
    if len(conversation.speakers) == 1:
        ((role, policy),) = conversation.speakers
        return (f", role {role}" if role else "") + (f", policy {policy}" if policy else "")
    named = [f"{role} (policy {policy})" if role else f"policy {policy}" for role, policy in conversation.speakers]
    return f", by {' and '.join(named)}" if named else ""


# --- tokens -----------------------------------------------------------------------------------------------------------


class _Calls(Protocol):
    """A stored rollout: a trajectory, or a row of a store."""

    @property
    def turns(self) -> list[Turn]: ...
    @property
    def artifacts(self) -> list[Artifact]: ...


def tokens_of_calls(rollout: _Calls) -> list[tuple[int, int]]:
    """Returns the number of prompt tokens and the number of sampled tokens of each call.

    If the endpoint reported no token ids, returns the counts that it reported, or zeros.
    """
    turns = rollout.turns
    counts = [(turn.token_start, turn.token_end - turn.token_start) for turn in turns]
    if all(turn.sequence >= 0 for turn in turns):
        return counts
    artifacts = [artifact for artifact in rollout.artifacts if artifact.name == CALLS_FILE]
    lines = [line for artifact in artifacts for line in artifact.data.split(b"\n") if line]
    for number, (turn, line) in enumerate(zip(turns, lines, strict=False)):
        if turn.sequence < 0:
            with suppress(ValueError, TypeError, LookupError, OverflowError):
                prompt, sampled = parse_object(line)["tokens"]
                counts[number] = max(0, int(prompt)), max(0, int(sampled))
    return counts
