"""The verb ``shell``: a rollout's sandbox made anew, a person in it, and nothing left of it however that ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

from megaflow_hpc.cli.runs.shell import _find as find_rollout
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import add_blocks
from megaflow_hpc.types import Rollout
from tests.support.campaigns import Make, forked, planned, verb

ASK_S = 60.0


@pytest.fixture
def run(make_campaign: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was planned; its sandboxes will lie in a scratch of the test's own."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path / "scratch"))
    return planned(make_campaign(1)).path


def left(run: Path) -> list[str]:
    """What sandboxes have left on scratch."""
    scratch = next((run.parents[1] / "scratch").glob("megaflow-*"))
    return [str(path) for path in (scratch / "owners").glob("*")]


def test_a_command_runs_as_the_agents_would_and_gives_its_status(run: Path) -> None:
    command = "id -un; ls -d /logs/agent; ls /sys/class/net; printf 'a\\033[1m\\377'; echo b >&2; exit 3"
    done = forked("shell", run, "task0/oracle/0", "--json", "--command", command)
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit_code"], found["id"]) == (3, 3, "task0/oracle/0")
    assert found["stdout"].splitlines()[:2] == ["root", "/logs/agent"]
    assert found["stdout"].endswith("lo\na\x1b[1m\udcff")
    assert found["stderr"].endswith("b\n")
    piped = forked("shell", run, "task0/oracle/0", "--command", "seq 20000; echo err >&2; exit 4")
    assert (piped.returncode, piped.stdout.splitlines()[-1]) == (4, "20000")
    assert piped.stderr.startswith("task0/oracle/0: starting its sandbox of ")
    assert piped.stderr.endswith("err\n")
    assert left(run) == []
    for words, said in (
        (("task0/oracle/0",), "standard input and output are not a terminal; give --command CMD"),
        (("task0/oracle/0", "--json"), "--json: only with --command"),
        (("task9/oracle/0", "--command", "true"), "'task9/oracle/0'; ids are <task>/<policy>/<sample>, such as task0/"),
        (("task0", "--command", "true"), "no rollout 'task0'"),
    ):
        refused = verb("shell", run, *words)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert said in refused.stderr


def test_the_agent_of_a_rollout_that_is_not_stored(make_campaign: Make) -> None:
    agents = "[{name: mini-swe-agent, as: one}, {name: mini-swe-agent, as: two, max_turns: 7}]"
    model = "model: {engine: scripted, script: answers.yaml}\n"
    made = planned(make_campaign(1, model, agent=agents, answers=["x"]))
    add_blocks(made.dir, [Rollout("task0", "default", 0, "two"), Rollout("task0", "default", 1, "one")], "mixed")
    for name, title in (("+two/9", "two"), ("+one/0", "one"), ("/0", "two"), ("/1", "one")):
        assert find_rollout(made.dir, made.record, f"task0/default{name}").agent.title == title
    for name in ("/2", "+three/0"):
        with pytest.raises(ConfigError, match=r"is planned, and its policy has several agents: one, two; give"):
            find_rollout(made.dir, made.record, f"task0/default{name}")


class Session:
    """``megaflow-hpc shell`` on a terminal."""

    def __init__(self, run: Path) -> None:
        self.pid, self.keys = pty.fork()
        if self.pid == 0:
            words = ["-m", "megaflow_hpc", "shell", str(run), "task0/oracle/0"]
            os.execv(sys.executable, [sys.executable, *words])
        self.seen = b""

    def reads(self, words: bytes) -> None:
        end = time.monotonic() + ASK_S
        while words not in self.seen:
            assert time.monotonic() < end, self.seen
            self.seen += os.read(self.keys, 4096)
        self.seen = self.seen.partition(words)[2]

    def ends(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.slow
def test_a_person_types_and_leaves_and_nothing_stays_whatever_ends_it(run: Path) -> None:
    for end in ("exit", "SIGTERM", "hangup"):
        session = Session(run)
        session.reads(b"# ")
        os.write(session.keys, b"sleep 600\r")
        session.reads(b"sleep 600")
        time.sleep(0.3)
        os.write(session.keys, b"\x03echo is $?\r")
        session.reads(b"is 130")
        if end == "exit":
            os.write(session.keys, b"exit 5\r")
            session.reads(b"exit")
            assert session.ends() == 5
        elif end == "SIGTERM":
            os.kill(session.pid, signal.SIGTERM)
            assert session.ends() == 143
        os.close(session.keys)
        if end == "hangup":
            assert session.ends() == 129
        assert left(run) == [], end
