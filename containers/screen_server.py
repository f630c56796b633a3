#!/usr/bin/python3 -I
"""The server of ``screen``: starts a desktop, acts on it, and photographs it.

One process starts the X server, the window manager and Chromium, and holds the pipe over which Chromium is debugged:
there is no debugging port. It answers on a socket of this sandbox, or on a TCP port. It ends when one of them does.

A request is a line of JSON. The answer is a line of JSON, after it the PNG if there is one.

Actions take an ``element`` of the page in place of a ``coordinate``: an id from the tree, which an element keeps and no
other gets. Programs of ours that look at elements run in a JavaScript world of their own, which the page's scripts
cannot reach, and say nothing but what is wrong.

Uses the standard library, Pillow and xdotool.
"""

import argparse
import contextlib
import ctypes
import fcntl
import io
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import unicodedata

ROOT = "/tmp/.screen"
"""Directory of the socket and the log."""
SOCKET = f"{ROOT}/socket"
KEY = "SCREEN_KEY"
PAGES = "/opt/miniwob"

START_S = 60.0
"""Greatest time for the X server and for Chromium to start. Many may start at once on a few cores."""
ANSWER_S = 30.0
"""Greatest time for an answer of Chromium."""
LOAD_S = 10.0
"""Greatest time for a page that loads to answer."""
SHOWN_S = 1.0
"""Greatest time for a page to answer whether it is shown."""
MAX_ANSWER = 128 << 20
"""Greatest number of bytes of an answer of Chromium. This process needs some five times as much to read it."""
EPISODE_MB = 1200
"""Memory of all programs at which the browser of an episode is ended. The sandbox may have 2000 MB."""
LISTING_LOAD_S = 3.0
"""Greatest time that a tree with ids waits for a page to load."""
MAX_WAIT_S = 60.0
"""Greatest duration of the actions `wait` and `hold_key`."""
MAX_REQUEST = 1 << 20
MAX_SCROLL = 100
MAX_DELTA = 100_000
MAX_TEXT = 10_000
"""Greatest number of characters of the action `type`, which takes some 4 ms for each."""
TEXT_PART = 1000
MAX_DISPLAYS = 10_000
MAX_SIDE = 4096
"""Greatest width and height of a display and of a screenshot in pixels."""
SETTLE_S = 0.3
"""A screenshot waits for the image to stop changing, but no longer than this."""
FIRST_LOOK_S = 0.02
LOOK_S = 0.012
KEYS_S = 0.1
"""Time for programs to read a changed keyboard."""
MAX_LINES = 1000
"""Greatest number of lines of a tree."""
MAX_VALUE = 2000
"""Greatest number of characters of a field's value in a tree."""

BUTTONS = {"left_click": 1, "middle_click": 2, "right_click": 3, "double_click": 1, "triple_click": 1}
CLICKS = {"double_click": 2, "triple_click": 3}
POINTING = (*BUTTONS, "mouse_move", "left_click_drag")
"""Actions that take an element in place of a coordinate."""
WHEEL = {"up": 4, "down": 5, "left": 6, "right": 7}

CHROMIUM = [
    "/usr/lib/chromium/chromium",
    # A sandbox has no user namespaces to give, which Chromium's own sandbox is made of.
    "--no-sandbox",
    "--no-zygote",
    "--disable-gpu",
    "--in-process-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-breakpad",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--password-store=basic",
    # Fewer processes: no renderer in reserve, and no services in processes of their own.
    "--disable-features=SpareRendererForSitePerProcess,StorageServiceOutOfProcess,Translate,MediaRouter,OptimizationHints",
    "--enable-features=NetworkServiceInProcess2",
    "--remote-debugging-pipe",
    # Some 6 MB, which disks that are busy would delay.
    "--user-data-dir=/dev/shm/chromium",
]


JUDGED = "the episode is being judged"
SHOWN = "(document.visibilityState === 'visible') + document.hasFocus()"


class Refused(Exception):
    """The request cannot be carried out, with the reason for the caller."""


class Lost(Refused):
    """The desktop has ended."""


# --- Chromium -------------------------------------------------------------------------------------------------------


