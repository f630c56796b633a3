"""Record what the real Apptainer, unsquashfs and unshare print in :mod:`.scenes`, and replay it.

::

    python -m tests.environments.apptainer.recorder [SCENE...]

Writes ``recorded/SCENE.txt``: each call of a program in order, in the form of :mod:`tests.support.calls`. Paths and
names of the machine are neutral. :class:`Recording` answers the same calls in a test.
"""

from __future__ import annotations

import functools
import json
import lzma
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from megaflow_hpc.environments.sandbox.rootfs import overlay
from megaflow_hpc.host import apptainer
from megaflow_hpc.host.apptainer import find_apptainer, version
from megaflow_hpc.host.files import remove_tree
from tests.environments.apptainer.scenes import IMAGE, RECORDED, SCENES, Results
from tests.support.calls import Call, read_calls
from tests.support.namespaces import restricted

WORK = "/work"
"""Stands for a scene's directory."""
MAX_LINES = 45
NEUTRAL = (
    (r"(?<![^\s'\"])/\S*/(apptainer|singularity|unshare|setpriv|unsquashfs|sh)(?=['\"\s]|$)", r"\1"),
    (r"megaflow-build\.[^/\s'\"]+", "megaflow-build.X"),
    (r"(probe-|/tmp|build-temp-|bundle-temp-|rootfs-)[a-z0-9_]{8,10}\b", r"\1X"),
    (r"--map-(user|group)=\d+", r"--map-\1=1000"),
    (r"-processors \d+", "-processors 2"),
    (r"echo \d+ >(/proc/sys/user/max_(inotify|fanotify)\w+)", r"echo 16 >\1"),
    (r" --bind /(bin|lib\w*):\S+", ""),
    (r"chdir /[^:\s]+:", "chdir /home/ada:"),
    (r"(?m)^(?!APPTAINER_SUID|LIBEXECDIR|PREFIX)[A-Z_]+=.*\n", ""),
    (r"(?m)^LIBEXECDIR=.*$", "LIBEXECDIR=/usr/libexec"),
    (r"/\S+/apptainer/mnt/session", "/session"),
    (r"(127\.0\.0\.1|\[::1\]):\d{5}\b", r"\1:50000"),
)
"""Patterns of text that differs between machines or does not matter, and their replacements."""


def neutral(text: str, folder: Path) -> str:
    """Replaces this machine's names and paths."""
    text = text.replace(str(folder), WORK)
    for pattern, replacement in NEUTRAL:
        text = re.sub(pattern, replacement, text)
    return text


class Recording:
    """Answers each call as it was recorded, in place of :class:`subprocess.Popen`.

    The answers to the same call follow one another; the last one repeats.
    """

    def __init__(self, scene: str, folder: Path) -> None:
        self._folder = folder
        self._answers: dict[str, list[Call]] = {}
        for call in read_calls(RECORDED / f"{scene}.txt"):
            self._answers.setdefault(call.words, []).append(call)

    def __call__(self, args: Sequence[str], **options: Any) -> _Process:
        words = neutral(shlex.join(args), self._folder)
        assert words in self._answers, f"not recorded: {words}"
        answers = self._answers[words]
        call = answers.pop(0) if len(answers) > 1 else answers[0]
        if "build" in args and not call.status:
            if "--sandbox" in args:
                Path(args[-2]).mkdir()
            else:
                Path(args[-2]).write_bytes(lzma.decompress(IMAGE.read_bytes()))
        is_text = any(options.get(name) for name in ("text", "errors", "encoding", "universal_newlines"))
        streams = (text.replace(WORK, str(self._folder)) for text in (call.out, call.err))
        return _Process(args, call.status, *((text if is_text else text.encode()) for text in streams))


class _Process:
    """A process that has ended."""

    def __init__(self, args: Sequence[str], status: int, out: str | bytes, err: str | bytes) -> None:
        self.args, self.returncode, self._output = args, status, (out, err)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def communicate(self, *_: object, **__: object) -> tuple[str | bytes, str | bytes]:
        return self._output

    def poll(self) -> int:
        return self.returncode


@contextmanager
def programs(popen: Any) -> Iterator[None]:
    """Starts processes by ``popen``, without answers of earlier processes that the package has cached."""
    caches = [value for value in vars(apptainer).values() if isinstance(value, functools._lru_cache_wrapper)]

    def forget() -> None:
        overlay._works_on_device.clear()
        for cache in caches:
            cache.cache_clear()

    forget()
    try:
        with mock.patch.object(subprocess, "Popen", popen):
            yield
    finally:
        forget()


def replay(scene: str, folder: Path) -> Results:
    """Runs a scene with recorded answers."""
    with programs(Recording(scene, folder)):
        return {name: neutral(text, folder) for name, text in SCENES[scene].run(folder).items()}


@dataclass(frozen=True)
class Recorded:
    """A scene as the real programs answered it."""

    text: str
    """Text of the scene's file."""
    results: Results
    image: bytes = b""
    """The image that the scene built, if any. The scenes after it use the image."""


def record(scene: str) -> Recorded:
    """Runs a scene with the real programs. A restricted node is a namespace of another process."""
    folder = Path(tempfile.mkdtemp(prefix="recorded-"))
    try:
        before = SCENES[scene].before
        if before is None:
            recorded = _record_here(scene, folder)
            built = folder / "success.sif"
            return replace(recorded, image=built.read_bytes()) if built.exists() else recorded
        done = restricted(before(folder), "-m", f"{__package__}.recorder", "--in", str(folder), scene)
        if done.returncode:
            raise RuntimeError(f"{scene}: {done.stderr}")
        return Recorded(**json.loads(done.stdout))
    finally:
        remove_tree(folder)


def _record_here(scene: str, folder: Path) -> Recorded:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    raw: list[tuple[Sequence[str], int, Any, Any]] = []

    class Recorder(subprocess.Popen):  # type: ignore[type-arg]
        """Remembers the call once its output has been read."""

        def communicate(self, *arguments: Any, **options: Any) -> tuple[Any, Any]:
            out, err = super().communicate(*arguments, **options)
            raw.append((self.args, self.returncode, out, err))  # type: ignore[arg-type]
            return out, err

    with mock.patch.dict(os.environ, environment, clear=True), programs(Recorder):
        results = SCENES[scene].run(folder)
    calls: dict[Call, None] = {}
    for args, status, out, err in raw:
        streams = (text.decode() if isinstance(text, bytes) else text or "" for text in (out, err))
        words, *streams = (neutral(text, folder) for text in (shlex.join(args), *streams))
        calls[Call(words, status, *map(shortened, streams))] = None
    text = "\n".join([f"apptainer {version(find_apptainer())}", "", *(call.text() for call in calls), ""])
    return Recorded(text, {name: neutral(text, folder) for name, text in results.items()})


def shortened(text: str) -> str:
    """Returns the first and last lines of a long text, such as a help text."""
    lines = text.splitlines(keepends=True)
    return text if len(lines) <= MAX_LINES else "".join([*lines[:4], "…\n", *lines[-4:]])


def main() -> None:
    if sys.argv[1:2] == ["--in"]:  # on the restricted node
        recorded = _record_here(sys.argv[3], Path(sys.argv[2]))
        print(json.dumps({"text": recorded.text, "results": recorded.results}))
        return
    for scene in sys.argv[1:] or SCENES:
        recorded = record(scene)
        (RECORDED / f"{scene}.txt").write_text(recorded.text)
        if recorded.image:
            IMAGE.write_bytes(lzma.compress(recorded.image))
        print(scene)


if __name__ == "__main__":
    main()
