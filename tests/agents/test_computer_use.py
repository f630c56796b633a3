"""The agent computer-use with the scripted engine, the real gateway, and a small program in place of a desktop."""

from __future__ import annotations

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from megaflow_hpc import open_trajectories
from megaflow_hpc.agents import create
from megaflow_hpc.agents.computer_use import LEFT, requests_of
from megaflow_hpc.errors import ConfigError, SetupError, UserCodeError
from megaflow_hpc.model.engines.scripted.engine import START
from megaflow_hpc.model.gateway.dialects import content
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.tasks.sets import miniwob
from megaflow_hpc.trajectory import Recording
from megaflow_hpc.types import AgentResult, Task
from tests.support.campaigns import run_local
from tests.support.places import ROOT
from tests.support.screen_program import ScreenSandbox, png
from tests.support.serving import Engines, endpoint, listening

ID = "click/default/0"


def act(action: str, **fields: Any) -> dict[str, Any]:
    """A scripted call of the tool."""
    return {"tool": "computer", "arguments": {"action": action, **fields}}


CLICK, DONE = act("left_click", coordinate=[140, 80]), act("done")


@pytest.fixture
def sandbox(tmp_path: Path) -> ScreenSandbox:
    return ScreenSandbox(tmp_path / "box")


def state(sandbox: ScreenSandbox) -> dict[str, Any]:
    return dict(json.loads((sandbox.root / "screen.json").read_text()))


async def roll(engines: Engines, sandbox: ScreenSandbox, **spec: Any) -> tuple[AgentResult, Recording]:
    agent = create({"name": "computer-use", "max_turns": None, "timeout_s": None, "args": {}, **spec})
    task = Task(id="click", instruction="Press Go.", image="desktop", path="/nowhere")
    async with engines.gateway() as gateway:
        model = await gateway.open(ID, "default")
        result = await agent.run(task, sandbox, model)
        return result, await gateway.close(ID)


def images(messages: list[dict[str, Any]]) -> list[str]:
    contents = [m["content"] for m in messages if isinstance(m["content"], list)]
    return [part["image_url"]["url"] for parts in contents for part in parts if part["type"] == "image_url"]


def script(*answers: Any) -> dict[str, Any]:
    return {"tasks": [{"when": "Press Go", "answers": list(answers)}]}


def test_it_clicks_sees_the_change_and_ends(engines: Engines, sandbox: ScreenSandbox) -> None:
    engines.script(script(CLICK, DONE))
    result, recording = asyncio.run(roll(engines, sandbox, args={"size": "640x480"}))
    assert (result.status, result.exit_code, result.error) == ("completed", 0, "")
    assert state(sandbox)["clicked"]
    assert state(sandbox)["started"] == ["--size", "640x480"]
    assert [m["role"] for m in recording.messages] == ["system", "user", "assistant", "tool", "user", "assistant"]
    assert "The screen has 320x200 pixels." in recording.messages[0]["content"]
    before, after = images(recording.messages)
    assert before != after, "the button changes its colour"
    assert len(recording.sequences) == 1
    assert sum(recording.sequences[0].loss_mask) > 50


def test_an_action_in_the_text_is_carried_out_without_a_tool(engines: Engines, sandbox: ScreenSandbox) -> None:
    said = 'I see {a button}.\n```json\n{"action": "left_click", "coordinate": [140, 80]}\n```'
    engines.script(script(said, '{"action": "done"}'))
    result, recording = asyncio.run(roll(engines, sandbox, args={"tools": False}))
    assert (result.status, result.error, state(sandbox)["clicked"]) == ("completed", "", True)
    assert '"left_click_drag"' in recording.messages[0]["content"], "the prompt describes the actions"
    assert [m["role"] for m in recording.messages] == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(("observe", "pictures", "trees"), [("screenshot", 2, 0), ("tree", 0, 2), ("both", 2, 2)])
def test_it_observes_what_was_asked_for(
    engines: Engines, sandbox: ScreenSandbox, observe: str, pictures: int, trees: int
) -> None:
    engines.script(script(CLICK, DONE))
    _, recording = asyncio.run(roll(engines, sandbox, args={"observe": observe, "scale": "64x40"}))
    assert "The screen has 64x40 pixels." in recording.messages[0]["content"]
    assert len(images(recording.messages)) == pictures
    assert json.dumps(recording.messages).count('button \\"Go\\"') == trees
    if observe == "tree":
        assert all(isinstance(message["content"], str) for message in recording.messages)


