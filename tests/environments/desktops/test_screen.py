"""``screen`` in real sandboxes: it starts a desktop once, acts, looks, and says when the desktop has ended."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from tests.support.desktops import act, screen

PAGE = """<!DOCTYPE html><title>Form</title>
<style>body { margin: 0; height: 3000px } body > * { position: absolute; left: 100px }</style>
<button style="top:100px; width:120px; height:40px" onclick="note('pressed')">Press</button>
<input id="box" aria-label="box" style="top:200px; width:300px; height:30px">
<div role="region" aria-label="pad" id="pad" style="left:500px; top:100px; width:300px; height:300px"></div>
<iframe style="left:900px; top:100px; width:200px; height:200px; border:0"
 srcdoc="<button style='position:absolute; left:50px; top:60px; width:80px; height:30px'>Inner</button>"></iframe>
<div role="status" aria-label="" id="log" style="position:fixed; top:500px"></div>
<script>
const log = document.getElementById('log');
function note(text) { log.setAttribute('aria-label', log.getAttribute('aria-label') + text + ';'); }
const pad = document.getElementById('pad');
for (const kind of ['dblclick', 'contextmenu', 'auxclick'])
  pad.addEventListener(kind, event => { event.preventDefault(); note(kind); });
let down = null;
pad.addEventListener('mousedown', event => { down = event.clientX; });
pad.addEventListener('mouseup', event => { if (event.clientX !== down) note('dragged ' + (event.clientX - down)); });
addEventListener('scroll', () => { if (scrollY > 0) note('scrolled'); }, { once: true });
addEventListener('keydown', event => {
  if (event.ctrlKey && event.key === 'k') { event.preventDefault(); note('ctrl+k'); }
});
</script>
"""


Use = Callable[[ApptainerSandbox], Awaitable[Any]]


async def write(sandbox: ApptainerSandbox, path: str, page: str) -> None:
    await sandbox.exec(["sh", "-c", f"cat > {path}"], user_input=page)


def on_a_desktop(image: Path, scratch: Path, use: Use, *, started: bool = True, **spec: Any) -> Any:
    """Return the result of ``use(sandbox)`` in a sandbox with a started desktop that shows the page."""

    async def run() -> Any:
        async with ApptainerProvider(scratch) as provider:
            async with await provider.start(SandboxSpec(str(image), network="gateway", **spec)) as sandbox:
                await write(sandbox, "/page.html", PAGE)
                if started:
                    assert (await screen(sandbox, "start", "--url", "file:///page.html"))["ok"]
                return await use(sandbox)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def shared(desktop_sif: Path, scratch: Path) -> Iterator[Callable[..., Any]]:
    """Runs ``use(sandbox)`` on a desktop that the module's tests share, after it has loaded a page."""

    async def begin() -> tuple[ApptainerProvider, ApptainerSandbox]:
        provider = ApptainerProvider(scratch)
        sandbox = await provider.start(SandboxSpec(str(desktop_sif), network="gateway"))
        assert (await screen(sandbox, "start", "--url", "about:blank"))["ok"]
        return provider, sandbox

    with asyncio.Runner() as runner:
        provider, sandbox = runner.run(begin())

        def run(use: Use, page: str = PAGE) -> Any:
            async def on_page() -> Any:
                await write(sandbox, "/page.html", page)
                assert (await act(sandbox, action="goto", url="file:///page.html"))["ok"]
                return await use(sandbox)

            return runner.run(on_page())

        yield run
        runner.run(provider.close())


async def tree(sandbox: ApptainerSandbox, *words: str) -> str:
    done = await sandbox.exec(["screen", "tree", *words])
    assert done.exit_code == 0, done.stdout
    return done.stdout


async def place(sandbox: ApptainerSandbox, start: str, *words: str) -> list[int]:
    """Return the middle of the node whose line of the tree starts like this."""
    for line in (await tree(sandbox, *words)).splitlines():
        if line.strip().startswith(start):
            found = re.search(r"\((-?\d+),(-?\d+)\)", line)
            assert found, line
            return [int(found[1]), int(found[2])]
    raise AssertionError(f"no {start} in {await tree(sandbox)}")