class Chromium:
    """A browser with one page, debugged over a pipe that only this process holds."""

    def __init__(self, url, env, size, log, scale=1.0, kiosk=False):
        to_read, to_write = os.pipe(), os.pipe()
        # Chromium reads descriptor 3 and writes 4; ours must not be among those that are overwritten.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_read[0], to_write[1])]
        self._ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_read[1], to_write[0])]
        for end in (*to_read, *to_write):
            os.close(end)

        def connect():
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        options = [f"--window-size={round(size[0] / scale)},{round(size[1] / scale)}", "--window-position=0,0"]
        options += [f"--force-device-scale-factor={scale}"] if scale != 1.0 else []
        options += ["--kiosk"] if kiosk else ["--start-maximized"]
        self.process = subprocess.Popen(
            [*CHROMIUM, *options, url],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            close_fds=False,
            preexec_fn=connect,
        )
        for end in theirs:
            os.close(end)
        self._buffer = bytearray()
        self._lock = threading.RLock()
        self._number = 0
        self._contexts = []
        self.opened = []
        """Pages and developer tools that were opened since :meth:`attach`, by address."""
        self.session = ""
        self._sessions = {}
        """Sessions of pages, by target id."""
        self._names = {}
        """Ids of elements, by document and node."""
        self._elements = {}
        """Frame, document and node of each id."""

    def attach(self):
        """Attaches to the page, and waits until it has loaded, at most some time."""
        deadline = time.monotonic() + START_S
        while not self.session:
            self.follow()
            if time.monotonic() > deadline:
                raise Lost("Chromium has opened no page")
            time.sleep(0.02)
        self.call("Target.setDiscoverTargets", {"discover": True}, session="")
        try:
            self.await_load(deadline)
        except Lost:
            raise
        except Refused:
            pass  # a dialog of the page, or a script that does not end: whoever looks at the screen sees it

    def follow(self):
        """Attaches to the page that is shown: the one with the focus, else the last opened one that is visible.

        Tabs and windows may have been opened or closed. A page that does not answer counts as visible.
        """
        targets = self.call("Target.getTargets", session="", timeout_s=START_S)["targetInfos"]
        pages = [each["targetId"] for each in targets if each["type"] == "page"]
        for page in pages:
            if page not in self._sessions:
                attached = self.call("Target.attachToTarget", {"targetId": page, "flatten": True}, session="")
                self._sessions[page] = attached["sessionId"]
        best = -1
        for session in reversed([session for page, session in self._sessions.items() if page in pages]):
            try:
                shown = self.value(SHOWN, session=session, timeout_s=SHOWN_S)
            except Lost:
                raise
            except Refused:
                shown = 1
            if shown > best:
                best, self.session = shown, session

    def await_load(self, deadline):
        """Waits until the page has loaded."""
        while self.value("document.readyState", timeout_s=LOAD_S) != "complete" and time.monotonic() < deadline:
            time.sleep(0.01)

    def call(self, method, params=None, session=None, timeout_s=ANSWER_S):
        """Calls a method of the DevTools protocol. Raises Refused if Chromium answers with an error."""
        with self._lock:
            return self._call(method, params, session, timeout_s)

    def heed(self):
        """Reads what Chromium has reported since the last call, unless a call is under way."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            while b"\0" in self._buffer or select.select([self._ends[1]], [], [], 0)[0]:
                self._note(self._read(time.monotonic() + ANSWER_S))
        finally:
            self._lock.release()

    def _call(self, method, params, session, timeout_s):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params or {}}
        session = self.session if session is None else session
        if session:
            message["sessionId"] = session
        try:
            os.write(self._ends[0], json.dumps(message).encode() + b"\0")
        except OSError:
            raise Lost("display lost: Chromium has ended") from None
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise Refused(f"Chromium: {method}: {answer['error'].get('message')}")
                return answer["result"]
            self._note(answer)

    def _note(self, event):
        if event.get("method") == "Runtime.executionContextCreated":
            self._contexts.append(event["params"]["context"])
        elif event.get("method") == "Target.targetCreated":
            target = event["params"]["targetInfo"]
            if target["type"] == "page" or target["url"].startswith("devtools:"):
                self.opened.append(target["url"])

    def _read(self, deadline):
        while (end := self._buffer.find(b"\0")) < 0:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._ends[1]], [], [], left_s)[0]:
                raise Refused("the page does not answer: a dialog of it, or a script, holds it up")
            data = os.read(self._ends[1], 1 << 20)
            if not data:
                raise Lost("display lost: Chromium has ended")
            self._buffer += data
            if len(self._buffer) > MAX_ANSWER:
                self.process.kill()
                raise Lost(f"display lost: the browser was ended, as an answer of it has over {MAX_ANSWER >> 20} MiB")
        message = json.loads(self._buffer[:end])
        del self._buffer[: end + 1]
        return message

    def context(self):
        """Returns the unique id of the page's present JavaScript context. It never names a later document's."""
        self._contexts.clear()
        self.call("Runtime.enable")
        contexts = [each["uniqueId"] for each in self._contexts if each.get("auxData", {}).get("isDefault")]
        self.call("Runtime.disable")
        if not contexts:
            raise Refused("the page has no JavaScript context")
        return contexts[0]

    def value(self, expression, context=None, session=None, timeout_s=ANSWER_S):
        """Evaluates JavaScript in the page, and returns its value."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        if context:
            params["uniqueContextId"] = context
        result = self.call("Runtime.evaluate", params, session, timeout_s)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise Refused(f"the page: {details.get('exception', {}).get('description', details.get('text'))}")
        return result["result"].get("value")

    # --- what is on the page ---

    def tree(self, ids=False):
        """Returns the accessibility tree of the page that is shown: (depth, role, name, details, box or None).

        With ids, returns it as lines of BrowserGym's form instead.
        """
        self.follow()
        (boxes, clickable), lines = self._boxes(), []
        for frame in self._frames():
            nodes = self.call("Accessibility.getFullAXTree", {"frameId": frame["id"]})["nodes"]
            by_id = {node["nodeId"]: node for node in nodes}
            stack = [(node["nodeId"], 0, "") for node in nodes[:1]]
            while stack:
                identity, depth, above = stack.pop()
                node = by_id.get(identity)
                if node is None:
                    continue
                role, name, dom = _role(node), _name(node), node.get("backendDOMNodeId")
                shown = not node.get("ignored") and role not in ("InlineTextBox", "LineBreak", "none")
                if ids:
                    shown = shown and (name or role not in PLAIN or dom in clickable)
                    shown = shown and not (role == "StaticText" and name in above)
                    if shown:
                        named = dom and role not in TEXTS and len(lines) < MAX_LINES
                        mark = f"[{self._mark(frame, dom)}] " if named else ""
                        lines.append("\t" * min(depth, 20) + mark + _element_line(node, dom in clickable))
                elif shown := shown and (name or role not in PLAIN):
                    lines.append((depth, role, name, _details(node), boxes.get(dom)))
                stack += [(child, depth + bool(shown), name) for child in reversed(node.get("childIds", []))]
        return lines

    def _frames(self):
        """Returns the frames of the page, each one before those inside it."""
        trees = [self.call("Page.getFrameTree")["frameTree"]]
        for tree in trees:
            trees += tree.get("childFrames", [])
        return [tree["frame"] for tree in trees]

    def _mark(self, frame, node):
        """Returns the id of an element."""
        key = frame["loaderId"], node
        if key not in self._names:
            self._names[key] = str(len(self._names))
            self._elements[self._names[key]] = (frame["id"], *key)
        return self._names[key]

    def on_element(self, name, function, *arguments):
        """Calls one of our functions on an element. Raises Refused with the problem that it returns, if any."""
        frame, document, node = self._elements.get(name, ("", "", 0))
        documents = {each["id"]: each["loaderId"] for each in self._frames()}
        gone = Refused(f"element {str(name)[:100]!r} is not on the page; look at it again for the present ids")
        if not frame or documents.get(frame) != document:
            raise gone
        world = self.call("Page.createIsolatedWorld", {"frameId": frame, "worldName": "screen"})
        found = {"backendNodeId": node, "executionContextId": world["executionContextId"]}
        try:
            target = self.call("DOM.resolveNode", found)["object"]["objectId"]
        except Lost:
            raise
        except Refused:
            raise gone from None
        call = {"functionDeclaration": function, "objectId": target, "returnByValue": True}
        result = self.call("Runtime.callFunctionOn", {**call, "arguments": [{"value": each} for each in arguments]})
        problem = "does not take this action" if "exceptionDetails" in result else result["result"].get("value")
        if problem == "gone":
            raise gone
        if problem:
            raise Refused(f"element {name!r} {problem}")

    def point(self, name):
        """Scrolls an element into view, and returns its middle in pixels of the display."""
        self.on_element(name, SHOW)
        quads = self.call("DOM.getContentQuads", {"backendNodeId": self._elements[name][2]})["quads"]
        quads = [quad for quad in quads if quad[0] != quad[4] and quad[1] != quad[5]]
        if not quads:
            raise Refused(f"element {name!r} is not visible")
        x, y, ratio = self.origin()
        return round(x + sum(quads[0][::2]) / 4 * ratio), round(y + sum(quads[0][1::2]) / 4 * ratio)

    def wheel(self, point, deltas):
        """Turns the mouse wheel, by pixels of the display."""
        x, y, ratio = self.origin()
        place = {"x": (point[0] - x) / ratio, "y": (point[1] - y) / ratio}
        turn = {"deltaX": deltas[0] / ratio, "deltaY": deltas[1] / ratio}
        self.call("Input.dispatchMouseEvent", {"type": "mouseWheel", **place, **turn})

    def navigate(self, name, url):
        """Opens an address, or an earlier or later page of the history."""
        deadline = time.monotonic() + LISTING_LOAD_S
        if name == "goto":
            # The scheme decides: an address that begins with javascript: runs code.
            if not isinstance(url, str) or not re.match(r"(https?|file)://|about:blank\Z", url):
                raise Refused(f"url {str(url)[:100]!r}: expected http://…, https://…, file://… or about:blank")
            if error := self.call("Page.navigate", {"url": url}).get("errorText"):
                raise Refused(f"url {url[:100]!r}: {error}")
            return
        history = self.call("Page.getNavigationHistory")
        index = history["currentIndex"] + (1 if name == "go_forward" else -1)
        if not 0 <= index < len(history["entries"]):
            raise Refused(f"{name}: the history has no such page")
        self.call("Page.navigateToHistoryEntry", {"entryId": history["entries"][index]["id"]})
        while time.monotonic() < deadline:
            with contextlib.suppress(Refused):  # between two pages there is none to ask
                if self.call("Page.getNavigationHistory")["currentIndex"] == index:
                    return
            time.sleep(0.01)

    def origin(self):
        """Returns where the page begins on the display in pixels, and the pixels of the display for one of the page."""
        x, y, ratio = self.value(
            "[window.screenX + (window.outerWidth - window.innerWidth) / 2,"
            " window.screenY + window.outerHeight - window.innerHeight, window.devicePixelRatio]"
        )
        return x * ratio, y * ratio, ratio

    def _boxes(self):
        """Returns the boxes of DOM nodes in pixels of the display, backend id → (x, y, width, height), and the backend
        ids of those that a click does something to."""
        snapshot = self.call("DOMSnapshot.captureSnapshot", {"computedStyles": [], "includePaintOrder": False})
        x, y, _ = self.origin()
        documents, boxes, clickable = snapshot["documents"], {}, set()
        origins = {0: (0.0, 0.0)}
        for number, document in enumerate(documents):
            if number not in origins:
                continue
            left, top = origins[number]
            left -= document.get("scrollOffsetX", 0)
            top -= document.get("scrollOffsetY", 0)
            nodes, layout = document["nodes"], document["layout"]
            clickable.update(nodes["backendNodeId"][node] for node in nodes.get("isClickable", {}).get("index", []))
            inner = document["nodes"].get("contentDocumentIndex", {"index": [], "value": []})
            inside = dict(zip(inner["index"], inner["value"], strict=True))
            for node, (box_x, box_y, width, height) in zip(layout["nodeIndex"], layout["bounds"], strict=True):
                if node in inside:
                    origins[inside[node]] = (left + box_x, top + box_y)
                identity = nodes["backendNodeId"][node]
                if width and height and identity not in boxes:
                    box = (x + left + box_x, y + top + box_y, width, height)
                    boxes[identity] = tuple(map(round, box))
        return boxes, clickable