def test_malformed_actions_are_answered_with_errors_and_end_the_rollout(
    engines: Engines, sandbox: ScreenSandbox
) -> None:
    outside, unknown = act("left_click", coordinate=[999, 80]), act("fly")
    engines.script(script(outside, unknown, "I do not know.", {"tool": "computer", "arguments": {}}))
    result, recording = asyncio.run(roll(engines, sandbox))
    assert (result.status, result.exit_code) == ("completed", 1)
    assert "3 answers in a row" in result.error
    told = [m["content"] for m in recording.messages if m["role"] == "tool"]
    assert "outside of the screen of 320x200" in told[0]
    assert "action 'fly': expected one of key, type" in told[1]
    assert "expected an action as a JSON object" in json.dumps(recording.messages[-2])


def test_fail_is_the_agents_own_failure_and_a_limit_truncates(engines: Engines, sandbox: ScreenSandbox) -> None:
    engines.script(script(act("wait", duration=0), act("fail", text="there is no such button")))
    result, _ = asyncio.run(roll(engines, sandbox))
    assert (result.status, result.exit_code, result.error) == (
        "completed", 1, "the agent gave up: there is no such button",
    )  # fmt: skip
    result, recording = asyncio.run(roll(engines, sandbox, max_turns=1))
    assert (result.status, len(recording.turns)) == ("truncated", 1)


@pytest.mark.parametrize("history", [0, 20, 5, 2, 1])
def test_a_window_of_screens_costs_what_the_docs_say(engines: Engines, sandbox: ScreenSandbox, history: int) -> None:
    """Thirty screens: the sequences that start, the screens in all of them, and the tokens of such sequences."""
    engines.script(script(*[act("type", text=f"{number} ") for number in range(29)], DONE))
    _, recording = asyncio.run(roll(engines, sandbox, args={"history": history}))
    sequences, screens = len(recording.sequences), sum(len(sequence.images) for sequence in recording.sequences)
    head = [START, *b"assistant\n"]
    steps = sum(
        sequence.tokens[place : place + len(head)].tolist() == head
        for sequence in recording.sequences
        for place in range(len(sequence.tokens))
    )
    cost = (700 * sequences + 1300 * screens + 60 * steps) / (700 + 30 * (1300 + 60))
    page = " ".join((ROOT / "docs" / "how-to" / "agents.md").read_text().split())
    assert "30 screens of 1,300 tokens with 60 tokens of text each, and 700 tokens of instructions" in page
    assert f"| {history or '0 (all)'} | {sequences} | {screens} | {cost:.1f} |" in page
    assert sequences == (1 + math.ceil((30 - history) / math.ceil(history / 2)) if history else 1)
    assert (len(recording.turns), len(recording.images)) == (30, 30), "each screenshot is stored once"


@pytest.mark.parametrize(
    ("sides", "reason"), [((16, 16), "13 images; 12 are allowed"), ((2400, 1600), "longer than 32 MiB")]
)
def test_a_window_beyond_what_a_call_may_have_truncates(
    engines: Engines, sandbox: ScreenSandbox, monkeypatch: pytest.MonkeyPatch, sides: tuple[int, int], reason: str
) -> None:
    monkeypatch.setattr(content, "MAX_IMAGES", 12)
    width, height = sides
    noise = random.Random(7)
    rows = b"".join(b"\0" + noise.randbytes(3 * width) for _ in range(height))
    (sandbox.root / "broken.png").write_bytes(png(width, height, rows))
    engines.script(script(*[act("wait", duration=0)] * 13, DONE))
    result, _ = asyncio.run(roll(engines, sandbox, args={"history": 0}))
    assert result.status == "truncated"
    assert reason in result.error


def test_the_last_prompt_has_the_last_screenshots(engines: Engines, sandbox: ScreenSandbox) -> None:
    typed = [act("type", text=f"{number} ") for number in range(6)]
    engines.script(script(*typed, DONE))

    async def scenario() -> list[dict[str, Any]]:
        agent = create({"name": "computer-use", "max_turns": None, "timeout_s": None, "args": {"history": 3}})
        task = Task(id="click", instruction="Press Go.", image="desktop", path="/nowhere")
        async with engines.gateway() as gateway:
            model = await gateway.open(ID, "default")
            await agent.run(task, sandbox, model)
            return list(gateway.conversation(ID))

    messages = asyncio.run(scenario())
    shown = [message for message in messages if message["role"] == "user"]
    gone = [LEFT in json.dumps(message) for message in shown]
    assert gone == [True] * 4 + [False] * 3
    assert shown[0]["content"].startswith("Press Go."), "the instruction stays"
    assert len(set(images(messages))) == 3


