"""The peers of the gateway: LiteLLM's proxy and vllm-router, each as a program with its defaults.

They have a virtual environment of their own, created once in the user's cache (800 MB), because LiteLLM pins versions
that other packages need newer. A peer that cannot be installed or does not answer is named and omitted.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from megaflow_hpc.host.address import free_port
from megaflow_hpc.host.child import die_with_parent
from megaflow_hpc.host.process import stat_fields

PACKAGES = ("litellm[proxy]", "vllm-router")
START_S = 300.0
KEY = "sk-bench"
Note = Callable[[str], None]


def environment(note: Note, name: str = "gateway-peers", packages: Sequence[str] = PACKAGES) -> Path | None:
    """Returns the peers' virtual environment. Creates it if it is missing; ``None`` if that fails."""
    home = Path(os.environ.get("MEGAFLOW_HOME") or "~/.megaflow-hpc").expanduser()
    place = home / "cache" / name
    mark = place / ".complete"
    if mark.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.parent / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists():
            note(f"installing {', '.join(packages)} into {place}")
            commands: Sequence[Sequence[str]] = (
                (sys.executable, "-m", "venv", str(place)),
                (str(place / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages),
            )
            for command in commands:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    note(f"peers left out: {' '.join(command[:4])} … failed: {done.stderr.strip()[-300:]}")
                    return None
            mark.touch()
    return place


class Peer:
    """A running peer that forwards to the engine at ``engine`` (``http://127.0.0.1:PORT``)."""

    name = ""
    package = ""

    def __init__(self, place: Path, engine: str, folder: Path) -> None:
        self.port = free_port()
        self.version = _version(place, self.package)
        self._log = open(folder / f"{self.package}.log", "wb")  # noqa: SIM115
        command, extra = self.command(place, engine, folder)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "NO_PROXY": "127.0.0.1,localhost", **extra},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def command(self, place: Path, engine: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Returns the command that starts the peer, and additional variables."""
        raise NotImplementedError

    @property
    def address(self) -> tuple[str, str]:
        return f"http://127.0.0.1:{self.port}/v1", KEY

    def wait(self) -> str:
        """Waits until the peer answers a completion. Returns why it does not, or an empty text."""
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Ready?"}]}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"{self.address[0]}/chat/completions", body, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline, why = time.monotonic() + START_S, "it did not listen"
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return f"it ended with {self._process.returncode}: {self.tail()}"
            try:
                with opener.open(request, timeout=10) as answer:
                    json.load(answer)
                    return ""
            except urllib.error.HTTPError as error:
                why = f"HTTP {error.code}: {error.read()[:200].decode('utf-8', 'replace')}"
            except (OSError, ValueError) as error:
                why = repr(error)
            time.sleep(0.25)
        return f"no completion within {START_S:g} s: {why}"

    def tail(self) -> str:
        return Path(self._log.name).read_text("utf-8", "replace").strip()[-300:]

    def cpu_s(self) -> float:
        """CPU seconds of the process so far, its threads included."""
        fields = stat_fields(self._process.pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class LiteLLM(Peer):
    name = "LiteLLM proxy"
    package = "litellm"

    def command(self, place: Path, engine: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        parameters = {"model": "openai/m", "api_base": f"{engine}/v1", "api_key": "k"}
        config = {"model_list": [{"model_name": "m", "litellm_params": parameters}]}
        (folder / "litellm.json").write_text(json.dumps(config))  # JSON is YAML
        words = ["--config", str(folder / "litellm.json"), "--host", "127.0.0.1", "--port", str(self.port)]
        extra = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": KEY}
        return [str(place / "bin" / "litellm"), *words, "--telemetry", "False"], extra


class VllmRouter(Peer):
    name = "vllm-router"
    package = "vllm-router"

    def command(self, place: Path, engine: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        words = ["--worker-urls", engine, "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--prometheus-port", str(free_port()), "--log-level", "error"]
        return [str(place / "bin" / "vllm-router"), *words], {}


def _version(place: Path, package: str) -> str:
    for found in place.glob(f"lib/python3*/site-packages/{package.replace('-', '_')}-*.dist-info"):
        return found.name.removesuffix(".dist-info").rpartition("-")[2]
    return "?"


KINDS: tuple[type[Peer], ...] = (VllmRouter, LiteLLM)


def start(engine: str, folder: Path, note: Note) -> list[Peer]:
    """Yields the peers that answer. ``note`` gets the names of the others and why they do not."""
    place = environment(note)
    found: list[Peer] = []
    for kind in KINDS if place else ():
        assert place is not None
        peer = kind(place, engine, folder)
        if trouble := peer.wait():
            note(f"{peer.name} {peer.version}: left out: {trouble}")
            peer.stop()
        else:
            found.append(peer)
    return found