def png_size(data: bytes) -> tuple[int, int]:
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def test_a_desktop_starts_once_and_its_screenshots_have_the_size_that_is_asked_for(shared: Callable[..., Any]) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        servers = (await sandbox.exec("pgrep -x Xvfb; pgrep -x openbox; pgrep -o chromium")).stdout
        again = await screen(sandbox, "start", "--url", "file:///page.html")
        assert again == {"ok": True, "size": [1280, 800]}
        assert (await sandbox.exec("pgrep -x Xvfb; pgrep -x openbox; pgrep -o chromium")).stdout == servers
        assert len(servers.split()) == 3
        for words, size in (([], (1280, 800)), (["--scale", "640x400"], (640, 400))):
            answer = await screen(sandbox, "do", '{"action": "screenshot"}', "--screenshot", "/tmp/a.png", *words)
            assert answer == {"ok": True, "screenshot": "/tmp/a.png"}
            shot = await sandbox.read("/tmp/a.png", 1 << 22)
            assert shot
            assert png_size(shot) == size

    shared(use)


def test_each_action_reaches_the_page(shared: Callable[..., Any]) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        async def after(expected: str, **action: Any) -> None:
            assert await act(sandbox, **action) == {"ok": True}
            for _ in range(20):
                if f"{expected};" in (shown := await tree(sandbox)):
                    return
                await asyncio.sleep(0.1)
            raise AssertionError(f"{action} has not led to {expected}: {shown}")

        button = await place(sandbox, 'button "Press"')
        pad = await place(sandbox, 'region "pad"')
        await after("pressed", action="left_click", coordinate=button)
        await after("dblclick", action="double_click", coordinate=pad)
        await after("contextmenu", action="right_click", coordinate=pad)
        await after("auxclick", action="middle_click", coordinate=pad)
        x, y = pad
        await after("dragged 60", action="left_click_drag", start_coordinate=pad, coordinate=[x + 60, y])
        await act(sandbox, action="mouse_move", coordinate=pad)
        await act(sandbox, action="left_mouse_down")
        await act(sandbox, action="mouse_move", coordinate=[x - 30, y])
        await after("dragged -30", action="left_mouse_up")
        assert await act(sandbox, action="cursor_position") == {"ok": True, "coordinate": [x - 30, y]}
        await after("ctrl+k", action="key", text="ctrl+k")
        box = await place(sandbox, 'textbox "box"')
        await act(sandbox, action="left_click", coordinate=box)
        text = "Ünï ćode – \"quoted\" $HOME 'x' -- 100%"
        await act(sandbox, action="type", text=text)
        assert f"value={json.dumps(text, ensure_ascii=False)}" in await tree(sandbox)
        await act(sandbox, action="triple_click", coordinate=box)
        await act(sandbox, action="hold_key", text="Delete", duration=0.1)
        assert "value=" not in await tree(sandbox)
        await after("scrolled", action="scroll", coordinate=pad, scroll_direction="down", scroll_amount=3)
        assert (await place(sandbox, 'button "Press"'))[1] < button[1]

    shared(use)


def test_coordinates_are_those_of_the_scaled_screenshot(shared: Callable[..., Any]) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        scale = ("--scale", "640x400")
        whole, half = await place(sandbox, 'button "Inner"'), await place(sandbox, 'button "Inner"', *scale)
        assert [abs(2 * a - b) <= 1 for a, b in zip(half, whole, strict=True)] == [True, True]
        press = await place(sandbox, 'button "Press"', *scale)
        click = json.dumps({"action": "left_click", "coordinate": press})
        assert (await screen(sandbox, "do", click, *scale))["ok"]
        assert "pressed;" in await tree(sandbox)

    shared(use)