def test_a_display_that_dies_is_named(engines: Engines, sandbox: ScreenSandbox) -> None:
    engines.script(script(act("type", text="x"), DONE))
    state_file = sandbox.root / "screen.json"
    run = sandbox.exec

    async def dying(command: Any, **options: Any) -> Any:
        if command[1:2] == ["do"] and '"type"' in command[2]:
            state_file.unlink()
        return await run(command, **options)

    sandbox.exec = dying  # type: ignore[method-assign]
    with pytest.raises(SetupError, match="display of the sandbox is lost: the display does not answer"):
        asyncio.run(roll(engines, sandbox))


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a" + bytes(60), b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\0\1\x86\xa0" * 2 + bytes(20)]
)
def test_a_screenshot_that_is_no_picture_of_a_screen_is_refused(
    engines: Engines, sandbox: ScreenSandbox, data: bytes
) -> None:
    """The last one claims to have 100,000 by 100,000 pixels."""
    engines.script(script(DONE))
    (sandbox.root / "broken.png").write_bytes(data)
    with pytest.raises(SetupError, match="its screenshot is not a PNG"):
        asyncio.run(roll(engines, sandbox))


def test_an_image_without_the_program_is_named(engines: Engines, sandbox: ScreenSandbox) -> None:
    engines.script(script(DONE))
    run = sandbox.exec

    async def missing(command: Any, **options: Any) -> Any:
        return await run("exec no-such-program", **options)

    sandbox.exec = missing  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="the image has no program screen"):
        asyncio.run(roll(engines, sandbox))


async def test_a_model_without_images_is_named_with_the_remedy(sandbox: ScreenSandbox) -> None:
    """The engine answers as vLLM does for a model that takes text only."""

    async def refuse(request: web.Request) -> web.Response:
        error = {"message": "At most 0 image(s) may be provided in one prompt.", "type": "BadRequestError", "code": 400}
        return web.json_response({"error": error}, status=400)

    application = web.Application(client_max_size=2**26)
    application.router.add_post("/v1/chat/completions", refuse)
    agent = create({"name": "computer-use", "max_turns": None, "timeout_s": None, "args": {}})
    task = Task(id="click", instruction="Press Go.", image="desktop", path="/nowhere")
    async with listening(application) as port, ModelGateway(wait_s=5) as gateway:
        gateway.update_endpoints([endpoint(port, "default", protocol="plain")])
        model = await gateway.open(ID, "default")
        with pytest.raises(UserCodeError, match=r"At most 0 image.*args: \{observe: tree\}"):
            await agent.run(task, sandbox, model)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"observe": "video"}, "observe 'video': expected one of screenshot, tree, both"),
        ({"actions": "playwright"}, "actions 'playwright': expected one of computer, browsergym"),
        ({"history": -1}, "history -1: expected 0"),
        ({"size": "big"}, "size 'big': expected WIDTHxHEIGHT"),
        ({"scale": "0x9"}, "scale '0x9': expected WIDTHxHEIGHT"),
        ({"scale": "5000x4000"}, "scale '5000x4000': expected WIDTHxHEIGHT, such as 1280x800, of 16 to 4096 pixels"),
        ({"size": "1280x15"}, "size '1280x15': expected WIDTHxHEIGHT, such as 1280x800, of 16 to 4096 pixels"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create({"name": "computer-use", "max_turns": None, "timeout_s": None, "args": args})


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"action": "screenshot"} and then {"action": "done"}', "done"),
        ('{"plan": {"action": "no"}} {"action": "wait", "duration": 1}', "wait"),
        ("{" * 5000 + '{"action": "done"}', None),
        ("", None),
        ("[1, 2", None),
    ],
)
def test_the_last_action_of_a_text_counts(text: str, action: str | None) -> None:
    (request,) = requests_of({"role": "assistant", "content": text})
    assert [each["action"] for each in request.actions] == ([action] if action else [])
    assert bool(request.problem) == (action is None)


# --- the whole way ----------------------------------------------------------------------------------------------------


TASK = """\
[agent]
timeout_sec = 240.0

[environment]
docker_image = "desktop"
workdir = "/work"

[environment.env]
SCREEN_RUN = "{run}"
"""
TYPED = [
    act("wait", duration=3),
    act("left_click", coordinate=[200, 150]),  # in the screenshot of half the screen's size
    act("type", text="forty-two\n"),
    act("key", text="ctrl+s"),
    act("wait", duration=1),
    DONE,
]


