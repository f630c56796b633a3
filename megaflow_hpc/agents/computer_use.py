"""An agent that controls a desktop: it sees screenshots, an accessibility tree or both, and responds with actions.

The sandbox needs only the program ``screen``::

    screen ── screenshot, tree ──► observation ──► model ── call of `computer` ──► screen do ACTION ──► observation …

An action is a call of the tool ``computer`` or, for models without tool calls, a JSON object in the answer. By default,
the agent offers the actions of Anthropic's computer tool (:mod:`megaflow_hpc.screen`), plus ``done`` and ``fail``,
which end the rollout. With ``actions: browsergym``, it offers BrowserGym's actions instead. Each of them is a tool or,
without tool calls, a call in the answer such as ``click('12')``, in which ``12`` is an element's id in the tree. A
malformed action is answered with an error that the model can read.

A prompt has at most ``history`` observations. When another one does not fit, the oldest half is dropped at once. Each
drop changes the beginning of the prompt and makes the recorder start a new sequence, so drops should be rare. With
``n`` observations and ``k`` per prompt, there are at most ``ceil((n - k) / ceil(k / 2))`` drops.

A display counts as lost if it twice in a row provides no picture. The model's own key presses can end the display.
Therefore a loss after the model's first answer counts as the agent's failure: the rollout is verified as it is, and not
retried.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megaflow_hpc.agents.asking import BudgetExceeded, CallRefused, complete
from megaflow_hpc.errors import ConfigError, SetupError, UserCodeError
from megaflow_hpc.screen import ACTIONS, WEB_ACTIONS, parameters, web_actions, web_calls
from megaflow_hpc.types import AgentResult, ExecResult, ModelEndpoint, Sandbox, Task

PICTURE = "/tmp/megaflow-screen.png"
"""Path of a screenshot in the sandbox."""
START_TIMEOUT_S, ACTION_TIMEOUT_S = 180.0, 120.0
"""Time limits in seconds. The limit of an action exceeds a minute, because an action may wait that long."""
MAX_ACTION_CHARACTERS = 100_000
"""Maximum length of an action in characters, because Linux limits a program argument to 128 KiB."""
MAX_CALLS = 16
"""Maximum number of actions that are carried out per answer."""
MAX_TREE_CHARACTERS = 20_000
MAX_PICTURE_BYTES = 16 * 2**20
MAX_PICTURE_PIXELS = 2**24
_PNG = struct.Struct(">8sI4sII")
"""Start of a PNG file: its signature, then the length, name, width and height of its header."""
MIN_SIDE, MAX_SIDE = 16, 4096
"""Minimum and maximum width and height of a display in pixels, as in the program ``screen``."""
_SIZE = re.compile(r"(\d{2,4})x(\d{2,4})")
OBSERVATIONS = ("screenshot", "tree", "both")
VOCABULARIES = {"computer": "screenshot", "browsergym": "tree"}
"""Maps each set of actions to its default observation."""
ENDS = ("done", "fail")
PROMPT = """\
You work on the desktop of a Linux computer to carry out the user's task. The screen has {size} pixels. {see}
{act}
If the task is carried out, end with the action "done". If it cannot be carried out, end with the action "fail" and the
reason as "text"."""
SEE = {
    "screenshot": "After each action you see a screenshot.",
    "tree": "After each action you see the screen as a tree of its elements with their coordinates.",
    "both": "After each action you see a screenshot, and its elements as a tree with their coordinates.",
}
CALL = "Act by calling the tool computer. Coordinates are pixels of the screenshot, from its upper left corner."
WRITE = """\
Answer with one action as a JSON object, such as {"action": "left_click", "coordinate": [640, 400]}. Coordinates are
pixels of the screenshot, from its upper left corner. Actions and their fields, as a JSON schema:
"""
WEB_PROMPT = """\
You work on a page in a web browser to carry out the user's task. {see}
{act}
If the task is carried out, end with send_msg_to_user. If it cannot be carried out, end with report_infeasible."""
_PICTURE = "After each action you see a screenshot. Coordinates are its pixels, from its upper left corner."
_TREE = "After each action you see the accessibility tree of the page, with the ids of its elements in brackets."
WEB_SEE = {"screenshot": _PICTURE, "tree": _TREE, "both": f"{_PICTURE} {_TREE}"}
WEB_CALL = "Act by calling the tools."
WEB_WRITE = """\
Answer with an action between <action> and </action>, such as <action>click('12')</action>. Actions:
"""
LEFT = "(an earlier screen that is no longer shown)"


class ComputerUseAgent:
    """Works on a desktop with a model that sees the screen.

    Args:
        max_turns: Maximum number of model calls before the rollout is truncated. ``None`` means no limit.
        actions: ``computer``, or ``browsergym`` for a desktop with a browser.
        observe: ``screenshot``, ``tree`` (for models without images) or ``both``. Default: ``screenshot``, or ``tree``
            with ``browsergym``.
        history: Maximum number of observations in a prompt. 0 means no limit.
        size: Size of the screen as ``WIDTHxHEIGHT``. Default: the program's default.
        scale: Size of screenshots as ``WIDTHxHEIGHT``. Coordinates are pixels of the screenshot. Default: the screen's
            size.
        tools: If false, offers no tool, and reads an action from the answer's text.
        model: Options for every model call: ``temperature``, ``max_tokens``, …
        max_format_errors: Number of consecutive answers without a valid action after which the agent gives up.
    """

    def __init__(
        self,
        *,
        max_turns: int | None = None,
        actions: str = "computer",
        observe: str | None = None,
        history: int = 5,
        size: str = "",
        scale: str = "",
        tools: bool = True,
        model: Mapping[str, Any] | None = None,
        max_format_errors: int = 3,
    ) -> None:
        if actions not in VOCABULARIES:
            raise ConfigError(f"agent computer-use: actions {actions!r}: expected one of {', '.join(VOCABULARIES)}")
        observe = observe or VOCABULARIES[actions]
        if observe not in OBSERVATIONS:
            raise ConfigError(f"agent computer-use: observe {observe!r}: expected one of {', '.join(OBSERVATIONS)}")
        if not isinstance(history, int) or history < 0:
            raise ConfigError(f"agent computer-use: history {history!r}: expected 0 (no limit) or a positive number")
        for name, value in (("size", size), ("scale", scale)):
            sides = _SIZE.fullmatch(str(value))
            if value and not (sides and all(MIN_SIDE <= int(side) <= MAX_SIDE for side in sides.groups())):
                raise ConfigError(
                    f"agent computer-use: {name} {value!r}: expected WIDTHxHEIGHT, such as 1280x800, of {MIN_SIDE} to "
                    f"{MAX_SIDE} pixels each"
                )
        self.max_turns, self.observe, self.history = max_turns, observe, history
        self.web = web_actions(observe) if actions == "browsergym" else ()
        self.size, self.scale, self.tools = size, scale, tools
        self.model_options, self.max_format_errors = dict(model or {}), max_format_errors

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Works until the model ends the rollout or a limit is reached.

        Raises:
            ConfigError: ``model`` is ``None``, or the image has no program ``screen``.
            UserCodeError: The model refused a call, such as one with an image.
            ModelServiceError, SandboxError: No engine responded, or the sandbox was lost.
            SetupError: The display did not start, or was lost.
        """
        if model is None:
            raise ConfigError("agent computer-use needs a model, but the campaign has none")
        screen = Screen(sandbox, self.scale, self.observe, ids=bool(self.web))
        size = await screen.start(self.size)
        chat = ScreenChat(self._system(self.scale or size), task.instruction, self.history)
        chat.show(await screen.look())
        tools = [WEB_ACTIONS[name].tool() for name in self.web] or [TOOL]
        options = {**self.model_options, "tools": tools} if self.tools else self.model_options
        errors = turns = 0
        while self.max_turns is None or turns < self.max_turns:
            turns += 1
            try:
                message = (await complete(model, chat.messages, options))["message"]
            except BudgetExceeded as budget:
                return AgentResult("truncated", error=str(budget))
            except CallRefused as refusal:
                if refusal.too_long:
                    return AgentResult("truncated", error=str(refusal))
                raise UserCodeError(self._refused(refusal)) from None
            chat.messages.append(message)
            wrong = True
            for number, request in enumerate(requests_of(message, self.web)):
                problem = request.problem
                if number >= MAX_CALLS:
                    problem = f"not carried out: an answer may have {MAX_CALLS} actions"
                wrong = wrong and bool(problem) and not request.is_call
                for action in () if problem else request.actions:
                    if action["action"] in ENDS:
                        failed = action["action"] == "fail"
                        reason = f"the agent gave up: {str(action.get('text') or 'no reason')[:500]}"
                        return AgentResult(exit_code=int(failed), error=reason if failed else "")
                    if problem := await screen.act(action):
                        break
                chat.report(request.call_id, problem)
                if problem and request.call_id is None:
                    break  # later actions assume that this one succeeded
            errors = errors + 1 if wrong else 0
            if errors >= self.max_format_errors:
                return AgentResult(exit_code=1, error=f"{errors} answers in a row had no valid action")
            chat.show(await screen.look())
        return AgentResult("truncated", error=f"not done after {turns} model calls")

    def _system(self, size: str) -> str:
        if self.web:
            act = WEB_CALL if self.tools else WEB_WRITE + "\n".join(WEB_ACTIONS[name].usage() for name in self.web)
            return WEB_PROMPT.format(see=WEB_SEE[self.observe], act=act)
        act = CALL if self.tools else WRITE + json.dumps(SCHEMA)
        return PROMPT.format(size=size, see=SEE[self.observe], act=act)

    def _refused(self, refusal: CallRefused) -> str:
        hint = "" if self.observe == "tree" else "; if the model takes no images, set the agent's args: {observe: tree}"
        return f"agent computer-use: {refusal}{hint}"