WRONG: list[tuple[Any, str]] = [
    ({"action": "fly"}, "not one of Anthropic's computer tool"),
    ({}, "expected an object with"),
    ([], "expected an object with"),
    ({"action": "mouse_move"}, "coordinate is missing"),
    ({"action": "left_click", "coordinate": [1280, 10]}, "outside the screen of 1280x800"),
    ({"action": "left_click", "coordinate": [-1, 10]}, "outside the screen of 1280x800"),
    ({"action": "left_click", "coordinate": "10,10"}, "expected [x, y]"),
    ({"action": "left_click", "coordinate": [True, 1]}, "expected [x, y]"),
    ({"action": "left_click_drag", "start_coordinate": [1, 1]}, "coordinate is missing"),
    ({"action": "scroll", "scroll_direction": "inwards"}, "expected one of up, down, left, right"),
    ({"action": "scroll", "scroll_direction": "up", "scroll_amount": 10**9}, "expected a number from 0 to 100"),
    ({"action": "wait", "duration": 10**9}, "expected a number from 0 to 60"),
    ({"action": "wait", "duration": float("nan")}, "expected a number from 0 to 60"),
    ({"action": "type"}, "text None: expected a text"),
    ({"action": "type", "text": ["a"]}, "expected a text"),
    ({"action": "type", "text": "a" * 10_001}, "type at most 10000 at a time"),
    ({"action": "type", "text": "a\x07"}, "has a character that no key writes"),
    ({"action": "type", "text": "a\ud800"}, "has a character that no key writes"),
    ({"action": "key", "text": "NoSuchKey"}, "NoSuchKey"),
    ({"action": "key", "text": "--help"}, "--help"),
]


def test_a_wrong_action_is_refused_with_a_reason_and_the_desktop_goes_on(shared: Callable[..., Any]) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        for action, reason in WRONG:
            done = await sandbox.exec(["screen", "do", json.dumps(action)])
            answer = json.loads(done.stdout)
            assert (done.exit_code, answer["ok"]) == (1, False)
            assert reason in answer["error"], (action, answer)
        for text in ("{", "[" * 100_000, '{"action": ' * 10_000):
            done = await sandbox.exec(["screen", "do", text])
            assert "not JSON" in json.loads(done.stdout)["error"]
        assert (await act(sandbox, action="screenshot"))["ok"]

    shared(use)


def test_a_display_that_dies_is_named_by_every_later_call_and_files_are_kept(desktop_sif: Path, scratch: Path) -> None:
    """Each time the desktop starts again."""

    async def use(sandbox: ApptainerSandbox) -> None:
        shoot = ("do", '{"action": "screenshot"}', "--screenshot", "/tmp/a.png")
        await sandbox.exec("echo kept > /work.txt")
        for victim in ("-x Xvfb", "-x openbox", "-x chromium", "-f screen_server.py"):
            await sandbox.exec(f"pkill -9 {victim} || true")
            for _ in range(50):  # a killed process takes a moment to end
                if not (await screen(sandbox, *shoot))["ok"]:
                    break
                await asyncio.sleep(0.1)
            for _ in range(3):
                answer = await screen(sandbox, *shoot)
                assert not answer["ok"], victim
                assert answer["error"].startswith("display lost")
                await asyncio.sleep(0.7)
            assert await sandbox.read("/work.txt") == b"kept\n"
            again = await screen(sandbox, "start", "--url", "file:///page.html")
            assert again["ok"], (victim, again)
            assert (await act(sandbox, action="screenshot"))["ok"]

    on_a_desktop(desktop_sif, scratch, use)


def test_a_desktop_beyond_its_memory_is_a_named_failure(desktop_sif: Path, scratch: Path) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        done = await sandbox.exec(["screen", "start", "--url", "file:///page.html"], timeout_s=60)
        for _ in range(40):
            if sandbox.breaches:
                break
            await asyncio.sleep(0.1)
        assert any(breach.limit == "memory" for breach in sandbox.breaches), done.stdout

    on_a_desktop(desktop_sif, scratch, use, started=False, memory_mb=100)


async def open_page(sandbox: ApptainerSandbox) -> None:
    for action in ({"action": "key", "text": "ctrl+t"}, {"action": "type", "text": "file:///page.html\n"}):
        await sandbox.exec(["screen", "do", json.dumps(action)])  # the kernel may refuse it a process


def test_a_desktop_beyond_its_processes_is_a_named_failure(desktop_sif: Path, scratch: Path) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        for _ in range(20):
            await open_page(sandbox)
            if sandbox.breaches:
                break
        assert (await act(sandbox, action="screenshot"))["error"].startswith("display lost")
        assert {breach.limit for breach in sandbox.breaches} == {"processes"}

    on_a_desktop(desktop_sif, scratch, use, processes=110)