TEXTS = ("RootWebArea", "StaticText", "ListMarker")
"""Roles of nodes that are no elements."""
PLAIN = ("generic", "group", "paragraph")
"""Roles that say nothing without a name."""
UNSEEN = ("editable", "readonly", "level", "settable", "multiline", "invalid", "focusable")
"""Properties that BrowserGym leaves out."""


def _role(node):
    return node.get("role", {}).get("value", "")


def _name(node):
    return str(node.get("name", {}).get("value", "")).strip()


def _element_line(node, clickable):
    """Returns role, name, value and properties as BrowserGym writes them."""
    role, name = _role(node), _name(node)
    parts = [f"{role} {name[:200]!r}" if name or role not in PLAIN else role]
    if (value := node.get("value", {}).get("value")) is not None:
        parts[0] += f" value={value[:MAX_VALUE] if isinstance(value, str) else value!r}"
    parts += ["clickable"] if clickable else []
    for entry in node.get("properties", []):
        key, state = entry["name"], entry["value"].get("value")
        if key in ("required", "focused", "atomic"):
            parts += [key] if state else []
        elif key not in UNSEEN and state is not None:
            parts.append(f"{key}={state[:200] if isinstance(state, str) else state!r}")
    return ", ".join(parts)


# Functions that run on an element. Each returns the problem, or an empty text.
SHOW = """function() {
  if (!this.isConnected) return 'gone';
  if (this.matches(':disabled')) return 'is disabled';
  this.scrollIntoViewIfNeeded();
  const box = Array.from(this.getClientRects()).find(each => each.width && each.height);
  if (!box) return 'is not visible';
  const hit = this.getRootNode().elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  if (!hit) return 'is outside the window';
  return this.contains(hit) ? '' : `is covered by another element (${hit.localName})`;
}"""
FOCUS = """function() {
  if (!this.isConnected) return 'gone';
  this.focus();
  return this.getRootNode().activeElement === this ? '' : 'cannot have the focus';
}"""
FILL = """function(text) {
  if (!this.isConnected) return 'gone';
  const field = this.localName === 'textarea' || this.localName === 'input'
    && !['button', 'checkbox', 'file', 'image', 'radio', 'reset', 'submit'].includes(this.type);
  if (!field && !this.isContentEditable) return 'is not a field for text';
  if (this.matches(':disabled') || this.readOnly) return 'cannot be edited';
  this.focus();
  if (field && ['color', 'date', 'datetime-local', 'month', 'range', 'time', 'week'].includes(this.type)) {
    this.value = text;
    if (this.value !== text) return `takes no such ${this.type}`;
    for (const kind of ['input', 'change']) this.dispatchEvent(new Event(kind, {bubbles: true}));
    return '';
  }
  if (field) this.select(); else this.ownerDocument.getSelection().selectAllChildren(this);
  this.ownerDocument.execCommand(text ? 'insertText' : 'delete', false, text);
  return '';
}"""
SELECT = """function(...wanted) {
  if (!this.isConnected) return 'gone';
  if (this.localName !== 'select') return 'is not a list of options';
  if (this.matches(':disabled')) return 'is disabled';
  if (wanted.length > 1 && !this.multiple) return 'takes one option';
  const options = Array.from(this.options), chosen = [];
  for (const name of wanted) {
    const option = options.find(each => !each.disabled && (each.value === name || each.label.trim() === name.trim()));
    if (!option) return `has no option ${JSON.stringify(name)}`;
    chosen.push(option);
  }
  this.focus();
  for (const option of options) option.selected = chosen.includes(option);
  for (const kind of ['input', 'change']) this.dispatchEvent(new Event(kind, {bubbles: true}));
  return '';
}"""