SCHEMA = parameters((*ACTIONS, *ENDS))
TOOL = {
    "type": "function",
    "function": {
        "name": "computer",
        "description": "Controls mouse and keyboard of the desktop. done and fail end the task.",
        "parameters": SCHEMA,
    },
}


# --- answers ----------------------------------------------------------------------------------------------------------


class ActionRequest(NamedTuple):
    """One requested action, translated into actions of ``screen``, or the reason why it is invalid."""

    actions: Sequence[Mapping[str, Any]]
    problem: str = ""
    call_id: str | None = None
    """Id of the tool call, or ``None`` for an action in the text."""
    is_call: bool = False
    """True for a BrowserGym call. An invalid call does not count as a malformed answer, so it never ends the rollout.
    """


def requests_of(message: Mapping[str, Any], web: Sequence[str] = ()) -> list[ActionRequest]:
    """Returns the actions that an answer requests, at least one. Reads them from its tool calls, or else from its text.

    Args:
        web: Names of BrowserGym's actions, if these are used. The text then ends with one or several calls. Otherwise
            the last JSON object in the text is the action.
    """
    requests = []
    for call in message.get("tool_calls") or ():
        function, call_id = call.get("function") or {}, str(call.get("id") or "")
        name = str(function.get("name"))
        if not web and name != "computer":
            requests.append(ActionRequest((), f"there is no tool {name[:100]!r}; call computer", call_id))
            continue
        try:
            action = json.loads(function.get("arguments") or "{}")
        except (ValueError, RecursionError) as error:
            requests.append(ActionRequest((), f"the arguments are not JSON: {error}", call_id))
        else:
            requests.append(_web(name, (), action, web, call_id) if web else _checked(action, call_id))
    text = str(message.get("content") or "")
    if requests or not web:
        return requests or [_checked(_last_object(text), None)]
    block = _block(text)
    try:
        if len(block) > MAX_ACTION_CHARACTERS:
            raise ValueError(f"the action is longer than {MAX_ACTION_CHARACTERS} characters")
        return [_web(*call, web, None) for call in web_calls(block)[: MAX_CALLS + 1]]
    except ValueError as error:
        return [ActionRequest((), str(error))]


