#!/usr/bin/python3 -SI
"""Starts a desktop in a sandbox, acts on it, photographs it, and lists what is on it.

::

    screen start [--url FILE_OR_URL] [--size 1280x800]      in the background, once; returns when it is ready
    screen do '{"action": "left_click", "coordinate": [10, 20]}' [--screenshot FILE] [--scale WxH]
    screen tree [--scale WxH]                               what is on the desktop, with coordinates
    screen tree --ids                                       what is on the browser's page, with ids of its elements
    screen serve --listen HOST:PORT …                       in the foreground, for other sandboxes
    screen episode                                          the state of a page of MiniWoB++, with the server's key
    screen utterances SEED…                                 what the pages of MiniWoB++ ask for, by page and seed

Actions are those of Anthropic's computer tool (computer_20250124), and those of ``screen_server.py`` on elements of the
page by their ids. ``start``, ``do`` and ``episode`` print one line of JSON, ``{"ok": true, …}`` or ``{"ok": false,
"error": …}``, and exit with 0 or 1.

SCREEN_ADDRESS names the port of a server in another sandbox. SCREEN_URL and SCREEN_RUN are the defaults of --url and
--run, which a task can set. This file imports little, because each action starts it anew.
"""

import json
import os
import socket
import sys
import time

SERVER = "/usr/local/lib/screen_server.py"
ROOT = "/tmp/.screen"
"""Directory of the socket and the log."""
START_S = 120.0
"""Greatest time for a desktop to start. Many may start at once on a few cores."""


class Refused(Exception):
    """The request cannot be carried out, with the reason for the caller."""


def ask(request):
    """Sends a request to the server. Returns the answer and the PNG that follows it."""
    address = os.environ.get("SCREEN_ADDRESS")
    with socket.socket(socket.AF_INET if address else socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            if address:
                host, _, port = address.rpartition(":")
                connection.connect((host, int(port)))
            else:
                connection.connect(f"{ROOT}/socket")
        except FileNotFoundError:
            raise Refused("no desktop was started here; start one with: screen start") from None
        except OSError as error:
            raise Refused(f"display lost: its server does not answer ({error}); {_tail()}") from None
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer = json.loads(stream.readline())
                image = stream.read(answer.pop("bytes", 0))
        except (OSError, ValueError):
            raise Refused(f"display lost: its server has ended; {_tail()}") from None
    if not answer.pop("ok"):
        raise Refused(answer["error"])
    return answer, image


def _tail():
    """Returns the last line of the log."""
    try:
        with open(f"{ROOT}/log", "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 1000))
            return log.read().decode(errors="replace").strip().splitlines()[-1][-300:]
    except (OSError, IndexError):
        return "it left no log"


def start(words):
    """Starts a server in the background unless one answers, and waits until it is ready."""
    import fcntl
    import subprocess

    os.makedirs(ROOT, 0o700, exist_ok=True)
    with open(f"{ROOT}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return ask({"verb": "ping"})[0]
        except Refused:
            if os.environ.get("SCREEN_ADDRESS"):
                raise
        with open(f"{ROOT}/log", "ab") as log:
            server = subprocess.Popen(
                [sys.executable, "-I", SERVER, "serve", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and server.poll() is None:
            try:
                return ask({"verb": "ping"})[0]
            except Refused:
                time.sleep(0.02)
        server.kill()
        raise Refused(f"display lost: the desktop did not start; {_tail()}")


def act(words):
    """Carries out one action. Returns the answer."""
    options = _options(words, 1, "--screenshot", "--scale")
    try:
        action = json.loads(words[0])
    except (ValueError, RecursionError) as error:
        raise Refused(f"not JSON: {error}") from None
    file = options.get("--screenshot")
    request = {"verb": "do", "action": action, "scale": _scale(options), "screenshot": file is not None}
    answer, image = ask(request)
    if file is not None:
        with open(file, "wb") as stream:
            stream.write(image)
        answer["screenshot"] = file
    return answer


def _options(words, positional, *names):
    """Returns the options after the positional words. Raises Refused if there are other words."""
    rest = words[positional:]
    pairs = dict(zip(rest[::2], rest[1::2], strict=False))
    if len(words) < positional or len(rest) % 2 or not set(pairs) <= set(names):
        raise Refused(
            f"{' '.join(words)[:200]!r}: expected {positional} word(s) and {', '.join(names)}; see: screen --help"
        )
    return pairs


def _scale(options):
    text = options.get("--scale")
    if text is None:
        return None
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise Refused(f"--scale {text!r}: expected WIDTHxHEIGHT, such as 640x400")
    return int(width), int(height)


def main(words):
    """Carries out one verb. Returns the exit status."""
    verb, *rest = words or ["--help"]
    if verb in ("serve", "utterances"):
        os.execv(sys.executable, [sys.executable, "-I", SERVER, verb, *rest])
    if verb not in ("start", "do", "tree", "episode"):
        print(__doc__)
        return 0 if verb in ("-h", "--help") else 2
    try:
        if verb == "tree":
            ids = rest == ["--ids"]
            answer, _ = ask(
                {"verb": "tree", "ids": ids, "scale": None if ids else _scale(_options(rest, 0, "--scale"))}
            )
            print(answer["tree"].encode(errors="replace").decode(), end="")  # pages may have half a character
            return 0
        if verb == "episode":
            answer, _ = ask({"verb": "episode", "key": os.environ.get("SCREEN_KEY", "")})
        else:
            answer = start(rest) if verb == "start" else act(rest)
        print(json.dumps({"ok": True, **answer}))
        return 0
    except (Refused, OSError) as error:
        print(json.dumps({"ok": False, "error": str(error)}))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
