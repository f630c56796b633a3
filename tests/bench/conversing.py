"""Rollouts that need no image: how many a second, their core-seconds, and the part of each process in them.

    python -m tests.bench.conversing --rollouts 4000 --slots 64

Runs one campaign of the local launcher. Its agent makes ``--turns`` calls of a scripted engine, and its tasks are
``image: none``. Core-seconds are those of every process between two instants: when a tenth and when nine tenths of the
rollouts were stored. ``--profile`` samples the stacks of the runner, and adds its parts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from megaflow_hpc.host.process import stat_fields
from tests.bench.arguments import add_count
from tests.bench.command import main
from tests.bench.figures import Figure

GOAL_PER_S = 100.0
"""Rollouts a second on two cores, of one turn."""
TASKS = """\
class Sum:
    image = "none"

    def __init__(self, a):
        self.instruction = f"What is {a} + 2?"

    @classmethod
    def instances(cls):
        return {f"sum-{a}": {"a": a} for a in range(COUNT)}

    async def score(self, sandbox, messages):
        return float(messages[-1]["content"] == "4")
"""
AGENTS = """\
import aiohttp
from shell_agent import ask

class Waits:
    def __init__(self, turns):
        self.turns = turns

    async def run(self, task, sandbox, model):
        messages = [{"role": "user", "content": task.instruction}]
        headers = {"Authorization": f"Bearer {model.api_key}"}
        timeout = aiohttp.ClientTimeout(total=3600)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, raise_for_status=True) as session:
            for _ in range(self.turns):
                body = {"model": model.model_name, "messages": messages}
                async with session.post(f"{model.base_url}/chat/completions", json=body) as response:
                    answer = (await response.json())["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Are you sure?"}]

class Blocks(Waits):
    async def run(self, task, sandbox, model):
        messages = [{"role": "user", "content": task.instruction}]
        for _ in range(self.turns):
            answer = ask(model, {"model": model.model_name, "messages": messages})["message"]["content"]
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Are you sure?"}]
"""
ROLES = {
    "megaflow_hpc.model.server": "engine's server (the model)",
    "megaflow_hpc.model.engines": "scripted engine (the model)",
    "megaflow_hpc.pod.rollout.runner": "runner: gateway, recording, score",
    "megaflow_hpc.agents.zygote": "agents' processes",
    "megaflow_hpc.pod": "rank 0: scheduling, messages, journal",
    "megaflow_hpc": "run: follows, gathers",
}
"""Module of a process → its part. The first that its command line names."""
AGENTS_PART = ROLES["megaflow_hpc.agents.zygote"]
PROFILE = """\
import atexit, collections, os, signal, sys
if "megaflow_hpc.pod.rollout.runner" in getattr(sys, "orig_argv", ()):
    counts, state = collections.Counter(), {"n": 0}
    def part(frame):
        last = ""
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if name.startswith("megaflow_hpc"):
                return name
            last = last or name.split(".")[0]
            if name.startswith("aiohttp.web"):
                return "aiohttp.web"
            frame = frame.f_back
        return last
    def sample(number, frame):
        counts[part(frame)] += 1
        state["n"] += 1
        if state["n"] % 50 == 0:
            with open(os.environ["BENCH_PROFILE"], "w") as file:
                file.write("\\n".join(f"{n} {name}" for name, n in counts.most_common()))
    signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, 0.005, 0.005)
"""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_count(parser, "--rollouts", 4000, "rollouts")
    add_count(parser, "--slots", 64, "rollouts at once")
    add_count(parser, "--turns", 1, "model calls of a rollout")
    add_count(parser, "--delay-ms", 0, "milliseconds that the engine takes for an answer", least=0)
    parser.add_argument("--blocks", action="store_true", help="the agent's calls block its process")
    parser.add_argument("--profile", action="store_true", help="sample the runner's stacks")


def campaign(folder: Path, given: argparse.Namespace) -> Path:
    """Writes the campaign."""
    (folder / "sums.py").write_text(TASKS.replace("COUNT", str(given.rollouts)))
    (folder / "asks.py").write_text(AGENTS)
    shutil.copy(Path(__file__).parents[2] / "launchers" / "learning" / "shell_agent.py", folder)
    answer = {"text": "4", "delay_s": given.delay_ms / 1000}
    (folder / "answers.yaml").write_text(yaml.safe_dump({"default": [answer]}))
    fields = {
        "name": "sums",
        "tasks": ["sums:Sum"],
        "agent": {"name": f"asks:{'Blocks' if given.blocks else 'Waits'}", "args": {"turns": given.turns}},
        "model": {"engine": "scripted", "script": "answers.yaml"},
        "slurm": {"pods": {"slots_per_rank": given.slots}},
    }
    (folder / "campaign.yaml").write_text(yaml.safe_dump(fields))
    return folder / "campaign.yaml"


class Usage:
    """Processor time and memory of a process and its descendants, by part."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._cpu_s: dict[int, tuple[str, float]] = {}
        """Process → part and processor time, with that of reaped children, as last seen."""
        self._forks: set[int] = set()
        self.peak_mb: Counter[str] = Counter()
        """Part → largest sum of proportional memory."""
        self.most: Counter[str] = Counter()
        """Part → most processes at once."""

    def look(self, memory: bool = False) -> dict[str, float]:
        """Reads every process once. Returns the part → seconds of processor time so far."""
        alive: Counter[str] = Counter()
        held: Counter[str] = Counter()
        for pid, fields in self._descendants():
            part = self._part(pid)
            if part == AGENTS_PART and self._cpu_s.get(int(fields[1]), ("",))[0] == AGENTS_PART:
                self._forks.add(pid)
            own = sum(map(int, fields[11:13])) * TICK_S
            # Forks of agents are reaped by their parent; other parents' children are seen themselves.
            reaped = sum(map(int, fields[13:15])) * TICK_S if part == AGENTS_PART else 0.0
            self._cpu_s[pid] = part, own + reaped
            alive[part] += 1
            if memory:
                held[part] += _proportional_kb(pid) / 1000
        self.most |= alive
        self.peak_mb |= held
        seconds: Counter[str] = Counter()
        for part, cpu_s in self._cpu_s.values():
            seconds[part] += cpu_s
        return dict(seconds)

    def _part(self, pid: int) -> str:
        if pid in self._cpu_s:
            return self._cpu_s[pid][0]
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            return "other"
        return next((part for module, part in ROLES.items() if any(w.startswith(module) for w in words)), "other")

    def _descendants(self) -> list[tuple[int, list[str]]]:
        every = {}
        for name in os.listdir("/proc"):
            if name.isdecimal() and (fields := stat_fields(int(name))):
                every[int(name)] = fields
        children: dict[int, list[int]] = {}
        for pid, fields in every.items():
            children.setdefault(int(fields[1]), []).append(pid)
        waiting, ours = [self._root], []
        while waiting:
            pid = waiting.pop()
            if pid in every:
                ours.append((pid, every[pid]))
            waiting += children.get(pid, ())
        for pid in self._forks - every.keys():  # counted by the zygote, which has reaped them
            self._cpu_s.pop(pid, None)
        self._forks &= every.keys()
        return ours


