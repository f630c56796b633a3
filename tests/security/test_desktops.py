"""What an agent with a desktop may try: to reach the page's browser, to forge an episode, to stop the server."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.tasks.sets import miniwob
from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task
from tests.support.desktops import act, played, screen

LISTENERS = (
    "cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == \"0A\" {print $2}';"
    "cat /proc/net/udp /proc/net/udp6 | awk '$4 == \"07\" {print $2}';"
    "awk '$4 == \"00010000\" && $8 ~ /^@/ {print $8}' /proc/net/unix"
)
"""Prints the TCP and UDP ports and the abstract sockets of a network at which a program listens."""
FORGE = "core.EP_TIMER = core.EP_TIMER || 1; core.endEpisode(1)"


class Trying:
    """An agent that is one function."""

    def __init__(self, use: Callable[[Sandbox], Awaitable[None]]) -> None:
        self._use = use

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        await self._use(sandbox)
        return AgentResult()


def reward_of(
    page: str, asks: str, image: Path, scratch: Path, where: Path, use: Callable[[Sandbox], Awaitable[None]]
) -> float:
    """Return the reward of an episode in which the agent does this."""
    miniwob.write_task(where / "tasks", miniwob.AskedPage(page, "1", asks), "1.1.0")
    [task] = load_tasks([f"{where}/tasks/*"], "/")

    async def run() -> float:
        async with ApptainerProvider(scratch) as provider:
            reward, error = await played(task, {"desktop": str(image)}, provider, Trying(use))
            assert not error, error
            return reward

    return asyncio.run(run())


async def keys(sandbox: Sandbox, *names: str) -> None:
    for name in names:
        await act(sandbox, action="key", text=name)
        await asyncio.sleep(0.3)


async def write(sandbox: Sandbox, text: str) -> None:
    await act(sandbox, action="type", text=text)
    await asyncio.sleep(0.3)


async def open_developer_tools(sandbox: Sandbox) -> None:
    """By keys and by the menu. The policy refuses both."""
    for name in ("F12", "ctrl+shift+j", "ctrl+shift+i"):
        await keys(sandbox, name)
        await asyncio.sleep(1.5)
        await write(sandbox, FORGE)
        await keys(sandbox, "Return")
    await act(sandbox, action="right_click", coordinate=[250, 640])
    await asyncio.sleep(0.5)
    await keys(sandbox, "Up", "Return")
    await asyncio.sleep(1.5)
    await write(sandbox, FORGE)
    await keys(sandbox, "Return")


async def address_bar(sandbox: Sandbox) -> None:
    for name in ("ctrl+l", "F6", "alt+d", "ctrl+t", "ctrl+n"):
        await keys(sandbox, name)
        await write(sandbox, f"javascript:{FORGE}")
        await keys(sandbox, "Return")


async def load_again_and_solve(sandbox: Sandbox) -> None:
    await keys(sandbox, "F5")
    await asyncio.sleep(1.0)
    await start_and_solve(sandbox)


async def start_and_solve(sandbox: Sandbox) -> None:
    await act(sandbox, action="left_click", coordinate=[240, 300])
    await asyncio.sleep(0.5)
    await click_button(sandbox, "ONE")


async def fail(sandbox: Sandbox) -> None:
    """End the episode, whose reward is 0 from now on."""
    await click_button(sandbox, "TWO")


async def close_the_browser(sandbox: Sandbox) -> None:
    """A service that ended would give the rollout another attempt."""
    await keys(sandbox, "ctrl+w")
    await asyncio.sleep(1.0)
    assert (await act(sandbox, action="screenshot"))["ok"]


async def end_the_x_server(sandbox: Sandbox) -> None:
    await keys(sandbox, "Terminate_Server")
    await asyncio.sleep(1.0)
    assert "display lost" in (await act(sandbox, action="screenshot"))["error"]


async def open_pages_without_end(sandbox: Sandbox) -> None:
    """A service beyond its memory would give the rollout another attempt."""
    await act(sandbox, action="hold_key", text="ctrl+t", duration=5)
    assert "Click Test" not in (await sandbox.exec(["screen", "tree"])).stdout, "the browser has ended"


async def leave_modules(sandbox: Sandbox) -> None:
    """The tests run in this directory."""
    forge = "import os; print(1.0, file=open('/logs/verifier/reward.txt', 'w'), flush=True); os._exit(0)"
    for name in ("json", "io", "sitecustomize", "usercustomize", "encodings"):
        await sandbox.exec(["sh", "-c", f"cat > /work/{name}.py"], user_input=forge)


async def the_page_is_open(sandbox: Sandbox) -> None:
    assert "Click Test" in (await sandbox.exec(["screen", "tree"])).stdout


async def click_button(sandbox: Sandbox, name: str) -> None:
    done = await sandbox.exec(["screen", "tree"])
    if found := re.search(rf'button "{name}" \((\d+),(\d+)\)', done.stdout):
        await act(sandbox, action="left_click", coordinate=[int(found[1]), int(found[2])])


@pytest.mark.parametrize(
    "attacks",
    [
        (leave_modules, open_developer_tools),
        (address_bar,),
        (open_pages_without_end,),
        (fail, start_and_solve, the_page_is_open, load_again_and_solve, the_page_is_open, close_the_browser),
        (fail, end_the_x_server),
    ],
    ids=["developer tools", "address bar", "pages", "again", "X server"],
)
def test_nothing_but_the_solution_gives_a_reward_or_another_attempt(
    attacks: tuple[Callable[[Sandbox], Awaitable[None]], ...], desktop_sif: Path, scratch: Path, tmp_path: Path
) -> None:
    async def all_of_them(sandbox: Sandbox) -> None:
        for attack in attacks:
            await attack(sandbox)

    assert reward_of("click-test-2", "Click button ONE.", desktop_sif, scratch, tmp_path, all_of_them) == 0.0


async def fill_the_memory_with_text(sandbox: Sandbox) -> None:
    """Each round doubles the text of the page, until there is no browser whose tree could be shown."""
    found = re.search(r'textbox "" \((\d+),(\d+)\) \S+ .*value=', (await sandbox.exec(["screen", "tree"])).stdout)
    assert found
    await act(sandbox, action="left_click", coordinate=[int(found[1]), int(found[2])])
    await write(sandbox, "x" * 5000)
    for number in range(60):
        for name in ("ctrl+a", "ctrl+c", "ctrl+End", "ctrl+v"):
            await act(sandbox, action="key", text=name)
        if number > 9 and not (await sandbox.exec(["screen", "tree"])).stdout.strip():
            return
    raise AssertionError("the browser has not ended")


def test_text_without_end_ends_the_browser_before_the_service(desktop_sif: Path, scratch: Path, tmp_path: Path) -> None:
    """A service beyond its memory would give the rollout another attempt."""
    asks = "Copy the text."
    assert reward_of("copy-paste", asks, desktop_sif, scratch, tmp_path, fill_the_memory_with_text) == 0.0


WAIT = (
    "import json, socket, time\n"
    "wait = json.dumps({'verb': 'do', 'action': {'action': 'wait', 'duration': 60}})\n"
    "address = (socket.gethostbyname('screen'), 7900)\n"
    "held = [socket.create_connection(address) for _ in range(5)]\n"
    "for connection in held: connection.sendall(wait.encode() + b'\\n')\n"
    "time.sleep(1)\n"
)
"""Sends actions that wait. The verifier has 60 s, which is what one of them may take."""


def test_the_solution_gives_the_reward_which_no_screen_shows_and_no_waiting_action_delays(
    desktop_sif: Path, scratch: Path, tmp_path: Path
) -> None:
    async def solve(sandbox: Sandbox) -> None:
        await click_button(sandbox, "ONE")
        shown = (await sandbox.exec(["screen", "tree"])).stdout
        assert "DONE" in shown, "the episode has ended"
        assert "reward" not in shown.lower()
        await keys(sandbox, *["ctrl+minus"] * 5)  # the reward would be to the right of the page
        await asyncio.sleep(3.0)  # until Chromium shows no zoom factor
        await screen(sandbox, "do", '{"action": "mouse_move", "coordinate": [10, 650]}', "--screenshot", "/tmp/a.png")
        look = "from PIL import Image; print(Image.open('/tmp/a.png').crop((260, 0, 504, 640)).getcolors())"
        colors = (await sandbox.exec(["python3", "-c", look])).stdout
        assert colors.count("(") == 2, colors
        await sandbox.exec(["python3", "-c", WAIT])

    assert reward_of("click-test-2", "Click button ONE.", desktop_sif, scratch, tmp_path, solve) == 1.0


def test_a_solution_after_the_time_of_the_episode_has_no_reward(
    desktop_sif: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(miniwob, "EPISODE_S", 1)

    async def solve_late(sandbox: Sandbox) -> None:
        await asyncio.sleep(2)
        await click_button(sandbox, "ONE")

    assert reward_of("click-test-2", "Click button ONE.", desktop_sif, scratch, tmp_path, solve_late) == 0.0


def test_markup_that_is_typed_runs_no_code(desktop_sif: Path, scratch: Path, tmp_path: Path) -> None:
    """The page `terminal` writes what the user types into itself as HTML."""

    async def inject(sandbox: Sandbox) -> None:
        await act(sandbox, action="left_click", coordinate=[240, 400])
        await write(sandbox, f"<img src=x onerror='{FORGE}'>\n<script>{FORGE}</script>\n")
        await write(sandbox, f"echo <svg onload='{FORGE}'>\n")

    assert reward_of("terminal", "Use the terminal.", desktop_sif, scratch, tmp_path, inject) == 0.0


def test_actions_on_elements_neither_leave_the_page_nor_run_code(
    desktop_sif: Path, scratch: Path, tmp_path: Path
) -> None:
    """The episode lives on after all of it, and the solution still has its reward."""

    async def attack(sandbox: Sandbox) -> None:
        shown = (await sandbox.exec(["screen", "tree", "--ids"])).stdout
        ids = re.findall(r"\[(\d+)\]", shown)
        assert ids, shown
        for url in (f"javascript:{FORGE}", "file:///proc/self/environ", "about:blank"):
            assert "must not be left" in (await act(sandbox, action="goto", url=url))["error"]
        for name in ("go_back", "go_forward"):
            assert "must not be left" in (await act(sandbox, action=name))["error"]
        for element in (*ids, FORGE, f"'); {FORGE}; ('"):
            for name in ("fill", "focus"):
                await act(sandbox, action=name, element=element, text=f"'; {FORGE}; '")
            await act(sandbox, action="select", element=element, options=[f"`; {FORGE}; `"])
        assert re.findall(r"\[(\d+)\]", (await sandbox.exec(["screen", "tree", "--ids"])).stdout) == ids
        await click_button(sandbox, "ONE")

    assert reward_of("click-test-2", "Click button ONE.", desktop_sif, scratch, tmp_path, attack) == 1.0


FLOOD = (
    "import socket, sys, time\n"
    "host = (socket.gethostbyname('screen'), 7900)\n"
    "held = [socket.create_connection(host) for _ in range(100)]\n"
    "for body in sys.stdin.read().split('\\n'):\n"
    "    with socket.create_connection(host) as connection:\n"
    "        connection.sendall(body.encode() + b'\\n')\n"
    "        connection.shutdown(socket.SHUT_WR)\n"
    "        connection.recv(100)\n"
    "import subprocess\n"
    "print(subprocess.run(['screen', 'do', sys.argv[1]], capture_output=True, text=True).stdout)\n"
)
BODIES = ["", "{", "[]", "null", "{}", '{"verb": 1}', '{"verb": "do"}', '{"verb": "do", "action": 1}']
BODIES += ['{"verb": "tree", "scale": [1e9, 1]}', '{"verb": "tree", "scale": "x"}', "[" * 100_000, "9" * 100_000]
"""Requests that are none."""


def test_the_agent_reaches_of_the_page_only_the_port_of_screen_and_holds_up_nobody_there(
    desktop_sif: Path, scratch: Path, tmp_path: Path
) -> None:
    async def look(sandbox: Sandbox) -> None:
        for key in ({}, {"SCREEN_KEY": ""}, {"SCREEN_KEY": "0" * 32}):
            answer = await screen(sandbox, "episode", **key)
            assert answer == {"ok": False, "error": "only the verifier has the key to the episode"}
        assert (await sandbox.exec("env; ls -A /work /tests /solution 2>/dev/null")).stdout.count("KEY") == 0
        assert (await sandbox.exec("ls -A /work")).stdout == ""
        assert (await sandbox.exec("pgrep -c 'chromium|Xvfb'")).stdout.strip() == "0"
        probe = (
            "import socket\n"
            "host = socket.gethostbyname('screen')\n"
            "found = []\n"
            "for port in [*range(1, 10000), *range(30000, 61000, 7)]:\n"
            "    try: socket.create_connection((host, port), 1).close(); found.append(port)\n"
            "    except OSError: pass\n"
            "print(found)"
        )
        assert (await sandbox.exec(["python3", "-c", probe], timeout_s=60)).stdout.strip() == f"[{miniwob.PORT}]"
        flood = ["python3", "-c", FLOOD, '{"action": "screenshot"}']
        done = await sandbox.exec(flood, user_input="\n".join(BODIES), timeout_s=60)
        assert json.loads(done.stdout) == {"ok": True}, done.stderr

    assert reward_of("click-test", "Click the button.", desktop_sif, scratch, tmp_path, look) == 0.0


async def test_on_the_nodes_network_no_stranger_reaches_the_x_server_or_poses_as_it(
    desktop_sif: Path, scratch: Path
) -> None:
    """Clients try the abstract socket before the one in /tmp, so a stranger may wait at the first free address."""
    with socket.socket(socket.AF_UNIX) as posing, socket.socket(socket.AF_UNIX) as client:
        for number in range(1000):
            with suppress(OSError):
                posing.bind(f"\0/tmp/.X11-unix/X{number}")
                break
        posing.listen()
        posing.setblocking(False)
        async with ApptainerProvider(scratch) as provider:
            async with await provider.start(SandboxSpec(str(desktop_sif), network="host")) as sandbox:
                assert (await screen(sandbox, "start", "--url", "about:blank"))["ok"]
                assert (await act(sandbox, action="left_click", coordinate=[640, 400]))["ok"]
                display = (await sandbox.exec("ps -o args= -C Xvfb")).stdout.split()[1].removeprefix(":")
                assert display != str(number)
                with pytest.raises(ConnectionRefusedError):
                    client.connect(f"\0/tmp/.X11-unix/X{display}")
        with pytest.raises(BlockingIOError):
            posing.accept()


async def test_a_desktop_in_the_agents_own_sandbox_opens_no_port(desktop_sif: Path, scratch: Path) -> None:
    async with ApptainerProvider(scratch) as provider:
        async with await provider.start(SandboxSpec(str(desktop_sif), network="gateway")) as sandbox:
            programs = "pcmanfm / & l3afpad"
            assert (await screen(sandbox, "start", "--url", "about:blank", "--run", programs))["ok"]
            for _ in range(100):
                shown = (await sandbox.exec(["screen", "tree"])).stdout
                if shown.count('window "') == 3:
                    break
                await asyncio.sleep(0.1)
            assert shown.count('window "') == 3, shown
            assert (await sandbox.exec(LISTENERS)).stdout == ""