def test_without_a_desktop_or_a_browser_the_tool_says_so_and_the_tree_lists_windows(
    desktop_sif: Path, scratch: Path
) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        none = {"ok": False, "error": "no desktop was started here; start one with: screen start"}
        assert await act(sandbox, action="screenshot") == none
        await sandbox.exec("echo text > /note.txt")
        assert (await screen(sandbox, "start", "--run", "l3afpad /note.txt"))["ok"]
        for _ in range(50):
            if 'window "note.txt' in (shown := await tree(sandbox)):
                break
            await asyncio.sleep(0.1)
        assert re.search(r'window "note\.txt[^"]*" \(\d+,\d+\) \d+x\d+', shown), shown
        assert await tree(sandbox, "--ids") == "(no browser runs on this desktop)\n"
        for action in ({"action": "left_click", "element": "1"}, {"action": "go_back"}):
            assert (await act(sandbox, **action))["error"] == "no browser runs on this desktop"

    on_a_desktop(desktop_sif, scratch, use, started=False)


def test_screenshots_show_the_page(shared: Callable[..., Any]) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        await screen(sandbox, "do", '{"action": "screenshot"}', "--screenshot", "/tmp/a.png")
        look = "from PIL import Image; print(Image.open('/tmp/a.png').convert('RGB').getpixel((300, 300)))"
        assert (await sandbox.exec(["python3", "-c", look])).stdout == "(255, 0, 0)\n"

    shared(use, "<body style='background: #f00'>")


HURRY = "s/^ANSWER_S = .*/ANSWER_S = 5.0/; s/^LOAD_S = .*/LOAD_S = 3.0/"
"""Shortens the waits for a page, 30 and 10 s, in which a page that hangs computes."""


@pytest.mark.parametrize("script", ["alert('stay')", "while (true) {}", "document.write('<img src=/dev/zero>')"])
def test_a_page_that_does_not_answer_is_shown_all_the_same(script: str, desktop_sif: Path, scratch: Path) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        page = f"<title>held</title><body style='background: #f00'><script>{script}</script>"
        await sandbox.exec(["sed", "-i", HURRY, "/usr/local/lib/screen_server.py"])
        await write(sandbox, "/held.html", page)
        assert (await screen(sandbox, "start", "--url", "file:///held.html"))["ok"]
        assert (await act(sandbox, action="screenshot"))["ok"]
        shown = await tree(sandbox)
        assert 'window "' in shown
        assert "RootWebArea" in shown or "(the page does not answer" in shown

    on_a_desktop(desktop_sif, scratch, use, started=False)


def test_the_tree_of_a_large_page_is_cut(shared: Callable[..., Any]) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        shown = (await tree(sandbox)).splitlines()
        assert 900 < len(shown) <= 1001
        assert 1900 < max(map(len, shown)) < 2500

    script = (
        "half.textContent = '\\ud800'; area.value = 'v'.repeat(1e5);"
        "for (let i = 0; i < 3e3; i++) list.append(new Option('x'.repeat(500)))"
    )
    body = f"<textarea id=area></textarea><button id=half></button><p>{'y' * 10**5}</p><div id=list></div>"
    shared(use, f"{body}<script>{script}</script>")


def test_the_tree_is_that_of_the_tab_that_is_shown(shared: Callable[..., Any]) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        async def shows(start: str) -> None:
            for _ in range(50):
                if any(line.strip().startswith(start) for line in (await tree(sandbox)).splitlines()):
                    return
                await asyncio.sleep(0.1)
            raise AssertionError(f"no {start} in {await tree(sandbox)}")

        first = '<title>one</title><a style="position:absolute; top:90px" target=_blank href="two.html">Go</a>'
        second = "<title>two</title><button onclick=\"document.title='three'\">Press</button>"
        await write(sandbox, "/one.html", first)
        await write(sandbox, "/two.html", second)
        assert (await act(sandbox, action="goto", url="file:///one.html"))["ok"]
        await act(sandbox, action="left_click", coordinate=await place(sandbox, 'link "Go"'))
        await shows('RootWebArea "two"')
        await act(sandbox, action="left_click", coordinate=await place(sandbox, 'button "Press"'))
        await shows('RootWebArea "three"')
        await act(sandbox, action="key", text="ctrl+1")
        await shows('RootWebArea "one"')
        await act(sandbox, action="key", text="ctrl+w")
        await shows('RootWebArea "three"')
        await act(sandbox, action="key", text="ctrl+t")
        await shows('RootWebArea "chrome://new-tab-page/"')

    shared(use)