def _proportional_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _stored(run: Path) -> int:
    count = 0
    for file in (run / "events").glob("*.jsonl"):
        count += file.read_bytes().count(b'"event": "rollout"')
    return count


def run(given: argparse.Namespace, note: Callable[[str], None]) -> list[Figure]:
    """Runs the campaign and measures."""
    with tempfile.TemporaryDirectory(prefix="megaflow-conversing-") as name:
        folder = Path(name)
        path = campaign(folder, given)
        profile = folder / "profile"
        environment = dict(os.environ)
        if given.profile:
            (folder / "profiler").mkdir()
            (folder / "profiler" / "sitecustomize.py").write_text(PROFILE)
            environment["PYTHONPATH"] = f"{folder / 'profiler'}:{environment.get('PYTHONPATH', '')}"
            environment["BENCH_PROFILE"] = str(profile)
        command = [
            sys.executable,
            "-m",
            "megaflow_hpc",
            "run",
            str(path),
            "--launcher",
            "local",
            "--json",
            "--run-dir",
            str(folder / "run"),
        ]
        began = time.monotonic()
        with open(folder / "out", "w+") as out, open(folder / "err", "w+") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
            usage = Usage(process.pid)
            marks = _follow(process, usage, folder, given.rollouts)
            out.seek(0)
            err.seek(0)
            if process.returncode:
                raise SystemExit(err.read()[-3000:] + out.read()[-2000:])
            summary = json.loads(out.read())
        note(f"all of the campaign: {time.monotonic() - began:.1f} s; {summary['rollouts']}")
        figures = _figures(marks, usage, given)
        if given.profile:
            lines = [line.split() for line in profile.read_text().splitlines()]
            total = sum(int(n) for n, _ in lines)
            for n, module in lines[:25]:
                note(f"runner {100 * int(n) / total:5.1f} % {module}")
    return figures


Mark = tuple[float, int, Mapping[str, float]]


def _follow(process: subprocess.Popen[bytes], usage: Usage, folder: Path, count: int) -> list[Mark]:
    """Looks until the process ends. Returns the marks at a tenth and at nine tenths of the rollouts."""
    marks: list[Mark] = []
    looks = 0
    while process.poll() is None:
        time.sleep(0.1)
        looks += 1
        seconds = usage.look(memory=looks % 20 == 0)
        if len(marks) < 2 and looks % 3 == 0:
            stored = _stored(folder / "run")
            if stored >= (0.1, 0.9)[len(marks)] * count:
                marks.append((time.monotonic(), stored, seconds))
    if len(marks) < 2:
        raise SystemExit("the campaign was too short to be measured; raise --rollouts")
    return marks


def _figures(marks: list[Mark], usage: Usage, given: argparse.Namespace) -> list[Figure]:
    (at, first, before), (until, last, after) = marks
    count = last - first
    goal = GOAL_PER_S if given.turns == 1 and not given.delay_ms else None
    parts = {part: (after.get(part, 0.0) - before.get(part, 0.0)) / count * 1000 for part in after}
    whole = sum(parts.values())
    model = sum(ms for part, ms in parts.items() if "(the model)" in part)
    return [
        Figure("rollouts a second", "1/s", round(count / (until - at), 1), count, goal=goal, better="higher"),
        Figure("core-seconds of a rollout", "ms", round(whole, 2), count),
        Figure("beside the model", "ms", round(whole - model, 2), count),
        *(Figure(f"  {part}", "ms", round(ms, 2), count) for part, ms in sorted(parts.items())),
        *(Figure(f"  memory, {part}", "MB", round(mb), usage.most[part]) for part, mb in sorted(usage.peak_mb.items())),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
