"""An agent asks for a title, starts a sub-agent and continues from a summary. All of it is stored and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from megaflow_hpc.cli import main
from megaflow_hpc.model.engines.scripted import engine as scripted
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer, ToolCall
from megaflow_hpc.model.gateway.replay import calls_artifact
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.report.transcripts import transcript_of
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import exports, gather, open_trajectories, validate
from megaflow_hpc.trajectories.exports.jsonl import import_jsonl
from megaflow_hpc.trajectories.maintenance.anonymise import anonymise
from megaflow_hpc.trajectories.maintenance.compact import compact
from megaflow_hpc.trajectories.reading.store import Row
from megaflow_hpc.trajectory import Recording
from tests.support.samples import commit, run_dir, trajectory
from tests.support.serving import in_loop

PROTOCOLS = ["plain", "text"]
ID = "solve/default/0"


class Engine(scripted.ScriptedEngine):
    """Answers ``<last words of the conversation>!``. If the words begin with WORK, the answer calls a tool."""

    def __init__(self) -> None:
        super().__init__(Script(), "m")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await scripted.body_of(request)
        last = body["messages"][-1]["content"]
        calls = [ToolCall("task", {"prompt": "SUB: look"})] if last.startswith("WORK") else []
        self.script = Script(default=(ScriptedAnswer(f"{last}!", calls=tuple(calls)),))
        return await super()._chat(request)


async def ask(session: aiohttp.ClientSession, history: list[dict[str, Any]]) -> None:
    async with session.post("chat/completions", json={"messages": history}) as response:
        history.append((await response.json())["choices"][0]["message"])


async def work(session: aiohttp.ClientSession) -> None:
    await ask(session, [user("TITLE")])
    history = [user("WORK")]
    await ask(session, history)
    await ask(session, [user("SUB: look")])
    (call,) = history[-1]["tool_calls"]
    history.append({"role": "tool", "tool_call_id": call["id"], "content": "seen"})
    await ask(session, history)
    for words in ("one", "two"):
        history.append(user(words))
        await ask(session, history)
    await ask(session, [*history[:-2], user("another way")])
    summary = [user("COMPACTED")]
    await ask(session, summary)
    summary.append(user("end"))
    await ask(session, summary)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


TALKS = [
    ["TITLE", "TITLE!"],
    ["WORK", "WORK!", "seen", "seen!", "one", "one!", "two", "two!"],
    ["SUB: look", "SUB: look!"],
    ["WORK", "WORK!", "seen", "seen!", "one", "one!", "another way", "another way!"],
    ["COMPACTED", "COMPACTED!", "end", "end!"],
]
CALLS = [[0], [1, 3, 4, 5], [2], [1, 3, 4, 6], [7, 8]]


@pytest.fixture(params=PROTOCOLS, scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    found: list[Recording] = []

    @in_loop
    async def roll_out() -> None:
        runner = web.AppRunner(Engine().application(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        record = {"server": "p.0", "policy": "default", "key": "k", "model_name": "m", "protocol": request.param}
        async with ModelGateway(wait_s=20) as gateway:
            gateway.update_endpoints([{**record, "url": f"http://127.0.0.1:{runner.addresses[0][1]}"}])
            model = await gateway.open(ID, "default")
            key = {"Authorization": f"Bearer {model.api_key}"}
            async with aiohttp.ClientSession(model.base_url + "/", headers=key) as session:
                await work(session)
            assert [m["content"] for m in gateway.conversation(ID)] == TALKS[4]
            found.append(await gateway.close(ID))
        await runner.cleanup()

    roll_out()
    (recording,) = found
    told = trajectory(0, task="solve", id=ID, messages=recording.messages, sequences=recording.sequences)
    told.turns, told.parents, told.artifacts = recording.turns, recording.parents, [calls_artifact(recording)]
    run = run_dir(tmp_path_factory.mktemp(request.param) / "run")
    commit(run, "a", (0, 0, told), (0, 0, trajectory(5)))
    return run


def row_of(path: Path) -> Row:
    return open_trajectories(path)[ID]


def check(row: Row, tokens: bool = True) -> None:
    """Checks the conversations and calls of a row, and the tokens of each call if they are known."""
    found = row.conversations
    assert [[m["content"] for m in c.messages] for c in found] == TALKS
    assert [[call for call in c.turns if call is not None] for c in found] == CALLS
    assert [(c.started_by, c.parent, c.shared) for c in found] == [
        (None, None, 0),
        (None, None, 0),
        (1, 1, 0),
        (None, 1, 6),
        (None, None, 0),
    ]
    assert [m["content"] for m in row.messages] == TALKS[1]
    for number, turn in enumerate(row.turns):
        asked, answer, same = row.call(number)
        assert same == turn
        assert answer is not None
        assert answer["content"] == asked[-1]["content"] + "!"
        if tokens and turn.sequence >= 0:
            ids = row.sequences[turn.sequence].tokens[turn.token_start : turn.token_end]
            assert bytes(i for i in ids.tolist() if i < 256).decode().startswith(answer["content"])


def test_every_conversation_is_in_journals_and_file_and_its_copies(run: RunDir, tmp_path: Path) -> None:
    check(row_of(run.path))
    path = gather(run)
    assert validate(path) == []
    check(row_of(run.path))
    compact(path, tmp_path / "compact.h5")
    check(row_of(tmp_path / "compact.h5"))
    anonymise(path, tmp_path / "anonymous.h5")
    check(row_of(tmp_path / "anonymous.h5"))
    with open_trajectories(path) as store:
        exports.export(store, ["jsonl"], tmp_path)
    import_jsonl(tmp_path / "trajectories.jsonl", tmp_path / "imported.h5")
    check(row_of(tmp_path / "imported.h5"))


def test_names_are_replaced_in_every_conversation(run: RunDir, tmp_path: Path) -> None:
    anonymise(gather(run), tmp_path / "anonymous.h5", names=["COMPACTED", "TITLE"])
    row = row_of(tmp_path / "anonymous.h5")
    assert [c.messages[0]["content"] for c in row.conversations] == ["user", "WORK", "SUB: look", "WORK", "user"]
    assert row.sequences == []


def test_json_lines_hold_every_conversation_by_the_indices_of_its_messages(run: RunDir, tmp_path: Path) -> None:
    with open_trajectories(run.path) as store:
        exports.export(store, ["jsonl"], tmp_path)
    line = json.loads((tmp_path / "trajectories.jsonl").read_text().splitlines()[0])
    assert [m["content"] for m in line["messages"]] == TALKS[1]
    tree = line["tree"]["messages"]
    assert [[tree[n]["content"] for n in c["messages"]] for c in line["conversations"]] == TALKS
    assert [c["started_by"] for c in line["conversations"]] == [None, None, 1, None, None]
    assert [c["depth"] for c in line["conversations"]] == [0, 0, 1, 0, 0]
    assert sum(len(talk) for talk in TALKS) - 6 == len(tree)  # shared messages are there once


def test_an_atif_step_has_the_tokens_of_its_own_call(run: RunDir, tmp_path: Path) -> None:
    with open_trajectories(run.path) as store:
        exports.export(store, ["atif"], tmp_path)
        row = store[ID]
        answers = [row.call(n).answer for n in range(9)]
        spans = [(t.sequence, t.token_start, t.token_end) for t in row.turns]
        sampled = [row.sequences[s].tokens[a:b].tolist() if s >= 0 else None for s, a, b in spans]
    document = json.loads((tmp_path / "atif/solve/default/0.json").read_text())
    others = {d["trajectory_id"]: d for d in document["subagent_trajectories"]}
    assert sorted(others) == [f"{ID}#{n}" for n in (0, 2, 3, 4)]
    assert {name: d["extra"]["depth"] for name, d in others.items()} == {f"{ID}#{n}": n == 2 for n in (0, 2, 3, 4)}
    steps = [step for d in (document, *others.values()) for step in d["steps"] if step["source"] == "agent"]
    own = [step for step in steps if "metrics" in step]
    assert all(step["is_copied_context"] for step in steps if "metrics" not in step)
    assert sorted(step["message"] for step in own) == sorted(a["content"] for a in answers if a)
    for step in own:
        ids = sampled[[a["content"] for a in answers if a].index(step["message"])]
        assert step["metrics"].get("completion_token_ids") == ids
    (reference,) = [r for s in document["steps"] for r in s.get("observation", {}).get("results", ()) if len(r) == 1]
    assert reference == {"subagent_trajectory_ref": [{"trajectory_id": f"{ID}#2"}]}
    assert document["extra"]["calls_without_a_step"] == 0


def test_show_and_the_report_tell_every_conversation_once(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run.path), ID]) == 0
    shown = capsys.readouterr().out
    assert "5 conversations, the main one is 1" in shown
    for heading in (
        "conversation 1: 4 calls, policy default, starts from scratch",
        "conversation 2: 1 call, policy default, started by call 1 of conversation 1",
        "conversation 3: 1 call, policy default, branches off conversation 1 after [5]",
    ):
        assert heading in shown
    assert "[7] assistant  (call 6)\nanother way!" in shown
    with open_trajectories(run.path) as store:
        told = [message["text"] for message in transcript_of(store[ID])]
    for words in {text for talk in TALKS for text in talk}:
        assert told.count(words) == 1
        assert shown.count(f"\n{words}\n") == 1
    assert main(["show", str(run.path), ID, "--json"]) == 0
    assert [c["depth"] for c in json.loads(capsys.readouterr().out)["conversations"]] == [0, 0, 1, 0, 0]