def test_a_full_shared_memory_is_a_named_failure_or_none(desktop_sif: Path, scratch: Path) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        await sandbox.exec("cat /dev/zero > /dev/shm/full; true", timeout_s=60)
        done = await sandbox.exec(["screen", "start", "--url", "file:///page.html"])
        if done.breach:  # what the first command left may exceed the limit for one poll more
            assert done.breach.startswith("memory limit"), done
            return
        answer = json.loads(done.stdout)
        assert answer["ok"] or answer["error"].startswith("display lost"), answer

    on_a_desktop(desktop_sif, scratch, use, started=False, memory_mb=1500)


ELEMENTS = """<!DOCTYPE html><title>Elements</title>
<script>
for (const [owner, name] of [[Element.prototype, 'getClientRects'], [Element.prototype, 'scrollIntoViewIfNeeded'],
    [Element.prototype, 'matches'], [Node.prototype, 'contains'], [Node.prototype, 'getRootNode'], [Array, 'from'],
    [HTMLInputElement.prototype, 'select'], [HTMLElement.prototype, 'focus'], [Document.prototype, 'execCommand']])
  owner[name] = () => { document.title = 'deceived'; return []; };
</script>
<style>main { height: 4000px } #cover, #covered { position: fixed; left: 900px; top: 300px; width: 200px; height: 60px }
#low { margin-top: 2500px } span { cursor: pointer }</style>
<main>
<button onclick="note('pressed ' + event.shiftKey)" ondblclick="note('twice')">Press</button>
<button disabled>Off</button><button style="opacity: 0; position: absolute; width: 0; height: 0; border: 0; padding: 0"
  aria-label="Tiny"></button>
<button id="covered">Covered</button><div id="cover"></div>
<button onclick="this.remove()">Leave</button><button onclick="this.matches('a')">Match</button>
<input aria-label="name" value="old" oninput="note('input ' + event.isTrusted + ' ' + value)">
<input type="date" aria-label="day" onchange="note('day ' + value)">
<input aria-label="fixed" readonly value="as it is">
<textarea aria-label="story"></textarea>
<div contenteditable role="textbox" aria-label="rich">some <b>text</b></div>
<select aria-label="colour" onchange="note('colour ' + value)">
  <option value="r">Red<option value="b">Blue<option disabled>None</select>
<select aria-label="many" multiple onchange="note('many ' + Array.prototype.map.call(selectedOptions, o => o.value))">
  <option>one<option>two<option>three</select>
<span id="plain">Plain</span>
<div id="grip" role="img" aria-label="grip" style="width: 60px; height: 60px"></div>
<div role="img" aria-label="goal" style="width: 60px; height: 60px" onmouseup="note('dropped')"></div>
<iframe srcdoc="<button onclick='parent.note(1)'>Inner</button>"></iframe>
<button id="low" onclick="note('low ' + (scrollY > 0))">Low</button>
<div role="status" aria-label="" id="log"></div>
</main>
<script>
const log = document.getElementById('log');
function note(text) { log.setAttribute('aria-label', log.getAttribute('aria-label') + text + ';'); }
document.getElementById('plain').addEventListener('click', () => note('plain'));
document.getElementById('grip').addEventListener('mousedown', () => note('held'));
addEventListener('wheel', event => note('wheel ' + event.deltaX + ' ' + event.deltaY), { once: true });
</script>
"""


async def elements(sandbox: ApptainerSandbox) -> dict[str, str]:
    """Return the id of each element by role and name, and the whole tree under an empty key."""
    shown = await tree(sandbox, "--ids")
    return {
        **{line: bid for bid, line in re.findall(r"^\t*\[(\d+)\] (\w+(?: '[^']*')?)", shown, re.MULTILINE)},
        "": shown,
    }