def _web(name: str, positional: Sequence[Any], named: Any, web: Sequence[str], call_id: str | None) -> ActionRequest:
    try:
        if name not in web:
            raise ValueError(f"action {name[:100]!r}: expected one of {', '.join(web)}")
        request = _short(WEB_ACTIONS[name].steps(positional, named), call_id)
    except ValueError as error:
        request = ActionRequest((), str(error), call_id)
    return request._replace(is_call=True)


def _checked(action: Any, call_id: str | None) -> ActionRequest:
    if not isinstance(action, dict):
        return ActionRequest((), 'expected an action as a JSON object, such as {"action": "screenshot"}', call_id)
    if action.get("action") not in (*ACTIONS, *ENDS):
        wrong = f"action {str(action.get('action'))[:100]!r}: expected one of {', '.join((*ACTIONS, *ENDS))}"
        return ActionRequest((), wrong, call_id)
    return _short([action], call_id)


def _short(actions: Sequence[Mapping[str, Any]], call_id: str | None) -> ActionRequest:
    if max(len(json.dumps(action)) for action in actions) > MAX_ACTION_CHARACTERS:
        return ActionRequest((), f"the action is longer than {MAX_ACTION_CHARACTERS} characters", call_id)
    return ActionRequest(actions, "", call_id)