def rolled(folder: Path, desktop_sif: Path, answers: dict[str, list[Any]], args: dict[str, Any]) -> dict[str, Any]:
    """Runs a campaign of tasks whose instructions contain these words, and returns each one's trajectory."""
    script = [{"when": words, "answers": said} for words, said in answers.items()]
    (folder / "answers.yaml").write_text(yaml.safe_dump({"tasks": script}))
    campaign = {
        "name": "desktop",
        "tasks": "tasks/*",
        "agent": {"name": "computer-use", "args": args},
        "model": {"engine": "scripted", "script": "answers.yaml"},
        "environment": {"network": "none", "images": {"desktop": str(desktop_sif)}},
    }
    (folder / "campaign.yaml").write_text(yaml.safe_dump(campaign))
    result, done = run_local(folder / "campaign.yaml")
    assert done.returncode == 0, done.stderr
    with open_trajectories(result["run"]) as store:
        return {row.task_id: row.trajectory() for row in store}


EDITOR = "l3afpad /work/answer"
EDITED: dict[str, tuple[list[Any], str]] = {
    "typed": (TYPED, EDITOR),
    "idle": ([DONE], EDITOR),
    "dies": ([act("wait", duration=6), DONE], "sleep 3; pkill Xvfb"),
}
"""What the model does, and the program that the desktop starts. A display that dies after an answer is the agent's."""


@pytest.mark.slow
def test_a_campaign_with_a_desktop_task_has_its_reward_and_its_screenshots(tmp_path: Path, desktop_sif: Path) -> None:
    """One model types into an editor on the desktop and saves, and the tests find the file."""
    for name, (_, run) in EDITED.items():
        (tmp_path / "tasks" / name / "tests").mkdir(parents=True)
        (tmp_path / "tasks" / name / "task.toml").write_text(TASK.format(run=run))
        (tmp_path / "tasks" / name / "instruction.md").write_text(f"Write forty-two with the editor: {name}.\n")
        test = 'if grep -q forty-two /work/answer; then r=1; else r=0; fi; echo "$r" > /logs/verifier/reward.txt\n'
        (tmp_path / "tasks" / name / "tests" / "test.sh").write_text(test)
    answers = {f"the editor: {name}": said for name, (said, _) in EDITED.items()}
    found = rolled(tmp_path, desktop_sif, answers, {"size": "800x600", "scale": "400x300", "history": 3})
    lost = found.pop("dies")
    assert (lost.status, lost.reward, lost.attempt, lost.error_kind) == ("completed", 0.0, 0, "agent"), lost.error
    assert "the display of the sandbox is lost: display lost" in lost.error
    for name, reward in {"typed": 1.0, "idle": 0.0}.items():
        trajectory, turns = found[name], len(EDITED[name][0])
        assert (trajectory.status, trajectory.reward, trajectory.error) == ("completed", reward, "")
        assert len(trajectory.turns) == turns
        assert len(trajectory.sequences) == 1 + math.ceil(max(0, turns - 3) / 2)
        shown = {span.image for sequence in trajectory.sequences for span in sequence.images}
        assert shown == trajectory.images.keys()
        assert {(image.width, image.height) for image in trajectory.images.values()} == {(400, 300)}


FIRST, SECOND = [act("key", text="Tab")], [act("key", text="Tab")] * 2
PRESS = act("key", text="space")
PLAYED = {
    "solved": ([*FIRST, PRESS, DONE], 1.0, ""),
    "failed": ([*SECOND, PRESS, DONE], 0.0, ""),
    "ended": ([*SECOND, PRESS, act("key", text="0xfed5"), act("wait", duration=1), DONE], 0.0, "display lost"),
}
"""The last model presses the wrong button, and then the keys that end the X server, for another attempt."""


@pytest.mark.slow
def test_a_campaign_on_a_page_of_miniwob_has_the_pages_reward_and_one_attempt(
    tmp_path: Path, desktop_sif: Path
) -> None:
    for name in PLAYED:
        asked = miniwob.AskedPage("click-test-2", "1", f"Click button ONE: {name}.")
        miniwob.write_task(tmp_path / "written", asked, "1.1.0")
        (written,) = (tmp_path / "written").iterdir()
        (tmp_path / "tasks").mkdir(exist_ok=True)
        written.rename(tmp_path / "tasks" / name)
    answers = {f"button ONE: {name}": said for name, (said, _, _) in PLAYED.items()}
    found = rolled(tmp_path, desktop_sif, answers, {"scale": "252x330"})
    for name, (_, reward, error) in PLAYED.items():
        trajectory = found[name]
        assert (trajectory.status, trajectory.reward, trajectory.attempt) == ("completed", reward, 0), name
        assert error in trajectory.error
        assert bool(trajectory.error) == bool(error)
        assert {(image.width, image.height) for image in trajectory.images.values()} == {(252, 330)}
        assert "Only the first outcome counts." in trajectory.messages[1]["content"][0]["text"]