@pytest.mark.parametrize("words", [(), ("--zoom", "2", "--kiosk")], ids=["window", "zoomed"])
def test_elements_are_acted_on_by_their_ids(
    words: tuple[str, ...], desktop_sif: Path, scratch: Path, shared: Callable[..., Any]
) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        ids = await elements(sandbox)

        async def after(expected: str, action: str, element: str, **fields: Any) -> None:
            answer = await act(sandbox, action=action, element=ids[element], **fields)
            assert answer == {"ok": True}, (element, answer)
            for _ in range(20):
                if expected in (shown := await tree(sandbox, "--ids")):
                    return
                await asyncio.sleep(0.1)
            raise AssertionError(f"{action} of {element} has not led to {expected}: {shown}")

        await after("pressed true;", "left_click", "button 'Press'", text="shift")
        await after("twice;", "double_click", "button 'Press'")
        await after("plain;", "left_click", "generic")
        await after("input true new text;", "fill", "textbox 'name'", text="new text")
        await after("input true ;", "fill", "textbox 'name'", text="")
        await after("day 2024-02-29;", "fill", "Date 'day'", text="2024-02-29")
        await after(r"value='two\nlines'", "fill", "textbox 'story'", text="two\nlines")
        await after("value='<b>plain</b>'", "fill", "textbox 'rich'", text="<b>plain</b>")
        await after("colour b;", "select", "combobox 'colour'", options=["Blue"])
        await after("many one,three;", "select", "listbox 'many'", options=["one", "three"])
        await act(sandbox, action="focus", element=ids["textbox 'story'"])
        await act(sandbox, action="key", text="ctrl+a")
        await act(sandbox, action="type", text="typed")
        await after("value='typed'", "focus", "textbox 'story'")
        await after("held;dropped;", "left_click_drag", "image 'goal'", start_element=ids["image 'grip'"])
        await after("1;", "left_click", "button 'Inner'")
        await after("low true;", "left_click", "button 'Low'")
        await act(sandbox, action="scroll", delta=[0, -300])
        shown = await tree(sandbox, "--ids")
        assert f"wheel 0 {-300 if not words else -150};" in shown
        kept = await elements(sandbox)
        lasting = [name for name in ids if re.match("button|textbox|combobox|listbox|option|image|generic", name)]
        assert len(lasting) > 15
        assert [kept[name] for name in lasting] == [ids[name] for name in lasting]

    async def zoomed(sandbox: ApptainerSandbox) -> None:
        await write(sandbox, "/page.html", ELEMENTS)
        assert (await screen(sandbox, "start", "--url", "file:///page.html", *words))["ok"]
        await use(sandbox)

    if words:
        on_a_desktop(desktop_sif, scratch, zoomed, started=False)
    else:
        shared(use, ELEMENTS)


def test_what_cannot_be_done_with_an_element_is_named(shared: Callable[..., Any]) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        ids = await elements(sandbox)
        assert (await act(sandbox, action="left_click", element=ids["button 'Leave'"]))["ok"]
        gone = "is not on the page; look at it again for the present ids"
        wrong: list[tuple[str, Any, dict[str, Any], str]] = [
            ("left_click", ids["button 'Leave'"], {}, gone),
            ("left_click", "99999", {}, gone),
            ("left_click", "<script>", {}, gone),
            ("left_click", 7, {}, "element 7: expected a text"),
            ("left_click", [], {}, "element []: expected a text"),
            ("left_click", ids["button 'Off'"], {}, "is disabled"),
            ("left_click", ids["button 'Tiny'"], {}, "is not visible"),
            ("mouse_move", ids["button 'Covered'"], {}, "is covered by another element (div)"),
            ("left_click", ids["option 'Blue'"], {}, "is not visible"),
            ("fill", ids["button 'Press'"], {"text": "x"}, "is not a field for text"),
            ("fill", ids["textbox 'fixed'"], {"text": "x"}, "cannot be edited"),
            ("fill", ids["Date 'day'"], {"text": "soon"}, "takes no such date"),
            ("fill", ids["textbox 'name'"], {"text": "x" * 10_001}, "fill in at most 10000"),
            ("fill", ids["textbox 'name'"], {"text": 1}, "text 1: expected a text"),
            ("focus", ids["status ''"], {}, "cannot have the focus"),
            ("select", ids["textbox 'name'"], {"options": ["x"]}, "is not a list of options"),
            ("select", ids["combobox 'colour'"], {"options": ["Green"]}, 'has no option "Green"'),
            ("select", ids["combobox 'colour'"], {"options": ["None"]}, 'has no option "None"'),
            ("select", ids["combobox 'colour'"], {"options": ["Red", "Blue"]}, "takes one option"),
            ("select", ids["combobox 'colour'"], {"options": "Red"}, "options 'Red': expected a list of texts"),
            ("scroll", None, {"delta": [0, 1e9]}, "expected [x, y] of at most 100000 pixels"),
            ("scroll", None, {"delta": [0, float("nan")]}, "expected [x, y] of at most 100000 pixels"),
        ]
        for action, element, fields, reason in wrong:
            answer = await act(sandbox, action=action, element=element, **fields)
            assert not answer["ok"], (action, element, fields)
            assert reason in answer["error"], (action, element, fields, answer)
        assert (await act(sandbox, action="left_click", element=ids["button 'Press'"]))["ok"]

    shared(use, ELEMENTS)