def _block(text: str) -> str:
    """Returns the part of an answer that contains BrowserGym actions: the last text between ``<action>`` tags, or else
    the last fenced block, or else the last line."""
    for start, end in (("<action>", "</action>"), ("```", "```")):
        last = text.rfind(end)
        first = text.rfind(start, 0, max(last, 0))
        if first >= 0:
            return re.sub(r"\A\w*\n", "", text[first + len(start) : last]).strip()
    return text.strip().rpartition("\n")[2].strip("` ")


def _last_object(text: str) -> Any:
    """Returns the last JSON object in a text that has the key ``action``, or ``None``."""
    action, position, failures = None, text.find("{"), 0
    decoder = json.JSONDecoder()
    while position >= 0 and failures < 1000:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end, failures = position + 1, failures + 1
        else:
            action = value if "action" in value else action
        position = text.find("{", end)
    return action


# --- the conversation -------------------------------------------------------------------------------------------------


class ScreenChat:
    """The conversation of a rollout. At most ``history`` of its messages show a screen. 0 means no limit."""

    def __init__(self, system: str, instruction: str, history: int) -> None:
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": instruction},
        ]
        self._history = history
        self._shown: list[tuple[dict[str, Any], str]] = []
        """Messages that show a screen, each with the text that precedes its observation."""

    def report(self, call_id: str | None, problem: str) -> None:
        """Appends the result of an action."""
        text = f"error: {problem}" if problem else "ok"
        if call_id is not None:
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif problem:
            self.messages.append({"role": "user", "content": text})

    def show(self, observation: Sequence[Mapping[str, Any]]) -> None:
        """Appends an observation. If there are too many, drops the oldest half."""
        if self._history and len(self._shown) == self._history:
            leaving = (self._history + 1) // 2
            for message, before in self._shown[:leaving]:
                message["content"] = _content([*_texts(before), *_texts(LEFT)])
            del self._shown[:leaving]
        before = ""
        if self.messages[-1]["role"] == "user":  # chat templates reject consecutive user messages
            before = self.messages.pop()["content"]
        message = {"role": "user", "content": _content([*_texts(before), *observation])}
        self.messages.append(message)
        self._shown.append((message, before))


