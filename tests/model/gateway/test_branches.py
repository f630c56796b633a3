"""Every call has one position in one conversation, with its thoughts, its messages and the call that started it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_hpc.host.wire import pack, unpack
from megaflow_hpc.model.gateway import conversations as gateway_conversations
from megaflow_hpc.model.gateway.recorder import Recorder, SampledTokens
from megaflow_hpc.trajectories.reading.conversations import Conversation, conversations
from megaflow_hpc.trajectory import path_to

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str = "", thought: str = "", **calls: Any) -> Message:
    """An answer. Each further argument is a tool call: its id and its arguments."""
    found: Message = {"role": "assistant", "content": text}
    if thought:
        found["reasoning"] = thought
    if calls:
        tools = [(n, {"name": "bash", "arguments": json.dumps(arguments)}) for n, arguments in calls.items()]
        found["tool_calls"] = [{"id": n, "type": "function", "function": function} for n, function in tools]
    return found


def result(call: str, text: str = "ok") -> Message:
    return {"role": "tool", "tool_call_id": call, "content": text}


def bare(message: Message) -> Message:
    """An answer as a client sends it back: without its thought."""
    return {name: value for name, value in message.items() if name != "reasoning"}


def text_alone(message: Message, policy: str = "") -> SampledTokens:
    """An answer of an engine that reports no tokens."""
    return SampledTokens((), (), (), message=message, policy=policy, counted=0)


class Rollout:
    """Calls of one rollout, and the messages that the engine got for each."""

    def __init__(self) -> None:
        self.recorder = Recorder("p")
        self.sent: list[list[Mapping[str, Any]]] = []

    def call(self, messages: Sequence[Message], *answers: Message, policy: str = "") -> Message:
        """Makes one call, and returns the first of its answers as a client sends it back."""
        asked = self.recorder.restore(copy.deepcopy(messages), policy)
        self.sent.append(list(asked))
        for answer in answers:
            self.recorder.add(text_alone(answer, policy), asked)
        return bare(answers[0])

    @property
    def conversations(self) -> list[Conversation]:
        recording = self.recorder.recording
        return conversations(recording.messages, recording.parents, recording.turns)

    def check(self) -> None:
        """Checks that the tree contains the messages sent for every call, and nothing else."""
        recording = self.recorder.recording
        nodes = set()
        for turn, sent in zip(recording.turns, self.sent, strict=True):
            path = path_to(recording.parents, turn.message)
            nodes.update(path)
            assert [recording.messages[node] for node in path[:-1]] == sent
        assert nodes == set(range(len(recording.messages)))


@pytest.fixture(params=[False, True], ids=["in one go", "suspended between calls"])
def rollout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rollout:
    found = Rollout()
    if request.param:
        call = found.call

        def resumed(*args: Any, **options: Any) -> Message:
            found.recorder = Recorder.resumed(unpack(pack(found.recorder.state())))
            return call(*args, **options)

        monkeypatch.setattr(found, "call", resumed)
    return found


def test_agents_that_say_the_same_words_get_their_own_thoughts_back(rollout: Rollout) -> None:
    for who in "AB":
        rollout.call([user(who)], said("I look.", f"only {who} knows"))
    for who in "AB":
        rollout.call([user(who), said("I look."), user("go on")], said("done"))
    assert [sent[1] for sent in rollout.sent[2:]] == [said("I look.", f"only {who} knows") for who in "AB"]
    rollout.check()
    assert [c.turns for c in rollout.conversations] == [[None, 0, None, 2], [None, 1, None, 3]]


def test_of_alternatives_that_say_the_same_words_nothing_is_restored(rollout: Rollout) -> None:
    """What was sent is a message of the client until the answers differ, so it belongs to no call."""
    asked = [user("A"), said("I look."), user("go on")]
    rollout.recorder.restore([])
    one = rollout.recorder.restore([user("A")])
    for thought in ("one", "two"):
        rollout.recorder.add(text_alone(said("I look.", thought)), one)
    rollout.sent += [[user("A")]] * 2
    rollout.call(asked, said("done"))
    assert rollout.sent[-1] == asked
    rollout.check()
    assert [c.turns for c in rollout.conversations] == [[None, 0], [None, 1], [None, None, None, 2]]


def test_later_messages_tell_alternatives_apart(rollout: Rollout) -> None:
    first = [user("A")]
    for n in "12":
        rollout.call(first, said("I look.", f"thought {n}"))
    for n in "12":  # the thought is handed back once, as some clients do, and never again
        rollout.call([*first, said("I look.", f"thought {n}"), user(n)], said("yes"))
    rollout.call([*first, said("I look."), user("2"), said("yes"), user("more")], said("done"))
    assert rollout.sent[-1][1] == said("I look.", "thought 2")
    rollout.check()
    assert rollout.conversations[1].turns == [None, 1, None, 3, None, 4]


def test_ids_of_tool_calls_single_an_alternative_out_at_its_place_alone(rollout: Rollout) -> None:
    rollout.call([user("A")], said("I look.", "one", a={"x": 1}))
    rollout.call([user("A")], said("I look.", "two", b={"x": 1}))
    rollout.call([user("A"), said("I look.", b={"x": 1}), result("b")], said("done"))
    assert rollout.sent[-1][1] == said("I look.", "two", b={"x": 1})
    rollout.call([user("B"), said("I look.", b={"x": 1}), result("b")], said("done"))
    assert rollout.sent[-1][1] == said("I look.", b={"x": 1})  # nobody said that in this conversation
    rollout.check()


def test_ids_that_every_agent_uses_belong_to_the_call_of_their_own_conversation(rollout: Rollout) -> None:
    """Kimi names the calls of each answer functions.NAME:0, functions.NAME:1, …"""
    histories: dict[str, list[Message]] = {who: [user(who)] for who in "AB"}
    for turn in range(3):
        for who, history in histories.items():
            answer = said("", f"{who} in turn {turn}", **{"functions.bash:0": {"command": "ls"}})
            history += [rollout.call(history, answer), result("functions.bash:0", "words.txt")]
    for who, sent in zip("AB", rollout.sent[-2:], strict=True):
        thoughts = [m["reasoning"] for m in sent if m["role"] == "assistant"]
        assert thoughts == [f"{who} in turn {turn}" for turn in range(2)]
    rollout.check()
    assert [c.turns[1::2] for c in rollout.conversations] == [[0, None, 2, None, 4][::2], [1, 3, 5]]


def test_a_window_of_a_conversation_is_sent_as_the_client_made_it(rollout: Rollout) -> None:
    history: list[Message] = [{"role": "system", "content": "Be brief."}]
    for turn in range(5):
        history.append(user(f"step {turn}"))
        window = [history[0], *history[1:][-3:]]
        history.append(rollout.call(window, said("ok", f"thought {turn}")))
    assert [m.get("reasoning") for m in rollout.sent[-1]] == [None] * 4
    rollout.check()
    assert len(rollout.conversations) == 4  # of the first two calls, and a window each
    assert sorted(t for c in rollout.conversations for t in c.turns if t is not None) == [0, 1, 2, 3, 4]


def test_an_edited_history_branches_off_where_it_was_edited(rollout: Rollout) -> None:
    history = [user("a")]
    for text in ("b", "c", "d"):
        history += [rollout.call(history, said(f"to {text}", f"thought {text}")), user(text)]
    edited = [*history[:3], said("something else"), *history[4:]]
    rollout.call(edited, said("done"))
    assert rollout.sent[-1] == [user("a"), said("to b", "thought b"), *edited[2:]]
    rollout.check()
    first, second = rollout.conversations
    assert (second.parent, second.shared, second.turns) == (0, 3, [None, 0, None, None, None, None, None, 3])
    assert first.turns == [None, 0, None, 1, None, 2]


def test_ids_that_a_client_gives_anew_stay_its_own(rollout: Rollout) -> None:
    """Its tool messages refer to them."""
    rollout.call([user("A")], said("", "why", engine={"command": "ls"}))
    rollout.call([user("A"), said("", client={"command": "ls"}), result("client")], said("done"))
    assert rollout.sent[-1][1] == said("", "why", client={"command": "ls"})
    assert rollout.conversations[0].turns == [None, 0, None, 1]


def test_an_answer_of_another_policy_is_no_thought_of_this_one(rollout: Rollout) -> None:
    rollout.call([user("A")], said("I plan.", "a planner's thought"), policy="planner")
    rollout.call([user("A"), said("I plan."), user("do it")], said("done"))
    assert rollout.sent[-1][1] == said("I plan.")
    rollout.check()
    assert [c.policy for c in rollout.conversations] == ["planner", "p"]


def test_an_answer_of_another_policy_that_says_the_same_words_gets_no_thought_of_this_one(rollout: Rollout) -> None:
    rollout.call([user("A")], said("I look.", "a planner's thought"), policy="planner")
    rollout.call([user("A")], said("I look.", "my thought"))
    rollout.call([user("A"), said("I look."), user("do it")], said("done"))
    assert rollout.sent[-1][1] == said("I look.")
    rollout.check()


def test_what_one_agent_was_told_next_does_not_rule_out_another_that_is_told_the_same(rollout: Rollout) -> None:
    """Two sub-agents get the same messages and give the same answers, the second one later than the first."""
    told = [user("A"), said("I look."), user("go on")]
    rollout.call([user("A")], said("I look.", "thought of the first"))
    rollout.call(told, said("done"))
    assert rollout.sent[-1][1] == said("I look.", "thought of the first")
    rollout.call([user("A")], said("I look.", "thought of the second"))
    rollout.call(told, said("fine"))
    assert rollout.sent[-1][1] == said("I look.")
    for answer, thought in (("done", "thought of the first"), ("fine", "")):
        rollout.call([*told, said(answer), user("more")], said("yes"))
        assert rollout.sent[-1][1] == said("I look.", thought)
    rollout.check()


def test_alternatives_that_are_sent_as_one_of_them_was_said_are_a_message_of_the_client(rollout: Rollout) -> None:
    """One alternative had no thought. The message equals that answer, but the client may mean the other."""
    for thought in ("", "thought"):
        rollout.call([user("A")], said("I look.", thought))
    rollout.call([user("A"), said("I look."), user("go on")], said("done"))
    assert rollout.conversations[-1].turns == [None, None, None, 2]
    rollout.check()


def test_the_form_of_a_text_is_no_other_message(rollout: Rollout) -> None:
    """Clients that mark what a provider caches turn a text into a list of one part, and back."""
    rollout.call([user("A")], said("one", "thought"))
    parted = {"role": "user", "content": [{"type": "text", "text": "A"}]}
    rollout.call([parted, said("one"), user("B")], said("two"))
    assert rollout.sent[-1][1] == said("one", "thought")
    (found,) = rollout.conversations
    assert found.turns == [None, 0, None, 1]


# --- who started whom ---


def started(rollout: Rollout) -> list[tuple[int | None, int | None]]:
    return [(c.started_by, c.parent) for c in rollout.conversations]


def test_a_sub_agent_is_started_by_the_call_that_waits_for_it(rollout: Rollout) -> None:
    main = [user("main")]
    asks = {"a": {"prompt": "look into the file"}, "b": {"prompt": "run the tests"}}
    main.append(rollout.call(main, said("", **asks)))
    for prompt in ("look into the file", "run the tests"):  # the second one while the first one's tool runs
        rollout.call([user(prompt)], said("", **{f"x-{prompt}": {"command": "ls"}}))
    for prompt in ("look into the file", "run the tests"):
        history = [user(prompt), said("", **{f"x-{prompt}": {"command": "ls"}}), result(f"x-{prompt}")]
        rollout.call(history, said("done"))
    rollout.call([*main, result("a"), result("b")], said("all done"))
    rollout.check()
    assert started(rollout) == [(None, None), (0, 0), (0, 0)]
    assert [turn.started_by for turn in rollout.recorder.recording.turns] == [-1, 0, 0, -1, -1, -1]


def test_a_sub_agent_of_a_sub_agent_is_started_by_it(rollout: Rollout) -> None:
    for prompt, task in (("main", "outer"), ("outer task", "inner")):
        rollout.call([user(prompt)], said("", **{task: {"prompt": f"{task} task"}}))
    rollout.call([user("inner task")], said("done"))
    rollout.call([user("what do we do here, in three words?")], said("We nest agents."))
    assert started(rollout) == [(None, None), (0, 0), (1, 1), (1, 1)]


def test_a_sub_agent_in_the_background_is_started_by_the_call_that_gave_it_its_task(rollout: Rollout) -> None:
    """Its tool has returned before its first call, and its agent waits for another tool."""
    main = [user("main")]
    main += [rollout.call(main, said("", a={"prompt": "look into\n\nthe file"})), result("a")]
    main += [rollout.call(main, said("", b={"command": "ls"})), result("b")]
    rollout.call([user("a reminder\nlook into\n\nthe file"), user("today")], said("done"))
    rollout.call(main, said("all done"))
    rollout.call([user("They were to look into\n\nthe file?")], said("yes"))
    assert started(rollout) == [(None, None), (0, 0), (None, None)]


def test_a_conversation_after_the_results_were_sent_continues_nobodys_wait(rollout: Rollout) -> None:
    main = [user("main")]
    main += [rollout.call(main, said("", a={"command": "ls"})), result("a")]
    summary = rollout.call([*main, user("Sum it up.")], said("We listed."))
    rollout.call([user(f"So far: {summary['content']}")], said("on we go"))
    assert started(rollout) == [(None, None), (None, None)]


def test_a_window_that_sends_the_results_is_no_sub_agent(rollout: Rollout) -> None:
    rollout.call([user("main"), user("more")], said("", a={"command": "ls"}))
    rollout.call([user("more"), said("", a={"command": "ls"}), result("a")], said("done"))
    assert started(rollout) == [(None, None), (None, None)]


def test_alternatives_that_were_not_taken_wait_for_nothing(rollout: Rollout) -> None:
    asked = rollout.recorder.restore([user("main")])
    for call in "ab":
        rollout.recorder.add(text_alone(said("", **{call: {"command": call}})), asked)
    rollout.call([user("main"), said("", a={"command": "a"}), result("a")], said("done"))
    rollout.call([user("anew")], said("done"))
    assert started(rollout)[-1] == (None, None)


# --- what holds for any of them ---

EVENT = st.tuples(
    st.sampled_from(["on", "on", "on", "again", "edit", "window", "sub", "both"]), st.integers(0, 9), st.integers(0, 2)
)


@given(st.lists(EVENT, max_size=25))
def test_whatever_agents_do_each_call_has_its_own_messages_and_no_other_thought(events: list[Any]) -> None:
    """Few words, so that many answers have the same text. Every thought names its call."""
    rollout, histories = Rollout(), [[user("0")]]
    for number, (kind, which, word) in enumerate(events):
        history = histories[which % len(histories)]
        if kind == "sub":
            history = [user(str(word))]
            histories.append(history)
        elif kind == "edit" and len(history) > 2:
            history[len(history) // 2] = user("edited")
        elif kind == "window":
            history = history[-3:]
        answers = [said(f"word {word}", f"{number}-{n}") for n in range(2 if kind == "both" else 1)]
        asked = rollout.recorder.restore(copy.deepcopy(history))
        for answer in answers:
            rollout.recorder.add(text_alone(answer), asked)
            rollout.sent.append(list(asked))
        if kind != "again":
            history += [bare(answers[0]), user(str(word))]
    rollout.check()
    recording = rollout.recorder.recording
    for turn in recording.turns:
        path = path_to(recording.parents, turn.message)
        for node in path[:-1]:  # a thought that is sent is that of an earlier answer of this very conversation
            if "reasoning" in recording.messages[node]:
                assert node in {other.message for other in recording.turns}
    kept = [(n, turn) for c in rollout.conversations for n, turn in zip(c.nodes, c.turns, strict=True)]
    assert {turn for _, turn in kept} - {None} == set(range(len(recording.turns)))
    assert all(recording.turns[turn].message == node for node, turn in kept if turn is not None)


def test_a_call_looks_at_each_of_its_messages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a long conversation with many branches."""
    seen: list[int] = []
    digest = gateway_conversations.message_digest
    monkeypatch.setattr(gateway_conversations, "message_digest", lambda m: (seen.append(1), digest(m))[1])
    rollout, history = Rollout(), [user("0")]
    for turn in range(200):
        history += [rollout.call(history, said("ok", f"thought {turn}")), user(str(turn))]
    assert len(seen) == sum(2 * turn + 2 for turn in range(200))
    rollout.check()