def _details(node):
    """Returns value and states of an accessibility node as text."""
    parts = []
    value = node.get("value", {}).get("value")
    if value not in (None, ""):
        value = value[:MAX_VALUE] if isinstance(value, str) else value
        parts.append(f"value={json.dumps(value, ensure_ascii=False)}")
    for entry in node.get("properties", []):
        name, state = entry["name"], entry["value"].get("value")
        if name in ("checked", "expanded", "selected", "disabled", "focused", "pressed") and state not in (
            False,
            "false",
        ):
            parts.append(name if state in (True, "true") else f"{name}={state}")
        elif name == "expanded":
            parts.append("collapsed")
    return " ".join(parts)


# --- MiniWoB++ ------------------------------------------------------------------------------------------------------

BEGIN = """(() => {
  core.EPISODE_MAX_TIME = %(time_ms)d;
  const style = document.createElement('style');
  style.textContent = '#reward-display, #click-canvas { display: none !important }';
  document.head.appendChild(style);
  Math.seedrandom(%(seed)s);
  core.startEpisodeReal();
  // The page shows its cover again when the episode has ended. A click there must not begin another one.
  core.cover_div.onclick = null;
  core.cover_div.textContent = 'DONE';
  // From here on, markup that the user types runs no code.
  const policy = document.createElement('meta');
  policy.httpEquiv = 'Content-Security-Policy';
  policy.content = "script-src 'none'; object-src 'none'; frame-src 'none'; form-action 'none'";
  document.head.appendChild(policy);
  const utterance = core.getUtterance();
  return typeof utterance === 'string' ? utterance : utterance.utterance;
})()"""
END = "[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL, WOB_REWARD_REASON, new Date().getTime() - core.ept0]"


class Episode:
    """One episode of a page of MiniWoB++.

    Its state is read in the document in which it began. A page that was loaded again has no episode. Developer tools
    run code in the page, so an episode in which they were opened has no reward. Nor has one whose browser has ended:
    keys can close it, and whoever failed would get another attempt if the service ended with it. For the same reason
    the browser is ended before the sandbox reaches its limit of memory, at which the service would end.
    """

    def __init__(self, chromium, page, seed, time_s):
        self.page, self.seed = page, seed
        self._chromium = chromium
        deadline = time.monotonic() + START_S
        while not chromium.value("typeof core === 'object' && core.cover_div !== null && WOB_TASK_READY"):
            if time.monotonic() > deadline:
                raise Refused(f"{page}: the page does not become ready")
            time.sleep(0.01)
        chromium.opened.clear()
        self._context = chromium.context()
        self.utterance = chromium.value(BEGIN % {"time_ms": time_s * 1000, "seed": json.dumps(seed)}, self._context)

    def watch(self):
        """Ends the browser once another page was opened, or once the memory is nearly full."""
        if self._chromium.process.poll() is not None:
            return
        self._chromium.heed()
        if self._chromium.opened or memory_exceeds(EPISODE_MB):
            self._chromium.process.kill()

    def state(self):
        """Returns whether the episode has ended, the page's own reward, its reason, and the age in seconds."""
        reason = "the page was left or loaded again"
        try:
            done, reward, reason, age_ms = self._chromium.value(END, self._context)
        except Lost as error:
            reason = str(error)
        except Refused:
            pass
        else:
            if not self._chromium.opened:
                return {"done": done, "reward": reward if done else 0.0, "reason": reason, "age_s": age_ms / 1000}
        if self._chromium.opened:
            reason = f"another page or the developer tools were opened: {self._chromium.opened[0]}"
        return {"done": True, "reward": 0.0, "reason": reason, "age_s": None}