def _texts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _content(parts: Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """Joins parts that are all text into a string, which every chat template accepts. Keeps other parts as a list."""
    if all(part["type"] == "text" for part in parts):
        return "\n\n".join(part["text"] for part in parts)
    return list(parts)


# --- the screen -------------------------------------------------------------------------------------------------------


class Screen:
    """Controls the display of a sandbox through the program ``screen``.

    Args:
        scale: Size of screenshots as ``WIDTHxHEIGHT``, or an empty string for the screen's size.
        observe: Contents of an observation: ``screenshot``, ``tree`` or ``both``.
        ids: If true, the tree shows ids of elements instead of coordinates.
    """

    def __init__(self, sandbox: Sandbox, scale: str, observe: str, *, ids: bool) -> None:
        self._sandbox, self._pictures, self._trees = sandbox, observe != "tree", observe != "screenshot"
        self._scale = ["--scale", scale] if scale else []
        self._listing = ["--ids"] if ids else self._scale
        self._fresh = False
        """True if the screenshot in the sandbox was taken after the last action."""
        self._why = ""
        """Reason why the last observation failed."""

    async def start(self, size: str) -> str:
        """Starts the display if it is not running. The task's environment variables determine what it shows.

        Args:
            size: ``WIDTHxHEIGHT``, or an empty string for the program's default.

        Returns:
            The size of the display as ``WIDTHxHEIGHT``.

        Raises:
            ConfigError: The image has no program ``screen``.
            SetupError: The display does not start.
        """
        words = ["screen", "start", *(["--size", size] if size else [])]
        done = await self._sandbox.exec(words, timeout_s=START_TIMEOUT_S)
        if done.exit_code in (126, 127):
            raise ConfigError("agent computer-use: the image has no program screen; use one of the desktop image")
        if answer := _failure(done):
            raise SetupError(f"the display does not start: {answer}")
        return "x".join(map(str, json.loads(done.stdout_bytes)["size"]))

    async def act(self, action: Mapping[str, Any]) -> str:
        """Carries out an action. Returns an error message, or an empty string on success."""
        picture = ["--screenshot", PICTURE] if self._pictures else []
        words = ["screen", "do", json.dumps(action), *picture, *self._scale]
        done = await self._sandbox.exec(words, timeout_s=ACTION_TIMEOUT_S)
        problem = _failure(done)
        self._fresh = self._pictures and not problem
        return problem

    async def look(self) -> list[dict[str, Any]]:
        """Returns an observation of the screen, as content parts of a message.

        Raises:
            SetupError: The display twice in a row provided no picture or no tree.
        """
        parts: list[dict[str, Any]] = []
        if self._pictures:
            picture = await self._picture() or await self._picture()
            if picture is None:
                raise SetupError(f"the display of the sandbox is lost: {self._why}")
            url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        if self._trees:
            tree = await self._tree() or await self._tree()
            if tree is None:
                raise SetupError(f"the display of the sandbox is lost: {self._why}")
            parts.append({"type": "text", "text": tree})
        return parts

    async def _picture(self) -> bytes | None:
        if not self._fresh:
            words = ["screen", "do", '{"action": "screenshot"}', "--screenshot", PICTURE, *self._scale]
            self._why = _failure(await self._sandbox.exec(words, timeout_s=ACTION_TIMEOUT_S))
            if self._why:
                return None
        self._fresh = False
        with tempfile.TemporaryDirectory(prefix="megaflow-") as folder:
            path = Path(folder, "screen.png")
            try:
                await self._sandbox.download(PICTURE, str(path))
            except SetupError as error:
                self._why = str(error)
                return None
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_PICTURE_BYTES:
                data = path.read_bytes()
                if _is_png(data):
                    return data
        self._why = f"its screenshot is not a PNG of at most {MAX_PICTURE_PIXELS} pixels"
        return None

    async def _tree(self) -> str | None:
        done = await self._sandbox.exec(["screen", "tree", *self._listing], timeout_s=ACTION_TIMEOUT_S)
        if done.exit_code:
            self._why = _failure(done)
            return None
        text = done.stdout_bytes.decode("utf-8", "replace").strip() or "(nothing)"
        return text if len(text) <= MAX_TREE_CHARACTERS else text[:MAX_TREE_CHARACTERS] + "\n… (cut)"


def _failure(done: ExecResult) -> str:
    """Returns the reason why a ``screen`` command failed, or an empty string if it succeeded."""
    if done.timed_out:
        return f"no answer within {done.duration_s:.0f} s"
    try:
        answer = json.loads(done.stdout_bytes)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and answer.get("ok") is True:
        return ""
    if isinstance(answer, dict) and answer.get("error"):
        return str(answer["error"])[:2000]
    text = (done.stdout_bytes + done.stderr_bytes).decode("utf-8", "replace").strip()
    return text[-2000:] or f"exit code {done.exit_code}"


def _is_png(data: bytes) -> bool:
    """Returns whether ``data`` begins with the header of a PNG, with a size that a screen can have."""
    if len(data) < _PNG.size:
        return False
    signature, length, name, width, height = _PNG.unpack_from(data)
    is_header = (signature, length, name) == (b"\x89PNG\r\n\x1a\n", 13, b"IHDR")
    return is_header and 0 < width * height <= MAX_PICTURE_PIXELS
