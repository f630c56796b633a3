"""The agent computer-use with BrowserGym's actions: what it reads of answers, and pages of MiniWoB++ that it solves."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.agents import create
from megaflow_hpc.agents.computer_use import MAX_CALLS, requests_of
from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.model.engines.scripted.engine import ScriptedEngine
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer, ToolCall
from megaflow_hpc.screen import WEB_ACTIONS, web_actions, web_calls
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.tasks.sets import miniwob
from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task
from tests.support.desktops import played
from tests.support.places import ROOT
from tests.support.screen_program import ScreenSandbox
from tests.support.serving import gateway_before

ID = "page/default/0"
ALL = web_actions("both")


def do(action: str, **fields: Any) -> dict[str, Any]:
    """An action of the screen."""
    return {"action": action, **fields}


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        ("click('51')", [{"action": "left_click", "element": "51"}]),
        ("click('51', button='right')", [{"action": "right_click", "element": "51"}]),
        ("click(bid='5', modifiers=['Shift', 'ControlOrMeta'])", [do("left_click", element="5", text="shift+ctrl")]),
        ("dblclick('5')", [{"action": "double_click", "element": "5"}]),
        ("hover('5')", [{"action": "mouse_move", "element": "5"}]),
        ("fill('237', 'two\\nlines')", [{"action": "fill", "element": "237", "text": "two\nlines"}]),
        ("fill('2', 'Mont', True)", [do("fill", element="2", text="Mon"), do("type", text="t")]),
        ("clear('2')", [{"action": "fill", "element": "2", "text": ""}]),
        ("focus('2')", [{"action": "focus", "element": "2"}]),
        ("press('88', 'Enter')", [{"action": "focus", "element": "88"}, {"action": "key", "text": "Return"}]),
        ("press('88', '+')", [{"action": "focus", "element": "88"}, {"action": "type", "text": "+"}]),
        ("keyboard_press('Control++')", [{"action": "key", "text": "ctrl+plus"}]),
        ("keyboard_press('Meta+Shift+KeyT')", [{"action": "key", "text": "super+shift+t"}]),
        ("keyboard_type('Hi!')", [{"action": "type", "text": "Hi!"}]),
        ("select_option('48', 'blue')", [{"action": "select", "element": "48", "options": ["blue"]}]),
        ("select_option('48', ['a', 'b'])", [{"action": "select", "element": "48", "options": ["a", "b"]}]),
        ("drag_and_drop('5', '6')", [{"action": "left_click_drag", "start_element": "5", "element": "6"}]),
        ("scroll(-50.5, 200)", [{"action": "scroll", "delta": [-50.5, 200.0]}]),
        ("mouse_click(3, 4.5, 'right')", [{"action": "right_click", "coordinate": [3.0, 4.5]}]),
        (
            "mouse_drag_and_drop(1, 2, 3, 4)",
            [do("left_click_drag", start_coordinate=[1, 2], coordinate=[3, 4])],
        ),
        ("noop(500)", [{"action": "wait", "duration": 0.5}]),
        ("goto('http://a.example')", [{"action": "goto", "url": "http://a.example"}]),
        ("go_back()", [{"action": "go_back"}]),
        ("send_msg_to_user('Done.')", [{"action": "done", "text": "Done."}]),
        ("report_infeasible('No such field.')", [{"action": "fail", "text": "No such field."}]),
    ],
)
def test_a_call_becomes_actions_of_the_screen(text: str, actions: list[dict[str, Any]]) -> None:
    (request,) = requests_of({"content": text}, ALL)
    assert (request.problem, request.actions) == ("", actions)


def test_a_tool_call_is_the_same_as_a_text() -> None:
    function = {"name": "fill", "arguments": '{"bid": "2", "value": "x"}'}
    (called,) = requests_of({"tool_calls": [{"id": "c", "function": function}]}, ALL)
    (written,) = requests_of({"content": "fill('2', 'x')"}, ALL)
    assert (called.actions, called.call_id) == (written.actions, "c")
    for name, arguments in (("fly", "{}"), ("fill", "[1]"), ("fill", '{"bid": 2, "value": "x"}'), ("fill", "{" * 9999)):
        function = {"name": name, "arguments": arguments}
        (called,) = requests_of({"tool_calls": [{"id": "c", "function": function}]}, ALL)
        assert called.problem
        assert not called.actions


@pytest.mark.parametrize(
    "text",
    [
        "<think>click('1')</think>I try click('2').\n<action>\nclick('3')\nnoop()\n</action> I hope.",
        "First <action>click('1')</action>, no: <action>click('3')\nnoop()</action>",
        "I press it.\n```python\nclick('3')\nnoop()\n```\nThat is all.",
        "```\nclick('1')\n```\nNo, rather\n```click('3'); noop()```",
        "I wonder about click('1').\n`click('3'); noop()`\n",
    ],
)
def test_the_last_part_of_an_answer_counts(text: str) -> None:
    first, second = requests_of({"content": text}, ALL)
    assert [first.actions[0].get("element"), second.actions[0]["action"]] == ["3", "wait"]


HOSTILE = [
    "",
    "I do not know.",
    "__import__('os').system('touch /tmp/pwned')",
    "click(open('/etc/passwd').read())",
    "click(__import__('os').getcwd())",
    "click('1') if True else click('2')",
    "x = click('1')",
    "click('1').x",
    "click(*['1'])",
    "click(**{'bid': '1'})",
    "click(f'{1}')",
    "click('1' * 10**9)",
    "click([x for x in '1'])",
    "click(lambda: 1)",
    "(lambda: click('1'))()",
    "import os",
    "click('1'",
    "click('1\0')\0",
    "click('\ud800",
    "f" + "()" * 40_000,
    "-" * 90_000 + "1",
    "click(" + "-" * 3000 + "1)",
    "[" * 90_000,
    "click(" * 150 + ")" * 150,
    "not " * 20_000 + "x",
    "click(" + "1+" * 40_000 + "1)",
    "click(" + "9" * 90_000 + ")",
    "f'{" * 30_000,
    "click(" + "{1:" * 150 + "1" + "}" * 150 + ")",
    "click('" + "a" * 200_000 + "')",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_but_calls_with_literals_is_read(text: str) -> None:
    (request,) = requests_of({"content": text}, ALL)
    assert not request.actions
    assert 0 < len(request.problem) < 500
    assert " at 0x" not in request.problem, "no address of this process"
    assert not Path("/tmp/pwned").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fly('1')", "action 'fly': expected one of click, "),
        ("eval('1')", "action 'eval': expected one of click, "),
        ("steps('1')", "action 'steps': expected one of click, "),
        ("click(51)", "click: bid: Expected `str`, got `int`"),
        ("click()", "click: missing a required argument: 'bid'"),
        ("click('1', button='fifth')", "click: button: Invalid enum value 'fifth'"),
        ("click('1', modifiers=['Hyper'])", "click: modifiers: Invalid enum value 'Hyper'"),
        ("fill('1', None)", "fill: value: Expected `str`"),
        ("fill('1', b'x')", "fill: value: Expected `str`, got `bytes`"),
        ("scroll('down')", "scroll: missing a required argument: 'delta_y'"),
        ("mouse_click(True, 1)", "mouse_click: x: Expected `float`, got `bool`"),
        ("click('" + "\\x00" * 20_000 + "')", "the action is longer than 100000 characters"),
    ],
)
def test_a_wrong_call_is_named_and_is_no_malformed_answer(text: str, problem: str) -> None:
    (request,) = requests_of({"content": f"<action>{text}</action>"}, ALL)
    assert request.problem.startswith(problem)
    assert (request.actions, request.is_call) == ((), True)


def test_the_calls_of_an_answer_are_bounded() -> None:
    assert len(requests_of({"content": f"<action>{'noop();' * 14_000}</action>"}, ALL)) == MAX_CALLS + 1


@pytest.mark.parametrize(
    ("observe", "offered", "missing"),
    [
        ("tree", {"click", "scroll", "goto"}, {"mouse_click"}),
        ("screenshot", {"mouse_click", "scroll", "goto"}, {"click"}),
        ("both", {"click", "mouse_click", "scroll"}, set()),
    ],
)
def test_actions_need_what_the_model_sees(observe: str, offered: set[str], missing: set[str]) -> None:
    names = set(web_actions(observe))
    assert offered <= names
    assert not names & missing


def test_tools_have_the_parameters_of_the_calls() -> None:
    for name, action in WEB_ACTIONS.items():
        function = action.tool()["function"]
        assert function["name"] == name
        assert list(function["parameters"]["properties"]) == list(inspect.signature(action.function).parameters)
        json.dumps(function)
    assert WEB_ACTIONS["click"].tool()["function"]["parameters"]["required"] == ["bid"]
    assert WEB_ACTIONS["click"].usage() == "click(bid, button='left', modifiers=()): Clicks an element."


def test_the_page_of_agents_lists_every_action() -> None:
    page = (ROOT / "docs" / "how-to" / "agents.md").read_text()
    table = page.partition("### BrowserGym's actions")[2].partition("**Ids.**")[0]
    rows = "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)\(", rows)) == set(WEB_ACTIONS)
    for name, arguments in re.findall(r"`(\w+)\((.*?)\)`", rows):
        parameters = list(inspect.signature(WEB_ACTIONS[name].function).parameters)
        listed = re.findall(r"(\w+)(?:=[^,]*)?(?:, |$)", arguments)
        assert listed == parameters[: len(listed)], name


# --- a rollout --------------------------------------------------------------------------------------------------------

Move = Callable[[str], str]
"""Returns an answer to the text of a message with a tree."""


@dataclass(frozen=True)
class Player(Script):
    """The answers of a scripted engine, each found from what the model was shown last. The last one repeats."""

    moves: Sequence[Move] = ()

    def answer(self, messages: Sequence[Any], tools: Sequence[str] = ()) -> ScriptedAnswer:
        turn = sum(message["role"] == "assistant" for message in messages)
        move = self.moves[min(turn, len(self.moves) - 1)]
        text = move(str(messages[-1]["content"]))
        if not tools:
            return ScriptedAnswer(f"I act.\n<action>{text}</action>")
        calls = []
        for name, positional, named in web_calls(text):
            parameters = inspect.signature(WEB_ACTIONS[name].function).parameters
            calls.append(ToolCall(name, {**dict(zip(parameters, positional, strict=False)), **named}))
        return ScriptedAnswer("", calls=tuple(calls))


class Browsing:
    """The agent with a scripted model of its own. Keeps the conversation."""

    def __init__(self, *moves: Move, **args: Any) -> None:
        self._engine = ScriptedEngine(Player(moves=moves), "default")
        given = {"actions": "browsergym", "tools": False, "history": 0, **args}
        self._agent = create({"name": "computer-use", "max_turns": 12, "timeout_s": None, "args": given})
        self.messages: list[Any] = []

    async def run(self, task: Task, sandbox: Sandbox, _: ModelEndpoint | None) -> AgentResult:
        """Run one rollout."""
        async with gateway_before(self._engine) as gateway:
            model = await gateway.open(ID, "default")
            try:
                return await self._agent.run(task, sandbox, model)
            finally:
                self.messages = list(gateway.conversation(ID))
                await gateway.close(ID)


def always(text: str) -> Move:
    """An answer that ignores what is shown."""
    return lambda shown: text


@pytest.fixture
def sandbox(tmp_path: Path) -> ScreenSandbox:
    return ScreenSandbox(tmp_path / "box")


GO = Task(id="page", instruction="Press Go.", image="desktop", path="/nowhere")


@pytest.mark.parametrize("tools", [False, True], ids=["text", "tools"])
def test_wrong_and_stale_actions_are_answered_and_the_rollout_continues(sandbox: ScreenSandbox, tools: bool) -> None:
    wrong = [always(text) for text in ("click('99')", "focus('98')", "hover('97')", "click('96')")]
    agent = Browsing(*wrong, always("click('12')"), always("send_msg_to_user('Pressed.')"), tools=tools)
    result = asyncio.run(agent.run(GO, sandbox, None))
    assert (result.status, result.exit_code, result.error) == ("completed", 0, "")
    assert json.loads((sandbox.root / "screen.json").read_text())["clicked"]
    told = json.dumps(agent.messages)
    assert told.count("is not on the page") == 4
    assert told.count("[12] button 'Go', pressed") == 1


def test_what_follows_a_failed_call_is_left_out(sandbox: ScreenSandbox) -> None:
    agent = Browsing(always("keyboard_type('a')\nclick('99')\nkeyboard_type('b')"), always("report_infeasible('no')"))
    result = asyncio.run(agent.run(GO, sandbox, None))
    assert (result.exit_code, result.error) == (1, "the agent gave up: no")
    assert json.loads((sandbox.root / "screen.json").read_text())["text"] == "a"
    assert [message["role"] for message in agent.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_only_answers_without_a_call_end_the_rollout(sandbox: ScreenSandbox) -> None:
    agent = Browsing(always("click(51)"), always("fly()"), always("go()"), always("click("))
    result = asyncio.run(agent.run(GO, sandbox, None))
    assert result.error == "3 answers in a row had no valid action"
    assert sum(message["role"] == "assistant" for message in agent.messages) == 6


@pytest.mark.parametrize(("observe", "pictures"), [(None, 0), ("both", 2)])
def test_the_tree_is_what_it_observes(sandbox: ScreenSandbox, observe: str | None, pictures: int) -> None:
    args = {} if observe is None else {"observe": observe}
    agent = Browsing(always("noop(0)"), always("send_msg_to_user('')"), **args)
    asyncio.run(agent.run(GO, sandbox, None))
    told = json.dumps(agent.messages)
    assert (told.count("[12] button 'Go'"), told.count('"type": "image_url"')) == (2, pictures)
    assert ("mouse_click(x, y" in agent.messages[0]["content"]) == bool(pictures)


# --- pages of MiniWoB++ -----------------------------------------------------------------------------------------------


LITERAL = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""


def bid(shown: str, role: str, name: str | None = None) -> str:
    """Return the id of the first element with a role and, if one is given, a name."""
    for found in re.finditer(rf"\[(\w+)\] {role} {LITERAL}", shown):
        if name in (None, ast.literal_eval(found[2])):
            return found[1]
    raise AssertionError(f"no {role} {name!r} in {shown}")


def on(shown: str, action: str, role: str, name: str | None = None, *more: Any) -> str:
    """Return a call on an element."""
    return f"{action}({', '.join(map(repr, (bid(shown, role, name), *more)))})\n"


def asked(shown: str, pattern: str) -> str:
    """Return a part of what the page asks for."""
    text = " ".join(ast.literal_eval(name) for name in re.findall(f"StaticText {LITERAL}", shown))
    found = re.search(pattern, text)
    assert found, text
    return found[1].strip()


def submit(shown: str) -> str:
    return on(shown, "click", "button", "Submit")


def click_link(shown: str) -> str:
    name = asked(shown, 'link "(.*?)"')
    found = re.search(rf"\[(\w+)\] generic, clickable\n\t*StaticText {re.escape(repr(name))}", shown)
    assert found, shown
    return f"click({found[1]!r})"


def enter_date(shown: str) -> str:
    month, day, year = asked(shown, r"Enter (\S+) as the date").split("/")
    return on(shown, "fill", "Date", None, f"{year}-{month}-{day}") + submit(shown)


def copy_paste(shown: str) -> str:
    boxes = {bool(value): box for box, value in re.findall(r"\[(\w+)\] textbox ''( value=)?", shown)}
    copied = f"press({boxes[True]!r}, 'Control+a')\nkeyboard_press('Control+c')\n"
    return f"{copied}press({boxes[False]!r}, 'Control+v')\n{submit(shown)}"


def scroll_text(shown: str) -> str:
    down = asked(shown, "to the (bottom|top) of") == "bottom"
    return on(shown, "hover", "textbox") + f"scroll(0, {9000 if down else -9000})\nnoop(300)\n" + submit(shown)


def drag_items(shown: str) -> str:
    items = re.findall(rf"\[(\w+)\] listitem.*\n(?:\t*\[.*\n)*\t*StaticText {LITERAL}", shown)
    names = [ast.literal_eval(name) for _, name in items]
    place = names.index(asked(shown, r"Drag (\S+) "))
    where = asked(shown, r"Drag \S+ (to the \w+|up|down)")
    known = {"up": place - 1, "down": place + 1, "to the top": 0, "to the bottom": len(items) - 1}
    target = known[where] if where in known else int(re.sub(r"\D", "", where)) - 1
    return f"drag_and_drop({items[place][0]!r}, {items[target][0]!r})"


PAGES: dict[str, Move] = {
    "click-link": click_link,
    "enter-date": enter_date,
    "copy-paste": copy_paste,
    "scroll-text-2": scroll_text,
    "drag-items": drag_items,
}
END = always("send_msg_to_user('Done.')")


def play(page: str, agent: Browsing, image: Path, scratch: Path, where: Path) -> tuple[float, str]:
    """Run one rollout. Return its reward and error. The page itself shows what it asks for."""
    miniwob.write_task(where / "tasks", miniwob.AskedPage(page, "5", "Do what the page asks for."), "1.1.0")
    [task] = load_tasks([f"{where}/tasks/*"], "/")

    async def run() -> tuple[float, str]:
        async with ApptainerProvider(scratch) as provider:
            return await played(task, {"desktop": str(image)}, provider, agent)

    return asyncio.run(run())


@pytest.mark.parametrize("page", PAGES)
def test_pages_of_miniwob_are_solved_by_ids(page: str, desktop_sif: Path, scratch: Path, tmp_path: Path) -> None:
    agent = Browsing(PAGES[page], END)
    assert play(page, agent, desktop_sif, scratch, tmp_path) == (1.0, ""), json.dumps(agent.messages, indent=1)


def test_on_a_real_page_errors_are_read_and_an_element_keeps_its_id(
    desktop_sif: Path, scratch: Path, tmp_path: Path
) -> None:
    """The last move uses an id of the first tree."""
    ids: list[str] = []

    def note(shown: str) -> str:
        ids.extend([bid(shown, "combobox"), asked(shown, "Select (.*) from the list"), bid(shown, "button", "Submit")])
        return "click('9999')"

    moves: list[Move] = [
        note,
        lambda shown: on(shown, "select_option", "combobox", None, "Nowhere"),
        lambda shown: on(shown, "fill", "button", "Submit", "x"),
        lambda shown: "goto('http://127.0.0.1/')",
        lambda shown: "click(1)",
        lambda shown: f"select_option({ids[0]!r}, {ids[1]!r})\nclick({ids[2]!r})",
        lambda shown: f"click({ids[2]!r})",
        END,
    ]
    agent = Browsing(*moves)
    assert play("choose-list", agent, desktop_sif, scratch, tmp_path) == (1.0, "")
    told = [str(message["content"]) for message in agent.messages if message["role"] == "user"]
    assert [re.findall(r"^error: (.*)$", text, re.MULTILINE) for text in told[1:6]] == [
        ["element '9999' is not on the page; look at it again for the present ids"],
        [f'element {ids[0]!r} has no option "Nowhere"'],
        [f"element {ids[2]!r} is not a field for text"],
        ["goto: the page of this task must not be left"],
        ["click: bid: Expected `str`, got `int`"],
    ]
    assert "error: " not in told[6]
    assert "is covered by another element" in told[7], "the episode has ended"