def test_addresses_are_opened_and_ids_of_another_page_are_stale(shared: Callable[..., Any]) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        ids = await elements(sandbox)
        await write(sandbox, "/other.html", "<button>Press</button>")
        assert (await act(sandbox, action="goto", url="file:///other.html"))["ok"]
        other = await elements(sandbox)
        assert other["button 'Press'"] not in ids.values()
        assert "is not on the page" in (await act(sandbox, action="mouse_move", element=ids["button 'Press'"]))["error"]
        assert "is not on the page" in (await act(sandbox, action="focus", element=ids["button 'Press'"]))["error"]
        assert (await act(sandbox, action="go_back"))["ok"]
        assert "button 'Low'" in (await elements(sandbox))[""]
        assert (await act(sandbox, action="go_forward"))["ok"]
        assert "button 'Low'" not in (await elements(sandbox))[""]
        assert "no such page" in (await act(sandbox, action="go_forward"))["error"]
        for url in (
            "javascript:document.title='run'",
            "JAVASCRIPT:1",
            " javascript:1",
            "view-source:file:///page.html",
        ):
            assert "expected http://" in (await act(sandbox, action="goto", url=url))["error"]
        for url in ("chrome://version", "devtools://devtools/bundled/inspector.html", "data:text/html,x", "", None, 5):
            assert "expected http://" in (await act(sandbox, action="goto", url=url))["error"]
        for url, reason in (("file:///missing.html", "ERR_FILE_NOT_FOUND"), ("http://127.0.0.1:9", "ERR_")):
            assert reason in (await act(sandbox, action="goto", url=url))["error"]

    shared(use, ELEMENTS)


def test_a_page_cannot_deceive_the_functions_of_actions(shared: Callable[..., Any]) -> None:
    """The page replaces what they use. That would be called if they ran among its scripts."""

    async def use(sandbox: ApptainerSandbox) -> None:
        ids = await elements(sandbox)
        for action in (
            {"action": "left_click", "element": ids["button 'Low'"]},
            {"action": "fill", "element": ids["textbox 'name'"], "text": "x"},
            {"action": "focus", "element": ids["textbox 'story'"]},
            {"action": "select", "element": ids["combobox 'colour'"], "options": ["Blue"]},
        ):
            assert (await act(sandbox, **action))["ok"]
        assert "deceived" not in await tree(sandbox, "--ids")
        await act(sandbox, action="left_click", element=ids["button 'Match'"])
        assert "deceived" in await tree(sandbox, "--ids"), "the page's own scripts do call it"

    shared(use, ELEMENTS)


def test_six_pages_fit_the_processes_of_a_sandbox(shared: Callable[..., Any]) -> None:
    """The last test of the shared desktop, because the pages stay open."""

    async def use(sandbox: ApptainerSandbox) -> None:
        for _ in range(5):
            await open_page(sandbox)
        assert 'button "Press"' in await tree(sandbox)
        tasks = int((await sandbox.exec("ls -d /proc/[0-9]*/task/* | wc -l")).stdout)
        assert 80 < tasks < 256, "half of the 512 of a sandbox"
        assert not sandbox.breaches

    shared(use)
