"""Compares every stored format of a tree with the requests and answers of its engine.

Calls are read from each format as keys: the messages asked, the answer, and what is known of its tokens. The keys of
all answers that a client got must occur exactly once. Other keys may only be those of clients that hung up.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megaflow_hpc.cli.runs import show
from megaflow_hpc.report.transcripts import transcript_of
from megaflow_hpc.trajectories.exports import atif, jsonl
from megaflow_hpc.trajectories.reading.conversations import ConversationCall
from megaflow_hpc.trajectories.reading.store import Row
from megaflow_hpc.trajectory import Trajectory, linked
from tests.model.gateway.trees.agents import Exchange
from tests.model.gateway.trees.clients import Said
from tests.model.gateway.trees.engine import MODELS, START, UNIQUE, EngineAnswer
from tests.model.gateway.trees.keys import (
    Key,
    atif_key,
    brief,
    calls_of,
    key_of,
    meant,
    named,
    packed,
    plain_id,
    step_of,
    stored_key,
    text_of,
    thought_of,
    values_of,
)


class Wrong(AssertionError):
    """The stored data differ from what happened."""


def expect(good: bool, *said: Any) -> None:
    if not good:
        raise Wrong(" ".join(str(part) for part in said))


class Oracle:
    """The facts that a tree's engine and clients know.

    Args:
        given: The engine's answers.
        exchanges: The clients' calls.
        policy: The rollout's own policy.
    """

    def __init__(self, given: Sequence[EngineAnswer], exchanges: Sequence[Exchange], policy: str) -> None:
        self.policy = policy
        self.exchanges = {exchange.request.call: exchange for exchange in exchanges}
        self.given = [
            one for one in given if one.call in self.exchanges
        ]  # another's may come late: its client has left
        self._known: dict[Callable[[EngineAnswer], Key], list[Key]] = {}
        self.answers = {(one.call, one.choice): one for one in self.given}
        twice = [one for one in self.given if self.answers[one.call, one.choice] is not one]
        expect(not twice, "a call was made twice:", *twice[:1], *(self.exchanges[one.call] for one in twice[:1]))

    def got(self, one: EngineAnswer) -> bool:
        """Whether the client got the answer."""
        return self.exchanges[one.call].replies is not None

    # --- between client and engine ---------------------------------------------------------------------------------

    def check_calls(self) -> None:
        """Checks that the engine got what the clients sent, and the clients got what it answered."""
        for one in self.given:
            exchange = self.exchanges[one.call]
            model = exchange.request.model
            expect(one.model == (model if model in MODELS else self.policy), "another model answered", one)
            self._check_asked(one, exchange.request.messages)
            if exchange.replies is not None:
                said, told = exchange.replies[one.choice], one.message
                expect(said.text == (told.get("content") or ""), "text", said, told)
                expect(said.thought == thought_of(told), "thought", said, told)
                expect([(c.id, c.name, c.values) for c in said.calls] == calls_of(told), "calls", said, told)

    def _check_asked(self, one: EngineAnswer, said: Sequence[Said]) -> None:
        where = f"call {one.call}"
        expect(len(one.asked) == len(said), where, "messages", one.asked, said)
        for place, (asked, sent) in enumerate(zip(one.asked, said, strict=True)):
            at = f"{where}, message {place}:"
            expect(asked["role"] == sent.role, at, asked, sent)
            origin = self.answers.get(sent.origin) if sent.origin else None
            text, sent_text = text_of(asked), sent.text
            if sent.role != "assistant":
                expect(text == sent_text and not asked.get("tool_calls"), at, asked, sent)
                expect(plain_id(asked.get("tool_call_id", "")) == plain_id(sent.result_of), at, asked, sent)
                continue
            expect(text.strip() == sent_text.strip(), at, asked, sent)
            calls = [(plain_id(c.id), c.name, c.values) for c in sent.calls]
            meant_by = self._meant_by(said, place, origin)
            restored = [[(a[0], *b) for a, b in zip(calls, values_of(each.message), strict=False)] for each in meant_by]
            told = [(plain_id(call[0]), *call[1:]) for call in calls_of(asked)]
            expect(told in (calls, *restored), at, asked, sent)
            thoughts = {sent.thought} if sent.thought else {"", *(thought_of(each.message) for each in meant_by)}
            expect(thought_of(asked) in thoughts, at, "the thought", thought_of(asked), "is none of", thoughts, sent)
        self._check_prompt(one)

    def _meant_by(self, said: Sequence[Said], place: int, origin: EngineAnswer | None) -> list[EngineAnswer]:
        """Returns the answers that a message may be: its own, or if that is ambiguous, all with the same meaning
        there."""
        before = [meant(each) for each in said[:place]]

        def here(one: EngineAnswer) -> bool:
            earlier = self.exchanges[one.call].request.messages
            return len(earlier) == place and [meant(each) for each in earlier] == before

        if origin is not None and here(origin):
            return [origin]
        # The client wrote it, or moved it here.
        same = [one for one in self.given if text_of(one.message).strip() == said[place].text.strip() and here(one)]
        return same if origin is None else [origin, *same]

    def _check_prompt(self, one: EngineAnswer) -> None:
        """Checks that sampled ids in a prompt are of an answer that the engine was asked about at that position."""
        numbers, place = {each.number: each for each in self.given}, -1
        for token in one.prompt:
            place += token == START
            if token >= UNIQUE:
                answer = numbers[(token - UNIQUE) // 256]
                expect(place < len(one.asked) and answer.model == one.model, f"call {one.call}: ids of", answer)
                asked, said = one.asked[place], answer.message
                same = [(text_of(each).strip(), thought_of(each), values_of(each)) for each in (asked, said)]
                expect(same[0] == same[1], f"call {one.call}: ids of another answer:", asked, said)

    # --- what is stored --------------------------------------------------------------------------------------------

    def check(self, row: Row, made: Trajectory) -> None:
        """Compares every format with what the engine knows."""
        _same("HDF5", row.trajectory(), made)
        self._check_columns(row)
        turns = self._check_rows(row)
        line = jsonl.line(row)
        self._check_tree("JSON lines", json.loads(line), "weight_versions")
        _same("JSON lines", jsonl.parse(json.loads(line)), made)
        self._check_tree("show --json", json.loads(json.dumps(show.as_json(row, True))), "weight_version")
        self._check_show(row, turns)
        self._check_atif(json.loads(json.dumps(atif.document(row, "trees"), allow_nan=False)))
        self._check_report(row)

    def _compare(self, name: str, found: Iterable[Key], key: Callable[[EngineAnswer], Key]) -> None:
        """Compares the calls of a format with the engine's, both as keys."""
        kept = Counter(found)
        must = Counter(known for known, one in zip(self._keys(key), self.given, strict=True) if self.got(one))
        may = Counter(self._keys(key))
        lost, wrong = must - kept, kept - may
        expect(not lost, f"{name}: {len(lost)} calls are missing:", *list(lost)[:1], "\nwrong:", *list(wrong)[:1])
        expect(not wrong, f"{name}: {len(wrong)} calls that were not made so:", *list(wrong)[:1])

    def _keys(self, key: Callable[[EngineAnswer], Key]) -> list[Key]:
        """Returns the keys of the engine's answers."""
        if key not in self._known:
            self._known[key] = [key(one) for one in self.given]
        return self._known[key]

    def _check_columns(self, row: Row) -> None:
        """Checks that exactly the sampled tokens have log-probabilities and versions."""
        sampled = [array("B", bytes(len(view.tokens))) for view in row.sequences]
        for turn in row.turns:
            if turn.sequence >= 0:
                for place in range(turn.token_start, turn.token_end):
                    expect(not sampled[turn.sequence][place], "a token of two calls")
                    sampled[turn.sequence][place] = 1
        for view, mask in zip(row.sequences, sampled, strict=True):
            for mine, masked, score, version in zip(
                mask, view.loss_mask.tolist(), view.logprobs.tolist(), view.weight_versions.tolist(), strict=True
            ):
                expect(masked == mine, "loss_mask")
                expect(math.isfinite(score) == mine and version == (3 if mine else -1), score, version)

    def _check_rows(self, row: Row) -> list[EngineAnswer]:
        """Checks HDF5 rows as the reader returns them. Returns the engine's answer of each turn."""
        keys, found, left = [], [], defaultdict[Key, list[EngineAnswer]](list)
        for known, one in zip(self._keys(key_of), self.given, strict=True):
            left[known].append(one)
        same = {known: {one.id for one in alike} for known, alike in left.items()}
        views = row.sequences
        ids = [json.loads(each)["id"] for a in row.artifacts for each in a.data.decode().splitlines()]
        expect(len(ids) == len(row.turns), "calls.jsonl")
        calls = [row.call(number) for number in range(len(row.turns))]
        for number, call in enumerate(calls):
            turn = call.turn
            columns = {"tokens": [], "logprobs": []}
            if turn.sequence >= 0:
                view = views[turn.sequence]
                columns = {name: getattr(view, name).tolist() for name in columns}
                expect(view.policy == turn.policy, "a sequence of another policy")
            keys.append(stored_key(call.messages, call.answer, turn, columns))
            if left[keys[-1]]:
                found.append(left[keys[-1]].pop(0))
                expect(ids[number] in same[keys[-1]], "the id of another call", ids[number])
        self._compare("HDF5", keys, key_of)
        self._check_conversations(row, calls)
        return found

    def _check_conversations(self, row: Row, calls: Sequence[ConversationCall]) -> None:
        """Checks that the messages before a call in its conversation are those that were asked."""
        own = Counter[int]()
        for one in row.conversations:
            for place, number in enumerate(one.turns):
                if number is not None:
                    call = calls[number]
                    expect(
                        [*call.messages, call.answer] == one.messages[: place + 1], "a conversation of other messages"
                    )
                    own[number] += place >= one.shared
        expect(own == Counter(range(len(calls))), "calls in conversations:", own)

    def _check_tree(self, name: str, record: Mapping[str, Any], versions: str) -> None:
        """Checks the tree, the turns and the list of conversations of a JSON record."""
        tree = record.get("tree") or record
        messages = tree["messages"]
        parents = tree.get("parents") or list(range(-1, len(messages) - 1))
        keys = []
        for turn in record["turns"]:
            path, node = [], turn["message"]
            while node >= 0:
                path.insert(0, node)
                node = parents[node]
            sequence = record["sequences"][turn["sequence"]] if turn["sequence"] >= 0 else {}
            asked = [messages[node] for node in path[:-1]]
            keys.append(stored_key(asked, messages[path[-1]], _Fields(turn), sequence))
            if sequence:
                span = slice(turn["token_start"], turn["token_end"])
                expect(set(sequence[versions][span]) == {3}, name, "weight versions")
        self._compare(name, keys, key_of)
        listed = {call for one in record["conversations"] for call in one["turns"] if call is not None}
        expect(listed == set(range(len(keys))), name, "conversations", listed)
        for one in record["conversations"]:
            for node, call in zip(one["messages"], one["turns"], strict=True):
                expect(call is None or record["turns"][call]["message"] == node, name, "a call at another's message")

    def _check_show(self, row: Row, turns: Sequence[EngineAnswer]) -> None:
        """Checks that ``show --full`` has each call's answer below its heading."""
        blocks: dict[int, list[str]] = {}
        block: list[str] = []
        for text, _ in show._lines(row, full=True):
            if text.startswith("\n"):
                block = []
                if of := re.fullmatch(r"\n\[\d+] assistant  \(call (\d+)\)", text):
                    expect(int(of[1]) not in blocks, "show: a call twice")
                    blocks[int(of[1])] = block
            else:
                block.append(text)
        expect(set(blocks) == set(range(len(turns))), "show: calls", set(blocks), len(turns))
        for number, one in enumerate(turns):
            said = "\n".join(blocks[number])
            wanted = [thought_of(one.message), text_of(one.message)]
            wanted += [f"{name}({c['function']['arguments']})" for c, name in named(one.message)]
            expect(all(part in said for part in wanted), f"show: call {number}", said, wanted)

    def _check_atif(self, document: Mapping[str, Any]) -> None:
        keys = []
        for one in (document, *document.get("subagent_trajectories", ())):
            for number, step in enumerate(one["steps"]):
                if "metrics" in step:
                    expect(step["source"] == "agent" and step["llm_call_count"] == 1, "ATIF", step)
                    before = [step_of(each) for each in one["steps"][:number]]
                    metrics = step["metrics"]
                    tokens, scores = metrics.get("completion_token_ids", []), metrics.get("logprobs", [])
                    count = metrics.get("prompt_tokens")
                    extra = metrics["extra"]["finish_reason"], metrics["extra"]["server"]
                    keys.append(packed(before, step_of(step), count, *brief([], tokens, scores), *extra))
        self._compare("ATIF", keys, atif_key)
        expect(document["extra"]["calls_without_a_step"] == 0, "ATIF: calls without a step")

    def _check_report(self, row: Row) -> None:
        shown = Counter[Key]()
        for message in transcript_of(row):
            if message["role"] == "assistant":
                shown[packed(message["text"], message.get("thought", ""), message.get("calls", ""))] += 1
        must = Counter(
            packed(
                text_of(one.message),
                thought_of(one.message),
                "\n".join(f"{name}({c['function']['arguments']})" for c, name in named(one.message)),
            )
            for one in self.given
            if self.got(one)
        )
        expect(not must - shown, "report: an answer is missing", must - shown)


def _same(name: str, read: Trajectory, made: Trajectory) -> None:
    """Checks that a trajectory was read as it was stored."""
    one, other = read.to_record(), made.to_record()
    for turn in other["turns"]:  # seconds are kept as float32
        turn |= {name: array("f", [turn[name]])[0] for name in ("model_s", "sandbox_s", "agent_s", "wait_s")}
    for record in (one, other):
        record["parents"] = linked(record["parents"], len(record["messages"]))
    changed = {field: (one[field], value) for field, value in other.items() if one[field] != value}
    expect(not changed, name, "changed the trajectory:", changed)


class _Fields:
    """A mapping as an object."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(fields)