def memory_exceeds(limit_mb):
    """Returns whether the processes of the sandbox have more memory than this, in MB.

    Their proportional set sizes say it, which take long to read. So they are read only if a larger sum is beyond it.
    """
    resident, proportional = 0, 0
    processes = list(filter(str.isdigit, os.listdir("/proc")))
    for process in processes:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{process}/statm") as statm:
            pages = statm.read().split()
            resident += (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")
    for process in processes if resident > limit_mb * 1e6 else ():
        with contextlib.suppress(OSError), open(f"/proc/{process}/smaps_rollup") as sizes:
            proportional += sum(int(line.split()[1]) * 1024 for line in sizes if line.startswith("Pss:"))
    return proportional > limit_mb * 1e6


def page_url(page):
    """Returns the address of a page. Raises Refused if there is none."""
    if not page.replace("-", "").isalnum() or not os.path.exists(f"{PAGES}/miniwob/{page}.html"):
        raise Refused(f"no page of MiniWoB++ is called {page!r}; see {PAGES}/miniwob")
    return f"file://{PAGES}/miniwob/{page}.html"


# --- the desktop ----------------------------------------------------------------------------------------------------


class Letters:
    """Types characters that the keyboard lacks, on keys that it leaves free.

    xdotool lends a key to each such character and takes it back at once, before slow programs have read it. Here a
    character keeps its key until another needs it.
    """

    def __init__(self, display):
        self._x11, self._test = ctypes.CDLL("libX11.so.6"), ctypes.CDLL("libXtst.so.6")
        self._x11.XOpenDisplay.restype = ctypes.c_void_p
        self._x11.XGetKeyboardMapping.restype = ctypes.POINTER(ctypes.c_ulong)
        self._display = ctypes.c_void_p(self._x11.XOpenDisplay(display.encode()))
        least, most, width = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._x11.XDisplayKeycodes(self._display, ctypes.byref(least), ctypes.byref(most))
        count = most.value - least.value + 1
        table = self._x11.XGetKeyboardMapping(self._display, ctypes.c_ubyte(least.value), count, ctypes.byref(width))
        rows = [table[row * width.value : (row + 1) * width.value] for row in range(count)]
        self._free = [least.value + row for row in range(count) if not any(rows[row])]
        self._keys = {}

    def type(self, text):
        """Types a text without line ends."""
        while text:
            letters, end = set(), 0
            while end < len(text) and len(letters | {text[end]}) <= len(self._free):
                letters.add(text[end])
                end += 1
            self._type(text[:end], letters)
            text = text[end:]

    def _type(self, text, letters):
        missing = sorted(letters - set(self._keys))
        if missing:
            kept = {letter: key for letter, key in self._keys.items() if letter in letters}
            unused = [key for key in self._free if key not in self._keys.values()]
            unused += [key for letter, key in self._keys.items() if letter not in letters]
            if len(missing) > len(self._free) - len(self._keys):
                self._keys = kept
            for letter, key in zip(missing, unused, strict=False):
                symbol = ord(letter) if ord(letter) < 0x100 else 0x01000000 | ord(letter)
                # The same with and without shift, for capitals.
                self._x11.XChangeKeyboardMapping(self._display, key, 2, (ctypes.c_ulong * 2)(symbol, symbol), 1)
                self._keys[letter] = key
            self._x11.XSync(self._display, 0)
            time.sleep(KEYS_S)
        for letter in text:
            for down in (1, 0):
                self._test.XTestFakeKeyEvent(self._display, self._keys[letter], down, ctypes.c_ulong(0))
            self._x11.XSync(self._display, 0)
            time.sleep(0.002)


class Desktop:
    """An X server, a window manager, and perhaps Chromium."""

    def __init__(self, size, url="", scale=1.0, kiosk=False):
        self.size = size
        self._pointer = (size[0] // 2, size[1] // 2)
        self._log = os.open(f"{ROOT}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.display = ""
        self.chromium = None
        self.needs_browser = True
        """Whether the desktop counts as lost once the browser has ended."""
        self.may_navigate = True
        """Whether actions may leave the page."""
        self.judged = threading.Event()
        """Set once nothing more may be done on the desktop."""
        self._programs = {}
        self._letters = None
        self._start_server()
        # Programs would start a session bus and wait for it. Nothing here needs one.
        self._env = {
            **os.environ,
            "DISPLAY": self.display,
            "DBUS_SESSION_BUS_ADDRESS": "disabled:",
            "NO_AT_BRIDGE": "1",
        }
        if not kiosk:
            self._programs["the window manager"] = self.run(["openbox", "--sm-disable"])
        if url:
            self.chromium = Chromium(url, self._env, size, self._log, scale, kiosk)
            self._programs["Chromium"] = self.chromium.process
            self.chromium.attach()

    def _start_server(self):
        """Starts the X server on a socket in /tmp alone.

        Its abstract socket would belong to the network, which other sandboxes and users may share. Clients try that
        address first, so this process holds it, without listening: a stranger's program cannot pose as the server.
        """
        self._held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for number in range(MAX_DISPLAYS):
            with contextlib.suppress(OSError):
                if not os.path.exists(f"/tmp/.X{number}-lock"):
                    self._held.bind(f"\0/tmp/.X11-unix/X{number}")
                    break
        else:
            raise Lost("the X server does not start: each display number is taken in this network")
        self.display = f":{number}"
        os.makedirs("/tmp/.X11-unix", exist_ok=True)  # which the X server does only for root
        reading, writing = os.pipe()
        self._programs["Xvfb"] = subprocess.Popen(
            [
                *("Xvfb", self.display, "-displayfd", str(writing)),
                *("-screen", "0", f"{self.size[0]}x{self.size[1]}x24", "-dpi", "96"),
                *("-nolisten", "tcp", "-nolisten", "local", "-ac", "-noreset", "-nocursor"),
            ],
            pass_fds=[writing],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        os.close(writing)
        if not select.select([reading], [], [], START_S)[0]:
            raise Lost("the X server does not start")
        with open(reading) as stream:
            if not stream.readline().strip():
                raise Lost(f"the X server did not start: {_tail()}")

    def await_manager(self):
        """Waits until the window manager answers. A window that appears before it never gets the focus."""
        deadline = time.monotonic() + START_S
        while "the window manager" in self._programs:
            with contextlib.suppress(Refused):
                self._xdotool(["get_num_desktops"])
                return
            if time.monotonic() > deadline:
                raise Lost("the window manager does not start")
            time.sleep(LOOK_S)

    def run(self, command):
        """Starts a program on the desktop."""
        return subprocess.Popen(
            command, env=self._env, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def check(self):
        """Raises Lost if one of the programs has ended."""
        for name, program in self._programs.items():
            if program.poll() is not None and (self.needs_browser or name != "Chromium"):
                raise Lost(f"display lost: {name} ended with {program.returncode}")

    def close(self):
        """Ends all programs."""
        for program in self._programs.values():
            if program.poll() is None:
                program.kill()

    # --- actions ---

    def do(self, action, scale):
        """Carries out one action. Returns what it adds to the answer."""
        if not isinstance(action, dict) or not isinstance(action.get("action"), str):
            raise Refused('expected an object with "action", such as {"action": "left_click", "coordinate": [10, 20]}')
        name, pointer = action["action"], self._pointer
        point = self._point(action, "coordinate", scale, "element" if name in POINTING else "")
        words = ["mousemove", *map(str, point)] if point else []
        if name in BUTTONS:
            held = _text(action, "text", "") or _text(action, "key", "")
            repeat = ["--repeat", str(CLICKS[name]), "--delay", "20"] if name in CLICKS else ["--delay", "0"]
            click = ["click", *repeat, str(BUTTONS[name])]
            self._xdotool(words, ["keydown", held] if held else [], click, ["keyup", held] if held else [])
        elif name == "mouse_move":
            self._xdotool(_needed(words, "coordinate"))
        elif name == "left_click_drag":
            start = self._point(action, "start_coordinate", scale, "start_element")
            self._drag(start or pointer, _needed(point, "coordinate"))
        elif name in ("left_mouse_down", "left_mouse_up"):
            self._xdotool(words, ["mousedown" if name.endswith("down") else "mouseup", "1"])
        elif name == "scroll" and "delta" in action:
            deltas = action["delta"]
            if not _is_pair(deltas) or not all(abs(delta) <= MAX_DELTA for delta in deltas):
                raise Refused(f"delta {deltas!r}: expected [x, y] of at most {MAX_DELTA} pixels")
            self._browser().wheel(self._pointer, [delta / factor for delta, factor in zip(deltas, scale, strict=True)])
        elif name == "scroll":
            direction = action.get("scroll_direction")
            amount = _number(action, "scroll_amount", 3, MAX_SCROLL)
            if direction not in WHEEL:
                raise Refused(f"scroll_direction {direction!r}: expected one of {', '.join(WHEEL)}")
            held = _text(action, "text", "")
            click = (
                ["click", "--repeat", str(int(amount)), "--delay", "5", str(WHEEL[direction])] if amount >= 1 else []
            )
            self._xdotool(words, ["keydown", held] if held else [], click, ["keyup", held] if held else [])
        elif name == "focus":
            self._browser().on_element(_text(action, "element"), FOCUS)
        elif name == "fill":
            text = _text(action, "text", "")
            if len(text) > MAX_TEXT:
                raise Refused(f"text has {len(text)} characters: fill in at most {MAX_TEXT}")
            self._browser().on_element(_text(action, "element"), FILL, text)
        elif name == "select":
            options = action.get("options")
            if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
                raise Refused(f"options {options!r}: expected a list of texts")
            self._browser().on_element(_text(action, "element"), SELECT, *options)
        elif name in ("goto", "go_back", "go_forward"):
            if not self.may_navigate:
                raise Refused(f"{name}: the page of this task must not be left")
            self._browser().navigate(name, action.get("url"))
        elif name == "type":
            self._type(_text(action, "text"))
        elif name == "key":
            self._xdotool(words, ["key", "--", _text(action, "text")])
        elif name == "hold_key":
            held = _text(action, "text")
            self._xdotool(["keydown", held])
            self.judged.wait(_number(action, "duration", 1, MAX_WAIT_S))
            self._xdotool(["keyup", held])
        elif name == "wait":
            self.judged.wait(_number(action, "duration", 1, MAX_WAIT_S))
        elif name == "cursor_position":
            x, y = self._pointer
            return {"coordinate": [round(x * scale[0]), round(y * scale[1])]}
        elif name != "screenshot":
            raise Refused(f"action {name!r}: not one of Anthropic's computer tool (computer_20250124)")
        return {}

    def _browser(self):
        if self.chromium is None or self.chromium.process.poll() is not None:
            raise Refused("no browser runs on this desktop")
        return self.chromium

    def _point(self, action, key, scale, element=""):
        """Returns the point of a coordinate, else that of an element, else None."""
        value = action.get(key)
        if value is None and element and action.get(element) is not None:
            x, y = self._browser().point(_text(action, element))
            value = [x * scale[0], y * scale[1]]
        if value is None:
            return None
        if not _is_pair(value):
            raise Refused(f"{key} {value!r}: expected [x, y]")
        x, y = value[0] / scale[0], value[1] / scale[1]
        if not (0 <= x < self.size[0] and 0 <= y < self.size[1]):
            width, height = round(self.size[0] * scale[0]), round(self.size[1] * scale[1])
            raise Refused(f"{key} {value}: outside the screen of {width}x{height}")
        self._pointer = round(x), round(y)
        return self._pointer

    def _drag(self, start, end):
        """Drags in steps: pages that follow the pointer ignore one that jumps."""
        self._xdotool(["mousemove", *map(str, start)])
        self._pointer = end
        words = ["mousedown", "1"]
        for step in range(1, 9):
            x, y = (round(a + (b - a) * step / 8) for a, b in zip(start, end, strict=True))
            words += ["sleep", "0.01", "mousemove", str(x), str(y)]
        self._xdotool(words, ["sleep", "0.02", "mouseup", "1"])

    def _type(self, text):
        text = text.replace("\r\n", "\n")
        if len(text) > MAX_TEXT:
            raise Refused(f"text has {len(text)} characters: type at most {MAX_TEXT} at a time")
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text.replace("\n", "").replace("\t", "")):
            raise Refused(f"text {text[:100]!r}: has a character that no key writes")
        for part in re.findall(rf"[ -~]{{1,{TEXT_PART}}}|\n|\t|[^ -~\n\t]+", text):
            if part in ("\n", "\t"):
                self._xdotool(["key", "Return" if part == "\n" else "Tab"])
            elif part.isascii() and part.isprintable():
                self._xdotool(["type", "--delay", "2", "--", part])
            else:
                self._letters = self._letters or Letters(self.display)
                self._letters.type(part)

    def _xdotool(self, *words):
        if self.judged.is_set():
            raise Refused(JUDGED)
        command = ["xdotool", *(word for part in words for word in part)]
        try:
            done = subprocess.run(
                command, env=self._env, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S, check=False
            )
        except subprocess.TimeoutExpired:
            self.check()
            raise Refused(f"xdotool did not end within {ANSWER_S:g} s") from None
        said = done.stderr.decode(errors="replace").strip()
        if done.returncode or "No such key name" in said:
            self.check()
            raise Refused(said[-300:] or f"xdotool ended with {done.returncode}")
        return done.stdout.decode(errors="replace")

    # --- looks ---

    def screenshot(self, settle):
        """Returns the screen as a Pillow image, once it has stopped changing."""
        image = None
        if settle:
            time.sleep(FIRST_LOOK_S)
            deadline = time.monotonic() + SETTLE_S
            before = None
            while before is None or image.tobytes() != before:
                before = image.tobytes() if image else None
                image = self._grab()
                if before is None:
                    time.sleep(LOOK_S)
                elif time.monotonic() > deadline:
                    break
        return image or self._grab()

    def _grab(self):
        from PIL import ImageGrab

        try:
            return ImageGrab.grab(xdisplay=self.display)
        except OSError as error:
            self.check()
            raise Lost(f"display lost: {error}") from None

    def png(self, scale, settle):
        """Returns a screenshot as PNG, with the pointer drawn into it."""
        from PIL import Image, ImageDraw

        image = self.screenshot(settle)
        x, y = self._pointer
        arrow = [(0, 0), (0, 14), (4, 11), (7, 17), (9, 16), (6, 10), (11, 10)]
        ImageDraw.Draw(image).polygon([(x + dx, y + dy) for dx, dy in arrow], fill="black", outline="white")
        if scale != (1.0, 1.0):
            size = round(self.size[0] * scale[0]), round(self.size[1] * scale[1])
            image = image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
        data = io.BytesIO()
        image.save(data, "PNG", compress_level=1)
        return data.getvalue()

    def tree(self, scale, ids=False):
        """Returns the windows of the desktop, and the accessibility tree of Chromium's page, as text.

        With ids, returns the tree alone, with ids of elements instead of coordinates, once the page has loaded.
        """
        lines = []
        if ids:
            self.screenshot(settle=True)
            try:
                self._browser().await_load(time.monotonic() + LISTING_LOAD_S)
                lines += self._browser().tree(ids=True)
            except Lost:
                raise
            except Refused as error:
                lines.append(f"({error})")
            return self._cut(lines)
        if self.chromium is None or "the window manager" in self._programs:
            for title, (x, y, width, height), active in self._windows():
                lines.append(_line(0, "window", title, "active" if active else "", (x, y, width, height), scale))
        if self.chromium is not None and self.chromium.process.poll() is None:
            try:
                lines += [_line(*node, scale) for node in self.chromium.tree()]
            except Lost:
                raise
            except Refused as error:
                lines.append(f"({error})")
        return self._cut(lines)

    @staticmethod
    def _cut(lines):
        less = [f"… {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
        return "\n".join([*lines[:MAX_LINES], *less]) + "\n"

    def _windows(self):
        try:
            listed = self._xdotool(["search", "--onlyvisible", "--name", ".+"]).split()
        except Lost:
            raise
        except Refused:
            return []  # xdotool's status if there is none
        active = self._xdotool(["getwindowfocus"]).strip()
        windows = []
        for window in listed:
            try:
                title, *rest = self._xdotool(["getwindowname", window], ["getwindowgeometry", "--shell", window]).split(
                    "\n"
                )
            except Lost:
                raise
            except Refused:
                continue  # it was closed meanwhile
            shape = dict(line.split("=", 1) for line in rest if "=" in line)
            box = tuple(int(shape[key]) for key in ("X", "Y", "WIDTH", "HEIGHT"))
            if box[2] > 1 and box[3] > 1 and title.strip():
                windows.append((title.strip(), box, window == active))
        return windows


def _line(depth, role, name, details, box, scale):
    shown = f"{'  ' * min(depth, 20)}{role} {json.dumps(name[:200], ensure_ascii=False)}"
    if box:
        x, y = (box[0] + box[2] / 2) * scale[0], (box[1] + box[3] / 2) * scale[1]
        shown += f" ({round(x)},{round(y)}) {round(box[2] * scale[0])}x{round(box[3] * scale[1])}"
    return f"{shown} {details}".rstrip()


def _is_pair(value):
    return isinstance(value, list) and len(value) == 2 and all(type(each) in (int, float) for each in value)


def _text(action, key, default=None):
    value = action.get(key, default)
    if not isinstance(value, str) or (default is None and not value) or "\0" in value:
        raise Refused(f"{key} {value!r}: expected a text")
    return value


def _number(action, key, default, most):
    value = action.get(key, default)
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise Refused(f"{key} {value!r}: expected a number from 0 to {most:g}")
    return value


def _needed(value, key):
    if not value:
        raise Refused(f"{key} is missing")
    return value


def _tail():
    with contextlib.suppress(OSError), open(f"{ROOT}/log", "rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - 2000))
        return log.read().decode(errors="replace").strip()[-300:]
    return ""


# --- the server -----------------------------------------------------------------------------------------------------


class Server:
    """Answers one request at a time, each on a connection of its own.

    A request is a line of JSON. The answer is a line of JSON, after it the PNG if there is one.
    """

    def __init__(self, desktop, listener, episode=None, key=""):
        self._desktop, self._listener, self._episode, self._key = desktop, listener, episode, key
        self._lock = threading.Lock()

    def serve(self):
        """Serves until the desktop ends. With an episode, serves on: the verifier reads that it has no reward."""
        threading.Thread(target=self._accept, daemon=True).start()
        while True:
            time.sleep(0.2)
            try:
                if self._episode is None:
                    self._desktop.check()
                else:
                    self._episode.watch()
            except Refused as error:
                if self._episode is None:
                    time.sleep(0.5)  # for the answer to a request that waits
                    return str(error)

    def _accept(self):
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(ANSWER_S)
            with connection.makefile("rb") as stream:
                line = stream.readline(MAX_REQUEST)
            image = b""
            try:
                request = json.loads(line)
                if not isinstance(request, dict):
                    raise Refused("expected an object")
                judge = request.get("verb") == "episode"
                if judge:
                    self._judge(request.get("key"))
                with self._lock:
                    if judge:
                        answer = self._episode.state()
                    else:
                        answer, image = self._carry_out(request)
                answer = {"ok": True, **answer}
            except Refused as error:
                answer = {"ok": False, "error": str(error)}
            except Exception as error:
                answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            if image:
                answer["bytes"] = len(image)
            connection.settimeout(None)
            connection.sendall(json.dumps(answer).encode() + b"\n" + image)

    def _judge(self, key):
        """Ends what is under way and what waits. Raises Refused without the key."""
        if self._episode is None or not self._key or key != self._key:
            raise Refused("only the verifier has the key to the episode")
        self._desktop.judged.set()

    def _carry_out(self, request):
        if self._desktop.judged.is_set():
            raise Refused(JUDGED)
        self._desktop.check()
        desktop, verb = self._desktop, request.get("verb")
        scale = _scale(request.get("scale"), desktop.size)
        if verb == "ping":
            return {"size": list(desktop.size)}, b""
        if verb == "tree":
            return {"tree": desktop.tree(scale, bool(request.get("ids")))}, b""
        if verb == "do":
            action = request.get("action")
            answer = desktop.do(action, scale)
            if not request.get("screenshot"):
                return answer, b""
            moved = action["action"] not in ("screenshot", "cursor_position", "wait")
            return answer, desktop.png(scale, settle=moved)
        raise Refused(f"{verb!r}: unknown")


def _scale(wanted, size):
    """Returns the factors from the display to scaled pixels."""
    if wanted is None:
        return (1.0, 1.0)
    width, height = wanted
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise Refused(f"scale {width}x{height}: expected at most {MAX_SIDE}x{MAX_SIDE}")
    return width / size[0], height / size[1]


def serve(options):
    """Starts a desktop and serves it until it ends."""
    os.makedirs(ROOT, 0o700, exist_ok=True)
    key = os.environ.pop(KEY, "")  # programs that start from here do not inherit it
    if options.miniwob:
        options.url = page_url(options.miniwob)
    if options.listen:
        host, _, port = options.listen.rpartition(":")
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
    else:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET)
        listener.bind(SOCKET)
    desktop = Desktop(options.size, options.url, options.zoom, bool(options.miniwob) or options.kiosk)
    try:
        episode = None
        if options.miniwob:
            episode = Episode(desktop.chromium, options.miniwob, options.seed, options.time)
            desktop.needs_browser = desktop.may_navigate = False
        if options.run:
            desktop.await_manager()
            desktop.run(["/bin/sh", "-c", options.run])
        # Only a desktop that is ready accepts connections, so that a health check can try one.
        listener.listen(64)
        why = Server(desktop, listener, episode, key).serve()
    finally:
        desktop.close()
    raise Lost(why)


def utterances(seeds):
    """Prints what each page asks for, as one line of JSON by page and seed."""
    os.makedirs(ROOT, 0o700, exist_ok=True)
    pages = sorted(name[:-5] for name in os.listdir(f"{PAGES}/miniwob") if name.endswith(".html"))
    desktop = Desktop((640, 640), page_url(pages[0]), kiosk=True)
    try:
        for page in pages:
            for seed in seeds:
                try:
                    desktop.chromium.call("Page.navigate", {"url": page_url(page)})
                    while desktop.chromium.value("document.readyState") != "complete":
                        time.sleep(0.005)
                    asked = Episode(desktop.chromium, page, seed, 1000).utterance
                    line = {"page": page, "seed": seed, "utterance": asked}
                except Refused as error:
                    line = {"page": page, "seed": seed, "error": str(error)}
                print(json.dumps(line), flush=True)
    finally:
        desktop.close()


def _size(text):
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and 16 <= int(width) <= MAX_SIDE and 16 <= int(height) <= MAX_SIDE):
        raise argparse.ArgumentTypeError(f"{text!r}: expected WIDTHxHEIGHT, such as 1280x800")
    return int(width), int(height)


def main():
    """Carries out one verb. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="screen")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("serve", aliases=["start"])
    verb.add_argument("--size", type=_size, default=(1280, 800), help="of the display in pixels, 1280x800 by default")
    url, run = os.environ.get("SCREEN_URL", ""), os.environ.get("SCREEN_RUN", "")
    verb.add_argument("--url", default=url, help="file or address that Chromium opens; without it no browser starts")
    verb.add_argument("--run", default=run, help="shell command that runs on the desktop")
    verb.add_argument("--kiosk", action="store_true", help="the browser fills the display, without a window manager")
    verb.add_argument("--zoom", type=float, default=1.0, help="pixels of the display for each pixel of a page")
    verb.add_argument("--listen", default="", metavar="HOST:PORT", help="answer other sandboxes")
    verb.add_argument("--miniwob", default="", metavar="PAGE", help="begin an episode of this page")
    verb.add_argument("--seed", default="0", help="of the episode")
    verb.add_argument("--time", type=float, default=600.0, help="seconds until the page ends the episode")
    verb = verbs.add_parser("utterances")
    verb.add_argument("seeds", nargs="+")
    arguments = parser.parse_args()
    try:
        if arguments.verb == "utterances":
            utterances(arguments.seeds)
        else:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            serve(arguments)
        return 0
    except (Refused, OSError) as error:
        print(json.dumps({"ok": False, "error": str(error)}), flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
